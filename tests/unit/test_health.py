"""Is a node fit? Judged from readings; NVML is the one thing that is replaced here, for want of a GPU."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from train.resilience import health
from train.resilience.health import GB, Gpu, Readings, Wanted, judge

WELL = Gpu(index=0, memory_bytes=42 * GB, uncorrected_errors=0, repair_pending=False, repair_failed=False)


def gpu(**changes: Any) -> Gpu:
    return Gpu(**{**WELL.__dict__, **changes})


@pytest.mark.req("C12")
@pytest.mark.parametrize(
    ("found", "wanted", "clauses"),
    [
        (Readings("n3"), Wanted(), []),
        (Readings("n3", no_nvml="no driver"), Wanted(gpus=0), []),
        (
            Readings("n3", no_nvml="no driver"),
            Wanted(gpus=4),
            ["its GPUs cannot be asked (no driver), 4 are needed"],
        ),
        (Readings("n3", gpus=(WELL, gpu(index=1))), Wanted(gpus=2, gpu_memory_gb=40), []),
        (Readings("n3", gpus=(WELL,)), Wanted(gpus=2), ["1 GPUs can be reached, 2 are needed"]),
        (
            Readings("n3", gpus=(WELL, gpu(index=1, trouble="GPU is lost"))),
            Wanted(gpus=2),
            ["1 GPUs can be reached, 2 are needed", "GPU 1 cannot be reached (GPU is lost)"],
        ),
        (
            Readings("n3", gpus=(gpu(memory_bytes=20 * GB),)),
            Wanted(gpu_memory_gb=40),
            ["GPU 0 has 20.0 GB of memory, 40 GB are needed"],
        ),
        (
            Readings("n3", gpus=(gpu(uncorrected_errors=2),)),
            Wanted(),
            ["GPU 0 has had 2 uncorrectable memory errors: it needs a reset"],
        ),
        (
            Readings("n3", gpus=(gpu(repair_pending=True),)),
            Wanted(),
            ["GPU 0 waits for a reset to take broken memory out of use"],
        ),
        (
            Readings("n3", gpus=(gpu(repair_pending=True, repair_failed=True),)),
            Wanted(),
            ["GPU 0 has broken memory rows that it could not replace: it needs to be exchanged"],
        ),
        (
            Readings("n3", gpus=(gpu(slowdowns=("too hot", "power brake")),)),
            Wanted(),
            ["GPU 0 is slowed down by its hardware (too hot, power brake)"],
        ),
        (
            Readings("n3", gpus=(gpu(uncorrected_errors=None, repair_pending=None, repair_failed=None),)),
            Wanted(gpus=1),
            [],
        ),
        (
            Readings("n3", free_bytes={"/scratch": GB // 2, "/tmp": "No such file or directory"}),
            Wanted(folders={"/scratch": GB, "/tmp": 1}),
            [
                "/scratch has 0.50 GB free, 1.00 GB are needed",
                "/tmp cannot be used (No such file or directory)",
            ],
        ),
        (Readings("n3", shm_bytes=10**6), Wanted(), ["/dev/shm has 0.00 GB free, 0.13 GB are needed"]),
        (
            Readings("n3", marker="No such file or directory"),
            Wanted(marker=Path("/runs/marker"), marker_text="n1"),
            [
                "/runs/marker does not show what another node has written (No such file or directory): the folder "
                "is not shared"
            ],
        ),
        (Readings("n3", marker="from n1\n"), Wanted(marker=Path("/runs/marker"), marker_text="n1"), []),
    ],
)
def test_each_problem_is_one_sentence_with_the_host(
    found: Readings, wanted: Wanted, clauses: list[str]
) -> None:
    assert judge(found, wanted) == [f"n3: {clause}" for clause in clauses]


def test_this_host_without_a_gpu_is_read(tmp_path: Path) -> None:
    (tmp_path / "marker").write_text("here")
    message = {
        "marker": {"path": str(tmp_path / "marker"), "text": "here"},
        "folders": {str(tmp_path): 1},
        "gpus": None,
        "gpu_memory_gb": None,
    }
    found = health.read(Wanted.read(message))
    assert found.marker == "here"
    assert isinstance(found.free_bytes[str(tmp_path)], int)
    assert judge(found, Wanted.read(message)) == []


def test_a_marker_that_does_not_come_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "MARKER_S", 0.3)
    wanted = Wanted(marker=tmp_path / "marker", marker_text="here")
    (problem,) = health.problems(wanted)
    assert "(No such file or directory): the folder is not shared" in problem


class NvmlError(Exception):
    pass


class NotSupportedError(NvmlError):
    pass


def fake_nvml(count: int, lost: int | None = None) -> types.ModuleType:
    """NVML with an A100 in each place, except for one that has fallen off the bus."""

    def handle(index: int) -> int:
        if index == lost:
            raise NvmlError("GPU is lost")
        return index

    def not_supported(handle: int) -> None:
        raise NotSupportedError

    module = types.ModuleType("pynvml")
    module.__dict__.update(
        NVMLError=NvmlError,
        NVMLError_NotSupported=NotSupportedError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: count,
        nvmlDeviceGetHandleByIndex=handle,
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}abc",
        nvmlDeviceGetMemoryInfo=lambda handle: types.SimpleNamespace(total=42 * GB),
        nvmlDeviceGetRemappedRows=lambda handle: (0, 1, handle == 1, False),
        nvmlDeviceGetRetiredPagesPendingStatus=not_supported,
        nvmlDeviceGetTotalEccErrors=lambda handle, kind, counter: 3 if handle == 2 else 0,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x40 if handle == 3 else 0x1,
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1,
        NVML_VOLATILE_ECC=0,
        nvmlClocksThrottleReasonHwSlowdown=0x8,
        nvmlClocksThrottleReasonHwThermalSlowdown=0x40,
        nvmlClocksThrottleReasonHwPowerBrakeSlowdown=0x80,
    )
    return module


def test_what_nvml_says_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(5, lost=4))
    found, trouble = health._read_gpus()
    assert trouble == ""
    assert found[0] == WELL
    assert found[1].repair_pending
    assert found[2].uncorrected_errors == 3
    assert found[3].slowdowns == ("too hot",)
    assert found[4].trouble == "GPU is lost"


@pytest.mark.parametrize(("visible", "indices"), [("1,2", [1, 2]), ("GPU-2abc", [2]), ("", [])])
def test_only_the_jobs_own_gpus_are_judged(
    visible: str, indices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(4))
    assert [gpu.index for gpu in health._read_gpus()[0]] == indices


def test_the_real_nvml_has_what_is_asked_of_it() -> None:
    """A misspelt name would show on a cluster only."""
    import pynvml

    missing = [name for name in vars(fake_nvml(0)) if not name.startswith("__") and not hasattr(pynvml, name)]
    assert missing == []
