"""An all-reduce in three steps that follow the machine: in each node, between nodes, in each node."""

import torch
import torch.distributed as dist
from torch import Tensor


class HierarchicalAllReduce:
    """Adds a tensor up over all ranks: reduce-scatter in the node, all-reduce between nodes, all-gather in the node.

    Between nodes each rank sends its share of the node's sum only, and all ranks do that at the same time, each on the
    adapter that is near it. Every rank of both groups calls, in the same order.
    """

    def __init__(self, inside: dist.ProcessGroup, between: dist.ProcessGroup) -> None:
        """`inside`: this rank's node; `between`: the ranks with this one's number on each node."""
        self._inside = inside
        self._between = between

    def __call__(self, tensor: Tensor) -> None:
        """Replace the values of `tensor`, contiguous, of any shape, by their sum over all ranks."""
        flat = tensor.view(-1)
        ranks = self._inside.size()
        whole = flat.numel() - flat.numel() % ranks
        head, tail = flat[:whole], flat[whole:]
        if whole:
            share = torch.empty(whole // ranks, dtype=flat.dtype, device=flat.device)
            dist.reduce_scatter_single(share, head, group=self._inside)
            dist.all_reduce(share, group=self._between)
            dist.all_gather_single(head, share, group=self._inside)
        if tail.numel():
            for group in (self._inside, self._between):
                dist.all_reduce(tail, group=group)
