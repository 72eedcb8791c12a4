"""What a GPU holds, by part, for trainers of the usual build: Megatron-LM, DeepSpeed, FSDP, torchtitan and their like.

Parameters by shapes, the optimizer's state by ZeRO (Rajbhandari et al. 2020), activations by operation and schedule
(`activations`, `held`): all is arithmetic but three constants that are fitted to published figures, of the allocator, a
process and a communicator (`constants`). What our own trainer needs `train.layout.memory` says, to the byte.
"""

from dataclasses import dataclass, replace

from tools.plan.activations import head_bytes, is_megatron, layer_bytes, loss_bytes
from tools.plan.case import Case, Layout, Number
from tools.plan.constants import Constants, constants
from tools.plan.held import layers_of, splits_backward, stages_of, under_way

GIB = 2**30
MOMENT_BYTES = 8
"""Adam's two, in fp32, for each parameter."""
MASTER_BYTES = 4
"""fp32 weights, beside those in 16 bits that compute."""
BUCKET = 500_000_000
"""Elements that are reduced, or gathered, at once: DeepSpeed's default."""
NORM_BYTES = 8
"""The norm of gradients is taken in double precision, of one parameter after the other."""


@dataclass(frozen=True)
class Memory:
    """Bytes on the GPU that holds most, at the moment when it holds most; `host` and `nvme`: elsewhere, a rank's."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    """Gathered weights, buckets of gradients, logits and other things that live for a while."""
    fragmentation: float
    """What the allocator holds besides."""
    context: float
    """CUDA, libraries, NCCL."""
    host: float = 0.0
    nvme: float = 0.0

    @property
    def total(self) -> float:
        """On the GPU, all of it: what nvidia-smi would show."""
        return self.allocated + self.context

    @property
    def needed(self) -> float:
        """What cannot be done without: before it fails, the allocator gives back what lies between."""
        return self.total - self.fragmentation

    @property
    def allocated(self) -> float:
        """What the framework's allocator would say that it has reserved."""
        return (
            self.weights
            + self.gradients
            + self.optimizer
            + self.activations
            + self.buffers
            + self.fragmentation
        )


@dataclass(frozen=True)
class _Held:
    """What a rank of the pipeline has of the model."""

    layers: tuple[int, ...]
    """Of each of its stages."""
    first: bool
    last: bool
    parameters: float
    layer: float
    """Parameters of one layer."""
    table: float
    """Of the embedding or the head."""
    share: float
    """Of its parameters, where ranks share them."""

    @property
    def largest(self) -> float:
        """Parameters of the largest part that is reduced or gathered by itself."""
        return max(self.layer, self.table if self.first or self.last else 0.0)


def predict_memory(case: Case, known: Constants | None = None) -> Memory:
    """Predict what `case` needs; a pure function of it and of the constants.

    Raises `ConfigError` for a schedule that there is not.
    """
    known = known or constants()
    last = case.layout.pp - 1
    # The first rank keeps most micro-batches, an inner one may have most layers, the last one has the loss.
    ranks = {0, min(1, last), last} if case.layout.split is None else range(last + 1)
    found = [memory_of(case, rank, known) for rank in ranks]
    fullest = max(found, key=lambda one: one.total)
    return replace(fullest, host=max(one.host for one in found))


def memory_of(case: Case, rank: int, known: Constants) -> Memory:
    """Predict what a rank of the pipeline needs."""
    layout, held = case.layout, _held(case, rank)
    weights, gradients, optimizer = _state(case, held)
    activations, layers, passing = _activations(case, held, rank)
    buffers = _gathered(case, held) + _reduced(case, held) + _stepped(case, held) + passing
    host = 0.0
    if layout.offload_activations:
        host, activations = host + layers, activations - layers
    if layout.offload_optimizer:
        # The step on the host reads gradients there.
        read = held.share if layout.zero else held.parameters
        host, optimizer = host + optimizer + case.gradient_bytes * read, 0.0
    if layout.offload_parameters:
        host, weights, gradients = host + weights, 0.0, 0.0
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        buffers=buffers,
        fragmentation=known.fragmentation * (activations + buffers),
        context=context_bytes(layout, known),
        host=host,
    )


def context_bytes(layout: Layout, known: Constants) -> float:
    """Of a process beside what the framework allocates: CUDA, libraries, communicators."""
    axes = sum(degree > 1 for degree in (layout.tp, layout.pp, layout.cp, layout.dp))
    return GIB * (known.context_gb + known.communicator_gb * (axes + (axes > 0)))


def _held(case: Case, rank: int) -> _Held:
    model, layout = case.model, case.layout
    last_stage, own = layout.pp * layout.vpp - 1, stages_of(layout, rank)
    layers = layers_of(case, rank)
    first, last = 0 in own, last_stage in own
    # Norms, and most biases, are on each rank of tensor parallelism.
    layer = model.layer_matrices / layout.tp + (model.layer_parameters - model.layer_matrices)
    table = model.table_parameters / layout.tp
    tables = 1 if model.tied and first and last else first + last
    parameters = sum(layers) * layer + tables * table + first * model.positions * model.hidden
    return _Held(layers, first, last, parameters, layer, table, parameters / layout.sharers)


def _state(case: Case, held: _Held) -> tuple[float, float, float]:
    """Weights, gradients and the optimizer's state."""
    layout, gradient, weight = case.layout, case.gradient_bytes, case.item_bytes
    if layout.zero == 3 and gradient >= MASTER_BYTES and not layout.offload_optimizer:
        weight = MASTER_BYTES  # between their uses there are no others
    state = MOMENT_BYTES + (MASTER_BYTES if weight < MASTER_BYTES else 0)
    if layout.zero == 3:
        return weight * held.share, gradient * held.share, state * held.share
    if gradient > case.item_bytes and not _sums_in_place(case):
        gradient += case.item_bytes  # those of the matrix products, beside the sums
    whole = layout.zero < 2 or (layout.pp > 1 and splits_backward(layout))
    return (
        weight * held.parameters,
        gradient * (held.parameters if whole else held.share),
        state * (held.share if layout.zero else held.parameters),
    )


def _activations(case: Case, held: _Held, rank: int) -> tuple[float, float, float]:
    """What is kept from forward to backward pass; what layers keep of it; and what is there for a while besides."""
    layout, sizes = case.layout, layer_bytes(case)
    each = sizes.kept(layout.recompute)
    layers = kept = 0.0
    for time in under_way(layout, rank):
        own = sum(count * number for count, number in zip(time.kept, held.layers, strict=True)) * each
        # The first stage of all has no gradient to hand on.
        halves = zip(time.halfway[held.first :], held.layers[held.first :], strict=True)
        now = own + sizes.halfway * sum(count * number for count, number in halves)
        # What is handed on stays until its gradient comes back, but Megatron-LM frees it.
        if not (layout.pp == 1 or (held.last and layout.vpp == 1) or _sums_in_place(case)):
            now += sum(time.kept) * sizes.input
        layers, kept = max(layers, own), max(kept, now)
    passing = sizes.working(layout.recompute) if any(held.layers) else 0.0
    if held.last:
        kept += head_bytes(case)
        passing = max(passing, loss_bytes(case))
    return kept, layers, passing


def _gathered(case: Case, held: _Held) -> float:
    """Weights that ZeRO 3 has gathered."""
    layout, item = case.layout, case.item_bytes
    if layout.zero < 3:
        return 0.0
    if layout.pp > 1:
        # One micro-batch follows the other through all layers: they stay, and gradients add up whole.
        return (item + case.gradient_bytes) * held.parameters
    # One computes, one has been asked for.
    found = item * (2 * held.layer + held.table * held.last)
    if layout.offload_parameters:
        found += item * BUCKET  # what is fetched ahead from the host
    return found


def _reduced(case: Case, held: _Held) -> float:
    """Gradients on their way, and updated weights."""
    layout = case.layout
    if layout.zero == 3:
        bucket = BUCKET if layout.offload_parameters else held.largest
        return (case.item_bytes + case.gradient_bytes) * max(bucket, held.largest)
    if layout.zero > 0 and layout.sharers > 1 and case.gradient_bytes < MASTER_BYTES:
        return (case.item_bytes + case.gradient_bytes) * min(BUCKET, held.parameters)
    return 0.0


def _sums_in_place(case: Case) -> bool:
    """Whether matrix products add to fp32 gradients, as Megatron-LM's do where DeepSpeed does not run it in 16 bits."""
    return is_megatron(case) and case.gradient_bytes >= MASTER_BYTES


def _stepped(case: Case, held: _Held) -> float:
    """What the optimizer's step makes of 16-bit gradients; the allocator keeps room for it beside activations."""
    layout = case.layout
    if case.gradient_bytes >= MASTER_BYTES or layout.zero == 3 or layout.offload_optimizer:
        return 0.0
    share = held.share if layout.zero else held.parameters
    found = MASTER_BYTES * share
    if case.number is not Number.fp8:
        # DeepSpeed's and Apex's way, from before fp8: gradients are joined before they are copied.
        found += case.gradient_bytes * share
        found += NORM_BYTES * min(held.largest, share) if layout.zero else 0.0
    return found
