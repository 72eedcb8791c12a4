"""What the network test finds on the NVIDIA GPUs of one host, in under five minutes, and whether it agrees with others.

    python tests/gpu/nccl_check.py [--device cuda] [--ranks N] [--budget SECONDS] [--nccl-tests FOLDER] [--out FILE]

ranks      all end well, and the measurement is whole: operations, sizes, pairs, scopes
contents   no element of any buffer was wrong, in fp32 and in bf16
exchanges  each pair's latency and bandwidth, and the slowest repetition beside the median
all-reduce bus bandwidth by size, beside that of NVIDIA's `all_reduce_perf` where it is in PATH or in --nccl-tests, or
           where its sources are there and can be built (a CUDA toolkit): no more than a fifth apart from 16 MB on
frozen     a rank that is stopped in the middle is named, and the others leave in time though their kernels hang

With one GPU there are no pairs, and operations are those of a world of one. `--device cpu` does what a CPU can of it,
with gloo. Ends with code 1 when a check fails, and with 2 when there is no GPU. `--out` gets the figures as JSON.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tools.nccl.measure.spec import Spec
from tools.nccl.measurement import Collective, Measurement

ROOT = Path(__file__).resolve().parents[2]
LARGE_BYTES = 16 << 20
APART = 0.2
"""From nccl-tests, which start many operations in a row and time them together."""
START_S = 120.0
NO_GPU = 2


class Checks:
    """What was found, and what of it is wrong."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.on_gpu = options.device == "cuda"
        self.ranks = options.ranks
        self.budget_s = options.budget
        self.sources: Path | None = options.nccl_tests
        self.folder = folder
        self.figures: dict[str, Any] = {}
        self.failed: list[str] = []

    def note(self, check: str, name: str, value: float | str, wrong: bool = False) -> None:
        """Keep and print one figure."""
        self.figures.setdefault(check, {})[name] = value
        text = f"{value:.4g}" if isinstance(value, float) else value
        print(f"{check:10} {name:44} {text}{'   FAILED' if wrong else ''}", flush=True)
        if wrong:
            self.failed.append(f"{check}: {name}")

    def start(self, spec: Spec) -> list["subprocess.Popen[str]"]:
        """Start one process a rank."""
        Path(spec.folder).mkdir(parents=True, exist_ok=True)
        path = Path(spec.folder) / "spec.json"
        spec.write(path)
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        started = []
        for rank in range(self.ranks):
            variables = {
                "RANK": rank,
                "WORLD_SIZE": self.ranks,
                "LOCAL_RANK": rank,
                "LOCAL_WORLD_SIZE": self.ranks,
                "GROUP_RANK": 0,
                "GROUP_WORLD_SIZE": 1,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
            environment |= {name: str(value) for name, value in variables.items()}
            environment |= {} if self.on_gpu else {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-m", "tools.nccl.measure", str(path)]
            started.append(subprocess.Popen(command, env=environment, cwd=ROOT, text=True))
        return started

    def spec(self, name: str, **more: Any) -> Spec:
        """What to measure, in a folder of its own; on a CPU less."""
        small = {} if self.on_gpu else {"sizes": [1 << 10, 1 << 20], "exchange_bytes": 1 << 18}
        settings = {"nodes": ["here"], "budget_s": self.budget_s, "start_timeout_s": START_S, **small, **more}
        return Spec(str(self.folder / name), **settings)

    def measure(self, check: str, spec: Spec) -> Measurement | None:
        """Measure, or note that it failed."""
        ranks = self.start(spec)
        codes = [wait(rank, START_S + 2 * spec.budget_s + spec.round_timeout_s) for rank in ranks]
        self.note("ranks", f"{check}: exit codes", " ".join(map(str, codes)), wrong=set(codes) != {0})
        return Measurement.load(Path(spec.folder) / "measurement.npz") if set(codes) == {0} else None


def wait(process: "subprocess.Popen[str]", limit_s: float) -> int | None:
    """Return the exit code, None for a process that had to be killed."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


def check_all(checks: Checks) -> None:
    """Everything in fp32: whole, right, and as fast as nccl-tests say."""
    found = checks.measure("fp32", checks.spec("fp32"))
    if found is None:
        return
    backend = "nccl" if checks.on_gpu else "gloo"
    checks.note("ranks", "backend", found.backend, wrong=found.backend != backend)
    kinds = {one.operation for one in found.collectives}
    expected = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "sendrecv"}
    checks.note("ranks", "operations", " ".join(sorted(kinds)), wrong=kinds != expected)
    checks.note("ranks", "seconds", float(found.about["seconds"]))
    for sentence in found.unmeasured:
        checks.note("ranks", "not measured", sentence)
    check_contents(checks, "fp32", found)
    check_exchanges(checks, found)
    check_all_reduce(checks, found)


def check_types(checks: Checks) -> None:
    """The same in bf16, briefly: contents are exact."""
    found = checks.measure(
        "bf16", checks.spec("bf16", dtype="bfloat16", sizes=[1 << 10, 1 << 20], budget_s=20.0)
    )
    if found is not None:
        check_contents(checks, "bf16", found)


def check_contents(checks: Checks, name: str, found: Measurement) -> None:
    """No wrong element anywhere."""
    wrong = sum(one.wrong for one in found.collectives)
    checks.note("contents", f"{name}: wrong elements, operations", float(wrong), wrong=wrong > 0)
    exchanged = int(found.exchanges.wrong.sum())
    checks.note("contents", f"{name}: wrong elements, exchanges", float(exchanged), wrong=exchanged > 0)


def check_exchanges(checks: Checks, found: Measurement) -> None:
    """All pairs are there, with an answer."""
    rows = found.exchanges
    pairs = {tuple(sorted(pair)) for pair in zip(rows.first.tolist(), rows.second.tolist(), strict=True)}
    count = checks.ranks * (checks.ranks - 1) // 2
    checks.note("exchanges", "pairs", float(len(pairs)), wrong=len(pairs) != count)
    for place in range(len(rows)):
        name = f"{rows.first[place]} - {rows.second[place]}, round {rows.round[place]}"
        latency_us, gb_s = rows.latency_s[place] * 1e6, rows.bandwidth[place] / 1e9
        slowest = rows.slowest[place] / 1e9
        text = f"{latency_us:.1f} us, {gb_s:.3g} GB/s each way, slowest {slowest:.3g}"
        checks.note("exchanges", name, text, wrong=not (latency_us > 0 and gb_s > 0))


def check_all_reduce(checks: Checks, found: Measurement) -> None:
    """Bus bandwidth by size; beside nccl-tests where there are."""
    program = all_reduce_perf(checks)
    theirs = run_all_reduce_perf(checks, program) if program else {}
    rows = [one for one in found.collectives if one.operation == "all_reduce" and one.scope == "world"]
    for one in rows:
        other = theirs.get(one.size_bytes)
        text = f"{one.time_s * 1e6:.1f} us, {measure_of(one) / 1e9:.4g} GB/s"
        off = 0.0
        if other is not None:
            off = measure_of(one) / other - 1
            text += f", nccl-tests {other / 1e9:.4g} GB/s ({off:+.0%})"
        too_far = one.size_bytes >= LARGE_BYTES and abs(off) > APART
        checks.note("all-reduce", f"{one.algorithm} {one.size_bytes:,} bytes", text, wrong=too_far)


def measure_of(one: Collective) -> float:
    """Bus bandwidth, and for a single rank what it copies."""
    return one.busbw or one.algbw


def all_reduce_perf(checks: Checks) -> str | None:
    """Find or build NVIDIA's program; None, said aloud, where there is no way."""
    if not checks.on_gpu or checks.ranks < 2:
        checks.note("all-reduce", "nccl-tests", "not compared: they need two GPUs")
        return None
    found = shutil.which("all_reduce_perf")
    if found is None and checks.sources is not None:
        built = checks.sources / "build" / "all_reduce_perf"
        if not built.exists():
            subprocess.run(["make", "-j8", "-C", str(checks.sources)], check=False, timeout=240)
        found = str(built) if built.exists() else None
    if found is None:
        checks.note("all-reduce", "nccl-tests", "not compared: no all_reduce_perf in PATH, and none to build")
    return found


def run_all_reduce_perf(checks: Checks, program: str) -> dict[int, float]:
    """Return its bus bandwidth in place by size, in bytes a second."""
    command = [program, "-b", "1K", "-e", "4G", "-f", "4", "-g", str(checks.ranks)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    found = {}
    for line in done.stdout.splitlines():
        words = line.split()
        # size count type redop root, then time algbw busbw #wrong out of place, and the same in place
        if len(words) >= 12 and words[0].isdigit() and words[2] == "float":
            found[int(words[0])] = float(words[11]) * 1e9
    checks.note("all-reduce", "nccl-tests: exit code", str(done.returncode), wrong=done.returncode != 0)
    return found


def check_frozen(checks: Checks) -> None:
    """Stop the last rank among its exchanges or operations; the others must leave with 76 and name it."""
    if checks.ranks < 2:
        checks.note("frozen", "not tried", "one rank waits for nobody")
        return
    spec = checks.spec("frozen", round_timeout_s=10.0, roll_call_s=3.0, budget_s=120.0)
    ranks = checks.start(spec)
    progress = Path(spec.folder) / "progress.json"
    deadline = time.monotonic() + START_S
    while not (progress.exists() and '"collectives"' in progress.read_text()) and time.monotonic() < deadline:
        time.sleep(0.2)
    victim = len(ranks) - 1
    ranks[victim].send_signal(signal.SIGSTOP)
    began_s = time.monotonic()
    codes = [wait(rank, 60.0) for rank in ranks[:-1]]
    took_s = time.monotonic() - began_s
    ranks[victim].kill()
    ranks[victim].wait()
    checks.note("frozen", "exit codes of the others", " ".join(map(str, codes)), wrong=set(codes) != {76})
    checks.note("frozen", "seconds until they left", took_s)
    named = [
        json.loads((Path(spec.folder) / f"waited.{rank}.json").read_text())["silent"]
        for rank in range(victim)
        if (Path(spec.folder) / f"waited.{rank}.json").exists()
    ]
    checks.note("frozen", "named", str(named), wrong=named != [[victim]] * victim)


def main() -> None:
    """Run all and say what failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=int, help="one a GPU by default; 2 on a CPU")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for the measurement in fp32")
    parser.add_argument("--nccl-tests", type=Path, help="folder with the sources of nccl-tests")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.device == "cuda":
        import torch

        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if gpus == 0:
            print("there is no GPU that torch can use here: give --device cpu to try the script itself")
            sys.exit(NO_GPU)
        options.ranks = options.ranks or gpus
        version = ".".join(map(str, torch.cuda.nccl.version()))
        print(f"{options.ranks} x {torch.cuda.get_device_name()}, torch {torch.__version__}, NCCL {version}")
    options.ranks = options.ranks or 2
    with tempfile.TemporaryDirectory() as name:
        checks = Checks(options, Path(name))
        try:
            for check in (check_all, check_types, check_frozen):
                check(checks)
        finally:
            if options.out is not None:
                options.out.write_text(json.dumps(checks.figures, indent=1))
    print("failed: " + "; ".join(checks.failed) if checks.failed else "all checks passed")
    sys.exit(bool(checks.failed))


if __name__ == "__main__":
    main()
