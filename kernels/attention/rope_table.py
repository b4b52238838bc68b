"""Cosines and sines for rotary embedding: the same bits on every machine.

The libraries of processors differ in the last bits of a cosine. So the table that `rope_quantize_append` takes as data
is made here, by a fixed sequence of sums, products and quotients in f64, each rounded by itself: the angle is reduced
to at most pi / 4, and the sums of Taylor's series follow by Horner's rule. The error is below 2^-50, so the f32 is the
nearest one except for one angle in some millions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from skuda.registry.errors import InvalidProblem

Array = npt.NDArray[Any]

_HALF_PI, _HALF_PI_REST = 1.5707963267341256, 6.077100506506192e-11  # 33 bits, and the rest
MOST_POSITIONS = 1 << 20
"""Of a table. Products of as many quarter turns with `_HALF_PI` are exact."""
_TERMS = 8


def cos_sin(frequencies: Array, positions: int, scaling: float = 1.0) -> Array:
    """Return the table of a rotary embedding, f32 of shape (positions, 2 * pairs), the cosines first.

    Parameters
    ----------
    frequencies : array of shape (pairs,), f32
        Radians per position. An angle is the product of position and frequency, rounded to f32.
    positions : int
        How many, from 0 on; at most 2^20.
    scaling : float
        What cosines and sines are multiplied by, in f32.

    Raises
    ------
    InvalidProblem
        For more positions, and for a frequency with which the last angle is more than 2^20 quarter turns.
    """
    if not 0 <= positions <= MOST_POSITIONS:
        raise InvalidProblem("cos_sin", "positions", str(positions), f"be in [0, {MOST_POSITIONS}]")
    most = np.abs(frequencies).max(initial=0.0)
    if not most * max(positions - 1, 0) * (2 / np.pi) <= MOST_POSITIONS:  # also a NaN
        rule = f"turn the last position by at most {MOST_POSITIONS} quarter turns"
        raise InvalidProblem("cos_sin", "frequencies", f"{most} for {positions} positions", rule)
    at = np.arange(positions, dtype=np.float32)[:, None]
    angles = np.multiply(at, frequencies.astype(np.float32)[None]).astype(np.float64)
    turns = np.rint(angles * (2 / np.pi))
    r = (angles - turns * _HALF_PI) - turns * _HALF_PI_REST
    square = r * r
    cos, sin = _series(square, 0), _series(square, 1) * r
    quarter = turns.astype(np.int64) & 3
    odd = quarter & 1 == 1
    found = (np.where(odd, sin, cos), np.where(odd, cos, sin))
    signs = (np.where((quarter == 1) | (quarter == 2), -1.0, 1.0), np.where(quarter >= 2, -1.0, 1.0))
    parts = [(value * sign).astype(np.float32) for value, sign in zip(found, signs, strict=True)]
    return np.concatenate(parts, 1) * np.float32(scaling)


def _series(square: Array, first: int) -> Array:
    """Return the sum of (-square)^n / (2 n + first)! for n up to `_TERMS`."""
    value = np.zeros_like(square)
    for n in range(_TERMS, -1, -1):
        value = 1.0 - square * value / ((2 * n + first + 1) * (2 * n + first + 2))
    return value
