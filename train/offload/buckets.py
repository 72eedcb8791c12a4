"""Buckets: the parameters of one layer, whose states are brought, updated and kept together."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from train.model.config import ModelConfig
from train.offload.nvme.pool import bytes_of
from train.parallel.fill import global_name


@dataclass(frozen=True)
class Slot:
    """One parameter's place in its bucket."""

    name: str
    """In the whole model."""
    parameter: nn.Parameter
    start: int
    size: int
    """Elements of it that this rank has."""

    @property
    def end(self) -> int:
        """Where the next one starts."""
        return self.start + self.size

    @property
    def held(self) -> Tensor:
        """What this rank has of the parameter: flat, and the same memory."""
        return local(self.parameter).view(-1)

    def like(self, values: Tensor) -> Tensor:
        """`values`, as many as this rank has of the parameter, spread over the ranks as the parameter is.

        They may lie on another device than the parameter does.
        """
        parameter = self.parameter
        values = values.view(local(parameter).shape)
        if not isinstance(parameter, DTensor):
            return values
        # Not `DTensor.from_local`, which moves what it is given to the device of the mesh.
        meta = TensorMeta(parameter.shape, parameter.stride(), values.dtype)
        spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=meta)
        return DTensor(values, spec, requires_grad=False)


Bucket = tuple[Slot, ...]


def make_buckets(parts: nn.ModuleList, model: ModelConfig) -> list[Bucket]:
    """Parameters of one layer together, in the order of the forward pass."""
    buckets: dict[str, list[Slot]] = {}
    for name, parameter in parts.named_parameters():
        if not parameter.requires_grad:
            continue
        part, _, within = name.partition(".")
        words = within.split(".")
        unit = ".".join([part, *words[: 2 if words[0] == "layers" else 1]])
        bucket = buckets.setdefault(unit, [])
        start = bucket[-1].end if bucket else 0
        bucket.append(Slot(global_name(within, model), parameter, start, local(parameter).numel()))
    return [tuple(bucket) for bucket in buckets.values()]


def elements(bucket: Bucket) -> int:
    """Elements that this rank has of a bucket."""
    return bucket[-1].end


def slots(buckets: Iterable[Bucket]) -> list[Slot]:
    """All slots."""
    return [slot for bucket in buckets for slot in bucket]


def cut(flat: Tensor, bucket: Bucket) -> list[Tensor]:
    """The part of each slot in a flat tensor for the whole bucket, along its last axis."""
    return [flat[..., slot.start : slot.end] for slot in bucket]


def alone(values: Tensor) -> Tensor:
    """The same memory, of a host, as if there were nothing around it: torch copies a part of more before it saves it.

    A tensor on a device, which is copied anyway, stays what it is.
    """
    if values.device.type != "cpu" or not values.numel():
        return values
    return torch.frombuffer(bytes_of(values), dtype=values.dtype)


def local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
