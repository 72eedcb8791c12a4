"""A tied embedding whose two uses are in two stages: each has its own copy, which are kept equal.

One Parameter in two stages would lose half of its gradient, so the last stage holds a copy as its head. Both copies
start from the same values, get the sum of both gradients and take the same optimizer step.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from train.mesh import Mesh
from train.model.llama import Llama


def copied_heads(parts: Iterable[nn.Module]) -> list[Tensor]:
    """Parameters of `parts` that are copies of the embedding in the first stage."""
    return [
        part.lm_head.weight
        for part in parts
        if isinstance(part, Llama) and part.lm_head is not None and part.config.tie_embeddings
    ]


@torch.no_grad()
def add_gradients(parts: Iterable[nn.Module], mesh: Mesh) -> None:
    """Give the embedding and its copy the sum of their gradients; every rank of a pipeline calls after a backward."""
    parts = list(parts)
    embeddings = [
        part.embed_tokens.weight
        for part in parts
        if isinstance(part, Llama) and part.embed_tokens is not None and part.config.tie_embeddings
    ]
    # Data-parallel ranks have averaged theirs already, tensor-parallel ones hold the same rows: shards add up alone.
    here = [_own_gradient(parameter) for parameter in (*embeddings, *copied_heads(parts))]
    if len(here) == 2:
        total = here[0] + here[1]
        for gradient in here:
            gradient.copy_(total)
    elif len(here) == 1:
        last = mesh.dims.pp - 1
        peer = last if mesh.coordinate("pp") == 0 else 0
        here[0].add_(_exchange(here[0], mesh.group("pp"), peer))


def _own_gradient(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None, "every rank of the first and the last stage takes part in a backward"
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _exchange(gradient: Tensor, group: dist.ProcessGroup, peer: int) -> Tensor:
    """Send a tensor to a rank of `group` and return what that one has sent."""
    theirs = torch.empty_like(gradient, memory_format=torch.contiguous_format)
    operations = [
        dist.P2POp(dist.isend, gradient.contiguous(), group=group, group_peer=peer),
        dist.P2POp(dist.irecv, theirs, group=group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return theirs
