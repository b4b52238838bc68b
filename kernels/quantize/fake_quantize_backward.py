"""Gradient of fake-quantize, straight through.

Formula
-------
t = rne(RN_C(input / scale)); d_input = d_output where q_min <= t + zero_point <= q_max, else 0. The mask is inclusive.
rne rounds to nearest, ties to even; RN_C rounds to the compute type; the division is a true one. NaN inputs have
gradient 0.

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
`q_min`; an argument that is missing, unknown, of another element or shape, or that overlaps an output; a scalar scale
that is 0 or not finite (array scales follow the formula: x / 0 is +-inf or NaN).
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


class FakeQuantizeBackward(Bounded):
    """Straight-through gradient of `fake_quantize`.

    Attributes
    ----------
    q_min, q_max : int
        The forward's bounds.
    input_element : ElementKind
        Element of the forward's input and of the gradients.
    """

    kernel: ClassVar[str] = "fake_quantize_backward"
    in_place: ClassVar[bool] = True
    signature = (
        ArgumentSpec("d_output", Role.INPUT, "input_element", DATA),
        ArgumentSpec("input", Role.INPUT, "input_element", DATA),
        SCALE,
        ZERO_POINT,
        ArgumentSpec("d_input", Role.OUTPUT, "input_element", DATA),
    )


class FakeQuantizeBackwardDescriptor(FakeQuantizeBackward, PerTensor):
    """Problem of `fake_quantize_backward`; for the fields see `PerTensor` and `FakeQuantizeBackward`."""

    op: Literal["fake_quantize_backward"] = "fake_quantize_backward"


class FakeQuantizePerChannelBackwardDescriptor(FakeQuantizeBackward, PerChannel):
    """Problem of `fake_quantize_per_channel_backward`; for the fields see `PerChannel` and `FakeQuantizeBackward`."""

    op: Literal["fake_quantize_per_channel_backward"] = "fake_quantize_per_channel_backward"


class FakeQuantizePerTokenBackwardDescriptor(FakeQuantizeBackward, PerToken):
    """Problem of `fake_quantize_per_token_backward`; for the fields see `PerToken` and `FakeQuantizeBackward`."""

    op: Literal["fake_quantize_per_token_backward"] = "fake_quantize_per_token_backward"


class FakeQuantizePerGroupBackwardDescriptor(FakeQuantizeBackward, PerGroup):
    """Problem of `fake_quantize_per_group_backward`; for the fields see `PerGroup` and `FakeQuantizeBackward`."""

    op: Literal["fake_quantize_per_group_backward"] = "fake_quantize_per_group_backward"


def reference(
    problem: FakeQuantizeBackward, *, d_output: Any, input: Any, scale: Any, zero_point: Any, d_input: Any
) -> None:
    """Write `d_input` by the formula of the module."""
    bounds = (problem.q_min, problem.q_max)
    arrays = (d_output, input, scale, zero_point, d_input)
    affine.straight_through(problem.granularity.spread, problem.input_element, bounds, arrays, divide=False)


OPS = elementwise_ops(
    reference,
    {
        FakeQuantizeBackwardDescriptor: "baracuda_kernels/quantize/fake_quantize.rs",
        FakeQuantizePerChannelBackwardDescriptor: "baracuda_kernels/quantize/fake_quantize.rs, its formula per channel",
        FakeQuantizePerTokenBackwardDescriptor: "baracuda_kernels/quantize/fake_quantize.rs, its formula per token",
        FakeQuantizePerGroupBackwardDescriptor: "baracuda_kernels/quantize/fake_quantize.rs, its formula per group",
    },
)
