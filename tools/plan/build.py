"""How trainers of published rows are usually built, where a row leaves it open: what their printed memory gives away.

As in `rows`, of a row only `model`, `hardware`, `layout` and `precision` are read.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tools.plan.case import Attention, Case, Layout, Recompute

Row = Mapping[str, Any]


def as_built(case: Case, row: Row) -> Case:
    """Return `case`, brought from `row`, with what its trainer usually does.

    Not one of these is of use to a run of our own, whose configuration says it all.
    """
    text = (row.get("precision") or "").lower()
    gpt = not case.model.gated
    if not text and gpt and (row["hardware"].get("gpu") or "A100") == "A100":
        # Megatron-LM of 2022: scores in memory, gradients summed up in fp32.
        case = replace(case, attention=Attention.square, gradient_bytes=4)
    if case.layout.zero == 3:
        # FSDP keeps and reduces gradients in fp32 unless it is told otherwise, DeepSpeed in the type of weights.
        pure = "pure" in text or "fp16" in text
        # FSDP's and Colossal-AI's trainers of GPT never have logits in fp32 (composer's loss is fused).
        case = replace(case, gradient_bytes=case.gradient_bytes if pure else 4, fused_loss=gpt)
    return replace(_tied(case, row), layout=_layout(case, row["layout"]))


def _tied(case: Case, row: Row) -> Case:
    """A number of parameters tells whether Llama's head is its embedding."""
    printed, model = row["model"].get("params"), case.model
    if not printed or not model.gated:
        return case
    tied, apart = (replace(model, tied=one) for one in (True, False))
    nearer = tied if abs(tied.parameters - printed) < abs(apart.parameters - printed) else apart
    return replace(case, model=nearer)


def _layout(case: Case, said: Row) -> Layout:
    layout = case.layout
    offload, recompute = (said.get("offload") or ""), (said.get("recompute") or "")
    if recompute.startswith("selective: per-op"):
        layout = replace(layout, recompute=Recompute.alternate)
    if layout.zero == 3 and layout.pp > 1 and not said.get("micro_batch") and not said.get("grad_accum"):
        # Torchtitan cuts what a rank takes in a step into as many micro-batches as there are ranks in the pipeline.
        sequences = layout.micro_batch * layout.micro_batches
        number = min(layout.pp, sequences)
        layout = replace(layout, micro_batch=sequences // number, micro_batches=number)
    sharers = layout.dp * layout.cp
    if said.get("zero_stage") is None and sharers > 1:
        layout = replace(layout, zero=1, sharers=sharers)  # Megatron-LM's distributed optimizer
    if said.get("sequence_parallel") is None and layout.tp > 1:
        layout = replace(layout, sequence_parallel=True)
    return replace(
        layout,
        offload_parameters="params" in offload or "auto" in offload,
        offload_activations="activations" in offload,
    )
