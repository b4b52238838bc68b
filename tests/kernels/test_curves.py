"""The curves: how close they are to the true ones, and that CUDA's are NumPy's bit for bit."""

from __future__ import annotations

import itertools
import math
import shutil

import mpmath
import numpy as np
import pytest
from harness import emulator
from paths import ROOT
from support import assert_same_bits, fresh, sampled

from skuda.kernels.dtypes import rounded_to, storage_dtype
from skuda.kernels.quantize import curves
from skuda.kernels.sources import read_source
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


@pytest.mark.parametrize("element", sampled([ElementKind.F16, ElementKind.BF16]))
@pytest.mark.parametrize("curve", sampled(CURVES))
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
    return _compiled(SOURCE, (f"-DSKUDA_DATA={element}", f"-DSKUDA_CURVE={curve.upper()}"), change, errors)


def _compiled(text, defines, change, errors):
    """Compile entries; `errors` are those of 2^t and 1 / d in units of the largest, else their signs mix."""
    source = read_source("skuda.kernels.quantize:gated.cu")
    headers = tuple((name, text.decode()) for name, text in source.headers)
    if errors is not None:
        defines += (f"-DSKUDA_POWER_ERROR(t)={errors[0]}", f"-DSKUDA_RECIPROCAL_ERROR(d)={errors[1]}")
    unit = emulator.Unit("curves.cu", text, headers, source.foreign, defines)
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


# --- f32 arguments, as of linear layers ------------------------------------------------------------------------------

LINEAR = ("gelu", "silu")
OUTPUTS = (ElementKind.F16, ElementKind.BF16, ElementKind.F32, ElementKind.S8)
LINEAR_SOURCE = """
#include "curves.cuh"
typedef SKUDA_OUT Out;
DEVICE void store(float v, f16& to) { narrow(v, to); }
DEVICE void store(float v, bf16& to) { narrow(v, to); }
DEVICE void store(float v, float& to) { to = v; }
extern "C" __global__ void applied(const float* in, SKUDA_STORED* out, float per_unit) {
  const int i = 8 * (blockIdx.x * blockDim.x + threadIdx.x);
  float v[8];
  for (int j = 0; j < 8; ++j) v[j] = in[i + j];
  apply_curve<SKUDA_CURVE, Out>(v, per_unit);
  for (int j = 0; j < 8; ++j) store(v[j], out[i + j]);
}
extern "C" __global__ void about(const float* in, float* low, float* high, double* fused) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const Bounds found = curve_bounds<SKUDA_CURVE, false>(in[i]);
  low[i] = found.low, high[i] = found.high, fused[i] = curve_fused<SKUDA_CURVE>(in[i]);
}"""


def _linear_library(curve, element, change=None, errors=None):
    stored = "float" if element is ElementKind.S8 else element
    defines = (f"-DSKUDA_OUT={element}", f"-DSKUDA_STORED={stored}", f"-DSKUDA_CURVE={curve.upper()}")
    return _compiled(LINEAR_SOURCE, defines, change, errors)


def _applied(library, x, dtype, per_unit=0.0):
    got = np.empty(x.shape, dtype)
    pointers = [("p", x.ctypes.data), ("p", got.ctypes.data), ("f", per_unit)]
    library.launch("applied", (x.size // 256, 1, 1), (32, 1, 1), 0, pointers)
    return got


def _floats(rng):
    """Draw f32 numbers where the curves bend, end, vanish or are nothing but their argument; a multiple of 256."""
    edges = (-110, -103.97, -88, -87.3, -69.3, -14.6, -14.4, -13.5, -13.0, -11.6, -5.5, 5.5, 9.0, 17.3, 40, 90, 128)
    drawn = (
        rng.uniform(-16, 10, 1 << 15),
        rng.uniform(-115, 45, 1 << 14),
        rng.normal(size=1 << 15),
        rng.integers(0, 1 << 32, 1 << 14, dtype=np.uint32).view(np.float32),  # every kind, NaN too
        *(edge + rng.normal(size=1 << 8) for edge in edges),
        np.exp(rng.uniform(-104, 0, 1 << 12)) * rng.choice([-1, 1], 1 << 12),
        rng.integers(-5000, 5000, 1 << 11),  # large ones are their own result, and middles of narrow elements
        # Halved, they lie beside middles of bf16's least numbers.
        rng.integers(-200, 200, 1 << 10) * 2.0**-133 + rng.integers(-2, 3, 1 << 10) * 2.0**-149,
        [0.0, -0.0, 1e-45, -1e-45, 3e38, -3e38, np.inf, -np.inf, np.nan, 9.0, -14.6, -110.0, 40.0],
    )
    with np.errstate(all="ignore"):
        x = np.concatenate([np.asarray(part, np.float32) for part in drawn])
    # Quiet ones only, as sums are: what C's fminf makes of signalling ones a GPU's does not.
    x = np.where(np.isnan(x), np.float32(np.nan), x)
    return np.resize(rng.permutation(x), -(-x.size // 256) * 256)


def _exact(curve, x):
    with np.errstate(invalid="ignore"):
        return getattr(curves, curve)(x.astype(np.float64))


@compiled
@pytest.mark.parametrize("element", OUTPUTS[:3])
@pytest.mark.parametrize("curve", LINEAR)
def test_every_f32_argument_gives_the_reference_s_bits(curve, element):
    x, dtype = _floats(fresh(curve, element)), storage_dtype(element)
    got = _applied(_linear_library(curve, element), x, dtype)
    with np.errstate(all="ignore"):
        assert_same_bits(got, rounded_to(_exact(curve, x), dtype), f"{curve} {element}")


@compiled
@pytest.mark.parametrize("curve", LINEAR)
def test_every_f32_argument_gives_the_reference_s_codes(curve):
    """Quotients reach from less than one step to far beyond the range; a scale that is not tame gives RN(E)."""
    rng = fresh(curve)
    library = _linear_library(curve, ElementKind.S8)
    for scale in np.float32([*np.exp2(rng.uniform(-12, 6, 4)), -(2.0**-5), 2.0**-40]):
        x = _floats(rng)
        # On the middle between codes, and beside it: far from zero gelu and silu of x are x.
        ties = (rng.integers(20, 130, 256) + np.float32(0.5)) * abs(scale)
        x[:256] = np.where(rng.random(256) < 0.5, ties, np.nextafter(ties, np.float32(rng.choice([0, 99]))))
        got = _applied(library, x, np.float32, float(np.float32(1) / scale))
        with np.errstate(all="ignore"):
            steps = [np.rint(v / scale) for v in (got, _exact(curve, x).astype(np.float32))]
        assert_same_bits(*(step + np.float32(0) for step in steps), f"{curve} by {scale}")
    with np.errstate(all="ignore"):
        assert_same_bits(_applied(library, x, np.float32, math.nan), _exact(curve, x).astype(np.float32), "not tame")


@compiled
@pytest.mark.parametrize("errors", sampled([pytest.param(e) for e in itertools.product((1, -1), repeat=2)], 2), ids=str)
@pytest.mark.parametrize("curve", LINEAR)
def test_bounds_hold_for_f32_arguments_with_the_largest_errors(curve, errors):
    """Those of 2^t and of 1 / d that PTX allows."""
    rng = fresh(curve, errors)
    lowest = -14.6 if curve == "gelu" else -110
    count = 1 << 18
    grid = np.linspace(lowest, 20, count, dtype=np.float32)
    x = np.concatenate([grid, rng.uniform(lowest, 10, count), rng.normal(size=count)], dtype=np.float32)
    low, high = np.empty((2, x.size), np.float32)
    fused = np.empty(x.size)
    _launch(_linear_library(curve, ElementKind.F32, errors=errors), "about", x, low, high, fused, count=x.size)
    exact = _exact(curve, x)
    ends = np.sort(np.array([low, high]), axis=0).astype(np.float64)
    kept = np.abs(ends).max(axis=0) >= 2.0**-100
    assert ((ends[0] <= exact) & (exact <= ends[1]))[kept].all(), x[kept & ~((ends[0] <= exact) & (exact <= ends[1]))]
    near = (x > lowest) & (x < (9 if curve == "gelu" else 40)) & (np.abs(exact) >= 2.0**-126)
    assert (np.abs(fused - exact) <= np.abs(exact) * 2.0**-44)[near].all()
