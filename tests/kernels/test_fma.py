"""FMA of f32 against exact rationals."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from oracle import to_format
from support import assert_same_bits, fresh

from skuda.kernels.fma import fma

NASTY = np.array(
    [0, 1, 1 + 2**-23, 1 - 2**-24, 2**-126, 2**-149, 3 * 2**-149, 2**-127, 2**-75, 2**-74, 2**12 + 1, 2.0**127, 3.4e38],
    np.float32,
)
NASTY = np.concatenate((NASTY, -NASTY))


def _near_a_tie(a, b, rng):
    """Addends with which the sum of a and b lies beside the middle of two f32, or has few bits left."""
    product = a.astype(np.float64) * b
    shift = rng.choice(np.array([2.0**e for e in (-30, -25, -24, -1, 0, 1, 23, 24, 25, 48, 60)]), a.shape)
    return np.clip(-product * shift * (1 + rng.integers(-2, 3, a.shape) * 2.0**-24), -3.4e38, 3.4e38).astype(np.float32)


def _numbers(kind, rng):
    if kind == "nasty":
        return np.stack(np.meshgrid(NASTY, NASTY, NASTY)).reshape(3, -1)
    bits = rng.integers(0, 2**32, (3, 20_000), dtype=np.uint32)
    if kind == "alike":
        bits = (bits & np.uint32(0x80FFFFFF)) | np.uint32(0x3F000000)
    numbers = bits.view(np.float32)
    numbers = np.where(np.isfinite(numbers), numbers, np.float32(1))
    if kind in {"tie", "subnormal"}:
        numbers[0] = np.ldexp(np.frexp(numbers[0])[0], -100 if kind == "subnormal" else 3)
        numbers[1] = np.ldexp(np.frexp(numbers[1])[0], rng.integers(-52, -20, 20_000) if kind == "subnormal" else 0)
        numbers[2] = _near_a_tie(numbers[0], numbers[1], rng)
    return numbers


@pytest.mark.parametrize("kind", ["any", "alike", "tie", "subnormal", "nasty"])
def test_a_product_and_a_sum_are_rounded_once(kind):
    a, b, c = _numbers(kind, fresh("fma", kind))
    exact = [
        Fraction(x) * Fraction(y) + Fraction(z) for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    ]
    want = np.array([to_format(each, "f32") for each in exact], np.float32)
    got = fma(a, b, c)
    assert_same_bits(got[want != 0], want[want != 0], kind)
    assert (got[want == 0] == 0).all()


@pytest.mark.parametrize(
    ("a", "b", "c", "want"),
    [
        (np.inf, 0, 1, np.nan),
        (np.inf, 1, -np.inf, np.nan),
        (np.inf, -1, 3e38, -np.inf),
        (3e38, 3e38, -3e38, np.inf),
        (np.nan, 0, 0, np.nan),
        (0, -1, 0.0, 0.0),
        (0, -1, -0.0, -0.0),
        (1, 1, -1, 0.0),
        (-(2.0**-100), 2.0**-100, -0.0, -0.0),
        # Beside the middle of two subnormal numbers, by less than f64 holds: the sum is rounded to the odd one.
        (2.0**-75 * (1 + 2**-23), 2.0**-75 * (1 - 2**-23), 2.0**-127 + 2.0**-149, 2.0**-127 + 2.0**-149),
    ],
)
def test_subnormals_infinities_nan_and_signs_of_zeros_are_those_of_the_standard(a, b, c, want):
    assert_same_bits(fma(*np.array([a, b, c], np.float32)), np.array(want, np.float32), "fma")
