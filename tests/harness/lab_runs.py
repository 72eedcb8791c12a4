"""Real trainings on the lab: submitted as a user does, found as processes, compared with an undisturbed one.

A `conftest.py` that imports these fixtures has them.
"""

import subprocess
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from contract.run_folder import Event, RunFolder, last_json_line, read_json_lines
from slurm.runs.status import RunState, RunStatus, status

from .command import COMMAND, wait_until
from .slurm_lab import SlurmLab
from .toy import LOOP, MODEL, QUIET, REST

STEPS = 200
"""Of every run here: the learning rate, and so the weights, depend on it."""
JOB = ["cluster=lab", "job.nodes=2", "job.ranks_per_node=2", "job.time_limit=00:05:00"]
"""Four ranks, for the weights also depend on how many there are."""
NO_HOPE = (RunState.failed, RunState.lost, RunState.stopped)


class Runs:
    """Toy runs of one folder."""

    def __init__(self, lab: SlurmLab, root: Path, tokens: Path) -> None:
        self.lab, self.root, self.tokens = lab, root, tokens

    def overrides(self, name: str) -> list[str]:
        """The settings of a run without its job."""
        where = [f"data.prefix={self.tokens}", f"run.root={self.root}", f"run.name={name}"]
        return [*MODEL, *LOOP, *REST, *QUIET, *where, f"loop.steps={STEPS}"]

    def submit(self, name: str, *more: str) -> "subprocess.CompletedProcess[str]":
        """Run `trierarch submit` with `more` settings."""
        return subprocess.run(
            [*COMMAND, "submit", *self.overrides(name), *JOB, *more],
            env=self.lab.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def start(self, name: str, *more: str) -> RunFolder:
        """Submit a run that is taken; it saves every 20 steps."""
        done = self.submit(name, "checkpoint.every_steps=20", *more)
        assert done.returncode == 0, done.stderr
        return self.folder(name)

    def crowded(self) -> str:
        """A setting by which a job asks for one core of each node, however many ranks are to share it."""
        template = self.root / "crowded.sbatch.j2"
        template.write_text(
            '{% extends "job.sbatch.j2" %}\n'
            "{% block options %}{{ super() }}#SBATCH --ntasks-per-node=1\n{% endblock %}\n"
        )
        return f"job.template={template}"

    def folder(self, name: str) -> RunFolder:
        """The run folder of a name."""
        return RunFolder(self.root / name)

    def job(self, name: str) -> str:
        """The job that a run was submitted as last."""
        return str(events(self.folder(name), Event.SUBMITTED)[-1]["job_id"])

    def state(self, name: str) -> RunStatus:
        """What `trierarch status` knows of a run."""
        (one,) = status(self.root / name)
        return one

    def nodes(self, name: str) -> list[str]:
        """The nodes of a run's job."""
        return self.lab.run("scontrol", "show", "hostnames", self.lab.job(self.job(name))["NodeList"]).split()

    def wait_for(self, name: str, state: RunState, timeout_s: float = 90) -> RunStatus:
        """Wait until a run is in a state; fails at once when it has come to an end in another."""

        def come() -> bool:
            seen = self.state(name)
            assert seen.state in (state, *LIVE), (seen, told(self.folder(name)), self.logs(name))
            return seen.state == state

        try:
            wait_until(f"{name} to be {state}", come, timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.state(name)}, {self.logs(name)}") from None
        return self.state(name)

    def wait_for_progress(self, run: RunFolder, timeout_s: float = 180) -> None:
        """Wait for a checkpoint newer than all that there are now, and for a step after it."""
        newest = max(run.published_steps(), default=0)
        wait_until(
            f"progress of {run.name} after step {newest}: {told(run)}",
            lambda: max(run.published_steps(), default=0) > newest,
            timeout_s,
        )
        self.wait_for_step(run, max(run.published_steps()) + 1, timeout_s)

    def wait_for_step(self, run: RunFolder, step: int = 30, timeout_s: float = 180) -> None:
        """Wait until a run has trained a step, and so has a checkpoint."""

        def come() -> bool:
            assert not run.failed.exists(), (run.failed.read_text(), self.logs(run.name))
            return (last_json_line(run.metrics) or {}).get("step", 0) >= step

        wait_until(f"step {step} of {run.name}", come, timeout_s)

    def logs(self, name: str) -> str:
        """All logs of a run, for the message of a test that fails."""
        logs = sorted(self.folder(name).logs.glob("*.log"))
        return "\n".join(f"== {path.name}\n{path.read_text()}" for path in logs)


LIVE = [state for state in RunState if state.is_live]


def events(run: RunFolder, *kinds: Event) -> list[dict[str, Any]]:
    """The events of some kinds."""
    return [event for event in run.read_events() if event["event"] in kinds]


def told(run: RunFolder, without: Collection[Event] = (Event.SAVED, Event.SUBMITTED)) -> list[str]:
    """The kinds of all events, in order."""
    return [event["event"] for event in run.read_events() if event["event"] not in without]


def ranks(run: RunFolder) -> dict[int, int]:
    """The process, as this host numbers it, of each living rank: what writes into a rank's log."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            log = (entry / "fd" / "1").readlink()
        except OSError:  # it is no process, or it has ended
            continue
        rank = log.stem.rpartition(".")[2]
        if log.parent == run.logs and rank.isdecimal():
            found[int(rank)] = int(entry.name)
    return found


def parent(pid: int) -> int:
    """The process that has started a process: a rank's is its node's agent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def node_of(pid: int) -> str:
    """The node that a process of a job runs on."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    prefix = b"SLURMD_NODENAME="
    return next(variable[len(prefix) :].decode() for variable in variables if variable.startswith(prefix))


def weights(run: RunFolder) -> dict[str, torch.Tensor]:
    """The newest weights of a run."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "weights.pt"
        dcp_to_torch_save(run.checkpoints / f"step_{max(run.published_steps())}", file)
        model: dict[str, torch.Tensor] = torch.load(file, weights_only=True)["model"]
    return model


def assert_same_result(one: RunFolder, other: RunFolder, last: int = STEPS) -> None:
    """Both runs have finished: each step up to `last` was recorded once, and the weights are equal to the bit."""
    for run in (one, other):
        assert run.finished.exists()
        steps = [line["step"] for line in read_json_lines(run.metrics) if "loss" in line]
        assert steps == list(range(1, last + 1)), run.path
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.fixture(scope="session")
def runs(lab: SlurmLab, tmp_path_factory: pytest.TempPathFactory, toy_tokens: Path) -> Runs:
    return Runs(lab, tmp_path_factory.mktemp("runs"), toy_tokens)


@pytest.fixture(scope="session")
def undisturbed(runs: Runs) -> RunFolder:
    """A run on 2 nodes x 2 ranks that nothing happens to; what `status` says of it on its way is checked too."""
    done = runs.submit("undisturbed", "job.health_check=false")
    assert done.returncode == 0, done.stderr
    assert f"job {runs.job('undisturbed')} on lab" in done.stdout
    assert runs.state("undisturbed").state in (RunState.queued, RunState.running)
    runs.wait_for_step(runs.folder("undisturbed"), 1)
    seen = runs.state("undisturbed")
    assert (seen.state, seen.steps) == (RunState.running, STEPS)
    runs.wait_for("undisturbed", RunState.finished)
    return runs.folder("undisturbed")
