"""Every trap of the arithmetic contract, with the expectation written by hand."""

from __future__ import annotations

import json
import math

import ml_dtypes
import numpy as np
import pytest
from paths import TESTS
from support import assert_same_bits, dispatcher, run

from skuda.kernels.dtypes import storage_dtype
from skuda.registry.elements import ElementKind

GRANULARITIES = ("per_tensor", "per_channel", "per_token", "per_group")
EACH = pytest.mark.parametrize("granularity", GRANULARITIES)
NAN, INF = math.nan, math.inf
F32, F64, F16, BF16 = np.float32, np.float64, np.float16, np.dtype(ml_dtypes.bfloat16)
COPIES = 3


def _name(kind, granularity, *, backward=False):
    short = kind == "fake_quantize" and granularity == "per_tensor"
    return kind + ("" if short else f"_{granularity}") + ("_backward" if backward else "")


def _sizes(granularity, count):
    return {
        "per_tensor": {"numel": COPIES},
        "per_channel": {"shape": (2, count, COPIES), "axis": 1},
        "per_token": {"n": count, "d": COPIES},
        "per_group": {"outer_size": 1, "axis_size": COPIES * count, "group_size": COPIES},
    }[granularity]


def _spread(granularity, values):
    """Give every value a segment of its own."""
    rows = np.repeat(values[:, None], COPIES, axis=1)
    return {"per_channel": np.stack([rows, rows]), "per_group": rows.reshape(1, -1)}.get(granularity, rows)


def _gathered(granularity, result, count):
    """Undo `_spread`; all copies of a value must have had the same result."""
    rows = result.reshape(-1, count, COPIES)
    assert_same_bits(rows, np.broadcast_to(rows[:1, :, :1], rows.shape), granularity)
    return np.ascontiguousarray(rows[0, :, 0])


def apply(kind, granularity, scale, zero_point=None, *, backward=False, fields, **data):
    """Run an elementwise op over (value, scale, zero point) triples of one granularity; one result each."""
    count = len(scale)
    arrays = {"scale": np.asarray(scale)}
    if zero_point is not None:
        arrays["zero_point"] = np.asarray(zero_point, np.int32)
    problem = dispatcher().describe(_name(kind, granularity, backward=backward), **_sizes(granularity, count), **fields)
    data = {name: _spread(granularity, np.asarray(values)) for name, values in data.items()}
    if granularity == "per_tensor":
        one = [{name: values[i] for name, values in data.items()} for i in range(count)]
        one = [d | {name: values[i : i + 1] for name, values in arrays.items()} for i, d in enumerate(one)]
        (results,) = zip(*(run(problem, each).values() for each in one), strict=True)
        return _gathered(granularity, np.stack(results), count)
    if granularity == "per_group":
        arrays = {name: values.reshape(1, -1) for name, values in arrays.items()}
    (result,) = run(problem, data | arrays).values()
    return _gathered(granularity, result, count)


def quantize(granularity, triples, element="f32", code="s8", bounds=(-128, 127)):
    x, s, z = zip(*triples, strict=True)
    dtype = storage_dtype(ElementKind(element))
    fields = {"q_min": bounds[0], "q_max": bounds[1], "input_element": element, "output_element": code}
    scale = np.array(s, F64 if element == "f64" else F32)
    return apply("quantize", granularity, scale, z, fields=fields, input=np.array(x).astype(dtype)).tolist()


def gradient(kind, granularity, rows, element="f32", bounds=(-128, 127)):
    dy, x, s, z = zip(*rows, strict=True)
    dtype = storage_dtype(ElementKind(element))
    fields = {"q_min": bounds[0], "q_max": bounds[1], "input_element": element}
    scale = np.array(s, F64 if element == "f64" else F32)
    data = {"d_output": np.array(dy).astype(dtype), "input": np.array(x).astype(dtype)}
    return apply(kind, granularity, scale, z, backward=True, fields=fields, **data)


# --- forward ---------------------------------------------------------------------------------------------------------


@EACH
def test_the_contract_s_list_of_traps(granularity):
    traps = {
        (0.5, 1, 1): 1,  # the zero point comes after rounding: 0.5 + 1 would give 2
        (1.5, 1, 1): 3,
        (-0.5, 1, 1): 1,
        (3e38, 0.1, 5): 127,  # no wrap of t + z
        (-3e38, 0.1, -5): -128,
        (INF, 0.1, 5): 127,
        (-INF, 0.1, 5): -128,
        (NAN, 0.1, 7): 7,
        (NAN, 0.1, 300): 127,  # clamp(z)
    }
    assert quantize(granularity, list(traps)) == list(traps.values())


@EACH
def test_division_is_true_and_not_a_product_with_the_reciprocal(granularity):
    traps = {(1.5499999523162842, 0.1, 0): 15, (3.250000238418579, 0.1, 0): 32, (7.149999618530273, 0.1, 0): 71}
    for x, s, _ in traps:  # each of them would give the next code
        assert np.rint(F32(x) * (F32(1) / F32(s))) == traps[x, s, 0] + 1
    assert quantize(granularity, list(traps)) == list(traps.values())


@EACH
def test_zero_points_at_the_ends_of_s32_do_not_wrap(granularity):
    top, bottom = 2**31 - 1, -(2**31)
    triples = [(10, 1, top), (-10, 1, bottom), (-(2.0**31), 1, top), (2.0**31, 1, bottom), (0, 1, top)]
    assert quantize(granularity, triples) == [127, -128, -1, 0, 127]


# --- dequantize, fake quantize ---------------------------------------------------------------------------------------


def dequantize(granularity, triples, element="f32", dtype=np.int8):
    q, s, z = zip(*triples, strict=True)
    fields = {"input_element": "s8" if dtype is np.int8 else "u8", "output_element": element}
    scale = np.array(s, F64 if element == "f64" else F32)
    return apply("dequantize", granularity, scale, z, fields=fields, input=np.array(q, dtype))


# --- gradients -------------------------------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("kind", ["quantize", "fake_quantize"])
def test_the_gradient_mask_is_inclusive_and_sees_the_unclamped_code(granularity, kind):
    x = [-129, -128.5, -128, 0, 127, 127.5, 127.4, NAN, INF, -INF, 3e38]
    got = gradient(kind, granularity, [(-3.0, value, 1, 0) for value in x])
    assert_same_bits(got, np.array([0, -3, -3, -3, -3, 0, -3, 0, 0, 0, 0], F32))
    got = gradient(kind, granularity, [(5.0, value, 1, 2) for value in (125, 125.5, 126, -130, -131)])
    assert got.tolist() == [5, 0, 0, 5, 0]  # t + z == q_max passes; rne(125.5) + 2 is 128


@EACH
@pytest.mark.parametrize("kind", ["quantize", "fake_quantize"])
def test_the_gradient_mask_does_not_wrap(granularity, kind):
    rows = [(1.0, 10, 1, 2**31 - 1), (1.0, -10, 1, -(2**31)), (1.0, -(2.0**31), 1, 2**31 - 1), (1.0, 1, 0, 0)]
    assert gradient(kind, granularity, rows).tolist() == [0, 0, 1, 0]


@EACH
def test_quantize_backward_divides_truly(granularity):
    got = gradient("quantize", granularity, [(5.0, 0, 3, 0), (9.0, 0, 5, 0), (9.0, 0, 10, 0)])
    # The reciprocal would give 0x3fd55556, 0x3fe66667, 0x3f666667.
    assert [f"{bits:08x}" for bits in got.view(np.uint32)] == ["3fd55555", "3fe66666", "3f666666"]
    assert gradient("quantize", granularity, [(1.0, 0, 3, 0)], "bf16").astype(F32).tolist() == [0.333984375]


# --- packed codes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "codes", "want"),
    [
        ("s4", [[-8, 7, -1], [1, -2, 3]], [[0x78, 0x0F], [0xE1, 0x03]]),
        ("u4", [[0, 15, 9], [1, 2, 3]], [[0xF0, 0x09], [0x21, 0x03]]),
        ("s4", [[-8, 7], [1, -2]], [[0x78], [0xE1]]),
        ("s4", [[-3], [5]], [[0x0D], [0x05]]),
    ],
)
def test_packed_codes_lie_low_nibble_first_in_whole_bytes(code, codes, want):
    rows, columns = np.shape(codes)
    low, high = {"s4": (-8, 7), "u4": (0, 15)}[code]
    x, one = np.array(codes, F32), np.ones(rows, F32)
    fields = {"n": rows, "d": columns}
    there = dispatcher().describe(
        "quantize_per_token", **fields, q_min=low, q_max=high, input_element="f32", output_element=code
    )
    arrays = {"scale": one, "zero_point": np.zeros(rows, np.int32)}
    packed = run(there, {"input": x, **arrays})["output"]
    assert (packed.dtype, packed.tolist()) == (np.uint8, want)
    back = dispatcher().describe("dequantize_per_token", **fields, input_element=code, output_element="f32")
    # The spare nibble of an odd row is written as zero and never read.
    dirty = packed | (0xA0 if columns % 2 else 0) * (np.arange(packed.shape[1]) == packed.shape[1] - 1).astype(np.uint8)
    for given in (packed, dirty):
        assert_same_bits(run(back, {"input": given, **arrays})["output"], x)


# --- fill ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("element", "value", "want"),
    [
        ("f16", 1 + 2**-11 + 2**-40, 1 + 2**-10),
        ("bf16", 1 + 2**-8 + 2**-40, 1 + 2**-7),  # by way of f32 it would be 1
        ("f32", 1 + 2**-24 + 2**-50, 1 + 2**-23),
        ("f64", 0.1, 0.1),
        ("f32", -0.0, -0.0),
        ("f16", INF, INF),
        ("bf16", NAN, NAN),
        ("s32", -(2**31), -(2**31)),
        ("s8", -128, -128),
        ("u8", 255.0, 255),
    ],
)
def test_fill_rounds_the_value_once(element, value, want):
    problem = dispatcher().describe("fill", numel=5, output_element=element)
    dtype = storage_dtype(ElementKind(element))
    expected = np.full(5, F64(want).astype(F32) if element == "bf16" else want).astype(dtype)
    assert_same_bits(run(problem, {"value": value})["output"], expected)


def test_fill_packs_and_fills_arrays_of_any_rank():
    problem = dispatcher().describe("fill", numel=6, output_element="s4")
    assert run(problem, {"value": -3})["output"].tolist() == [0xDD] * 3
    assert run(problem, {"value": 5, "output": np.zeros((1, 3), np.uint8)})["output"].tolist() == [[0x55] * 3]
    odd = dispatcher().describe("fill", numel=3, output_element="u4")
    assert run(odd, {"value": 15})["output"].tolist() == [0xFF, 0x0F]
    cube = np.zeros((2, 3, 4), F32)
    run(dispatcher().describe("fill", numel=24, output_element="f32"), {"value": 2.5, "output": cube.T})
    assert (cube == 2.5).all()


# --- the seeds' own cases --------------------------------------------------------------------------------------------

GOLDEN = json.loads((TESTS / "data" / "seed_smoke_cases.json").read_text())


def _floats(values):
    return np.array(values, F32)


def _bits(texts, shape):
    return np.array([int(text, 16) for text in texts], np.uint32).view(F32).reshape(shape)


@pytest.mark.parametrize(
    "name", [name for name in GOLDEN if not name.startswith(("quantized_linear", "smooth", "dyn"))]
)
def test_golden_case_of_the_seeds(name):
    # The seeds' masks are strict per token and per group; no case has a code at its bound, so ours agree.
    case = GOLDEN[name]
    kind, _, rest = name.partition("_per_") if "_per_" in name else ("fake_quantize", "", "tensor")
    granularity, backward = f"per_{rest.split('_')[0]}", "backward" in name
    data = _floats(case["x"]) if kind != "dequantize" else np.array(case["q"], np.int8)
    if granularity == "per_channel":
        data = data.reshape(case["shape4"][: case["rank"]])
    sizes = {
        "per_tensor": {"numel": data.size},
        "per_channel": {"shape": data.shape, "axis": case.get("axis")},
        "per_token": dict(zip("nd", data.shape, strict=False)),
        "per_group": {"outer_size": 2, "axis_size": 8, "group_size": 4},
    }[granularity]
    floating = "output_element" if kind == "dequantize" else "input_element"
    fields = {floating: "f32"} | ({} if kind == "dequantize" else {"q_min": case["qmin"], "q_max": case["qmax"]})
    if kind != "fake_quantize" and not backward:
        fields["input_element" if kind == "dequantize" else "output_element"] = "s8"
    problem = dispatcher().describe(_name(kind, granularity, backward=backward), **sizes, **fields)
    scale = case["scale"] if granularity == "per_tensor" else _floats(case["scale"])
    zero_point = case.get("zp", np.zeros(np.shape(scale), np.int32))
    zero_point = zero_point if granularity == "per_tensor" else np.array(zero_point, np.int32)
    arrays = {"input": data, "scale": scale, "zero_point": zero_point}
    if backward:
        arrays["d_output"] = _floats(case["dy"]).reshape(data.shape)
    (got,) = run(problem, arrays).values()
    bits = next((case[key] for key in ("dx_bits", "y_bits", "x_bits") if key in case), None)
    want = np.array(case["q"], np.int8).reshape(data.shape) if bits is None else _bits(bits, data.shape)
    assert_same_bits(got, want, name)
