"""Every CUDA kernel run on the CPU, from its unmodified source, against the reference bit for bit."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from harness import emulator
from harness.binding import assert_nothing_else_written, launch_of, place, run_steps
from harness.resources import cases_of
from oracle import to_format
from paths import HELPERS
from support import (
    SEED,
    arguments_of,
    assert_same_bits,
    draw,
    fresh,
    rounded,
    run,
    sampled,
    specials,
    spread,
    zero_points,
)

from skuda.kernels.catalog import built_in_ops
from skuda.kernels.dtypes import storage_dtype
from skuda.kernels.sources import read_source
from skuda.registry.arch import ArchSku
from skuda.registry.descriptor import Role
from skuda.registry.device import KNOWN_DEVICES
from skuda.registry.elements import ElementKind
from skuda.registry.op import Case

pytestmark = pytest.mark.skipif(shutil.which(emulator.COMPILER) is None, reason="no C++ compiler")

# Few processors, so that grids stay small and threads come round again.
DEVICES = (
    KNOWN_DEVICES["a100"].model_copy(update={"sm_count": 1, "shared_memory": 99 << 10}),
    KNOWN_DEVICES["h200"].model_copy(update={"sm_count": 3}),
)


def _offered():
    """Return (op, SKU, cases) for every CUDA kernel that plain C++ can express; one backend of each pair."""
    found = {}
    for op in built_in_ops():
        for sku in op.skus:
            # An architecture's own instructions (wgmma) have no meaning here.
            if sku.arch is not ArchSku.CPU and not sku.arch.is_specific:
                found.setdefault((sku.key, sku.source, sku.flags, sku.variant), (op, sku))
    return [(op, sku, cases_of(sku)) for op, sku in found.values()]


OFFERED = _offered()
EVERY = [pytest.param(op, sku, cases, id=sku.id.replace(f".{sku.backend}.", ".")) for op, sku, cases in OFFERED]
if emulator.SANITIZED:
    # Each op at least once, the rest by chance; tensor cores are slow here.
    sampler = np.random.default_rng(SEED)
    firsts = {op.name: i for i, (op, _, _) in reversed(list(enumerate(OFFERED)))}
    EVERY = [
        e
        for i, e in enumerate(EVERY)
        if i in firsts.values() or sampler.random() < (0.02 if OFFERED[i][1].variant == "mma" else 0.2)
    ]
EVERY = sampled(EVERY, each=lambda op, sku, cases: (op.name, sku.variant))


# --- values ----------------------------------------------------------------------------------------------------------


def _binades(shape, element, rng, share):
    """Draw numbers of any exponent that the element has, subnormal ones too, and a share of its special values."""
    info = ml_dtypes.finfo(storage_dtype(element))
    low, high = math.log2(float(info.smallest_subnormal)), math.log2(float(info.max))
    found = rng.choice([-1.0, 1.0], shape) * np.exp2(np.clip(rng.uniform(low - 1, high + 1, shape), -1074, 1023))
    return rounded(np.where(rng.random(shape) < share, rng.choice(specials(element), shape), found), element)


def _scales(had, data, rng, share):
    """Draw scales of data of element `data`: of magnitudes whose codes' values it has, and a share of any others."""
    element = _element(had)
    if rng.random() < 0.5:
        info = ml_dtypes.finfo(storage_dtype(data))
        low, high = math.log2(float(info.smallest_subnormal)), math.log2(float(info.max)) - 7
        had = rounded(rng.choice([-1.0, 1.0], had.shape) * np.exp2(rng.uniform(low, high, had.shape)), element)
    return np.where(rng.random(had.shape) < share, _binades(had.shape, element, rng, 0.3), had).astype(had.dtype)


def _on_edge(problem, inputs, rng):
    """Replace scales by ones of all magnitudes, and data by numbers on and right beside the middle between codes.

    What is special is rare, frequent or absent: a chunk without it may take another path than one with it.
    """
    inputs = dict(inputs)
    scale, share = inputs["scale"], rng.choice([0, 0.01, 0.2])
    data = next(a.elements[0] for a in arguments_of(problem) if a.name != "scale" and a.elements[0].is_float)
    if isinstance(scale, np.ndarray):
        scale = inputs["scale"] = _scales(scale, data, rng, share)
    else:
        scale = inputs["scale"] = float(_scales(np.asarray(scale, storage_dtype(data.compute)), data, rng, 0) or scale)
    if isinstance(inputs.get("zero_point"), np.ndarray) and rng.random() < 0.5:
        inputs["zero_point"] = np.asarray(zero_points(inputs["zero_point"].shape, problem, "special", rng))
    for argument in arguments_of(problem, Role.INPUT):
        if argument.name == "d_output":
            inputs["d_output"] = _gradients(problem, scale, inputs["d_output"].shape, data, rng, share)
        elif argument.name == "input" and argument.elements[0].is_float:
            inputs["input"] = _beside_ties(problem, scale, inputs["input"].shape, data, rng, share)
    return inputs


def _beside_ties(problem, scale, shape, element, rng, share):
    reach = rng.choice([20, 300, 5000])
    steps = rng.integers(-reach, reach, shape, endpoint=True) + rng.choice([0.5, 0.0], shape, p=[0.8, 0.2])
    found = _nudged(steps * _spread_scale(problem, scale, shape), element, rng)
    return np.where(rng.random(shape) < share, _binades(shape, element, rng, 0.5), found).astype(found.dtype)


def _gradients(problem, scale, shape, element, rng, share):
    """Draw gradients, some of them such that they divided by their scale, or times it, are at the ends of the range."""
    spread_scale = _spread_scale(problem, scale, shape)
    edges = specials(element)
    edge = rng.choice(edges[np.isfinite(edges) & (edges != 0)], shape)
    near = _nudged(np.where(rng.random(shape) < 0.5, edge * spread_scale, edge / spread_scale), element, rng)
    found = np.where(rng.random(shape) < 0.3, near, _nudged(rng.standard_normal(shape), element, rng))
    return np.where(rng.random(shape) < share, _binades(shape, element, rng, 0.3), found).astype(found.dtype)


def _spread_scale(problem, scale, shape):
    return np.broadcast_to(spread(problem, np.asarray(scale, np.float64), shape), shape)


def _nudged(values, element, rng):
    """Round, and step to a neighbour or the one behind it."""
    values = rounded(values, element)
    # The integers behind floating numbers of one sign are ordered as they are.
    integer = np.dtype(f"i{values.dtype.itemsize}")
    steps = rng.integers(-2, 2, values.shape, endpoint=True).astype(integer)
    moved = np.asarray(values.view(integer) + steps).view(values.dtype)
    return np.where(
        np.abs(values.astype(np.float64)) < 2.0 ** (ml_dtypes.finfo(values.dtype).maxexp - 1), moved, values
    )


def _element(array):
    return next(e for e in ElementKind if e.is_float and storage_dtype(e) == array.dtype)


# --- checking --------------------------------------------------------------------------------------------------------


def check(unit, sku, case, inputs, shapes, rng, *, in_place=False):
    """Run one problem in one random layout and compare."""
    problem = case.problem
    want = run(problem, inputs)
    launch = launch_of(sku, problem, DEVICES[rng.integers(len(DEVICES))])
    placed = place(problem, launch, shapes, inputs, rng)
    outputs = [a.name for a in arguments_of(problem, Role.OUTPUT, Role.STATE)]
    if in_place:
        source = next(
            a.name
            for a in arguments_of(problem, Role.INPUT)
            if a.name in launch.view and placed[a.name].array.dtype == placed[outputs[0]].array.dtype
        )
        placed[outputs[0]] = placed[source]
    if launch.steps:
        run_steps(emulator.load(unit.configured(launch.flags)), launch, problem, placed, shapes)
    for name in outputs:
        assert_same_bits(placed[name].array, want[name], f"{name} of {problem!r}")
    assert_nothing_else_written(problem, placed)


def check_all(unit, op, sku, cases, rng):
    """Check cases as they are drawn, with values on the edges, and in place."""
    for case in cases:
        drawn = draw(op, case, rng)
        check(unit, sku, case, drawn.inputs, drawn.shapes, rng)
        if "scale" in drawn.inputs:
            for _ in range(3):
                with np.errstate(all="ignore"):
                    inputs = _on_edge(case.problem, drawn.inputs, rng)
                check(unit, sku, case, inputs, drawn.shapes, rng)
        if op.descriptor.in_place:
            check(unit, sku, case, drawn.inputs, drawn.shapes, rng, in_place=True)


@pytest.mark.parametrize(("op", "sku", "cases"), EVERY)
def test_kernel_equals_the_reference(op, sku, cases):
    rng = fresh(sku.id)
    assert cases, "no case reaches this kernel"
    check_all(emulator.Unit.of(sku), op, sku, cases, rng)


MANY = [e for e in EVERY if e.id.startswith(("quantization.quantize_per_tensor.", "quantization.quantize_per_token."))]


@pytest.mark.parametrize(("op", "sku", "cases"), MANY)
def test_a_thread_with_many_chunks_in_flight_gives_the_same(op, sku, cases):
    """As many chunks as it takes on the smaller device, and some more; f64 has no other number of them in flight."""
    rng, data = fresh(sku.id), sku.element
    row, chunks = 1024, 16 * 256 * 8 + 1 + int(rng.integers(500))
    rows = -(-chunks * (128 // data.bits) // row)
    problem = next(case.problem for case in cases if case.problem.data_element is data)
    problem = problem.model_copy(
        update={"n": rows, "d": row} if op.name.endswith("token") else {"numel": rows * row - 3}
    )
    launch = launch_of(sku, problem, DEVICES[0])
    assert launch.steps[0].entry.endswith("_8") == (data is not ElementKind.F64)
    check_all(emulator.Unit.of(sku), op, sku, (Case(problem, "special"),), rng)


class _Tight:
    """Stands for a generator: `check` then lays arrays out without offsets and gaps, so that rows are aligned."""

    def random(self):
        return 1.0

    def choice(self, values):
        return values[0]

    def integers(self, *_, **__):
        return 0


def _hard_quotients(bits, count, rng):
    """Return x and s of `bits` bits whose quotient is far closer to the middle between two such numbers than by chance.

    With m = 2^(bits + 1), q s = k m + r for an odd q and a small r: then k / s is q / m but for r / (s m).
    """
    m, found = 1 << bits + 1, []
    while len(found) < count:
        s = int(rng.integers(1 << bits - 1, 1 << bits)) | 1
        r = 2 * int(rng.integers(-5, 5)) + 1
        q = r * pow(s, -1, m) % m
        k = (q * s - r) // m
        if m // 2 <= q and 1 << bits - 1 <= k < 1 << bits:
            found.append((k, s))
    return np.array(found, np.float64).T


DIVIDING = [e for e in EVERY if e.id.startswith("quantization.quantize_per_token_backward.")]


@pytest.mark.parametrize(("op", "sku", "cases"), DIVIDING)
def test_gradients_are_divided_exactly_where_quotients_are_hardest_to_round(op, sku, cases):
    rng, n, d = fresh(sku.id), 4096, 4
    compute = sku.element.compute
    x, s = _hard_quotients(ml_dtypes.finfo(storage_dtype(compute)).nmant + 1, n, rng)
    powers = np.exp2(rng.integers(-20, 20, (n, d + 1)).astype(np.float64))
    problem = op.descriptor(n=n, d=d, q_min=-128, q_max=127, input_element=sku.element)
    inputs = {
        "d_output": rounded(x[:, None] * powers[:, 1:], sku.element),
        "input": np.zeros((n, d), storage_dtype(sku.element)),
        "scale": (s * powers[:, 0]).astype(storage_dtype(compute)),
        "zero_point": np.zeros(n, np.int32),
    }
    shapes = dict.fromkeys(("d_output", "input", "d_input"), (n, d))
    check(emulator.Unit.of(sku), sku, Case(problem), inputs, shapes, rng)


def _all_magnitudes(op, sku, rng):
    """Return a problem that divides numbers of every magnitude by scales of both signs, near the middle of two results.

    A row has one magnitude, so some rows are on the fast path and others are not.
    """
    n, d = 4096, 32
    data, compute = storage_dtype(sku.element), storage_dtype(sku.element.compute)
    digits, least, most = ml_dtypes.finfo(data).nmant, ml_dtypes.finfo(data).minexp, ml_dtypes.finfo(data).maxexp
    tame = (-58, 38) if compute.itemsize == 4 else (-390, 390)  # exponents of scales
    mantissas, middles = rng.integers(1 << digits, 2 << digits, (2, n))
    row = np.ldexp(mantissas.astype(np.float64), rng.integers(least - 2 * digits, most - digits, n))
    row = row.astype(data).astype(np.float64)
    scale, _ = np.frexp(row / (2 * middles + 1))
    scale = np.ldexp(np.where(scale == 0, 0.7, scale), rng.integers(*tame, n)).astype(compute)
    bits = scale.view(f"i{compute.itemsize}")
    bits += rng.integers(-2, 2, n, endpoint=True).astype(bits.dtype)
    d_output = row[:, None] * rng.choice([-1.0, 1.0, -0.0, 0.0], (n, d), p=[0.45, 0.45, 0.05, 0.05])
    inputs = {
        "d_output": d_output.astype(data),
        "input": np.zeros((n, d), data),
        "scale": scale * rng.choice([-1, 1, 1], n).astype(compute),
        "zero_point": np.zeros(n, np.int32),
    }
    problem = op.descriptor(n=n, d=d, q_min=-128, q_max=127, input_element=sku.element)
    shapes = dict.fromkeys(("d_output", "input", "d_input"), (n, d))
    return problem, inputs, shapes


@pytest.mark.parametrize(("op", "sku", "cases"), DIVIDING)
def test_gradients_are_divided_exactly_whatever_their_magnitude(op, sku, cases):
    rng = fresh(sku.id)
    for _ in range(5):
        problem, inputs, shapes = _all_magnitudes(op, sku, rng)
        with np.errstate(all="ignore"):
            check(emulator.Unit.of(sku), sku, Case(problem), inputs, shapes, _Tight())


HARDEST = {"quantize_per_token": ElementKind.S8, "amax_quantize": ElementKind.S16}
QUANTIZING = [
    pytest.param(op, sku, cases, id=sku.id)
    for op, sku, cases in OFFERED
    if op.name in HARDEST and sku.element.bits == 16 and sku.aux_element is HARDEST[op.name]
]


@pytest.mark.parametrize(("op", "sku", "cases"), QUANTIZING)
def test_codes_are_exact_where_quotients_are_hardest_to_round(op, sku, cases):
    """Quotients are half an integer, or one or two units of f32 beside that."""
    rng, n, d, (_, top) = fresh(sku.id), 4096, 8, sku.aux_element.integer_range
    digits = ml_dtypes.finfo(storage_dtype(sku.element)).nmant
    x = rng.integers(1 << digits, 2 << digits, (n, 1)) * rng.choice([-1.0, 1.0], (n, d))
    scale = (np.abs(x[:, 0]) / (rng.integers(0, top, n) + 0.5)).astype(np.float32)
    scale = (scale.view(np.int32) + rng.integers(-2, 2, n, endpoint=True).astype(np.int32)).view(np.float32)
    fields = {"input_element": sku.element, "output_element": sku.aux_element}
    problem = op.descriptor(n=n, d=d, q_min=-top, q_max=top, **fields)
    given = {"scale": scale, "zero_point": np.zeros(n, np.int32)}
    given = {"amax": scale * np.float32(top)} if op.name == "amax_quantize" else given
    shapes = dict.fromkeys(("input", "output"), (n, d)) | {"scale_out": (n,)}
    check(emulator.Unit.of(sku), sku, Case(problem), {"input": rounded(x, sku.element), **given}, shapes, rng)


CENTRING = [
    pytest.param(op, sku, cases, id=sku.id)
    for op, sku, cases in OFFERED
    if op.name == "layer_norm_quantize" and sku.aux_element is ElementKind.S8
]


@pytest.mark.parametrize(("op", "sku", "cases"), sampled(CENTRING, 2))
def test_rows_are_centred(op, sku, cases):
    """The mean of -0 is +0, so they stay -0; far from 0, what a lane without data adds to a sum of squares shows."""
    dtype = storage_dtype(sku.element)
    far = rounded(50 + fresh(sku.id).standard_normal((2, 1304)), sku.element)
    for x in (np.full((2, 8192), -0.0, dtype), far):
        fields = {"input_element": sku.element, "output_element": sku.aux_element, "has_normalized": True}
        problem = op.descriptor(n=2, d=x.shape[1], eps=0.1, q_min=-127, q_max=127, **fields)
        shapes = dict.fromkeys(("input", "output", "normalized_out"), x.shape) | {"scale_out": (2,)}
        check(emulator.Unit.of(sku), sku, Case(problem), {"input": x}, shapes, _Tight())


# --- the check itself ------------------------------------------------------------------------------------------------

plainly = pytest.mark.skipif(emulator.SANITIZED, reason="sanitizers end the process where these expect a message")
MUTANTS = {
    "missing barrier": ("dynamic_range", "__syncthreads();", ""),
    "a unit too far": ("quantize_per_channel", "unit < all_units;", "unit < all_units + 1;"),
    "the previous kernel not awaited": ("rms_norm_quantize", "  griddepcontrol_wait();\n", ""),
}


@plainly
@pytest.mark.parametrize(("op_name", "before", "after"), MUTANTS.values(), ids=MUTANTS)
def test_a_wrong_kernel_is_caught(op_name, before, after):
    """Many more faults are in `tests/programs/faults.py`."""
    op, sku, cases = next(each for each in OFFERED if each[0].name == op_name)
    unit = emulator.Unit.of(sku).with_change(before, after)
    emulator.load(unit)  # it must compile
    with pytest.raises(AssertionError):
        check_all(unit, op, sku, cases * 100, fresh(op_name))  # the first wrong bit ends it


FAULTY = """
extern "C" __global__ void parted() {
  if (threadIdx.x < 16) __syncthreads();
  else __syncwarp();
}
extern "C" __global__ void crooked(const int* in) { __ldcs((const uint4*)(in + 1)); }
extern "C" __global__ void wanders(int* out) { out[1ll << 44] = 1; }
"""


@plainly
@pytest.mark.parametrize(
    ("entry", "error"), [("parted", "deadlock"), ("crooked", "misaligned"), ("wanders", "bad addr")]
)
def test_what_a_launch_does_wrong_is_said(entry, error):
    library, given = emulator.load(emulator.Unit("faulty.cu", FAULTY)), np.zeros(16, np.int32)
    with pytest.raises(AssertionError, match=error):
        library.launch(entry, (1, 1, 1), (32, 1, 1), 0, [("p", given.ctypes.data)][entry == "parted" :])


DIFFERENCES = """
#include "epilogue.cuh"
extern "C" __global__ void differences(const s64* whole, const s64* zw, const s64* a, f32* narrow, f64* wide) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  narrow[i] = difference_128<f32>(whole[i], zw[i], a[i]), wide[i] = difference_128<f64>(whole[i], zw[i], a[i]);
}"""


def test_a_correction_of_more_than_64_bits_is_rounded_once():
    rng, count = fresh("differences"), 4096
    bits = {"whole": 61, "zw": 31, "a": 53}
    drawn = {}
    for name, most in bits.items():
        full = rng.integers(-(1 << most), (1 << most) - 1, count, endpoint=True)
        drawn[name] = np.where(rng.random(count) < 0.5, full, full >> rng.integers(0, most, count))
        ends = rng.choice(np.array([-(1 << most), (1 << most) - 1, 0, 1, -1]), count)
        drawn[name] = np.where(rng.random(count) < 0.2, ends, drawn[name])
    # Beside the middle between two f32 or f64: a power of two, half a unit, and a last bit that only a sticky one sees.
    drawn["a"][::4] = (1 << 52) + (1 << rng.integers(20, 30, count // 4))
    drawn["zw"][::4] = -(1 << 30)
    drawn["whole"][::4] = rng.integers(-1, 2, count // 4)
    narrow, wide = np.zeros(count, np.float32), np.zeros(count)
    source = read_source("skuda.kernels.linear:scaled_linear.cu")
    headers = tuple((name, text.decode()) for name, text in source.headers)
    library = emulator.load(emulator.Unit("differences.cu", DIFFERENCES, headers, source.foreign))
    pointers = [("p", array.ctypes.data) for array in (*drawn.values(), narrow, wide)]
    library.launch("differences", (count // 32, 1, 1), (32, 1, 1), 0, pointers)
    exact = [w - z * a for w, z, a in zip(*(each.tolist() for each in drawn.values()), strict=True)]
    assert max(map(abs, exact)) > 1 << 80
    assert narrow.tolist() == [to_format(Fraction(each), "f32") for each in exact]
    assert wide.tolist() == [to_format(Fraction(each), "f64") for each in exact]


# --- sanitizers ------------------------------------------------------------------------------------------------------


def _runtime(name):
    found = subprocess.run([emulator.COMPILER, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = Path(found.stdout.strip())
    return path if path.is_absolute() else None


def _sanitized(*arguments):
    runtime = _runtime("libasan.so")
    if runtime is None:
        pytest.skip("no libasan")
    chosen = {"SKUDA_SANITIZE": "1", "SKUDA_TEST_SEED": str(SEED), "LD_PRELOAD": str(runtime)}
    chosen |= {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    folder = Path(__file__).parent
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=os.environ | chosen, cwd=folder, capture_output=True, text=True, check=False)


def _side_by_side():
    """Return the ops that share a process, which takes seconds to start; products and norms compile long enough."""
    names = sorted({op.name for op, _, _ in OFFERED})
    alone = [name for name in names if name.endswith(("_linear", "_norm_quantize"))]
    others = [name for name in names if name not in alone]
    return [pytest.param([name], id=name, marks=pytest.mark.full) for name in alone] + sampled(
        [pytest.param(others[at::5], id=f"{others[at]} and others") for at in range(5)]
    )


@plainly
@pytest.mark.long
@pytest.mark.parametrize("ops", _side_by_side())
def test_sanitizers_find_nothing_in_a_sample_of_the_kernels_of_each_op(ops, pytestconfig):
    of_them = " or ".join(f".{op}." for op in ops)
    chosen = ["-k", f"test_kernel_equals_the_reference and ({of_them})", "-m", pytestconfig.option.markexpr]
    done = _sanitized("-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider", Path(__file__).name, *chosen)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= len(ops)


@plainly
@pytest.mark.full
def test_sanitizers_find_nothing_in_the_other_tests():
    chosen = "not test_kernel_equals_the_reference"
    done = _sanitized("-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider", Path(__file__).name, "-k", chosen)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


_OF_HOPPER = ("the_streamed_kernel", "weights_straight", "the_warpgroup_kernel")


@plainly
@pytest.mark.full
@pytest.mark.long
@pytest.mark.parametrize("tests", [*_OF_HOPPER, " and ".join(f"not {name}" for name in _OF_HOPPER)])
def test_sanitizers_find_nothing_in_kernels_of_hopper(tests):
    chosen = ("test_hopper_on_cpu.py", "-m", "not full", "-k", tests)
    done = _sanitized("-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider", *chosen)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


@plainly
@pytest.mark.parametrize(
    ("body", "error"),
    sampled(
        [
            pytest.param(
                "__shared__ int a[8], b[8]; int* volatile p = a; p[8] = 1; out[0] = b[0];", "global-buffer-overflow"
            ),
            pytest.param("extern __shared__ int a[]; a[8] = 1; out[0] = a[0];", "use-after-poison"),
            pytest.param("out[0] = out[4];", "use-after-poison"),
            pytest.param(
                "int a[4]; int* volatile p = a; __syncthreads(); p[4] = 1; out[0] = a[0];", "stack-buffer-overflow"
            ),
            pytest.param("out[0] = out[1] + 0x7fffffff + 1;", "signed integer overflow"),
            pytest.param("out[0] = ((const uint2*)(out + 1))->x;", "misaligned address"),
        ],
    ),
)
def test_sanitizers_find_what_is_wrong(body, error):
    text = f'extern "C" __global__ void f(int* out) {{ {body} }}'
    done = _sanitized("-c", _FAULTY, text)
    assert done.returncode, "nothing was found"
    assert error in done.stderr, done.stderr[-3000:]


_FAULTY = f"""
import sys
sys.path.insert(0, "{HELPERS}")
from harness.binding import forbid
from harness.emulator import Unit, load
from support import Guarded
out = Guarded((4,), "i4")
out.array[...] = 0
forbid(out)
load(Unit("faulty.cu", sys.argv[1])).launch("f", (1, 1, 1), (1, 1, 1), 32, [("p", out.array.ctypes.data)])
"""
