"""How often the analysis blames the right part: simulated fabrics with planted faults, and healthy ones.

    python tests/bench/nccl_faults.py [--cases 550] [--healthy 400] [--seed 30000] [--time]

Each case draws a fabric of 8 to 512 nodes (fat trees with and without blocking, DragonFly+, rails; 1 to 8 GPUs and NICs
a node) and one fault, measures it as a job would, and analyses what was measured. Right is an analysis that names the
part, its nodes, its rail and its GPUs exactly, and nothing else. At least 98 % are wanted, and at most 1 % of healthy
fabrics with any fault. tools/nccl/simulate/cases.py says how grave the faults are.

With --time: how long the analysis takes on one core for 512, 1,024 and 4,096 nodes of 8 GPUs (under 10 s, 30 s, 300 s
are wanted of the analysis alone; all pairs for the first two, a sampled plan for the last), and what comes beside it
when a job or `trierarch nccl analyse` makes a report: reading the measurement, advice (order, all-reduce, mesh), and
writing text, page, pictures and files. Also the rounds of the plan, and the time that the job would take with rounds
of the stated length. --most-nodes leaves out larger machines.
"""

import argparse
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.nccl import analyse, reference, report
from tools.nccl.findings import Part, Symptom
from tools.nccl.parsers.any_file import gather
from tools.nccl.plan import complete, sampled
from tools.nccl.route.advice import advise
from tools.nccl.simulate.cases import KINDS, SIZES, Case, make_case
from tools.nccl.simulate.fabric import fat_tree
from tools.nccl.simulate.faults import Planted
from tools.nccl.simulate.prober import ROUND_S, Simulator
from tools.nccl.simulate.score import is_right

WANTED, FALSE_ALARMS = 0.98, 0.01
LIMITS_S = {512: 10.0, 1024: 30.0, 4096: 300.0}


def main() -> int:
    """Run, print, and return 0 when both targets are met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=50 * len(KINDS))
    parser.add_argument("--healthy", type=int, default=400)
    parser.add_argument("--seed", type=int, default=30_000)
    parser.add_argument("--most-nodes", type=int)
    parser.add_argument("--time", action="store_true")
    options = parser.parse_args()
    if options.time:
        return measure_time(options.most_nodes or max(LIMITS_S))
    sizes = tuple(size for size in SIZES if size <= (options.most_nodes or max(SIZES)))
    each = options.cases // len(KINDS)
    print(
        f"seeds {options.seed} to {options.seed + max(each, options.healthy) - 1}, {sizes[0]} to {sizes[-1]} nodes"
    )
    right, total = 0, 0
    for kind in KINDS:
        found = sum(blames(make_case(options.seed + one, kind, sizes)) for one in range(each))
        print(f"  {kind:20s} {found:4d} of {each}", flush=True)
        right, total = right + found, total + each
    alarms = sum(
        not blames(make_case(options.seed + one, "healthy", sizes)) for one in range(options.healthy)
    )
    print(f"faults attributed to the right part: {right} of {total} ({right / max(1, total):.2%})")
    print(
        f"false alarms on healthy fabrics: {alarms} of {options.healthy} ({alarms / max(1, options.healthy):.2%})"
    )
    return 0 if right >= WANTED * total and alarms <= FALSE_ALARMS * options.healthy else 1


def blames(case: Case) -> bool:
    """Return whether the analysis says just what was planted; print it where it does not."""
    measured = Simulator(case.fabric, case.planted, seed=case.seed).measure(seed=case.seed)
    findings = analyse.run(measured)
    good = is_right(case.planted[0], case.fabric, findings) if case.planted else not findings.faults
    if not good:
        names = Counter(f"{one.part} {one.symptom}" for one in findings.faults)
        fabric = case.fabric
        print(
            f"    seed {case.seed}: {case.kind} in {fabric.kind}, {fabric.nodes} nodes, {fabric.gpus_per_node} GPUs, "
            f"{fabric.nics_per_node} NICs, {case.planted}: found {dict(names)}"
        )
    return good


def measure_time(most_nodes: int) -> int:
    """Print times by the number of nodes; return 0 when the analyses are right and within their limits."""
    good = True
    for nodes, limit_s in LIMITS_S.items():
        if nodes > most_nodes:
            continue
        plan = complete(nodes, 8) if nodes <= 1024 else sampled(nodes, 8)
        budget_s = 1e9 if nodes <= 1024 else plan.time_s(2 * ROUND_S)
        planted = [
            Planted("slow node", Part.node, Symptom.slow, (nodes // 3,), left=0.7),
            Planted("slow NIC", Part.nic, Symptom.slow, (nodes // 2,), 3, left=0.6),
        ]
        simulator = Simulator(fat_tree(nodes, 8, 8, "switch", 32), planted, seed=nodes)
        measured = simulator.measure(budget_s=budget_s, seed=nodes)
        times: dict[str, float] = {}
        with tempfile.TemporaryDirectory() as name:
            file = Path(name) / "measurement.npz"
            measured.save(file)
            with timed(times, "reading"):
                found = gather([file])
            with timed(times, "analysis"):
                findings = analyse.run(found.measurement, reference=reference.of(found.measurement))
            with timed(times, "advice"):
                advice = advise(found.measurement, findings)
            with timed(times, "report"):
                report.write(Path(name) / "report", found.measurement, findings, advice)
        took_s = times["analysis"]
        parts = ", ".join(f"{key} {value:.1f} s" for key, value in times.items())
        good &= took_s < limit_s and len(findings.faults) == len(planted)
        print(
            f"{nodes} nodes of 8 GPUs: {plan.rounds} rounds ({plan.share:.1%} of all pairs of nodes), "
            f"{len(measured.exchanges)} exchanges; the job would take {simulator.clock():.0f} s with what was tested "
            f"again ({ROUND_S} s a round beside the transfers); analysis {took_s:.1f} s of {limit_s:.0f} s, "
            f"the whole {sum(times.values()):.1f} s ({parts}); "
            f"found {[one.name for one in findings.faults]}; {measured.unmeasured}",
            flush=True,
        )
    print(f"memory at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB")
    return 0 if good else 1


@contextmanager
def timed(times: dict[str, float], name: str) -> Iterator[None]:
    """Note the seconds of this process's CPU time that something takes."""
    begun = time.process_time()
    yield
    times[name] = time.process_time() - begun


if __name__ == "__main__":
    sys.exit(main())
