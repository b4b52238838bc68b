"""Fake-quantize: quantize and dequantize without leaving floating point.

Formula
-------
q = clamp(rne(RN_C(input / scale)) + zero_point, q_min, q_max); output = RN_T(RN_C(C(q - zero_point) * scale)). rne
rounds to nearest, ties to even; RN_C rounds to the compute type; the division is a true one. A zero result is +0; NaN
counts as 0, infinities saturate.

Elements
--------
f16, bf16, f32, f64, the same in and out.

Units
-----
`scale` is real units per code step and `zero_point` the code that stands for 0.0. Scales have the compute type C (f64
for f64 data, f32 otherwise) or the data's own, which is widened; zero points are s32 and never wrap.

Errors
------
`InvalidProblem` for `numel` outside [0, 2^63-1] or another size outside [0, 2^31-1]; an `axis` outside the rank
(negative ones count from the end); a `group_size` below 1 or one that does not divide `axis_size`; `q_max` below
`q_min`; an argument that is missing, unknown, of another element or shape, or that overlaps an output; a scalar scale
that is 0 or not finite (array scales follow the formula: x / 0 is +-inf or NaN).
`Unsupported` for an element outside the list above.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np

from skuda.kernels.dtypes import compute_dtype
from skuda.kernels.quantize import affine
from skuda.kernels.quantize.elementwise import elementwise_ops
from skuda.kernels.quantize.granularity import (
    DATA,
    SCALE,
    ZERO_POINT,
    Bounded,
    PerChannel,
    PerGroup,
    PerTensor,
    PerToken,
)
from skuda.registry.argument import ArgumentSpec, Role


class FakeQuantize(Bounded):
    """Quantize and dequantize without leaving floating point.

    Attributes
    ----------
    q_min, q_max : int
        Bounds of the codes, inclusive; any s32 integers, since no code is stored.
    input_element : ElementKind
        Element of input and output: f16, bf16, f32 or f64.
    """

    kernel: ClassVar[str] = "fake_quantize"
    in_place: ClassVar[bool] = True
    signature = (
        ArgumentSpec("input", Role.INPUT, "input_element", DATA),
        SCALE,
        ZERO_POINT,
        ArgumentSpec("output", Role.OUTPUT, "input_element", DATA),
    )


class FakeQuantizeDescriptor(FakeQuantize, PerTensor):
    """Problem of `fake_quantize`; for the fields see `PerTensor` and `FakeQuantize`."""

    op: Literal["fake_quantize"] = "fake_quantize"


class FakeQuantizePerChannelDescriptor(FakeQuantize, PerChannel):
    """Problem of `fake_quantize_per_channel`; for the fields see `PerChannel` and `FakeQuantize`."""

    op: Literal["fake_quantize_per_channel"] = "fake_quantize_per_channel"


class FakeQuantizePerTokenDescriptor(FakeQuantize, PerToken):
    """Problem of `fake_quantize_per_token`; for the fields see `PerToken` and `FakeQuantize`."""

    op: Literal["fake_quantize_per_token"] = "fake_quantize_per_token"


class FakeQuantizePerGroupDescriptor(FakeQuantize, PerGroup):
    """Problem of `fake_quantize_per_group`; for the fields see `PerGroup` and `FakeQuantize`."""

    op: Literal["fake_quantize_per_group"] = "fake_quantize_per_group"


@np.errstate(all="ignore")  # infinities and NaN are valid results here
def reference(problem: FakeQuantize, *, input: Any, scale: Any, zero_point: Any, output: Any) -> None:
    """Write `output` by the formula of the module."""
    compute = compute_dtype(problem.input_element)
    for index, s, z in affine.segments(input.shape, problem.granularity.spread, scale, zero_point, compute):
        t = affine.rounded_quotient(input[index].astype(compute), s)
        q = affine.clamp_codes(t, z, problem.q_min, problem.q_max)
        y = affine.real_value(q, z, s, compute).astype(output.dtype)
        y[y == 0] = 0  # a zero result is +0, also under a negative scale or after underflow
        output[index] = y


OPS = elementwise_ops(
    reference,
    {
        FakeQuantizeDescriptor: "baracuda_kernels/quantize/fake_quantize.rs",
        FakeQuantizePerChannelDescriptor: "baracuda_kernels/quantize/fake_quantize.rs, its formula per channel",
        FakeQuantizePerTokenDescriptor: "baracuda_kernels/quantize/fake_quantize.rs, its formula per token",
        FakeQuantizePerGroupDescriptor: "baracuda_kernels/quantize/fake_quantize.rs, its formula per group",
    },
)
