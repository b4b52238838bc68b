"""Gradient of dequantize with respect to the codes, as if they were real numbers.

Formula
-------
d_input = RN_T(RN_C(d_output * scale)).

Elements
--------
f16, bf16, f32, f64 for both.

Units
-----
`scale` is real units per code step. It has the compute type C (f64 for f64 data, f32 otherwise) or the data's own,
which is widened.

Errors
------
`InvalidProblem` for `numel` outside [0, 2^63-1] or another size outside [0, 2^31-1]; an `axis` outside the rank
(negative ones count from the end); a `group_size` below 1 or one that does not divide `axis_size`; an argument that is
missing, unknown, of another element or shape, or that overlaps an output; a scalar scale that is 0 or not finite (array
scales follow the formula).
`Unsupported` for an element outside the list above.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np

from skuda.kernels.dtypes import compute_dtype
from skuda.kernels.quantize import affine
from skuda.kernels.quantize.elementwise import elementwise_ops
from skuda.kernels.quantize.granularity import DATA, SCALE, AffineProblem, PerChannel, PerGroup, PerTensor, PerToken
from skuda.registry.argument import ArgumentSpec, Role
from skuda.registry.elements import ElementKind


class DequantizeBackward(AffineProblem):
    """Gradient of `dequantize` with respect to the codes, as if they were real numbers.

    Attributes
    ----------
    input_element : ElementKind or None
        The forward's, one of the codes (s8, u8, s4, u4); it does not change the result.
    output_element : ElementKind
        Element of the gradients.
    """

    kernel: ClassVar[str] = "dequantize_backward"
    input_element: ElementKind | None = None
    output_element: ElementKind
    element_field: ClassVar[str] = "output_element"
    in_place: ClassVar[bool] = True
    signature = (
        ArgumentSpec("d_output", Role.INPUT, "output_element", DATA),
        SCALE,
        ArgumentSpec("d_input", Role.OUTPUT, "output_element", DATA),
    )


class DequantizePerTensorBackwardDescriptor(DequantizeBackward, PerTensor):
    """Problem of `dequantize_per_tensor_backward`; for the fields see `PerTensor` and `DequantizeBackward`."""

    op: Literal["dequantize_per_tensor_backward"] = "dequantize_per_tensor_backward"


class DequantizePerChannelBackwardDescriptor(DequantizeBackward, PerChannel):
    """Problem of `dequantize_per_channel_backward`; for the fields see `PerChannel` and `DequantizeBackward`."""

    op: Literal["dequantize_per_channel_backward"] = "dequantize_per_channel_backward"


class DequantizePerTokenBackwardDescriptor(DequantizeBackward, PerToken):
    """Problem of `dequantize_per_token_backward`; for the fields see `PerToken` and `DequantizeBackward`."""

    op: Literal["dequantize_per_token_backward"] = "dequantize_per_token_backward"


class DequantizePerGroupBackwardDescriptor(DequantizeBackward, PerGroup):
    """Problem of `dequantize_per_group_backward`; for the fields see `PerGroup` and `DequantizeBackward`."""

    op: Literal["dequantize_per_group_backward"] = "dequantize_per_group_backward"


@np.errstate(all="ignore")  # infinities and NaN are valid results here
def reference(problem: DequantizeBackward, *, d_output: Any, scale: Any, d_input: Any) -> None:
    """Write `d_input` by the formula of the module."""
    compute = compute_dtype(problem.output_element)
    for index, s, _ in affine.segments(d_output.shape, problem.granularity.spread, scale, scale, compute):
        d_input[index] = np.multiply(d_output[index].astype(compute), s).astype(d_input.dtype)


OPS = elementwise_ops(
    reference,
    {
        DequantizePerTensorBackwardDescriptor: "baracuda_kernels/quantize/per_tensor_backward.rs",
        DequantizePerChannelBackwardDescriptor: "baracuda_kernels/quantize/per_channel_backward.rs",
        DequantizePerTokenBackwardDescriptor: "baracuda_kernels/quantize/per_token_backward.rs",
        DequantizePerGroupBackwardDescriptor: "baracuda_kernels/quantize/per_group_backward.rs",
    },
)
