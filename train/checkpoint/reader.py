"""Read torch's distributed checkpoints without running what somebody may have put into them."""

import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.futures import Future

from train.checkpoint.digests import FOLDER, Box, digest, file_name, read_digests
from train.checkpoint.manifest import METADATA, Manifest, read_manifest
from train.checkpoint.slices import DamagedError, Slice, indexed_slice, read_into
from train.checkpoint.stored import as_bytes

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


class _MetadataUnpickler(pickle.Unpickler):
    """Knows what `.metadata` is made of and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        is_plain = module == "torch" and (
            name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)
        )
        if is_plain or name in _KNOWN.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{METADATA} asks for {module}.{name}, which no checkpoint needs")


def damage(folder: Path) -> str | None:
    """Say in a clause what is wrong with the checkpoint in `folder`; None when it is whole.

    Every file is there with its size, and the small ones hold what was written; the bytes of the tensors are not
    looked at.
    """
    try:
        read_manifest(folder)
        SafeReader(folder).read_metadata()
    except Exception as error:  # a damaged pickle raises anything
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return None


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


class SafeReader(FileSystemReader):
    """torch's reader, with a restricted unpickler for `.metadata`: a pickle can run any code.

    Slices are taken from their files as plain bytes and compared with their hashes; those of a checkpoint without
    hashes (format 1) are left to torch, which does not unpickle tensors.
    """

    def __init__(self, folder: Path, manifest: Manifest | None = None, verify: bool = True) -> None:
        """`manifest`: that of the folder, where there is one; `verify`: whether to hash what is read."""
        super().__init__(folder)
        self._folder = folder
        self._manifest = manifest
        self._verify = verify
        self._metadata: Metadata | None = None
        self._hashes: dict[int, dict[tuple[str, Box], str]] = {}
        """Of the slices that a rank has written, by rank, once they were needed."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata; raises `pickle.UnpicklingError` for a file that is anything else."""
        # A checkpoint that is loaded in parts asks for it with each.
        if self._metadata is None:
            with (self._folder / METADATA).open("rb") as file:
                metadata = _MetadataUnpickler(file).load()
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
        piece = indexed_slice(self._folder, self.read_metadata(), item.storage_index)
        target = planner.resolve_tensor(item).detach()
        whole = tuple(item.lengths) == piece.shape
        direct = whole and target.is_cpu and target.is_contiguous() and target.dtype == piece.dtype
        values = target if direct else torch.empty(piece.shape, dtype=piece.dtype)
        if piece.nbytes:
            read_into(piece.path, piece.position(), as_bytes(values))
        if self._verify and digest(as_bytes(values)) != self._hash(piece):
            raise DamagedError(f"{piece} is not what was written")
        if not direct:
            part = tuple(
                slice(begin, begin + size)
                for begin, size in zip(item.storage_offsets, item.lengths, strict=True)
            )
            target.copy_(values[part])
        planner.commit_tensor(item, target)

    def _hash(self, piece: Slice) -> str:
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
