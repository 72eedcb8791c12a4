"""Slots on disks keep what is written, whatever the disk does; and a bad disk is named in one sentence."""

import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from harness.disks import frozen, mounted, small_disk
from torch import Tensor

from contract.errors import ConfigError, NodeError
from train.offload.nvme import threads, volume
from train.offload.nvme.files import ALIGN_BYTES, BlockFile, Spare, aligned_buffer
from train.offload.nvme.leftovers import BLOCKS_FILE, Identity
from train.offload.nvme.plan import Slot
from train.offload.nvme.pool import BufferPool, bytes_of
from train.offload.nvme.settings import NvmeSettings
from train.offload.nvme.store import NvmeStore

SMALL = NvmeSettings(block_bytes=16 << 10, threads=2)
SIZES = [0, 1, ALIGN_BYTES - 1, ALIGN_BYTES, ALIGN_BYTES + 1, 16 << 10, (1 << 20) + 17]


@contextmanager
def opened(
    paths: Sequence[Path],
    sizes: Sequence[int],
    settings: NvmeSettings = SMALL,
    checksum: bool = False,
    said: list[str] | None = None,
) -> Iterator[tuple[NvmeStore, list[Slot]]]:
    """A store with a slot for each of `sizes`, open; `said` collects what it tells a person."""
    identity = Identity.of(Path("runs/test"), 0, "test")
    heard = [] if said is None else said
    with closing(NvmeStore(paths, identity, settings, checksum, warn=heard.append)) as store:
        slots = [store.allocate(str(index), size) for index, size in enumerate(sizes)]
        store.open()
        yield store, slots


def noise(nbytes: int) -> Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


def blocks_file(path: Path) -> Path:
    (found,) = path.glob(f"trierarch-*/{BLOCKS_FILE}")
    return found


def two_paths(folder: Path) -> list[Path]:
    paths = [folder / "one", folder / "two"]
    for path in paths:
        path.mkdir()
    return paths


@pytest.mark.req("C6", "B9")
@pytest.mark.parametrize("checksum", [False, True])
def test_slots_keep_what_was_written(tmp_path: Path, checksum: bool) -> None:
    paths = two_paths(tmp_path)
    with opened(paths, SIZES, checksum=checksum) as (store, slots):
        for slot in slots:  # nothing was written yet
            found = noise(slot.nbytes)
            store.read(slot, bytes_of(found)).wait()
            assert not found.any()
        for _ in range(2):
            data = [noise(size) for size in SIZES]
            for handle in [store.write(slot, bytes_of(one)) for slot, one in zip(slots, data, strict=True)]:
                handle.wait()
            found = [torch.zeros_like(one) for one in data]
            for handle in [store.read(slot, bytes_of(one)) for slot, one in zip(slots, found, strict=True)]:
                handle.wait()
                assert handle.done
            assert all(torch.equal(*pair) for pair in zip(data, found, strict=True))
        traffic = store.traffic()
        assert traffic.read_bytes == 3 * sum(SIZES) and traffic.written_bytes == 2 * sum(SIZES)
        assert traffic.busy_s > 0 and traffic.waited_s > 0
        assert [blocks_file(path).stat().st_size for path in paths] == store.file_bytes
    assert [list(path.iterdir()) for path in paths] == [[], []]


def test_many_reads_and_writes_at_once_in_any_memory(tmp_path: Path) -> None:
    """Aligned and not, of a pool and not; whatever order the threads take them in."""
    draw = random.Random(0)
    sizes = [draw.randrange(200_000) for _ in range(20)]
    kept: dict[int, Tensor] = {}
    with opened(two_paths(tmp_path), sizes) as (store, slots):
        for _ in range(6):
            chosen = draw.sample(range(20), 10)
            under_way = []
            for index in chosen:
                start = draw.choice([0, 1, 512])
                memory = noise(sizes[index] + start)[start:]
                if index in kept and draw.random() < 0.5:
                    under_way.append((store.read(slots[index], bytes_of(memory)), index, memory))
                    continue
                kept[index] = memory
                under_way.append((store.write(slots[index], bytes_of(memory)), index, memory))
            for handle, index, memory in under_way:
                handle.wait()
                assert torch.equal(memory, kept[index])


def test_tensors_of_any_type_go_through_aligned_buffers(tmp_path: Path) -> None:
    pool = BufferPool(2, 3 * 1000 * 4, pinned=False)
    with opened([tmp_path], [12_000, 2_000]) as (store, (states, weights)):
        with pool.buffer() as buffer:
            buffer[:12_000].view(torch.float32)[:] = torch.arange(3000.0)
            store.write(states, bytes_of(buffer)).wait()
        with pool.buffer() as buffer:
            buffer[:2000].view(torch.bfloat16)[:] = 0.5
            store.write(weights, bytes_of(buffer)).wait()
        with pool.buffer() as first, pool.buffer() as second:
            store.read(states, bytes_of(first)).wait()
            store.read(weights, bytes_of(second)).wait()
            assert torch.equal(first[:12_000].view(torch.float32), torch.arange(3000.0))
            assert (second[:2000].view(torch.bfloat16) == 0.5).all()


def test_a_slot_is_not_read_while_it_is_written(tmp_path: Path) -> None:
    with opened([tmp_path], [1 << 20]) as (store, (slot,)):
        handle = store.write(slot, bytes_of(noise(1 << 20)))
        with pytest.raises(AssertionError, match="wait for the write of 0 first"):
            store.read(slot, bytes_of(noise(1 << 20)))
        handle.wait()
        store.read(slot, bytes_of(noise(1 << 20))).wait()


@pytest.mark.req("C6")
def test_a_damaged_block_is_named(tmp_path: Path) -> None:
    with opened([tmp_path], [100, 64 << 10], checksum=True) as (store, (small, slot)):
        for one in (small, slot):
            store.write(one, bytes_of(noise(one.nbytes))).wait()
        file = blocks_file(tmp_path)
        offset = ALIGN_BYTES + 3 * SMALL.block_bytes
        with file.open("r+b") as damaged:
            damaged.seek(offset + 5)
            byte = damaged.read(1)[0]
            damaged.seek(offset + 5)
            damaged.write(bytes([byte ^ 1]))
        store.read(small, bytes_of(noise(100))).wait()
        with pytest.raises(NodeError) as failed:
            store.read(slot, bytes_of(noise(slot.nbytes))).wait()
        assert f"block 3 of 16,384 bytes at offset {offset:,} of {file} is not what was written" in str(
            failed.value
        )


def test_a_file_that_was_cut_and_one_that_was_removed(tmp_path: Path) -> None:
    with opened([tmp_path], [64 << 10]) as (store, (slot,)):
        data = noise(slot.nbytes)
        store.write(slot, bytes_of(data)).wait()
        file = blocks_file(tmp_path)
        # The kernel keeps a removed file for those who have it open: nothing is lost.
        kept = file.with_name("kept")
        os.link(file, kept)
        file.unlink()
        found = noise(slot.nbytes)
        store.read(slot, bytes_of(found)).wait()
        assert torch.equal(found, data)
        for length in (20 << 10, 100):
            os.truncate(kept, length)
            with pytest.raises(
                NodeError, match=r"blocks.bin ends at byte [\d,]+, before what was kept there"
            ):
                store.read(slot, bytes_of(found)).wait()
        kept.unlink()
    assert not list(tmp_path.iterdir())


def test_paths_that_will_not_do_are_refused(tmp_path: Path) -> None:
    nowhere = NvmeStore([tmp_path / "none"], Identity.of(tmp_path, 0, "test"))
    with pytest.raises(NodeError, match="does not exist here: give a folder"):
        nowhere.open()
    file = tmp_path / "file"
    file.touch()
    for path, problem in ((tmp_path / "none", "does not exist"), (file, "is no folder")):
        with (
            pytest.raises(NodeError, match=rf"the NVMe path {path} {problem} here: give a folder"),
            opened([path], [1]),
        ):
            pass
    with pytest.raises(ConfigError, match="name a folder twice"), opened([tmp_path, tmp_path / "."], [1]):
        pass
    with (
        mounted(tmp_path / "readonly", "-t", "tmpfs", "-o", "ro", "none") as path,
        pytest.raises(NodeError, match="cannot be written to"),
        opened([path], [1]),
    ):
        pass


@pytest.mark.req("C6")
def test_room_is_looked_for_before_it_is_taken(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=8m", "none") as path:
        with opened([path], [5 << 20]):
            with pytest.raises(NodeError) as full, small_rank([path], 4 << 20):
                pass
            assert f"the NVMe path {path} has 3.14 MB free and a rank wants 4.19 MB" in str(full.value)
            assert len(list(path.iterdir())) == 1
        # More than the disk could ever hold is no fault of this node.
        with pytest.raises(ConfigError, match=r"and a rank wants 9\.\d+ MB there"), opened([path], [9 << 20]):
            pass
        # Two folders of one disk share its room.
        (path / "a").mkdir()
        (path / "b").mkdir()
        with pytest.raises(ConfigError), opened([path / "a", path / "b"], [10 << 20]):
            pass
        with opened([path / "a", path / "b"], [6 << 20]):
            assert os.statvfs(path).f_bavail * os.statvfs(path).f_frsize <= 2 << 20
        assert sorted(path.rglob("*")) == [path / "a", path / "b"]


@contextmanager
def small_rank(paths: Sequence[Path], nbytes: int) -> Iterator[None]:
    """Another rank on the same disk."""
    with closing(NvmeStore(paths, Identity.of(Path("runs/test"), 1, "test"), SMALL)) as store:
        store.allocate("all", nbytes)
        store.open()
        yield


def test_ranks_that_look_for_room_at_once_do_not_share_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has seen the room that the other takes."""
    monkeypatch.setattr(volume, "_check_room", lambda paths, sizes: None)
    with small_disk(tmp_path / "disk", 64 << 20) as path, opened([path], [24 << 20]):
        with (
            pytest.raises(NodeError, match=r"has 30\.\d+ MB free and a rank wants 50\.\d+ MB there"),
            small_rank([path], 48 << 20),
        ):
            pass
        with small_rank([path], 16 << 20):
            pass


def test_a_disk_without_direct_io_is_used_and_told_about(tmp_path: Path) -> None:
    said: list[str] = []
    with mounted(tmp_path / "ram", "-t", "ramfs", "none") as path:
        with opened([path], SIZES, checksum=True, said=said) as (store, slots):
            for slot in slots:
                data, found = noise(slot.nbytes), noise(slot.nbytes)
                store.write(slot, bytes_of(data)).wait()
                store.read(slot, bytes_of(found)).wait()
                assert torch.equal(found, data)
        assert len(said) == 1 and f"{path} takes no direct I/O" in said[0]


@pytest.mark.req("C6")
def test_a_disk_that_fills_up_although_it_was_reserved(tmp_path: Path) -> None:
    """The disk is a file on a disk that gets full: as with thin provisioning."""
    with (
        mounted(tmp_path / "thin", "-t", "tmpfs", "-o", "size=16m", "none") as thin,
        small_disk(thin / "disk", 64 << 20) as path,
        opened([path], [32 << 20]) as (store, (slot,)),
        pytest.raises(NodeError, match=r"blocks.bin could not be written \((No space|Input/output)"),
    ):
        store.write(slot, bytes_of(noise(slot.nbytes))).wait()


def test_a_full_disk_in_mid_run(tmp_path: Path) -> None:
    (tmp_path / "blocks").symlink_to("/dev/full")
    with pytest.raises(NodeError) as full:
        BlockFile(tmp_path / "blocks").write(aligned_buffer(1), 0, Spare())
    assert "(No space left on device): somebody has filled the disk: make room there" in str(full.value)


@pytest.mark.req("C6")
def test_a_broken_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 32 << 20) as path, opened([path], [16 << 20]) as (store, (slot,)):
        store.write(slot, bytes_of(noise(slot.nbytes))).wait()
        os.truncate(path.with_suffix(".img"), 8 << 20)  # the rest of the disk is gone
        with pytest.raises(
            NodeError, match=r"could not be read \(Input/output error\): the disk fails: take this"
        ):
            store.read(slot, bytes_of(noise(slot.nbytes))).wait()


@pytest.mark.req("C6")
def test_a_disk_that_hangs_is_told_about_and_then_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "_END_S", 0.3)
    said: list[str] = []
    settings = NvmeSettings(block_bytes=1 << 20, threads=1, slow_s=0.3, limit_s=1.5)
    with small_disk(tmp_path / "disk", 32 << 20) as path:
        with opened([path], [2 << 20], settings, said=said) as (store, (slot,)):
            assert store._volume is not None
            files = store._volume.files
            with frozen(path):
                handle = store.write(slot, bytes_of(noise(slot.nbytes)))
                with pytest.raises(
                    NodeError, match=r"was being written to .*blocks.bin for \d s: the disk or its"
                ):
                    handle.wait()
                store.close()  # returns although a request hangs
            files[0].close()  # a run would end with this
            assert len(said) == 1 and "the disk is slow, or others use it" in said[0]
        folder = blocks_file(path).parent
        assert folder.exists(), "to remove it could have hung, too"
        with opened([path], [1], said=said):
            pass
        assert "freed 0.00 GB" in said[1] and not folder.exists()


def test_closing_drops_what_has_not_begun(tmp_path: Path) -> None:
    before = threading.active_count()
    with opened([tmp_path], [64 << 20]) as (store, (slot,)):
        handle = store.write(slot, bytes_of(torch.zeros(slot.nbytes, dtype=torch.uint8)))
        store.close()
        assert handle.done and store.traffic().written_bytes < slot.nbytes
        with pytest.raises(RuntimeError, match="closed before this was done"):
            handle.wait()
    assert threading.active_count() == before and not list(tmp_path.iterdir())


def test_an_idle_store_keeps_no_buffer(tmp_path: Path) -> None:
    import weakref

    with opened([tmp_path], [1 << 20]) as (store, (slot,)):
        data = noise(slot.nbytes)
        seen = weakref.ref(data.untyped_storage())
        store.write(slot, bytes_of(data)).wait()
        del data
        deadline = time.monotonic() + 10
        while seen() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert seen() is None
