"""The CUDA kernels of sampling on the CPU: rows of any length, place and kind, with ties wherever a prefix may end."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest
from harness import emulator
from harness.binding import ran
from support import assert_same_bits, fresh, run

from skuda.kernels.sampling import argmax, log_softmax_at, sample
from skuda.kernels.sampling.weights import PART, logarithm, powers
from skuda.registry.device import KNOWN_DEVICES

pytestmark = pytest.mark.skipif(shutil.which(emulator.COMPILER) is None, reason="no C++ compiler")
OPS = {"argmax": argmax, "log_softmax_at": log_softmax_at, "sample": sample}
ELEMENTS = ("f32", "f16", "bf16")


def sku_of(name, element):
    """Return the CUDA kernel of an op."""
    return next(sku for sku in OPS[name].OP.skus if sku.element == element and sku.arch != "cpu")


def check(name, problem, inputs, rng, device="h200"):
    placed = ran(sku_of(name, problem.input_element), problem, inputs, KNOWN_DEVICES[device], rng)
    for output, want in run(problem, inputs).items():
        assert_same_bits(placed[output].array, want, f"{output} of {problem!r}")


@pytest.mark.parametrize("values", ["normal", "special"])
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("name", OPS)
def test_kernels_equal_the_reference_at_any_size(name, element, values):
    rng = fresh(name, element, values)
    for most in (40, 3000, 3 * PART):
        v = int(rng.integers(1, most))
        fields = {"n": int(rng.integers(1, 6)), "v": v, "t": int(rng.integers(0, 300)), "input_element": element}
        fields |= {f"has_{each}": bool(rng.integers(2)) for each in ("temperature", "top_k", "top_p")}
        kind = OPS[name].OP.descriptor
        problem = kind(**{field: value for field, value in fields.items() if field in kind.model_fields})
        inputs = OPS[name].draw(problem, values, rng)
        check(name, problem, inputs, rng, str(rng.choice(["h200", "a100"])))


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("spread", [0, 1e-4, 0.3, 30])
@pytest.mark.parametrize("by", ["top_k", "top_p", "both"])
def test_ties_and_neighbours_at_the_end_of_what_is_kept(by, spread, element):
    """Few different values, the closest of which differ in the last bits: a prefix ends among equal ones.

    Where all are equal, the limit of top-p is a sum of weights. In some rows so many tokens may be the last one that
    they are not listed.
    """
    rng = fresh(by, spread, element)
    n, v = 6, 2048 if spread == 0 else int(rng.integers(1500, 7000))
    problem = sample.SampleDescriptor(n=n, v=v, input_element=element, has_top_k=by != "top_p", has_top_p=by != "top_k")
    inputs = sample.draw(problem, "normal", rng)
    few = 10 + spread * rng.standard_normal((n, int(rng.integers(2, 40)))) * rng.choice([1e-7, 1, 10], (n, 1))
    inputs["logits"] = rng.choice(few, v, axis=1).astype(inputs["logits"].dtype)
    inputs["temperature"] = rng.choice([1, 1, 0.3, 3], n).astype(np.float32)
    if by != "top_p":
        every = [1, 2, 8, 64, 1024] if spread == 0 else [1, 2, 3, 7, rng.integers(1, v)]
        inputs["top_k"] = rng.choice(every, n).astype(np.int32)
    if by != "top_k":
        every = [1 / 8, 1 / 2, 3 / 4] if spread == 0 else [rng.random(), 1 - 1e-3 * rng.random(), 1, 1e-6]
        inputs["top_p"] = rng.choice(every, n).astype(np.float32)
    check("sample", problem, inputs, rng)


def test_no_nan_is_lost_whatever_its_sign_and_payload():
    rng = fresh()
    n, v = 4, 700
    logits = rng.standard_normal((n, v)).astype(np.float32)
    for row, bits in enumerate((0xFFC00000, 0xFF800001, 0x7F800001, 0xFFFFFFFF)):
        logits.view(np.uint32)[row, rng.choice(v, 3, replace=False)] = bits ^ np.array([0, 2, 1 << 31], np.uint32)
    for name, module in OPS.items():
        fields = {"n": n, "v": v, "input_element": "f32"} | ({"t": 2} if name == "log_softmax_at" else {})
        problem = module.OP.descriptor(**fields)
        check(name, problem, module.draw(problem, "normal", rng) | {"logits": logits}, rng)


def test_parameters_that_are_none():
    rng = fresh()
    odd = np.array([np.nan, np.inf, -np.inf, -1, -0.0, 0, 1, 2, 0.5], np.float32)
    temperature, top_p = (array.ravel() for array in np.meshgrid(odd, odd))
    problem = sample.SampleDescriptor(n=81, v=40, input_element="f16", has_top_p=True)
    check("sample", problem, sample.draw(problem, "normal", rng) | {"temperature": temperature, "top_p": top_p}, rng)


CURVES = """
KERNEL(256, 1) curves(const u64* totals, f64* logarithms, const f32* c, f32* powers) {
  const u32 i = blockIdx.x * 256 + threadIdx.x;
  logarithms[i] = logarithm(totals[i]), powers[i] = power(c[i]);
}
"""


def test_powers_and_logarithms_have_every_bit_of_the_reference():
    rng, blocks = fresh(), 800
    totals = np.exp2(rng.uniform(40, 62, 256 * blocks)).astype(np.int64)
    c = np.where(
        rng.random(totals.shape) < 0.9, -33 * rng.random(totals.shape), -np.exp(-30 * rng.random(totals.shape))
    )
    c = c.astype(np.float32)
    logarithms, found = np.empty(totals.shape), np.empty_like(c)
    unit = emulator.Unit.of(sku_of("log_softmax_at", "f32"))
    given = [("p", array.ctypes.data) for array in (totals, logarithms, c, found)]
    library = emulator.load(replace(unit, text=unit.text + CURVES))
    library.launch("curves", (blocks, 1, 1), (256, 1, 1), 0, given)
    assert_same_bits(logarithms, logarithm(totals))
    assert_same_bits(found, powers(c))


@pytest.mark.parametrize("where", ["first", "last", "part"])
def test_the_first_and_the_last_token_and_those_beside_parts_are_drawn(where):
    """All weight is on one token, or on the two beside the end of a part."""
    rng = fresh(where)
    n, v = 4, 2 * PART + int(rng.integers(1, 99))
    problem = sample.SampleDescriptor(n=n, v=v, input_element="f32")
    inputs = sample.draw(problem, "normal", rng) | {"temperature": np.ones(n, np.float32)}
    inputs["logits"] = np.full((n, v), -100, np.float32)
    hot = {"first": [0], "last": [v - 1], "part": [PART - 1, PART]}[where]
    inputs["logits"][:, hot] = 0
    assert set(run(problem, inputs)["token"].tolist()) <= set(hot)
    check("sample", problem, inputs, rng)
