"""How an offloaded update runs beside the training, and what it takes of memory."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness.offload import opened
from harness.pool import Ranks
from harness.toy import toy_overrides, train_toy
from torch import Tensor

from contract.errors import NodeError
from contract.run_folder import RunFolder, read_json_lines
from train.loop import Parts
from train.model.llama import Llama
from train.offload.buckets import local
from train.offload.nvme_states import NvmeStates
from train.offload.states import Resident
from train.offload.update import Progress
from train.optim.master import MasterAdamW

pytestmark = pytest.mark.slow

WAIT_S = 30.0
HOST = ["offload.optimizer=cpu", "offload.gradients=cpu"]


def step(parts: Parts) -> None:
    """One step of training."""
    parts.engine.train(next(parts.loader).micro_batches)
    parts.state.optimizer.step()
    parts.state.optimizer.zero_grad()


@pytest.mark.req("A11")
@pytest.mark.parametrize("zero", [0, 3])
def test_a_forward_starts_as_its_first_weights_arrive(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path, zero: int
) -> None:
    """The last bucket's update waits here for the next forward to have begun; the head's forward waits for it."""

    def train() -> None:
        began, asked, order = threading.Event(), threading.Event(), []
        get, wait_for = Resident.get, Progress.wait_for

        def late(self: Resident, index: int) -> Tensor:
            block = get(self, index)
            if index == last and parts.state.step == 1:
                assert began.wait(WAIT_S), "the forward waits for all weights"
                asked.wait(WAIT_S / 10)  # else the head would be in time by chance
                order.append("updated")
            return block

        def note_wait(self: Progress, index: int) -> None:
            if index == last and began.is_set():
                asked.set()
            wait_for(self, index)

        def note(name: str) -> Any:
            def hook(*_: object) -> None:
                began.set()
                order.append(name)

            return hook

        overrides = toy_overrides(toy_tokens, tmp_path, "run", f"parallel.zero={zero}", *HOST)
        with opened(overrides) as parts:
            (part,) = parts.state.parts
            assert isinstance(parts.state.optimizer, MasterAdamW)
            assert isinstance(part, Llama) and part.lm_head is not None
            last = len(parts.state.optimizer._buckets) - 1
            Resident.get, Progress.wait_for = late, note_wait  # type: ignore[method-assign]
            try:
                parts.state.step = 1
                parts.engine.train(next(parts.loader).micro_batches)
                part.layers["0"].register_forward_hook(note("first"))
                part.lm_head.register_forward_pre_hook(note("head"))
                parts.state.optimizer.step()
                parts.state.optimizer.zero_grad()
                parts.engine.train(next(parts.loader).micro_batches)
            finally:
                Resident.get, Progress.wait_for = get, wait_for  # type: ignore[method-assign]
        assert order[:3] == ["first", "updated", "head"]

    ranks(2, train)


@pytest.mark.req("D7")
def test_an_error_of_an_update_ends_the_run_as_what_it_is(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path
) -> None:
    def train() -> None:
        def broken(self: Resident, index: int, changed: bool = True) -> None:
            raise NodeError("this disk is no more")

        put = Resident.put
        overrides = toy_overrides(toy_tokens, tmp_path, "run", *HOST, "parallel.zero=3")
        with opened(overrides) as parts:
            Resident.put = broken  # type: ignore[method-assign]
            try:
                step(parts)
                with pytest.raises(NodeError, match="this disk is no more"):
                    parts.engine.train(next(parts.loader).micro_batches)
                with pytest.raises(NodeError, match="this disk is no more"):
                    parts.state.state_dict()
            finally:
                Resident.put = put  # type: ignore[method-assign]

    ranks(1, train)


@pytest.mark.req("D7")
def test_what_is_moved_and_waited_for_is_in_the_metrics(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path
) -> None:
    settings = ["offload.optimizer=nvme", f"offload.nvme_path=[{tmp_path}]", "offload.prefetch_layers=1"]
    more = [*settings, "offload.gradients=cpu", "precision=bf16", "loop.steps=3", "loop.eval_batches=0"]
    accumulation = [
        "parallel.zero=3",
        "parallel.gradient_accumulation_steps=2",
        "loop.global_batch_size=null",
    ]

    deep = ["model.layers=8"]

    def parameters() -> int:
        with opened(toy_overrides(toy_tokens, tmp_path, "other", "parallel.zero=3", *deep)) as parts:
            return sum(local(p).numel() for p in parts.state.parts.parameters())

    size = ranks(2, parameters)[0]
    ranks(2, train_toy, toy_overrides(toy_tokens, tmp_path, "run", *more, *accumulation, *deep))
    lines = [line for line in read_json_lines(RunFolder(tmp_path / "run").metrics) if "loss" in line]
    for line in lines:
        # Two micro-batches, each reduced by itself.
        assert line["offload_gradients_to_cpu_bytes"] == 2 * 4 * size
        assert line["offload_parameters_from_cpu_bytes"] == 2 * size
        assert line["offload_exposed_s"] >= 0 and 0 <= line["offload_hidden_s"] <= line["offload_update_s"]
    # What a line is too early for comes with the next: in the end all but the blocks that stayed in memory.
    written = sum(line["offload_states_to_nvme_bytes"] for line in lines)
    read = sum(line["offload_states_from_nvme_bytes"] for line in lines)
    assert 0.5 * 36 * size < read and 0.5 * 36 * size < written


@pytest.mark.req("C6")
def test_saving_and_loading_take_no_more_memory_than_the_pool(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path
) -> None:
    """The states are several times as large as the pool, the pool as large as it says."""
    shape = [
        "model.dim=256",
        "model.layers=16",
        "model.ffn_dim=1024",
        "precision=bf16",
        "loop.eval_batches=0",
    ]
    settings = ["offload.optimizer=nvme", f"offload.nvme_path=[{tmp_path}]", "offload.prefetch_layers=1"]
    overrides = toy_overrides(toy_tokens, tmp_path, "run", *shape, *settings)

    def states(parts: Parts) -> NvmeStates:
        assert isinstance(parts.state.optimizer, MasterAdamW)
        found = parts.state.optimizer._states
        assert isinstance(found, NvmeStates)
        return found

    def save_and_load() -> tuple[int, int, int, int]:
        with opened(overrides) as parts:
            step(parts)
            parts.state.optimizer.finish()
            size = sum(p.numel() for p in parts.state.parts.parameters())
            pool = states(parts).held_bytes
            parts.state.step = 1
            with peak() as saving:
                assert parts.checkpoints.save(parts.state)
            manifest = parts.checkpoints.newest()
            assert manifest is not None
            with peak() as loading:
                parts.checkpoints.load(parts.state, manifest)
        return 12 * size, pool, saving[0], loading[0]

    all_bytes, pool, saving, loading = ranks(1, save_and_load)[0]
    assert all_bytes > 4 * pool
    # Beside the pool, which is there already, a copy of a tensor or two.
    assert saving < 0.05 * all_bytes and loading < 0.05 * all_bytes, (all_bytes, pool, saving, loading)


@contextmanager
def peak() -> Iterator[list[int]]:
    """Context that finds out by how much the memory of this process has grown within it, at most, in bytes."""
    found: list[int] = []
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    yield found
    found.append(max(_resident("VmHWM") - before, 0))


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
