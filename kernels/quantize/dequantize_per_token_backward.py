"""Gradient of dequantize per token: one scale per row.

Formula
-------
d_input = RN_T(RN_C(d_output * scale)), the gradient with respect to the codes as real numbers.

Shapes
------
`d_output` and `d_input` [n, d]; `scale` [n].

Elements
--------
f16, bf16, f32, f64 for both.

Units
-----
`scale` is real units per code step and `zero_point` the code that stands for 0.0. Scales have the compute type C (f64
for f64 data, f32 otherwise) or the data's own, which is widened; zero points are s32 and never wrap.

Errors
------
`InvalidProblem` for `n` or `d` outside [0, 2^31-1]; an argument that is missing, unknown, of another element or
shape, or that overlaps an output; a scalar scale that is 0 or not finite (array scales follow the formula: x / 0 is
+-inf or NaN).
`Unsupported` for an element outside the lists above.
"""

from __future__ import annotations

from typing import Any, Literal

from skuda.kernels.offers import cuda_skus, numpy_skus
from skuda.kernels.quantize import _affine
from skuda.kernels.quantize._cases import cases
from skuda.kernels.quantize._cuda import ELEMENTWISE
from skuda.kernels.quantize._problems import DequantizeBackward, PerToken
from skuda.registry.elements import FLOATS
from skuda.registry.op import Op


class DequantizePerTokenBackwardDescriptor(DequantizeBackward, PerToken):
    """Problem of `dequantize_per_token_backward`; for the fields see `PerToken` and `DequantizeBackward`."""

    op: Literal["dequantize_per_token_backward"] = "dequantize_per_token_backward"


def reference(problem: DequantizePerTokenBackwardDescriptor, *, d_output: Any, scale: Any, d_input: Any) -> None:
    """Write `d_input`; see the module."""
    _affine.scale_gradient(problem.spread(), problem.output_element, (d_output, scale, d_input))


CASES = cases(DequantizePerTokenBackwardDescriptor)
SKUS = (
    *cuda_skus(DequantizePerTokenBackwardDescriptor, __name__, FLOATS, launch=ELEMENTWISE),
    *numpy_skus(DequantizePerTokenBackwardDescriptor, __name__, FLOATS),
)
OP = Op(
    DequantizePerTokenBackwardDescriptor,
    reference,
    CASES,
    SKUS,
    source="baracuda_kernels/quantize/per_token_backward.rs",
)
