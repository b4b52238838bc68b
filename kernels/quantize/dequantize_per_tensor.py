"""Dequantize per tensor: one scale for everything.

Formula
-------
output = RN_T(RN_C(C(input - zero_point) * scale)). The difference is exact before it is rounded to the compute type.

Shapes
------
`input` `numel` elements of any shape; `scale` and `zero_point` a number, or an array of one element; `output` as
`input`.

Elements
--------
input s8, u8, s4, u4 (two to a byte, low nibble first, every row starting at a byte); output f16, bf16, f32, f64.

Units
-----
`scale` is real units per code step and `zero_point` the code that stands for 0.0. Scales have the compute type C (f64
for f64 data, f32 otherwise) or the data's own, which is widened; zero points are s32 and never wrap.

Errors
------
`InvalidProblem` for `numel` outside [0, 2^63-1]; an argument that is missing, unknown, of another element or shape,
or that overlaps an output; a scalar scale that is 0 or not finite (array scales follow the formula: x / 0 is +-inf or
NaN).
`Unsupported` for an element outside the lists above.
"""

from __future__ import annotations

from typing import Any, Literal

from skuda.kernels.offers import cuda_skus, numpy_skus
from skuda.kernels.quantize import _affine
from skuda.kernels.quantize._cases import cases
from skuda.kernels.quantize._cuda import ELEMENTWISE
from skuda.kernels.quantize._problems import Dequantize, PerTensor
from skuda.registry.elements import CODES, FLOATS
from skuda.registry.op import Op


class DequantizePerTensorDescriptor(Dequantize, PerTensor):
    """Problem of `dequantize_per_tensor`; for the fields see `PerTensor` and `Dequantize`."""

    op: Literal["dequantize_per_tensor"] = "dequantize_per_tensor"


def reference(problem: DequantizePerTensorDescriptor, *, input: Any, scale: Any, zero_point: Any, output: Any) -> None:
    """Write `output`; see the module."""
    elements = (problem.input_element, problem.output_element)
    _affine.dequantize(problem.spread(), elements, (input, scale, zero_point, output))


CASES = cases(DequantizePerTensorDescriptor)
SKUS = (
    *cuda_skus(DequantizePerTensorDescriptor, __name__, FLOATS, CODES, launch=ELEMENTWISE),
    *numpy_skus(DequantizePerTensorDescriptor, __name__, FLOATS, CODES),
)
OP = Op(
    DequantizePerTensorDescriptor,
    reference,
    CASES,
    SKUS,
    source="baracuda_kernels/quantize/per_tensor.rs",
)
