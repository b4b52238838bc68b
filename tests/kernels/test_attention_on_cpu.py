"""The CUDA kernel of attention on the CPU: any size against the reference, and tables that are wrong."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from harness import emulator
from harness.binding import launch_of, place, run_steps
from support import assert_same_bits, fresh, run

from skuda.kernels.attention import AttentionDescriptor
from skuda.kernels.attention.attention import OP, draw
from skuda.registry.device import Device

pytestmark = pytest.mark.skipif(shutil.which(emulator.COMPILER) is None, reason="no C++ compiler")
SKUS = {sku.variant: sku for sku in OP.skus if sku.element == "f32" and sku.launch}
DEVICE = Device(
    name="made up",
    processor="cuda",
    compute_capability=(8, 0),
    sm_count=2,
    shared_memory=99 << 10,
    l2_cache=1 << 20,
    memory=1 << 34,
    memory_bandwidth=10**12,
)
SEQUENCES = 3


def on_cpu(problem, inputs, rng, variant):
    """Return the kernel's output; nothing but its elements may be written."""
    sku = SKUS[variant]
    launch = launch_of(sku, problem, DEVICE)
    shapes = {argument.name: argument.shape for argument in problem.arguments()}
    placed = place(problem, launch, shapes, inputs, rng)
    run_steps(emulator.load(emulator.Unit.of(sku)), launch, problem, placed, shapes)
    for name, array in placed.items():
        array.assert_only_elements_written()
        if name != "output":
            array.assert_unchanged()
    return placed["output"].array


def problem_of(rng, variant, **fields):
    """Return a problem of random sizes."""
    kv_heads, group = int(rng.integers(1, 4)), int(rng.choice([1, 2, 3, 5, 8, 17]))
    sizes = {"tokens": int(rng.integers(1, 40)), "kv_heads": kv_heads, "heads": kv_heads * group}
    sizes |= {"sequences": SEQUENCES, "pages": int(rng.integers(1, 9)), "most_blocks": int(rng.integers(1, 14))}
    sizes["head_size"] = 128 if variant == "warpgroup" else int(rng.choice([32, 64, 128]))
    return AttentionDescriptor(**sizes | {"scale": 0.2, "output_element": "f32"} | fields)


@pytest.mark.parametrize("variant", SKUS)
@pytest.mark.parametrize("values", ["normal", "special"])
@pytest.mark.parametrize("mask", ["causal", "all", "window"])
def test_kernel_equals_the_reference_at_any_size(mask, values, variant):
    rng = fresh(mask, values, variant)
    for _ in range(2):
        window = int(np.exp(rng.uniform(0, 7))) if mask == "window" else None
        problem = problem_of(rng, variant, causal=mask != "all", window=window)
        inputs = draw(problem, values, rng)
        assert_same_bits(on_cpu(problem, inputs, rng, variant), run(problem, inputs)["output"], repr(problem))


WRONG = {
    "block_table": [-1, 9, 2**31 - 1, -(2**31)],
    "lengths": [-1, -(2**31), 2**31 - 1, 100_000],
    "starts": [-5, 2**31 - 1, -(2**31)],
}


@pytest.mark.parametrize("variant", SKUS)
@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_table_of_a_sequence_touches_nothing_outside_and_no_other_sequence(name, value, variant):
    rng = fresh(name, value, variant)
    problem = problem_of(rng, variant, window=rng.choice([None, 100]), tokens=9, pages=8, most_blocks=3)
    inputs = draw(problem, "normal", rng) | {"starts": np.array([0, 3, 6, 9], np.int32)}
    inputs["lengths"] = rng.integers(3, 3 * 128, SEQUENCES, endpoint=True).astype(np.int32)
    for scale in ("k_scale", "v_scale"):
        inputs[scale] = rng.random(inputs[scale].shape, np.float32)
    inputs["block_table"] = rng.integers(0, 8, (SEQUENCES, 3), np.int32)
    want = run(problem, inputs)["output"]
    wrong = inputs[name].copy()
    wrong[-1 if name == "starts" else 2] = value
    got = on_cpu(problem, inputs | {name: wrong}, rng, variant)
    if name != "starts":  # which say whose any row is
        assert_same_bits(got[:6], want[:6])
