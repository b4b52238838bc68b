"""The power of two that attention is defined by: a fixed polynomial, the same bits on every device."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from skuda.kernels.fma import fma

Array = npt.NDArray[Any]
ONE = np.float32(512)
"""E(512) = 1. Below 512, f32 numbers have 15 bits after the point, and the exponent of E is in the bits above these."""
LEAST = np.float32(ONE - 127)
"""From here down, the power is 0."""
COEFFICIENTS = tuple(np.float32(float.fromhex(text)) for text in ("0x1.3baa40p-4", "0x1.d237c2p-3", "0x1.63e656p-1"))
"""Of f^3 to f^1; that of f^0 is 1. No other such polynomial has a smaller largest relative error on [0, 1)."""
_FRACTION = 2**15 - 1


def power_of_two(u: Array) -> Array:
    """Return E(u), about 2^(u - 512), of f32 numbers u <= 512; E(u) <= 1.

    With u at least 385, h = floor(u) and f = u - h, which is exact. P is the polynomial in f by Horner's rule, every
    step one FMA: 1 at f = 0, and below 2 elsewhere, where h is at most 511. E(u) is the number whose bits are those of
    P, with h - 512 added to its exponent: P 2^(h - 512) from 386 on, with a relative error of at most 8.57e-5, and
    (P - 1) 2^-126 below. So the power of a key that is not seen, whose u is minus infinity, is 0.

    The degree is enough: an exact exponential changes the error of attention in its third digit.
    """
    bits = np.maximum(u, LEAST).view(np.int32)
    exponent = (bits >> 15) - (int(ONE.view(np.int32)) >> 15)  # h - 512: the step to 512 is one of the bits, too
    return np.asarray((_polynomial()[bits & _FRACTION] + (exponent << 23)).view(np.float32))


@cache
def _polynomial() -> Array:
    """Return the bits of P of every fraction that there is, s32 [32768]."""
    f = np.arange(_FRACTION + 1, dtype=np.float32) / np.float32(_FRACTION + 1)
    value: Array = np.full_like(f, COEFFICIENTS[0])
    for coefficient in (*COEFFICIENTS[1:], np.float32(1)):
        value = fma(f, value, coefficient)
    return value.view(np.int32)
