"""What lies where: slots cut into blocks, which go round the paths, at aligned offsets of one file each."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from train.offload.nvme.files import ALIGN_BYTES, round_up


@dataclass(frozen=True)
class Slot:
    """A place for so many bytes."""

    name: str
    nbytes: int
    first: int
    """Index of the path that has the first block."""
    offsets: tuple[int, ...]
    """Where the slot's blocks begin in the file of each path."""


class Piece(NamedTuple):
    """A block of a slot, or what the last one needs of it."""

    path: int
    offset: int
    """In the file, a multiple of `ALIGN_BYTES`."""
    begin: int
    """Bytes of the slot: from `begin` up to, and without, `end`."""
    end: int


class Plan:
    """Gives slots their places. Slots share no page, and the files of all paths end up about equally long."""

    def __init__(self, paths: int, block_bytes: int) -> None:
        """`block_bytes`: a multiple of `ALIGN_BYTES`."""
        assert paths > 0 and block_bytes > 0 and block_bytes % ALIGN_BYTES == 0
        self._block_bytes = block_bytes
        self.file_bytes = [0] * paths
        """Length of the file of each path so far."""

    def add(self, name: str, nbytes: int) -> Slot:
        """Place a slot; its first block goes to the path that has least."""
        assert nbytes >= 0
        first = self.file_bytes.index(min(self.file_bytes))
        slot = Slot(name, nbytes, first, tuple(self.file_bytes))
        for piece in self.pieces(slot):
            self.file_bytes[piece.path] = piece.offset + round_up(piece.end - piece.begin)
        return slot

    def pieces(self, slot: Slot) -> Iterator[Piece]:
        """Cut a slot into what one request each moves."""
        size, paths = self._block_bytes, len(self.file_bytes)
        for index, begin in enumerate(range(0, slot.nbytes, size)):
            path = (slot.first + index) % paths
            offset = slot.offsets[path] + index // paths * size
            yield Piece(path, offset, begin, min(begin + size, slot.nbytes))
