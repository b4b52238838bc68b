"""The CUDA kernels of attention on the CPU: any size against the reference, and tables that are wrong."""

from __future__ import annotations

import shutil
from itertools import product

import numpy as np
import pytest
from harness import emulator
from harness.binding import ran
from support import assert_same_bits, fresh, run, sampled

from skuda.kernels.attention import AttentionDescriptor
from skuda.kernels.attention.attention import OP, draw
from skuda.registry.device import KNOWN_DEVICES

pytestmark = pytest.mark.skipif(shutil.which(emulator.COMPILER) is None, reason="no C++ compiler")
SKUS = {sku.variant: sku for sku in OP.skus if sku.element == "f32" and sku.arch != "cpu"}
SEQUENCES = 3
# With few processors, one block takes all chunks of a tile; with many, each chunk has a block.
WAYS = [("warpgroup", 2), ("plain", 2), ("split", 1), ("split", 400)]
KERNELS = pytest.mark.parametrize(("variant", "sms"), WAYS)


def on_cpu(problem, inputs, rng, variant, sms):
    card = KNOWN_DEVICES["h200"].model_copy(update={"sm_count": sms})
    return ran(SKUS[variant], problem, inputs, card, rng)["output"].array


def problem_of(rng, variant="", **fields):
    """Return a problem of random sizes."""
    kv_heads, group = int(rng.integers(1, 4)), int(rng.choice([1, 2, 3, 4, 5, 8, 17]))
    sizes = {"tokens": int(rng.integers(1, 40)), "kv_heads": kv_heads, "heads": kv_heads * group}
    sizes |= {"sequences": SEQUENCES, "pages": int(rng.integers(1, 9)), "most_blocks": int(rng.integers(1, 14))}
    sizes["head_size"] = 128 if variant == "warpgroup" else int(rng.choice([32, 64, 128]))
    return AttentionDescriptor(**sizes | {"scale": 0.2, "output_element": "f32"} | fields)


@pytest.mark.parametrize(
    ("variant", "sms", "values", "mask"),
    sampled(
        [
            pytest.param(*way, values, mask)
            for way, values, mask in product(WAYS, ("normal", "special"), ("causal", "all", "window"))
        ],
        2,
        each=lambda variant, sms, *_: (variant, sms),
    ),
)
def test_kernels_equal_the_reference_at_any_size(mask, values, variant, sms):
    rng = fresh(mask, values, variant, sms)
    for _ in range(2):
        window = int(np.exp(rng.uniform(0, 7))) if mask == "window" else None
        problem = problem_of(rng, variant, causal=mask != "all", window=window)
        inputs = draw(problem, values, rng)
        assert_same_bits(on_cpu(problem, inputs, rng, variant, sms), run(problem, inputs)["output"], repr(problem))


@pytest.mark.parametrize("group", [1, 2, 4, 7, 17])
def test_sequences_may_be_far_shorter_than_the_table_is_long(group):
    rng = fresh(group)
    window = rng.choice([None, 700])
    sizes = {"tokens": 5, "heads": 2 * group, "kv_heads": 2, "pages": 6, "most_blocks": 90, "window": window}
    problem = problem_of(rng, **sizes)
    inputs = draw(problem, "normal", rng)
    new = np.diff(inputs["starts"])
    inputs["lengths"] = np.minimum(inputs["lengths"], new + rng.choice([0, 100, 1500], SEQUENCES)).astype(np.int32)
    want = run(problem, inputs)["output"]
    for sms in (10, 400):
        assert_same_bits(on_cpu(problem, inputs, rng, "split", sms), want, repr(problem))


def test_a_row_may_have_more_chunks_than_a_warp_has_lanes():
    rng = fresh()
    problem = problem_of(rng, tokens=2, sequences=1, heads=3, kv_heads=1, head_size=32, pages=7, most_blocks=150)
    inputs = draw(problem, "normal", rng) | {"starts": np.array([0, 2], np.int32)}
    inputs["lengths"] = rng.integers(129 * 128, 150 * 128, 1, np.int32, endpoint=True)
    inputs["block_table"] = rng.integers(0, 7, (1, 150), np.int32)
    for scale in ("k_scale", "v_scale"):
        inputs[scale] = rng.random(inputs[scale].shape, np.float32)
    assert_same_bits(on_cpu(problem, inputs, rng, "split", 400), run(problem, inputs)["output"], repr(problem))


@KERNELS
def test_a_sum_that_underflows_keeps_its_sign(variant, sms):
    sizes = {"tokens": 2, "heads": 1, "kv_heads": 1, "head_size": 128, "sequences": 1, "pages": 4, "most_blocks": 4}
    problem = problem_of(fresh(variant), variant, **sizes)
    # The first token does not see the last page.
    inputs = {"block_table": np.arange(4, dtype=np.int32)[None], "lengths": np.array([385], np.int32)}
    inputs |= {"starts": np.array([0, 2], np.int32), "k_scale": np.ones((4, 1, 128), np.float32)}
    inputs |= {"q_codes": np.zeros((2, 1, 128), np.int8), "q_scale": np.ones((2, 1), np.float32)}
    inputs["k_codes"] = np.zeros((4, 1, 128, 128), np.int8)
    inputs["v_codes"] = (inputs["k_codes"] - (np.arange(4) == 0)[:, None, None, None]).astype(np.int8)
    inputs["v_scale"] = np.repeat(2.0 ** np.array([-100, 20, 105, 0]), 128).astype(np.float32).reshape(4, 1, 128)
    want = run(problem, inputs)["output"]
    assert_same_bits(want[0], np.full_like(want[0], -0.0))
    assert_same_bits(on_cpu(problem, inputs, fresh(variant, sms), variant, sms), want)


WRONG = {
    "block_table": [-1, 9, 2**31 - 1, -(2**31)],
    "lengths": [-1, -(2**31), 2**31 - 1, 100_000],
    "starts": [-5, 2**31 - 1, -(2**31)],
}


@KERNELS
@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_table_of_a_sequence_touches_nothing_outside_and_no_other_sequence(name, value, variant, sms):
    rng = fresh(name, value, variant, sms)
    problem = problem_of(rng, variant, window=rng.choice([None, 100]), tokens=9, pages=8, most_blocks=3)
    inputs = draw(problem, "normal", rng) | {"starts": np.array([0, 3, 6, 9], np.int32)}
    inputs["lengths"] = rng.integers(3, 3 * 128, SEQUENCES, endpoint=True).astype(np.int32)
    for scale in ("k_scale", "v_scale"):
        inputs[scale] = rng.random(inputs[scale].shape, np.float32)
    inputs["block_table"] = rng.integers(0, 8, (SEQUENCES, 3), np.int32)
    want = run(problem, inputs)["output"]
    wrong = inputs[name].copy()
    wrong[-1 if name == "starts" else 2] = value
    got = on_cpu(problem, inputs | {name: wrong}, rng, variant, sms)
    if name != "starts":  # which say whose any row is
        assert_same_bits(got[:6], want[:6])
