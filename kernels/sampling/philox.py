"""Philox4x32-10: random words that follow from a key and a counter, and from nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_FACTORS = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)
_STEPS = np.array([0x9E3779B9, 0xBB67AE85], np.uint64)
_ROUNDS = 10


def philox(counter: Array, key: Array) -> Array:
    """Return four u32 words for each counter [n, 4] and key [n, 2], which hold u32 words, as u64 [n, 4].

    Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011.
    """
    a, b, c, d = counter.astype(np.uint64).T
    k = key.astype(np.uint64).T
    for _ in range(_ROUNDS):
        first, second = a * _FACTORS[0], c * _FACTORS[1]
        a, b, c, d = second >> _SHIFT ^ b ^ k[0], second & _LOW, first >> _SHIFT ^ d ^ k[1], first & _LOW
        k = (k + _STEPS[:, None]) & _LOW
    return np.stack([a, b, c, d], axis=1)


def words(values: Array) -> tuple[Array, Array]:
    """Return the low and the high words of s64 numbers, as u64."""
    bits = np.ascontiguousarray(values, np.int64).view(np.uint64)
    return bits & _LOW, bits >> _SHIFT


def draws(seed: Array, sequence: Array, position: Array) -> Array:
    """Return a random u64 for each row: the first two words, the low one first.

    The key is the seed. The counter is position and sequence. Of each, the low word comes first.
    """
    found = philox(np.stack([*words(position), *words(sequence)], axis=1), np.stack(words(seed), axis=1))
    return np.asarray(found[:, 0] | found[:, 1] << _SHIFT)
