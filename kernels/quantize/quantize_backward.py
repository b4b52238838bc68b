"""Gradient of quantize, straight through.

Formula
-------
t = rne(RN_C(input / scale)); d_input = RN_T(RN_C(d_output / scale)) where q_min <= t + zero_point <= q_max, else 0. The
mask is inclusive. rne rounds to nearest, ties to even; RN_C rounds to the compute type; the division is a true one. NaN
inputs have gradient 0.

Elements
--------
f16, bf16, f32, f64 for all three.

Units
-----
`scale` is real units per code step and `zero_point` the code that stands for 0.0. Scales have the compute type C (f64
for f64 data, f32 otherwise) or the data's own, which is widened; zero points are s32 and never wrap.

Errors
------
`InvalidProblem` for `numel` outside [0, 2^63-1] or another size outside [0, 2^31-1]; an `axis` outside the rank
(negative ones count from the end); a `group_size` below 1 or one that does not divide `axis_size`; `q_max` below
`q_min` or bounds outside the range of `output_element`, where that is given; an argument that is missing, unknown, of
another element or shape, or that overlaps an output; a scalar scale that is 0 or not finite (array scales follow the
formula: x / 0 is +-inf or NaN).
`Unsupported` for an element outside the list above.
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


class QuantizeBackward(Bounded):
    """Straight-through gradient of `quantize`.

    Attributes
    ----------
    q_min, q_max : int
        The forward's bounds.
    input_element : ElementKind
        Element of the forward's input and of the gradients.
    output_element : ElementKind or None
        The forward's, one of the codes (s8, u8, s4, u4); when given, the bounds are checked against it. It does
        not change the result.
    """

    kernel: ClassVar[str] = "quantize_backward"
    output_element: ElementKind | None = None
    in_place: ClassVar[bool] = True
    signature = (
        ArgumentSpec("d_output", Role.INPUT, "input_element", DATA),
        ArgumentSpec("input", Role.INPUT, "input_element", DATA),
        SCALE,
        ZERO_POINT,
        ArgumentSpec("d_input", Role.OUTPUT, "input_element", DATA),
    )


class QuantizePerTensorBackwardDescriptor(QuantizeBackward, PerTensor):
    """Problem of `quantize_per_tensor_backward`; for the fields see `PerTensor` and `QuantizeBackward`."""

    op: Literal["quantize_per_tensor_backward"] = "quantize_per_tensor_backward"


class QuantizePerChannelBackwardDescriptor(QuantizeBackward, PerChannel):
    """Problem of `quantize_per_channel_backward`; for the fields see `PerChannel` and `QuantizeBackward`."""

    op: Literal["quantize_per_channel_backward"] = "quantize_per_channel_backward"


class QuantizePerTokenBackwardDescriptor(QuantizeBackward, PerToken):
    """Problem of `quantize_per_token_backward`; for the fields see `PerToken` and `QuantizeBackward`."""

    op: Literal["quantize_per_token_backward"] = "quantize_per_token_backward"


class QuantizePerGroupBackwardDescriptor(QuantizeBackward, PerGroup):
    """Problem of `quantize_per_group_backward`; for the fields see `PerGroup` and `QuantizeBackward`."""

    op: Literal["quantize_per_group_backward"] = "quantize_per_group_backward"


def reference(
    problem: QuantizeBackward, *, d_output: Any, input: Any, scale: Any, zero_point: Any, d_input: Any
) -> None:
    """Write `d_input` by the formula of the module."""
    bounds = (problem.q_min, problem.q_max)
    arrays = (d_output, input, scale, zero_point, d_input)
    affine.straight_through(problem.granularity.spread, problem.input_element, bounds, arrays, divide=True)


OPS = elementwise_ops(
    reference,
    {
        QuantizePerTensorBackwardDescriptor: "baracuda_kernels/quantize/per_tensor_backward.rs",
        QuantizePerChannelBackwardDescriptor: "baracuda_kernels/quantize/per_channel_backward.rs",
        QuantizePerTokenBackwardDescriptor: "baracuda_kernels/quantize/per_token_backward.rs",
        QuantizePerGroupBackwardDescriptor: "baracuda_kernels/quantize/per_group_backward.rs",
    },
)
