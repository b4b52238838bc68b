"""SmoothQuant linear: W8A8 with one static activation scale for the whole tensor.

Formula
-------
acc = sum_k (act_q[m, k] - act_zero_point) (weight_q[n, k] - weight_zero_point[n]), exactly; v = RN_C(RN_C(act_scale *
weight_scale[n]) * RN_C(acc)); then, by epilogue, RN_C(v + bias[n]) and relu, gelu or silu; output = RN_T(v), or
clamp(rne(RN_C(v / output_scale)) + output_zero_point) for an s8 or u8 output. C is f64 for an f64 output, else f32.
K == 0 gives v = +0.

relu gives +0 for -0 and for negative values; NaN stays NaN. gelu (erf form) and silu are E(v), where E is the function
of that name in `skuda.kernels.quantize.curves`, in f64: RN_T(E(v)) is rounded once, and codes are those of RN_C(E(v)).

`weight_q` has one row per output channel, as torch stores `Linear.weight`. For s4 it is packed as
`skuda.kernels.linear.packed` says, and stands for the s8 codes scale[n, g] level[n, k] + offset[n, g], with levels 0 to
15 and an integer scale and offset for each group of `group_size` elements of K.

Elements
--------
activation s8, u8, s16; weight s8, u8, packed s4, beside an s16 activation s8, packed s4, s16; output f16, bf16, f32,
f64, s8, u8; `weight_scale` and `bias` C or any narrower float; `weight_zero_point` s32. `act_scale_scratch` is
optional: given, it is filled with `act_scale`. s16 codes are stored as in `scaled_linear`.

Units
-----
`act_scale` and `weight_scale` are real units per code step; `bias` is real; `output_scale` is real units per output
code.

Errors
------
`InvalidProblem` for `m`, `n` or `k` outside [0, 2^31-1]; a `group_size` other than 32, 64 or 128 for an s4 weight, and
other than 0 for another; weight zero points of an s4 weight; zero points of s16 codes; an s16 weight beside another
activation, and a u8 weight beside an s16 one; an `act_scale` that is not finite (0 and negative are allowed); an
`act_zero_point` outside the range of `activation_element`; an argument that is missing, unknown, of
another element or shape, or that overlaps an output; an `output_scale` that is 0 or not finite.
`Unsupported` for an element outside the lists above.

Method: Xiao et al., SmoothQuant, ICML 2023. The offline half is in `skuda.tools.smoothquant`.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any, Literal, Self

import numpy as np
from pydantic import model_validator

from skuda.kernels.blocks import planes
from skuda.kernels.dtypes import compute_dtype
from skuda.kernels.linear import strategies
from skuda.kernels.linear.drawn import draw
from skuda.kernels.linear.epilogue import Epilogue
from skuda.kernels.linear.problem import (
    ALIGNED_SIZES,
    OUTPUTS,
    SHIFTED,
    SIZES,
    CodedProblem,
    packed_cases,
    weight_and_output,
    wide_cases,
)
from skuda.kernels.linear.reference import Codes, write_layer
from skuda.registry.argument import ArgumentSpec, Role
from skuda.registry.constraints import OneOf
from skuda.registry.elements import CODES8, WHOLE_CODES, ElementKind
from skuda.registry.op import Case, Op
from skuda.registry.value import Int32, Real
from skuda.registry.vocabulary import EpilogueKind


class SmoothQuantLinearDescriptor(CodedProblem):
    """Problem of `smoothquant_linear`.

    Attributes
    ----------
    act_scale : float
        Scale of the whole activation, a constant of the model.
    act_zero_point : int
        Code of the activation that stands for 0.0.
    others
        As in `CodedProblem`.
    """

    op: Literal["smoothquant_linear"] = "smoothquant_linear"
    act_scale: Real
    act_zero_point: Int32 = 0
    signature = (
        ArgumentSpec("act_q", Role.INPUT, "activation_element", "m, k"),
        *weight_and_output(),
        ArgumentSpec("act_scale_scratch", Role.SCRATCH, "compute", "m", required=False),
    )

    @model_validator(mode="after")
    def _rules(self) -> Self:
        with np.errstate(over="ignore"):
            rounded = compute_dtype(self.output_element).type(self.act_scale)
        if not np.isfinite(rounded):
            self.refuse("act_scale", self.act_scale, f"be finite in {self.compute}")
        low, high = (0, 0) if self.activation_element.is_split else self.activation_element.integer_range or (0, 0)
        if not low <= self.act_zero_point <= high:
            rule = f"lie in [{low}, {high}], as codes of {self.activation_element} need"
            self.refuse("act_zero_point", self.act_zero_point, rule)
        return self

    def __eq__(self, other: object) -> bool:
        # 0.0 == -0.0, but they give zeros of different sign.
        return super().__eq__(other) and math.copysign(1, self.act_scale) == math.copysign(1, other.act_scale)  # type: ignore[attr-defined]  # equal classes

    __hash__ = CodedProblem.__hash__

    @property
    def static_scale(self) -> tuple[float, int] | None:
        """Scale and zero point of the activation."""
        return self.act_scale, self.act_zero_point

    @property
    def shifts_activation(self) -> bool:
        """Whether the activation has a zero point other than 0; the kernel then adds up the weight's codes."""
        return self.act_zero_point != 0


@np.errstate(all="ignore")  # infinities and NaN are valid results here
def reference(
    problem: SmoothQuantLinearDescriptor,
    *,
    act_q: Any,
    weight_q: Any,
    weight_scale: Any,
    output: Any,
    bias: Any = None,
    weight_zero_point: Any = None,
    output_scale: Any = None,
    output_zero_point: Any = None,
    act_scale_scratch: Any = None,
) -> None:
    """Write `output` by the formula of the module."""
    scale = compute_dtype(problem.output_element).type(problem.act_scale)
    if act_scale_scratch is not None:
        act_scale_scratch[...] = scale

    of_activation = planes(act_q, problem.activation_element)

    def quantized(rows: slice) -> tuple[Codes, Any]:
        found = np.full(rows.stop - rows.start, scale)
        return lambda part: tuple(plane[rows, part] for plane in of_activation), found

    if output.size == 0:
        return
    epilogue = Epilogue(problem, weight_scale, bias, output_scale, output_zero_point)
    write_layer(epilogue, quantized, problem.act_zero_point, (weight_q, weight_zero_point), output)


def _cases() -> tuple[Case, ...]:
    made = []
    for number, kinds in enumerate(product(OUTPUTS, CODES8, CODES8, EpilogueKind)):
        fields: dict[str, Any] = dict(
            zip(("output_element", "activation_element", "weight_element", "epilogue"), kinds, strict=True)
        )
        m, n, k = SIZES[number % len(SIZES)]
        scale, zero_point = (0.0131, -0.25, 0.0)[number % 7 % 3], (0, *(kinds[1].integer_range or ()))[number % 3]
        fields |= {"act_zero_point": zero_point, "has_weight_zero_point": number % 2 == 1}
        problem = SmoothQuantLinearDescriptor(m=m, n=n, k=k, act_scale=scale, **fields)
        made.append(Case(problem, "special" if number % 5 == 0 else "normal"))
    for number, aligned in enumerate(product(OUTPUTS, CODES8, EpilogueKind)):
        fields = dict(zip(("output_element", "weight_element", "epilogue"), aligned, strict=True))
        m, n, k = ALIGNED_SIZES[number % len(ALIGNED_SIZES)]
        fields["activation_element"] = CODES8[number // 3 % 2]
        problem = SmoothQuantLinearDescriptor(m=m, n=n, k=k, act_scale=0.0131, **fields)
        made.append(Case(problem, "special" if number % 7 == 0 else "normal"))
    for number, shifted in enumerate(product(OUTPUTS, CODES8, EpilogueKind)):
        fields = dict(zip(("output_element", "weight_element", "epilogue"), shifted, strict=True))
        (m, n, k), activation, weight = SHIFTED[number % len(SHIFTED)]
        element = CODES8[number // 3 % 2]
        zero_point = (element.integer_range or ())[number // 5 % 2] if activation else 0
        fields |= {"activation_element": element, "act_zero_point": zero_point, "has_weight_zero_point": weight}
        problem = SmoothQuantLinearDescriptor(m=m, n=n, k=k, act_scale=0.0131, **fields)
        made.append(Case(problem, "special" if number % 7 == 0 else "normal"))
    for number, (m, n, k), shifts, fields in packed_cases(OUTPUTS):
        element = CODES8[number // 2 % 2]
        zero_point = (element.integer_range or ())[number // 4 % 2] if shifts else 0
        fields |= {"output_element": fields.pop("element"), "activation_element": element}
        problem = SmoothQuantLinearDescriptor(m=m, n=n, k=k, act_scale=0.0131, act_zero_point=zero_point, **fields)
        made.append(Case(problem, "special" if number % 5 == 0 else "normal"))
    for number, (m, n, k), fields in wide_cases(OUTPUTS):
        fields |= {"output_element": fields.pop("element"), "activation_element": ElementKind.S16}
        problem = SmoothQuantLinearDescriptor(m=m, n=n, k=k, act_scale=0.000131, **fields)
        made.append(Case(problem, "special" if number % 5 == 0 else "normal"))
    return tuple(made)


CASES = _cases()
SKUS = strategies.skus(
    SmoothQuantLinearDescriptor, __name__, OUTPUTS, OneOf(field="activation_element", allowed=WHOLE_CODES)
)
OP = Op(SmoothQuantLinearDescriptor, reference, CASES, SKUS, "baracuda_kernels/quantize/smoothquant.rs", draw=draw)
