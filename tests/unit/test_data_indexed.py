"""Token files in Megatron's layout, checked against megatron-core itself."""

import struct
import warnings
from pathlib import Path

import numpy as np
import pytest

from contract.errors import UserError
from train.data.indexed import HEADER, IndexedTokens, IndexedWriter, dtype_for

DOCUMENTS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]


def write(prefix: Path, documents: list[list[int]], vocab_size: int = 257) -> None:
    with IndexedWriter(prefix, dtype_for(vocab_size)) as writer:
        for document in documents:
            writer.append(np.array(document), [len(document)])
        writer.finish()
        writer.publish()


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    write(tmp_path / "a.b", DOCUMENTS)  # a dot in the name must not be taken for a suffix
    return tmp_path / "a.b"


def megatron():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets import indexed_dataset
    return indexed_dataset


@pytest.mark.req("A13")
@pytest.mark.parametrize("vocab_size", [257, 128_000])
def test_megatron_reads_ours(tmp_path: Path, vocab_size: int) -> None:
    documents = [[vocab_size - 1, 2], [3], [4, 5, 6]]
    write(tmp_path / "ours", documents, vocab_size)
    theirs = megatron().IndexedDataset(str(tmp_path / "ours"), mmap=True)
    assert [theirs[i].tolist() for i in range(len(theirs))] == documents
    assert theirs.document_indices.tolist() == [0, 1, 2, 3]
    assert theirs.index.dtype == megatron().DType.optimal_dtype(vocab_size)


@pytest.mark.req("A13")
@pytest.mark.filterwarnings("ignore:__array__")
@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
def test_we_read_megatrons(tmp_path: Path, dtype: type) -> None:
    import torch

    builder = megatron().IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    builder.add_document(torch.tensor([1, 2, 3, 4, 5]), [2, 3])  # a document of two sequences
    builder.add_item(torch.tensor([6]))
    builder.end_document()
    builder.add_document(torch.tensor([7, 8]), [2])
    builder.finalize(str(tmp_path / "theirs.idx"))
    ours = IndexedTokens(tmp_path / "theirs")
    assert ours.dtype == dtype
    assert ours[:].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert ours.document_offsets.tolist() == [0, 5, 6, 8]
    assert (ours.documents, ours.tokens) == (3, 8)


def test_slices_are_views_of_the_file(prefix: Path) -> None:
    data = IndexedTokens(prefix)
    assert data[2:5].tolist() == [3, 4, 5]
    assert np.shares_memory(data[2:5], data[:])
    assert not data[:].flags.writeable


def test_unpublished_files_leave_nothing_and_harm_nothing(prefix: Path) -> None:
    with pytest.raises(RuntimeError), IndexedWriter(prefix, dtype_for(257)) as writer:
        writer.append(np.array([9]), [1])
        raise RuntimeError
    assert sorted(path.name for path in prefix.parent.iterdir()) == ["a.b.bin", "a.b.idx"]
    assert IndexedTokens(prefix)[:].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_the_fingerprint_tells_tokens_and_boundaries_apart(tmp_path: Path) -> None:
    def fingerprint(documents: list[list[int]]) -> str:
        with IndexedWriter(tmp_path / "x", dtype_for(257)) as writer:
            for document in documents:
                writer.append(np.array(document), [len(document)])
            return writer.finish()

    assert fingerprint([[1, 2], [3]]) == fingerprint([[1, 2], [3]])
    assert len({fingerprint(x) for x in ([[1, 2], [3]], [[1], [2, 3]], [[1, 2], [4]])}) == 3


def edit(path: Path, offset: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(content)


def cut(path: Path, by: int) -> None:
    path.write_bytes(path.read_bytes()[:-by])


FAULTS = {
    "no index": (lambda b, i: i.unlink(), ".idx", "does not exist"),
    "no tokens": (lambda b, i: b.unlink(), ".bin", "does not exist"),
    "empty index": (lambda b, i: i.write_bytes(b""), ".idx", "is empty"),
    "empty tokens": (lambda b, i: b.write_bytes(b""), ".bin", "is empty"),
    "magic": (lambda b, i: edit(i, 0, b"NOTMAGIC!"), ".idx", "is no index"),
    "other small file": (lambda b, i: i.write_bytes(b"hello"), ".idx", "is no index"),
    "version": (lambda b, i: edit(i, 9, struct.pack("<Q", 2)), ".idx", "is no index"),
    "dtype": (lambda b, i: edit(i, 17, b"\x63"), ".idx", "unknown token type"),
    "float dtype": (lambda b, i: edit(i, 17, b"\x07"), ".idx", "unknown token type"),
    "cut header": (lambda b, i: i.write_bytes(i.read_bytes()[:20]), ".idx", "is cut"),
    "cut index": (lambda b, i: cut(i, 3), ".idx", "is cut"),
    "huge count": (lambda b, i: edit(i, 18, struct.pack("<Q", 2**61)), ".idx", "is cut"),
    "cut tokens": (lambda b, i: cut(b, 1), ".bin", "is cut"),
    "longer tokens": (lambda b, i: b.write_bytes(b.read_bytes() + b"12"), ".bin", "does not belong"),
    "no documents": (lambda b, i: i.write_bytes(i.read_bytes()[:18] + bytes(16)), ".idx", "no documents"),
    "bad length": (lambda b, i: edit(i, HEADER.size, struct.pack("<i", -3)), ".idx", "contradicts itself"),
    "bad offset": (lambda b, i: edit(i, HEADER.size + 24, b"\x09"), ".idx", "contradicts itself"),
    "bad boundary": (lambda b, i: edit(i, HEADER.size + 48 + 16, b"\x00"), ".idx", "contradicts itself"),
    "a folder": (lambda b, i: (b.unlink(), b.mkdir()), ".bin", "cannot be read"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_file_is_named_in_one_sentence(prefix: Path, fault: str) -> None:
    breaks, ending, words = FAULTS[fault]
    breaks(prefix.parent / "a.b.bin", prefix.parent / "a.b.idx")
    with pytest.raises(UserError, match=words) as caught:
        IndexedTokens(prefix)
    assert f"{prefix}{ending}" in str(caught.value)
    assert caught.value.exit_code == 78
    assert "\n" not in str(caught.value)
