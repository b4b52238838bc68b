"""The curves of the gated ops: how close they are to the true ones, and that CUDA's are NumPy's bit for bit."""

from __future__ import annotations

import itertools
import math
import shutil

import mpmath
import numpy as np
import pytest
from harness import emulator
from paths import ROOT
from support import assert_same_bits, fresh

from skuda.dispatch.compile.sources import read_source
from skuda.kernels.dtypes import rounded_to, storage_dtype
from skuda.kernels.quantize import curves
from skuda.registry.elements import ElementKind

CURVES = ("silu", "gelu", "gelu_tanh")
compiled = pytest.mark.skipif(shutil.which(emulator.COMPILER) is None, reason="no C++ compiler")


def _true(curve, value):
    x = mpmath.mpf(value)
    if curve == "gelu":
        return x * mpmath.erfc(-x / mpmath.sqrt(2)) / 2
    w = 2 * mpmath.sqrt(2 / mpmath.pi) * (x + mpmath.mpf("0.044715") * x**3) if curve == "gelu_tanh" else x
    return x / (1 + mpmath.exp(-w))


def _drawn(rng):
    """Draw f64 numbers where the curves bend, end, vanish or are nothing but their argument; a multiple of 32."""
    drawn = (
        *(rng.uniform(low, 45, 400) for low in (-745, -38, -21, -3)),
        rng.normal(size=400),
        *(edge + rng.normal(size=60) for edge in (-745, -708.4, -38.4, -37.5, -21.4, -21, 9, 45)),
        np.exp(rng.uniform(-745, 0, 300)) * rng.choice([-1, 1], 300),
        [0.0, -0.0, 5e-324, -5e-324, 1e308, -1e308, math.inf, -math.inf, math.nan, -800.0, -40.0, -22.0],
    )
    x = np.concatenate([np.asarray(part, np.float64) for part in drawn])
    return np.resize(x, -(-x.size // 32) * 32)


@pytest.mark.parametrize("curve", CURVES)
def test_a_curve_is_as_close_to_the_true_one_as_promised(curve):
    x = _drawn(fresh(curve))
    found = getattr(curves, curve)(x)
    with mpmath.workprec(200):
        for value, got in zip(x.tolist(), found.tolist(), strict=True):
            if abs(value) < 3000:
                true = _true(curve, value)
                slack = max(abs(true) * mpmath.mpf(2) ** -49, 2 * mpmath.mpf(2) ** -1074)
                assert abs(got - true) <= slack, (curve, value, got)
    assert_same_bits(
        getattr(curves, curve)(np.array([np.inf, -np.inf, 0.0, -0.0, np.nan])),
        np.array([np.inf, -0.0, 0.0, -0.0, np.nan]),
    )


@pytest.mark.parametrize("curve", CURVES)
def test_the_curves_in_the_documentation_give_the_same_bits(curve):
    page = (ROOT / "docs/gated.md").read_text().partition("### The curves\n")[2]
    written: dict = {}
    exec(page.partition("```python\n")[2].partition("```")[0], written)  # noqa: S102  it is our own page
    x = _drawn(fresh("page", curve))
    assert_same_bits(np.array([written[curve](value) for value in x.tolist()]), getattr(curves, curve)(x), curve)


@pytest.mark.parametrize("element", [ElementKind.F16, ElementKind.BF16])
@pytest.mark.parametrize("curve", CURVES)
def test_every_16_bit_argument_gives_the_correctly_rounded_value(curve, element):
    """The value is far enough from every tie, but for odd multiples of the least bf16 number, which are next to one."""
    dtype = storage_dtype(element)
    x = _every(dtype)
    exact = getattr(curves, curve)(x)
    found = rounded_to(exact, dtype).astype(np.float64)
    # Both neighbours of the middle between `found` and the next number on the side of the exact value.
    bits = rounded_to(exact, dtype).view(np.int16)
    checked = 0
    with mpmath.workprec(120):
        for value, near, own, code in zip(x.tolist(), found.tolist(), exact.tolist(), bits.tolist(), strict=True):
            if not math.isfinite(value) or abs(value) > 3000 or own == near:
                continue
            other = np.array([code + (1 if abs(own) > abs(near) else -1)], np.int16).view(dtype).astype(np.float64)[0]
            if not math.isfinite(other):
                continue
            middle = (mpmath.mpf(near) + mpmath.mpf(float(other))) / 2
            if abs(mpmath.mpf(own) - middle) > abs(middle) * mpmath.mpf(2) ** -40:
                continue  # E is within 2^-49 of the curve: both are on one side
            checked += 1
            assert abs(_true(curve, value) - near) <= abs(_true(curve, value) - other) or abs(value) < 2.0**-125, value
    assert element is ElementKind.BF16 or checked < 4096


def _every(dtype):
    """Return all numbers of a 16-bit format as f64."""
    with np.errstate(invalid="ignore"):  # a signalling NaN warns
        return np.arange(1 << 16, dtype=np.uint16).view(dtype).astype(np.float64)


SOURCE = """
#include "curves.cuh"
typedef SKUDA_DATA Data;
extern "C" __global__ void exactly(const double* in, double* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = curve_f64<SKUDA_CURVE>(in[i]);
}
extern "C" __global__ void singly(const Data* in, Data* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = curve_of<SKUDA_CURVE>(in[i]);
}
extern "C" __global__ void by_chunks(const uint4* gate, const uint4* up, uint4* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = Gate<SKUDA_CURVE, Data>::chunk(gate[i], up[i]);
}
extern "C" __global__ void about(const Data* in, float* low, float* high) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const Bounds found = curve_bounds<SKUDA_CURVE>(widen(in[i]));
  low[i] = found.low, high[i] = found.high;
}"""


def _library(curve, element, change=None, errors=None):
    """Compile the entries above; `errors` are those of 2^t and 1 / d in units of the largest, else their signs mix."""
    source = read_source("skuda.kernels.quantize:gated.cu")
    headers = tuple((name, text.decode()) for name, text in source.headers)
    defines = (f"-DSKUDA_DATA={element}", f"-DSKUDA_CURVE={curve.upper()}")
    if errors is not None:
        defines += (f"-DSKUDA_POWER_ERROR(t)={errors[0]}", f"-DSKUDA_RECIPROCAL_ERROR(d)={errors[1]}")
    unit = emulator.Unit("curves.cu", SOURCE, headers, source.foreign, defines)
    return emulator.load(unit.with_change(*change) if change else unit)


def _launch(library, entry, *arrays, count):
    library.launch(entry, (count // 32, 1, 1), (32, 1, 1), 0, [("p", array.ctypes.data) for array in arrays])


@compiled
@pytest.mark.parametrize("curve", CURVES)
def test_the_f64_algorithm_in_cuda_is_numpy_s_bit_for_bit(curve):
    x = _drawn(fresh(curve))
    got = np.empty_like(x)
    _launch(_library(curve, "f64"), "exactly", x, got, count=x.size)
    assert_same_bits(got, getattr(curves, curve)(x), curve)


def _ups(dtype, rng):
    """Return as many factors as there are 16-bit numbers: plain ones, and ones whose products overflow or vanish."""
    ups = rng.choice([1.0, 1.5, -1.25, 3.0, 0.0, -0.0], 1 << 16)
    with np.errstate(invalid="ignore"):
        anything = rng.permutation(np.arange(1 << 16, dtype=np.uint16)).view(dtype).astype(np.float64)
    return np.where(rng.random(1 << 16) < 0.5, ups, anything).astype(dtype)


@compiled
@pytest.mark.parametrize("element", [ElementKind.F16, ElementKind.BF16])
@pytest.mark.parametrize("curve", CURVES)
def test_every_16_bit_argument_gives_the_same_bits_on_the_fast_path(curve, element):
    """The approximations of the harness err as much as those of a GPU may, so that equal bits are no luck of theirs."""
    dtype, library = storage_dtype(element), _library(curve, element)
    gate = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    wide = _every(dtype)
    want = rounded_to(getattr(curves, curve)(wide), dtype)
    got = np.empty_like(gate)
    _launch(library, "singly", gate, got, count=1 << 16)
    assert_same_bits(got, want, "by E")
    low, high = np.empty((2, 1 << 16), np.float32)
    _launch(library, "about", gate, low, high, count=1 << 16)
    with np.errstate(all="ignore"):
        exact = getattr(curves, curve)(wide)
        finite = np.isfinite(wide) & np.isfinite(high)
        ordered = np.sort(np.array([low, high]), axis=0)[:, finite].astype(np.float64)
        assert ((ordered[0] <= exact[finite]) & (exact[finite] <= ordered[1])).all(), "a bound does not hold"
        for up in (np.ones(1 << 16, dtype), _ups(dtype, fresh(curve, element))):
            _launch(library, "by_chunks", gate, up, got, count=(1 << 16) // 8)
            product = (want.astype(np.float32) * up.astype(np.float32)).astype(dtype)
            # A huge gate may give a NaN here, which sends its row to E.
            kept = (np.abs(wide) < 1e10) | np.isnan(product.astype(np.float64))
            assert_same_bits(got[kept], product[kept], "by chunks")
            assert (np.isnan(got[~kept].astype(np.float64)) | (got[~kept] == product[~kept])).all()


ENDS = tuple(itertools.product((2, -2), repeat=2))
"""Errors of 2^t and of 1 / d in units of what PTX allows: twice that, so that there is room."""


@compiled
@pytest.mark.parametrize("curve", CURVES)
def test_no_bf16_argument_depends_on_the_errors_of_a_gpu(curve):
    """What a kernel computes grows, or falls, with each of its two approximations: so the corners show all between."""
    dtype = storage_dtype(ElementKind.BF16)
    wide = _every(dtype)
    gate = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    usual = (np.abs(wide) >= 2.0**-100) & (np.abs(wide) < 1e10) & (wide >= -10)
    # Chunks hold one argument each, so that those of the fast path take it.
    chunks = np.repeat(gate[usual], 8)
    chunks = np.resize(chunks, -(-chunks.size // 256) * 256)
    want = rounded_to(getattr(curves, curve)(chunks.astype(np.float64)), dtype)
    for errors in ENDS:
        # A chunk that leaves the fast path gives zeros.
        changed = ("return bounded_chunk<CURVE, bf16>(gate);", "return make_uint4(0, 0, 0, 0);")
        got = np.empty_like(chunks)
        library = _library(curve, "bf16", changed, errors)
        _launch(library, "by_chunks", chunks, np.ones_like(chunks), got, count=chunks.size // 8)
        assert_same_bits(got, want, str(errors))


@compiled
def test_few_f16_arguments_of_usual_size_need_the_f64_algorithm():
    """Few of those from 2^-7 to 8, as the speed of the kernels relies on."""
    dtype = storage_dtype(ElementKind.F16)
    wide = _every(dtype)
    gate = np.resize(wide[(np.abs(wide) >= 2.0**-7) & (np.abs(wide) <= 8)], 1 << 16).astype(dtype)
    for curve in CURVES:
        low, high = np.empty((2, 1 << 16), np.float32)
        _launch(_library(curve, "f16"), "about", gate, low, high, count=1 << 16)
        assert (low.astype(dtype) != high.astype(dtype)).mean() < 8e-3, curve
