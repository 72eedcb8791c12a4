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
from torch.distributed.checkpoint.planner import LoadItemType
from torch.futures import Future

from train.checkpoint.boxes import Boxes, Part
from train.checkpoint.compress.files import StepFiles
from train.checkpoint.digests import Digest, Listed, digest
from train.checkpoint.errors import DamagedError
from train.checkpoint.manifest import METADATA, Manifest, read_manifest
from train.checkpoint.slices import Slice, indexed_slice, position, told_of
from train.checkpoint.staging import leaves_of
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

    Raises `DamagedError`; where it is not a checkpoint of such a tree `UnfitError`, or `CheckpointException` for one
    without hashes.
    """
    if reader.has_hashes:
        reader.load(tree)
        return
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

    Slices are taken from their files as plain bytes and compared with their hashes (`load`); those of a checkpoint
    without hashes (format 1) are left to torch, which does not unpickle tensors.
    """

    def __init__(
        self, folder: Path, manifest: Manifest | None = None, verify: bool = True, metadata: str | None = None
    ) -> None:
        """`manifest`: that of the folder, where there is one; `verify`: whether to hash what is read.

        `metadata`: the hash that the file had when it was written, where there is no manifest yet.
        """
        super().__init__(folder)
        self._folder = folder
        self._files = StepFiles(folder, manifest)
        self._manifest = manifest
        self._metadata_hash = metadata if manifest is None else manifest.metadata
        self._verify = verify
        self._metadata: Metadata | None = None
        self._boxes = Boxes()
        self._listed = Listed(folder, None if manifest is None else manifest.digests)
        self.phases = Phases()

    def close(self) -> None:
        """Close the files that were read."""
        self._files.close()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata; raises `pickle.UnpicklingError` for a file that is anything else."""
        # A checkpoint that is loaded in parts asks for it with each.
        if self._metadata is None:
            data = (self._folder / METADATA).read_bytes()
            known = self._metadata_hash is not None and self._metadata_hash == digest(data)
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
        return super().read_data(plan, planner)

    @property
    def has_hashes(self) -> bool:
        """Whether there is anything to compare what is read with."""
        return self._manifest is not None and self._manifest.verified

    def load(self, tree: dict[str, Any]) -> None:
        """Do what `load_tree` does, for a checkpoint that has hashes."""
        with self.phases.of("find_s"):
            metadata = self.read_metadata()
            parts = [
                part
                for key, leaf in leaves_of(tree)
                for part in self._boxes.parts(metadata, ".".join(key), leaf)
            ]
            found = [(indexed_slice(self._files, metadata, part.index), part) for part in parts]
            # As they lie in the files.
            found.sort(key=lambda one: (one[0].file, one[0].offset))
        for piece, part in found:
            self._read(piece, part)

    def _read(self, piece: Slice, part: Part) -> None:
        target = part.target
        direct = (
            part.inner is None and target.is_cpu and target.is_contiguous() and target.dtype == piece.dtype
        )
        values = target if direct else torch.empty(piece.shape, dtype=piece.dtype)
        self._fill(piece, as_bytes(values))
        if not direct:
            with self.phases.of("place_s"):
                target.copy_(values if part.inner is None else values[part.inner])

    def _fill(self, piece: Slice, values: Any) -> None:
        """Read a slice, and compare it with its hash where somebody asks for that."""
        began_s = time.perf_counter()
        told = self.told(piece) if self._verify else told_of(piece, self._listed)
        wanted = told.xxh3 if told is not None and self._verify else None
        at = position(piece, told)
        found_s = time.perf_counter()
        made, hashing_s = xxhash.xxh3_128(), 0.0
        try:
            for begin in range(0, piece.nbytes, _WINDOW_BYTES):
                window = values[begin : begin + _WINDOW_BYTES]
                piece.read_into(at + begin, window)
                if wanted is not None:  # what is still in the caches
                    read_s = time.perf_counter()
                    made.update(window)
                    hashing_s += time.perf_counter() - read_s
        except OSError as error:
            raise DamagedError(f"{piece} cannot be read ({error.strerror or error})") from error
        if wanted not in (None, made.hexdigest()):
            raise DamagedError(f"{piece} is not what was written")
        phases = self.phases
        phases.find_s += found_s - began_s
        phases.read_s += time.perf_counter() - found_s - hashing_s
        phases.verify_s += hashing_s
        phases.read_bytes += piece.nbytes

    def told(self, piece: Slice) -> Digest:
        """Where a slice lies and what its hash should be; raises `DamagedError` where nobody has told."""
        found = told_of(piece, self._listed)
        if found is None:
            raise DamagedError(f"{piece} has no hash")
        return found
