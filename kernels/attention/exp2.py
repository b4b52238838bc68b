"""The power of two that attention is defined by: a fixed polynomial, the same bits on every device."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from skuda.kernels.fma import fma

Array = npt.NDArray[Any]
COEFFICIENTS = tuple(
    np.float32(float.fromhex(text)) for text in ("0x1.3a02b6p-7", "0x1.c9fc74p-5", "0x1.ec0378p-3", "0x1.62e12cp-1")
)
"""Of f^4 to f^1; that of f^0 is 1. No other such polynomial has a smaller largest relative error on [-0.5, 0.5]."""
LEAST = np.float32(-125)
"""Below this, the power is that of this: normal, and nothing beside 1."""
_MAGIC = np.float32(1.5 * 2**23)


def power_of_two(t: Array) -> Array:
    """Return E(t), about 2^t, of f32 numbers t <= 0; its relative error is at most 2.88e-6, and E(t) <= E(0) = 1.

    With u = max(t, -125), r = rne(u) and f = u - r, which is exact: the polynomial in f by Horner's rule, every step
    one FMA, times 2^r. The product with f is not positive where r is 0, and 2^r is at most 0.5 elsewhere: E(t) <= 1.
    """
    t = np.maximum(t, LEAST)
    r = (t + _MAGIC) - _MAGIC
    f = t - r
    value = np.full_like(f, COEFFICIENTS[0])
    for coefficient in (*COEFFICIENTS[1:], np.float32(1)):
        value = fma(f, value, coefficient)
    return np.asarray((value.view(np.int32) + (r.astype(np.int32) << 23)).view(np.float32))
