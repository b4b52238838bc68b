"""Integer weights of logits: what log-probabilities and samples are made of. ``weights.cuh`` has the same arithmetic.

A row of logits x is widened to f32. z = RN(x / temperature), or x without one, and m is the largest z. With d = RN(z -
m) and c = max(d, -33), E = 2^40 exp(c) is a fixed sequence in f32, of which every step rounds once:

- k = rne(RN(c L)); f = fma(c, L, -k); f = fma(c, L', f), where L + L' is log2(e) in two parts,
- P is the polynomial of degree 5 in f by Horner's rule, every step one FMA, and 1 at f = 0,
- E = P 2^(k + 40), exact.

The weight of a token is w = rne(E), an s64, and S is the sum of the weights of a row. A sum of integers is exact, so it
has the same bits in any order, and for any division of the vocabulary among threads, blocks or ranks. The same holds
for the maximum. S lies between 2^40 and 2^62, because a row has at most 2^22 tokens. At c = -33 the weight is 0, so a
logit of minus infinity adds nothing.

E differs from 2^40 exp(d) by at most 1.73e-7 of it, for every f32 d in [-33, 0]; an exact exponential, rounded to f32,
by 0.6e-7. E is 2^40 at d = 0 and never larger. It is not monotonic: a smaller d may have an E that is larger in the
last bit. So everything that orders tokens orders them by z.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from skuda.kernels.blocks import BLOCK
from skuda.kernels.fma import fma
from skuda.registry.constraints import OneOf
from skuda.registry.descriptor import Descriptor
from skuda.registry.elements import ElementKind
from skuda.registry.value import Extent, Integer

Array = npt.NDArray[Any]
ELEMENTS = (ElementKind.F32, ElementKind.F16, ElementKind.BF16)
TOKENS = (ElementKind.S64, ElementKind.S32)
"""Elements of token ids."""
CONSTRAINTS = (OneOf(field="token_element", allowed=TOKENS),)
"""Of every kernel."""
MOST_TOKENS = 2**22
"""The largest vocabulary: the sum of so many weights fits in an s64."""
PART = 4096
"""Tokens of a row that one block of a kernel takes."""

_LEAST = np.float32(-33)
_LOG2_E, _LOG2_E_REST = (np.float32(float.fromhex(text)) for text in ("0x1.715476p+0", "0x1.4ae0c0p-26"))
COEFFICIENTS = tuple(
    np.float32(float.fromhex(text))
    for text in ("0x1.5bda40p-10", "0x1.3ce8acp-7", "0x1.c6b6d8p-5", "0x1.ebf9c2p-3", "0x1.62e42ap-1")
)
"""Of f^5 to f^1. The largest relative error of P is 9.32e-8; with coefficients that are not rounded it is 9.15e-8."""

_SQRT_HALF = 0x3FE6A09E667F3BCD
"""Bits of sqrt(1/2) in f64."""
_LN2, _LN2_REST = 0.6931471805598903, 5.497923018708371e-14  # a multiple of 2^-42, and the rest
_ODD = tuple(1 / n for n in range(21, 2, -2))


class LogitsProblem(Descriptor):
    """Problem of an op on rows of logits.

    Attributes
    ----------
    n, v : int
        Rows, and tokens of the vocabulary; `v` is at most 2^22.
    input_element : ElementKind
        Element of the logits: f16, bf16 or f32.
    token_element : ElementKind
        Element of token ids: s64, as torch has them, or s32.
    """

    n: Extent
    v: Annotated[Integer, Field(ge=0, le=MOST_TOKENS)]
    input_element: ElementKind
    token_element: ElementKind = ElementKind.S64

    @model_validator(mode="after")
    def _rules_of_logits(self) -> Self:
        if self.n * self.parts >= 2**31:
            self.refuse("n", self.n, f"be less than {-(-(2**31) // self.parts)} for rows of {self.v} tokens")
        return self

    @property
    def parts(self) -> int:
        """Parts of a row."""
        return -(-self.v // PART)

    def blocks(self) -> tuple[slice, ...]:
        """Return slices of rows that are small enough to be computed at once."""
        step = max(1, BLOCK // max(self.v, 1))
        return tuple(slice(start, start + step) for start in range(0, self.n, step))


@np.errstate(all="ignore")  # infinities and NaN are valid here
def scaled(logits: Array, temperature: Array | None) -> Array:
    """Return z of some rows of logits, f32; minus zero becomes plus zero."""
    z: Array = logits.astype(np.float32)
    if temperature is not None:
        z /= temperature[:, None]
    z += np.float32(0)
    return z


@np.errstate(all="ignore")
def largest(z: Array) -> tuple[Array, Array]:
    """Return m of every row, and whether the row has a distribution: m is finite, and no z is NaN.

    m is 0 where there is none.
    """
    m = np.maximum.reduce(z, axis=1, initial=-np.inf)
    has = np.isfinite(m)
    return np.where(has, m, np.float32(0)), has


@np.errstate(all="ignore")
def differences(z: Array, m: Array) -> Array:
    """Return c of rows whose largest z is m; any number within [-33, 0] for rows without a distribution."""
    return np.asarray(np.fmin(np.fmax(z - m[:, None], _LEAST), np.float32(0)))


def powers(c: Array) -> Array:
    """Return E of numbers in [-33, 0], f32."""
    k = np.rint(c * _LOG2_E)
    f = fma(c, _LOG2_E_REST, fma(c, _LOG2_E, -k))
    value: Array = np.full_like(f, COEFFICIENTS[0])
    for coefficient in (*COEFFICIENTS[1:], np.float32(1)):
        value = fma(f, value, coefficient)
    return np.asarray(np.ldexp(value, k.astype(np.int32) + 40))


def integers(values: Array) -> Array:
    """Return rne of f32 numbers as s64."""
    return np.rint(values).astype(np.int64)


def logarithm(total: Array) -> Array:
    """Return ln(S / 2^40) of sums S from 2^40 to 2^62, f64, within 2^-51 of it.

    A fixed sequence in f64; no step is an FMA. y = f64(S) 2^-40 is 2^k g with g in [sqrt(1/2), sqrt(2)). With
    s = (g - 1) / (g + 1) and q = s^2, ln(g) = 2 s (1 + q / 3 + q^2 / 5 + ... + q^10 / 21).
    """
    bits = total.astype(np.float64).view(np.int64) - (40 << 52)
    k = (bits - _SQRT_HALF) >> 52
    g = (bits - (k << 52)).view(np.float64)
    s = (g - 1.0) / (g + 1.0)
    q, two = s * s, s + s
    series: Any = _ODD[0]
    for each in _ODD[1:]:
        series = series * q + each
    exponent = k.astype(np.float64)
    return np.asarray(exponent * _LN2 + (two + (two * q * series + exponent * _LN2_REST)))
