"""Hash what a rank's files hold beside values: the archive around each slice, which torch reads too."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch.distributed.checkpoint import FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from train.checkpoint.compress.files import StepFiles
from train.checkpoint.digests import FOLDER, Box, Digest, Rest, read_digests, read_rest
from train.checkpoint.errors import DamagedError
from train.checkpoint.slices import tensors, values_at


class PlacingWriter(FileSystemWriter):
    """torch's writer, which remembers what it has written where."""

    written: Sequence[WriteResult] = ()
    """By this rank."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what a plan has; see torch."""
        done = super().write_data(plan, planner)
        self.written = done.wait()
        return done


def located(
    folder: Path, written: Iterable[WriteResult], digests: Iterable[Digest]
) -> tuple[list[Digest], dict[str, str]]:
    """Return the digests of what was written with the place of each, and the hash of the rest of each file by its name.

    From the files, and only where no values are: that is little. Raises `DamagedError`, or OSError.
    """
    files: dict[str, list[tuple[int, int]]] = defaultdict(list)
    places: dict[tuple[str, Box], int] = {}
    with closing(StepFiles(folder)) as opened:
        for one in written:
            place = one.storage_data
            values = values_at(opened, place.relative_path, place.offset, place.length)
            files[place.relative_path].append(values)
            places[one.index.fqn, tuple(one.index.offset or ())] = values[0]
        rests = {name: _rest(opened, name, values) for name, values in files.items()}
    return [replace(one, offset=places[one.tensor, one.start]) for one in digests], rests


def check_rests(files: StepFiles, metadata: Metadata, name: str) -> None:
    """Compare the rest of the files of one rank with what it has written; `name`: of its file in `digests`.

    Raises `DamagedError`, or OSError.
    """
    path = files.folder / FOLDER / name
    values: dict[str, list[tuple[int, int]]] = defaultdict(list)
    forms = dict(tensors(metadata))
    try:
        for one in read_digests(path, None):
            if one.offset is None:
                return  # written by an earlier version, which says no places
            file = metadata.storage_data[MetadataIndex(one.tensor, one.start)].relative_path
            values[file].append((one.offset, one.values * forms[one.tensor].properties.dtype.itemsize))
        wanted = read_rest(path)
    except (ValueError, LookupError) as error:
        raise DamagedError(str(error)) from error
    for file, hexed in wanted.items():
        if _rest(files, file, values[file]) != hexed:
            raise DamagedError(f"{file} does not read back as it was written, beside its values")


def _rest(files: StepFiles, name: str, values: Iterable[tuple[int, int]]) -> str:
    def read(position: int, buffer: bytearray) -> None:
        files.read_into(name, position, np.frombuffer(buffer, np.uint8))

    return Rest(files.size(name), list(values)).digest(read)
