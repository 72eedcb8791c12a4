"""Blocks that are read often and overwritten as a whole: in memory, in files, and from two threads."""

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.errors import NodeError
from train.offload.host_pool import HostPool
from train.offload.nvme.leftovers import Identity
from train.offload.nvme.settings import NvmeSettings
from train.offload.nvme.store import NvmeStore
from train.offload.shelf import DiskShelf, MemoryShelf, Shelf

PAGE = 4096
SIZES = [3 * PAGE, *[10_000] * 6, 3 * PAGE - 1]


def disk_shelf(path: Path, sizes: list[int], ahead: int = 1) -> DiskShelf:
    identity = Identity.of(path / "run", 0, "test")
    store = NvmeStore([path], identity, NvmeSettings(block_bytes=PAGE))
    return DiskShelf(store, sizes, ahead, pinned=False)


@pytest.fixture(params=["memory", "disk"])
def shelf(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shelf]:
    """A shelf of blocks of SIZES."""
    made = MemoryShelf(SIZES, pinned=False) if request.param == "memory" else disk_shelf(tmp_path, SIZES)
    yield made
    made.close()
    assert not list(tmp_path.iterdir())


def write(shelf: Shelf, number: int, value: int) -> None:
    shelf.edit(number).fill_(value)
    shelf.keep(number)


def holds(shelf: Shelf, number: int, value: int, size: int) -> bool:
    block = shelf.get(number)
    same = block.numel() == size and bool((block == value).all())
    shelf.put(number)
    return same


@pytest.mark.req("C6")
def test_blocks_keep_what_was_written_last(shelf: Shelf) -> None:
    generator = random.Random(1)
    values = [0] * len(SIZES)
    for turn in range(60):
        number = generator.randrange(len(SIZES))
        if turn % 3:
            shelf.want(generator.sample(range(len(SIZES)), 3))
            assert holds(shelf, number, values[number], SIZES[number])
        else:
            values[number] = turn
            write(shelf, number, turn)
    for number, value in enumerate(values):
        assert holds(shelf, number, value, SIZES[number])


@pytest.mark.req("C6")
def test_an_update_on_another_thread_is_read_as_it_goes(tmp_path: Path) -> None:
    """The update of all blocks runs while another thread reads those that are done, and asks for the next."""
    shelf = disk_shelf(tmp_path, SIZES, ahead=2)
    done = [threading.Event() for _ in SIZES]
    failures: list[BaseException] = []

    def update(value: int) -> None:
        try:
            for number in range(len(SIZES)):
                write(shelf, number, value)
                done[number].set()
        except BaseException as error:
            failures.append(error)
            raise

    for turn in range(1, 20):
        for event in done:
            event.clear()
        thread = threading.Thread(target=update, args=(turn,))
        thread.start()
        for number, size in enumerate(SIZES):
            assert done[number].wait(30), failures
            shelf.want([(number + more) % len(SIZES) for more in range(3)])
            assert holds(shelf, number, turn, size)
        thread.join()
    shelf.close()


@pytest.mark.req("C6")
@pytest.mark.parametrize("ahead", [1, 3])
def test_memory_is_bounded_whatever_the_number_of_blocks(tmp_path: Path, ahead: int) -> None:
    shelf = disk_shelf(tmp_path, [10 * PAGE] * 40, ahead)
    # Those that are wanted, the one in use, the one before it; and two that are written.
    assert shelf.host_bytes == (ahead + 4) * 10 * PAGE
    for number in range(40):
        write(shelf, number, number)
    for number in range(40):
        shelf.want(range(number, min(40, number + 1 + ahead)))
        assert holds(shelf, number, number, 10 * PAGE)
    assert shelf.traffic().written_bytes == 400 * PAGE
    # Nothing is read twice.
    assert shelf.traffic().read_bytes == 400 * PAGE
    shelf.close()


@pytest.mark.req("C6")
def test_what_is_wanted_in_vain_gives_way(tmp_path: Path) -> None:
    shelf = disk_shelf(tmp_path, [PAGE] * 6, ahead=1)
    for number in range(6):
        write(shelf, number, number)
    for number in range(6):
        shelf.want([5, 4, 3])
        assert holds(shelf, number, number, PAGE)
    shelf.close()


def test_a_disk_that_fails_ends_the_read_with_its_sentence(tmp_path: Path) -> None:
    shelf = disk_shelf(tmp_path, [PAGE] * 3)
    write(shelf, 0, 1)
    assert holds(shelf, 0, 1, PAGE)
    (file,) = tmp_path.glob("*/blocks.bin")
    with file.open("r+b") as opened:
        opened.truncate(0)
    with pytest.raises(NodeError, match=r"blocks\.bin"):
        shelf.get(1)
    shelf.close()


@pytest.mark.req("C6")
@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from([1, 5000, 3 * PAGE]), st.booleans()), max_size=30))
def test_a_pool_of_the_host_stays_within_its_limit(turns: list[tuple[int, bool]]) -> None:
    pool = HostPool(6 * PAGE, pinned=False)
    taken: list[torch.Tensor] = []
    for nbytes, gives in turns:
        if gives and taken:
            pool.give(taken.pop())
        elif (piece := pool.take(nbytes)) is not None:
            assert piece.numel() == nbytes
            assert all(piece.data_ptr() != other.data_ptr() for other in taken)
            taken.append(piece)
        assert pool.held_bytes <= pool.limit_bytes


def test_a_pool_of_the_host_uses_again_what_was_given_back() -> None:
    pool = HostPool(2 * PAGE, pinned=False)
    piece = pool.take(5000)
    assert piece is not None and pool.take(1) is None
    pool.give(piece)
    again = pool.take(5000)
    assert again is not None and again.data_ptr() == piece.data_ptr()
