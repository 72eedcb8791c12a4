"""Steps that are kept on the nodes' own disks first."""

import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from harness.disks import small_disk
from harness.nodes import TENSORS, State, forked, join, node_store
from harness.pool import Ranks, RanksError
from harness.toy import toy_overrides, train_toy

from contract.errors import UserError
from contract.exit_codes import ExitCode
from contract.run_folder import Event, RunFolder
from train.checkpoint.fast import FastTier
from train.checkpoint.manifest import read_manifest
from train.checkpoint.reader import SafeReader, damage, load_tree
from train.checkpoint.write import Snapshot, Writer, Written

pytestmark = pytest.mark.slow

KILLS = {1: 60, 4: 60}


def told(run: RunFolder, kind: Event) -> list[dict[str, Any]]:
    return [event for event in run.read_events() if event["event"] == kind]


def warnings_of(run: RunFolder) -> list[str]:
    return [event["reason"] for event in told(run, Event.WARNING)]


def kept_on(nodes: Path) -> list[str]:
    """Names of the folders of steps on the nodes, without what tells them from others of the same step."""
    return sorted({path.name.split(".")[0] for path in nodes.glob("*/trierarch-*/step_*")})


def values_of(run: RunFolder, step: int) -> set[float]:
    folder = run.checkpoints / f"step_{step}"
    tree = {"model": {f"w{number}": torch.empty(300) for number in range(TENSORS)}}
    load_tree(tree, SafeReader(folder, read_manifest(folder)))
    return {value for tensor in tree["model"].values() for value in tensor.tolist()}


def keep(run: RunFolder, nodes: Sequence[Path], *steps: int) -> None:
    """Keep steps, and end before any is published."""
    import torch.distributed as dist

    store = node_store(run, nodes[dist.get_rank()])
    assert store.fast is not None
    for step in steps:
        assert store.fast.keep(store._writer(), Snapshot(step, State(step).state_dict()))


def start(run: RunFolder, nodes: Sequence[Path], *steps: int) -> int | None:
    """Start again, and save further steps; return the newest step that was there at the start."""
    import torch.distributed as dist

    store = node_store(run, nodes[dist.get_rank()], keep_last=0)
    store.recover()
    newest = store.newest()
    for step in steps:
        assert store.save(State(step))  # type: ignore[arg-type]
    return None if newest is None else newest.step


def fill(file: Path) -> None:
    """Use up all that is free on a disk."""
    with file.open("wb", buffering=0) as opened, pytest.raises(OSError, match="No space"):
        while True:
            assert opened.write(b"1" * 4096) == 4096


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    run.create()
    return run


@pytest.fixture
def nodes(tmp_path: Path) -> list[Path]:
    return [tmp_path / f"nodes/{number}" for number in range(4)]


@pytest.mark.req("C9", "A22")
@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (1, []),
        (2, ["parallel.zero=3"]),
        (2, ["parallel.zero=3", "checkpoint.background=false"]),
        (2, ["parallel.zero=3", "offload.optimizer=cpu"]),
    ],
    ids=["alone", "two", "waits", "offloaded"],
)
def test_what_goes_through_the_nodes_is_what_would_be_written_at_once(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path, size: int, settings: list[str]
) -> None:
    common = [
        "loop.steps=3",
        "loop.eval_batches=0",
        "checkpoint.every_steps=2",
        "checkpoint.keep_last=0",
        *settings,
    ]
    (tmp_path / "node").mkdir()
    direct = toy_overrides(toy_tokens, tmp_path, "direct", *common)
    fast = toy_overrides(toy_tokens, tmp_path, "fast", *common, f"checkpoint.fast_path={tmp_path}/node")
    for overrides in (direct, fast):
        assert ranks(size, train_toy, overrides) == [ExitCode.FINISHED] * size
    for step in (2, 3):
        one, other = (
            read_manifest(tmp_path / f"{name}/checkpoints/step_{step}") for name in ("direct", "fast")
        )
        assert one.tensors == other.tensors and one.files.keys() == other.files.keys()
    run = RunFolder(tmp_path / "fast")
    kinds = [event["event"] for event in run.read_events() if event["event"].startswith("saved")]
    assert kinds == [Event.SAVED_LOCALLY, Event.SAVED] * 2
    # Whatever training waits for before: it goes on while the step is copied.
    first = told(run, Event.SAVED)[0]
    assert first["stall_s"] < first["seconds"]
    assert kept_on(tmp_path) == []
    (said,) = warnings_of(run)
    assert said.startswith(
        f"checkpoint.fast_path gains nothing: {tmp_path}/node and the run folder {run.path} are on"
    )


@pytest.mark.req("C9")
def test_training_goes_on_while_what_was_offloaded_is_copied(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path
) -> None:
    """There is no copy of it in memory, but one on the disk."""

    def train(overrides: list[str]) -> set[str]:
        import threading

        threads = set()
        publish = Writer.publish

        def seen(*arguments: Any) -> str | None:
            threads.add(threading.current_thread().name)
            return publish(*arguments)

        with mock.patch.object(Writer, "publish", seen):
            assert train_toy(overrides) == ExitCode.FINISHED
        return threads

    (tmp_path / "node").mkdir()
    settings = ["loop.steps=3", "loop.eval_batches=0", "checkpoint.every_steps=1", "offload.optimizer=cpu"]
    overrides = toy_overrides(toy_tokens, tmp_path, "run", *settings, f"checkpoint.fast_path={tmp_path}/node")
    assert ranks(1, train, overrides) == [{"checkpoint", "MainThread"}]


@pytest.mark.req("C9", "A22")
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (4, 2), (2, 4)])
def test_a_start_publishes_what_the_nodes_have(
    ranks: Ranks, run: RunFolder, nodes: list[Path], before: int, after: int
) -> None:
    """Whatever the number of ranks that were, or are, on each of two nodes."""
    of_ranks = [nodes[0], nodes[0] if 1 in (before, after) else nodes[1], nodes[1], nodes[0]]
    ranks(before, start, run, of_ranks, 1)
    ranks(before, keep, run, of_ranks, 2, 3)
    assert kept_on(nodes[0].parent) == ["step_3"] and run.published_steps() == [1]
    assert ranks(after, start, run, of_ranks) == [3] * after
    assert run.published_steps() == [1, 3] and values_of(run, 3) == {3.0}
    manifest = read_manifest(run.checkpoints / "step_3")
    assert manifest.world_size == before and len(manifest.digests) == before
    assert warnings_of(run) == [] and kept_on(nodes[0].parent) == []
    assert [event["step"] for event in told(run, Event.SAVED)] == [1, 3]
    assert ranks(after, start, run, of_ranks) == [3] * after
    assert [event["step"] for event in told(run, Event.SAVED)] == [1, 3]


def lose_a_node(nodes: list[Path]) -> str:
    shutil.rmtree(nodes[1])
    return "the files of rank 1 are on none of these nodes"


def lose_a_note(nodes: list[Path]) -> str:
    """The rank was killed while it wrote."""
    next(nodes[1].rglob("kept_1.json")).unlink()
    return "the files of rank 1 are on none of these nodes"


def tear_a_file(nodes: list[Path]) -> str:
    path = next(nodes[0].rglob("__0_0.distcp"))
    os.truncate(path, path.stat().st_size - 1)
    return "the files of rank 0 are on none of these nodes"


def change_metadata(nodes: list[Path]) -> str:
    path = next(nodes[0].rglob(".metadata"))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    return "the files of rank 0 are on none of these nodes"


def change_a_note(nodes: list[Path]) -> str:
    path = next(nodes[0].rglob("kept_0.json"))
    path.write_text(path.read_text().replace('"began": ', '"began": 1'))
    return "the files of rank 0 are on none of these nodes"


def change_a_value(nodes: list[Path]) -> str:
    path = next(nodes[1].rglob("__1_0.distcp"))
    data = path.read_bytes()
    value = torch.full((300,), 2.0).numpy().tobytes()
    assert value in data
    path.write_bytes(data.replace(value, value[:-1] + b"?", 1))
    return "which rank 1 wrote, does not read back as it was written"


@pytest.mark.req("C8", "A22")
@pytest.mark.parametrize(
    "harm", [lose_a_node, lose_a_note, tear_a_file, change_metadata, change_a_note, change_a_value]
)
def test_what_is_not_whole_on_the_nodes_is_left_out(
    ranks: Ranks, run: RunFolder, nodes: list[Path], harm: Callable[[list[Path]], str]
) -> None:
    ranks(2, start, run, nodes, 1)
    ranks(2, keep, run, nodes, 2)
    reason = harm(nodes)
    assert ranks(2, start, run, nodes) == [1, 1]
    (said,) = warnings_of(run)
    assert said.startswith("step 2, which an earlier start has kept on the nodes' disks, is not published (")
    assert reason in said
    assert run.published_steps() == [1] and not list(run.checkpoints.glob("*.tmp*"))
    # It stays until there is a newer one: a node may come back.
    assert kept_on(nodes[0].parent) == ["step_2"]
    assert ranks(2, start, run, nodes, 3) == [1, 1]
    assert len(warnings_of(run)) == 2 and kept_on(nodes[0].parent) == []


@pytest.mark.parametrize("fails", [False, True])
def test_an_older_step_that_is_whole_is_published_instead(
    ranks: Ranks, run: RunFolder, nodes: list[Path], fails: bool
) -> None:
    """A start was killed while it kept the next one; where the first try fails the whole one stays."""
    ranks(2, keep, run, nodes, 2)
    (folder,) = nodes[0].glob("trierarch-*/step_2.*")
    ranks(2, keep, run, nodes, 3)
    (newer,) = nodes[1].glob("trierarch-*/step_3.*")
    (newer / "kept_1.json").unlink()
    assert folder.is_dir()
    if fails:

        def start_in_vain(run: RunFolder, nodes: Sequence[Path]) -> int | None:
            with mock.patch.object(Writer, "publish", return_value="it is gone"):
                return start(run, nodes)

        assert ranks(2, start_in_vain, run, nodes) == [None, None]
        assert kept_on(nodes[0].parent) == ["step_2"]
    assert ranks(2, start, run, nodes) == [2, 2]
    said = warnings_of(run)
    assert said[0].startswith("step 3, which")
    assert said[0].endswith("of these nodes)" + ": step 2 is" * (not fails))
    assert [one[:6] for one in said[1:]] == ["step 2"] * fails
    assert not fails or said[1].endswith("is not published (it is gone)")
    assert kept_on(nodes[0].parent) == []


def test_of_two_whole_steps_the_newer_is_published(ranks: Ranks, run: RunFolder, nodes: list[Path]) -> None:
    """A start was killed before it had removed the older one."""

    def keep_both(run: RunFolder, nodes: Sequence[Path]) -> None:
        with mock.patch.object(FastTier, "remove"):
            keep(run, nodes, 2, 3)

    ranks(2, keep_both, run, nodes)
    assert kept_on(nodes[0].parent) == ["step_2", "step_3"]
    assert ranks(2, start, run, nodes) == [3, 3]
    assert run.published_steps() == [3] and kept_on(nodes[0].parent) == [] and warnings_of(run) == []


@pytest.mark.req("C13")
def test_a_node_that_comes_back_does_not_bring_what_the_run_has_left_behind(
    ranks: Ranks, run: RunFolder, nodes: list[Path]
) -> None:
    """The run has gone on from an older step, perhaps with other settings."""
    ranks(1, start, run, nodes, 1)
    ranks(1, keep, run, nodes, 5)
    away = nodes[:1]
    assert ranks(1, start, run, nodes[1:], 3) == [1]
    assert ranks(1, start, run, away) == [3]
    assert run.published_steps() == [1, 3] and kept_on(nodes[0].parent) == []
    (said,) = warnings_of(run)
    assert re.fullmatch(
        r"step 5, which an earlier start has kept on the nodes' disks, is not published \(the run has gone on from an "
        r"older one: it began to save step 3 \S+ s later\)",
        said,
    )


@pytest.mark.req("C9", "A22")
@pytest.mark.parametrize("through", ["at once", "a node", "an earlier node"])
def test_the_clock_of_the_shared_storage_does_not_matter(
    ranks: Ranks, run: RunFolder, nodes: list[Path], through: str
) -> None:
    """Whichever way the published step has taken."""

    def save_at_once(run: RunFolder) -> None:
        assert node_store(run, None).save(State(1))  # type: ignore[arg-type]

    if through == "at once":
        ranks(2, save_at_once, run)
    elif through == "a node":
        ranks(2, start, run, nodes, 1)
    else:
        ranks(2, keep, run, nodes, 1)
        assert ranks(2, start, run, nodes) == [1, 1]
    ranks(2, keep, run, nodes, 2)
    for file in (run.checkpoints / "step_1").rglob("*"):
        os.utime(file, (time.time() + 60,) * 2)
    assert ranks(2, start, run, nodes) == [2, 2]
    assert warnings_of(run) == []


def test_a_step_of_before_its_beginning_was_written_down_has_the_time_of_its_metadata(
    ranks: Ranks, run: RunFolder, nodes: list[Path]
) -> None:
    ranks(2, start, run, nodes, 1)
    folder = run.checkpoints / "step_1"
    replace(read_manifest(folder), began=None).rewrite(folder)
    ranks(2, keep, run, nodes, 2)
    before = (folder / ".metadata").stat().st_mtime
    os.utime(folder / ".metadata", (before + 60,) * 2)
    assert ranks(2, start, run, nodes) == [1, 1]
    assert "it began to save step 1 " in warnings_of(run)[0]
    ranks(2, keep, run, nodes, 2)
    os.utime(folder / ".metadata", (before,) * 2)
    assert ranks(2, start, run, nodes) == [2, 2]


@pytest.mark.req("A22")
def test_each_step_that_is_left_out_is_told(ranks: Ranks, run: RunFolder, nodes: list[Path]) -> None:
    def keep_all(run: RunFolder, nodes: Sequence[Path]) -> None:
        with mock.patch.object(FastTier, "remove"):
            keep(run, nodes, 2, 3, 4)

    ranks(2, keep_all, run, nodes)
    for step, rank in ((3, 0), (4, 1)):
        next(nodes[rank].glob(f"trierarch-*/step_{step}.*/kept_{rank}.json")).unlink()
    assert ranks(2, start, run, nodes) == [2, 2]
    assert warnings_of(run) == [
        f"step {step}, which an earlier start has kept on the nodes' disks, is not published (the files of rank {rank} "
        "are on none of these nodes): step 2 is"
        for step, rank in ((4, 1), (3, 0))
    ]


@pytest.mark.req("A22")
def test_a_node_that_cannot_be_read_leaves_nobody_waiting(
    ranks: Ranks, run: RunFolder, nodes: list[Path]
) -> None:
    def start_blind(run: RunFolder, nodes: Sequence[Path]) -> int | None:
        import torch.distributed as dist

        iterdir = Path.iterdir

        def fail(path: Path) -> Any:
            if dist.get_rank() == 1 and nodes[1] in path.parents:
                raise OSError(5, "Input/output error", str(path))
            return iterdir(path)

        with mock.patch.object(Path, "iterdir", fail):
            return start(run, nodes)

    ranks(2, start, run, nodes, 1)
    ranks(2, keep, run, nodes, 2)
    assert ranks(2, start_blind, run, nodes) == [1, 1]
    said = warnings_of(run)
    assert re.fullmatch(
        rf"what an earlier start has kept in {nodes[1]}/\S+ on \S+ cannot be read \(Input/output error\)",
        said[0],
    )
    assert "the files of rank 1 are on none of these nodes" in said[1] and len(said) == 2
    assert ranks(2, start, run, nodes) == [2, 2]


@pytest.mark.req("A22")
def test_published_steps_that_cannot_be_read_end_all_ranks(
    ranks: Ranks, run: RunFolder, nodes: list[Path]
) -> None:
    def refused(run: RunFolder, nodes: Sequence[Path]) -> str:
        error = OSError(116, "Stale file handle")
        with (
            mock.patch.object(RunFolder, "published_steps", side_effect=error),
            pytest.raises(UserError) as caught,
        ):
            start(run, nodes)
        return str(caught.value)

    ranks(2, start, run, nodes, 1)
    ranks(2, keep, run, nodes, 2)
    for sentence in ranks(2, refused, run, nodes):
        assert f"the steps in {run.checkpoints} cannot be read (Stale file handle): look at" in sentence
    assert kept_on(nodes[0].parent) == ["step_2"]
    assert ranks(2, start, run, nodes) == [2, 2]


@pytest.mark.req("A22")
def test_a_full_run_folder_is_tried_again(ranks: Ranks, tmp_path: Path, nodes: list[Path]) -> None:
    def save(run: RunFolder, nodes: list[Path], full: Path, background: bool) -> list[bool | None]:
        import torch.distributed as dist

        store = node_store(run, nodes[dist.get_rank()])
        saved: list[bool | None] = [store.save(State(1))]  # type: ignore[arg-type]
        if dist.get_rank() == 0:
            fill(full)
        dist.barrier()
        saved.append(store.save(State(2), background))  # type: ignore[arg-type]
        saved.append(store.wait())
        assert kept_on(nodes[0].parent) == ["step_2"]
        saved.append(store.save(State(3), background))  # type: ignore[arg-type]
        saved.append(store.wait())
        return saved

    with small_disk(tmp_path / "shared", 4 << 20) as shared:
        run = RunFolder(shared / "run")
        run.create()
        full = shared / "full"
        assert ranks(2, save, run, nodes, full, True) == [[True, True, False, True, False]] * 2
        # What is newer takes the place of what was kept before.
        assert kept_on(nodes[0].parent) == ["step_3"] and run.published_steps() == [1]
        assert ranks(2, start, run, nodes) == [1, 1]
        full.unlink()
        assert ranks(2, start, run, nodes) == [3, 3]
        assert kept_on(nodes[0].parent) == []
        assert ranks(2, save, run, nodes, full, False) == [[True, False, None, False, None]] * 2
        full.unlink()
        assert ranks(2, start, run, nodes, 4) == [3, 3]
        assert run.published_steps()[-1] == 4 and values_of(run, 3) == {3.0}


@pytest.mark.req("A22")
def test_the_save_after_a_failed_one_publishes_it_without_writing_it_again(
    ranks: Ranks, run: RunFolder, nodes: list[Path]
) -> None:
    """A stop comes at the step whose copy has failed."""

    def save(run: RunFolder, nodes: list[Path]) -> None:
        import torch.distributed as dist

        store = node_store(run, nodes[dist.get_rank()])
        with mock.patch.object(Writer, "publish", return_value="it is gone"):
            assert store.save(State(1), background=True) and store.wait() is False  # type: ignore[arg-type]
        with mock.patch.object(Writer, "write_files", side_effect=AssertionError):
            assert store.save(State(1))  # type: ignore[arg-type]

    ranks(2, save, run, nodes)
    assert run.published_steps() == [1] and values_of(run, 1) == {1.0}
    assert len(told(run, Event.SAVED_LOCALLY)) == 1 and len(warnings_of(run)) == 2


@pytest.mark.req("A22")
@pytest.mark.parametrize("background", [False, True])
def test_without_room_on_a_node_the_run_folder_is_written_at_once(
    ranks: Ranks, tmp_path: Path, run: RunFolder, nodes: list[Path], background: bool
) -> None:
    def save(run: RunFolder, nodes: list[Path]) -> None:
        import torch.distributed as dist

        store = node_store(run, nodes[dist.get_rank()])
        assert store.fast is not None
        if dist.get_rank() == 1:
            fill(nodes[1] / "full")
            os.truncate(nodes[1] / "full", (nodes[1] / "full").stat().st_size - 8192)
        store.staging = None
        assert store.save(State(1), background)  # type: ignore[arg-type]
        assert store.wait() in (None, True) and store.newest_step == 1

    with small_disk(tmp_path / "small", 1 << 20) as small:
        ranks(2, save, run, [nodes[0], small])
    assert run.published_steps() == [1] and values_of(run, 1) == {1.0}
    (said,) = warnings_of(run)
    assert said.startswith("step 1 is not kept on the nodes' disks (") and said.endswith(" at once")
    assert kept_on(nodes[0].parent) == []


@pytest.mark.req("C8")
def test_what_a_node_does_not_give_back_is_written_to_the_run_folder_at_once(
    ranks: Ranks, run: RunFolder, nodes: list[Path]
) -> None:
    def save(run: RunFolder, nodes: list[Path]) -> None:
        import torch.distributed as dist

        write_files = Writer.write_files

        def on_a_bad_disk(writer: Writer, snapshot: Snapshot, folder: Path) -> Written:
            written = write_files(writer, snapshot, folder)
            if dist.get_rank() == 1 and nodes[1] in folder.parents:
                path = folder / "__1_0.distcp"
                value = torch.ones(300).numpy().tobytes()
                path.write_bytes(path.read_bytes().replace(value, value[:-1] + b"!", 1))
            return written

        with mock.patch.object(Writer, "write_files", on_a_bad_disk):
            assert node_store(run, nodes[dist.get_rank()]).save(State(1))  # type: ignore[arg-type]

    ranks(2, save, run, nodes)
    assert run.published_steps() == [1] and values_of(run, 1) == {1.0}
    (said,) = warnings_of(run)
    assert re.match(
        r"step 1 is not kept on the nodes' disks \(the slice of model.w\d at \[0\] does not read back from "
        rf"{nodes[1]}/\S+/__1_0.distcp as it was written\): it is written to the run folder at once",
        said,
    )
    assert kept_on(nodes[0].parent) == []


@pytest.mark.parametrize("resume", ["required", "never"])
def test_a_step_on_the_nodes_is_one_to_continue_from(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path, resume: str
) -> None:
    def train_in_vain(overrides: list[str]) -> None:
        with mock.patch.object(Writer, "publish", return_value="it is gone"), pytest.raises(UserError):
            train_toy(overrides)

    (tmp_path / "node").mkdir()
    settings = ["loop.eval_batches=0", f"checkpoint.fast_path={tmp_path}/node"]
    overrides = toy_overrides(toy_tokens, tmp_path, "run", *settings)
    ranks(2, train_in_vain, [*overrides, "loop.steps=2"])
    run = RunFolder(tmp_path / "run")
    assert run.published_steps() == [] and kept_on(tmp_path) == ["step_2"]
    again = [*overrides, "loop.steps=3", f"run.resume={resume}"]
    if resume == "never":
        with pytest.raises(RanksError, match="run run already has checkpoints up to step 2 in "):
            ranks(2, train_toy, again)
    else:
        assert ranks(2, train_toy, again) == [ExitCode.FINISHED] * 2
        assert [event["step"] for event in told(run, Event.RESUMED)] == [2]


@pytest.mark.req("C9", "A22")
def test_a_run_that_is_killed_before_it_publishes_goes_on_from_there(
    ranks: Ranks, run: RunFolder, nodes: list[Path], tmp_path: Path
) -> None:
    def save(rank: int) -> None:
        join(rank, 2, tmp_path / "store")
        store = node_store(run, nodes[rank])
        assert store.save(State(1), background=True)  # type: ignore[arg-type]
        store.wait()
        with mock.patch.object(FastTier, "_flush", lambda *_: os.kill(os.getpid(), signal.SIGKILL)):
            store.save(State(2), background=True)  # type: ignore[arg-type]
            store.wait()

    for child in forked(2, save):
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert run.published_steps() == [1]
    assert [event["step"] for event in told(run, Event.SAVED_LOCALLY)] == [1, 2]
    assert ranks(2, start, run, nodes) == [2, 2]
    assert values_of(run, 2) == {2.0} and warnings_of(run) == []


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.req("C9", "A22")
@pytest.mark.parametrize("ranks", [1, 4])
def test_what_was_told_to_be_kept_is_there_whenever_ranks_are_killed(
    run: RunFolder, nodes: list[Path], tmp_path: Path, ranks: int
) -> None:
    """Two ranks to a node; each start goes on from the newest step."""
    recovered = 0

    def save(store_file: Path, rank: int) -> None:
        join(rank, ranks, store_file)
        store = node_store(run, nodes[rank // 2])
        store.recover()
        if rank == 0:
            store.clean()
        newest = store.newest()
        begin = 1 if newest is None else newest.step + 1
        for step in range(begin, begin + 10_000):
            assert store.save(State(step), background=step % 3 > 0)  # type: ignore[arg-type]

    for number in range(KILLS[ranks]):
        kept = told(run, Event.SAVED_LOCALLY)
        before = max((event["step"] for event in kept), default=0)
        published = max(run.published_steps(), default=0)
        recovered += before > published
        children = forked(ranks, lambda rank, number=number: save(tmp_path / f"store{number}", rank))  # type: ignore[misc]
        deadline = time.monotonic() + 30
        while max(run.published_steps(), default=0) < before:
            assert time.monotonic() < deadline, f"step {before} was kept, and is not published"
            time.sleep(0.01)
        further = random.randrange(4)
        while len(told(run, Event.SAVED_LOCALLY)) < len(kept) + further:
            assert time.monotonic() < deadline, "nothing is kept"
            time.sleep(0.005)
        time.sleep(random.uniform(0.0, 0.15))
        for child in random.sample(children, ranks):
            os.kill(child, signal.SIGKILL)
            time.sleep(random.choice([0, 0.01, 0.05]))
        for child in children:
            os.waitpid(child, 0)
        steps = run.published_steps()
        assert not any(damage(run.checkpoints / f"step_{step}") for step in steps)
        if steps:
            assert values_of(run, steps[-1]) == {float(steps[-1])}
        # The one that waits to be published, and the one that was written.
        assert all(len(list(node.glob("trierarch-*/step_*"))) <= 2 for node in nodes)
    assert recovered > KILLS[ranks] // 10, "the kills have hit nothing"
