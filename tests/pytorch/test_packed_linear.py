"""Ops of torch on packed 4-bit weights: three axes of `weight_q` say what it is."""

from __future__ import annotations

import itertools

import pytest
import torch
from support import draw, fresh
from tensors import same, tensor_of

import skuda.torch  # noqa: F401  it makes the ops
from skuda.dispatch.shard.shards import split
from skuda.kernels.catalog import built_in_registry
from skuda.kernels.linear import QuantizedLinearDescriptor, ScaledLinearDescriptor, packed
from skuda.registry import Case, InvalidProblem

REGISTRY = built_in_registry().ops


def drawn(problem, rng):
    inputs = draw(REGISTRY[problem.op], Case(problem), rng).inputs
    codes = packed.unpacked(inputs["weight_q"], problem.sizes[1], problem.k)
    return {name: tensor_of(value) for name, value in inputs.items()}, tensor_of(codes.copy())


@pytest.mark.parametrize("size", packed.GROUP_SIZES)
@pytest.mark.parametrize("leading", [(6,), (2, 3)])
def test_a_packed_weight_gives_what_its_codes_give(size, leading):
    rng = fresh(size, leading)
    n, k = int(rng.integers(1, 70)), int(rng.integers(1, 300))
    fields = {"weight_element": "s4", "group_size": size, "activation_element": "f32", "q_min": -127, "q_max": 127}
    given, codes = drawn(QuantizedLinearDescriptor(m=6, c_out=n, k=k, **fields), rng)
    x, weight, scale = given["activation"].reshape(*leading, k), given["weight_q"], given["weight_scale"]
    call = torch.ops.skuda.quantized_linear
    want = call(x, codes, scale)
    for _ in range(2):  # the second one takes the launch of the first
        assert same(call(x, weight, scale), want)
    assert same(torch.compile(call, backend="eager")(x, weight, scale), want)
    torch.library.opcheck(call.default, (x, weight, scale))


def test_rows_of_sums_are_those_of_whole_units_unless_they_are_given():
    rng = fresh("sums")
    problem = ScaledLinearDescriptor(m=3, n=21, k=130, output_element="s32", weight_element="s4", group_size=32)
    given, codes = drawn(problem, rng)
    call = torch.ops.skuda.scaled_linear
    want = call(given["act_q"], codes, output_element="s32")
    found = call(given["act_q"], given["weight_q"], output_element="s32")
    assert found.shape == (3, 32)
    assert same(found[:, :21], want)
    assert same(call(given["act_q"], given["weight_q"], output_element="s32", n=21), want)
    with pytest.raises(InvalidProblem, match="weight_q must have as its last axis the bytes of a packed block"):
        call(given["act_q"], given["weight_q"][..., 1:], output_element="s32")


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_cuts_of_a_weight_give_the_parts_of_the_whole(ranks):
    """Along N outputs stand side by side, along K exact sums add up, also where some ranks have nothing."""
    rng = fresh(ranks)
    n, k = int(rng.integers(17, 70)), int(rng.integers(130, 600))
    problem = ScaledLinearDescriptor(m=3, n=n, k=k, output_element="s32", weight_element="s4", group_size=64)
    given, _ = drawn(problem, rng)
    weight, call = given["weight_q"], torch.ops.skuda.scaled_linear
    whole = call(given["act_q"], weight, output_element="s32", n=n)
    parts = {"n": [], "k": []}
    for axis, found in parts.items():
        ends = [0, *itertools.accumulate(split({"n": n, "k": k}[axis], ranks, {"n": 16, "k": 128}[axis]))]
        for start, stop in itertools.pairwise(ends):
            part = packed.cut(weight, axis, start, stop).contiguous()
            codes, rows = (given["act_q"], stop - start) if axis == "n" else (given["act_q"][:, start:stop], n)
            found.append(call(codes, part, output_element="s32", n=rows))
    assert same(torch.cat(parts["n"], 1), whole)
    assert same(torch.stack(parts["k"]).sum(0, dtype=torch.int32), whole)
