"""Hopper's linear kernels run on the CPU, from their unmodified sources, against the reference bit for bit.

`harness/hopper.h` stands for the instructions of sm_90a. Blocks run one after another, so configurations with clusters
of several blocks, or whose blocks exchange sums, are left out; they are the same source.
"""

from __future__ import annotations

import shutil
from itertools import product

import numpy as np
import pytest
from harness import emulator
from harness.agreement import assert_agrees
from harness.binding import Placed, launch_of, place, run_steps
from support import arguments_of, draw, fresh, run, sampled

from skuda.dispatch.device import KNOWN_DEVICES
from skuda.kernels.catalog import built_in_ops
from skuda.kernels.linear import (
    QuantizedLinearDescriptor,
    ScaledLinearDescriptor,
    SmoothQuantLinearDescriptor,
    hopper,
    warpgroup,
)
from skuda.registry import ElementKind
from skuda.registry.descriptor import Role
from skuda.registry.op import Case
from skuda.registry.vocabulary import EpilogueKind

pytestmark = pytest.mark.skipif(shutil.which(emulator.COMPILER) is None, reason="no C++ compiler")

# Few processors, so that blocks take several tiles.
CARD = KNOWN_DEVICES["h200"].model_copy(update={"sm_count": 3})
OPS = {op.name: op for op in built_in_ops()}
ALONE = [str(tile) for tile in warpgroup.TILES if tile.blocks == 1 and not tile.divides]
SHIFTS = tuple(product((False, True), repeat=2))
OUTPUTS = ("f32", "f16", "bf16", "s8", "u8")


def a_problem(op, shifts, rng, *, fewest, most):
    """Draw a problem with `fewest` to `most` rows; `shifts`: whether activation and weight have zero points."""

    def one_of(*values):
        return values[rng.integers(len(values))]

    m, n, k = int(rng.integers(fewest, most, endpoint=True)), int(rng.integers(1, 300)), 16 * int(rng.integers(1, 60))
    activation, weight = shifts
    code = one_of(ElementKind.S8, ElementKind.U8)
    fields = {
        "m": m,
        "k": k,
        "weight_element": one_of("s8", "u8"),
        "output_element": one_of(*OUTPUTS),
        "epilogue": one_of(*EpilogueKind),
        "has_weight_zero_point": weight,
    }
    if op == "quantized_linear":
        bounds = {"q_min": -127 if code is ElementKind.S8 else 0, "q_max": 127}
        return QuantizedLinearDescriptor(c_out=n, activation_element=one_of("f32", "f16", "bf16"), **bounds, **fields)
    fields |= {"n": n, "activation_element": code}
    if op == "smoothquant_linear":
        low, high = code.integer_range
        zero_point = (one_of(low, int(rng.integers(low, high))) or high) if activation else 0
        scale = float(rng.uniform(-0.1, 0.1))
        return SmoothQuantLinearDescriptor(act_scale=scale, act_zero_point=zero_point, **fields)
    if not any(shifts) and rng.random() < 0.3:
        return ScaledLinearDescriptor(**fields | {"output_element": "s32", "epilogue": EpilogueKind.IDENTITY})
    scope = one_of("token", "tensor")
    return ScaledLinearDescriptor(act_scale_scope=scope, has_act_zero_point=activation, **fields)


def sku_of(problem, variant):
    return next(
        sku
        for sku in OPS[problem.op].skus
        if sku.key == problem.key() and sku.variant == variant and not any(c.check(problem) for c in sku.constraints)
    )


def check(problem, variant, rng, *choice, values="", change=None):
    """Run a problem with `values` and layouts of any kind and compare."""
    sku, op = sku_of(problem, variant), OPS[problem.op]
    drawn = draw(op, Case(problem, values or rng.choice(["special", "normal"])), rng)
    launch = launch_of(sku, problem, CARD, *choice)
    unit = emulator.Unit.of(sku)
    library = emulator.load((unit.with_change(*change) if change else unit).configured(launch.flags))
    placed = place(problem, launch, drawn.shapes, drawn.inputs, rng)
    run_steps(library, launch, problem, placed, drawn.shapes)
    want = run(problem, drawn.inputs)
    for argument in arguments_of(problem, Role.OUTPUT):
        assert_agrees(placed[argument.name].array, want[argument.name], sku, f"{problem!r} {choice}")
    written = {argument.name for argument in arguments_of(problem, Role.OUTPUT, Role.SCRATCH)}
    for name, value in placed.items():
        if isinstance(value, Placed):
            value.assert_only_elements_written()
            if name not in written:
                value.assert_unchanged()


def all_of(*kinds):
    """Cross `kinds` with the ops and zero points that they may have."""
    ops = ("quantized_linear", "scaled_linear", "smoothquant_linear")
    crossed = product(ops, SHIFTS, *kinds)
    return [pytest.param(*each) for each in crossed if each[0] != "quantized_linear" or not each[1][0]]


@pytest.mark.parametrize(("op", "shifts"), all_of())
def test_the_streamed_kernel_equals_the_reference(op, shifts):
    rng = fresh(op, shifts)
    # One or two short rows are quantized by the product itself.
    check(a_problem(op, shifts, rng, fewest=1, most=2 if rng.random() < 0.4 else 32), "streamed", rng)


@pytest.mark.parametrize(
    ("op", "shifts", "tile"), sampled(all_of(ALONE), each=lambda op, shifts, tile: (op, shifts), key="warpgroup")
)
def test_the_warpgroup_kernel_equals_the_reference(op, shifts, tile):
    rng = fresh(op, shifts, tile)
    problem = a_problem(op, shifts, rng, fewest=192 if shifts[0] else 1, most=320)
    if next(t for t in warpgroup.TILES if str(t) == tile).shared(shifts) > hopper.MOST_SHARED:
        assert tile not in {choice.name for choice in warpgroup.launch(problem, CARD).choices}
    else:
        check(problem, "warpgroup", rng, tile)


WRONG = {
    "zero points of one column": ("warpgroup", 3, "A_SHIFTED) * TILE_N + c + thread]", "A_SHIFTED) * TILE_N]"),
    "no sums of the weight": ("warpgroup", 1, "shifts.w_sums[at]", "0"),
    "rows without their zero points": ("warpgroup", 3, "- (Sum)shifts.k * zero_point", ""),
    "the last unit not added up": ("warpgroup", 1, "first + 32 * i < units", "first + 32 * i + 1 < units"),
    "sums cut to 32 bits": ("warpgroup", 3, "return acc - (s64)za * w;", "return (s32)((u32)acc - (u32)za * (u32)w);"),
    "128 bits cut to 64": ("streamed", 3, "a == (s32)a ?", "true ?"),
    "zero points not staged": ("streamed", 1, "if (A_SHIFTED) za =", "if (false) za ="),
    "what lies beyond K added up": ("streamed", 2, "if (W_SHIFTED) {  // beyond", "if (false) {  // beyond"),
}


@pytest.mark.skipif(emulator.SANITIZED, reason="sanitizers end the process where this expects a message")
@pytest.mark.parametrize(
    ("variant", "shifts", "before", "after"), sampled([pytest.param(*each, id=name) for name, each in WRONG.items()], 2)
)
def test_a_wrong_kernel_is_caught(variant, shifts, before, after):
    rng = fresh(before)
    pair = (bool(shifts & 1), bool(shifts & 2))
    n, k = 40, 336
    m = 200 if variant == "warpgroup" else 2 if "beyond" in before else 30
    fields = {"m": m, "k": k, "output_element": "f32", "has_weight_zero_point": pair[1]}
    if "beyond" in before:
        problem = QuantizedLinearDescriptor(c_out=n, activation_element="f32", q_min=-127, q_max=127, **fields)
    else:
        problem = ScaledLinearDescriptor(n=n, has_act_zero_point=pair[0], **fields)

    def check_all():
        for _ in range(10):  # not all values show it
            check(problem, variant, rng, values="special", change=(before, after))

    with pytest.raises(AssertionError, match="differ"):
        check_all()


def test_products_take_as_long_a_k_as_the_kernels_do():
    """At the largest K, sums and zero points at the ends of their ranges: nothing wraps."""
    rng = fresh("longest")
    fields = {"activation_element": "u8", "weight_element": "u8", "output_element": "f32"}
    limit = next(c.maximum for c in hopper.constraints(ElementKind.U8) if c.kind == "between") // 16 * 16
    for variant, m in (("streamed", 3), ("warpgroup", 192)):
        problem = SmoothQuantLinearDescriptor(m=m, n=8, k=limit, act_scale=1.0, act_zero_point=255, **fields)
        sku = sku_of(problem, variant)
        launch = launch_of(sku, problem, CARD, *([ALONE[-1]] if variant == "warpgroup" else []))
        inputs = {
            "act_q": np.zeros((m, limit), np.uint8),
            "weight_q": np.full((8, limit), 255, np.uint8),
            "weight_scale": np.ones(8, np.float32),
        }
        shapes = {argument.name: argument.shape for argument in problem.arguments()}
        placed = place(problem, launch, shapes, inputs, rng)
        run_steps(emulator.load(emulator.Unit.of(sku).configured(launch.flags)), launch, problem, placed, shapes)
        assert (placed["output"].array == np.float32(-(limit * 255 * 255))).all()
