"""The planner's constants: few, each with a meaning and a prior, in a file that `trierarch plan calibrate` writes."""

import json
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from contract.errors import ConfigError
from tools.plan.whole import write_whole

FILE = Path(__file__).with_name("constants.json")


@dataclass(frozen=True)
class Prior:
    """What is known of a constant before any training run is looked at."""

    value: float
    sigma: float
    low: float
    high: float


def _fitted(value: float, sigma: float, low: float, high: float) -> Any:
    return field(default=value, metadata={"prior": Prior(value, sigma, low, high)})


@dataclass(frozen=True)
class Constants:
    """Shares of what makers promise, and what nobody promises. Fields with a prior are fitted, others are not.

    Priors are from published measurements of single operations: matrix products of A100s reach 75 to 87 % of the peak,
    streams 85 to 90 % of the memory's bandwidth, flash attention 25 to 40 % (Dao 2023), NCCL's collectives 77 % of
    NVLink 3 and 85 to 96 % of the adapters (tools/nccl/reference.json), with half of it at some 20 MB.
    """

    matmul: float = _fitted(0.80, 0.05, 0.5, 0.98)
    """Of the peak of matrix units that large products reach in the forward pass, but for their tiles."""
    backward: float = _fitted(0.92, 0.05, 0.6, 1.1)
    """Of that in the products for the input's gradient, with transposed matrices."""
    waves: float = _fitted(0.6, 0.2, 0.0, 1.0)
    """Exponent: how much of the loss in the last, half-empty wave of tiles is felt."""
    start: float = _fitted(100.0, 50.0, 0.0, 600.0)
    """Length of the inner dimension that the start and the end of a tile cost."""
    attention: float = _fitted(0.33, 0.04, 0.15, 0.8)
    """Of the peak that attention in tiles reaches, per FLOP of the causal half."""
    unaligned: float = _fitted(0.04, 0.02, 0.01, 0.2)
    """Of products in attention whose heads' width suits no matrix unit."""
    memory: float = _fitted(0.85, 0.06, 0.4, 1.0)
    """Of the memory's bandwidth that operations on each element reach."""
    link: float = _fitted(0.77, 0.05, 0.4, 0.95)
    """Of the links in a node that collectives reach (bus bandwidth)."""
    network: float = _fitted(0.85, 0.07, 0.3, 0.98)
    """Of the adapters of a node."""
    link_latency_s: float = _fitted(2.5e-5, 1e-5, 0.0, 3e-4)
    """Of a collective in a node, for one and for each doubling of its ranks."""
    network_latency_s: float = 4e-5
    """The same between nodes."""
    sync_s: float = _fitted(2e-4, 1e-4, 0.0, 2e-3)
    """Of a collective that computation waits for: ranks do not arrive at the same moment."""
    overlap: float = 0.9
    """Of the time of computation beside which communication can pass."""
    interference: float = _fitted(0.2, 0.1, 0.0, 1.0)
    """Of communication beside computation that is felt all the same: both use multiprocessors and memory."""
    handover: float = _fitted(1.0, 0.3, 0.0, 3.0)
    """Of the handing over between stages that computation waits for, where the schedule waits."""
    chunk_s: float = _fitted(1e-2, 5e-3, 0.0, 5e-2)
    """Of a hand-over for which the host waits (DeepSpeed's pipeline)."""
    launch_s: float = _fitted(5e-5, 5e-5, 0.0, 1e-3)
    """Of a layer's forward pass in which the GPU waits for the host."""
    straggler: float = _fitted(0.008, 0.004, 0.0, 0.04)
    """What every doubling of the nodes adds to a step, as a share: the slowest of many is waited for."""
    step_s: float = 0.01
    """Of a step outside all of this."""
    misaligned: float = 0.75
    """Of a product whose sizes on a rank are no multiples of 64 (BigScience 2022: hidden size 14400 against 13824)."""
    fp8: float = 0.9
    """Of what products in bf16 reach of their peak, that those in fp8 reach of theirs, casts counted apart."""
    fused: float = 0.5
    """Of the bytes of operations on each element that a compiler leaves."""
    host_gb_s: float = 20.0
    """Of the host's memory that Adam's step there reaches for a GPU's share, GB/s."""
    fragmentation: float = 0.06
    """Of activations and buffers that the allocator holds besides."""
    context_gb: float = 1.3
    """GiB of a process on a GPU: CUDA and libraries."""
    communicator_gb: float = 0.15
    """GiB of NCCL's buffers for each communicator: one for each axis of several ranks, and one of all ranks."""


def priors() -> dict[str, Prior]:
    """Priors of the constants that are fitted, by name."""
    return {one.name: one.metadata["prior"] for one in fields(Constants) if "prior" in one.metadata}


@cache
def constants(path: Path = FILE) -> Constants:
    """Read a file of constants; raises `ConfigError`."""
    try:
        tree = json.loads(path.read_text())["constants"]
        wanted = {one.name for one in fields(Constants)}
        if set(tree) != wanted:
            raise ValueError(f"it has not exactly {', '.join(sorted(wanted))}")
        return Constants(**{name: float(value) for name, value in tree.items()})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{path} holds no constants of the planner ({error}): write one by `trierarch plan calibrate`"
        ) from None


def write(path: Path, found: Constants, about: dict[str, Any]) -> None:
    """Write a file of constants; `about`: what they were fitted to. Raises `ConfigError` where that fails."""
    write_whole(path, json.dumps({"about": about, "constants": asdict(found)}, indent=1) + "\n")
