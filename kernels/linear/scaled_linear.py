"""Scaled linear: W8A8 with everything given as arrays, or its exact sums.

Formula
-------
acc = sum_k (act_q[m, k] - act_zero_point[m]) (weight_q[n, k] - weight_zero_point[n]), exactly; v =
RN_C(RN_C(act_scale[m] * weight_scale[n]) * RN_C(acc)); then, by epilogue, RN_C(v + bias[n]) and relu, gelu or silu;
output = RN_T(v), or clamp(rne(RN_C(v / output_scale)) + output_zero_point) for an s8 or u8 output. C is f64 for an f64
output, else f32. K == 0 gives v = +0. With `act_scale_scope` tensor, `act_scale[0]` and `act_zero_point[0]` apply to
every row.

For an s32 output, output = sum_k act_q[m, k] weight_q[n, k], exactly. Layers that share a K add up such outputs. It
takes no scales, zero points, bias or other epilogue. With s16 codes the sums are s64.

s16 by s16 leaves out the product of the low halves: with a = 256 ah + al and w = 256 wh + wl, acc = sum_k 65536 ah wh +
256 (ah wl + al wh). That changes acc by at most 16384 K. s16 codes take no zero points.

relu gives +0 for -0 and for negative values; NaN stays NaN. gelu (erf form) and silu are E(v), where E is the function
of that name in `skuda.kernels.quantize.curves`, in f64: RN_T(E(v)) is rounded once, and codes are those of RN_C(E(v)).

`weight_q` has one row per output channel, as torch stores `Linear.weight`. For s4 it is packed as
`skuda.kernels.linear.packed` says, and stands for the s8 codes scale[n, g] level[n, k] + offset[n, g], with levels 0 to
15 and an integer scale and offset for each group of `group_size` elements of K.

Elements
--------
activation s8, u8, s16; weight s8, u8, packed s4, beside an s16 activation s8, packed s4, s16; output f16, bf16, f32,
f64, s8, u8, and the sums s32 or, of s16 codes, s64; `act_scale`, `weight_scale` and `bias` C or any narrower float;
zero points s32, of any value. s16 codes are stored as s8, [rows, 2 k]: k high halves, then k low ones.

Units
-----
`act_scale` and `weight_scale` are real units per code step; `bias` is real; `output_scale` is real units per output
code; an s32 output counts products of code steps.

Errors
------
`InvalidProblem` for `m`, `n` or `k` outside [0, 2^31-1]; a `group_size` other than 32, 64 or 128 for an s4 weight, and
other than 0 for another; weight zero points of an s4 weight; zero points of s16 codes; an s16 weight beside another
activation, and a u8 weight beside an s16 one; an `act_scale_scope` other than token and tensor; sums of another element
than the codes have, or with zero points, a scope other than token, an epilogue other than identity, or a `k` whose sums
could leave s32 (s8 by s8: above 131,071; s8 by u8: 65,793; u8 by u8: 33,025); an argument that is missing, unknown, of
another element or shape, or that overlaps an output; an `output_scale` that is 0 or not finite.
`Unsupported` for an element outside the lists above.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, Literal, Self

import numpy as np
from pydantic import model_validator

from skuda.kernels.blocks import planes
from skuda.kernels.dtypes import storage_dtype
from skuda.kernels.linear import strategies
from skuda.kernels.linear.drawn import draw
from skuda.kernels.linear.epilogue import Epilogue
from skuda.kernels.linear.problem import (
    ALIGNED_SIZES,
    OUTPUTS,
    SCALE_SCOPES,
    SHIFTED,
    SIZES,
    SUMS,
    CodedProblem,
    longest_k,
    packed_cases,
    scale_of_rows,
    weight_and_output,
    wide_cases,
)
from skuda.kernels.linear.reference import Codes, write_layer
from skuda.registry.argument import ArgumentSpec, Role
from skuda.registry.constraints import OneOf
from skuda.registry.elements import CODES8, WHOLE_CODES, ElementKind
from skuda.registry.op import Case, Op
from skuda.registry.vocabulary import DynamicRangeScope, EpilogueKind

_SCALED = {"output_element": tuple(kind for kind in ElementKind if kind not in SUMS)}
"""When scales are passed: exact sums take none."""


class ScaledLinearDescriptor(CodedProblem):
    """Problem of `scaled_linear`.

    Attributes
    ----------
    output_element : ElementKind
        Element of the output; s32, or s64 with s16 codes, for the exact sums.
    act_scale_scope : DynamicRangeScope
        Whether the activation has a scale (and zero point) per ``token`` or one for the whole ``tensor``.
    has_act_zero_point : bool
        Whether `act_zero_point` is passed.
    others
        As in `CodedProblem`.
    """

    op: Literal["scaled_linear"] = "scaled_linear"
    act_scale_scope: DynamicRangeScope = DynamicRangeScope.TOKEN
    has_act_zero_point: bool = False
    signature = (
        ArgumentSpec("act_q", Role.INPUT, "activation_element", "m, k"),
        *scale_of_rows("act_scale", "reals", _SCALED),
        *scale_of_rows("act_zero_point", ElementKind.S32, {"has_act_zero_point": (True,)}),
        *weight_and_output(scaled=_SCALED),
    )

    @model_validator(mode="after")
    def _rules(self) -> Self:
        if self.act_scale_scope not in SCALE_SCOPES:
            self.refuse("act_scale_scope", self.act_scale_scope, f"be one of {', '.join(SCALE_SCOPES)}")
        if self.activation_element.is_split and self.has_act_zero_point:
            rule = "be False for an activation of s16 codes, which are symmetric"
            self.refuse("has_act_zero_point", self.has_act_zero_point, rule)
        if self.output_element in SUMS:
            self._check_sums()
        return self

    def _check_sums(self) -> None:
        sums = self.sums_element
        if self.output_element is not sums:
            rule = f"be {sums} for the exact sums of {self.activation_element} codes"
            self.refuse("output_element", self.output_element, rule)
        for name, only in _OF_SUMS.items():
            if getattr(self, name) != only:
                rule = f"be {only}: an {sums} output takes no scales, zero points or epilogue"
                self.refuse(name, getattr(self, name), rule)
        if {self.activation_element, self.weight_code} <= set(CODES8):
            longest = longest_k(self.activation_element, self.weight_code)
            if self.k > longest:
                codes = f"{self.activation_element} by {self.weight_code}"
                self.refuse("k", self.k, f"be at most {longest}, because longer sums of {codes} exceed s32")

    @property
    def scales_tokens(self) -> bool:
        """Whether each row of the activation has its own scale."""
        return self.act_scale_scope is DynamicRangeScope.TOKEN

    @property
    def shifts_activation(self) -> bool:
        """Whether the activation has zero points; the kernel then adds up the weight's codes."""
        return self.has_act_zero_point


_OF_SUMS = {
    "epilogue": EpilogueKind.IDENTITY,
    "act_scale_scope": DynamicRangeScope.TOKEN,
    "has_act_zero_point": False,
    "has_weight_zero_point": False,
}
"""The only values of these fields for an output of sums."""


@np.errstate(all="ignore")  # infinities and NaN are valid results here
def reference(
    problem: ScaledLinearDescriptor,
    *,
    act_q: Any,
    weight_q: Any,
    output: Any,
    act_scale: Any = None,
    act_zero_point: Any = None,
    weight_scale: Any = None,
    weight_zero_point: Any = None,
    bias: Any = None,
    output_scale: Any = None,
    output_zero_point: Any = None,
) -> None:
    """Write `output` by the formula of the module."""
    if output.size == 0:
        return
    compute = storage_dtype(problem.compute)
    scales = act_scale
    if act_scale is None or len(act_scale) != problem.m:
        scales = np.broadcast_to(1 if act_scale is None else act_scale, (problem.m,))
    zero_points = 0 if act_zero_point is None else np.broadcast_to(act_zero_point, (problem.m,))

    of_activation = planes(act_q, problem.activation_element)

    def quantized(rows: slice) -> tuple[Codes, Any]:
        found = scales[rows].astype(compute, copy=False)
        return lambda part: tuple(plane[rows, part] for plane in of_activation), found

    epilogue = Epilogue(problem, weight_scale, bias, output_scale, output_zero_point)
    write_layer(epilogue, quantized, zero_points, (weight_q, weight_zero_point), output)


def _cases() -> tuple[Case, ...]:
    made = []
    names = ("output_element", "activation_element", "weight_element", "epilogue")
    for number, kinds in enumerate(product(OUTPUTS, CODES8, CODES8, EpilogueKind)):
        fields: dict[str, Any] = dict(zip(names, kinds, strict=True))
        fields |= {"has_act_zero_point": number % 3 == 1, "has_weight_zero_point": number % 11 % 2 == 1}
        m, n, k = SIZES[number % len(SIZES)]
        problem = ScaledLinearDescriptor(m=m, n=n, k=k, act_scale_scope=SCALE_SCOPES[number % 7 % 2], **fields)
        made.append(Case(problem, "special" if number % 5 == number // 20 % 5 else "normal"))
    for number, kinds in enumerate(product(OUTPUTS, CODES8, CODES8, EpilogueKind)):
        m, n, k = ALIGNED_SIZES[number % 3 + number // 9 % 3]
        fields = dict(zip(names, kinds, strict=True))
        problem = ScaledLinearDescriptor(m=m, n=n, k=k, act_scale_scope=SCALE_SCOPES[number % 7 % 2], **fields)
        made.append(Case(problem, "special" if number % 7 == 0 else "normal"))
    # Any s32 zero points on both sides: sums exceed 64 bits.
    for number, (output, scope) in enumerate(product(OUTPUTS, SCALE_SCOPES)):
        fields = {"output_element": output, "act_scale_scope": scope, "epilogue": tuple(EpilogueKind)[number % 5]}
        fields["activation_element"] = CODES8[number // 3 % 2]
        for (m, n, k), weight in zip((SIZES[0], *SIZES[-2:]), (*CODES8, CODES8[number % 2]), strict=True):
            problem = ScaledLinearDescriptor(
                m=m, n=n, k=k, weight_element=weight, has_act_zero_point=True, has_weight_zero_point=True, **fields
            )
            made.append(Case(problem, "special"))
    for number, shifted in enumerate(product(OUTPUTS, CODES8, EpilogueKind)):
        (m, n, k), of_activation, of_weight = SHIFTED[number % len(SHIFTED)]
        fields = dict(zip(("output_element", "weight_element", "epilogue"), shifted, strict=True))
        fields |= {"activation_element": CODES8[number // 3 % 2], "act_scale_scope": SCALE_SCOPES[number // 2 % 2]}
        fields |= {"has_act_zero_point": of_activation, "has_weight_zero_point": of_weight}
        problem = ScaledLinearDescriptor(m=m, n=n, k=k, **fields)
        made.append(Case(problem, "special" if number % 3 == 0 else "normal"))
    for m, n, k in (*SIZES, *ALIGNED_SIZES):
        for activation, weight in product(CODES8, CODES8):
            fields = {"activation_element": activation, "weight_element": weight, "output_element": ElementKind.S32}
            made.append(Case(ScaledLinearDescriptor(m=m, n=n, k=k, **fields)))
    return (*made, *_packed_cases(), *_wide_cases())


def _packed_cases() -> Iterator[Case]:
    for number, (m, n, k), shifts, fields in packed_cases((*OUTPUTS, ElementKind.S32)):
        fields |= {"output_element": fields.pop("element"), "activation_element": CODES8[number // 2 % 2]}
        if fields["output_element"] is ElementKind.S32:
            fields["epilogue"] = EpilogueKind.IDENTITY
        else:
            fields |= {"act_scale_scope": SCALE_SCOPES[number // 4 % 2], "has_act_zero_point": shifts}
        problem = ScaledLinearDescriptor(m=m, n=n, k=k, **fields)
        yield Case(problem, "special" if number % 5 == 0 else "normal")


def _wide_cases() -> Iterator[Case]:
    for number, (m, n, k), fields in wide_cases((*OUTPUTS, ElementKind.S64)):
        fields |= {"output_element": fields.pop("element"), "activation_element": ElementKind.S16}
        if fields["output_element"] is ElementKind.S64:
            fields["epilogue"] = EpilogueKind.IDENTITY
        else:
            fields["act_scale_scope"] = SCALE_SCOPES[number // 4 % 2]
        problem = ScaledLinearDescriptor(m=m, n=n, k=k, **fields)
        yield Case(problem, "special" if number % 5 == 0 else "normal")


CASES = _cases()
_CODES, _NARROW, _WIDE = (
    OneOf(field="activation_element", allowed=codes) for codes in (WHOLE_CODES, CODES8, (ElementKind.S16,))
)
_SUMS: dict[str, Any] = {"epilogues": (EpilogueKind.IDENTITY,)}
SKUS = (
    *strategies.skus(ScaledLinearDescriptor, __name__, OUTPUTS, _CODES),
    *strategies.skus(ScaledLinearDescriptor, __name__, (ElementKind.S32,), _NARROW, activations=CODES8, **_SUMS),
    *strategies.skus(
        ScaledLinearDescriptor, __name__, (ElementKind.S64,), _WIDE, activations=(ElementKind.S16,), **_SUMS
    ),
)
OP = Op(ScaledLinearDescriptor, reference, CASES, SKUS, source="torchao scaled_int8_mm, torch._int_mm", draw=draw)
