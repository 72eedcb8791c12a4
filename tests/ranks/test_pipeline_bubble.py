"""The measured bubble of a pipeline against its theory, with stages that take a known time."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.pool import Ranks
from harness.toy import MODEL, QUIET
from torch import Tensor, nn

from train.config import load_config
from train.data.loader import Batch
from train.layout.check import lay_out
from train.layout.stages import SCHEDULES
from train.mesh import Mesh
from train.parallel.apply import build_parts
from train.parallel.pipeline import Pipelined

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
CLOSE = 0.06
"""How near a measured bubble must come to theory: by less than another chunk of 1F1B's steps would change it."""
STAGE_S = 0.04
"""Of a forward through what a rank holds; a backward takes twice as long."""
TRIES = 20


class Sleep(torch.autograd.Function):
    """Takes a while in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Sleeper(nn.Module):
    """A stage whose forward, backward for the input and backward for the weights take the same time."""

    def __init__(self, first: bool, last: bool, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(32))
        self.first, self.last, self.seconds = first, last, seconds

    def forward(self, x: Tensor, documents: None) -> Tensor:
        time.sleep(self.seconds)
        weight = Sleep.apply(self.weight, self.seconds)
        if self.first:
            out = Sleep.apply(weight, self.seconds).expand(*x.shape, 32)
        else:
            out = Sleep.apply(x, self.seconds) + weight
        return out.sum(-1, keepdim=True).expand(*x.shape[:2], 96) if self.last else out


def measured(schedule: str, pp: int) -> dict[str, float]:
    """What this rank would log after the best of some steps. Collective."""
    layout = [f"parallel.pp={pp}", f"parallel.schedule={schedule}", "parallel.micro_batch_size=2"]
    shape = ["model.vocab_size=96", "model.layers=8", "data.sequence_length=32", "loop.global_batch_size=8"]
    config = load_config([*MODEL, *QUIET, *shape, *layout, "precision=fp32"])
    mesh = Mesh.build(lay_out(config, pp), "cpu")
    with_stages = build_parts(config, mesh, CPU, None)
    held = [(part.embed_tokens is not None, part.norm is not None) for part in with_stages.parts]
    # A rank does the same work whether it holds one stage or two.
    parts = nn.ModuleList([Sleeper(*ends, STAGE_S / len(held)) for ends in held])
    engine = Pipelined(parts, config, mesh, CPU)
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    found = []
    # A busy machine adds waiting to some steps. All ranks of the pipeline see the same values.
    for _ in range(TRIES):
        engine.train([Batch(tokens, tokens, None)] * 4)
        found.append(engine.metrics())
        dist.barrier()
        if found[-1]["pipeline_bubble"] < found[-1]["pipeline_bubble_theory"] + CLOSE / 2:
            break
    return min(found, key=lambda step: step["pipeline_bubble"])


@pytest.mark.req("A4")
def test_bubble_is_that_of_theory(ranks: Ranks) -> None:
    two = ranks(2, lambda: {schedule: measured(schedule, 2) for schedule in SCHEDULES}, timeout_s=200)
    four = ranks(4, measured, "1f1b", 4)
    assert all(found == two[0] for found in two) and all(found == four[0] for found in four)
    for layout, values in {**two[0], "1f1b on four": four[0]}.items():
        assert values["pipeline_bubble"] == pytest.approx(values["pipeline_bubble_theory"], abs=CLOSE), layout
    bubble = {schedule: values["pipeline_bubble"] for schedule, values in two[0].items()}
    for looped in ("looped_bfs", "interleaved_1f1b"):
        assert max(bubble["interleaved_zero_bubble"], bubble["zbv"]) < bubble[looped]
        assert bubble[looped] < min(bubble["gpipe"], bubble["1f1b"])
    assert bubble["1f1b"] < four[0]["pipeline_bubble"]
