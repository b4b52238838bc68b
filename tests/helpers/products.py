"""Products for Hopper's kernels, whose rows begin at multiples of 16 bytes: plain ones, and random ones of any kind."""

from __future__ import annotations

from itertools import product

from skuda.kernels.linear import QuantizedLinearDescriptor, ScaledLinearDescriptor, SmoothQuantLinearDescriptor
from skuda.registry import ElementKind
from skuda.registry.vocabulary import EpilogueKind

SHIFTS = tuple(product((False, True), repeat=2))
"""Whether the activation and the weight have zero points."""
OUTPUTS = ("f32", "f16", "bf16", "s8", "u8")


def static(m=256, n=512, k=1024, **changes):
    fields = {"act_scale": 0.1, "output_element": "bf16", **changes}
    return SmoothQuantLinearDescriptor(m=m, n=n, k=k, **fields)


def dynamic(m=256, n=512, k=1024, **changes):
    fields = {"activation_element": "bf16", "q_min": -127, "q_max": 127, **changes}
    return QuantizedLinearDescriptor(m=m, c_out=n, k=k, **fields)


def scaled(m=256, n=512, k=1024, **changes):
    return ScaledLinearDescriptor(m=m, n=n, k=k, **{"output_element": "bf16", **changes})


def wide_problem(op, weight, rng, *, fewest, most):
    """Draw a product with an activation of 16-bit codes, of `fewest` to `most` rows, which kernels of Hopper serve."""
    problem = a_problem(op, (False, False), rng, fewest=fewest, most=most)
    k = problem.k if weight == "s8" else -(-problem.k // 128) * 128
    codes = {"q_min": -32_639, "q_max": 32_639} if op == "quantized_linear" else {"activation_element": "s16"}
    fields = problem.model_dump() | {"weight_element": weight, "k": k} | codes
    fields |= {"group_size": 64} if weight == "s4" else {}
    fields |= {"output_element": "s64"} if fields["output_element"] == "s32" else {}
    return type(problem)(**fields)


def a_problem(op, shifts, rng, *, fewest, most, widest=300, longest=960):
    """Draw a product of `fewest` to `most` rows; `shifts`: whether activation and weight have zero points."""

    def one_of(*values):
        return values[rng.integers(len(values))]

    m, n, k = (
        int(rng.integers(fewest, most, endpoint=True)),
        int(rng.integers(1, widest)),
        16 * int(rng.integers(1, longest // 16)),
    )
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
