"""The traps of the dynamic range and of the linear layers, with the expectation written by hand."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from paths import TESTS
from support import assert_same_bits, dispatcher, fresh, run

from skuda.dispatch import Dispatcher
from skuda.kernels.catalog import built_in_registry
from skuda.kernels.dtypes import storage_dtype
from skuda.registry.elements import ElementKind

NAN, INF = math.nan, math.inf
F32 = np.float32
SCOPES = ({"scope": "tensor"}, {"scope": "channel", "axis": 1}, {"scope": "channel", "axis": 0}, {"scope": "token"})
SCOPES += ({"scope": "group", "group_size": 4},)


def dynamic(rows, low=-128, high=127, *, mode="symmetric", element="f32", code=None, **scope):
    """Quantize rows; return codes, scales and zero points."""
    data = np.asarray(rows, storage_dtype(ElementKind(element)))
    problem = dispatcher().describe(
        "dynamic_range",
        n=data.shape[0],
        d=data.shape[1],
        q_min=low,
        q_max=high,
        mode=mode,
        input_element=element,
        output_element=code or ("s8" if low < 0 else "u8"),
        **(scope or {"scope": "token"}),
    )
    found = run(problem, {"input": data})
    return found["output"], found["scale_out"], found["zero_point_out"]


# --- dynamic range ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", SCOPES, ids=lambda scope: "-".join(map(str, scope.values())))
def test_an_asymmetric_segment_maps_its_range_with_zero_included(scope):
    segment = [-1.0, 3.0, 0.0, 0.51]
    data = np.array(segment)[:, None] if scope.get("axis") == 1 else np.array([segment])
    codes, scale, zero_point = dynamic(data, 0, 255, mode="asymmetric", **scope)
    # s = 4 / 255; -1 / s is -63.75; 0.51 / s is 32.5125.
    assert_same_bits(scale.reshape(-1), np.array([F32(4) / F32(255)]))
    assert zero_point.reshape(-1).tolist() == [64]
    assert codes.reshape(-1).tolist() == [0, 255, 64, 97]


def test_an_asymmetric_zero_point_stays_within_the_bounds():
    assert dynamic([[-4, -1]], 0, 3, mode="asymmetric")[2].tolist() == [3]
    assert dynamic([[4, 1]], 0, 3, mode="asymmetric")[2].tolist() == [0]
    codes, _, zero_point = dynamic([[-5, -5]], -8, 7, mode="asymmetric")
    assert (codes.tolist(), zero_point.tolist()) == ([[-8, -8]], [7])
    # 382 / 255 of the least number rounds to 1, so lo / s is -382.
    codes, scale, zero_point = dynamic([[-382 * 2.0**-149, 0]], 0, 255, mode="asymmetric")
    assert (scale.tolist(), zero_point.tolist(), codes.tolist()) == ([2.0**-149], [255], [[0, 255]])


def test_an_asymmetric_zero_point_comes_from_true_division():
    # lo times 1 / s gives the neighbour each time.
    assert dynamic([[-5, 5], [-7, 7], [-9, 1]], 0, 255, mode="asymmetric")[2].tolist() == [127, 128, 229]


def test_the_codes_come_from_true_division_by_the_rounded_scale():
    # x times 1 / s, and x times 127 / peak, both give one less.
    x = [0.04330708459019661, 0.05905511602759361, 0.6889763474464417, 0.9409448504447937]
    assert dynamic([[1.0, *x]], -127, 127)[0].tolist() == [[127, 6, 8, 88, 120]]


@pytest.mark.parametrize("mode", ["symmetric", "asymmetric"])
def test_empty_segments_have_scale_1_and_zero_point_0(mode):
    shapes = {"tensor": (0, 4), "channel": (0, 4), "token": (3, 0)}
    for name, shape in shapes.items():
        scope = {"scope": name} | ({"axis": 1} if name == "channel" else {})
        codes, scale, zero_point = dynamic(np.zeros(shape), -8, 7, mode=mode, **scope)
        assert codes.shape == shape
        count = {"tensor": 1, "channel": 4, "token": 3}[name]
        assert (scale.tolist(), zero_point.tolist()) == ([1.0] * count, [0] * count)
    codes, scale, zero_point = dynamic(np.zeros((2, 0)), mode=mode, scope="group", group_size=4)
    assert (codes.shape, scale.shape, zero_point.shape) == ((2, 0), (2, 0), (2, 0))


# --- linear ----------------------------------------------------------------------------------------------------------


def static(act, weight, *, act_scale=1.0, scale=None, out="f32", epilogue="identity", act_zero_point=0, **arrays):
    """Run smoothquant_linear over codes."""
    act, weight = np.atleast_2d(act), np.atleast_2d(weight)
    problem = dispatcher().describe(
        "smoothquant_linear",
        m=act.shape[0],
        n=weight.shape[0],
        k=act.shape[1],
        act_scale=act_scale,
        activation_element="u8" if act.dtype == np.uint8 else "s8",
        weight_element="u8" if weight.dtype == np.uint8 else "s8",
        output_element=out,
        epilogue=epilogue,
        act_zero_point=act_zero_point,
        has_weight_zero_point="weight_zero_point" in arrays,
    )
    scale = np.ones(weight.shape[0], F32) if scale is None else np.asarray(scale)
    return run(problem, {"act_q": act, "weight_q": weight, "weight_scale": scale, **arrays})["output"]


def bits_of(array):
    return [f"{bits:08x}" for bits in array.view(np.uint32).reshape(-1)]


def test_the_product_is_sa_sw_first_and_then_the_accumulator():
    # sa (sw acc) and (sa acc) sw both give the neighbour: 3ff1eb85, 401ccccd, 40cbd709.
    for acc, sa, sw, want in ((9, 0.3, 0.7, "3ff1eb86"), (5, 0.7, 0.7, "401ccccc"), (13, 0.7, 0.7, "40cbd70a")):
        scale = np.array([sw], F32)
        assert bits_of(static(np.int8([acc]), np.int8([1]), act_scale=sa, scale=scale)) == [want]


@pytest.mark.parametrize("shape", [(1, 1), (3, 2)])
def test_131072_products_of_minus_128_do_not_wrap(shape):
    k = 131_072
    act, weight = np.full((shape[0], k), -128, np.int8), np.full((shape[1], k), -128, np.int8)
    assert static(act, weight).tolist() == np.full(shape, 2.0**31).tolist()
    assert static(act, weight, out="f64", scale=np.ones(shape[1])).tolist() == np.full(shape, 2.0**31).tolist()
    act = np.full((1, k), 255, np.uint8)
    assert static(act, np.full((1, k), 255, np.uint8), out="f64").tolist() == [[255.0 * 255 * k]]


def test_zero_points_do_not_wrap_the_sum_at_a_large_k():
    k = 2**24 + 2**18  # 255 * 2^31 * k is more than 2^63
    act, weight = np.full((1, k), 255, np.uint8), np.zeros((1, k), np.int8)
    got = static(act, weight, out="f64", weight_zero_point=np.array([-(2**31)], np.int32))
    assert got.tolist() == [[255.0 * k * 2**31]]


def test_the_bias_is_added_in_c_after_the_product_is_rounded():
    # 1064 products and 9 make 16777217, which rounds to 16777216; then + 1 is a tie, to even.
    act = np.int8([[127] * 1064 + [9]])
    weight = np.int8([[127] * 1040 + [1] * 25])
    assert static(act, weight, out="f64").tolist() == [[16777217.0]]
    assert static(act, weight, epilogue="bias", bias=F32([1])).tolist() == [[16777216.0]]
    assert static(act, weight, epilogue="bias", bias=F32([1.5])).tolist() == [[16777218.0]]


def test_gelu_is_the_erf_form_and_silu_the_logistic_one():
    act, weight, one = np.int8([[1]]), np.int8([[0]] * 4), np.ones(4)
    bias = np.array([1.0, -3.0, 0.0, -INF])
    gelu = static(act, weight, scale=one, out="f64", epilogue="bias_gelu", bias=bias)[0]
    # The tanh approximation gives 0.84119 and -0.00364.
    np.testing.assert_allclose(gelu[:2], [0.8413447460685429, -0.00404969409489028358], rtol=5e-16)
    silu = static(act, weight, scale=one, out="f64", epilogue="bias_silu", bias=bias)[0]
    np.testing.assert_allclose(silu[:2], [0.7310585786300049, -0.14227761953270035], rtol=5e-16)
    assert gelu[2:].tolist() == silu[2:].tolist() == [0, 0]


def test_requantization_divides_rounds_and_then_adds_the_zero_point():
    act, weight = np.int8([[1]]), np.int8([[1], [3], [-1], [100], [0]])
    given = {"scale": F32([0.5, 0.5, 0.5, 10, NAN]), "output_scale": 1.0, "output_zero_point": 1}
    assert static(act, weight, out="s8", **given).tolist() == [[1, 3, 1, 127, 1]]
    assert static(act, weight, out="u8", **given).tolist() == [[1, 3, 1, 255, 1]]
    # True division, as the quantize traps of the same numbers: the reciprocal gives one more.
    bias = F32([1.5499999523162842, 3.250000238418579, 7.149999618530273, NAN, -INF])
    given = {"output_scale": 0.1, "output_zero_point": 0, "epilogue": "bias", "bias": bias}
    assert static(act, weight * np.int8(0), out="s8", **given).tolist() == [[15, 32, 71, 0, -128]]


@pytest.mark.parametrize(("out", "want"), [("bf16", 1 + 2**-7), ("f16", 1 + 2**-10)])
def test_an_f64_result_is_rounded_to_a_half_format_once(out, want):
    # A little more than the middle between 1 and its neighbour; by way of f32 it would be the middle, and then 1.
    problem = dispatcher().describe(
        "quantized_linear", m=1, c_out=1, k=1, q_min=-1, q_max=1, activation_element="f64", output_element=out
    )
    value = (1 + want) / 2 + 2**-40
    arrays = {"activation": np.array([[value]]), "weight_q": np.int8([[1]]), "weight_scale": np.ones(1)}
    assert float(run(problem, arrays)["output"][0, 0]) == want


@pytest.mark.parametrize("order", [(0.0, -0.0), (-0.0, 0.0)])
def test_a_static_scale_of_minus_zero_is_not_mistaken_for_plus_zero(order):
    # Whichever comes first must not lend the other its cached plan.
    fresh, codes = Dispatcher(built_in_registry()), np.ones((1, 1), np.int8)
    for act_scale in order:
        problem = fresh.describe("smoothquant_linear", m=1, n=1, k=1, act_scale=act_scale, output_element="f32")
        got = fresh.run(problem, act_q=codes, weight_q=codes, weight_scale=np.ones(1, F32))
        assert_same_bits(got, np.array([[act_scale]], F32), f"act_scale {act_scale}")


# --- linear with given scales ----------------------------------------------------------------------------------------


def given(act, weight, *, out="f32", epilogue="identity", **arrays):
    """Run scaled_linear over codes; a scale or zero point of one element serves all rows."""
    act, weight = np.atleast_2d(act), np.atleast_2d(weight)
    if out != "s32":
        arrays = {"act_scale": np.ones(1, F32), "weight_scale": np.ones(len(weight), F32)} | arrays
    problem = dispatcher().describe(
        "scaled_linear",
        m=act.shape[0],
        n=weight.shape[0],
        k=act.shape[1],
        activation_element="u8" if act.dtype == np.uint8 else "s8",
        weight_element="u8" if weight.dtype == np.uint8 else "s8",
        output_element=out,
        epilogue=epilogue,
        act_scale_scope="tensor" if len(arrays.get("act_scale", act)) == 1 and out != "s32" else "token",
        has_act_zero_point="act_zero_point" in arrays,
        has_weight_zero_point="weight_zero_point" in arrays,
    )
    return run(problem, {"act_q": act, "weight_q": weight, **arrays})["output"]


@pytest.mark.parametrize("narrow", ["f16", "bf16"])
def test_narrower_scales_are_widened(narrow):
    rng = fresh("narrow scales", narrow)
    scales = rng.standard_normal(7).astype(storage_dtype(ElementKind(narrow)))
    act, weight = rng.integers(-128, 128, (7, 9), np.int8), rng.integers(-128, 128, (4, 9), np.int8)
    assert_same_bits(given(act, weight, act_scale=scales), given(act, weight, act_scale=scales.astype(F32)))


def test_zero_points_at_the_ends_of_s32_on_both_sides_are_exact():
    # (10 + 2^31)(3 - 2^31 + 1) + .. is more than 2^63 from the second term on.
    k = 1100
    rng = fresh("far zero points")
    act, weight = rng.integers(-128, 128, (3, k), np.int8), rng.integers(0, 256, (4, k), np.uint8)
    za, zw = np.int32([-(2**31), 2**31 - 1, 5]), np.int32([-(2**31), 2**31 - 1, 0, -70_000])
    exact = (act.astype(object) - za[:, None].astype(object)) @ (weight.astype(object) - zw[:, None].astype(object)).T
    assert abs(exact).max() > 2**64
    shifts = {"act_zero_point": za, "weight_zero_point": zw, "act_scale": np.ones(3)}
    got = given(act, weight, out="f64", weight_scale=np.ones(4), **shifts)
    assert got.tolist() == [[float(each) for each in row] for row in exact]


@pytest.mark.parametrize(
    ("act", "weight", "k"),
    [
        (np.int8(-128), np.int8(-128), 131_071),
        (np.uint8(255), np.int8(-128), 65_793),
        (np.int8(-128), np.uint8(255), 65_793),
        (np.uint8(255), np.uint8(255), 33_025),
    ],
)
def test_sums_reach_the_end_of_s32_at_the_longest_k(act, weight, k):
    got = given(np.full((2, k), act), np.full((3, k), weight), out="s32")
    want = int(act) * int(weight) * k
    assert 2**31 - 2**16 < abs(want) < 2**31
    assert_same_bits(got, np.full((2, 3), want, np.int32))


def test_codes_of_16_bits_leave_out_the_product_of_two_low_halves():
    """An element 256 times below its row's largest has a low half alone: it counts beside 8 bits, and not beside 16."""
    act = np.int8([[127, 0, 127, 100]])  # 32639 and 100
    for weight, want in (
        (np.int8([[127, 0, 127, 90]]), 65_536 * 127 * 127 + 2 * 256 * 127 * 127),
        (np.int8([[127, 90]]), 32_639 * 127 + 9_000),
    ):
        element = "s16" if weight.shape[1] == 4 else "s8"
        sizes = {"m": 1, "n": 1, "k": 2, "activation_element": "s16", "weight_element": element}
        problem = dispatcher().describe("scaled_linear", output_element="s64", **sizes)
        assert run(problem, {"act_q": act, "weight_q": weight})["output"].tolist() == [[want]]
    assert 0 <= 32_639**2 + 100 * 90 - (65_536 * 127 * 127 + 2 * 256 * 127 * 127) <= 16_384 * 2


# --- the seeds' own cases --------------------------------------------------------------------------------------------

GOLDEN = json.loads((TESTS / "data" / "seed_smoke_cases.json").read_text())


def _golden_bits(texts, shape=(-1,)):
    return np.array([int(text, 16) for text in texts], np.uint32).view(F32).reshape(shape)


def test_golden_dynamic_range():
    case = GOLDEN["dynamic_range_f32_s8_token_sym"]
    codes, scale, zero_point = dynamic(case["x"], case["qmin"], case["qmax"])
    assert_same_bits(scale, _golden_bits(case["scale_bits"]))
    assert (codes.tolist(), zero_point.tolist()) == (case["q"], [0, 0])


def test_golden_quantized_linear():
    case = GOLDEN["quantized_linear_f32_s8"]
    weight, scale, _ = dynamic(case["weight_fp"], case["qmin"], case["qmax"])
    assert weight.tolist() == case["weight_q"]
    assert_same_bits(scale, _golden_bits(case["weight_scale_bits"]))
    problem = dispatcher().describe(
        "quantized_linear", m=2, c_out=3, k=8, q_min=case["qmin"], q_max=case["qmax"], activation_element="f32"
    )
    scratch = {"act_q_scratch": np.empty((2, 8), np.int8), "act_scale_scratch": np.empty(2, F32)}
    given = {"activation": np.array(case["activation"], F32), "weight_q": weight, "weight_scale": scale}
    got = run(problem, given | scratch)["output"]
    assert scratch["act_q_scratch"].tolist() == case["act_q"]
    assert_same_bits(scratch["act_scale_scratch"], _golden_bits(case["act_scale_bits"]))
    assert_same_bits(got, _golden_bits(case["y_bits"], (2, 3)))
    assert static(np.int8(case["act_q"]), weight, out="f64").tolist() == case["acc"]


def test_golden_smoothquant_linear():
    case = GOLDEN["smoothquant_linear_f32_s8"]
    smooth = np.array(case["smooth"], F32)
    act, act_scale, _ = dynamic(np.array(case["activation_fp"], F32) / smooth, -127, 127, scope="tensor")
    assert_same_bits(act_scale, _golden_bits(case["act_scale_bits"]))
    weight, scale, _ = dynamic(np.array(case["weight_fp"], F32) * smooth, -127, 127, scope="channel", axis=0)
    assert_same_bits(scale, _golden_bits(case["weight_scale_bits"]))
    assert (act.tolist(), weight.tolist()) == (case["act_q"], case["weight_q"])
    got = static(act, weight, act_scale=float(act_scale[0]), scale=scale)
    assert_same_bits(got, _golden_bits(case["y_bits"], (2, 3)))
    assert static(act, weight, out="f64").tolist() == case["acc"]
