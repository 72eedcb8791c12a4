"""ParallelDims -> DeviceMesh: the process groups of a layout."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from train.layout.dims import AXES, ParallelDims


@dataclass(frozen=True)
class Mesh:
    """The process groups of a layout, seen from one rank. Collective to build."""

    dims: ParallelDims
    root: DeviceMesh
    """With the axes of `AXES`, all of them, also those of size 1."""
    dp: DeviceMesh
    """dp_replicate x dp_shard: ranks that take different samples."""
    dp_cp: DeviceMesh
    """dp_replicate x dp_shard x cp: ranks that see different tokens and average their gradients."""
    shard: DeviceMesh
    """dp_shard x cp: ranks that share one copy of the state."""
    hybrid: DeviceMesh
    """(dp_replicate, dp_shard x cp), two axes: shards inside, copies between."""
    ranks_per_node: int

    @classmethod
    def build(cls, dims: ParallelDims, device_type: str, ranks_per_node: int | None = None) -> "Mesh":
        """Make the groups; every rank of the world calls. `ranks_per_node` None: all are on one."""
        root = init_device_mesh(device_type, dims.shape, mesh_dim_names=AXES)
        shard = root["dp_shard", "cp"]._flatten("dp_shard_cp")
        return cls(
            dims=dims,
            root=root,
            dp=root["dp_replicate", "dp_shard"]._flatten("dp"),
            dp_cp=root["dp_replicate", "dp_shard", "cp"]._flatten("dp_cp"),
            shard=shard,
            hybrid=DeviceMesh._concatenate([root["dp_replicate"], shard]),
            ranks_per_node=ranks_per_node or dims.ranks,
        )

    def __getitem__(self, axis: str) -> DeviceMesh:
        """The mesh of one axis."""
        return self.root[axis]

    def coordinate(self, axis: str) -> int:
        """Position of this rank on an axis."""
        return self.root[axis].get_local_rank()

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group of this rank along an axis."""
        group: dist.ProcessGroup = self.root[axis].get_group()
        return group

    def by_node(self) -> DeviceMesh:
        """Make the mesh (between, inside): all ranks as nodes and ranks of a node. Collective."""
        shape = (self.dims.ranks // self.ranks_per_node, self.ranks_per_node)
        return init_device_mesh(self.root.device_type, shape, mesh_dim_names=("between", "inside"))
