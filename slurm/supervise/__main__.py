"""Inside the job: see one run through, over crashes, lost nodes, pre-emption and the time limit.

    python -m slurm.supervise RUN [options] -- COMMAND...

One owner of every signal: the supervisor takes the job's signals and passes one stop request on.
"""

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from contract.errors import UserError
from contract.exit_codes import ExitCode
from contract.network_test import BROKEN_CODE
from contract.run_folder import Event, RunFolder, job_identity
from contract.sweep import SweepFolder, task_run
from slurm.supervise.agents import Agents, Plan
from slurm.supervise.alive import show_life
from slurm.supervise.deadline import MARGIN_S, Deadline, ask_slurm
from slurm.supervise.exclude import FORGET_AFTER_H, excluded_nodes
from slurm.supervise.fleet import Fleet
from slurm.supervise.health import Wishes
from slurm.supervise.nodes import Node, allocation, arranged, place_tasks
from slurm.supervise.patience import read_patiently
from slurm.supervise.placement import parse_rank_cpus
from slurm.supervise.requeue import Way, note
from slurm.supervise.start import Launcher, Start
from slurm.supervise.step import Step
from slurm.supervise.stop import STOP_SIGNALS, StopRequest
from slurm.supervise.supervisor import Policy, Supervisor, say

_OF_AGENTS = (
    "health_check",
    "gpus_per_node",
    "gpu_memory_gb",
    "master_suffix",
    "rank_cpus",
    "network_test_s",
    "network_baseline",
    "only_network_test",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Supervise; return the job's exit code."""
    given = _parse(arguments)
    stop_signal = signal.Signals[given.stop_signal]
    # The signals before anything that takes time.
    stop = StopRequest({stop_signal, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    sweep = given.run.absolute() if SweepFolder(given.run).is_sweep else None
    try:
        run = RunFolder(given.run.absolute()) if sweep is None else task_run(sweep, os.environ)
    except UserError as error:
        say(str(error))
        return error.exit_code
    job, restart = job_identity()
    begin = Start(run, job, restart, number=0)
    if sweep is not None:
        _write_to(run.logs / f"{job}.batch.log")
    before = len(read_patiently(run.read_events))
    try:
        code = _supervise(given, begin, stop, sweep)
    except UserError as error:
        note(run, Event.FAILED, reason=str(error), code=error.exit_code, by="supervisor")
        with suppress(OSError):  # the disk is full
            run.mark_failed(str(error))
        say(str(error))
        code = error.exit_code
    except Exception as error:  # a fault of ours must not leave a run without a word
        traceback.print_exc()
        reason = f"the supervisor failed ({type(error).__name__}: {error}): read {run.logs}/{job}.batch.log"
        note(run, Event.FAILED, reason=reason, code=1, by="supervisor")
        with suppress(OSError):
            run.mark_failed(reason)
        code = 1
    since = read_patiently(run.read_events)[before:]
    if sweep is not None and not any(event.get("event") == Event.REQUEUED for event in since):
        from slurm.sweeps.arrays import continue_sweep

        if said := continue_sweep(sweep, os.environ):
            say(said)
    return code


def _supervise(given: argparse.Namespace, begin: Start, stop: StopRequest, sweep: Path | None) -> int:
    run, stop_signal = begin.run, signal.Signals[given.stop_signal]
    names = arranged(allocation(os.environ), given.node_order) if given.launch == "agents" else []
    if given.launch == "step" and given.node_order is not None:
        file = run.logs / f"{begin.job}.hostfile"
        os.environ.update(
            place_tasks(arranged(allocation(os.environ), given.node_order), given.ranks_per_node, file)
        )
    way: Way | None = None
    if given.requeue != "never":
        nodes = max(len(names), given.nodes)
        way = Way(given.requeue == "slurm", nodes, given.exclude_for_h * 3600, sweep)
    launcher: Launcher
    if given.launch == "step":
        launcher = Step(run, given.command, stop, stop_signal=stop_signal, log=given.log, say=say)
    else:
        show_life(run, begin.job)
        launcher = _agents(given, begin, stop, names, way)
    if isinstance(launcher, Agents) and given.only_network_test:
        return _only_test(launcher, begin, stop)
    is_due: Callable[[], bool] = _never
    if "SLURM_JOB_ID" in os.environ:
        is_due = Deadline(run, given.stop_margin_s, partial(ask_slurm, os.environ)).is_due
    policy = Policy(given.max_restarts, given.backoff_s, way)
    return Supervisor(begin, launcher, stop, policy, is_due).supervise()


def _agents(
    given: argparse.Namespace, begin: Start, stop: StopRequest, names: list[str], way: Way | None
) -> Agents:
    """Prepare the nodes: those that failed of late are used last."""
    places = parse_rank_cpus(given.rank_cpus) if given.rank_cpus else None
    suspects = excluded_nodes(read_patiently(begin.run.read_events), for_s=given.exclude_for_h * 3600)
    nodes = [Node(name, suspicion=int(name in suspects)) for name in names]
    fleet = Fleet(
        nodes,
        [begin.fill(word) for word in given.command],
        os.environ,
        stop,
        run=begin.run,
        will=_will(begin, way, given.exclude_for_h, os.environ),
        say=say,
    )
    plan = Plan(
        nodes=given.nodes,
        ranks_per_node=given.ranks_per_node,
        master_suffix=given.master_suffix,
        bind=bool(given.rank_cpus),
        rank_cpus=places,
        health=Wishes(given.gpus_per_node, given.gpu_memory_gb) if given.health_check else None,
        network_test_s=given.network_test_s,
        network_baseline=given.network_baseline,
    )
    return Agents(fleet, plan, signal.Signals[given.stop_signal])


def _only_test(agents: Agents, begin: Start, stop: StopRequest) -> int:
    """Test the network and nothing else; the exit code is the verdict's."""

    def should_stop() -> bool:
        return stop.reason is not None

    run = begin.run
    note(run, Event.STARTED, nodes=os.environ.get("SLURM_JOB_NODELIST"))
    try:
        tested = agents.only_test_network(begin, should_stop)
    finally:
        agents.close()
    if tested.verdict is not None:
        note(run, Event.FINISHED)
        run.mark_finished()
        return max(tested.verdict.exit_code, BROKEN_CODE if tested.silent else 0)
    if stop.reason is not None:
        note(run, Event.STOPPED)
        return ExitCode.STOPPED
    reason = tested.reason
    note(
        run, Event.FAILED, code=BROKEN_CODE, reason=f"the network test did not end: {reason}", by="supervisor"
    )
    run.mark_failed(f"the network test did not end: {reason}")
    return BROKEN_CODE


def _will(
    begin: Start, way: Way | None, exclude_for_h: float, environ: Mapping[str, str]
) -> list[str] | None:
    """Return the command by which an agent brings the job back after this process was lost with its node."""
    if way is None:
        return None
    will = [
        sys.executable,
        "-u",
        "-m",
        "slurm.supervise.requeue",
        str(begin.run.path),
        f"--nodes={way.nodes}",
    ]
    will += [f"--requeue={'slurm' if way.by_slurm else 'successor'}", f"--exclude-for-h={exclude_for_h}"]
    will += [f"--lost={environ['SLURMD_NODENAME']}"] if environ.get("SLURMD_NODENAME") else []
    return will + ([f"--sweep={way.sweep}"] if way.sweep else [])


def _never() -> bool:
    return False


def _write_to(log: Path) -> None:
    """Have what this process and its launchers say appended to the run's own log."""
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError as error:
        say(f"{log} cannot be written ({error.strerror})")
        return
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; an option that the chosen way of starting ranks does not know is refused."""
    parser = _parser()
    given = parser.parse_args(arguments)
    unused = ("log",) if given.launch == "agents" else _OF_AGENTS
    for name in unused:
        if getattr(given, name) != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')} has no effect with --launch={given.launch}")
    return given


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m slurm.supervise", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("run", type=Path, help="the run folder, or a sweep's: then the run is this array task's")
    add("--launch", choices=["agents", "step"], default="agents")
    add("--nodes", type=int, default=1, help="how many train; the job's others are spares")
    add("--ranks-per-node", type=int, default=1)
    add("--max-restarts", type=int, default=3, help="crashes in a row without a new checkpoint")
    add("--backoff-s", type=float, default=2.0, help="pause before the second restart in a row")
    add("--stop-signal", default="SIGUSR2", choices=STOP_SIGNALS)
    add("--stop-margin-s", type=float, default=MARGIN_S, help="before the time limit, beside saving")
    add("--requeue", default="never", choices=["slurm", "successor", "never"])
    add(
        "--exclude-for-h", type=float, default=FORGET_AFTER_H, help="how long a failed node is kept away from"
    )
    add("--health-check", action="store_true", help="test the nodes before the first start")
    add("--gpus-per-node", type=int, help="how many the health check must find")
    add("--gpu-memory-gb", type=float, help="what each must have")
    add(
        "--network-test-s", type=float, help="measure the network before the first start, for so long at most"
    )
    add("--network-baseline", help="an earlier measurement, for the new one to be compared with")
    add("--only-network-test", action="store_true", help="and end after it")
    add("--node-order", type=Path, help="a file with node names: ranks are placed in its order")
    add("--master-suffix", default="", help="appended to rank 0's node's name")
    add("--rank-cpus", help="CPUs of each local rank as JSON, or `numa` to share them out")
    add("--log", help="with --launch=step: append the command's output here")
    add("command", nargs="+", help="after --; {node}, {run}, {job} and {attempt} are filled in")
    return parser


if __name__ == "__main__":
    sys.exit(main())
