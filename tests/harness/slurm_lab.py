"""The lab for tests: one real Slurm for the whole session, cleaned after each test.

A `conftest.py` that imports these fixtures has them.
"""

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from contract.run_folder import Event, RunFolder
from slurm.lab import Lab, LabSettings, processes
from slurm.lab.host import missing_commands
from slurm.render import render
from slurm.settings import JobConfig, SubmitConfig
from slurm.sites.profile import Launch, Profile

# Rank 0 "trains" one step a 0.2 s, "saves" a step by making its folder, and stops with 75 when it is asked to.
TRAINER = """#!/bin/bash
run=$1; last=$2
stop=; trap 'stop=1' TERM USR2
say() { echo "{\\"event\\": \\"$1\\", \\"time\\": 0, \\"job\\": \\"$SLURM_JOB_ID\\"}" >> "$run/events.jsonl"; }
save() { mkdir -p "$run/checkpoints/step_$step"; }
step=$(ls "$run/checkpoints" | sed 's/step_//' | sort -n | tail -n 1); step=${step:-0}
[ "$SLURM_PROCID" = 0 ] && say started
while [ "$step" -lt "$last" ]; do
  sleep 0.2
  step=$((step + 1))
  if [ -n "$stop" ]; then
    [ "$SLURM_PROCID" = 0 ] && save && say stopped
    exit 75
  fi
done
[ "$SLURM_PROCID" = 0 ] && save && say finished && touch "$run/FINISHED"
exit 0
"""

SETTINGS = LabSettings(nodes=4, cpus=2, gpus=2, grace_s=5, kill_wait_s=5, slurmd_timeout_s=5)


class SlurmLab:
    """What tests use: the lab itself (`cluster`), commands on it, and waits that have a bound.

    `environment` is complete: pass it to a subprocess as it is.
    """

    def __init__(self, cluster: Lab) -> None:
        self.cluster = cluster
        self.environment = cluster.full_environment()

    def run(self, *command: str, timeout_s: float = 30.0) -> str:
        """What a command prints; fails the test with what it said if it fails."""
        return self.cluster.run(*command, timeout_s=timeout_s)

    def submit(self, script: str, *options: str, folder: Path) -> str:
        """Queue a shell script, with its output in `folder`/<job id>.out; returns the job's id."""
        file = folder / "job.sh"
        file.write_text(f"#!/bin/bash\n{script}\n")
        output = f"--output={folder}/%j.out"
        return self.run("sbatch", "--parsable", output, "--open-mode=append", *options, str(file)).strip()

    def job(self, job_id: str) -> dict[str, str]:
        """Slurm's record of a job, ended or not: `JobState`, `NodeList`, `Restarts`, `ExitCode`, ..."""
        words = self.run("scontrol", "--oneliner", "show", "job", job_id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_state(self, job_id: str, states: set[str], timeout_s: float = 30.0) -> str:
        """Wait until a job is in one of `states`; returns which."""
        state = wait_until(lambda: (found := self.job(job_id)["JobState"]) in states and found, timeout_s)
        assert state, (
            f"job {job_id} is not {' or '.join(sorted(states))} after {timeout_s} s: {self.job(job_id)}"
        )
        return str(state)

    def wait_for_node(self, node: str, states: set[str], timeout_s: float = 60.0) -> str:
        """Wait until a node is in one of `states`, in sinfo's words without marks; returns which."""
        state = wait_until(
            lambda: (found := self.cluster.node_states()[node].rstrip("*")) in states and found, timeout_s
        )
        assert state, f"{node} is not {' or '.join(sorted(states))} after {timeout_s} s"
        return str(state)

    def on_node(self, node: str, *command: str) -> None:
        """Run a command that changes what a node sees of the file system; the change ends with the node."""
        pid = processes.daemons(self.cluster.folder)[node]
        subprocess.run(["nsenter", f"--target={pid}", "--mount", "--", *command], check=True, timeout=20)

    def processes_on(self, node: str) -> list[int]:
        """All processes of a node, as this host numbers them: slurmd, and what jobs have started."""
        slurmd = next(
            process.pid
            for process in processes.find(self.cluster.folder)
            if process.daemon == node and process.command == "slurmd"
        )
        namespace = Path(f"/proc/{slurmd}/ns/pid").readlink()
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):  # it is no process, or it has ended
                if (entry / "ns" / "pid").readlink() == namespace:
                    found.append(int(entry.name))
        return found

    def clean(self) -> None:
        """Cancel jobs that a test left, and revive nodes that it froze, crashed or took down."""
        for node in self.cluster.node_states():
            if node in self.cluster.running_nodes():
                processes.send(self.processes_on(node), signal.SIGCONT)
        if jobs := self.run("squeue", "--noheader", "--format=%A").split():
            self.run("scancel", "--quiet", *jobs)
        self.cluster.up(SETTINGS)
        for node, state in self.cluster.node_states().items():
            if state.rstrip("*") in ("down", "drained", "draining"):
                self.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
        assert wait_until(lambda: set(self.cluster.node_states().values()) == {"idle"}, 45.0), (
            f"the lab is not idle after a test: {self.cluster.status()}"
        )


def launch_shell_trainer(
    lab: SlurmLab,
    run: RunFolder,
    trainer: str,
    *arguments: object,
    time_limit: str = "00:05:00",
    **settings: Any,
) -> str:
    """Submit the rendered script of `run` with a shell script in the trainer's place; returns the job id."""
    script = run.path / "trainer.sh"
    script.write_text(trainer)
    script.chmod(0o755)
    cluster = Profile(
        name="lab", partition="low", stop_margin_s=10, launch=Launch.step, cpus_per_node=2, ranks_per_node=2
    )
    job = JobConfig(**{"nodes": 2, "time_limit": time_limit, **settings})
    text = render(run, SubmitConfig(cluster, job))
    before, _, rest = text.partition(" -m train --config ")
    assert rest
    command = shlex.join([str(script), str(run.path), *map(str, arguments)])
    run.job_script.write_text(before.rpartition("\n")[0] + f"\n  {command}\n")
    job_id = lab.run("sbatch", "--parsable", str(run.job_script)).strip()
    conf = lab.environment["SLURM_CONF"]
    run.append_event(Event.SUBMITTED, job_id=job_id, profile="lab", scheduler="slurm", slurm_conf=conf)
    return job_id


def wait_until(condition: Callable[[], object], timeout_s: float) -> object:
    """Poll until `condition` is true or the time is over; returns its last value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return value


@pytest.fixture(scope="session")
def slurm_packages() -> None:
    """Skips what needs Slurm where it is missing; fails instead where it is required."""
    missing = missing_commands()
    if not missing:
        return
    sentence = f"these tests need {', '.join(missing)}: on Debian or Ubuntu `apt-get install slurm-wlm munge`"
    if os.environ.get("TRIERARCH_REQUIRE_SLURM") == "1":
        pytest.fail(sentence)
    pytest.skip(sentence)


@pytest.fixture(scope="session")
def lab(slurm_packages: None) -> Iterator[SlurmLab]:
    _remove_leftovers()
    folder = _folder(os.getpid())
    cluster = Lab(folder)
    try:
        cluster.up(SETTINGS)
        yield SlurmLab(cluster)
    finally:
        cluster.down()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def clean_lab(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "lab" in request.fixturenames:
        request.getfixturevalue("lab").clean()


def _folder(session: int | str) -> Path:
    return Path(tempfile.gettempdir()) / f"trierarch-test-{os.getuid()}-{session}"


def _remove_leftovers() -> None:
    """End the labs of test sessions that were killed before they could."""
    pattern = _folder("*")
    for folder in pattern.parent.glob(pattern.name):
        if not Path(f"/proc/{folder.name.rsplit('-', 1)[1]}").exists():
            Lab(folder).down()
            shutil.rmtree(folder, ignore_errors=True)
