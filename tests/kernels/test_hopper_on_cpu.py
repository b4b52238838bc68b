"""Hopper's linear kernels run on the CPU, from their unmodified sources, against the reference bit for bit.

`harness/hopper.h` stands for the instructions of sm_90a. Clusters run one after another, so configurations in which
they exchange sums are left out; they are the same source.
"""

from __future__ import annotations

import shutil
from itertools import product

import numpy as np
import pytest
from harness import emulator
from harness.binding import ran
from products import SHIFTS, a_problem, wide_problem
from support import arguments_of, assert_same_bits, draw, fresh, run, sampled

from skuda.kernels.catalog import built_in_ops
from skuda.kernels.linear import (
    QuantizedLinearDescriptor,
    ScaledLinearDescriptor,
    SmoothQuantLinearDescriptor,
    hopper,
    packed,
    packed_direct,
    packed_streamed,
    streamed,
    warpgroup,
)
from skuda.kernels.linear.problem import OUTPUTS
from skuda.kernels.linear.streamed import configurations
from skuda.kernels.linear.warpgroup import TILES
from skuda.registry import ElementKind
from skuda.registry.descriptor import Role
from skuda.registry.device import KNOWN_DEVICES
from skuda.registry.op import Case

pytestmark = pytest.mark.skipif(shutil.which(emulator.COMPILER) is None, reason="no C++ compiler")

# Few processors, so that blocks take several tiles.
CARD = KNOWN_DEVICES["h200"].model_copy(update={"sm_count": 3})
OPS = {op.name: op for op in built_in_ops()}
OPS_OF_LAYERS = ("quantized_linear", "scaled_linear", "smoothquant_linear")
UNDIVIDED = [str(tile) for tile in TILES if not tile.stream_k]


def sku_of(problem, variant):
    return next(
        sku
        for sku in OPS[problem.op].skus
        if sku.key == problem.key() and sku.variant == variant and not any(c.check(problem) for c in sku.constraints)
    )


def check(problem, variant, rng, *choice, values="", card=CARD, **inputs):
    """Run a problem with `values`, but for `inputs`, and layouts of any kind and compare."""
    sku, op = sku_of(problem, variant), OPS[problem.op]
    drawn = draw(op, Case(problem, values or rng.choice(["special", "normal"])), rng)
    drawn.inputs.update(inputs)
    placed, want = ran(sku, problem, drawn.inputs, card, rng, *choice), run(problem, drawn.inputs)
    for argument in arguments_of(problem, Role.OUTPUT):
        assert_same_bits(placed[argument.name].array, want[argument.name], f"{problem!r} {choice}")


def all_of(*kinds):
    """Cross `kinds` with the ops and zero points that they may have."""
    crossed = product(OPS_OF_LAYERS, SHIFTS, *kinds)
    return [pytest.param(*each) for each in crossed if each[0] != "quantized_linear" or not each[1][0]]


def packed_of(sizes):
    """Cross the ops and whether the activation has zero points with `sizes`."""
    crossed = product(OPS_OF_LAYERS, (False, True), sizes)
    return [pytest.param(op, shifted, *each) for op, shifted, each in crossed if op != OPS_OF_LAYERS[0] or not shifted]


def named(problem, way="", rule=streamed, card=CARD):
    """Return the configurations of a problem whose names contain `way`."""
    return [choice.name for choice in rule.launch(problem, card).choices if way in choice.name]


MOST_TOKENS = (2, 8, 16, 32, 128)
"""Up to 2, the product itself quantizes short rows."""


@pytest.mark.parametrize(
    ("op", "shifts", "most"), sampled(all_of(MOST_TOKENS), 2, each=lambda op, shifts, most: op, key="streamed")
)
def test_the_streamed_kernel_equals_the_reference(op, shifts, most):
    rng = fresh(op, shifts, most)
    problem = a_problem(op, shifts, rng, fewest=1 if most < 128 else 33, most=most)
    check(problem, "streamed", rng, rng.choice(named(problem)))


WAYS = tuple(way for tokens in (1, 16, 32) for way in configurations(tokens))


@pytest.mark.parametrize(
    ("way", "shifts"),
    sampled([pytest.param(*each) for each in product(WAYS, SHIFTS)], 6, key="straight"),
)
def test_weights_straight_to_registers_equal_the_reference(way, shifts):
    rng = fresh(str(way), shifts)
    op = rng.choice(["scaled_linear", "smoothquant_linear", *([] if shifts[0] else ["quantized_linear"])])
    problem = a_problem(op, shifts, rng, fewest=3 if way.tokens == 8 else way.tokens // 2 + 1, most=way.tokens)
    check(problem, "streamed", rng, *(name for name in named(problem) if name == str(way)))


@pytest.mark.parametrize(
    ("op", "shifts", "tile"), sampled(all_of(UNDIVIDED), 2, each=lambda op, shifts, tile: op, key="warpgroup")
)
def test_the_warpgroup_kernel_equals_the_reference(op, shifts, tile):
    rng = fresh(op, shifts, tile)
    problem = a_problem(op, shifts, rng, fewest=192 if shifts[0] else 1, most=320)
    if next(t for t in TILES if str(t) == tile).shared(shifts) > hopper.MAX_SHARED:
        assert tile not in {choice.name for choice in warpgroup.launch(problem, CARD).choices}
    else:
        check(problem, "warpgroup", rng, tile)


@pytest.mark.parametrize(
    ("op", "shifted", "size"),
    sampled(packed_of((size,) for size in packed.GROUP_SIZES), each=lambda op, shifted, size: shifted, key="packed"),
)
def test_a_packed_weight_is_unpacked_in_front(op, shifted, size):
    rng = fresh(op, size, shifted)
    problem = a_problem(op, (shifted, False), rng, fewest=192 if shifted else 3, most=320)
    problem = problem.model_copy(update={"weight_element": ElementKind.S4, "group_size": size})
    check(problem, "expanded_warpgroup", rng, UNDIVIDED[-1])


GROUPS = {"weight_element": ElementKind.S4, "group_size": 64}
SIZES_READ = [(8, 32), (16, 64), (32, 128), (64, 32), (130, 64), (260, 128)]


@pytest.mark.parametrize(
    ("op", "shifted", "most", "size"),
    sampled(packed_of(SIZES_READ), 2, each=lambda op, shifted, *_: shifted, key="packed-read"),
)
def test_kernels_that_read_packed_weights_equal_the_reference(op, shifted, most, size):
    rng = fresh(op, shifted, most, size)
    problem = a_problem(op, (shifted, False), rng, fewest=most // 2 + 1, most=most)
    problem = problem.model_copy(update={"weight_element": ElementKind.S4, "group_size": size})
    for variant, rule in (("packed", packed_direct), ("packed_streamed", packed_streamed)):
        if variant == "packed_streamed" or most <= packed_direct.MOST_TOKENS:
            check(problem, variant, rng, rng.choice(named(problem, rule=rule)))


@pytest.mark.parametrize(
    ("rule", "most", "weight", "split"),
    [
        *((streamed, 30, {}, f"split-K by {n}") for n in (2, 4)),
        *((packed_streamed, most, GROUPS, "split-K by 2") for most in (64, 260)),
    ],
)
def test_blocks_of_a_cluster_add_their_sums(rule, most, weight, split):
    rng, card = fresh(rule.__name__, most, split), KNOWN_DEVICES["h200"].model_copy(update={"sm_count": 48})
    problem = a_problem(rng.choice(OPS_OF_LAYERS), (False, False), rng, fewest=most // 2, most=most)
    problem = problem.model_copy(update={"k": 2048 + 16 * int(rng.integers(40)), **weight})
    check(problem, rule.STRATEGY.name, rng, rng.choice(named(problem, split, rule, card)), card=card)


WIDE = [
    pytest.param(op, *kernel)
    for op in OPS_OF_LAYERS
    for kernel in (
        *(("streamed", streamed, weight, most) for weight in ("s8", "s16") for most in (8, 16, 32)),
        *(("packed_streamed", packed_streamed, "s4", most) for most in (8, 60, 130)),
        *(("warpgroup", warpgroup, weight, 220) for weight in ("s8", "s16")),
        ("expanded_warpgroup", warpgroup, "s4", 130),
    )
]


@pytest.mark.parametrize(
    ("op", "variant", "rule", "weight", "most"), sampled(WIDE, 2, each=lambda op, variant, *_: variant)
)
def test_codes_of_16_bits_give_the_bits_of_the_reference(op, variant, rule, weight, most):
    rng = fresh(op, variant, weight, most)
    problem = wide_problem(op, weight, rng, fewest=most // 2 + 1, most=most)
    choices = rule.launch(problem.on_codes if "expanded" in variant else problem, CARD).choices
    names = [choice.name for choice in choices if "stream-K" not in choice.name]
    check(problem, variant, rng, rng.choice(names), values=rng.choice(["extreme", "special", "normal"]))


EXTREMES = {
    "warpgroup": ("warpgroup", "", {"m": 200}),
    "shared": ("streamed", "shared", {"m": 30}),
    "registers": ("streamed", "registers", {"m": 30}),
    "ordered": ("streamed", "shared", {"m": 30, "n": 200, "k": 1200}),  # blocks begin at different parts of K
    "fused": ("streamed", "", {"m": 2}),  # the product quantizes its activation
}
ZERO_POINTS = {"none": (False, False), "activation": (True, False), "weight": (False, True), "both": (True, True)}


def extreme(way, shifts):
    """Return kernel, configurations and a problem, whose results are f32 so that no error is rounded away."""
    variant, through, sizes = EXTREMES[way]
    m, n, k = (sizes.get(name, size) for name, size in (("m", 0), ("n", 40), ("k", 336)))
    fields = {"m": m, "k": k, "output_element": "f32", "has_weight_zero_point": shifts[1]}
    if way == "fused":
        problem = QuantizedLinearDescriptor(c_out=n, activation_element="f32", q_min=-127, q_max=127, **fields)
    else:
        problem = ScaledLinearDescriptor(n=n, has_act_zero_point=shifts[0], **fields)
    return variant, named(problem, through)[:1] if variant == "streamed" else [], problem


@pytest.mark.parametrize(
    ("way", "shifts"),
    sampled(
        [
            pytest.param(way, shifts, id=f"{way}-{name}")
            for way, (name, shifts) in product(EXTREMES, ZERO_POINTS.items())
            if way != "fused" or not shifts[0]
        ],
        each=lambda way, shifts: way,
    ),
)
def test_extreme_values_give_the_bits_of_the_reference(way, shifts):
    """Not each draw of special values shows every fault."""
    variant, choice, problem = extreme(way, shifts)
    rng = fresh(way, shifts)
    for _ in range(4):
        check(problem, variant, rng, *choice, values="special")


CURVED = {
    "warpgroup": ("warpgroup", "", 70),
    "shared": ("streamed", "shared", 30),
    "registers": ("streamed", "registers", 30),
    "mma": ("mma", "", 70),
    "plain": ("plain", "", 70),
}
ENDS = np.array(
    [np.nan, np.inf, -np.inf, 0, -0.0, 1e-45, -1e-45, 1e-38, -3e-39, 3e38, -3e38, 257, 2049, -14, -87, -103]
)


@pytest.mark.parametrize(
    ("way", "epilogue", "output"),
    sampled(
        [
            pytest.param(way, epilogue, output)
            for way, epilogue, output in product(CURVED, ("bias_gelu", "bias_silu"), OUTPUTS)
            if way == "plain" or output is not ElementKind.F64
        ],
        2,
        each=lambda way, epilogue, output: way,
    ),
)
def test_gelu_and_silu_are_the_reference_s_wherever_they_bend_or_end(way, epilogue, output):
    rng = fresh(way, epilogue, output)
    variant, through, m = CURVED[way]
    problem = ScaledLinearDescriptor(m=m, n=72, k=336, output_element=output, epilogue=epilogue)
    real = np.float64 if output is ElementKind.F64 else np.float32
    # Sums are about 10^5. In a third of the rows they vanish beside the bias.
    inputs = {
        "act_scale": np.where(rng.random(m) < 0.3, 1e-30, rng.uniform(0.5, 2, m) * 1e-5).astype(real),
        "weight_scale": rng.uniform(0.1, 10, 72).astype(real),
        "bias": np.where(rng.random(72) < 0.5, rng.choice(ENDS, 72), rng.normal(0, 4, 72)).astype(real),
    }
    if output.integer_range:
        inputs["output_scale"] = np.array([rng.choice([0.0, -0.05, *np.exp2(rng.uniform(-9, 0, 3))])], real)
    check(problem, variant, rng, *(named(problem, through)[:1] if through else ()), values="normal", **inputs)


def test_products_take_as_long_a_k_as_the_kernels_do():
    """At the largest K, sums and zero points at the ends of their ranges: nothing wraps."""
    rng = fresh("longest")
    fields = {"activation_element": "u8", "weight_element": "u8", "output_element": "f32"}
    limit = next(c.maximum for c in hopper.constraints(ElementKind.U8) if c.kind == "between") // 16 * 16
    for variant, m in (("streamed", 3), ("warpgroup", 192)):
        problem = SmoothQuantLinearDescriptor(m=m, n=8, k=limit, act_scale=1.0, act_zero_point=255, **fields)
        sku = sku_of(problem, variant)
        choices = (
            UNDIVIDED[-1:] if variant == "warpgroup" else (*named(problem, "shared"), *named(problem, "registers")[:1])
        )
        inputs = {
            "act_q": np.zeros((m, limit), np.uint8),
            "weight_q": np.full((8, limit), 255, np.uint8),
            "weight_scale": np.ones(8, np.float32),
        }
        for choice in choices:
            placed = ran(sku, problem, inputs, CARD, rng, choice)
            assert (placed["output"].array == np.float32(-(limit * 255 * 255))).all(), choice
