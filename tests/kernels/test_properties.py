"""Arbitrary bits against the definition, and relations between runs that must hold for any data."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support import arguments_of, assert_same_bits, dispatcher, run, specials

from skuda.kernels.dtypes import storage_dtype
from skuda.registry.descriptor import Role, storage_shape
from skuda.registry.elements import CODES, FLOATS, ElementKind
from skuda.registry.vocabulary import EpilogueKind

SIZE = 6
INT32 = st.integers(-(2**31), 2**31 - 1)
FLOAT, CODE = st.sampled_from(FLOATS), st.sampled_from(CODES)
RANGED = st.sampled_from([*CODES, ElementKind.S16])
OUT = st.sampled_from([*FLOATS, ElementKind.S8, ElementKind.U8])
often = settings(max_examples=150, deadline=None)
seldom = settings(max_examples=50, deadline=None)


def _stored(values, element):
    with np.errstate(all="ignore"):
        return np.asarray(values).astype(storage_dtype(element))


@st.composite
def numbers(draw, element, count):
    """Draw `count` numbers of a floating element: any bits, ordinary numbers, halves, or the edges."""
    dtype = storage_dtype(element)
    width = 8 * dtype.itemsize
    # All bits set in the exponent: infinities, and NaN of every payload, signalling ones too.
    top = int(np.array(np.inf, dtype).view(f"u{dtype.itemsize}"))
    patterns = st.integers(0, 2**width - 1) | st.integers(0, 2**width - 1).map(lambda bits: bits | top)
    any_bits = patterns.map(lambda bits: np.array(bits, f"u{dtype.itemsize}").view(dtype))
    near = st.floats(-300, 300, width=32) | st.integers(-600, 600).map(lambda n: n / 2) | st.sampled_from([0.5, 1, 2])
    edges = st.sampled_from(specials(element).tolist())
    one = any_bits | near.map(lambda v: np.float64(v).astype(dtype)) | edges.map(lambda v: np.float64(v).astype(dtype))
    return np.array([draw(one) for _ in range(count)], dtype)


@st.composite
def bounds(draw, code=None):
    """Draw q_min <= q_max, within the range of `code` or of s32."""
    low, high = (-(2**31), 2**31 - 1) if code is None else code.integer_range
    near = st.integers(max(low, -200), min(high, 300))
    ends = sorted([draw(near | st.integers(low, high)), draw(near | st.integers(low, high))])
    return {"q_min": ends[0], "q_max": ends[1]}


@st.composite
def zero_points(draw, count):
    return np.array([draw(st.integers(-300, 300) | INT32) for _ in range(count)], np.int32)


def _scales(data, element):
    kinds = tuple(dict.fromkeys((element.compute, element)))
    return data.draw(numbers(data.draw(st.sampled_from(kinds)), SIZE))


def _assert_defined(problem, arrays):
    got, define = run(problem, arrays), oracle.definition(problem, arrays)
    for argument in arguments_of(problem, Role.OUTPUT):
        for at in np.ndindex(*argument.shape):
            element = argument.elements[0]
            found, want = oracle.element_at(got[argument.name], element, at), define(argument.name, at)
            assert oracle.matches(found, want), f"{argument.name}{list(at)}: got {found!r}, want {want!r}"
    return got


# Per channel over one axis gives every element a scale and zero point of its own.
LINE = {"shape": (SIZE,), "axis": 0}


@often
@given(data=st.data(), element=FLOAT, code=CODE)
def test_quantize_of_any_bits(data, element, code):
    problem = dispatcher().describe(
        "quantize_per_channel", **LINE, **data.draw(bounds(code)), input_element=element, output_element=code
    )
    arrays = {"scale": _scales(data, element), "zero_point": data.draw(zero_points(SIZE))}
    _assert_defined(problem, {"input": data.draw(numbers(element, SIZE)), **arrays})


@often
@given(data=st.data(), element=FLOAT, code=CODE)
def test_dequantize_of_any_bits(data, element, code):
    problem = dispatcher().describe("dequantize_per_channel", **LINE, input_element=code, output_element=element)
    arrays = {"scale": _scales(data, element), "zero_point": data.draw(zero_points(SIZE))}
    stored = storage_shape((SIZE,), code)[0]
    codes = np.frombuffer(data.draw(st.binary(min_size=stored, max_size=stored)), storage_dtype(code))
    _assert_defined(problem, {"input": codes, **arrays})


@often
@given(data=st.data(), element=FLOAT)
def test_fake_quantize_of_any_bits_and_bounds(data, element):
    problem = dispatcher().describe("fake_quantize_per_channel", **LINE, **data.draw(bounds()), input_element=element)
    arrays = {"scale": _scales(data, element), "zero_point": data.draw(zero_points(SIZE))}
    _assert_defined(problem, {"input": data.draw(numbers(element, SIZE)), **arrays})


@often
@given(data=st.data(), element=FLOAT, kind=st.sampled_from(["quantize", "fake_quantize", "dequantize"]))
def test_gradients_of_any_bits(data, element, kind):
    fields = {"output_element": element}
    arrays = {"scale": _scales(data, element), "d_output": data.draw(numbers(element, SIZE))}
    if kind != "dequantize":
        fields = {"input_element": element, **data.draw(bounds())}
        arrays |= {"input": data.draw(numbers(element, SIZE)), "zero_point": data.draw(zero_points(SIZE))}
    _assert_defined(dispatcher().describe(f"{kind}_per_channel_backward", **LINE, **fields), arrays)


SCOPES = st.sampled_from(
    [
        {"scope": "tensor"},
        {"scope": "token"},
        {"scope": "channel", "axis": 0},
        {"scope": "channel", "axis": 1},
        {"scope": "group", "group_size": 2},
    ]
)


@often
@given(data=st.data(), element=FLOAT, code=RANGED, scope=SCOPES, mode=st.sampled_from(["symmetric", "asymmetric"]))
def test_dynamic_range_of_any_bits(data, element, code, scope, mode):
    limits = data.draw(bounds(code))
    assume(limits["q_max"] > (0 if mode == "symmetric" else limits["q_min"]))
    problem = dispatcher().describe(
        "dynamic_range", n=3, d=4, mode=mode, input_element=element, output_element=code, **scope, **limits
    )
    # Half of the time one magnitude for all, so that infinities do not hide the rest.
    plain = st.lists(st.floats(-1, 1, width=16), min_size=12, max_size=12)
    unit = data.draw(st.sampled_from([1.0, 2.0**-14, 3e-42, 1e-320, 2.0**14, 1e38, 1e300]))
    same = plain.map(lambda values: _stored(np.array(values) * unit, element))
    _assert_defined(problem, {"input": data.draw(numbers(element, 12) | same).reshape(3, 4)})


def _codes(data, shape, element):
    size = int(np.prod(shape))
    raw = data.draw(st.binary(min_size=size, max_size=size))
    return np.frombuffer(raw, storage_dtype(element)).reshape(shape)


def _linear_arrays(data, problem, n):
    compute = problem.compute
    arrays = {"weight_scale": data.draw(numbers(compute, n))}
    if problem.has_weight_zero_point:
        arrays["weight_zero_point"] = data.draw(zero_points(n))
    if problem.epilogue.requires_bias:
        arrays["bias"] = data.draw(numbers(compute, n))
    if problem.output_element.integer_range is not None:
        arrays["output_scale"] = data.draw(numbers(compute, 1))
        arrays["output_zero_point"] = data.draw(INT32)
    return arrays


SIZES = st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 5))
CODE8 = st.sampled_from([ElementKind.S8, ElementKind.U8])


def _static(data, act):
    scale = st.floats(-(2.0**100), 2.0**100, width=32).filter(lambda v: v != 0)
    fields = {"act_scale": data.draw(scale), "act_zero_point": data.draw(st.integers(*act.integer_range))}
    return fields | {"activation_element": act}


def _scaled(data, act):
    fields = {"act_scale_scope": data.draw(st.sampled_from(["token", "tensor"]))}
    return fields | {"has_act_zero_point": data.draw(st.booleans()), "activation_element": act}


def _quantized(data, act):
    limits = data.draw(bounds(act).filter(lambda found: found["q_max"] > 0))
    return {**limits, "activation_element": data.draw(FLOAT)}


LINEARS = {"smoothquant_linear": _static, "scaled_linear": _scaled, "quantized_linear": _quantized}


@pytest.mark.parametrize("op", LINEARS)
@often
@given(data=st.data(), sizes=SIZES, act=CODE8, weight=CODE8, out=OUT, epilogue=st.sampled_from(EpilogueKind))
def test_linear_of_any_bits_codes_scales_and_zero_points(op, data, sizes, act, weight, out, epilogue):
    m, n, k = sizes
    problem = dispatcher().describe(
        op,
        **dict(zip(("m", "c_out" if op == "quantized_linear" else "n", "k"), sizes, strict=True)),
        **LINEARS[op](data, act),
        weight_element=weight,
        output_element=out,
        epilogue=epilogue,
        has_weight_zero_point=data.draw(st.booleans()),
    )
    arrays = {"weight_q": _codes(data, (n, k), weight)}
    if op == "quantized_linear":
        arrays["activation"] = data.draw(numbers(problem.activation_element, m * k)).reshape(m, k)
    else:
        arrays["act_q"] = _codes(data, (m, k), act)
    if op == "scaled_linear":
        scales = m if problem.scales_tokens else 1
        arrays["act_scale"] = data.draw(numbers(problem.compute, scales))
        if problem.has_act_zero_point:
            arrays["act_zero_point"] = data.draw(zero_points(scales))
    _assert_defined(problem, arrays | _linear_arrays(data, problem, n))


# --- relations -------------------------------------------------------------------------------------------------------

TOKENS, DEPTH = 5, 7
BY_ROW = {
    "quantize_per_token": {"q_min": -100, "q_max": 127, "output_element": ElementKind.S8},
    "fake_quantize_per_token": {"q_min": -8, "q_max": 7},
    "dynamic_range": {"q_min": -8, "q_max": 7, "mode": "asymmetric", "output_element": ElementKind.S4},
    "rms_norm_quantize": {"q_min": -127, "q_max": 127, "eps": 1e-6, "output_element": ElementKind.S8},
    "layer_norm_quantize": {"q_min": 0, "q_max": 255, "eps": 0.0, "output_element": ElementKind.U8},
    "quantized_linear": {"q_min": -127, "q_max": 127, "c_out": 3, "epilogue": "bias_gelu"},
}


def _by_row(op, element, rows, weights):
    """Run an op over some rows; `rows` maps names to arrays that have a row for each."""
    data = "activation" if op == "quantized_linear" else "input"
    sizes = {"m": len(rows["x"]), "k": DEPTH} if op == "quantized_linear" else {"n": len(rows["x"]), "d": DEPTH}
    problem = dispatcher().describe(op, **sizes, **{f"{data}_element": element}, **BY_ROW[op])
    arrays = {data: rows["x"]}
    if "per_token" in op:
        arrays |= {"scale": rows["scale"], "zero_point": rows["zero_point"]}
    return run(problem, arrays | (weights if op == "quantized_linear" else {}))


@pytest.mark.parametrize("op", BY_ROW)
@seldom
@given(data=st.data(), element=FLOAT, order=st.permutations(range(TOKENS)), cut=st.integers(0, TOKENS))
def test_a_row_s_result_depends_on_that_row_alone(op, data, element, order, cut):
    rows = {
        "x": data.draw(numbers(element, TOKENS * DEPTH)).reshape(TOKENS, DEPTH),
        "scale": data.draw(numbers(element.compute, TOKENS)),
        "zero_point": data.draw(zero_points(TOKENS)),
    }
    weights = {"weight_q": _codes(data, (3, DEPTH), ElementKind.S8), "weight_scale": np.ones(3, np.float32)}
    weights["bias"] = data.draw(numbers(ElementKind.F32, 3))
    whole = _by_row(op, element, rows, weights)
    permuted = _by_row(op, element, {name: array[list(order)] for name, array in rows.items()}, weights)
    parts = [{name: array[at] for name, array in rows.items()} for at in (slice(cut), slice(cut, None))]
    parts = [_by_row(op, element, part, weights) for part in parts]
    for name, array in whole.items():
        assert_same_bits(permuted[name], array[list(order)], f"{name}, rows permuted")
        assert_same_bits(np.concatenate([part[name] for part in parts]), array, f"{name}, cut at {cut}")
