"""Quantize: floating data to integer codes.

Formula
-------
t = rne(RN_C(input / scale)); output = clamp(t + zero_point, q_min, q_max). rne rounds to nearest, ties to even; RN_C
rounds to the compute type; the division is a true one. NaN quantizes to clamp(zero_point), infinities saturate.

Elements
--------
input f16, bf16, f32, f64; output s8, u8, s4, u4 (two to a byte, low nibble first, every row starting at a byte).

Units
-----
`scale` is real units per code step and `zero_point` the code that stands for 0.0. Scales have the compute type C (f64
for f64 data, f32 otherwise) or the data's own, which is widened; zero points are s32 and never wrap.

Errors
------
`InvalidProblem` for `numel` outside [0, 2^63-1] or another size outside [0, 2^31-1]; an `axis` outside the rank
(negative ones count from the end); a `group_size` below 1 or one that does not divide `axis_size`; `q_max` below
`q_min` or bounds outside the range of `output_element`; an argument that is missing, unknown, of another element or
shape, or that overlaps an output; a scalar scale that is 0 or not finite (array scales follow the formula: x / 0 is
+-inf or NaN).
`Unsupported` for an element outside the lists above.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

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
from skuda.registry.elements import ElementKind


class Quantize(Bounded):
    """Floating data to integer codes.

    Attributes
    ----------
    q_min, q_max : int
        Bounds of the codes, inclusive, within the range of `output_element`.
    input_element : ElementKind
        Element of the data: f16, bf16, f32 or f64.
    output_element : ElementKind
        Element of the codes: s8, u8, s4 or u4.
    """

    kernel: ClassVar[str] = "quantize"
    output_element: ElementKind
    aux_field: ClassVar[str | None] = "output_element"
    signature = (
        ArgumentSpec("input", Role.INPUT, "input_element", DATA),
        SCALE,
        ZERO_POINT,
        ArgumentSpec("output", Role.OUTPUT, "output_element", DATA),
    )


class QuantizePerTensorDescriptor(Quantize, PerTensor):
    """Problem of `quantize_per_tensor`; for the fields see `PerTensor` and `Quantize`."""

    op: Literal["quantize_per_tensor"] = "quantize_per_tensor"


class QuantizePerChannelDescriptor(Quantize, PerChannel):
    """Problem of `quantize_per_channel`; for the fields see `PerChannel` and `Quantize`."""

    op: Literal["quantize_per_channel"] = "quantize_per_channel"


class QuantizePerTokenDescriptor(Quantize, PerToken):
    """Problem of `quantize_per_token`; for the fields see `PerToken` and `Quantize`."""

    op: Literal["quantize_per_token"] = "quantize_per_token"


class QuantizePerGroupDescriptor(Quantize, PerGroup):
    """Problem of `quantize_per_group`; for the fields see `PerGroup` and `Quantize`."""

    op: Literal["quantize_per_group"] = "quantize_per_group"


def reference(problem: Quantize, *, input: Any, scale: Any, zero_point: Any, output: Any) -> None:
    """Write `output` by the formula of the module."""
    elements = (problem.input_element, problem.output_element)
    arrays = (input, scale, zero_point, output)
    affine.quantize(problem.granularity.spread, elements, (problem.q_min, problem.q_max), arrays)


OPS = elementwise_ops(
    reference,
    {
        QuantizePerTensorDescriptor: "baracuda_kernels/quantize/per_tensor.rs",
        QuantizePerChannelDescriptor: "baracuda_kernels/quantize/per_channel.rs",
        QuantizePerTokenDescriptor: "baracuda_kernels/quantize/per_token.rs",
        QuantizePerGroupDescriptor: "baracuda_kernels/quantize/per_group.rs",
    },
)
