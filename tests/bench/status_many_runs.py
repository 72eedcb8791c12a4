"""Time and memory of `trierarch status` with many runs on disk: whole process, warm; 10,000 runs in under 2 s.

    python tests/bench/status_many_runs.py [--runs 10000] [--live 300] [--rounds 3]

Set against a bare loop that lists every run folder and reads its events and configuration, in the same run.
Slurm is a stand-in that answers at once.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `harness`

from harness.programs import write_program

COMMAND = [str(Path(sys.executable).with_name("trierarch"))]
BARE = """
import os, sys
with os.scandir(sys.argv[1]) as entries:
    for entry in entries:
        with os.scandir(entry.path) as inside:
            names = [one.name for one in inside]
        for name in ("events.jsonl", "config.yaml"):
            with open(f"{entry.path}/{name}", "rb") as file:
                file.read()
"""
CONFIG = "seed: 1\n" + "".join(f"section_{n}:\n  key: value\n" for n in range(30)) + "loop:\n  steps: 5000\n"


def main() -> None:
    """Build the folders, time both, print medians and the largest resident memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--live", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build(folder, options.runs, options.live)
        environ = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
        cases = {
            "bare loop": [sys.executable, "-c", BARE, "runs"],
            "trierarch status": [*COMMAND, "status", "runs"],
            "trierarch status --json": [*COMMAND, "status", "--json", "runs"],
        }
        print(f"{options.runs} runs on disk, {options.live} of them live")
        for title, command in cases.items():
            measured = [measure(command, folder, environ) for _ in range(options.rounds + 1)][1:]
            seconds, cpu_s, memory_mb = (statistics.median(column) for column in zip(*measured, strict=True))
            print(f"{title:24} median {seconds:.2f} s ({cpu_s:.2f} s of them on the CPU), {memory_mb:.0f} MB")


def build(folder: Path, runs: int, live: int) -> None:
    """Write run folders as a trainer leaves them, and a squeue that knows the live ones."""
    (folder / "bin").mkdir()
    for index in range(runs):
        run = folder / "runs" / f"run-{index:05}"
        for part in ("logs", "tb", "heartbeat", "checkpoints/step_5000", "checkpoints/step_4000"):
            (run / part).mkdir(parents=True)
        (run / "config.yaml").write_text(CONFIG)
        job = str(1000 + index)
        events = [{"event": "submitted", "time": 0, "job": "local", "job_id": job, "scheduler": "slurm"}]
        events += [{"event": "started", "time": 0, "job": job, "restart": 0}]
        events += [{"event": "saved", "time": 0, "job": job, "restart": 0, "step": n} for n in range(20)]
        if index >= live:
            events += [{"event": "finished", "time": 0, "job": job, "restart": 0, "step": 5000}]
            (run / "FINISHED").touch()
        else:
            (run / "heartbeat" / "rank0").touch()
        write_lines(run / "events.jsonl", events)
        metrics = [
            {"step": step, "loss": 3.14159 + step, "grad_norm": 1.0, "lr": 1e-3, "step_time_s": 0.25}
            for step in range(100)
        ]
        write_lines(run / "metrics.jsonl", metrics)
    queue = "".join(f"{1000 + index}|RUNNING|None|0:10|\n" for index in range(live))
    (folder / "queue").write_text(queue)
    for command, body in (("squeue", f"cat {folder}/queue"), ("sacct", "exit 1")):
        write_program(folder / "bin" / command, body)


def write_lines(path: Path, lines: list[dict[str, object]]) -> None:
    """Write JSON lines."""
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def measure(command: list[str], folder: Path, environ: dict[str, str]) -> tuple[float, float, float]:
    """Run a command in `folder`; return its seconds, those on the CPU, and its largest resident memory in MB."""
    started_s = time.perf_counter()
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.execvpe(command[0], command, environ)
    _, code, usage = os.wait4(child, 0)
    assert code == 0, command
    return time.perf_counter() - started_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


if __name__ == "__main__":
    main()
