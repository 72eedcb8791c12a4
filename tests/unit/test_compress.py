"""Compressed files of checkpoints: what is read is what was there, and damage is named."""

import random
import struct
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from train.checkpoint.compress.container import BLOCK_BYTES, Container, ContainerWriter, Region
from train.checkpoint.compress.methods import Method, decode, encode
from train.checkpoint.compress.rounding import Bytes, round_moments, round_weights
from train.checkpoint.errors import DamagedError

SEEDS = st.integers(0, 2**32)


def values_of(seed: int, count: int, itemsize: int) -> Bytes:
    """Words that look like a tensor's, special ones among them."""
    rng = np.random.default_rng(seed)
    spread = np.exp(rng.normal(0, rng.uniform(0, 6), count))
    floats = (rng.normal(0, 1e-3, count) * spread).astype(np.float32)
    special = rng.random(count) < rng.choice([0, 0.01, 0.5])
    floats[special] = rng.choice([0, -0.0, np.inf, np.nan, 1e-44, 3e38], int(special.sum())).astype(
        np.float32
    )
    words = floats.view(np.uint32) >> 16 if itemsize == 2 else floats.view(np.uint32)
    return words.astype(f"<u{itemsize}").view(np.uint8)


@given(SEEDS, st.sampled_from([1, 2, 4, 8]), st.integers(1, 700), st.sampled_from(list(Method)))
def test_a_block_is_decoded_to_what_it_was(seed: int, itemsize: int, count: int, method: Method) -> None:
    if method is Method.ROUNDED and itemsize not in (2, 4):
        return
    raw = values_of(seed, count, itemsize)
    parent = values_of(seed + 1, count, itemsize)
    parent[: len(parent) // 2] = raw[: len(parent) // 2]
    data = encode(raw, itemsize, method, parent)
    out = np.empty_like(raw)
    decode(data, itemsize, method, parent, out)
    assert (out == raw).all()


@given(SEEDS, st.sampled_from([2, 4]), st.integers(1, 1200), st.floats(1e-3, 1))
def test_rounded_values_are_within_the_bound_and_stay_as_they_are(
    seed: int, itemsize: int, count: int, bound: float
) -> None:
    words = values_of(seed, count, itemsize).view(f"<u{itemsize}")
    rounded, error = round_moments(words, bound)
    assert error <= bound
    wide = [(one.astype(np.uint32) << (16 if itemsize == 2 else 0)) for one in (words, rounded)]
    old, new = (one.view(np.float32).astype(np.float64) for one in wide)
    finite = np.isfinite(old) & (old != 0)
    assert (np.abs(new[finite] - old[finite]) <= np.abs(old[finite]) * bound * (1 + 1e-12)).all()
    assert (rounded[~finite] << 1 == words[~finite] << 1).all()  # all but the sign of a zero
    assert (np.sign(old)[finite] == np.sign(new)[finite]).all()
    again, error = round_moments(rounded, bound)
    assert (again == rounded).all() and error == 0


def test_rounded_moments_take_a_byte_each() -> None:
    rng = np.random.default_rng(random.getrandbits(32))
    moments = rng.normal(0, 1e-4, 1 << 16).astype(np.float32)
    for values in (moments, moments**2):
        rounded, error = round_moments(values.view(np.uint32), 0.1)
        assert 0.01 < error <= 0.1
        size = len(encode(rounded.view(np.uint8), 4, Method.ROUNDED, None))
        assert size < 1.05 * values.size
        assert size < 0.5 * len(encode(rounded.view(np.uint8), 4, Method.PLAIN, None))


@given(SEEDS, st.integers(1, 500))
def test_weights_are_rounded_as_torch_rounds_to_bfloat16(seed: int, count: int) -> None:
    words = values_of(seed, count, 4).view(np.uint32)
    rounded, error = round_weights(words)
    floats = torch.from_numpy(words.view(np.float32))
    expected = floats.to(torch.bfloat16).float()
    small = floats.abs() < torch.finfo(torch.float32).tiny
    expected = torch.where(floats.isfinite() & expected.isfinite() & ~small, expected, floats)
    assert (rounded == expected.numpy().view(np.uint32)).all()
    assert error <= 2**-8


def pair(folder: Path, seed: int) -> tuple[Bytes, Bytes, Path, list[Region]]:
    """A plain file, its parent's, and the compressed one, with regions of all kinds."""
    rng = random.Random(seed)
    regions: list[Region] = []
    at = 0
    for _ in range(rng.randint(1, 5)):
        itemsize = rng.choice([1, 2, 4, 8])
        nbytes = itemsize * rng.choice([1, 77, 5000, BLOCK_BYTES // itemsize, BLOCK_BYTES // itemsize + 3])
        choices = [Method.PLAIN, Method.XOR, Method.DIFFERENCE]
        method = rng.choice(choices + ([Method.ROUNDED] if itemsize in (2, 4) else []))
        where = ("p", at) if method.needs_parent else (None, 0)
        regions.append(Region(at, nbytes, itemsize, method, *where))
        at += nbytes
    plain = values_of(seed, at, 1)
    parent = plain.copy()
    parent[::7] ^= 3
    with (folder / "f.z0").open("wb") as file:
        writer = ContainerWriter(file)
        for region in regions:
            writer.add(region, lambda at, out: put(plain, at, out), lambda _, at, out: put(parent, at, out))
        writer.finish()
    return plain, parent, folder / "f.z0", regions


def put(data: Bytes, at: int, out: Bytes) -> None:
    out[...] = data[at : at + out.nbytes]


@pytest.mark.parametrize("number", range(6))
def test_any_part_of_a_compressed_file_is_read(tmp_path: Path, number: int) -> None:
    plain, parent, path, regions = pair(tmp_path, random.getrandbits(32))
    with closing(Container(path, lambda _, at, out: put(parent, at, out))) as opened:
        assert opened.nbytes == plain.nbytes and opened.regions == regions
        for _ in range(100):
            begin = random.randrange(plain.nbytes)
            out = np.empty(min(random.choice([1, 100, 3 << 20]), plain.nbytes - begin), np.uint8)
            opened.read_into(begin, out)
            assert (out == plain[begin : begin + out.nbytes]).all()
        with pytest.raises(DamagedError, match="ends after"):
            opened.read_into(plain.nbytes - 1, np.empty(2, np.uint8))


@pytest.mark.parametrize("number", range(4))
def test_damage_of_a_compressed_file_never_does_more_than_other_values(tmp_path: Path, number: int) -> None:
    _, parent, path, _ = pair(tmp_path, random.getrandbits(32))
    whole = path.read_bytes()
    refused = 0
    for _ in range(60):
        damaged = bytearray(whole)
        begin = random.choice([random.randrange(len(whole)), len(whole) - random.randint(1, 300)])
        kind = random.choice(["flip", "cut", "zeros"])
        if kind == "flip":
            damaged[max(0, begin)] ^= 1 << random.randrange(8)
        elif kind == "cut":
            damaged = damaged[: max(0, begin)]
        else:
            damaged[max(0, begin) : max(0, begin) + 50] = bytes(50)
        path.write_bytes(damaged)
        try:
            with closing(Container(path, lambda _, at, out: put(parent, at, out))) as opened:
                out = np.empty(opened.nbytes, np.uint8)
                opened.read_into(0, out)
        except DamagedError:
            refused += 1
    assert refused > 0


def test_a_frame_that_claims_to_be_large_is_refused(tmp_path: Path) -> None:
    frame = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    data = struct.pack("<I", len(frame)) + frame
    with pytest.raises(DamagedError, match="larger than blocks are"):
        decode(data, 1, Method.PLAIN, None, np.empty(16, np.uint8))
