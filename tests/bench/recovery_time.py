"""Time from the death of a rank (kill -9) to the next training step, of four ranks of a small model.

    python tests/bench/recovery_time.py

On the lab (2 nodes x 2 ranks) with agents and with one srun for all ranks, and, in the same run, torchrun restarting
the same trainer on this host. Needs Slurm's programs. Medians of several kills, each after a checkpoint; split into

    detection   kill -> the supervisor knows
    teardown    -> no rank is left
    start       -> ranks that have found each other, built the model and read the checkpoint
    restore     of that: reading the checkpoint
    first step  -> the next line in metrics.jsonl
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `harness`

from harness.agent import write_run
from harness.command import wait_until
from harness.lab_runs import Runs, events, ranks
from harness.slurm_lab import SlurmLab
from harness.toy_text import write_toy_text

from contract.run_folder import Event, RunFolder, last_json_line
from slurm.lab import Lab, LabSettings
from train.data.prepare import prepare

KILLS = {"agents": 7, "step": 3, "torchrun": 3}
VICTIM = 3
"""The rank that is killed."""
ENDLESS = ["loop.steps=1000000", "checkpoint.every_steps=50"]
TORCHRUN = [
    *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=4", "--max-restarts=3"),
    *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "-m", "train", "--config"),
]
# Without it the restarted ranks meet in a store that still holds the addresses of the dead ones.
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}


@dataclass
class Parts:
    """Seconds of each part, one entry a kill; a part that nobody tells stays empty."""

    detection: list[float] = field(default_factory=list)
    teardown: list[float] = field(default_factory=list)
    start: list[float] = field(default_factory=list)
    restore: list[float] = field(default_factory=list)
    first_step: list[float] = field(default_factory=list)
    all_of_it: list[float] = field(default_factory=list)


def main() -> None:
    """Measure all three and print them."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare([write_toy_text(folder / "text")], folder / "toy", workers=1)
        lab = Lab(folder / "lab")
        lab.up(LabSettings(nodes=2))
        try:
            runs = Runs(SlurmLab(lab), folder / "runs", folder / "toy")
            found = {
                "agents": of_job(runs, "agents", lambda run: ranks(run)[VICTIM]),
                "step": of_job(runs, "step", lambda run: rank_of_step(run, VICTIM)),
            }
        finally:
            lab.down()
        found["torchrun"] = of_torchrun(runs)
    report(found)


def of_job(runs: Runs, launch: str, victim: Callable[[RunFolder], int]) -> Parts:
    """Submit a run and kill a rank of it several times."""
    done = runs.submit(launch, *ENDLESS, f"job.launch={launch}")
    assert done.returncode == 0, done.stderr
    parts = Parts()
    run = runs.folder(launch)
    for _ in range(KILLS[launch]):
        measure(run, victim, parts)
    runs.lab.run("scancel", runs.job(launch))
    wait_until("the job to end", lambda: runs.lab.run("squeue", "--noheader") == "")
    return parts


def of_torchrun(runs: Runs) -> Parts:
    """Have torchrun train, and kill a rank several times."""
    run = write_run([*runs.overrides("torchrun"), *ENDLESS])
    parts = Parts()
    process = subprocess.Popen(
        [*TORCHRUN, str(run.config)],
        env=os.environ | OWN_STORE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        for _ in range(KILLS["torchrun"]):
            measure(run, lambda run: children(process.pid)[VICTIM], parts)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
    return parts


def measure(run: RunFolder, victim: Callable[[RunFolder], int], parts: Parts) -> None:
    """Kill a rank once after the next checkpoint, and wait for the next step."""
    saved = max(run.published_steps(), default=0)
    wait_until("a checkpoint", lambda: max(run.published_steps(), default=0) > saved, 120)
    saved = max(run.published_steps())
    wait_until("a step after it", lambda: last_step(run) > saved)
    pid, resumes = victim(run), len(events(run, Event.RESUMED))
    killed_s = time.time()
    os.kill(pid, signal.SIGKILL)
    wait_until("the resume", lambda: len(events(run, Event.RESUMED)) > resumes, 120)
    resumed = events(run, Event.RESUMED)[-1]
    while last_step(run) <= int(resumed["step"]):
        time.sleep(0.005)
    stepped_s = time.time()
    parts.all_of_it.append(stepped_s - killed_s)
    parts.first_step.append(stepped_s - resumed["time"])
    parts.restore.append(resumed["load_s"])
    restarted = events(run, Event.RESTARTED)
    if restarted:  # torchrun tells nobody
        gone_s = restarted[-1]["detected"] + restarted[-1]["teardown_s"]
        parts.detection.append(restarted[-1]["detected"] - killed_s)
        parts.teardown.append(restarted[-1]["teardown_s"])
        parts.start.append(resumed["time"] - gone_s)


def report(found: dict[str, Parts]) -> None:
    """Print the medians."""
    names = list(vars(Parts()))
    print(f"{'median, s':10}" + "".join(f"{name.replace('_', ' '):>12}" for name in names))
    for way, parts in found.items():
        values = [getattr(parts, name) for name in names]
        cells = [f"{statistics.median(value):12.2f}" if value else f"{'-':>12}" for value in values]
        print(f"{way:10}" + "".join(cells) + f"   of {len(parts.all_of_it)}")
    ours, theirs = (statistics.median(found[way].all_of_it) for way in ("agents", "torchrun"))
    print(f"agents: {ours / theirs:.2f} of torchrun's time")


def last_step(run: RunFolder) -> int:
    """The step that was recorded last."""
    return int((last_json_line(run.metrics) or {}).get("step", 0))


def rank_of_step(run: RunFolder, rank: int) -> int:
    """The process of a rank that srun has started."""
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # it is no process, or it has ended
            continue
        mine = words[2:4] == [b"-m", b"train"] and words[5] == str(run.config).encode()
        if mine and f"SLURM_PROCID={rank}".encode() in variables:
            return int(entry.name)
    raise LookupError(f"rank {rank} of {run.path} does not run")


def children(pid: int) -> list[int]:
    """The children of a process, in the order in which they were started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


if __name__ == "__main__":
    main()
