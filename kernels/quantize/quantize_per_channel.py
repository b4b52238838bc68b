"""Quantize per channel: one scale per index of one axis.

Formula
-------
t = rne(RN_C(input / scale)); output = clamp(t + zero_point, q_min, q_max). rne rounds to nearest, ties to even; RN_C
rounds to the compute type; the division is a true one. NaN quantizes to clamp(zero_point), infinities saturate.

Shapes
------
`input` `shape`, any rank, any `axis`; `scale` and `zero_point` [C], C = shape[axis]; `output` as `input`.

Elements
--------
input f16, bf16, f32, f64; output s8, u8, s4, u4 (two to a byte, low nibble first, every row starting at a byte).

Units
-----
`scale` is real units per code step and `zero_point` the code that stands for 0.0. Scales have the compute type C (f64
for f64 data, f32 otherwise) or the data's own, which is widened; zero points are s32 and never wrap.

Errors
------
`InvalidProblem` for an extent outside [0, 2^31-1], an `axis` outside the rank (negative ones count from the end);
`q_max` below `q_min` or bounds outside the range of `output_element`; an argument that is missing, unknown, of
another element or shape, or that overlaps an output; a scalar scale that is 0 or not finite (array scales follow the
formula: x / 0 is +-inf or NaN).
`Unsupported` for an element outside the lists above.
"""

from __future__ import annotations

from typing import Any, Literal

from skuda.kernels.offers import cuda_skus, numpy_skus
from skuda.kernels.quantize import _affine
from skuda.kernels.quantize._cases import cases
from skuda.kernels.quantize._cuda import ELEMENTWISE
from skuda.kernels.quantize._problems import PerChannel, Quantize
from skuda.registry.elements import CODES, FLOATS
from skuda.registry.op import Op


class QuantizePerChannelDescriptor(Quantize, PerChannel):
    """Problem of `quantize_per_channel`; for the fields see `PerChannel` and `Quantize`."""

    op: Literal["quantize_per_channel"] = "quantize_per_channel"


def reference(problem: QuantizePerChannelDescriptor, *, input: Any, scale: Any, zero_point: Any, output: Any) -> None:
    """Write `output`; see the module."""
    elements = (problem.input_element, problem.output_element)
    arrays = (input, scale, zero_point, output)
    _affine.quantize(problem.spread(), elements, (problem.q_min, problem.q_max), arrays)


CASES = cases(QuantizePerChannelDescriptor)
SKUS = (
    *cuda_skus(QuantizePerChannelDescriptor, __name__, FLOATS, CODES, launch=ELEMENTWISE),
    *numpy_skus(QuantizePerChannelDescriptor, __name__, FLOATS, CODES),
)
OP = Op(
    QuantizePerChannelDescriptor,
    reference,
    CASES,
    SKUS,
    source="baracuda_kernels/quantize/per_channel.rs",
)
