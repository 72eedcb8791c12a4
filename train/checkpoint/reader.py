"""Read torch's distributed checkpoints without running what somebody may have put into them."""

import io
import pickle
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint import FileSystemReader, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.futures import Future

from train.checkpoint.compress.files import StepFiles
from train.checkpoint.digests import FOLDER, Box, digest, file_name, read_digests
from train.checkpoint.errors import DamagedError
from train.checkpoint.manifest import METADATA, Manifest, read_manifest
from train.checkpoint.slices import Slice, indexed_slice
from train.checkpoint.stored import as_bytes

_WINDOW_BYTES = 2 << 20
_KNOWN = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
}


class _Known:
    """Knows what `.metadata` is made of and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        is_plain = module == "torch" and (
            name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)
        )
        if is_plain or name in _KNOWN.get(module, ()):
            return super().find_class(module, name)  # type: ignore[misc]
        raise pickle.UnpicklingError(f"{METADATA} asks for {module}.{name}, which no checkpoint needs")


class _MetadataUnpickler(_Known, pickle.Unpickler):
    """For what has the hash that it was written with: fast, but damaged bytes may make it take any memory."""


class _CarefulUnpickler(_Known, pickle._Unpickler):
    """For what nothing is known of: in Python, where memory follows from what is really there."""


def damage(folder: Path) -> str | None:
    """Say in a clause what is wrong with the checkpoint in `folder`; None when it is whole, see `whole`."""
    try:
        whole(folder)
    except ValueError as error:
        return str(error)
    return None


def whole(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint that nothing is wrong with; raise `ValueError` with what is, as a clause.

    Every file is there with its size, and the small ones hold what was written; the bytes of the tensors are not
    looked at.
    """
    try:
        manifest = read_manifest(folder)
        SafeReader(folder, manifest).read_metadata()
    except Exception as error:  # a damaged pickle raises anything
        raise ValueError(str(error).splitlines()[0] if str(error) else type(error).__name__) from error
    return manifest


def load_tree(tree: dict[str, Any], reader: "SafeReader") -> None:
    """Give the tensors of `tree`, in place, the values that the checkpoint has for them. Not collective.

    Raises `DamagedError`, or `CheckpointException` for what has another reason.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            # Each rank plans and reads what it needs.
            dcp.load(tree, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        for cause, _ in error.failures.values():
            if isinstance(cause, DamagedError):
                raise cause from error
        raise


@dataclass
class Phases:
    """Where the time of loading goes, s, and how much was read."""

    find_s: float = 0.0
    """Looking up where slices lie."""
    read_s: float = 0.0
    """Reading, and decoding what is compressed."""
    verify_s: float = 0.0
    """Hashing."""
    place_s: float = 0.0
    """Copying to where values belong, a GPU for example; nothing where they are read right there."""
    read_bytes: int = 0

    def __str__(self) -> str:
        return (
            f"{self.find_s:.1f} to find slices, {self.read_s:.1f} to read {self.read_bytes / 1e9:.3g} GB, "
            f"{self.verify_s:.1f} to compare hashes, {self.place_s:.1f} to put values in place"
        )

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Add the time that passes to a phase."""
        began_s = time.perf_counter()
        yield
        setattr(self, name, getattr(self, name) + time.perf_counter() - began_s)


class SafeReader(FileSystemReader):
    """torch's reader, with a restricted unpickler for `.metadata`: a pickle can run any code.

    Slices are taken from their files as plain bytes and compared with their hashes; those of a checkpoint without
    hashes (format 1) are left to torch, which does not unpickle tensors.
    """

    def __init__(self, folder: Path, manifest: Manifest | None = None, verify: bool = True) -> None:
        """`manifest`: that of the folder, where there is one; `verify`: whether to hash what is read."""
        super().__init__(folder)
        self._folder = folder
        self._files = StepFiles(folder, manifest)
        self._manifest = manifest
        self._verify = verify
        self._metadata: Metadata | None = None
        self._hashes: dict[int, dict[tuple[str, Box], str]] = {}
        """Of the slices that a rank has written, by rank, once they were needed."""
        self.phases = Phases()

    def close(self) -> None:
        """Close the files that were read."""
        self._files.close()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata; raises `pickle.UnpicklingError` for a file that is anything else."""
        # A checkpoint that is loaded in parts asks for it with each.
        if self._metadata is None:
            data = (self._folder / METADATA).read_bytes()
            known = self._manifest is not None and self._manifest.metadata == digest(data)
            metadata = (_MetadataUnpickler if known else _CarefulUnpickler)(io.BytesIO(data)).load()
            if not isinstance(metadata, Metadata):
                raise pickle.UnpicklingError(f"{METADATA} holds a {type(metadata).__name__}")
            self._metadata = metadata
        if self._metadata.storage_meta is None:
            self._metadata.storage_meta = StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a plan asks for; see torch. Raises `DamagedError`."""
        if any(item.type is LoadItemType.BYTE_IO for item in plan.items):
            raise DamagedError("it holds something that is no tensor")  # torch would unpickle it
        if self._manifest is None or not self._manifest.verified:
            return super().read_data(plan, planner)
        for item in plan.items:
            self._read(item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, item: ReadItem, planner: LoadPlanner) -> None:
        piece = indexed_slice(self._files, self.read_metadata(), item.storage_index)
        target = planner.resolve_tensor(item).detach()
        whole = tuple(item.lengths) == piece.shape
        direct = whole and target.is_cpu and target.is_contiguous() and target.dtype == piece.dtype
        values = target if direct else torch.empty(piece.shape, dtype=piece.dtype)
        found = self._fill(piece, as_bytes(values))
        if found is not None and found != self.hash_of(piece):
            raise DamagedError(f"{piece} is not what was written")
        if not direct:
            part = tuple(
                slice(begin, begin + size)
                for begin, size in zip(item.storage_offsets, item.lengths, strict=True)
            )
            with self.phases.of("place_s"):
                target.copy_(values[part])
        planner.commit_tensor(item, target)

    def _fill(self, piece: Slice, values: Any) -> str | None:
        """Read a slice; return its hash, None where nobody asks for it."""
        made = xxhash.xxh3_128() if self._verify else None
        with self.phases.of("find_s"):
            position = piece.position()
        self.phases.read_bytes += piece.nbytes
        try:
            for begin in range(0, piece.nbytes, _WINDOW_BYTES):
                window = values[begin : begin + _WINDOW_BYTES]
                with self.phases.of("read_s"):
                    piece.read_into(position + begin, window)
                if made is not None:  # what is still in the caches
                    with self.phases.of("verify_s"):
                        made.update(window)
        except OSError as error:
            raise DamagedError(f"{piece} cannot be read ({error.strerror or error})") from error
        return None if made is None else made.hexdigest()

    def hash_of(self, piece: Slice) -> str:
        """The hash that a slice should have; raises `DamagedError` where there is none."""
        assert self._manifest is not None
        if piece.rank not in self._hashes:
            name = file_name(piece.rank)
            try:
                listed = read_digests(self._folder / FOLDER / name, self._manifest.digests.get(name))
            except ValueError as error:
                raise DamagedError(str(error)) from error
            self._hashes[piece.rank] = {(one.tensor, one.start): one.xxh3 for one in listed}
        value = self._hashes[piece.rank].get((piece.tensor, piece.start))
        if value is None:
            raise DamagedError(f"{piece} has no hash")
        return value
