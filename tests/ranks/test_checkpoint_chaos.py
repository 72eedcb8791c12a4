"""Ranks killed at any moment of a save: what is published is whole, and nothing that was published is lost."""

import os
import random
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from contract.run_folder import Event, RunFolder
from train.checkpoint.compress.plan import Wish
from train.checkpoint.manifest import Manifest, read_manifest
from train.checkpoint.reader import SafeReader, damage, load_tree
from train.checkpoint.retain import Retention
from train.checkpoint.staging import Staging
from train.checkpoint.store import CheckpointStore

KILLS = {1: 120, 4: 80}
PLAIN = Wish(compress=False)
DELTA = Wish(compress=True, deltas=True, longest_chain=2)


@dataclass
class State:
    """As little of a `TrainState` as a store needs."""

    step: int

    def state_dict(self) -> dict[str, Any]:
        return {"model": {f"w{number}": torch.full((300,), float(self.step)) for number in range(8)}}

    def stored(self) -> Mapping[Any, Any]:
        return {}


def save_on(run: RunFolder, rank: int, ranks: int, store_file: Path, begin: int, wish: Wish) -> None:
    """Save step after step, as one rank; some are compressed in peace, the others in a hurry."""
    dist.init_process_group("gloo", store=dist.FileStore(str(store_file), ranks), rank=rank, world_size=ranks)
    group = dist.group.WORLD
    assert group is not None
    store = CheckpointStore(
        run,
        group,
        Manifest(0, ranks, {}, {}),
        Retention(2, keep_every_steps=7),
        lambda: None,
        wish=wish,
        staging=Staging(lambda: 1 << 30, pinned=False),
    )
    if rank == 0:
        store.clean()
    for step in range(begin, begin + 10_000):
        assert store.save(State(step), background=step % 3 > 0)  # type: ignore[arg-type]
        if step % 4 > 0:
            store.settle(lambda: False)


def half_compressed(step: Path) -> bool:
    """Whether a step has a file twice, or a manifest that does not count: a compression of it was killed."""
    names = {path.name for path in step.glob("*.distcp*")}
    twice = len({name.partition(".z")[0] for name in names}) < len(names)
    return twice or any(step.glob("manifest.json.*"))


def start(run: RunFolder, ranks: int, store_file: Path, begin: int, wish: Wish) -> list[int]:
    """Fork the ranks; return their process ids."""
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                save_on(run, rank, ranks, store_file, begin, wish)
            finally:
                os._exit(1)
        children.append(child)
    return children


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.req("C9", "A22")
@pytest.mark.parametrize(
    "wish", [Wish(compress=False), Wish(compress=True, deltas=True, longest_chain=2)], ids=["plain", "delta"]
)
@pytest.mark.parametrize("ranks", [1, 4])
def test_what_is_published_is_whole_whenever_ranks_are_killed(tmp_path: Path, ranks: int, wish: Wish) -> None:
    """With deltas every step is compressed, and stored anew when its parent goes."""
    run = RunFolder(tmp_path / "run")
    run.create()
    newest = left_over = half_done = 0
    for number in range(KILLS[ranks]):
        children = start(run, ranks, tmp_path / f"store{number}", newest + 1, wish)
        time.sleep(random.uniform(0.1, 0.6 + 0.2 * ranks))
        for child in random.sample(children, ranks):
            os.kill(child, signal.SIGKILL)
            time.sleep(random.choice([0, 0.01, 0.05]))
        for child in children:
            os.waitpid(child, 0)
        told = [event["step"] for event in run.read_events() if event["event"] == Event.SAVED]
        steps = run.published_steps()
        problems = {step: damage(run.checkpoints / f"step_{step}") for step in steps}
        assert not any(problems.values()), problems
        # A rank may be killed between the rename and the word of it, of this start and of the one before.
        last = max([newest, *told])
        assert max(steps, default=0) in (last, last + 1)
        assert max(steps, default=0) >= newest
        newest = max(steps, default=0)
        left_over += any("." in path.name for path in run.checkpoints.iterdir())
        half_done += any(map(half_compressed, run.checkpoints.iterdir()))
        for step in steps:
            folder = run.checkpoints / f"step_{step}"
            tree = {"model": {f"w{index}": torch.empty(300) for index in range(8)}}
            load_tree(tree, SafeReader(folder, read_manifest(folder)))
            assert all(bool((tensor == step).all()) for tensor in tree["model"].values())
    assert half_done > KILLS[ranks] // 20 or not wish.compress, "the kills have hit no compression"
    assert newest > 20 and left_over > KILLS[ranks] // 10, "the kills have hit nothing"
