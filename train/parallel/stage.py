"""One stage as torch's schedules see it: what it hands over, how it computes, when its gradients are reduced."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from train.config import TrainConfig
from train.layout.in_flight import splits_backward
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


def run_part(
    part: nn.Module,
    given: Tensor,
    documents: Tensor | None,
    last: bool,
    config: TrainConfig,
    mesh: Mesh,
    boundary: Boundary,
) -> Tensor:
    """Take token ids, or what the stage before has handed over, through a part: its logits if it is the last.

    Else what it hands over: contiguous and of the boundary's type.
    """
    # Under autocast the residual stream is fp32; a sharded part has one of the type that travels.
    if given.is_floating_point() and not isinstance(part, FSDPModule):
        given = given.float()
    with compute_context(config, mesh, boundary.device):
        out: Tensor = part(given, documents)
    return out if last else out.to(boundary.dtype).contiguous()


@contextmanager
def _as_raised() -> Iterator[None]:
    """Context in which torch's wrapping of an error is undone: the run tells a full device or a lost peer by it."""
    try:
        yield
    except RuntimeError as error:
        raise error.__cause__ or error from None


class TimedStage(PipelineStage):
    """A stage that computes in its precision, keeps time and little else, and reduces gradients as its ZeRO stage says.

    Shapes are told to torch in advance: else it would run the model to find them, before the first step and after
    each evaluation. torch alone would hold what is received, and its gradients, of all micro-batches of a step, from
    one step to the next; here each lives as long as it is needed.
    """

    def __init__(
        self,
        part: nn.Module,
        index: int,
        count: int,
        boundary: Boundary,
        loss: Callable[[Tensor, Tensor], Tensor],
        busy: BusyTime,
        config: TrainConfig,
        mesh: Mesh,
    ) -> None:
        """`loss` takes logits and targets, in the last stage: only its result leaves the stage."""
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
        self._nothing = boundary.hidden()
        self._loss = loss
        self._busy = busy
        self._config = config
        self._mesh = mesh
        # Gradients of a backward in two halves are whole only after the second: they wait for the end of the step.
        self._reduces_at_end = schedule_of(config.parallel).splits_backward
        self._splits = splits_backward(config.parallel)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Make room for the input of one micro-batch; see torch."""
        self._allocate(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Make room for the gradient of one micro-batch; see torch."""
        if self.has_backward:
            self._allocate(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_maybe_with_nosync(
        self, given: Tensor, documents: Tensor | None = None, targets: Tensor | None = None
    ) -> Tensor:
        """Compute the part; the result of the last stage is its loss."""
        out = run_part(self.submod, given, documents, self.is_last, self._config, self._mesh, self._boundary)
        if not self.is_last:
            return out
        assert targets is not None
        return self._loss(out, targets)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Compute one micro-batch; see torch."""
        with self._busy.computing(), _as_raised():
            out = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._release(self.args_recv_info[fwd_chunk_id])
        if not self.has_backward:
            # What a backward would need is of no use; what has been computed last is yet to be sent.
            self.fwd_cache = {fwd_chunk_id: (self.fwd_cache[fwd_chunk_id][0], [])}
        return out

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Backward of one micro-batch, or its first half; see torch."""
        if not self.has_backward:
            return
        whole = full_backward or not self._splits
        with self._busy.computing(), _as_raised():
            super().backward_one_chunk(bwd_chunk_id, loss, whole, last_backward)
        self._release(self.grad_recv_info[bwd_chunk_id])
        if not whole and not self.is_first:
            # The second half needs none of the tensors that torch keeps for it; the first stage does all of it then.
            self.backward_state[bwd_chunk_id] = ((), self.backward_state[bwd_chunk_id][1], (), None)
        # What is sent must be contiguous.
        self.bwd_cache[bwd_chunk_id] = tuple(
            None if gradient is None else gradient.contiguous() for gradient in self.bwd_cache[bwd_chunk_id]
        )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Second half of the backward of one micro-batch; see torch."""
        if self.has_backward and self._splits:
            with self._busy.computing(), _as_raised():
                super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Run a backward; torch alone would keep whole gradients until the end of the step at every ZeRO stage."""
        inputs = [value for value in bwd_kwargs.get("input_values", ()) if isinstance(value, Tensor)]
        if self._reduces_at_end or not isinstance(self.submod, FSDPModule):
            found = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        else:
            with accumulate(self.submod, self._config.parallel.zero, last_backward):
                torch.autograd.backward(bwd_kwargs["stage_output"], bwd_kwargs["output_grads"])
            found = tuple(value.grad for value in inputs), None
        for value in inputs:
            value.grad = None  # it is on its way
        return found

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

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        with self._without_memory():
            super()._setup_forward_recv_info(num_microbatches, has_backward)

    def _create_grad_recv_info(self, act_send_info: Any) -> Any:
        with self._without_memory():
            return super()._create_grad_recv_info(act_send_info)

    @contextmanager
    def _without_memory(self) -> Iterator[None]:
        """Context in which torch makes buffers that have a shape and nothing else."""
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device

    def _allocate(self, received: Any) -> None:
        for info in received:
            if info.buffer is not None:
                info.buffer = torch.empty_like(info.buffer, device=self.device)

    def _release(self, received: Any) -> None:
        for info in received:
            if info.buffer is not None:
                info.buffer = self._nothing
