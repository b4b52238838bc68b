"""Distance between quantized and f32 results: signal to noise ratio, cosine, agreement of rankings."""

from __future__ import annotations

from math import inf, log10
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


def powers(reference: F32, approximation: F32) -> F64:
    """Return the sums of squares, in f64, of a reference and of the error against it; both add up over batches."""
    return np.array([np.square(x, dtype=np.float64).sum() for x in (reference, reference - approximation)])


def sqnr_db(signal: float, noise: float) -> float:
    """Return the signal to quantization noise ratio in dB; infinite without noise, minus infinite without signal."""
    if noise == 0:
        return inf
    return 10 * log10(signal / noise) if signal > 0 else -inf


def cosine(a: F32, b: F32) -> F64:
    """Return the cosines between corresponding rows of two arrays of shape (n, d)."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    products: F64 = (x * y).sum(axis=1) / np.sqrt((x * x).sum(axis=1) * (y * y).sum(axis=1))
    return products


class Ranking(NamedTuple):
    """How well two sets of embeddings agree on the ranking of each sentence's neighbours.

    `worst` and `mean` are Spearman's rank correlations over all sentences, -1..1; `top1` is the share of sentences with
    the same nearest neighbour, 0..1.
    """

    worst: float
    mean: float
    top1: float


def ranking_agreement(reference: F32, approximation: F32) -> Ranking:
    """Compare the rankings of all other sentences by cosine, in two arrays of shape (n, d) with n >= 3."""
    mine, theirs = _similarities_to_others(reference), _similarities_to_others(approximation)
    correlations = [spearman(a, b) for a, b in zip(mine, theirs, strict=True)]
    top1 = float(np.mean(mine.argmax(axis=1) == theirs.argmax(axis=1)))
    return Ranking(min(correlations), float(np.mean(correlations)), top1)


def spearman(a: F64, b: F64) -> float:
    """Return Spearman's rank correlation of two vectors; equal values share their mean rank."""
    return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(values: F64) -> F64:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: F64 = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return ranks


def _similarities_to_others(embeddings: F32) -> F64:
    """Return the cosines of each row with all other rows, shape (n, n - 1)."""
    unit = embeddings.astype(np.float64)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    n = len(unit)
    return (unit @ unit.T)[~np.eye(n, dtype=bool)].reshape(n, n - 1)
