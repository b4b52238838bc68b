"""RMS norm and quantize: rows divided by their root mean square, then quantized, in one pass.

Formula
-------
h = input, or RN_T(RN_C(input + residual)), which is also written to `residual_out`.
q = fold(RN_C(h h)); r = RN_C(1 / RN_C(sqrt(RN_C(RN_C(q / C(d)) + eps)))); y = RN_T(RN_C(RN_C(h r) weight)), without a
weight RN_T(RN_C(h r)). y is also written to `normalized_out`, if `has_normalized`.
fold is the sum of a row in the fixed order that `skuda.kernels.quantize.norm` defines, by octets and 1024 lanes. A
row's result depends only on the row.
Then y is quantized exactly as by the named op. Dynamic: `dynamic_range` per token, symmetric: m = max |y| over the row,
NaN skipped; s = RN_C(m / q_max), and if that is 0, s = 1; output = clamp(rne(RN_C(y / s)), q_min, q_max). With
`nonfinite` propagate, a NaN counts as an infinity in m, so s is infinite and all codes of the row are 0, clamped.
Static: `quantize_per_tensor`: output = clamp(rne(RN_C(y / scale)) + zero_point, q_min, q_max). A NaN y quantizes to the
zero point; an infinity among h makes the row's y NaN or 0.

Rows may be slices of wider arrays.

Elements
--------
data and weight f16, bf16, f32, f64, all the same (T); output s8, u8, s16 (stored as [n, 2 d]
s8: the high halves of a row, then its low ones). C is f64 for f64 data, else f32. `scale_out` has C, `scale` C or T,
`zero_point` is s32.

Units
-----
`scale` and `scale_out` are real units of y per code step, `zero_point` is the code that stands for 0.0; `eps` has the
unit of h squared.

Errors
------
`InvalidProblem` for `n` or `d` outside [0, 2^31-1]; an `eps` that is negative or not finite in C; `q_max` below `q_min`
or bounds outside the range of `output_element`; `q_max` below 1 if the scaling is dynamic; an argument that is missing,
unknown, of another element or shape, or that overlaps an output; a scalar scale that is 0 or not finite.
`Unsupported` for an element outside the lists above.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from skuda.kernels.offers import cuda_skus, numpy_skus
from skuda.kernels.quantize import norm
from skuda.registry.elements import FLOATS, WHOLE_CODES
from skuda.registry.op import Op


class RmsNormQuantizeDescriptor(norm.NormProblem):
    """Problem of `rms_norm_quantize`; for the other fields see `NormProblem`."""

    kernel: ClassVar[str] = "rms_norm_quantize"
    op: Literal["rms_norm_quantize"] = "rms_norm_quantize"
    centred: ClassVar[bool] = False
    signature = norm.signature("weight")


def reference(problem: RmsNormQuantizeDescriptor, **arrays: Any) -> None:
    """Write `output`, and `scale_out`, `residual_out` and `normalized_out` if the problem has them."""
    norm.write(problem, arrays)


CASES = norm.cases(RmsNormQuantizeDescriptor)
SKUS = (
    *cuda_skus(
        RmsNormQuantizeDescriptor,
        __name__,
        FLOATS,
        WHOLE_CODES,
        launch="skuda.kernels.quantize.norm_launch:norm",
        entry_point="rms_norm_quantize_4",
        summary="one read of every row",
    ),
    *numpy_skus(RmsNormQuantizeDescriptor, __name__, FLOATS, WHOLE_CODES),
)
OP = Op(
    RmsNormQuantizeDescriptor,
    reference,
    CASES,
    SKUS,
    source="Zhang and Sennrich, Root Mean Square Layer Normalization, NeurIPS 2019",
)
