"""GELU (erf form) and SiLU for NumPy, within 2 ulp in f64 and correctly rounded except for rare ties in f32.

NumPy has no erf. The normal tail is written as Q(a) = exp(-a^2 / 2) R(a), where R, the Mills ratio over sqrt(2 pi), is
smooth and between 0 and 1/2. R satisfies R' = a R - 1 / sqrt(2 pi), so its value at a point gives its Taylor
coefficients there. A continued fraction gives the value at a = 40; decimal arithmetic carries it backwards from node to
node. The table is built once, on first use (about 30 ms).
"""

from __future__ import annotations

from decimal import Decimal, localcontext
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_PER_UNIT = 16  # nodes per unit of a: |h| <= 1/32, where 10 terms leave less than 2^-55 of R
_LAST = 40  # Q(40) underflows f64
_TERMS = 10
_RAISED, _RAISED_REST = 88.72283911163686, 3.614117192068042e-11  # 128 ln 2 in two parts: sums with the first are exact
_PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
_SPLIT = 134217729.0  # 2^27 + 1 cuts an f64 into two halves whose products are exact


def gelu(x: Array) -> Array:
    """``x * Phi(x)``, Phi the normal distribution function, in the dtype of `x` (f32 or f64).

    The limits are taken at infinity: ``gelu(-inf)`` is -0.
    """
    wide = x.astype(np.float64)
    a = np.minimum(np.abs(wide), float(_LAST))
    head, tail = _mills(a)
    square, error = _two_product(a, a)
    # exp is scaled by 2^128 until the end where it would be subnormal.
    far = a > 36
    decay = np.exp(-0.5 * square + np.where(far, _RAISED, 0.0))
    # exp(-a^2/2) = decay * (1 - error/2): the rounding error of a^2 goes into the small part of the other factor.
    small = tail - (0.5 * error - np.where(far, _RAISED_REST, 0.0)) * (head + tail)
    left, left_rest = _two_product(a, head)
    below, below_rest = _two_product(decay, left)
    negative = np.ldexp(below + (below_rest + decay * (left_rest + a * small)), np.where(far, -128, 0))
    beyond, beyond_rest = _two_product(decay, head)
    share = 1.0 - beyond
    share_rest = ((1.0 - share) - beyond) - (beyond_rest + decay * small)
    whole, whole_rest = _two_product(a, share)
    positive = whole + (whole_rest + a * share_rest)
    # For a >= 9, Q(a) is less than a quarter of an ulp.
    value = np.where(wide < 0, -negative, np.where(wide > 9, wide, np.copysign(positive, wide)))
    return np.asarray(value.astype(x.dtype))


def silu(x: Array) -> Array:
    """``x / (1 + exp(-x))`` in the dtype of `x` (f32 or f64); ``silu(-inf)`` is -0."""
    wide = np.maximum(x.astype(np.float64), -2000.0)
    grown = np.exp(-np.maximum(wide, -700.0))
    below = 1.0 + grown
    lost = np.where(grown > 1, 1.0 - (below - grown), grown - (below - 1.0))
    quotient = wide / below
    near = quotient - np.minimum(wide, 45.0) / below * (lost / below)
    # Below -700, exp(-x) overflows but x exp(x) does not. A factor of 2^128 keeps it normal: it is rounded only once.
    raised = wide * np.exp(np.minimum(wide, -700.0) + _RAISED)
    far = np.ldexp(raised + raised * _RAISED_REST, -128)
    value = np.copysign(np.where(wide > -700.0, near, far), wide)
    return np.asarray(value.astype(x.dtype))


def _mills(a: Array) -> tuple[Array, Array]:
    """Return R(a) as an unevaluated sum of a large and a small part."""
    high, low, rest = _table()
    node = np.rint(np.nan_to_num(a) * _PER_UNIT).astype(np.intp)
    h = a - node / _PER_UNIT
    slope = rest[-1][node]
    for coefficient in rest[-2::-1]:
        slope = slope * h + coefficient[node]
    return high[node], low[node] + slope * h


def _two_product(a: Array, b: Array) -> tuple[Array, Array]:
    """Return a * b rounded, and its rounding error exactly (Dekker)."""
    product = a * b
    big_a, big_b = a * _SPLIT, b * _SPLIT
    a1, b1 = big_a - (big_a - a), big_b - (big_b - b)
    a2, b2 = a - a1, b - b1
    return product, ((a1 * b1 - product) + a1 * b2 + a2 * b1) + a2 * b2


@cache
def _table() -> tuple[Array, Array, tuple[Array, ...]]:
    """Return R at every node in two parts, and its higher Taylor coefficients."""
    nodes = _LAST * _PER_UNIT + 1
    coefficients = np.empty((_TERMS, nodes))
    low = np.empty(nodes)
    with localcontext() as context:
        context.prec = 50
        density = 1 / (2 * _PI).sqrt()
        step = Decimal(1) / _PER_UNIT
        fraction = Decimal(_LAST)
        for term in range(200, 0, -1):
            fraction = _LAST + term / fraction
        value = density / fraction
        for node in range(nodes - 1, -1, -1):
            series = _taylor(Decimal(node) / _PER_UNIT, value, density, 32)
            coefficients[:, node] = [float(c) for c in series[:_TERMS]]
            low[node] = float(value - Decimal(float(value)))
            value = sum(c * (-step) ** n for n, c in enumerate(series))  # type: ignore[assignment]  # sum starts at 0
    return coefficients[0], low, tuple(coefficients[1:])


def _taylor(a: Decimal, value: Decimal, density: Decimal, terms: int) -> list[Decimal]:
    """Return the Taylor coefficients of R at `a`: (n + 1) c[n+1] = a c[n] + c[n-1], less the density for n = 0."""
    series = [value, a * value - density]
    for n in range(1, terms):
        series.append((a * series[n] + series[n - 1]) / (n + 1))
    return series
