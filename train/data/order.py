"""The order of samples: a pure function of the seed and the global sample index.

The global sample index counts the samples that a run has taken, over all ranks and epochs. Nothing here
knows of earlier calls, so a run may stop and continue in any layout.
"""

import hashlib

import numpy as np
import numpy.typing as npt

from train.layout.batch import check_batch

ROUNDS = 8
Int64Array = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


def shuffled(seed: int, indices: npt.ArrayLike, n: int) -> Int64Array:
    """Map global sample indices to samples 0 <= s < n, each sample once in every epoch of n indices.

    A keyed Feistel network permutes the smallest power of two that holds n; positions that fall outside n walk
    on until they are inside (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). It takes no
    memory and differs in each epoch. Returns an array of the shape of `indices`.
    """
    assert n >= 1, "nothing to shuffle"
    epochs, positions = np.divmod(np.asarray(indices, dtype=np.int64), n)
    result = np.empty_like(positions)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        result[here] = _permute(_round_keys(seed, int(epoch)), positions[here].astype(np.uint64), n)
    return result


def _round_keys(seed: int, epoch: int) -> Words:
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * ROUNDS).digest()
    return np.frombuffer(digest, "<u8").astype(np.uint64)


def _permute(keys: Words, positions: Words, n: int) -> Int64Array:
    bits = (n - 1).bit_length()
    values = _feistel(keys, positions, bits)
    outside = np.flatnonzero(values >= n)
    while outside.size:
        values[outside] = _feistel(keys, values[outside], bits)
        outside = outside[values[outside] >= n]
    return values.astype(np.int64)


def _feistel(keys: Words, values: Words, bits: int) -> Words:
    """Permute [0, 2**bits): the halves, which may differ by one bit, take turns in changing each other."""
    low_bits = np.uint64(bits // 2)
    low_mask, high_mask = np.uint64((1 << (bits // 2)) - 1), np.uint64((1 << (bits - bits // 2)) - 1)
    low, high = values & low_mask, values >> low_bits
    for turn, key in enumerate(keys):
        if turn % 2:
            low ^= _mix(high, key) & low_mask
        else:
            high ^= _mix(low, key) & high_mask
    return (high << low_bits) | low


def _mix(words: Words, key: np.uint64) -> Words:
    """Hash 64-bit words under a key: the finaliser of SplitMix64 (Steele, Lea, Flood, 2014)."""
    mixed = words + key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def batch_indices(
    consumed_samples: int, global_batch_size: int, dp_rank: int, dp_size: int, micro_batch_size: int
) -> Int64Array:
    """Global sample indices that one data-parallel rank takes in the next optimizer step.

    Returns (micro_batches, micro_batch_size). Over all ranks each index of [consumed_samples,
    consumed_samples + global_batch_size) appears once. Raises `ConfigError` when the batch does not divide.
    """
    check_batch(global_batch_size, micro_batch_size, dp_size)
    step = np.arange(consumed_samples, consumed_samples + global_batch_size, dtype=np.int64)
    return step.reshape(-1, dp_size, micro_batch_size)[:, dp_rank]
