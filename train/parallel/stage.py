"""One stage as torch's schedules see it: what it hands over, how it computes, when its gradients are reduced."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from train.config import TrainConfig
from train.layout.stages import schedule_of
from train.mesh import Mesh
from train.parallel.busy import BusyTime
from train.parallel.data import accumulate
from train.parallel.engine import compute_context


@dataclass(frozen=True)
class Boundary:
    """The hidden state between two stages."""

    shape: tuple[int, int, int]
    """(samples of a micro-batch, this rank's share of the sequence, dim)."""
    dtype: torch.dtype
    """Of what travels: that of the matrix products."""
    tokens: int
    """This rank's share of the sequence where it is not split further by tensor parallelism."""
    device: torch.device

    @classmethod
    def of(cls, config: TrainConfig, mesh: Mesh, device: torch.device) -> "Boundary":
        """What the stages of `config` hand over."""
        tokens = own = config.data.sequence_length // mesh.dims.cp
        if config.parallel.sequence_parallel:
            own //= mesh.dims.tp
        shape = (config.parallel.micro_batch_size, own, config.model.dim)
        return cls(shape, getattr(torch, config.precision.compute.value), tokens, device)

    def hidden(self) -> Tensor:
        """A hidden state without memory."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta", requires_grad=True)

    def token_ids(self) -> Tensor:
        """Token ids without memory, the input of the first stage."""
        return torch.empty(self.shape[0], self.tokens, dtype=torch.int64, device="meta")


@contextmanager
def _as_raised() -> Iterator[None]:
    """Context in which torch's wrapping of an error is undone: the run tells a full device or a lost peer by it."""
    try:
        yield
    except RuntimeError as error:
        raise error.__cause__ or error from None


class TimedStage(PipelineStage):
    """A stage that computes in its precision, keeps time, and reduces gradients as its ZeRO stage says.

    Shapes are told to torch in advance: else it would run the model to find them, before the first step and after
    each evaluation.
    """

    def __init__(
        self,
        part: nn.Module,
        index: int,
        count: int,
        boundary: Boundary,
        busy: BusyTime,
        config: TrainConfig,
        mesh: Mesh,
    ) -> None:
        super().__init__(
            part,
            index,
            count,
            boundary.device,
            input_args=boundary.token_ids() if index == 0 else boundary.hidden(),
            # Nothing is allocated for what the last stage returns, its shape does not matter.
            output_args=boundary.hidden(),
            group=mesh.group("pp"),
        )
        self._boundary = boundary
        self._busy = busy
        self._config = config
        self._mesh = mesh
        # Gradients of a backward in two halves are whole only after the second: they wait for the end of the step.
        self._reduces_at_end = schedule_of(config.parallel).splits_backward

    def forward_maybe_with_nosync(self, *args: Tensor, **kwargs: Any) -> Tensor:
        """Compute the part; between stages travel contiguous tensors of the boundary's type."""
        plain = not isinstance(self.submod, FSDPModule)
        # Under autocast the residual stream is fp32; a sharded part has one of the type that travels.
        inputs = args if self.is_first or not plain else tuple(hidden.float() for hidden in args)
        with compute_context(self._config, self._mesh, self._boundary.device):
            out: Tensor = self.submod(*inputs, **kwargs)
        return out if self.is_last else out.to(self._boundary.dtype).contiguous()

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Compute one micro-batch; see torch."""
        with self._busy.computing(), _as_raised():
            out = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if self.is_last and not self.has_backward:
            # torch keeps what a backward would need: in an evaluation the logits of all micro-batches.
            self.fwd_cache[fwd_chunk_id] = ((), [])
        return out

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Backward of one micro-batch, or its first half; see torch."""
        if not self.has_backward:
            return
        with self._busy.computing(), _as_raised():
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        # What is sent must be contiguous.
        self.bwd_cache[bwd_chunk_id] = tuple(
            None if gradient is None else gradient.contiguous() for gradient in self.bwd_cache[bwd_chunk_id]
        )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Second half of the backward of one micro-batch; see torch."""
        if self.has_backward:
            with self._busy.computing(), _as_raised():
                super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Run a backward; torch alone would keep whole gradients until the end of the step at every ZeRO stage."""
        if self._reduces_at_end or not isinstance(self.submod, FSDPModule):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        with accumulate(self.submod, self._config.parallel.zero, last_backward):
            torch.autograd.backward(bwd_kwargs["stage_output"], bwd_kwargs["output_grads"])
        return tuple(value.grad for value in bwd_kwargs["input_values"] if isinstance(value, Tensor)), None

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce the gradients of the step where that was not done with the last micro-batch."""
        if self.has_backward and self._reduces_at_end:
            with self._busy.aside():
                super().perform_reduce_grad(grad_scale_factor)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Gradients for the stage before on the same rank; torch asks for them in an evaluation too."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        """Take gradients from the stage after on the same rank; in an evaluation there are none."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)
