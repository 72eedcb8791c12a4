"""Time from a pre-emption to the first step after the resume, on the lab (2 nodes x 2 ranks).

    python tests/bench/resume_time.py

Needs Slurm's programs. The parts are told apart by the run's own events; the queue's share (the job of higher
priority, and Slurm's delay before a requeued job may start again) is not ours.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `harness`

from harness.command import COMMAND, wait_until
from harness.toy import LOOP, MODEL, QUIET, REST
from harness.toy_text import write_toy_text

from contract.run_folder import Event, RunFolder, last_json_line
from slurm.lab import Lab, LabSettings
from train.data.prepare import prepare


def main() -> None:
    """Pre-empt a run once and print how long each part took."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare([write_toy_text(folder / "text")], folder / "toy", workers=1)
        lab = Lab(folder / "lab")
        lab.up(LabSettings(nodes=2, grace_s=10))
        try:
            measure(lab, folder)
        finally:
            lab.down()


def measure(lab: Lab, folder: Path) -> None:
    """Submit, pre-empt, wait for the first step after the resume."""
    run = RunFolder(folder / "run")
    toy = [
        *MODEL,
        *LOOP,
        *REST,
        *QUIET,
        f"data.prefix={folder / 'toy'}",
        f"run.root={folder}",
        "run.name=run",
    ]
    job = ["cluster=lab", "job.nodes=2", "job.ranks_per_node=2"]
    command = [*COMMAND, "submit", *toy, "loop.steps=100000", *job]
    subprocess.run(command, check=True, env=lab.full_environment(), stdout=subprocess.DEVNULL)
    wait_until("the first steps", lambda: (last_json_line(run.metrics) or {}).get("step", 0) > 20, 120)
    preempted_s = time.time()
    lab.run("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")
    wait_until("the resume", lambda: Event.RESUMED in times(run), 120)
    resumed_step = next(line["step"] for line in run.read_events() if line["event"] == Event.RESUMED)
    wait_until(
        "a step after it", lambda: (last_json_line(run.metrics) or {}).get("step", 0) > resumed_step, 60
    )
    first_step_s = time.time()
    at = times(run)
    parts = {
        "job of higher priority queued -> ranks have agreed": at[Event.STOP_REQUESTED] - preempted_s,
        "ranks have agreed -> checkpoint published": at[Event.SAVED] - at[Event.STOP_REQUESTED],
        "checkpoint published -> requeue asked for": at[Event.REQUEUED] - at[Event.SAVED],
        "requeue asked for -> trainer set up again (queue, imports)": at[Event.STARTED] - at[Event.REQUEUED],
        "trainer set up again -> first step": first_step_s - at[Event.STARTED],
        "all of it": first_step_s - preempted_s,
    }
    for name, seconds in parts.items():
        print(f"{name:60} {seconds:6.2f} s")


def times(run: RunFolder) -> dict[str, float]:
    """Newest time of each event; of the starts the one after the requeue."""
    return {line["event"]: line["time"] for line in run.read_events() if line["event"] != Event.SAVED} | {
        Event.SAVED: next((line["time"] for line in run.read_events() if line["event"] == Event.SAVED), 0.0)
    }


if __name__ == "__main__":
    main()
