"""Metrics of rank 0: `metrics.jsonl` for machines, TensorBoard for people."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from contract.run_folder import RunFolder, append_json_line, read_json_lines

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Recorder:
    """Writes each logged step once, in both places."""

    def __init__(self, run: RunFolder, resumed_step: int, tensorboard: bool) -> None:
        """Lines of steps after `resumed_step` belong to work that was lost; they are dropped."""
        self._path = run.metrics
        _drop_after(self._path, resumed_step)
        self._writer: SummaryWriter | None = None
        if tensorboard:
            # Imported here: it takes a second, and the other ranks do not need it.
            from torch.utils import tensorboard as writers

            self._writer = writers.SummaryWriter(str(run.tensorboard), purge_step=resumed_step + 1)

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Record `values` of `step`; floats are kept in full precision."""
        append_json_line(self._path, {"step": step, **values})
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write out what is buffered."""
        if self._writer is not None:
            self._writer.close()


def _drop_after(path: Path, step: int) -> None:
    if not path.exists():
        return
    lines = list(read_json_lines(path))
    kept = [line for line in lines if line.get("step", 0) <= step]
    if len(kept) == len(lines):
        return
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    temporary.touch()
    for line in kept:
        append_json_line(temporary, line)
    temporary.replace(path)
