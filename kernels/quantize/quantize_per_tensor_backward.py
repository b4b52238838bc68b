"""Gradient of quantize per tensor, straight through: one scale for everything.

Formula
-------
t = rne(RN_C(input / scale)); d_input = RN_T(RN_C(d_output / scale)) where q_min <= t + zero_point <= q_max, else 0.
The mask is inclusive. rne rounds to nearest, ties to even; RN_C rounds to the compute type; the division is a true
one. NaN inputs have gradient 0.

Shapes
------
`d_output`, `input` and `d_input` `numel` elements of any shape; `scale` and `zero_point` a number, or an array of one
element.

Elements
--------
f16, bf16, f32, f64 for all three.

Units
-----
`scale` is real units per code step and `zero_point` the code that stands for 0.0. Scales have the compute type C (f64
for f64 data, f32 otherwise) or the data's own, which is widened; zero points are s32 and never wrap.

Errors
------
`InvalidProblem` for `numel` outside [0, 2^63-1]; `q_max` below `q_min` or, where the codes' element is given, bounds
outside its range; an argument that is missing, unknown, of another element or shape, or that overlaps an output; a
scalar scale that is 0 or not finite (array scales follow the formula: x / 0 is +-inf or NaN).
`Unsupported` for an element outside the lists above.
"""

from __future__ import annotations

from typing import Any, Literal

from skuda.kernels.offers import cuda_skus, numpy_skus
from skuda.kernels.quantize import _affine
from skuda.kernels.quantize._cases import cases
from skuda.kernels.quantize._cuda import ELEMENTWISE
from skuda.kernels.quantize._problems import PerTensor, QuantizeBackward
from skuda.registry.elements import FLOATS
from skuda.registry.op import Op


class QuantizePerTensorBackwardDescriptor(QuantizeBackward, PerTensor):
    """Problem of `quantize_per_tensor_backward`; for the fields see `PerTensor` and `QuantizeBackward`."""

    op: Literal["quantize_per_tensor_backward"] = "quantize_per_tensor_backward"


def reference(
    problem: QuantizePerTensorBackwardDescriptor,
    *,
    d_output: Any,
    input: Any,
    scale: Any,
    zero_point: Any,
    d_input: Any,
) -> None:
    """Write `d_input`; see the module."""
    bounds = (problem.q_min, problem.q_max)
    arrays = (d_output, input, scale, zero_point, d_input)
    _affine.straight_through(problem.spread(), problem.input_element, bounds, arrays, divide=True)


CASES = cases(QuantizePerTensorBackwardDescriptor)
SKUS = (
    *cuda_skus(QuantizePerTensorBackwardDescriptor, __name__, FLOATS, launch=ELEMENTWISE),
    *numpy_skus(QuantizePerTensorBackwardDescriptor, __name__, FLOATS),
)
OP = Op(
    QuantizePerTensorBackwardDescriptor,
    reference,
    CASES,
    SKUS,
    source="baracuda_kernels/quantize/per_tensor_backward.rs",
)
