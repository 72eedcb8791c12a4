"""What a step of a pipeline really keeps, against the arithmetic of the dry run and of the recompute budget."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from harness.one_step import CPU, SHAPE, make_batch
from harness.pool import Ranks
from torch import Tensor

from train.config import load_config
from train.layout.check import lay_out
from train.layout.recompute import plan
from train.mesh import Mesh
from train.monitor.live_bytes import LiveBytes
from train.parallel.apply import build_engine, build_parts
from train.parallel.stage import TimedStage

pytestmark = pytest.mark.slow

PP = 2


class Step:
    """A pipeline whose memory is watched from its first tensor on. Collective."""

    def __init__(self, micro_batches: int, *settings: str) -> None:
        more = [f"parallel.pp={PP}", f"parallel.gradient_accumulation_steps={micro_batches}", *settings]
        config = load_config([*SHAPE, *more])
        dims = lay_out(config, dist.get_world_size())
        mesh = Mesh.build(dims, "cpu")
        self._batches = [make_batch(config, mesh, index) for index in range(micro_batches)]
        self._live = LiveBytes()
        with self._live:
            sharded = build_parts(config, mesh, CPU, seed=1)
            self._engine = build_engine(sharded, config, CPU)
        self._parts = sharded.parts
        self._sent: dict[tuple[int, int], Tensor] = {}
        self._through: list[Tensor] = []
        self.reckoned = plan(config, dims, mesh.coordinate("pp"), micro_batches, "cpu").kept_bytes

    def most_bytes(self, evaluate: bool = False) -> int:
        """Take two steps, or evaluations; returns the most that is kept between two pieces of their work."""
        run = self._engine.evaluate if evaluate else self._engine.train
        with self._live, self._watched() as found:
            run(self._batches)
            self.end()
            run(self._batches)
        return max(found)

    def kept_bytes(self) -> int:
        """Bytes beside weights, their gradients and what has been sent and is not needed any more.

        gloo lets go of what has been sent at the end of a step.
        """
        parameters = list(self._parts.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        return self._live.count(without=[*parameters, *self._parts.buffers(), *gradients, *self._through])

    def end(self) -> None:
        """Forget what has been sent, when nobody needs it any more."""
        self._sent.clear()
        self._through.clear()
        gc.collect()

    @contextmanager
    def _watched(self) -> Iterator[list[int]]:
        found: list[int] = []
        torchs = {name: getattr(TimedStage, name) for name in WATCHED}

        def forward(stage: TimedStage, index: int, *args: Any, **kwargs: Any) -> Any:
            result = torchs["forward_one_chunk"](stage, index, *args, **kwargs)
            found.append(self.kept_bytes())
            return result

        def backward(stage: TimedStage, index: int, *args: Any, **kwargs: Any) -> None:
            found.append(self.kept_bytes())  # the gradient that has been received is there, too
            inputs = stage.fwd_cache[index][1] if stage.has_backward else []
            torchs["backward_one_chunk"](stage, index, *args, **kwargs)
            assert all(given.grad is None for given in inputs), "it is sent and then of no use"
            del inputs
            if (stage.stage_index, index) in self._sent:
                self._through.append(self._sent.pop((stage.stage_index, index)))
            found.append(self.kept_bytes())

        def send_forward(stage: TimedStage, index: int) -> list[dist.P2POp]:
            operations: list[dist.P2POp] = torchs["get_fwd_send_ops"](stage, index)
            for operation in operations:
                if stage.has_backward:
                    self._sent[stage.stage_index, index] = operation.tensor
                else:
                    self._through.append(operation.tensor)
            return operations

        def send_backward(stage: TimedStage, index: int) -> list[dist.P2POp]:
            operations: list[dist.P2POp] = torchs["get_bwd_send_ops"](stage, index)
            self._through.extend(operation.tensor for operation in operations)
            return operations

        ours = (forward, backward, send_forward, send_backward)
        with mock.patch.multiple(TimedStage, **dict(zip(WATCHED, ours, strict=True))):
            yield found


WATCHED = ("forward_one_chunk", "backward_one_chunk", "get_fwd_send_ops", "get_bwd_send_ops")
LAYOUTS = [
    "precision=fp32 parallel.schedule=gpipe",
    "precision=fp32 parallel.schedule=1f1b",
    "precision=fp32 parallel.schedule=looped_bfs",
    "precision=fp32 parallel.schedule=interleaved_1f1b",
    "precision=fp32 parallel.schedule=interleaved_zero_bubble",
    "precision=fp32 parallel.schedule=zbv",
    "precision=fp32 parallel.schedule=dualpipev",
    "precision=bf16 parallel.schedule=1f1b",
    "precision=bf16 parallel.schedule=zbv",
    "precision=fp32 parallel.schedule=1f1b parallel.recompute=selective",
    "precision=fp32 parallel.schedule=interleaved_1f1b parallel.recompute=full",
    "precision=fp32 parallel.schedule=zbv parallel.recompute=full",
    "precision=fp32 parallel.schedule=interleaved_1f1b parallel.recompute=auto parallel.recompute_budget_gb=0.008",
]


@pytest.mark.req("A10")
def test_a_step_keeps_what_the_arithmetic_says(ranks: Ranks) -> None:
    """And no tensor that is not a weight or its gradient outlives it: neither what is received nor its gradient."""

    def measure() -> list[tuple[int, int, int]]:
        found = []
        for layout in LAYOUTS:
            step = Step(6, *layout.split())
            most = step.most_bytes()
            step.end()
            found.append((most, step.reckoned, step.kept_bytes()))
        return found

    for of_rank in ranks(PP, measure, timeout_s=200):
        for layout, (most, reckoned, left) in zip(LAYOUTS, of_rank, strict=True):
            assert 0.9 * reckoned < most < 1.01 * reckoned, layout
            assert left == 0, layout
            if "auto" in layout:
                assert most <= 8_000_000


def test_an_evaluation_keeps_no_micro_batch_but_its_last(ranks: Ranks) -> None:
    def compare() -> None:
        for schedule in ("gpipe", "interleaved_1f1b", "zbv"):
            few, many = (
                Step(count, "precision=fp32", f"parallel.schedule={schedule}").most_bytes(evaluate=True)
                for count in (4, 8)
            )
            hidden_bytes = 4 * 128 * 64 * 4
            assert many - few < hidden_bytes, schedule  # tokens

    ranks(PP, compare)
