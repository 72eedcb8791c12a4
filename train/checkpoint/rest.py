"""Hash what a rank's files hold beside values: the archive around each slice, which torch reads too."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from torch.distributed.checkpoint import FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from train.checkpoint.digests import Rest
from train.checkpoint.slices import read_into, values_at


class PlacingWriter(FileSystemWriter):
    """torch's writer, which remembers what it has written where."""

    written: Sequence[WriteResult] = ()
    """By this rank."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what a plan has; see torch."""
        done = super().write_data(plan, planner)
        self.written = done.wait()
        return done


def rest_digests(folder: Path, written: Iterable[WriteResult]) -> dict[str, str]:
    """Hash the rest of each file in which something was written, by its name; `DamagedError`, or OSError.

    From the file, and only where no values are: that is little.
    """
    files: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for one in written:
        place = one.storage_data
        files[place.relative_path].append(values_at(folder / place.relative_path, place.offset, place.length))
    return {
        name: Rest((folder / name).stat().st_size, values).digest(partial(read_into, folder / name))
        for name, values in files.items()
    }
