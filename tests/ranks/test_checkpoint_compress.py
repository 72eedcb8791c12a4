"""Steps that are compressed after they were published: restored bit for bit, whatever becomes of their parents."""

import json
import math
import shutil
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from harness.disks import small_disk
from harness.pool import Ranks
from harness.toy import toy_overrides, train_toy

from contract.errors import ConfigError, PeerError
from contract.exit_codes import ExitCode
from contract.run_folder import Event, RunFolder, read_json_lines
from train.checkpoint import compressing, flight, store
from train.checkpoint.compress import step as step_module
from train.checkpoint.compress.plan import Job, Wish
from train.checkpoint.compressing import Compression
from train.checkpoint.manifest import Manifest, parse_manifest
from train.checkpoint.reader import damage
from train.resilience.pulse import Phase

pytestmark = pytest.mark.slow

COMMON = ["checkpoint.every_steps=1", "loop.eval_batches=0"]
DELTA = [*COMMON, "checkpoint.compress=delta"]


def train_unhurried(overrides: list[str]) -> ExitCode:
    """Train, and wait for what is being compressed: steps of a toy take less time than that."""
    with mock.patch.object(Compression, "hurry"):
        return train_toy(overrides)


def manifests(run: RunFolder) -> dict[int, Manifest]:
    assert not any(damage(run.checkpoints / f"step_{step}") for step in run.published_steps())
    return {step: parse_manifest(run.checkpoints / f"step_{step}") for step in run.published_steps()}


def told(run: RunFolder, kind: Event) -> list[dict[str, Any]]:
    return [event for event in run.read_events() if event["event"] == kind]


@pytest.mark.req("A15")
@pytest.mark.parametrize(("size", "layout"), [(2, "zero=3"), (4, "tp=2 pp=2")])
def test_a_run_goes_on_from_a_delta_as_from_a_plain_step(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path, size: int, layout: str
) -> None:
    """Every step of a chain holds what the plain one does, and another layout continues from any of them."""
    settings = ["loop.steps=6", *(f"parallel.{one}" for one in layout.split())]
    kept = ["checkpoint.keep_last=0", "checkpoint.delta_chain=2"]
    overrides = toy_overrides(toy_tokens, tmp_path, "delta", *DELTA, *settings, *kept)
    assert ranks(size, train_unhurried, overrides) == [ExitCode.FINISHED] * size
    plain = toy_overrides(toy_tokens, tmp_path, "plain", *COMMON, *settings, "checkpoint.keep_last=0")
    assert ranks(size, train_toy, plain) == [ExitCode.FINISHED] * size
    run, other = RunFolder(tmp_path / "delta"), RunFolder(tmp_path / "plain")
    found, expected = manifests(run), manifests(other)
    for step in found:
        assert found[step].tensors == expected[step].tensors, step
    assert [bool(one.compressed) for one in found.values()] == [True] * 6
    assert [one.parent for one in found.values()] == [None, "step_1", "step_2", None, "step_4", "step_5"]
    events = told(run, Event.COMPRESSED)
    assert [(one["step"], one.get("parent")) for one in events] == [
        (1, None),
        (2, 1),
        (3, 2),
        (4, None),
        (5, 4),
        (6, 5),
    ]
    assert all(0.3 < one["share"] < 1 for one in events)
    # The newest one that is left is the second of a chain.
    for folder in (run, other):
        shutil.rmtree(folder.checkpoints / "step_6")
    again = ["loop.steps=8", "parallel.zero=1", "checkpoint.every_steps=0", "checkpoint.compress=none"]
    for folder in (run, other):
        more = toy_overrides(toy_tokens, tmp_path, folder.name, *COMMON, *again, "checkpoint.keep_last=0")
        assert ranks(2, train_toy, more) == [ExitCode.FINISHED] * 2
    resumed = told(run, Event.RESUMED)[-1]
    assert resumed["step"] == 5
    phases = resumed["phases"]
    assert (
        phases["read_bytes"]
        >= 12
        * sum(math.prod(one["shape"]) for name, one in found[5].tensors.items() if name.startswith("model."))
        / 2
    )
    assert 0 < sum(value for name, value in phases.items() if name.endswith("_s")) <= resumed["load_s"] + 0.01
    last = [parse_manifest(one.checkpoints / "step_8") for one in (run, other)]
    weights = [{name: one.tensors[name] for name in one.tensors if name[:4] != "rng."} for one in last]
    assert weights[0] == weights[1]


@pytest.mark.req("A15", "C9")
def test_a_parent_goes_when_its_children_stand_by_themselves(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path
) -> None:
    settings = ["loop.steps=7", "checkpoint.keep_last=2", "checkpoint.keep_every_steps=3"]
    overrides = toy_overrides(toy_tokens, tmp_path, "run", *DELTA, *settings)
    assert ranks(2, train_unhurried, overrides) == [ExitCode.FINISHED] * 2
    run = RunFolder(tmp_path / "run")
    found = manifests(run)
    assert list(found) == [3, 6, 7]
    assert all(one.compressed for one in found.values()) and found[7].parent == "step_6"
    # Multiples of keep_every_steps outlive their neighbours, and need none.
    assert found[3].parent is None and found[6].parent is None
    assert {path.name for path in run.checkpoints.iterdir()} == {f"step_{step}" for step in found}


@pytest.mark.req("A15")
def test_a_parent_stays_while_a_step_needs_it(ranks: Ranks, toy_tokens: Path, tmp_path: Path) -> None:
    """Children that cannot be stored anew keep their parents."""

    def only_new(overrides: list[str]) -> ExitCode:
        compress_file = compressing.compress_file

        def refuse(folder: Path, manifest: Manifest, *rest: Any) -> Any:
            if manifest.compressed:
                raise OSError(28, "No space left on device")
            return compress_file(folder, manifest, *rest)

        with mock.patch.object(compressing, "compress_file", refuse):
            return train_unhurried(overrides)

    settings = ["loop.steps=5", "checkpoint.keep_last=2"]
    overrides = toy_overrides(toy_tokens, tmp_path, "run", *DELTA, *settings)
    assert ranks(1, only_new, overrides) == [ExitCode.FINISHED]
    run = RunFolder(tmp_path / "run")
    assert list(manifests(run)) == [1, 2, 3, 4, 5]
    reasons = {one["reason"] for one in told(run, Event.WARNING)}
    assert any(
        "could not be compressed, and stays as it is" in one and "No space left" in one for one in reasons
    )
    # With room again, only what is to be kept is left.
    more = [*overrides, "loop.steps=6"]
    assert ranks(1, train_unhurried, more) == [ExitCode.FINISHED]
    assert ranks(1, train_unhurried, [*more, "loop.steps=8"]) == [ExitCode.FINISHED]
    assert list(manifests(run)) == [7, 8]


@pytest.mark.req("A15", "A22")
def test_training_never_waits_for_a_compression(ranks: Ranks, toy_tokens: Path, tmp_path: Path) -> None:
    """The next save, or a stop, ends it; the step stays plain and nothing is left of it."""

    def slowly(overrides: list[str]) -> ExitCode:
        waiting = threading.Event()
        encode = step_module.ContainerWriter.add

        def add(self: Any, region: Any, read: Any, read_parent: Any) -> int:
            waiting.wait(0.02)
            return encode(self, region, read, read_parent)

        with mock.patch.object(step_module.ContainerWriter, "add", add):
            return train_toy(overrides)

    overrides = toy_overrides(toy_tokens, tmp_path, "run", *DELTA, "loop.steps=4", "checkpoint.keep_last=0")
    assert ranks(2, slowly, overrides) == [ExitCode.FINISHED] * 2
    run = RunFolder(tmp_path / "run")
    # Only at the end there is time for it: for all that is left.
    kinds = [one["event"] for one in run.read_events()]
    assert kinds.index(Event.COMPRESSED) > max(at for at, kind in enumerate(kinds) if kind == Event.SAVED)
    assert [one["step"] for one in told(run, Event.COMPRESSED)] == [1, 2, 3, 4]
    assert not told(run, Event.WARNING)


@pytest.mark.req("A15", "A13")
def test_the_step_of_a_stop_stays_plain_until_the_next_save(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path
) -> None:
    overrides = toy_overrides(toy_tokens, tmp_path, "run", *DELTA, "loop.steps=9", "checkpoint.every_steps=4")
    assert ranks(2, train_toy, overrides, stop_after=2) == [ExitCode.STOPPED] * 2
    run = RunFolder(tmp_path / "run")
    assert list(manifests(run)) == [3] and not manifests(run)[3].compressed
    assert ranks(2, train_unhurried, overrides) == [ExitCode.FINISHED] * 2
    assert [one["step"] for one in told(run, Event.COMPRESSED)] == [3, 4, 4, 8, 8, 9]
    assert list(manifests(run)) == [8, 9]


@pytest.mark.req("A15", "A22")
@pytest.mark.parametrize("harm", ["flip", "missing", "another"])
def test_a_step_whose_parent_is_damaged_is_passed_over(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path, harm: str
) -> None:
    settings = ["loop.steps=5", "checkpoint.keep_last=0", "checkpoint.delta_chain=1"]
    overrides = toy_overrides(toy_tokens, tmp_path, "run", *DELTA, *settings)
    assert ranks(1, train_unhurried, overrides) == [ExitCode.FINISHED]
    run = RunFolder(tmp_path / "run")
    assert [one.parent for one in manifests(run).values()] == [None, "step_1", None, "step_3", None]
    shutil.rmtree(run.checkpoints / "step_5")
    parent = run.checkpoints / "step_3"
    if harm == "flip":
        (file,) = parent.glob("*.z*")
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif harm == "missing":
        parent.rename(run.path / "elsewhere")
    else:
        shutil.rmtree(parent)
        shutil.copytree(run.checkpoints / "step_1", parent)
    assert ranks(1, train_toy, [*overrides, "loop.steps=6"]) == [ExitCode.FINISHED]
    assert told(run, Event.RESUMED)[-1]["step"] == 2
    reasons = [one["reason"] for one in told(run, Event.WARNING)]
    assert any("checkpoint step_4 of run run is damaged" in one for one in reasons), reasons


@pytest.mark.req("A15", "A22")
def test_damage_is_not_stored_anew(ranks: Ranks, toy_tokens: Path, tmp_path: Path) -> None:
    """Neither a child of a damaged step nor a damaged step: what was there would never be found again."""
    overrides = toy_overrides(toy_tokens, tmp_path, "run", *DELTA, "loop.steps=3", "checkpoint.keep_last=0")
    assert ranks(1, train_unhurried, overrides) == [ExitCode.FINISHED]
    run = RunFolder(tmp_path / "run")
    (file,) = (run.checkpoints / "step_1").glob("*.z*")
    whole = file.read_bytes()
    data = bytearray(whole)
    data[len(data) // 2] ^= 1
    file.write_bytes(data)

    def stored_anew(job: Job) -> str | None:
        group = torch.distributed.group.WORLD
        assert group is not None
        done = Compression(group, run.checkpoints, Wish(compress=True), lambda: None).run(job)
        assert done is not None
        return done.reason

    before = manifests(run)
    for step in (1, 2):
        (reason,) = ranks(1, stored_anew, Job(step, None))
        assert reason is not None and "is not what was written" in reason
    assert manifests(run) == before
    file.write_bytes(whole)
    assert ranks(1, stored_anew, Job(2, None)) == [None]
    assert manifests(run)[2].parent is None


@pytest.mark.req("A15", "C9")
def test_a_budget_is_for_what_compressed_steps_take(ranks: Ranks, toy_tokens: Path, tmp_path: Path) -> None:
    settings = [*COMMON, "checkpoint.keep_last=0", "loop.steps=5"]
    ranks(1, train_toy, toy_overrides(toy_tokens, tmp_path, "plain", *settings))
    size_gb = parse_manifest(tmp_path / "plain/checkpoints/step_5").bytes / 1e9
    more = ["checkpoint.compress=each", f"checkpoint.disk_budget_gb={2.6 * size_gb:.9f}"]
    ranks(1, train_unhurried, toy_overrides(toy_tokens, tmp_path, "each", *settings, *more))
    kept = list(manifests(RunFolder(tmp_path / "each")))
    assert len(kept) > 2 and kept[-1] == 5, "two plain ones would fit"


def train_slowly_stored(overrides: list[str], stop_after: int | None) -> tuple[ExitCode, int]:
    """Train; each part of a file takes a while to compress. Return how often that was told to the watch, too."""
    add = step_module.ContainerWriter.add
    beats: list[Phase] = []

    def slow(self: Any, region: Any, read: Any, read_parent: Any) -> tuple[int, str]:
        threading.Event().wait(0.004)
        return add(self, region, read, read_parent)

    with (
        mock.patch.object(step_module.ContainerWriter, "add", slow),
        mock.patch.object(flight, "LOOK_EVERY_S", 0.05),
        mock.patch.object(store, "beat", beats.append),
    ):
        return train_toy(overrides, stop_after), beats.count(Phase.SAVE)


@pytest.mark.req("A15", "A13")
def test_a_run_that_is_done_waits_for_compressions_and_does_not_look_hung(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path
) -> None:
    """A stop ends them."""
    settings = [*DELTA, "loop.steps=3", "checkpoint.keep_last=0"]
    overrides = toy_overrides(toy_tokens, tmp_path, "waits", *settings)
    ((code, beats),) = ranks(1, train_slowly_stored, overrides, None)
    assert code is ExitCode.FINISHED and beats > 5
    assert all(one.compressed for one in manifests(RunFolder(tmp_path / "waits")).values())
    overrides = toy_overrides(toy_tokens, tmp_path, "stops", *settings)
    ((code, _),) = ranks(1, train_slowly_stored, overrides, 12)
    assert code is ExitCode.FINISHED
    assert not all(one.compressed for one in manifests(RunFolder(tmp_path / "stops")).values())


@pytest.mark.req("A15", "A22")
def test_a_process_that_has_lost_its_run_changes_no_step(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path
) -> None:
    overrides = toy_overrides(toy_tokens, tmp_path, "run", *COMMON, "loop.steps=2", "parallel.zero=2")
    assert ranks(2, train_toy, overrides) == [ExitCode.FINISHED] * 2
    run = RunFolder(tmp_path / "run")

    def compress_as_nobody() -> None:
        def lost() -> None:
            raise PeerError("somebody else has the run")

        group = torch.distributed.group.WORLD
        assert group is not None
        compression = Compression(group, run.checkpoints, Wish(compress=True), lost)
        with pytest.raises(PeerError, match="somebody else has the run"):
            compression.run(Job(2, None))

    ranks(2, compress_as_nobody)
    assert not any(one.compressed for one in manifests(run).values())


@pytest.mark.req("B9")
def test_rounded_steps_take_70_percent_less_and_training_goes_on_as_well(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path
) -> None:
    """The loss that follows differs by less than 0.1 %, and the errors are as the manifest says."""
    settings = [*COMMON, "loop.steps=21", "checkpoint.every_steps=20", "checkpoint.keep_last=0"]
    lossy = ["checkpoint.compress=each", "checkpoint.lossy=all"]
    for name, more in (("exact", []), ("rounded", lossy)):
        overrides = toy_overrides(toy_tokens, tmp_path, name, *settings, *more)
        assert ranks(2, train_unhurried, [*overrides, "parallel.zero=2"]) == [ExitCode.FINISHED] * 2
    runs = [RunFolder(tmp_path / name) for name in ("exact", "rounded")]
    exact, rounded = (manifests(run)[20] for run in runs)
    assert exact.rounded == {}
    assert rounded.rounded.keys() == {"exp_avg", "exp_avg_sq", "weights"}
    assert rounded.rounded["weights"] <= 2**-8
    assert all(0 < rounded.rounded[role] <= 0.1 for role in ("exp_avg", "exp_avg_sq"))
    tensors = [sum(size for name, size in one.files.items() if "distcp" in name) for one in (exact, rounded)]
    assert tensors[1] < 0.36 * tensors[0]  # of a toy, whose small tensors compress less
    # The step that ended the launch goes, so that both go on from step 20.
    losses = []
    for run in runs:
        shutil.rmtree(run.checkpoints / "step_21")
        overrides = toy_overrides(toy_tokens, tmp_path, run.name, *settings, "loop.steps=40")
        assert ranks(1, train_toy, [*overrides, "loop.log_every_steps=1"]) == [ExitCode.FINISHED]
        lines = {line["step"]: line["loss"] for line in read_json_lines(run.metrics) if "loss" in line}
        losses.append([lines[step] for step in range(21, 41)])
        assert told(run, Event.RESUMED)[-1]["step"] == 20
    mean = [math.fsum(one) / len(one) for one in losses]
    assert losses[0] != losses[1]
    assert mean[1] == pytest.approx(mean[0], rel=1e-3)


@pytest.mark.req("B9")
def test_a_run_that_wants_an_exact_resume_refuses_rounded_values(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path
) -> None:
    lossy = ["checkpoint.compress=each", "checkpoint.lossy=moments"]
    overrides = toy_overrides(toy_tokens, tmp_path, "run", *COMMON, "loop.steps=3")
    assert ranks(1, train_unhurried, [*overrides, *lossy]) == [ExitCode.FINISHED]
    more = [*overrides, "loop.steps=4"]

    def refused(overrides: list[str]) -> None:
        with pytest.raises(ConfigError, match="the values of step_3 were rounded when it was saved"):
            train_toy(overrides)

    ranks(1, refused, [*more, "checkpoint.exact_resume=true"])
    run = RunFolder(tmp_path / "run")
    assert ranks(1, train_toy, more) == [ExitCode.FINISHED]
    assert json.loads((run.checkpoints / "step_4/manifest.json").read_text())["rounded"] == {}


@pytest.mark.req("A15", "A22")
def test_a_full_disk_leaves_steps_plain_until_there_is_room(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path
) -> None:
    """The sentence names the disk; training goes on."""

    def train_without_room(overrides: list[str]) -> ExitCode:
        import torch.distributed as dist

        run, filler, steps = Compression.run, checkpoints / "filler", list[int]()

        def fill_and_run(compression: Compression, job: Job) -> Any:
            first = job.step not in steps
            steps.append(job.step)
            if first and job.step == 2 and dist.get_rank() == 0:
                # Nobody else writes meanwhile: the next save waits.
                filler.write_bytes(bytes(shutil.disk_usage(checkpoints).free - (64 << 10)))
            dist.barrier(compression.group)
            done = run(compression, job)
            if first and job.step == 2 and dist.get_rank() == 0:
                assert not list(checkpoints.glob("step_2/*.z*")) and not manifests(folder)[2].compressed
                filler.unlink()
            return done

        with mock.patch.object(Compression, "run", fill_and_run):
            return train_unhurried(overrides)

    folder = RunFolder(tmp_path / "run")
    checkpoints = folder.checkpoints
    settings = ["checkpoint.compress=each", "loop.steps=4", "checkpoint.keep_last=0", "parallel.zero=2"]
    overrides = toy_overrides(toy_tokens, tmp_path, "run", *COMMON, *settings)
    folder.path.mkdir()
    with small_disk(checkpoints, 32 << 20):
        assert ranks(2, train_without_room, overrides) == [ExitCode.FINISHED] * 2
        (said,) = told(folder, Event.WARNING)
        assert said["step"] == 2
        assert said["reason"].startswith("step 2 could not be compressed, and stays as it is (")
        assert "No space left on device" in said["reason"] and f"{checkpoints}" in said["reason"]
        assert [one["step"] for one in told(folder, Event.SAVED)] == [1, 2, 3, 4]
        assert [one["step"] for one in told(folder, Event.COMPRESSED)] == [1, 2, 3, 4]
        assert all(one.compressed for one in manifests(folder).values())
