"""Open a checkpoint of any format."""

from pathlib import Path

from contract.run_folder import RunFolder
from tools.ckpt.dcp import METADATA, read_dcp
from tools.ckpt.deepspeed import is_deepspeed, read_deepspeed
from tools.ckpt.findings import UnreadableError, error
from tools.ckpt.ours import DIGESTS, read_ours
from tools.ckpt.safetensors_files import SUFFIX, read_safetensors_file, read_safetensors_folder
from tools.ckpt.source import Source
from tools.ckpt.torch_files import ZIP_MAGIC, read_torch_file
from train.checkpoint.manifest import NAME as MANIFEST

_KNOWN = (
    "a run, a step of one, torch's distributed checkpoints, safetensors, DeepSpeed, and files of torch.save"
)


def open_source(path: Path) -> Source:
    """Open a checkpoint; of a run folder, its newest step. Close it, or use it in a `with`.

    Raises `UnreadableError` for what is missing, of no known format, or has a damaged directory.
    """
    path = newest_step(path)
    try:
        if path.is_file():
            return _open_file(path)
        if path.is_dir():
            return _open_folder(path)
    except (OSError, RecursionError) as reason:
        raise UnreadableError(f"{path} cannot be read ({reason})") from reason
    raise UnreadableError(f"{path} does not exist: give {_KNOWN}")


def newest_step(path: Path) -> Path:
    """Return the newest step of a run folder; any other path as it is."""
    run = RunFolder(path)
    if not run.checkpoints.is_dir() or (path / METADATA).exists():
        return path
    steps = run.published_steps()
    if not steps:
        raise UnreadableError(f"run {path} has no checkpoint yet")
    return run.checkpoints / f"step_{steps[-1]}"


def _open_folder(folder: Path) -> Source:
    if (folder / MANIFEST).is_file():
        return read_ours(folder)
    if (folder / METADATA).is_file():
        source = read_dcp(folder)
        if (folder / DIGESTS).is_dir():
            source.findings.append(
                error("is missing: without it, hashes have nothing to hold on to", file=MANIFEST)
            )
        return source
    if is_deepspeed(folder):
        return read_deepspeed(folder)
    if any(folder.glob(f"*{SUFFIX}")):
        return read_safetensors_folder(folder)
    raise UnreadableError(f"{folder} holds no checkpoint that is known here: give {_KNOWN}")


def _open_file(path: Path) -> Source:
    if path.name in (METADATA, MANIFEST):
        return _open_folder(path.parent)
    with path.open("rb") as file:
        magic = file.read(len(ZIP_MAGIC))
    if path.suffix == SUFFIX:
        return read_safetensors_file(path)
    if magic == ZIP_MAGIC:
        return read_torch_file(path)
    if magic[:1] == b"\x80" and path.suffix in (".pt", ".pth", ".bin", ".ckpt"):
        raise UnreadableError(
            f"{path} is a pickle from before torch 1.6: load it with `torch.load(..., weights_only=True)` and save "
            "it again"
        )
    raise UnreadableError(f"{path} holds no checkpoint that is known here: give {_KNOWN}")
