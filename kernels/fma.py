"""Fused multiply-add of f32: a b + c, rounded once, to nearest, ties to even. NumPy has none."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@np.errstate(all="ignore")  # infinities and NaN are valid here
def fma(a: Any, b: Any, c: Any) -> Array:
    """Return RN(a b + c) of f32 arrays that broadcast against each other, bit for bit as a processor's FMA gives it.

    Subnormal results, infinities and signs of zeros included; NaN payloads are not defined.
    """
    product = np.multiply(a, b, dtype=np.float64)  # exact: 48 bits, exponents from -298 to 256
    addend = np.asarray(c, np.float64)
    total = product + addend
    # TwoSum: what the addition lost, exactly.
    back = total - product
    lost = (product - (total - back)) + (addend - back)
    # Rounded to odd, the f64 sum keeps what a second rounding must know, because 53 >= 24 + 2 bits; the sum is 0 or
    # normal in f64, and a subnormal f32 has even fewer than 24 bits.
    bits = np.asarray(total).view(np.int64)
    even = np.isfinite(lost) & (lost != 0) & (bits & 1 == 0)
    outward = np.signbit(lost) == np.signbit(total)
    odd = bits + np.where(even, np.where(outward, 1, -1), 0)
    return np.asarray(odd.view(np.float64).astype(np.float32))
