"""Rescale: the second half of `scaled_linear`, which makes the layer's output from exact sums of codes.

Formula
-------
acc = sums[m, n] - act_zero_point[m] weight_sums[n] - weight_zero_point[n] act_sums[m] + k act_zero_point[m]
weight_zero_point[n], exactly; v = RN_C(RN_C(act_scale[m] * weight_scale[n]) * RN_C(acc)); then, by epilogue,
RN_C(v + bias[n]) and relu, gelu or silu; output = RN_T(v), or clamp(rne(RN_C(v / output_scale)) + output_zero_point)
for an s8 or u8 output. C is f64 for an f64 output, else f32. K == 0 gives v = +0. With `act_scale_scope` tensor,
`act_scale[0]` and `act_zero_point[0]` apply to every row.

With sums = sum_k act_q weight_q, act_sums = sum_k act_q and weight_sums = sum_k weight_q, this is `scaled_linear` of
those codes, bit for bit. A zero point that is left out counts as 0.

relu gives +0 for -0 and for negative values; NaN stays NaN. gelu (erf form) and silu are E(v), where E is the function
of that name in `skuda.kernels.quantize.curves`, in f64: RN_T(E(v)) is rounded once, and codes are those of RN_C(E(v)).

Elements
--------
`sums` s32, or s64 for codes of 16 bits; `act_sums` and `weight_sums` s32; output f16, bf16, f32, f64, s8, u8;
`act_scale`, `weight_scale` and `bias` C or any narrower float; zero points s32, of any value.

Units
-----
`sums` counts products of code steps, `act_sums` and `weight_sums` count code steps; `act_scale` and `weight_scale` are
real units per code step; `bias` is real; `output_scale` is real units per output code.

Errors
------
`InvalidProblem` for `m`, `n` or `k` outside [0, 2^31-1]; an `act_scale_scope` other than token and tensor; zero points
beside s64 sums; an argument that is missing, unknown, of another element or shape, or that overlaps an output; an
`output_scale` that is 0 or not finite.
`Unsupported` for an element outside the lists above.
"""

from __future__ import annotations

from itertools import product
from typing import Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import model_validator

from skuda.kernels.blocks import Index, blocks
from skuda.kernels.dtypes import storage_dtype
from skuda.kernels.linear.epilogue import Epilogue
from skuda.kernels.linear.problem import BIASED, OUTPUTS, SCALE_SCOPES, SUMS, floats_up_to, scale_of_rows
from skuda.kernels.linear.reference import round_integer, subtract_outer
from skuda.kernels.linear.scaled_linear import ScaledLinearDescriptor
from skuda.kernels.offers import cuda_skus, numpy_skus
from skuda.registry.argument import ArgumentSpec, Role
from skuda.registry.constraints import OneOf
from skuda.registry.descriptor import Descriptor
from skuda.registry.elements import CODES8, ElementKind
from skuda.registry.op import Case, Op, Values
from skuda.registry.value import Extent
from skuda.registry.vocabulary import DynamicRangeScope, EpilogueKind, OpCategory

_ACT_SHIFTED, _WEIGHT_SHIFTED = ({f"has_{name}_zero_point": (True,)} for name in ("act", "weight"))


class RescaleDescriptor(Descriptor):
    """Problem of `rescale`.

    Attributes
    ----------
    m, n, k : int
        Rows and columns of the sums, and the number of products in each.
    output_element : ElementKind
        Element of the output.
    sums_element : ElementKind
        Element of the sums: s32 or s64.
    epilogue : EpilogueKind
        Steps after the scales; all but ``identity`` take `bias`.
    act_scale_scope : DynamicRangeScope
        Whether the activation has a scale (and zero point) per ``token`` or one for the whole ``tensor``.
    has_act_zero_point, has_weight_zero_point : bool
        Whether `act_zero_point` and `weight_sums`, and `weight_zero_point` and `act_sums` are passed.
    """

    op: Literal["rescale"] = "rescale"
    category: ClassVar[OpCategory] = OpCategory.QUANTIZATION
    element_field: ClassVar[str] = "output_element"
    m: Extent
    n: Extent
    k: Extent
    output_element: ElementKind
    sums_element: ElementKind = ElementKind.S32
    epilogue: EpilogueKind = EpilogueKind.IDENTITY
    act_scale_scope: DynamicRangeScope = DynamicRangeScope.TOKEN
    has_act_zero_point: bool = False
    has_weight_zero_point: bool = False
    signature = (
        ArgumentSpec("sums", Role.INPUT, "sums_element", "m, n"),
        *scale_of_rows("act_scale", "reals"),
        *scale_of_rows("act_zero_point", ElementKind.S32, _ACT_SHIFTED),
        ArgumentSpec("weight_sums", Role.INPUT, ElementKind.S32, "n", when=_ACT_SHIFTED),
        ArgumentSpec("weight_scale", Role.INPUT, "reals", "n"),
        ArgumentSpec("weight_zero_point", Role.INPUT, ElementKind.S32, "n", when=_WEIGHT_SHIFTED),
        ArgumentSpec("act_sums", Role.INPUT, ElementKind.S32, "m", when=_WEIGHT_SHIFTED),
        ArgumentSpec("bias", Role.INPUT, "reals", "n", when={"epilogue": BIASED}),
        ArgumentSpec("output_scale", Role.SCALE, "compute", when={"output_element": CODES8}),
        ArgumentSpec("output_zero_point", Role.ZERO_POINT, ElementKind.S32, when={"output_element": CODES8}),
        ArgumentSpec("output", Role.OUTPUT, "output_element", "m, n"),
    )

    @model_validator(mode="after")
    def _rules(self) -> Self:
        if self.act_scale_scope not in SCALE_SCOPES:
            self.refuse("act_scale_scope", self.act_scale_scope, f"be one of {', '.join(SCALE_SCOPES)}")
        if self.sums_element is ElementKind.S64 and (self.has_act_zero_point or self.has_weight_zero_point):
            self.refuse("sums_element", self.sums_element, "be s32 with zero points: codes of 16 bits are symmetric")
        return self

    @property
    def layer(self) -> ScaledLinearDescriptor:
        """The layer whose sums these are. The elements of its codes do not matter here."""
        return ScaledLinearDescriptor(**{name: getattr(self, name) for name in _OF_THE_LAYER})

    @property
    def compute(self) -> ElementKind:
        """The type C that scales and epilogue are computed in."""
        return self.output_element.compute

    @property
    def reals(self) -> tuple[ElementKind, ...]:
        """The compute type C, or a narrower float."""
        return floats_up_to(self.compute)


_OF_THE_LAYER = tuple(name for name in RescaleDescriptor.model_fields if name not in ("op", "sums_element"))


@np.errstate(all="ignore")  # infinities and NaN are valid results here
def reference(
    problem: RescaleDescriptor,
    *,
    output: Any,
    act_scale: Any,
    weight_scale: Any,
    bias: Any = None,
    output_scale: Any = None,
    output_zero_point: Any = None,
    **integers: Any,
) -> None:
    """Write `output` by the formula of the module."""
    epilogue = Epilogue(problem.layer, weight_scale, bias, output_scale, output_zero_point)
    dtype = storage_dtype(problem.compute)
    scales = np.broadcast_to(act_scale, (problem.m,))
    for index in blocks(output.shape):
        rows, columns = index
        exact = _rounded_sums(problem, index, integers, dtype) if problem.k else None
        epilogue.apply(scales[rows].astype(dtype), exact, columns, output[index])


def _rounded_sums(
    problem: RescaleDescriptor, index: Index, integers: dict[str, Any], dtype: np.dtype[Any]
) -> npt.NDArray[Any]:
    """Return ``RN_C(acc)`` of a box of the output: acc is exact and rounded once."""
    rows, columns = index

    def widened(name: str, at: slice) -> npt.NDArray[np.int64]:
        return np.asarray(integers[name][at], np.int64)

    acc, za = integers["sums"][index].astype(np.int64), np.zeros(rows.stop - rows.start, np.int64)
    if problem.has_act_zero_point:
        za += widened("act_zero_point", rows if problem.act_scale_scope is DynamicRangeScope.TOKEN else slice(1))
        acc = subtract_outer(acc, za, widened("weight_sums", columns))
    if problem.has_weight_zero_point:
        acc = subtract_outer(acc, widened("act_sums", rows) - problem.k * za, widened("weight_zero_point", columns))
    if acc.dtype == object:
        acc = np.frompyfunc(lambda n: round_integer(n, dtype), 1, 1)(acc)
    return np.asarray(acc, dtype)


def _cases() -> tuple[Case, ...]:
    """Return every output with every epilogue, without zero points and with some, over sizes of any remainder."""
    sizes = ((17, 33), (2, 3), (0, 3), (3, 0), (1, 1), (130, 70), (31, 40), (5, 264), (3, 1040), (1, 8))
    depths = (65, 1, 0, 4096, 2**31 - 1, 40)
    values: tuple[Values, ...] = ("special", "normal", "special", "normal", "normal")
    made = []
    for number, (output, epilogue, kind) in enumerate(product(OUTPUTS, EpilogueKind, range(3))):
        row = number // 3
        m, n = sizes[7 * number % len(sizes)]
        problem = RescaleDescriptor(
            m=m,
            n=n,
            k=depths[number % 7 % len(depths)],
            output_element=output,
            epilogue=epilogue,
            act_scale_scope=SCALE_SCOPES[number // 2 % 2],
            has_act_zero_point=kind == 1 or (kind == 2 and row % 2 == 0),  # kind 1 has both, kind 2 one of them
            has_weight_zero_point=kind == 1 or (kind == 2 and row % 2 == 1),
            sums_element=SUMS[kind == 0 and row % 2],
        )
        made.append(Case(problem, values[(number + row) % len(values)]))
    return tuple(made)


CASES = _cases()


def _flags(output: ElementKind, _: ElementKind | None) -> tuple[str, ...]:
    return ("-fmad=false", f"-DSKUDA_REAL={output.compute}", f"-DSKUDA_OUT={output}")


SKUS = (
    *cuda_skus(
        RescaleDescriptor,
        __name__,
        OUTPUTS,
        epilogues=EpilogueKind,
        launch="skuda.kernels.linear.rescale_launch:rescale",
        flags=_flags,
        constraints=(OneOf(field="sums_element", allowed=SUMS),),
        summary="four columns per thread, whose scales it keeps",
    ),
    *numpy_skus(
        RescaleDescriptor,
        __name__,
        OUTPUTS,
        epilogues=EpilogueKind,
        constraints=(OneOf(field="sums_element", allowed=SUMS),),
    ),
)
OP = Op(RescaleDescriptor, reference, CASES, SKUS, source="the epilogue of scaled_linear")
