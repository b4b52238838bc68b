"""How far quantized results are from the f32 ones: signal to noise, cosine, agreement of rankings."""

from __future__ import annotations

from math import inf, log10
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


class Power(NamedTuple):
    """Sums of squares of a reference and of the error against it; add up over batches.

    Attributes
    ----------
    signal, noise : float
        In the square of the reference's unit.
    """

    signal: float = 0.0
    noise: float = 0.0

    def __add__(self, other: object) -> Power:
        """Combine two batches."""
        if not isinstance(other, Power):
            return NotImplemented
        return Power(self.signal + other.signal, self.noise + other.noise)

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise ratio in dB; infinite without noise, minus infinite without signal."""
        if self.noise == 0:
            return inf
        return 10 * log10(self.signal / self.noise) if self.signal > 0 else -inf


def power(reference: F32, approximation: F32) -> Power:
    """Measure one batch: arrays of one shape, f32; summed in f64."""
    error = reference - approximation
    return Power(float(np.square(reference, dtype=np.float64).sum()), float(np.square(error, dtype=np.float64).sum()))


def cosine(a: F32, b: F32) -> F64:
    """Cosine of the angle between corresponding rows of two arrays of shape (n, d), shape (n,), f64."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    products: F64 = (x * y).sum(axis=1) / np.sqrt((x * x).sum(axis=1) * (y * y).sum(axis=1))
    return products


class Ranking(NamedTuple):
    """How alike two sets of embeddings rank each sentence's neighbours.

    Attributes
    ----------
    worst, mean : float
        Spearman's rank correlation over all sentences, -1..1.
    top1 : float
        Share of sentences with the same nearest neighbour, 0..1.
    """

    worst: float
    mean: float
    top1: float


def ranking_agreement(reference: F32, approximation: F32) -> Ranking:
    """Compare the similarity rankings of two sets of embeddings of the same sentences.

    Each sentence ranks all the others by cosine, once among `reference` and once among `approximation`.

    Parameters
    ----------
    reference, approximation : array of shape (n, d), f32
        n of at least 3: two others are the least that can be ranked.
    """
    mine, theirs = _similarities_to_others(reference), _similarities_to_others(approximation)
    correlations = [spearman(a, b) for a, b in zip(mine, theirs, strict=True)]
    top1 = float(np.mean(mine.argmax(axis=1) == theirs.argmax(axis=1)))
    return Ranking(min(correlations), float(np.mean(correlations)), top1)


def spearman(a: F64, b: F64) -> float:
    """Spearman's rank correlation of two vectors of shape (n,); values that tie share their mean rank."""
    x, y = _ranks(a), _ranks(b)
    x -= x.mean()
    y -= y.mean()
    return float(x @ y / np.sqrt((x @ x) * (y @ y)))


def _ranks(values: F64) -> F64:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: F64 = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return ranks


def _similarities_to_others(embeddings: F32) -> F64:
    """Cosines of each row to all other rows, shape (n, n - 1)."""
    unit = embeddings.astype(np.float64)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    n = len(unit)
    return (unit @ unit.T)[~np.eye(n, dtype=bool)].reshape(n, n - 1)
