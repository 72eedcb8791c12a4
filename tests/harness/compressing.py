"""Steps of a training that go on from one to the next, to be compressed; and commands that are killed."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.checkpoints import Box, save_ours, state
from tools.ckpt.open import open_source

CUTS: dict[str, list[Box]] = {
    "model.embed_tokens.weight": [((0, 0), (20, 32)), ((20, 0), (44, 32))],
    "model.layers.0.mlp.up_proj.weight": [((0, 0), (48, 10)), ((0, 10), (48, 22))],
}
_OTHER_TYPES = [
    *(torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.complex64),
    *(torch.int8, torch.int32, torch.int64, torch.bool),
]


def small_steps(run: Path, count: int, large: int = 0, files: int = 3) -> list[Path]:
    """Write steps 10, 20, ... of a run, each a little further than the last, with values of all types.

    `large`: elements of one more weight and its moments.
    """
    generator = torch.Generator().manual_seed(1)
    tree = state(0, 10)
    tree["other"] = {
        str(dtype)[6:]: (torch.randn(300, generator=generator) * 50).to(dtype) for dtype in _OTHER_TYPES
    }
    tree["other"] |= {"empty": torch.empty(0, 4), "scalar": torch.tensor(3.5)}
    if large:
        tree["model"]["large"] = torch.randn(large, generator=generator) / 50
        moments = torch.randn(large, generator=generator).exp() / 1e4
        tree["optimizer"]["large"] = {
            "step": torch.tensor(10.0),
            "exp_avg": moments.clone(),
            "exp_avg_sq": moments**2,
        }
    (run / "checkpoints").mkdir(parents=True)
    steps = []
    for number in range(1, count + 1):
        steps.append(save_ours(run / f"checkpoints/step_{10 * number}", tree, 10 * number, CUTS, files=files))
        tree = _moved(tree, generator)
        tree["progress"]["step"] += 10
    return steps


def _moved(tree: dict[str, Any], generator: torch.Generator) -> dict[str, Any]:
    """A tree whose large tensors of float32 went on a little."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Tensor):
            moves = value.dtype == torch.float32 and value.dim() > 0
            noise = torch.randn(value.shape, generator=generator) if moves else None
            found[name] = value.clone() if noise is None else value * (1 + noise / 1e4)
        else:
            found[name] = _moved(value, generator)
    return found


def hashes(step: Path) -> dict[str, str | None]:
    """Those that a step says that its tensors have."""
    with open_source(step) as source:
        return {entry.name: entry.xxh3 for entry in source.entries}


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder but the manifest."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    }


def killed_after(seconds: float, work: Callable[[], object]) -> bool:
    """Do `work` in a process that is killed after some time; return whether it was done before."""
    child = os.fork()
    if child == 0:
        # Nothing of this process's may be done on the way out.
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the command failed by itself"
    return not os.WIFSIGNALED(status)
