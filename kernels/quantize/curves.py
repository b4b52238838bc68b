"""SiLU and GELU as algorithms in f64: results of gated ops and linear layers follow bit for bit on every processor.

Each is a fixed sequence of additions, subtractions, multiplications, divisions, comparisons and integer operations on
bits. Every operation rounds to nearest in f64; none is a fused multiply-add. ``kernels/include/curves.cuh`` is the same
sequence. With exp(-v) = 2^k p, where p is a polynomial of degree 10 in r = -v - k ln 2:

- silu(x) = x / (1 + exp(-x)),
- gelu(x) = x Phi(x), where Phi(-a) = exp(-a^2 / 2) R(a) and R is a quotient of polynomials of degrees 9 and 10,
- gelu_tanh(x) = x / (1 + exp(-w)), w = x (c1 + c2 x^2), c1 = 2 sqrt(2 / pi), c2 = 0.044715 c1.

For negative x the quotient is multiplied by exp(-v) last: results keep their relative precision until they are
subnormal. An exponent v is the sum of two parts; the first has few bits, so v - k ln 2 is exact. The relative error is
at most 2^-49, or 2 units in the last place where the result is subnormal. At -inf the curves take their limit, -0. NaN
stays NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_NO_FRACTION = 6755399441055744.0  # 1.5 * 2^52: a sum with it has no fractional bits
_LOG2_E = 1.4426950408889634
_LN2, _LN2_REST = 0.6931471805598903, 5.497923018708371e-14  # a multiple of 2^-42, and the rest
_EXP = (
    *(2.7626371065696354e-07, 2.764019739169484e-06, 2.480150431378554e-05, 0.00019841170230570286),
    *(0.001388888893251478, 0.008333333385699212, 0.041666666666573066, 0.16666666666554314, 0.5000000000000006),
    *(1.0000000000000067, 1.0),
)
_OVER = (
    *(1.3580493278816947e-06, 3.667278381839473e-05, 0.0004843447484807866, 0.004049194030866959),
    *(0.023441129036010148, 0.0971280896336162, 0.2881054757227894, 0.5923902077305884, 0.7737776671426358, 0.5),
)
_UNDER = (
    *(3.4041248436214284e-06, 9.192503682660168e-05, 0.0012174763662462628, 0.010241749273141773),
    *(0.05996546124313123, 0.25342997821190955, 0.7785376705230116, 1.7089816573166399, 2.556170696043242),
    *(2.3454398950881328, 1.0),
)
_C1, _C1_HEAD, _C1_REST = 1.5957691216057308, 1.5957691215444356, 6.129509145186187e-11  # a multiple of 2^-32
_C2, _C2_HEAD, _C2_REST = 0.07135481627260025, 0.07135480642318726, 9.849412992916964e-09  # a multiple of 2^-24


@np.errstate(all="ignore")  # infinities, NaN and subnormals are valid here
def silu(x: Array) -> Array:
    """``x / (1 + exp(-x))`` for f64 `x`."""
    a = _clamped_abs(x, 800.0)
    return _times_logistic(x, a, *_exponential(a, 0.0))


@np.errstate(all="ignore")
def gelu(x: Array) -> Array:
    """``x * Phi(x)`` for f64 `x`, Phi the normal distribution function."""
    a = _clamped_abs(x, 40.0)
    head = _rounded_to_multiple(a, 2.0**-18)  # its square is exact
    p, k = _exponential(head * head * 0.5, -((a + head) * (a - head) * 0.5))
    tail = _ldexp_rn(a * (_polynomial(_OVER, a) / _polynomial(_UNDER, a) * p), k)
    return np.asarray(np.where(x < 0, -tail, x - tail))


@np.errstate(all="ignore")
def gelu_tanh(x: Array) -> Array:
    """``x / (1 + exp(-w))`` for f64 `x`, where w = 2 sqrt(2 / pi) (x + 0.044715 x^3)."""
    a = _clamped_abs(x, 22.0)
    head = _rounded_to_multiple(a, 2.0**-6)  # its cube is exact
    rest, square = a - head, head * head
    cube = square * head
    exact = _C1_HEAD * head + _C2_HEAD * cube
    slope = _C1 + _C2 * (3.0 * square + rest * (3.0 * head + rest))
    lost = (_C1_REST * head + _C2_REST * cube) + rest * slope
    return _times_logistic(x, a, *_exponential(exact, -lost))


def _clamped_abs(x: Array, most: float) -> Array:
    """Return |x|, at most `most`: beyond it the curves do not change. Return `most` for NaN."""
    a = np.abs(x)
    return np.asarray(np.where(a < most, a, most))


def _rounded_to_multiple(a: Array, unit: float) -> Array:
    """Round to a multiple of `unit`, a power of two, by adding and subtracting 1.5 * 2^52 units."""
    return np.asarray((a + _NO_FRACTION * unit) - _NO_FRACTION * unit)


def _exponential(v: Array, rest: Any) -> tuple[Array, Array]:
    """Return p and k with exp(-v + rest) = 2^k p, for v - rest between 0 and 830."""
    k = _rounded_to_multiple((v - rest) * -_LOG2_E, 1.0)
    r = (-v - k * _LN2) + (rest - k * _LN2_REST)
    return _polynomial(_EXP, r), k


def _polynomial(coefficients: tuple[float, ...], x: Array) -> Array:
    value: Any = coefficients[0]
    for coefficient in coefficients[1:]:
        value = value * x + coefficient
    return np.asarray(value)


def _ldexp_rn(value: Array, k: Array) -> Array:
    """Return ``value * 2^k`` with one rounding, also where it is subnormal; for k between -1200 and 0."""
    power = k.astype(np.int64)
    half = power >> 1
    return np.asarray(value * _power(half) * _power(power - half))


def _power(k: Array) -> Array:
    return ((k + 1023) << 52).view(np.float64)


def _times_logistic(x: Array, a: Array, p: Array, k: Array) -> Array:
    """Return ``x / (1 + exp(-v))``, where v has the sign of x and exp(-|v|) = 2^k p."""
    quotient = np.where(x < 0, a * p, x) / (1.0 + _ldexp_rn(p, k))
    return np.asarray(np.where(x < 0, -_ldexp_rn(quotient, k), quotient))
