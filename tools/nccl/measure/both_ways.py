"""A message in each direction at the same time."""

import torch
import torch.distributed as dist


def both_ways(
    group: dist.ProcessGroup | None, to: int, sent: torch.Tensor, source: int, received: torch.Tensor
) -> list[dist.P2POp]:
    """Send and receive at once; ranks are those of the group.

    In one batch, for NCCL else makes a communicator for each pair; and the receive first, for gloo's word that it is
    ready else waits behind the message that goes the same way, and both directions take turns.
    """
    return [
        dist.P2POp(dist.irecv, received, group=group, group_peer=source),
        dist.P2POp(dist.isend, sent, group=group, group_peer=to),
    ]
