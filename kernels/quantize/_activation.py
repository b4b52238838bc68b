"""GELU (erf form) and SiLU for NumPy, well within 2 ulp of f64 and correctly rounded but for rare ties in f32.

NumPy has no erf. The normal tail is written as Q(a) = exp(-a^2 / 2) R(a), where R, the Mills ratio over sqrt(2 pi), is
smooth and between 0 and 1/2. R satisfies R' = a R - 1 / sqrt(2 pi), so its Taylor coefficients at any point follow from
its value there; that value is carried backwards from a = 40, where a continued fraction gives it, in decimal
arithmetic. The table is built once, on first use (about 30 ms).
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
_SPLIT = 134217729.0  # 2^27 + 1 cuts an f64 into two halves whose products are exact


def gelu(x: Array) -> Array:
    """``x * Phi(x)``, Phi the normal distribution function, in the dtype of `x` (f32 or f64).

    The limits are taken at infinity: ``gelu(-inf)`` is -0.
    """
    wide = x.astype(np.float64)
    a = np.minimum(np.abs(wide), float(_LAST))
    head, tail = _mills(a)
    square, error = _square(a)
    decay = np.exp(-0.5 * square)
    # exp(-a^2/2) = decay * (1 - error/2): the rounding error of a^2 goes into the small part of the other factor.
    left = _times(a, head, tail, error)
    right = head + (tail - 0.5 * error * head)
    value = np.where(wide < 0, -(decay * left), wide * (1.0 - decay * right))
    return np.asarray(value.astype(x.dtype))


def silu(x: Array) -> Array:
    """``x / (1 + exp(-x))`` in the dtype of `x` (f32 or f64); ``silu(-inf)`` is -0."""
    wide = np.maximum(x.astype(np.float64), -2000.0)
    half = np.exp(0.5 * np.minimum(wide, 0.0))
    # Below -700 exp(-x) overflows, and x exp(x), halved, does not.
    value = np.where(wide > -700.0, wide / (1.0 + np.exp(-np.maximum(wide, -700.0))), wide * half * half)
    return np.asarray(value.astype(x.dtype))


def _mills(a: Array) -> tuple[Array, Array]:
    """R(a) as an unevaluated sum of a large and a small part."""
    high, low, rest = _table()
    node = np.rint(np.nan_to_num(a) * _PER_UNIT).astype(np.intp)
    h = a - node / _PER_UNIT
    slope = rest[-1][node]
    for coefficient in rest[-2::-1]:
        slope = slope * h + coefficient[node]
    return high[node], low[node] + slope * h


def _square(a: Array) -> tuple[Array, Array]:
    """a^2 rounded, and its rounding error exactly (Dekker)."""
    square = a * a
    big = a * _SPLIT
    upper = big - (big - a)
    lower = a - upper
    return square, ((upper * upper - square) + 2.0 * upper * lower) + lower * lower


def _times(a: Array, head: Array, tail: Array, error: Array) -> Array:
    """Multiply ``a * (head + tail) * (1 - error / 2)`` with a single rounding of note."""
    product = a * head
    big_a, big_h = a * _SPLIT, head * _SPLIT
    a1, h1 = big_a - (big_a - a), big_h - (big_h - head)
    a2, h2 = a - a1, head - h1
    lost = ((a1 * h1 - product) + a1 * h2 + a2 * h1) + a2 * h2
    return np.asarray(product + (lost + a * tail - 0.5 * error * product))


@cache
def _table() -> tuple[Array, Array, tuple[Array, ...]]:
    """Value of R at every node in two parts, and its further Taylor coefficients."""
    nodes = _LAST * _PER_UNIT + 1
    coefficients = np.empty((_TERMS, nodes))
    low = np.empty(nodes)
    with localcontext() as context:
        context.prec = 50
        density = 1 / (2 * _pi()).sqrt()
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
    """Taylor coefficients of R at `a`: (n + 1) c[n+1] = a c[n] + c[n-1], less the density for n = 0."""
    series = [value, a * value - density]
    for n in range(1, terms):
        series.append((a * series[n] + series[n - 1]) / (n + 1))
    return series


def _pi() -> Decimal:
    """Machin's formula to the precision of the context."""

    def arctangent_of_inverse(n: int) -> Decimal:
        power, total, k = Decimal(1) / n, Decimal(0), 0
        while abs(power) > Decimal(10) ** -60:
            total += power / (2 * k + 1) * (-1) ** k
            power /= n * n
            k += 1
        return total

    return 4 * (4 * arctangent_of_inverse(5) - arctangent_of_inverse(239))
