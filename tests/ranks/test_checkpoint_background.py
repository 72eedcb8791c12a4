"""Saves that go on while training does."""

import contextlib
import io
import math
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from harness.disks import small_disk
from harness.offload import opened
from harness.pool import Ranks
from harness.toy import toy_overrides, train_toy

from contract.errors import PeerError
from contract.exit_codes import ExitCode
from contract.run_folder import Event, RunFolder, read_json_lines
from train.checkpoint import write
from train.checkpoint.manifest import read_manifest
from train.checkpoint.reader import damage
from train.checkpoint.staging import Staging
from train.checkpoint.store import CheckpointStore
from train.config import load_config

pytestmark = pytest.mark.slow

COMMON = ["loop.eval_batches=0", "checkpoint.keep_last=0"]


def events(run: RunFolder, kind: Event) -> list[dict[str, Any]]:
    return [event for event in run.read_events() if event["event"] == kind]


def train_while_saving(overrides: list[str], until_step: int, stop_after: int | None = None) -> ExitCode:
    """Train; each save in the background waits, before it reads the state, for training to come to a step."""
    run = load_config(overrides).run_folder
    write_files: Callable[..., write.Written] = write.Writer.write_files
    under_way = threading.Semaphore(1)

    def after_training(*arguments: Any) -> write.Written:
        assert under_way.acquire(blocking=False), "two saves at once"
        deadline = time.monotonic() + 20
        if threading.current_thread() is not threading.main_thread():
            while max((line["step"] for line in read_json_lines(run.metrics)), default=0) < until_step:
                assert time.monotonic() < deadline, "training does not go on"
                time.sleep(0.01)
        written = write_files(*arguments)
        under_way.release()
        return written

    with mock.patch.object(write.Writer, "write_files", after_training):
        return train_toy(overrides, stop_after)


@pytest.mark.req("C9", "A22")
@pytest.mark.parametrize(("size", "layout"), [(1, "zero=0"), (2, "zero=0"), (2, "zero=3"), (4, "tp=2 pp=2")])
def test_what_is_saved_is_the_state_of_its_step(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path, size: int, layout: str
) -> None:
    """Training changes every tensor before the first byte of the copy is read."""
    settings = [*COMMON, "loop.steps=5", *(f"parallel.{one}" for one in layout.split())]
    waits = [*settings, "checkpoint.every_steps=2", "checkpoint.background=false"]
    assert ranks(size, train_toy, toy_overrides(toy_tokens, tmp_path, "waits", *waits)) == [0] * size
    goes_on = toy_overrides(toy_tokens, tmp_path, "goes_on", *settings, "checkpoint.every_steps=2")
    assert ranks(size, train_while_saving, goes_on, 3) == [ExitCode.FINISHED] * size
    runs = [RunFolder(tmp_path / name) for name in ("waits", "goes_on")]
    for step in (2, 4, 5):
        waited, went_on = (read_manifest(run.checkpoints / f"step_{step}") for run in runs)
        assert waited.tensors == went_on.tensors, step
    saved = events(runs[1], Event.SAVED)
    assert [event["step"] for event in saved] == [2, 4, 5]
    assert saved[0]["stall_s"] < saved[0]["seconds"]
    assert saved[-1]["stall_s"] == saved[-1]["seconds"]
    stalls = {line["step"]: line.get("save_stall_s") for line in read_json_lines(runs[1].metrics)}
    assert stalls[2] is None and stalls[3] == pytest.approx(saved[0]["stall_s"], abs=0.05)


def train_while_copying(overrides: list[str]) -> tuple[ExitCode, float]:
    """Train; each copy in the background begins late. Return how long updates have waited for it, too."""
    fill, before_update = Staging.fill, CheckpointStore.before_update
    waited_s = 0.0

    def late(self: Staging) -> None:
        time.sleep(0.2)
        fill(self)

    def timed(self: CheckpointStore) -> None:
        nonlocal waited_s
        began_s = time.monotonic()
        before_update(self)
        waited_s += time.monotonic() - began_s

    with (
        mock.patch.object(Staging, "fill", late),
        mock.patch.object(CheckpointStore, "before_update", timed),
    ):
        return train_toy(overrides), waited_s


@pytest.mark.req("C9", "A22")
@pytest.mark.parametrize(("size", "layout"), [(1, "zero=0"), (2, "zero=3"), (2, "pp=2")])
def test_weights_change_only_when_their_copy_is_made(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path, size: int, layout: str
) -> None:
    """It is made beside the next forward and backward pass; what an update waits for it counts as a stall."""
    settings = [*COMMON, "loop.steps=5", "checkpoint.every_steps=2", f"parallel.{layout}"]
    waits = toy_overrides(toy_tokens, tmp_path, "waits", *settings, "checkpoint.background=false")
    assert ranks(size, train_toy, waits) == [0] * size
    beside = toy_overrides(toy_tokens, tmp_path, "beside", *settings)
    found = ranks(size, train_while_copying, beside)
    assert all(code is ExitCode.FINISHED for code, _ in found)
    runs = [RunFolder(tmp_path / name) for name in ("waits", "beside")]
    for step in (2, 4, 5):
        one, other = (read_manifest(run.checkpoints / f"step_{step}") for run in runs)
        assert one.tensors == other.tensors, step
    stalls = [line["save_stall_s"] for line in read_json_lines(runs[1].metrics) if "save_stall_s" in line]
    _, waited_s = found[0]
    assert 0 < waited_s <= sum(stalls) and waited_s < 0.5


@pytest.mark.req("C9", "A22")
def test_a_stop_waits_for_the_save_in_flight(ranks: Ranks, toy_tokens: Path, tmp_path: Path) -> None:
    settings = [*COMMON, "loop.steps=9", "checkpoint.every_steps=2"]
    overrides = toy_overrides(toy_tokens, tmp_path, "run", *settings)
    assert ranks(2, train_while_saving, overrides, 3, 2) == [ExitCode.STOPPED] * 2
    run = RunFolder(tmp_path / "run")
    assert run.published_steps() == [2, 3]
    told = [event["event"] for event in run.read_events()]
    assert told == [Event.STARTED, Event.STOP_REQUESTED, Event.SAVED, Event.SAVED, Event.STOPPED]


def test_ranks_with_the_same_tensors_copy_each_once(ranks: Ranks, toy_tokens: Path, tmp_path: Path) -> None:
    def held(overrides: list[str]) -> int:
        with opened(overrides) as parts:
            assert parts.checkpoints.save(parts.state, background=True) and parts.checkpoints.wait()
            assert parts.checkpoints.staging is not None
            return parts.checkpoints.staging.held_bytes

    overrides = toy_overrides(toy_tokens, tmp_path, "run", *COMMON, "parallel.zero=0")
    sizes = ranks(2, held, overrides)
    manifest = read_manifest(tmp_path / "run/checkpoints/step_0")
    values_bytes = sum(
        math.prod(tensor["shape"]) * getattr(torch, tensor["dtype"]).itemsize
        for tensor in manifest.tensors.values()
    )
    assert values_bytes <= sum(sizes) < 1.1 * values_bytes
    assert max(sizes) < 0.6 * values_bytes


def test_a_run_that_was_taken_over_ends(ranks: Ranks, toy_tokens: Path, tmp_path: Path) -> None:
    def taken_over(overrides: list[str]) -> None:
        def refuse() -> None:
            raise PeerError("taken over")

        with opened(overrides) as parts:
            parts.checkpoints.check_owner = refuse
            assert parts.checkpoints.save(parts.state, background=True)
            with pytest.raises(PeerError, match="taken over"):
                parts.checkpoints.wait()
            assert parts.checkpoints.poll() is None and parts.checkpoints.newest_step is None

    ranks(2, taken_over, toy_overrides(toy_tokens, tmp_path, "run", *COMMON))
    assert RunFolder(tmp_path / "run").published_steps() == []


def test_without_memory_for_a_copy_training_waits(ranks: Ranks, toy_tokens: Path, tmp_path: Path) -> None:
    def cramped(overrides: list[str]) -> None:
        with opened(overrides) as parts:
            parts.checkpoints.staging = Staging(lambda: 1000, pinned=False)
            assert parts.checkpoints.save(parts.state, background=True)
            assert parts.checkpoints.newest_step == 0

    ranks(2, cramped, toy_overrides(toy_tokens, tmp_path, "run", *COMMON))
    run = RunFolder(tmp_path / "run")
    assert run.published_steps() == [0]
    said = {event["reason"] for event in events(run, Event.WARNING)}
    assert said == {
        f"rank {rank} has no memory of the host for a copy of its state: step 0 is saved while training waits"
        for rank in (0, 1)
    }


@pytest.mark.req("C9")
def test_what_is_kept_elsewhere_is_saved_while_training_waits(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path
) -> None:
    def told(overrides: list[str]) -> str:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            assert train_toy(overrides) == ExitCode.FINISHED
        return out.getvalue()

    settings = [*COMMON, "loop.steps=3", "checkpoint.every_steps=1", "offload.optimizer=cpu"]
    overrides = toy_overrides(toy_tokens, tmp_path, "run", *settings)
    assert ranks(2, told, overrides)[0].count("checkpoints are written while training waits") == 1
    assert all(
        event["stall_s"] == event["seconds"] for event in events(RunFolder(tmp_path / "run"), Event.SAVED)
    )
    quiet = toy_overrides(toy_tokens, tmp_path, "quiet", *settings[:-1])
    assert "training waits" not in ranks(2, told, quiet)[0]


@contextmanager
def unwritable(folder: Path) -> Iterator[None]:
    """Have nobody, root neither, make, rename or remove anything in a folder: it is mounted over itself, to be read."""
    run = partial(subprocess.run, check=True, timeout=30)
    run(["mount", "--bind", str(folder), str(folder)])
    try:
        run(["mount", "-o", "remount,bind,ro", str(folder)])
        yield
    finally:
        run(["umount", "--lazy", str(folder)])


@pytest.mark.req("C8", "C9", "A22")
@pytest.mark.parametrize(("moment", "background"), [("before", False), ("within", True)])
def test_a_folder_that_may_not_be_written_any_more_costs_the_steps_of_that_time(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path, moment: str, background: bool
) -> None:
    """The right is lost when a save begins, or when all but its last rename is done."""

    def train_shut_out(overrides: list[str]) -> ExitCode:
        import torch.distributed as dist

        attempts, publish = CheckpointStore._attempts, write.Writer._publish
        folder = load_config(overrides).run_folder.checkpoints
        shut_out = ExitStack()

        def lose(at: str, step: int) -> None:
            if dist.get_rank() == 0 and (at, step) == (moment, 4):
                shut_out.enter_context(unwritable(folder))

        def seen_attempts(
            store: CheckpointStore, flight: Any, snapshot: Any, *rest: Any, **more: Any
        ) -> bool:
            lose("before", snapshot.step)
            try:
                return attempts(store, flight, snapshot, *rest, **more)
            finally:
                shut_out.close()

        def seen_publish(writer: write.Writer, step: int, *rest: Any) -> None:
            lose("within", step)
            publish(writer, step, *rest)

        with (
            mock.patch.object(CheckpointStore, "_attempts", seen_attempts),
            mock.patch.object(write.Writer, "_publish", seen_publish),
        ):
            return train_toy(overrides)

    settings = [*COMMON, "loop.steps=7", "checkpoint.every_steps=2"]
    mode = f"checkpoint.background={str(background).lower()}"
    with small_disk(tmp_path / "disk", 32 << 20) as disk:
        overrides = toy_overrides(toy_tokens, disk, "run", *settings, mode, "parallel.zero=2")
        assert ranks(2, train_shut_out, overrides) == [ExitCode.FINISHED] * 2
        run = RunFolder(disk / "run")
        assert run.published_steps() == [2, 6, 7]
        assert not any(damage(run.checkpoints / f"step_{step}") for step in (2, 6, 7))
        assert {path.name for path in run.checkpoints.iterdir()} == {"step_2", "step_6", "step_7"}
        said = events(run, Event.WARNING)
        assert [event["step"] for event in said] == [4, 4]
        for event in said:
            assert "saving step 4 failed (" in event["reason"], event
            assert f"Read-only file system: '{run.checkpoints}/step_4" in event["reason"], event
