"""Read torch's distributed checkpoints without running what somebody may have put into them."""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from train.checkpoint.manifest import read_manifest

METADATA = ".metadata"
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

    Every file is there with its size, and the metadata can be read; the bytes of the tensors are not looked at.
    """
    try:
        read_manifest(folder)
        SafeReader(folder).read_metadata()
    except Exception as error:  # a damaged pickle raises anything
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return None


class SafeReader(FileSystemReader):
    """torch's reader, with a restricted unpickler for `.metadata`: a pickle can run any code.

    Tensors are not unpickled by torch; other values would be, so checkpoints hold tensors only.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder
        self._metadata: Metadata | None = None

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
