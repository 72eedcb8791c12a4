"""What a layer and the loss keep of a micro-batch on one rank, operation by operation, for trainers of the usual build.

The rule: what the backward pass of an operation reads is kept, each tensor once (Korthikanti et al. 2022, section 4,
whose formulas this gives for GPT's layer). Bytes. `train.layout.activations` says it of our own trainer, to the byte.
"""

from dataclasses import dataclass

from tools.plan.case import Attention, Case, Number, Recompute

MASK_BYTES = 1
"""Of an element of a dropout mask."""
LOSS_BYTES = 12
"""Of a logit when the loss in fp32 has most, in its backward pass: log-softmax, its gradient, the logits' gradient."""
TORCH_LOSS_BYTES = 16
"""The same of torch's loss over logits that tensor parallelism splits, which makes one more fp32 copy."""
FUSED_LOSS_ITEMS = 2
"""Where logits are never whole in fp32: they and their gradient, in the type of activations."""


@dataclass(frozen=True)
class LayerBytes:
    """Of one layer for one micro-batch on one rank."""

    input: float
    """The residual stream, from which all else can be computed again."""
    attention: float
    """What comes out of attention."""
    results: float
    """What comes out of matrix products, if the backward pass reads it: queries, keys, values, the MLP's first ones."""
    alternate: float
    """What comes out of every second matrix product: queries, values, the MLP's first and last."""
    square: float
    """Of attention with its square of scores: probabilities, the mask of their dropout, what is left after it."""
    between: float
    """The rest: of norms, activation functions and dropout."""
    backward: float
    """Gradients that are there at once, besides, while the backward pass is in the layer."""
    halfway: float
    """Gradients of all that weights have made, kept until those of the weights are computed, where that comes later.

    Not of Megatron-LM's kind: then as much else is no longer needed.
    """

    @property
    def everything(self) -> float:
        """Kept when nothing is computed again."""
        return self.input + self.attention + self.results + self.square + self.between

    def kept(self, recompute: Recompute) -> float:
        """Of a layer from its forward to its backward pass; with `half` on average."""
        if recompute is Recompute.none:
            return self.everything
        if recompute is Recompute.attention:
            return self.everything - self.square
        if recompute is Recompute.between:
            # Beside the input what the first block adds to it.
            return 2 * self.input + self.attention + self.results
        if recompute is Recompute.alternate:
            return self.input + self.attention + self.alternate
        return (self.everything + self.input) / 2 if recompute is Recompute.half else self.input

    def working(self, recompute: Recompute) -> float:
        """What the backward pass of one layer needs besides: what is computed again, and gradients."""
        least = self.kept(Recompute.full if recompute is Recompute.half else recompute)
        return max(0.0, self.everything - least) + self.backward


def is_megatron(case: Case) -> bool:
    """Whether a trainer does as Megatron-LM does, which is told by GPT's biases, or fp8 that no compiler makes.

    Others (nanotron, torchtitan, ours) keep a little more, and give the first stages of a pipeline more layers.
    """
    return case.model.biases or (case.number is Number.fp8 and not case.compiled)


def layer_bytes(case: Case) -> LayerBytes:
    """Sizes of one layer of `case`."""
    model, layout, item = case.model, case.layout, case.item_bytes
    tokens = _tokens(case)
    whole = tokens * model.hidden
    hidden = whole / (layout.tp if layout.sequence_parallel else 1)
    query = whole / layout.tp
    # A rank has at least the one head of keys and values that its queries need.
    key = tokens * max(model.kv_width / layout.tp, model.head_dim)
    ffn = tokens * model.ffn / layout.tp
    heads = max(model.heads / layout.tp, 1.0)
    first = ffn * (2 if model.gated else 1)
    megatron = is_megatron(case)
    # What goes into a matrix product in fp8 Transformer Engine keeps in fp8; a compiler's is made again from 16 bits.
    into = 1 if case.number is Number.fp8 and megatron else item
    # Inputs of the matrices of attention and of the MLP. With the sequence split Megatron-LM gathers them once more for
    # the backward pass; others keep what they have gathered, but where tensor parallelism is over several nodes, as
    # published figures show.
    again = megatron or layout.tp > case.machine.gpus_per_node
    between = item * hidden + into * (2 * (hidden if again else whole) + ffn)
    if model.gated and not (case.compiled or megatron):
        # Else the activation function is computed again, with the product that reads it.
        between += item * ffn
    square, attention = 0.0, item * query + (into * query if into < item else 0)
    if case.attention is Attention.square:
        square = tokens * heads * case.sequence * (2 * item + MASK_BYTES)
        # Trainings of those days drop out after each block too.
        between += 2 * hidden * MASK_BYTES
    else:
        attention += tokens * heads * 4  # the log of each row's sum
    return LayerBytes(
        input=item * hidden,
        attention=attention,
        results=item * (query + 2 * key + first),
        alternate=item * (query + key + ffn + hidden),
        square=square,
        between=between,
        backward=item * (2 * hidden + first + (ffn if model.gated else 0)) + square / 2,
        halfway=0.0 if megatron else item * (query + 2 * key + first + 2 * whole + 2 * hidden),
    )


def loss_bytes(case: Case) -> float:
    """Of the logits and what becomes of them, when that is most; tensor parallelism splits them by vocabulary."""
    # Only torch's own tensor parallelism is found together with sharded weights.
    each = TORCH_LOSS_BYTES if case.layout.zero == 3 and case.layout.tp > 1 else LOSS_BYTES
    if case.fused_loss:
        each = FUSED_LOSS_ITEMS * case.item_bytes
    return _tokens(case) * case.model.vocabulary / case.layout.tp * each


def head_bytes(case: Case) -> float:
    """What the last norm and the head keep of a micro-batch: the input of each."""
    split = case.layout.tp if case.layout.sequence_parallel else 1
    return _tokens(case) * case.model.hidden * case.item_bytes * (1 / split + 1)


def _tokens(case: Case) -> float:
    """Of a micro-batch on one rank."""
    return case.layout.micro_batch * case.sequence / case.layout.cp
