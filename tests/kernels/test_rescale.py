"""Rescale finishes the exact sums of a scaled linear layer: with the very bits of the layer that does both at once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from support import arguments_of, assert_same_bits, draw, fresh, run

from skuda.kernels.catalog import built_in_registry
from skuda.kernels.linear import RescaleDescriptor, ScaledLinearDescriptor
from skuda.kernels.linear.problem import OUTPUTS
from skuda.registry import Case, EpilogueKind, Role
from skuda.registry.elements import CODES8

SWITCHES = ("has_act_zero_point", "has_weight_zero_point")
EVERY = [(output, epilogue) for output in OUTPUTS for epilogue in EpilogueKind]


def _sums_of_parts(problem, act_q, weight_q, rng):
    """Return the layer's sums, added up from those of the parts of K, and the sums of its codes."""
    cuts = [0, *sorted(rng.integers(0, problem.k + 1, 3)), problem.k]
    total = np.zeros((problem.m, problem.n), np.int32)
    for start, stop in pairwise(cuts):
        part = ScaledLinearDescriptor(
            m=problem.m,
            n=problem.n,
            k=stop - start,
            activation_element=problem.activation_element,
            weight_element=problem.weight_element,
            output_element="s32",
        )
        found = run(part, {"act_q": act_q[:, start:stop], "weight_q": weight_q[:, start:stop]})
        total += found["output"]
    return {
        "sums": total,
        "act_sums": act_q.sum(axis=1, dtype=np.int32),
        "weight_sums": weight_q.sum(axis=1, dtype=np.int32),
    }


@pytest.mark.parametrize("values", ["normal", "special"])
@pytest.mark.parametrize(("output", "epilogue"), EVERY)
def test_sums_and_rescale_are_scaled_linear_bit_for_bit(output, epilogue, values):
    rng = fresh(output, epilogue, values)
    op = built_in_registry().ops["scaled_linear"]
    for k in (0, 1, int(rng.integers(2, 300))):
        m, n = (int(extent) for extent in rng.integers(1, 40, 2))
        shared = {"m": m, "n": n, "k": k, "output_element": output, "epilogue": epilogue}
        shared |= {name: bool(rng.random() < 0.7) for name in SWITCHES}
        shared |= {"act_scale_scope": str(rng.choice(["token", "tensor"]))}
        activation, weight = (str(rng.choice(CODES8)) for _ in range(2))
        problem = ScaledLinearDescriptor(**shared, activation_element=activation, weight_element=weight)
        inputs = dict(draw(op, Case(problem, values), rng).inputs)
        want = run(problem, inputs)["output"]
        inputs |= _sums_of_parts(problem, inputs.pop("act_q"), inputs.pop("weight_q"), rng)
        second = RescaleDescriptor(**shared)
        taken = {argument.name for argument in arguments_of(second) if argument.role is not Role.OUTPUT}
        got = run(second, {name: value for name, value in inputs.items() if name in taken})["output"]
        assert_same_bits(got, want, f"{problem!r}")
