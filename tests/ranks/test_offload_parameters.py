"""Weights that come from the host or from disks when a layer needs them: the same numbers in bounded memory."""

import ctypes
import gc
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness.offload import assert_same, outcome
from harness.one_step import SHAPE, OneStep, make_batch
from harness.pool import Ranks, RanksError
from torch import Tensor
from torch.distributed.tensor import DTensor

from contract.run_folder import RunFolder, read_json_lines
from train.config import load_config
from train.layout.check import lay_out
from train.mesh import Mesh
from train.monitor.live_bytes import local
from train.offload import parameters
from train.offload.config import Tier
from train.offload.nvme_states import NvmeStates
from train.offload.seam import around_read, groups_of, read_again, sharded_modules
from train.offload.shelf import MemoryShelf
from train.offload.staging import Far
from train.offload.transfer import Transfer
from train.optim.adamw import build_optimizer
from train.optim.master import MasterAdamW
from train.parallel.apply import build_engine, build_parts
from train.parallel.fill import draw

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SLOW = pytest.mark.slow
LAYOUTS = [
    (1, "zero=3", "fp32"),
    (2, "zero=3 gradient_accumulation_steps=2", "bf16"),
    pytest.param(2, "zero=3 recompute=full model.tie_embeddings=true", "fp32", marks=SLOW),
    pytest.param(
        3, "zero=3 micro_batch_size=1 model.ffn_dim=72 loop.global_batch_size=12", "bf16", marks=SLOW
    ),
    pytest.param(4, "zero=3 tp=2", "bf16", marks=pytest.mark.chaos),
    pytest.param(4, "zero=3 pp=2 micro_batch_size=1", "bf16", marks=SLOW),
    pytest.param(
        4, "zero=3 pp=2 micro_batch_size=1 schedule=interleaved_1f1b model.layers=4", "fp32", marks=SLOW
    ),
    pytest.param(4, "zero=3 dp_replicate=2", "fp32", marks=SLOW),
]
OFFLOAD = ["precision=bf16", "parallel.zero=3", "offload.optimizer=cpu", "offload.parameters=cpu"]
FORWARD = ["embed", "0", "1", "2", "3", "head"]
BACKWARD = ["3", "2", "1", "0"]
"""The head is kept from forward to backward, which has no need of the embedding."""


@pytest.mark.req("C6", "B9")
@pytest.mark.parametrize(
    ("size", "layout", "precision"), LAYOUTS, ids=lambda value: str(value).replace(" ", ",")
)
def test_weights_from_elsewhere_give_the_same_bits(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path, size: int, layout: str, precision: str
) -> None:
    common = [f"precision={precision}"]
    common += [one if "." in one.split("=")[0] else f"parallel.{one}" for one in layout.split()]
    if "gradient_accumulation_steps" in layout:
        common.append("loop.global_batch_size=null")
    run = partial(outcome, ranks, size, toy_tokens, tmp_path)
    tiers = {
        "cpu": ["offload.optimizer=cpu", "offload.parameters=cpu", "offload.gradients=cpu"],
        "nvme": [
            "offload.optimizer=nvme",
            "offload.parameters=nvme",
            "offload.prefetch_layers=1",
            "offload.nvme_checksums=true",
            f"offload.nvme_path=[{tmp_path}]",
        ],
    }
    if size > 2:
        del tiers["cpu"]  # layouts of fewer ranks have both
    expected = run("none", *common)
    for tier, more in tiers.items():
        assert_same(run(tier, *common, *more), expected, tier)
    line = next(read_json_lines(RunFolder(tmp_path / "nvme").metrics))
    assert line["offload_parameters_to_nvme_bytes"] > 0 and line["offload_parameters_from_nvme_bytes"] > 0
    assert not list(tmp_path.glob("trierarch-*")), "files are left"


@pytest.mark.parametrize("size", [1, 2])
def test_torch_reads_shards_at_the_seam_alone(ranks: Ranks, size: int) -> None:
    def look() -> list[str]:
        config = load_config([*SHAPE, *OFFLOAD])
        mesh = Mesh.build(lay_out(config, dist.get_world_size()), "cpu")
        sharded = build_parts(config, mesh, CPU, seed=1)
        reads: list[str] = []
        groups = [group for module in sharded_modules(sharded.parts[0]) for group in groups_of(module)]
        assert [read_again(group) for group in groups] == [name in BACKWARD for name in FORWARD]
        for name, group in zip(FORWARD, groups, strict=True):
            # Outside the seam a shard is a stand-in: NaN, without memory of its own.
            for held in group.fsdp_params:
                assert held._sharded_param_data.untyped_storage().nbytes() == held.sharded_param.itemsize
            around_read(group, partial(reads.append, name), lambda: None)
        engine = build_engine(sharded, config, CPU)
        loss = engine.train([make_batch(config, mesh, index) for index in range(2)])
        assert torch.isfinite(loss)
        for parameter in sharded.parts.parameters():
            assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor)
            assert parameter.to_local().isnan().all() and torch.isfinite(parameter.grad.to_local()).all()
        sharded.parts.zero_grad()
        with torch.no_grad():
            engine.evaluate([make_batch(config, mesh, 0)])
        return reads

    for reads in ranks(size, look):
        assert reads == 2 * [*FORWARD, *BACKWARD] + FORWARD


class Log(MemoryShelf):
    """Notes what was wanted when a block is read."""

    def __init__(self, sizes: Sequence[int], pinned: bool) -> None:
        super().__init__(sizes, pinned)
        self.wanted: list[list[int]] = []

    def want(self, numbers: Sequence[int]) -> None:
        self.wanted.append(list(numbers))


@pytest.mark.req("C6")
@pytest.mark.parametrize("ahead", [1, 2])
def test_blocks_are_wanted_in_the_order_of_their_use(ranks: Ranks, ahead: int) -> None:
    def look() -> list[list[str]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parameters, "MemoryShelf", Log)
            step = OneStep([*OFFLOAD, f"offload.prefetch_layers={ahead}"])
        assert step.sharded.shelved is not None and isinstance(step.sharded.shelved._shelf, Log)
        return [[FORWARD[number] for number in numbers] for numbers in step.sharded.shelved._shelf.wanted]

    order = 3 * [*FORWARD, *BACKWARD]
    for wanted in ranks(2, look):
        # A block that is in use already, at the turn, is not wanted once more.
        expected = [
            list(dict.fromkeys(order[place : place + 1 + ahead]))
            for place in range(2 * len([*FORWARD, *BACKWARD]))
        ]
        assert wanted == expected


@pytest.mark.req("C6", "B9")
@pytest.mark.parametrize("tier", [Tier.cpu, Tier.nvme])
def test_blocks_pass_through_a_device_with_memory_of_its_own(
    ranks: Ranks, tmp_path: Path, tier: Tier
) -> None:
    """Copies ahead of use, and blocks that leave late, with a CPU in the place of the device."""

    def look(device_has_memory: bool) -> dict[str, Tensor]:
        with pytest.MonkeyPatch.context() as patch:
            if device_has_memory:
                patch.setattr(parameters, "Near", lambda shelf: Far(shelf, Transfer(CPU)))
            more = [f"offload.parameters={tier.value}", f"run.root={tmp_path}"]
            more += [f"offload.nvme_path=[{tmp_path}]"] * (tier is Tier.nvme)
            step = OneStep([*OFFLOAD[:-1], *more])
        shelved = step.sharded.shelved
        assert shelved is not None and isinstance(shelved._staging, Far) == device_has_memory
        found = step.gradients()
        optimizer = build_optimizer(step.sharded.parts, step.config, CPU, shelved)
        assert isinstance(optimizer, MasterAdamW)
        optimizer.fill(lambda name, shape, where: torch.zeros(shape)[where] + 0.01)
        for index in range(2):
            found[f"loss {index}"] = step._engine.train(step._batches)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.finish()
        if device_has_memory:
            assert optimizer.metrics()["offload_parameters_from_cpu_bytes"] > 0
        optimizer.close()
        return found

    for found, expected in zip(ranks(2, look, True), ranks(2, look, False), strict=True):
        assert_same(found, expected, tier.value)


@pytest.mark.req("C6")
@pytest.mark.slow
def test_a_model_several_times_the_memory_of_the_host_trains(ranks: Ranks, tmp_path: Path) -> None:
    """Weights, fp32 weights and moments on disks: what a process takes at most, and what it would take with them."""
    disks = ["offload.optimizer=nvme", "offload.parameters=nvme", f"offload.nvme_path=[{tmp_path}]"]
    disks += ["offload.prefetch_layers=1", f"offload.host_budget_gb={BUDGET_GB}"]
    shape = ["dim=256", "heads=8", "ffn_dim=1024", "layers=24", "vocab_size=64"]

    def train(more: list[str]) -> tuple[list[float], int, int, int]:
        began_bytes = most_bytes()
        overrides = [
            *(f"model.{one}" for one in shape),
            "data.sequence_length=32",
            f"run.root={tmp_path}",
            *more,
        ]
        step = OneStep([*OFFLOAD[:2], *overrides])
        optimizer = build_optimizer(step.sharded.parts, step.config, CPU, step.sharded.shelved)
        assert isinstance(optimizer, MasterAdamW)
        optimizer.fill(draw(step.config.model, seed=1))
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            losses.append(float(step._engine.train(step._batches)))
            optimizer.step()
        optimizer.finish()
        parameters = sum(local(parameter).numel() for parameter in step.sharded.parts.parameters())
        pools_bytes = 0
        if step.sharded.shelved is not None:
            assert isinstance(optimizer._states, NvmeStates)
            pools_bytes = step.sharded.shelved.host_bytes + optimizer._states.held_bytes
        optimizer.close()
        return losses, parameters, pools_bytes, most_bytes() - began_bytes

    ranks(1, lambda: OneStep(OFFLOAD).loss)  # what is imported, and made once
    ((losses, parameters, pools_bytes, taken_bytes),) = ranks(1, train, disks, timeout_s=120)
    on_host = ["offload.optimizer=cpu", "offload.parameters=cpu"]
    with pytest.raises(RanksError, match=rf"offload.host_budget_gb={BUDGET_GB}: rank 0 needs 0.32"):
        ranks(1, train, [*on_host, f"offload.host_budget_gb={BUDGET_GB}"], timeout_s=120)
    ((same, _, _, all_bytes),) = ranks(1, train, ["offload.optimizer=cpu"], timeout_s=120)
    assert losses == same
    state_bytes = (2 + 12) * parameters
    assert state_bytes > 5 * BUDGET_GB * 1e9 > 5 * pools_bytes > 0
    # All else, the device's part of it too, is the same, but for what malloc has left from other tests.
    assert all_bytes - taken_bytes > 0.5 * state_bytes


BUDGET_GB = 0.05
"""Of the host, for a model whose weights and states take 0.32."""


def most_bytes() -> int:
    """Most memory that this process has had, not counting what was freed before the last call."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    (line,) = [one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmHWM")]
    Path("/proc/self/clear_refs").write_text("5")
    return 1024 * int(line.split()[1])
