"""ParallelDims -> DeviceMesh. The only place that multiplies degrees of parallelism."""

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from train.bootstrap import World


@dataclass(frozen=True)
class ParallelDims:
    """Degrees of parallelism of a run; their product is the number of ranks."""

    dp_replicate: int

    @classmethod
    def of(cls, world: World) -> "ParallelDims":
        """Use every rank of the world for data parallelism."""
        return cls(dp_replicate=world.size)

    def build_mesh(self, device_type: str) -> DeviceMesh:
        """Build the device mesh; axes are named as in the configuration, outermost first."""
        return init_device_mesh(device_type, (self.dp_replicate,), mesh_dim_names=("dp_replicate",))
