"""Weights and moments of an optimizer as they stand in a checkpoint, by name in the whole model."""

from collections.abc import Iterable
from typing import Any

import torch

from train.checkpoint.stored import Path
from train.offload.buckets import Slot

MOMENTS = ("exp_avg", "exp_avg_sq")


def stand_ins(slots: Iterable[Slot], steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights, and moments with the number of steps: tensors of their shape and place in the layout without values."""
    weights: dict[str, Any] = {}
    moments: dict[str, Any] = {}
    for slot in slots:
        place = slot.like(torch.empty(slot.size, device="meta"))
        weights[slot.name] = place
        moments[slot.name] = {"step": torch.tensor(float(steps))} | dict.fromkeys(MOMENTS, place)
    return weights, moments


def paths(name: str) -> list[Path]:
    """Where the weight of a parameter stands, and its moments in the order of MOMENTS."""
    return [("model", name), *(("optimizer", name, kind) for kind in MOMENTS)]
