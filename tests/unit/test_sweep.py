"""A sweep's manifest and arrays: nothing is sent twice, nothing is forgotten, whatever Slurm says or does not say."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import contract.sweep
import slurm.sweeps.arrays
from contract.errors import ConfigError, UserError
from contract.run_folder import Event, RunFolder
from contract.sweep import Array, Manifest, SweepFolder, index_ranges, task_run
from slurm.client import Answer
from slurm.settings import JobConfig, SubmitConfig
from slurm.sites.profile import Profile, Scheduler
from slurm.sweeps.arrays import continue_sweep, cut_array, record_successor
from slurm.sweeps.sweep import Outcome, preview, retry, start, submit_rest
from slurm.sweeps.tasks import PlannedTask, SweepPlan
from tools.cli_sweep_plan import Request, make_plan

ENVIRONMENT = {"PATH": "/nowhere"}


class FakeSlurm:
    """Answers for a Slurm that takes every array, or fails in a chosen way; its queue is what a test says."""

    def __init__(self) -> None:
        self.sent: list[list[str]] = []
        self.queue: list[str] = []
        self.sbatch = Answer(0, "", "")
        self.takes = True
        """Whether it takes an array, whatever sbatch says."""
        self.limits = "MaxArraySize            = 1001"

    def ask(self, command: Sequence[str], environ: Mapping[str, str], timeout_s: float = 5.0) -> Answer:
        if command[0] == "scontrol":
            return Answer(0, self.limits, "")
        if command[0] == "squeue":
            return Answer(0, "".join(f"{line}\n" for line in self.queue), "")
        job_id = str(100 + len(self.sent))
        if self.takes:
            spec = next(word for word in command if word.startswith("--array="))[8:].partition("%")[0]
            self.sent.append(list(command))
            self.queue += [f"{job_id}|{task}|RUNNING|{command[-1]}" for task in indices(spec)]
        return Answer(0, f"{job_id}\n", "") if self.sbatch.code == 0 else self.sbatch


def indices(spec: str) -> list[int]:
    found: list[int] = []
    for part in spec.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    slurm_ = FakeSlurm()
    monkeypatch.setattr(slurm.sweeps.arrays, "ask", slurm_.ask)
    monkeypatch.setattr(slurm.sweeps.arrays, "_RETRY_S", 0.01)
    return slurm_


class Sweeper:
    """Starts sweeps over `seed` in one folder."""

    def __init__(self, root: Path) -> None:
        self.folder = SweepFolder(root / "sweep")
        (root / "sweep" / "code").mkdir(parents=True)

    def plan(self, *seeds: int, parallel: int | None = None, base: dict[str, Any] | None = None) -> SweepPlan:
        tasks = [
            PlannedTask(f"seed={seed}", [f"seed={seed}"], {"seed": seed}, f"seed: {seed}\n") for seed in seeds
        ]
        settings = {"seed": 1234, "loop.steps": 10, **(base or {})}
        return SweepPlan(self.folder, ["seed"], [], settings, tasks, parallel, "trierarch sweep")

    def start(self, *seeds: int, parallel: int | None = None, limit: int | None = None) -> Outcome:
        return start(self.plan(*seeds, parallel=parallel), settings(limit), environ=ENVIRONMENT)

    @property
    def manifest(self) -> Manifest:
        return self.folder.read()

    def run(self, index: int) -> RunFolder:
        return self.folder.run(self.manifest.tasks[index])


def settings(limit: int | None = None) -> SubmitConfig:
    return SubmitConfig(Profile(name="slurm", max_submit_jobs=limit), JobConfig())


@pytest.fixture
def sweeper(tmp_path: Path, fake: FakeSlurm) -> Sweeper:
    return Sweeper(tmp_path)


def submitted(run: RunFolder) -> list[str]:
    return [event["job_id"] for event in run.read_events() if event["event"] == Event.SUBMITTED]


@given(
    waiting=st.sets(st.integers(0, 60), min_size=1),
    size=st.integers(1, 12),
    tasks=st.none() | st.integers(1, 12),
    room=st.none() | st.integers(1, 12),
)
def test_arrays_hold_every_task_once_and_keep_the_limits(
    waiting: set[int], size: int, tasks: int | None, room: int | None
) -> None:
    manifest = Manifest("s", 0.0, [], [], {}, max_array_size=size, max_array_tasks=tasks, parallel=2)
    left, seen = set(waiting), []
    while left:
        array = cut_array(sorted(left), manifest, room)
        numbers = indices(array.spec.removesuffix("%2"))
        assert [number + array.offset for number in numbers] == array.tasks
        assert max(numbers) < size and min(numbers) >= 0
        assert 0 < len(numbers) <= min(limit for limit in (size, tasks, room) if limit is not None)
        seen += array.tasks
        left -= set(array.tasks)
    assert sorted(seen) == sorted(waiting)


@given(st.sets(st.integers(0, 40), min_size=1))
def test_ranges_are_read_back(numbers: set[int]) -> None:
    assert indices(index_ranges(sorted(numbers))) == sorted(numbers)


@pytest.mark.req("C12")
def test_a_sweep_is_one_array_and_each_task_a_run_of_its_own(sweeper: Sweeper, fake: FakeSlurm) -> None:
    outcome = sweeper.start(1, 2, 3, parallel=2)
    assert fake.sent == [["sbatch", "--parsable", "--array=0-2%2", str(sweeper.folder.job_script)]]
    assert "array: 100 with 3 tasks (0-2%2)" in outcome.summary()
    run = sweeper.run(1)
    assert (run.name, run.config.read_text(), submitted(run)) == ("seed=2", "seed: 2\n", ["100_1"])
    assert run.code.resolve() == sweeper.folder.code.resolve() and run.job_script.read_text()
    assert run.submit_settings.read_text() == sweeper.folder.submit_settings.read_text()
    variables = {"SLURM_ARRAY_JOB_ID": "100", "SLURM_ARRAY_TASK_ID": "1"}
    assert task_run(sweeper.folder.path, variables) == run


@pytest.mark.req("C12")
def test_it_grows_by_what_is_new_and_waits_for_its_own_throttle(sweeper: Sweeper, fake: FakeSlurm) -> None:
    sweeper.start(1, 2, parallel=1)
    outcome = sweeper.start(2, 3, 1, 4)
    assert [task.run for task in outcome.added] == ["seed=3", "seed=4"] and outcome.known == 2
    assert fake.sent[1][2:4] == ["--array=2-3%1", "--dependency=afterany:100"]
    assert "starts when 100 has ended" in outcome.summary()
    fake.queue.clear()
    sweeper.start(5)
    # What has ended needs no waiting for, and Slurm may have forgotten it.
    assert "--dependency" not in " ".join(fake.sent[2])
    assert sweeper.start(5, 1).arrays == []


@pytest.mark.req("C12")
def test_a_changed_base_is_refused(sweeper: Sweeper) -> None:
    sweeper.start(1)
    changed = sweeper.plan(1, 2, base={"loop.steps": 11, "optim.lr": 1.0})
    with pytest.raises(ConfigError, match=r"loop.steps was 10 and is 11; optim.lr was None and is 1.0"):
        start(changed, settings(), environ=ENVIRONMENT)
    assert len(sweeper.manifest.tasks) == 1


@pytest.mark.req("C12")
@pytest.mark.parametrize(
    ("first", "then", "added"),
    [
        (["seed=1,2"], ["seed=1,2"], 0),
        (["optim.lr=1e-3,1e-4"], ["optim.lr=0.001,0.0001,0.01"], 1),
        # A key that was not swept had the base's value.
        (["optim.lr=1e-3,1e-4"], ["optim.lr=1e-3,1e-4", "seed=1234,5"], 2),
        (["optim.lr=1e-3,1e-4", "seed=5"], ["optim.lr=1e-3,1e-4", "seed=5,6"], 2),
        (["optim.lr=1e-3,1e-4", "seed=5,6"], ["optim.lr=1e-3,1e-2", "seed=5"], 1),
        # One value of a swept key adds to the sweep.
        (["seed=1,2"], ["seed=3"], 1),
        (["model=llama_1m,llama_3m"], ["model=llama_3m,llama_25m"], 1),
        (["optim={lr:1e-3},{lr:1e-2}"], ["optim={lr:1e-2},{lr:1e-4}"], 1),
        # What a task's own group says counts, not the base's.
        (["model=llama_1m,llama_3m"], ["model=llama_1m,llama_3m", "model.layers=4,6"], 3),
    ],
)
def test_a_combination_is_known_by_what_it_sets(
    tmp_path: Path, fake: FakeSlurm, first: list[str], then: list[str], added: int
) -> None:
    where = ["cluster=slurm", f"run.root={tmp_path}"]
    (tmp_path / "s" / "code").mkdir(parents=True)
    for words in (first, then):
        plan, _ = make_plan_without_slurm(Request([*words, *where], name="s"))
        outcome = start(plan, settings(), environ=ENVIRONMENT)
    assert len(outcome.added) == added
    assert outcome.known == len(plan.tasks) - added


def make_plan_without_slurm(request: Request) -> tuple[SweepPlan, SubmitConfig]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slurm.settings.shutil.which", lambda name, path=None: "/bin/true")
        return make_plan(request)


@pytest.mark.req("C12")
def test_the_first_combination_that_is_wrong_is_named_before_anything_is_written(tmp_path: Path) -> None:
    where = ["cluster=slurm", f"run.root={tmp_path}"]
    for words, sentence in (
        (["model.kv_heads=2,3"], "task model.kv_heads=3: model.kv_heads=3: must divide"),
        (["parallel.micro_batch_size=8,16", "job.nodes=2"], "task parallel.micro_batch_size=16: loop.global"),
        (["run.name=a,b"], "run.name cannot be swept"),
        (["seed=1"], "nothing is swept"),
        (["seed=1,2", "job.nodes=1,2"], "job.nodes=1,2: all tasks of a sweep run with the same"),
        (["cluster=lab,slurm"], "cluster=lab,slurm: all tasks of a sweep run with the same"),
        (["seed=range(1,20000)"], "more than 10,000 combinations"),
        (["seed=1,2", "job.nodes=two"], "job.nodes: Value 'two'"),
    ):
        with pytest.raises(ConfigError) as caught:
            make_plan_without_slurm(Request([*words, *where]))
        assert sentence in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.req("C12")
def test_a_file_of_overrides_says_nothing_of_the_job(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("seed=1\nseed=2 job.nodes=2\n")
    with pytest.raises(
        ConfigError, match=r"line 'seed=2 job\.nodes=2': all tasks of a sweep run with the same"
    ):
        make_plan_without_slurm(Request(["cluster=slurm"], file=file))


@pytest.mark.parametrize("name", ["a/b", "", "..", "-x"])
def test_a_name_that_no_command_could_take_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="give a name without / that does not start with a dot or a dash"):
        make_plan_without_slurm(Request(["seed=1,2", "cluster=slurm"], name=name))


@pytest.mark.req("C12")
def test_a_dry_run_shows_what_is_new_and_writes_nothing(sweeper: Sweeper) -> None:
    assert len(preview(sweeper.plan(1, 2), settings(), ENVIRONMENT)[0]) == 2
    assert not sweeper.folder.is_sweep
    sweeper.start(1, 2)
    added, script = preview(sweeper.plan(2, 3), settings(), ENVIRONMENT)
    assert [(task.index, task.run) for task in added] == [(2, "seed=3")] and "slurm.supervise" in script
    assert len(sweeper.manifest.tasks) == 2


@pytest.mark.req("C12")
def test_without_slurm_a_sweep_is_refused(sweeper: Sweeper) -> None:
    local = SubmitConfig(Profile(name="local", scheduler=Scheduler.local), JobConfig())
    with pytest.raises(ConfigError, match="a sweep is one array job of Slurm and there is none here"):
        start(sweeper.plan(1, 2), local, environ=ENVIRONMENT)


@pytest.mark.req("C12")
def test_what_sbatch_refuses_waits_and_can_be_sent_later(sweeper: Sweeper, fake: FakeSlurm) -> None:
    fake.takes, fake.sbatch = False, Answer(1, "", "sbatch: error: QOSMaxSubmitJobPerUserLimit\n")
    with pytest.raises(
        UserError, match=r"QOSMax.*cluster.max_submit_jobs=N; `trierarch sweep submit .*2 tasks"
    ):
        sweeper.start(1, 2)
    assert sweeper.manifest.waiting == [0, 1] and submitted(sweeper.run(0)) == []
    fake.takes, fake.sbatch = True, Answer(0, "", "")
    assert submit_rest(sweeper.folder.path, settings(), environ=ENVIRONMENT).arrays[0].tasks == [0, 1]


@pytest.mark.req("C12")
@pytest.mark.parametrize("taken", [True, False])
def test_an_array_that_nobody_knows_of_is_sent_only_once(
    sweeper: Sweeper, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    fake.takes, fake.sbatch = taken, Answer(1, "", "Socket timed out on send/recv operation")
    with pytest.raises(UserError, match="nobody knows whether Slurm has taken the array 0-1"):
        sweeper.start(1, 2)
    fake.takes, fake.sbatch = True, Answer(0, "", "")
    if not taken:
        # It may still be on its way.
        with pytest.raises(UserError, match="not clear yet"):
            sweeper.start(1, 2)
        monkeypatch.setattr(slurm.sweeps.arrays, "_IN_FLIGHT_S", 0.0)
    sweeper.start(1, 2)
    assert len(fake.sent) == 1
    assert [array.job_id for array in sweeper.manifest.arrays] == ["100"]
    assert submitted(sweeper.run(1)) == ["100_1"]


@pytest.mark.req("C12")
def test_a_task_whose_sender_died_finds_its_run(
    sweeper: Sweeper, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweeper.start(1, 2)
    manifest = sweeper.manifest
    manifest.arrays[0].job_id = None
    sweeper.folder.write(manifest)
    monkeypatch.setattr(contract.sweep, "_LISTED_WITHIN_S", 0.0)
    variables = {"SLURM_ARRAY_JOB_ID": "777", "SLURM_ARRAY_TASK_ID": "1"}
    assert task_run(sweeper.folder.path, variables) == sweeper.run(1)
    assert sweeper.manifest.arrays[0].job_id == "777" and submitted(sweeper.run(0))[-1] == "777_0"
    for wrong in ({"SLURM_ARRAY_JOB_ID": "778"}, {"SLURM_ARRAY_TASK_ID": "5"}, {"SLURM_ARRAY_TASK_ID": ""}):
        with pytest.raises(UserError):
            task_run(sweeper.folder.path, variables | wrong)


@pytest.mark.req("C12")
def test_a_successor_continues_the_task_of_its_array(sweeper: Sweeper, fake: FakeSlurm) -> None:
    fake.limits = "MaxArraySize            = 2"
    sweeper.start(1, 2, 3, 4)
    assert [array.offset for array in sweeper.manifest.arrays] == [0, 2]
    record_successor(sweeper.folder.path, {"SLURM_ARRAY_JOB_ID": "101", "SLURM_ARRAY_TASK_ID": "1"}, "900")
    successor = {"SLURM_ARRAY_JOB_ID": "900", "SLURM_ARRAY_TASK_ID": "1"}
    assert task_run(sweeper.folder.path, successor).name == "seed=4"


@pytest.mark.req("C12")
def test_tasks_that_end_together_leave_none_behind(
    sweeper: Sweeper, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweeper.start(1, 2, 3, 4, limit=2)
    assert len(fake.sent) == 1 and sweeper.manifest.waiting == [2, 3]
    first, second = ({"SLURM_ARRAY_JOB_ID": "100", "SLURM_ARRAY_TASK_ID": task} for task in "01")
    # Both are still in the queue: the first leaves it to the second.
    assert continue_sweep(sweeper.folder.path, first) is None

    def first_is_gone(seconds: float) -> None:
        fake.queue[:] = [re.sub(r"^100\|0\|RUNNING", "100|0|COMPLETING", line) for line in fake.queue]

    monkeypatch.setattr("time.sleep", first_is_gone)
    said = continue_sweep(sweeper.folder.path, second)
    assert said == "sent the sweep's next tasks as 101 (2), 1 wait"
    assert sweeper.manifest.waiting == [3]


@pytest.mark.req("C12")
def test_a_manifest_that_cannot_be_read_does_not_end_a_task(sweeper: Sweeper) -> None:
    sweeper.start(1)
    assert continue_sweep(sweeper.folder.path, {}) is None
    sweeper.folder.manifest.write_text("{")
    assert "cannot be read" in str(continue_sweep(sweeper.folder.path, {}))


@pytest.mark.req("C12")
def test_retry_sends_what_ended_without_finishing(sweeper: Sweeper, fake: FakeSlurm) -> None:
    sweeper.start(1, 2, 3)
    sweeper.run(0).mark_finished()
    for index in (1, 2):
        sweeper.run(index).mark_failed("it broke")
    fake.queue.clear()
    with pytest.raises(UserError, match="task seed=1 is finished"):
        retry(sweeper.folder.path, ["seed=1"], settings(), environ=ENVIRONMENT)
    with pytest.raises(UserError, match="no task seed=9, did you mean seed=3"):
        retry(sweeper.folder.path, ["seed=9"], settings(), environ=ENVIRONMENT)
    assert retry(sweeper.folder.path, ["2"], settings(), environ=ENVIRONMENT).arrays[0].tasks == [2]
    assert not sweeper.run(2).failed.exists() and sweeper.run(1).failed.exists()
    said = retry(sweeper.folder.path, [], settings(), environ=ENVIRONMENT).summary()
    assert "1 task again" in said or "2 tasks again" in said
    assert submitted(sweeper.run(1))[-1].endswith("_1")


@pytest.mark.req("C12")
def test_nothing_is_sent_again_while_slurm_does_not_say_what_lives(
    sweeper: Sweeper, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweeper.start(1, 2)
    monkeypatch.setattr(slurm.sweeps.arrays, "ask", lambda *_, **__: Answer(1, "", "no answer"))
    with pytest.raises(UserError, match="Slurm does not say what lives of sweep sweep"):
        retry(sweeper.folder.path, [], settings(), environ=ENVIRONMENT)
    assert sweeper.manifest.waiting == []


@pytest.mark.req("C12")
def test_new_code_is_taken_when_it_is_wanted_and_nothing_runs(sweeper: Sweeper, fake: FakeSlurm) -> None:
    (sweeper.folder.code / "old").touch()
    assert re.search(r"the sweep's own code, of 20..-..-..", sweeper.start(1).summary())
    with pytest.raises(UserError, match="wait or run with its code"):
        start(sweeper.plan(2), settings(), new_code=True, environ=ENVIRONMENT)
    assert (sweeper.folder.code / "old").exists() and len(sweeper.manifest.tasks) == 1
    fake.queue.clear()
    start(sweeper.plan(2), settings(), new_code=True, environ=ENVIRONMENT)
    assert (
        not (sweeper.folder.code / "old").exists()
        and (sweeper.folder.code / "slurm/sweeps/sweep.py").exists()
    )


def test_a_manifest_of_a_newer_version_is_read() -> None:
    manifest = Manifest("s", 1.0, ["seed"], [], {}, arrays=[Array([0], 0, "0")])
    tree = json.loads(manifest.to_json()) | {"something": "new"}
    assert Manifest.from_json(json.dumps(tree)) == manifest


def test_a_run_folder_is_no_sweep(sweeper: Sweeper) -> None:
    RunFolder(sweeper.folder.path).config.write_text("seed: 1\n")
    with pytest.raises(UserError, match="is a run and no sweep"):
        sweeper.start(1, 2)
    with pytest.raises(UserError, match=r"it has no sweep\.json"):
        retry(sweeper.folder.path)
