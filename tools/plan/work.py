"""What one rank computes in a micro-batch, in seconds: matrix products, attention, and operations on each element.

A matrix product takes its arithmetic at a share of the peak, less what is lost to tiles: the last wave of them over the
multiprocessors is not full, and each starts and ends. What it writes is added; what it reads passes beside the
arithmetic. Operations on each element take the bytes that they move. Sizes are of one rank, tokens of one micro-batch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from tools.plan.case import Attention, Case, Number, Recompute
from tools.plan.constants import Constants

TILES = ((256, 128), (128, 256), (128, 128))
"""Rows and columns that one multiprocessor computes at once, as libraries have them for large products."""
TENSOR_CORE = 64
"""Sizes that are multiples of it suit the tiles of matrix units."""
HEAD_WIDTH = 8
"""A head whose width is no multiple of it is computed without matrix units."""
BACKWARD_OF_ATTENTION = 2.5
"""Arithmetic of the backward pass of attention in tiles, which computes scores again, over that of the forward."""


@dataclass(frozen=True)
class Work:
    """Seconds, by kind."""

    matmul_s: float = 0.0
    attention_s: float = 0.0
    elementwise_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All three."""
        return self.matmul_s + self.attention_s + self.elementwise_s

    def __add__(self, other: "Work") -> "Work":
        """One after the other."""
        return Work(
            self.matmul_s + other.matmul_s,
            self.attention_s + other.attention_s,
            self.elementwise_s + other.elementwise_s,
        )

    def times(self, factor: float) -> "Work":
        """As often."""
        return Work(factor * self.matmul_s, factor * self.attention_s, factor * self.elementwise_s)


@dataclass(frozen=True)
class Chunk:
    """What a part of the model takes for one micro-batch."""

    forward: Work = Work()
    backward: Work = Work()
    """For the gradient of the input."""
    weights: Work = Work()
    """For the gradients of the weights."""
    again: Work = Work()
    """Computed again before the backward pass."""

    def __add__(self, other: "Chunk") -> "Chunk":
        """Both."""
        return Chunk(
            self.forward + other.forward,
            self.backward + other.backward,
            self.weights + other.weights,
            self.again + other.again,
        )

    def times(self, factor: float) -> "Chunk":
        """As many."""
        return Chunk(*(one.times(factor) for one in (self.forward, self.backward, self.weights, self.again)))

    @property
    def all(self) -> Work:
        """Forward, backward and what is computed again."""
        return self.forward + self.backward + self.weights + self.again


@dataclass(frozen=True)
class Rates:
    """What the GPU reaches: FLOP/s and bytes/s."""

    matmul: float
    attention: float
    memory: float
    multiprocessors: float
    known: Constants
    item_bytes: int

    @classmethod
    def of(cls, case: Case, known: Constants) -> "Rates":
        """Rates for the numbers that `case` computes in."""
        gpu = case.machine.gpu
        peak = {
            Number.fp8: gpu.fp8_tflops * known.fp8,
            Number.fp32: gpu.fp32_tflops,
            Number.tf32: gpu.bf16_tflops / 2,
        }.get(case.number, gpu.bf16_tflops)
        return cls(
            matmul=peak * 1e12 * known.matmul * gpu.sustained,
            attention=gpu.bf16_tflops * 1e12 * known.attention * gpu.attention,
            memory=gpu.memory_gb_s * 1e9 * known.memory,
            multiprocessors=gpu.multiprocessors,
            known=known,
            item_bytes=case.item_bytes,
        )

    def product_s(self, rows: float, columns: float, inner: float, batch: float = 1) -> float:
        """Seconds of `batch` products of (rows, inner) and (inner, columns)."""
        written = self.moving_s(self.item_bytes * rows * columns * batch)
        return self.arithmetic_s(rows, columns, inner, batch) * (1 + self.known.start / inner) + written

    def arithmetic_s(self, rows: float, columns: float, inner: float, batch: float = 1) -> float:
        """The same, without what tiles cost at their start and end."""
        full = max(self._full(rows, columns, batch, *tile) for tile in TILES)
        reached = self.matmul * float(full**self.known.waves)
        if columns % TENSOR_CORE or inner % TENSOR_CORE:
            reached *= self.known.misaligned
        return 2.0 * rows * columns * inner * batch / reached

    def moving_s(self, size: float) -> float:
        """Seconds to read or write `size` bytes."""
        return size / self.memory

    def _full(self, rows: float, columns: float, batch: float, height: int, width: int) -> float:
        """Share of the multiprocessors' tiles, over all waves, that is asked for."""
        tiles = math.ceil(rows / height) * math.ceil(columns / width) * batch
        waves = tiles / self.multiprocessors
        return rows * columns * batch / (tiles * height * width) * waves / math.ceil(waves)


@lru_cache(maxsize=4096)
def layer(case: Case, known: Constants) -> Chunk:
    """What a rank takes for its share of one layer."""
    rates = Rates.of(case, known)
    plain, attention = _matrices(case, rates) + _elements(case, rates), _attention(case, rates)
    whole = plain + attention
    again = {
        Recompute.none: Work(),
        Recompute.attention: attention.forward,
        Recompute.between: Work(elementwise_s=plain.forward.elementwise_s),
        Recompute.alternate: Work(plain.forward.matmul_s / 2, 0.0, plain.forward.elementwise_s),
        Recompute.half: whole.forward.times(0.5),
        Recompute.full: whole.forward,
    }[case.layout.recompute]
    if case.early_stop and case.layout.recompute in (Recompute.half, Recompute.full):
        spared = rates.product_s(*_products(case)[-1]) * (
            0.5 if case.layout.recompute is Recompute.half else 1
        )
        again += Work(-spared)
    return whole + Chunk(again=again)


@lru_cache(maxsize=4096)
def head(case: Case, known: Constants) -> Chunk:
    """What a rank takes for its share of the logits and the loss."""
    rates, model, layout = Rates.of(case, known), case.model, case.layout
    # Every trainer pads the vocabulary.
    columns = math.ceil(model.vocabulary / layout.tp / 128) * 128
    logits, item = case.tokens_of_rank * columns, case.item_bytes
    # Read, written in fp32, and read for the largest, the sum and the loss; backward read and written in both types.
    forward, backward = logits * (item + 3 * 4), logits * (2 * 4 + item)
    if case.fused_loss:
        forward, backward = logits * item, logits * 2 * item
    shape = (case.tokens_of_rank, columns, model.hidden)
    return Chunk(
        Work(rates.product_s(*shape), 0.0, rates.moving_s(forward)),
        Work(_for_input_s(rates, shape), 0.0, rates.moving_s(backward)),
        Work(_for_weights_s(rates, shape)),
    )


def optimizer_s(case: Case, known: Constants, parameters: float) -> float:
    """Seconds of Adam's step on `parameters` of a rank: weight, moments and gradient in fp32 read, and written."""
    if case.layout.offload_optimizer:
        gpu = case.machine.gpu
        link = parameters * (case.gradient_bytes + case.item_bytes) / (gpu.host_gb_s * 1e9)
        return link + parameters * 28 / (known.host_gb_s * 1e9)
    return Rates.of(case, known).moving_s(parameters * (28 + case.gradient_bytes + case.item_bytes))


Shape = tuple[float, float, float]
"""Rows (tokens), columns and inner size of a product."""


def _products(case: Case) -> list[Shape]:
    """Of the forward pass; the last is the one whose result the backward pass does not need."""
    model, tp = case.model, case.layout.tp
    tokens, hidden, ffn = case.tokens_of_rank, model.hidden, model.ffn
    into = ffn * (2 if model.gated else 1)
    return [
        (tokens, (hidden + 2 * model.kv_width) / tp, hidden),
        (tokens, hidden, hidden / tp),
        (tokens, into / tp, hidden),
        (tokens, hidden, ffn / tp),
    ]


def _for_input_s(rates: Rates, shape: Shape) -> float:
    rows, columns, inner = shape
    return rates.product_s(rows, inner, columns) / rates.known.backward


def _for_weights_s(rates: Rates, shape: Shape) -> float:
    # Its sums stay in the tiles over all tokens, and are added to those of other micro-batches beside the arithmetic.
    rows, columns, inner = shape
    return rates.arithmetic_s(columns, inner, rows) / rates.known.backward


def _matrices(case: Case, rates: Rates) -> Chunk:
    shapes = _products(case)

    def all_of(seconds: Callable[[Rates, Shape], float]) -> float:
        return sum(seconds(rates, shape) for shape in shapes)

    return Chunk(
        Work(sum(rates.product_s(*shape) for shape in shapes)),
        Work(all_of(_for_input_s)),
        Work(all_of(_for_weights_s)),
    )


def _elements(case: Case, rates: Rates) -> Chunk:
    """Norms, residual sums, activations of the MLP, rotation, and adding up gradients: elements that are moved."""
    model, layout, tp = case.model, case.layout, case.layout.tp
    hidden, qkv = model.hidden, model.hidden + 2 * model.kv_width
    alone = layout.tp if layout.sequence_parallel else 1
    norms = 2 * 2 * hidden / alone
    # Two sums of two; biases and dropout's mask besides in models of GPT's build.
    sums = (7 if model.biases else 6) * hidden / alone
    activation = model.ffn * (3 if model.gated else 2) / tp
    turned = (qkv if model.biases else qkv + 2 * (hidden + model.kv_width)) / tp
    left = rates.known.fused if case.compiled else 1.0
    forward = left * (norms + sums + activation + turned)
    # A norm's backward reads what came in besides, SwiGLU's and GELU's write as many as they read.
    backward = left * (1.5 * norms + sums + 5 / 3 * activation + turned)
    bytes_a_token = case.tokens_of_rank * case.item_bytes
    weights = 0.0
    if model.biases:
        weights += bytes_a_token * (model.ffn + hidden) / tp / 2
    if layout.micro_batches > 1 and case.gradient_bytes == case.item_bytes:
        # Added to those before in a pass of its own; sums in fp32 are added to where they are computed.
        weights += model.layer_matrices / tp * 3 * case.item_bytes
    cast_in = cast_out = 0.0
    if case.number is Number.fp8:
        # What goes into each product is read in 16 bits and written in 8 twice, as it is and transposed.
        cast_in = 4 * case.tokens_of_rank * sum(inner for _, _, inner in _products(case))
        cast_out = 4 * case.tokens_of_rank * sum(columns for _, columns, _ in _products(case))
        weights += 4 * model.layer_matrices / tp
    return Chunk(
        Work(elementwise_s=rates.moving_s(bytes_a_token * forward + cast_in)),
        Work(elementwise_s=rates.moving_s(bytes_a_token * backward + cast_out)),
        Work(elementwise_s=rates.moving_s(weights)),
    )


def _attention(case: Case, rates: Rates) -> Chunk:
    """Scores, softmax, values."""
    model, layout = case.model, case.layout
    batch = layout.micro_batch * model.heads / layout.tp
    square = batch * case.sequence**2 / layout.cp
    if case.attention is Attention.flash:
        # The causal half of two products.
        forward_s = 2.0 * square * model.head_dim / rates.attention
        return Chunk(Work(attention_s=forward_s), Work(attention_s=BACKWARD_OF_ATTENTION * forward_s))
    if model.head_dim % HEAD_WIDTH:
        products_s = 4.0 * square * model.head_dim / (rates.matmul * rates.known.unaligned)
    else:
        rows = case.sequence / layout.cp
        products_s = rates.product_s(rows, case.sequence, model.head_dim, batch)
        products_s += rates.product_s(rows, model.head_dim, case.sequence, batch)
    # Softmax and dropout, each read and written; dropout's mask.
    elements = square * case.item_bytes
    return Chunk(
        Work(attention_s=products_s, elementwise_s=rates.moving_s(5.0 * elements)),
        Work(attention_s=2 * products_s, elementwise_s=rates.moving_s(5.5 * elements)),
    )
