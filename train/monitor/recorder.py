"""Metrics of rank 0: `metrics.jsonl` for machines, TensorBoard for people."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contract.run_folder import RunFolder, append_json_line, read_json_lines

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Recorder:
    """Writes each logged step once, in both places."""

    def __init__(
        self,
        run: RunFolder,
        resumed_step: int,
        tensorboard: bool,
        redo_evaluation: bool,
        check_owner: Callable[[], None],
    ) -> None:
        """Lines of work that will be done again are dropped.

        That is steps after `resumed_step`, and with `redo_evaluation` the evaluation at it. `check_owner` raises
        `PeerError` when another process has the run: then nothing is written.
        """
        self._path = run.metrics
        self._check_owner = check_owner
        self._broken = False
        _drop_after(self._path, resumed_step, redo_evaluation)
        self._writer: SummaryWriter | None = None
        if tensorboard:
            # Imported here: it takes a second, and the other ranks do not need it.
            from torch.utils import tensorboard as writers

            self._writer = writers.SummaryWriter(str(run.tensorboard), purge_step=resumed_step + 1)

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Record `values` of `step`; floats are kept in full precision."""
        try:
            # A node that was cut off for a while may go on with a run that has been restarted elsewhere meanwhile.
            self._check_owner()
            append_json_line(self._path, {"step": step, **values})
            self._broken = False
        except OSError as error:
            # A full disk must not end the training; the first lost line says so.
            if not self._broken:
                print(f"trierarch: {self._path} cannot be written: {error.strerror}", file=sys.stderr)
            self._broken = True
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write out what is buffered."""
        if self._writer is not None:
            self._writer.close()


def _drop_after(path: Path, step: int, redo_evaluation: bool) -> None:
    if not path.exists():
        return
    lines = list(read_json_lines(path))
    again = "eval_loss" if redo_evaluation else None
    kept = [line for line in lines if _step(line) < step or (_step(line) == step and again not in line)]
    if len(kept) == len(lines):
        return
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    temporary.touch()
    for line in kept:
        append_json_line(temporary, line)
    temporary.replace(path)


def _step(line: dict[str, Any]) -> int:
    step = line.get("step")
    return step if isinstance(step, int) else 0
