"""Dequantize: integer codes to floating data.

Formula
-------
output = RN_T(RN_C(C(input - zero_point) * scale)). The difference is exact before it is rounded to the compute type.

Elements
--------
input s8, u8, s4, u4 (two to a byte, low nibble first, every row starting at a byte); output f16, bf16, f32, f64.

Units
-----
`scale` is real units per code step and `zero_point` the code that stands for 0.0. Scales have the compute type C (f64
for f64 data, f32 otherwise) or the data's own, which is widened; zero points are s32 and never wrap.

Errors
------
`InvalidProblem` for `numel` outside [0, 2^63-1] or another size outside [0, 2^31-1]; an `axis` outside the rank
(negative ones count from the end); a `group_size` below 1 or one that does not divide `axis_size`; an argument that is
missing, unknown, of another element or shape, or that overlaps an output; a scalar scale that is 0 or not finite (array
scales follow the formula).
`Unsupported` for an element outside the lists above.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np

from skuda.kernels.blocks import read
from skuda.kernels.dtypes import compute_dtype
from skuda.kernels.quantize import affine
from skuda.kernels.quantize.elementwise import elementwise_ops
from skuda.kernels.quantize.granularity import (
    DATA,
    SCALE,
    ZERO_POINT,
    AffineProblem,
    PerChannel,
    PerGroup,
    PerTensor,
    PerToken,
)
from skuda.registry.argument import ArgumentSpec, Role
from skuda.registry.elements import ElementKind


class Dequantize(AffineProblem):
    """Integer codes to floating data.

    Attributes
    ----------
    input_element : ElementKind
        Element of the codes: s8, u8, s4 or u4.
    output_element : ElementKind
        Element of the data: f16, bf16, f32 or f64.
    """

    kernel: ClassVar[str] = "dequantize"
    input_element: ElementKind
    output_element: ElementKind
    element_field: ClassVar[str] = "output_element"
    aux_field: ClassVar[str | None] = "input_element"
    signature = (
        ArgumentSpec("input", Role.INPUT, "input_element", DATA),
        SCALE,
        ZERO_POINT,
        ArgumentSpec("output", Role.OUTPUT, "output_element", DATA),
    )


class DequantizePerTensorDescriptor(Dequantize, PerTensor):
    """Problem of `dequantize_per_tensor`; for the fields see `PerTensor` and `Dequantize`."""

    op: Literal["dequantize_per_tensor"] = "dequantize_per_tensor"


class DequantizePerChannelDescriptor(Dequantize, PerChannel):
    """Problem of `dequantize_per_channel`; for the fields see `PerChannel` and `Dequantize`."""

    op: Literal["dequantize_per_channel"] = "dequantize_per_channel"


class DequantizePerTokenDescriptor(Dequantize, PerToken):
    """Problem of `dequantize_per_token`; for the fields see `PerToken` and `Dequantize`."""

    op: Literal["dequantize_per_token"] = "dequantize_per_token"


class DequantizePerGroupDescriptor(Dequantize, PerGroup):
    """Problem of `dequantize_per_group`; for the fields see `PerGroup` and `Dequantize`."""

    op: Literal["dequantize_per_group"] = "dequantize_per_group"


@np.errstate(all="ignore")  # infinities and NaN are valid results here
def reference(problem: Dequantize, *, input: Any, scale: Any, zero_point: Any, output: Any) -> None:
    """Write `output` by the formula of the module."""
    compute = compute_dtype(problem.output_element)
    for index, s, z in affine.segments(output.shape, problem.granularity.spread, scale, zero_point, compute):
        q = read(input, problem.input_element, index)
        output[index] = affine.real_value(q, z, s, compute).astype(output.dtype)


OPS = elementwise_ops(
    reference,
    {
        DequantizePerTensorDescriptor: "baracuda_kernels/quantize/per_tensor.rs",
        DequantizePerChannelDescriptor: "baracuda_kernels/quantize/per_channel.rs",
        DequantizePerTokenDescriptor: "baracuda_kernels/quantize/per_token.rs",
        DequantizePerGroupDescriptor: "baracuda_kernels/quantize/per_group.rs",
    },
)
