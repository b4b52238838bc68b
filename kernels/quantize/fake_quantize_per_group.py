"""Fake-quantize per group: one scale per run of a row.

Formula
-------
q = clamp(rne(RN_C(input / scale)) + zero_point, q_min, q_max); output = RN_T(RN_C(C(q - zero_point) * scale)). rne
rounds to nearest, ties to even; RN_C rounds to the compute type; the division is a true one. A zero result is +0; NaN
counts as 0, infinities saturate.

Shapes
------
`input` and `output` [outer_size, axis_size]; `scale` and `zero_point` [outer_size, axis_size / group_size].

Elements
--------
f16, bf16, f32, f64, the same in and out.

Units
-----
`scale` is real units per code step and `zero_point` the code that stands for 0.0. Scales have the compute type C (f64
for f64 data, f32 otherwise) or the data's own, which is widened; zero points are s32 and never wrap.

Errors
------
`InvalidProblem` for a size outside [0, 2^31-1], a `group_size` below 1 or one that does not divide `axis_size`;
`q_max` below `q_min`; an argument that is missing, unknown, of another element or shape, or that overlaps an output;
a scalar scale that is 0 or not finite (array scales follow the formula: x / 0 is +-inf or NaN).
`Unsupported` for an element outside the lists above.
"""

from __future__ import annotations

from typing import Any, Literal

from skuda.kernels.offers import cuda_skus, numpy_skus
from skuda.kernels.quantize import _affine
from skuda.kernels.quantize._cases import cases
from skuda.kernels.quantize._cuda import ELEMENTWISE
from skuda.kernels.quantize._problems import FakeQuantize, PerGroup
from skuda.registry.elements import FLOATS
from skuda.registry.op import Op


class FakeQuantizePerGroupDescriptor(FakeQuantize, PerGroup):
    """Problem of `fake_quantize_per_group`; for the fields see `PerGroup` and `FakeQuantize`."""

    op: Literal["fake_quantize_per_group"] = "fake_quantize_per_group"


def reference(problem: FakeQuantizePerGroupDescriptor, *, input: Any, scale: Any, zero_point: Any, output: Any) -> None:
    """Write `output`; see the module."""
    bounds = (problem.q_min, problem.q_max)
    arrays = (input, scale, zero_point, output)
    _affine.fake_quantize(problem.spread(), problem.input_element, bounds, arrays)


CASES = cases(FakeQuantizePerGroupDescriptor)
SKUS = (
    *cuda_skus(FakeQuantizePerGroupDescriptor, __name__, FLOATS, launch=ELEMENTWISE),
    *numpy_skus(FakeQuantizePerGroupDescriptor, __name__, FLOATS),
)
OP = Op(
    FakeQuantizePerGroupDescriptor,
    reference,
    CASES,
    SKUS,
    source="baracuda_kernels/quantize/fake_quantize.rs, its formula per group",
)
