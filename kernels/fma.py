"""Fused multiply-add of f32: a b + c, rounded once, to nearest, ties to even. NumPy has none."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
_NORMAL = 2.0**-126
"""The least normal f32."""


@np.errstate(all="ignore")  # infinities and NaN are valid here
def fma(a: Any, b: Any, c: Any) -> Array:
    """Return RN(a b + c) of f32 arrays that broadcast against each other, bit for bit as a processor's FMA gives it.

    Subnormal results, infinities and signs of zeros included; NaN payloads are not defined.
    """
    product = np.multiply(a, b, dtype=np.float64)  # exact: 48 bits, exponents from -298 to 256
    total = np.asarray(product + c, np.float64)
    # A number between two f32 that are neighbours is rounded to the same one again, unless it lies in their middle.
    # There, a normal f32 has bit 28 below it. The sum is 0, which is exact, or normal in f64.
    doubtful = total.view(np.int64) & (2**29 - 1) == 2**28
    doubtful |= (np.abs(total) < _NORMAL) & (total != 0)
    if doubtful.any():
        product, addend = np.broadcast_arrays(product, np.asarray(c, np.float64))
        total[doubtful] = _to_odd(product[doubtful], addend[doubtful])
    return total.astype(np.float32)


def _to_odd(product: Array, addend: Array) -> Array:
    """Return sums of f64 that keep what a second rounding must know, because 53 >= 24 + 2 bits: rounded to odd."""
    total = product + addend
    # TwoSum: what the addition lost, exactly.
    back = total - product
    lost = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    even = np.isfinite(lost) & (lost != 0) & (bits & 1 == 0)
    outward = np.signbit(lost) == np.signbit(total)
    return np.asarray((bits + np.where(even, np.where(outward, 1, -1), 0)).view(np.float64))
