"""A tree of references to an optimizer's tensors, kept from one save to the next."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from train.checkpoint.staging import leaves_of, local_part

Trees = tuple[dict[str, Any], dict[str, Any]]
"""Weights and moments, by name."""


class References:
    """Has torch list weights and moments again only where one of them has moved: that takes long, whatever their size.

    What is not a reference to a tensor of the optimizer, but a copy of one, is listed each time.
    """

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        """Kept, so that no other takes the identity of one."""
        self._places: list[tuple[int, int]] = []
        self._trees: Trees | None = None
        self.complete = False
        """Whether each tensor of the optimizer is in what `of` returned: who fills those fills all there is."""

    def of(self, optimizer: torch.optim.Optimizer, make: Callable[[], Trees]) -> Trees:
        """Return what `make` does, or did when all was where it is now."""
        if self._trees is None or self._places != _places(list(_tensors(optimizer))):
            self.forget()
            trees = make()
            tensors = list(_tensors(optimizer))
            known = {local_part(tensor).data_ptr() for tensor in tensors}
            listed = {local_part(leaf).data_ptr() for tree in trees for _, leaf in leaves_of(tree)}
            if not listed <= known:
                return trees
            self.complete = listed == known
            self._tensors, self._places, self._trees = tensors, _places(tensors), trees
        model, moments = self._trees
        return dict(model), {name: dict(kinds) for name, kinds in moments.items()}

    def forget(self) -> None:
        """Hold on to nothing: what is replaced must not stay in memory."""
        self._tensors, self._places, self._trees, self.complete = [], [], None, False


def _tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter
            yield from optimizer.state.get(parameter, {}).values()


def _places(tensors: list[Tensor]) -> list[tuple[int, int]]:
    return [(id(tensor), local_part(tensor).data_ptr()) for tensor in tensors]
