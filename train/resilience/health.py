"""Is this node fit to train? Its GPUs as NVML sees them, its disks, the shared folder.

Reading and judging are apart: `read` is thin and needs the machine, `judge` is a function of what was read. Reading
may hang on a sick device, so whoever calls it bounds its time.
Meaning of the GPU's values: NVIDIA, NVML API Reference Guide.
"""

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

SHM = "/dev/shm"
SHM_BYTES = 2**27
"""What NCCL and data loaders of a node take in shared memory, at least."""
MARKER_S = 10.0
"""How long a network file system may take to show a file that another node has written."""
GB = 10**9


@dataclass(frozen=True)
class Wanted:
    """What a node must have; see the request `check` of `contract.agent`."""

    marker: Path | None = None
    marker_text: str = ""
    folders: dict[str, int] = field(default_factory=dict)
    """Bytes that must be free in each."""
    temporary_bytes: int = 0
    """The same for this node's temporary folder, which may have another name on each."""
    gpus: int | None = None
    gpu_memory_gb: float | None = None

    @classmethod
    def read(cls, message: dict[str, Any]) -> "Wanted":
        """Take the fields of a message."""
        marker = message.get("marker")
        return cls(
            marker=Path(marker["path"]) if marker else None,
            marker_text=marker["text"] if marker else "",
            folders={str(path): int(free) for path, free in (message.get("folders") or {}).items()},
            temporary_bytes=int(message.get("temporary_bytes") or 0),
            gpus=message.get("gpus"),
            gpu_memory_gb=message.get("gpu_memory_gb"),
        )


@dataclass(frozen=True)
class Gpu:
    """What NVML tells of one GPU; None where this kind doesn't tell."""

    index: int
    memory_bytes: int = 0
    uncorrected_errors: int | None = None
    """Memory errors that ECC could not correct since the driver was loaded."""
    repair_pending: bool | None = None
    """Rows to be remapped or pages to be retired at the next reset."""
    repair_failed: bool | None = None
    """No spare row was left for a broken one."""
    slowdowns: tuple[str, ...] = ()
    """Why the hardware slows it down now."""
    trouble: str = ""
    """Why it can't be reached."""


@dataclass(frozen=True)
class Readings:
    """What was found on a node."""

    host: str
    gpus: tuple[Gpu, ...] = ()
    no_nvml: str = ""
    """Why NVML can't be asked."""
    free_bytes: dict[str, int | str] = field(default_factory=dict)
    """Free space of each folder, or why it can't be used."""
    shm_bytes: int | None = None
    """None where there is no such file system."""
    marker: str = ""
    """The marker file's text, or why it can't be read."""


def problems(wanted: Wanted) -> list[str]:
    """Read and judge this node: one sentence for each thing that is wrong."""
    if wanted.temporary_bytes:
        folders = wanted.folders | {tempfile.gettempdir(): wanted.temporary_bytes}
        wanted = replace(wanted, folders=folders)
    return judge(read(wanted), wanted)


def judge(found: Readings, wanted: Wanted) -> list[str]:
    """Say what is wrong on a node, one sentence a part, each with the host's name."""
    clauses = [*_judge_gpus(found, wanted)]
    for folder, least in wanted.folders.items():
        free = found.free_bytes[folder]
        if isinstance(free, str):
            clauses.append(f"{folder} cannot be used ({free})")
        elif free < least:
            clauses.append(f"{folder} has {free / GB:.2f} GB free, {least / GB:.2f} GB are needed")
    if found.shm_bytes is not None and found.shm_bytes < SHM_BYTES:
        clauses.append(f"{SHM} has {found.shm_bytes / GB:.2f} GB free, {SHM_BYTES / GB:.2f} GB are needed")
    if wanted.marker is not None and wanted.marker_text not in found.marker:
        clauses.append(
            f"{wanted.marker} does not show what another node has written ({found.marker.strip()[:80] or 'empty'}): "
            "the folder is not shared"
        )
    return [f"{found.host}: {clause}" for clause in clauses]


def _judge_gpus(found: Readings, wanted: Wanted) -> Iterator[str]:
    if found.no_nvml:
        if wanted.gpus:
            yield f"its GPUs cannot be asked ({found.no_nvml}), {wanted.gpus} are needed"
        return
    reached = [gpu for gpu in found.gpus if not gpu.trouble]
    if wanted.gpus is not None and len(reached) < wanted.gpus:
        yield f"{len(reached)} GPUs can be reached, {wanted.gpus} are needed"
    for gpu in found.gpus:
        for clause in _judge_gpu(gpu, wanted):
            yield f"GPU {gpu.index} {clause}"


def _judge_gpu(gpu: Gpu, wanted: Wanted) -> Iterator[str]:
    if gpu.trouble:
        yield f"cannot be reached ({gpu.trouble})"
        return
    if wanted.gpu_memory_gb is not None and gpu.memory_bytes < wanted.gpu_memory_gb * GB:
        yield f"has {gpu.memory_bytes / GB:.1f} GB of memory, {wanted.gpu_memory_gb:g} GB are needed"
    if gpu.uncorrected_errors:
        yield f"has had {gpu.uncorrected_errors} uncorrectable memory errors: it needs a reset"
    if gpu.repair_failed:
        yield "has broken memory rows that it could not replace: it needs to be exchanged"
    elif gpu.repair_pending:
        yield "waits for a reset to take broken memory out of use"
    if gpu.slowdowns:
        yield f"is slowed down by its hardware ({', '.join(gpu.slowdowns)})"


def read(wanted: Wanted) -> Readings:
    """Look at this node; may hang where a device or a file system does."""
    gpus, no_nvml = _read_gpus()
    return Readings(
        host=socket.gethostname(),
        gpus=gpus,
        no_nvml=no_nvml,
        free_bytes={folder: _free_bytes(folder) for folder in wanted.folders},
        shm_bytes=shutil.disk_usage(SHM).free if Path(SHM).is_dir() else None,
        marker="" if wanted.marker is None else _read_marker(wanted.marker, wanted.marker_text),
    )


def _free_bytes(folder: str) -> int | str:
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return str(error.strerror)
    return free if os.access(folder, os.W_OK | os.X_OK) else "it cannot be written to"


def _read_marker(path: Path, text: str) -> str:
    deadline = time.monotonic() + MARKER_S
    while True:
        try:
            found = path.read_text(errors="replace")
        except OSError as error:
            found = str(error.strerror)
        if text in found or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def _read_gpus() -> tuple[tuple[Gpu, ...], str]:
    """Return the GPUs that this process may use, and why NVML can't be asked."""
    import pynvml

    try:
        pynvml.nvmlInit()
        indices = range(pynvml.nvmlDeviceGetCount())
        return tuple(_read_gpu(pynvml, index) for index in indices if _is_visible(pynvml, index)), ""
    except pynvml.NVMLError as error:
        return (), str(error)


def _is_visible(nvml: Any, index: int) -> bool:
    """Whether the job may use the GPU: those of other jobs on the node are not ours to judge."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return True
    names = [name.strip() for name in visible.split(",")]
    if str(index) in names:
        return True
    if not any(name.startswith("GPU-") for name in names):
        return False
    try:
        uuid = str(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index)))
    except nvml.NVMLError:  # one that doesn't even tell its name may be ours
        return True
    return any(uuid.startswith(name) for name in names if name)


def _read_gpu(nvml: Any, index: int) -> Gpu:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory_bytes = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError as error:
        return Gpu(index, trouble=str(error))

    def ask(function: Callable[..., Any], *more: Any) -> Any:
        try:
            return function(handle, *more)
        except nvml.NVMLError_NotSupported:
            return None

    try:
        rows = ask(nvml.nvmlDeviceGetRemappedRows)
        pages_pending = None if rows else ask(nvml.nvmlDeviceGetRetiredPagesPendingStatus)
        reasons = int(ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons) or 0)
        return Gpu(
            index,
            memory_bytes=memory_bytes,
            uncorrected_errors=ask(
                nvml.nvmlDeviceGetTotalEccErrors,
                nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                nvml.NVML_VOLATILE_ECC,
            ),
            repair_pending=bool(rows[2]) if rows else bool(pages_pending),
            repair_failed=bool(rows[3]) if rows else None,
            slowdowns=tuple(name for bit, name in _slowdowns(nvml).items() if reasons & bit),
        )
    except nvml.NVMLError as error:
        return Gpu(index, trouble=str(error))


def _slowdowns(nvml: Any) -> dict[int, str]:
    return {
        nvml.nvmlClocksThrottleReasonHwSlowdown: "slow-down by the board",
        nvml.nvmlClocksThrottleReasonHwThermalSlowdown: "too hot",
        nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "power brake",
    }
