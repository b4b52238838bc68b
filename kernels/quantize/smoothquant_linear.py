"""SmoothQuant linear: W8A8 with one static activation scale for the whole tensor.

Formula
-------
acc = sum_k (act_q[m, k] - act_zero_point) (weight_q[n, k] - weight_zero_point[n]), exactly; v = RN_C(RN_C(act_scale *
weight_scale[n]) * RN_C(acc)); then, by epilogue, RN_C(v + bias[n]) and relu (exact), gelu (erf form) or silu (both
within 2 ulp of C); output = RN_T(v), or clamp(rne(RN_C(v / output_scale)) + output_zero_point) for an s8 or u8
output. C is f64 for an f64 output, else f32. K == 0 gives v = +0.

Shapes
------
`act_q` [m, k], `weight_q` [n, k] (one row per output channel, as torch stores `Linear.weight`), `weight_scale`,
`bias` and `weight_zero_point` [n], `output` [m, n], `act_scale_scratch` [m].

Elements
--------
activation and weight s8, u8; output f16, bf16, f32, f64, s8, u8; `weight_scale` and `bias` C or any narrower float;
`weight_zero_point` s32. `act_scale_scratch` is optional: given, it is filled with `act_scale`.

Units
-----
`act_scale` and `weight_scale` are real units per code step; `bias` is real; `output_scale` is real units per output
code.

Errors
------
`InvalidProblem` for `m`, `n` or `k` outside [0, 2^31-1]; an `act_scale` that is not finite (0 and negative are
allowed); an `act_zero_point` outside the range of `activation_element`; an argument that is missing, unknown, of
another element or shape, or that overlaps an output; an `output_scale` that is 0 or not finite.
`Unsupported` for an element outside the lists above.

Method: Xiao et al., SmoothQuant, ICML 2023. The offline half is in `skuda.tools.smoothquant`.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import model_validator

from skuda.kernels.dtypes import compute_dtype
from skuda.kernels.offers import cuda_skus, numpy_skus
from skuda.kernels.quantize import _cuda_linear, _linear, _tensor_cores
from skuda.registry.constraints import OneOf
from skuda.registry.descriptor import Argument, Role
from skuda.registry.elements import ElementKind
from skuda.registry.op import Case, Op
from skuda.registry.value import Extent, Int32, Real
from skuda.registry.vocabulary import EpilogueKind


class SmoothQuantLinearDescriptor(_linear.LinearProblem):
    """Problem of `smoothquant_linear`.

    Attributes
    ----------
    m, n, k : int
        Rows of the activation, output channels, inner size.
    act_scale : float
        Scale of the activation; frozen metadata of the model.
    activation_element, weight_element : ElementKind
        Elements of the codes: s8 or u8.
    output_element : ElementKind
        Element of the output.
    epilogue : EpilogueKind
        What is fused behind the product; everything but ``identity`` takes `bias`.
    act_zero_point : int
        Code of the activation that stands for 0.0.
    has_weight_zero_point : bool
        Whether `weight_zero_point` is passed.
    """

    op: Literal["smoothquant_linear"] = "smoothquant_linear"
    element_field: ClassVar[str] = "output_element"
    m: Extent
    n: Extent
    k: Extent
    act_scale: Real
    activation_element: ElementKind = ElementKind.S8
    output_element: ElementKind
    act_zero_point: Int32 = 0

    @model_validator(mode="after")
    def _rules(self) -> Self:
        with np.errstate(over="ignore"):
            rounded = compute_dtype(self.output_element).type(self.act_scale)
        if not np.isfinite(rounded):
            self.refuse("act_scale", self.act_scale, f"be finite in {self.compute}")
        low, high = self.activation_element.integer_range or (0, 0)
        if not low <= self.act_zero_point <= high:
            rule = f"lie in [{low}, {high}], the range of {self.activation_element}"
            self.refuse("act_zero_point", self.act_zero_point, rule)
        return self

    def __eq__(self, other: object) -> bool:
        # 0.0 == -0.0, but they scale to zeros of different sign.
        return super().__eq__(other) and math.copysign(1, self.act_scale) == math.copysign(1, other.act_scale)  # type: ignore[attr-defined]  # equal classes

    __hash__ = _linear.LinearProblem.__hash__

    @property
    def compute(self) -> ElementKind:
        """The type C that scales and epilogue are computed in."""
        return self.output_element.compute

    def arguments(self) -> tuple[Argument, ...]:
        """Return the arguments that this problem takes."""
        return (
            Argument("act_q", Role.INPUT, (self.activation_element,), (self.m, self.k)),
            Argument("weight_q", Role.INPUT, (self.weight_element,), (self.n, self.k)),
            *_linear.tail_arguments(self, self.m, self.n, self.output_element),
            Argument("act_scale_scratch", Role.SCRATCH, (self.compute,), (self.m,), required=False),
        )


@np.errstate(all="ignore")  # infinities and NaN are answers here, not accidents
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
    """Write `output`; see the module."""
    scale = compute_dtype(problem.output_element).type(problem.act_scale)
    if act_scale_scratch is not None:
        act_scale_scratch[...] = scale
    epilogue = _linear.Epilogue(
        problem.epilogue, problem.compute, problem.output_element, weight_scale, bias, output_scale, output_zero_point
    )
    for rows in _linear.row_blocks(problem.m, problem.k):
        row_scale = np.full(rows.stop - rows.start, scale)
        for columns in _linear.column_blocks(problem.n):
            zero_point = None if weight_zero_point is None else weight_zero_point[columns]
            acc = None
            if problem.k > 0:
                acc = _linear.exact_product(
                    act_q[rows], weight_q[columns], problem.act_zero_point, zero_point, problem.compute
                )
            epilogue.apply(row_scale, acc, columns, output[rows, columns])


def _cases() -> tuple[Case, ...]:
    sizes = ((17, 33, 65), (2, 3, 8), (0, 3, 4), (3, 0, 4), (3, 4, 0), (1, 1, 1), (5, 7, 1100), (130, 70, 40))
    plan: list[tuple[ElementKind, ElementKind, ElementKind, EpilogueKind]]
    plan = list(product(_linear.OUTPUTS, _linear.CODES8, _linear.CODES8, EpilogueKind))
    made = []
    for turn, (out, activation, weight, epilogue) in enumerate(plan):
        m, n, k = sizes[turn % len(sizes)]
        low, high = activation.integer_range or (0, 0)
        problem = SmoothQuantLinearDescriptor(
            m=m,
            n=n,
            k=k,
            act_scale=(0.0131, -0.25, 0.0)[turn % 7 % 3],
            activation_element=activation,
            weight_element=weight,
            output_element=out,
            epilogue=epilogue,
            act_zero_point=(0, low, high)[turn % 3],
            has_weight_zero_point=turn % 2 == 1,
        )
        made.append(Case(problem, "special" if turn % 5 == 0 else "normal"))
    for turn, (out, weight, epilogue) in enumerate(product(_linear.OUTPUTS, _linear.CODES8, EpilogueKind)):
        m, n, k = _linear.ALIGNED_SIZES[turn % len(_linear.ALIGNED_SIZES)]
        aligned = SmoothQuantLinearDescriptor(
            m=m,
            n=n,
            k=k,
            act_scale=0.0131,
            activation_element=_linear.CODES8[turn // 3 % 2],
            weight_element=weight,
            output_element=out,
            epilogue=epilogue,
        )
        made.append(Case(aligned, "special" if turn % 7 == 0 else "normal"))
    return tuple(made)


CASES = _cases()
_ACTIVATION = OneOf(field="activation_element", allowed=_linear.CODES8)
SKUS = (
    *_tensor_cores.skus(
        SmoothQuantLinearDescriptor,
        __name__,
        _linear.OUTPUTS,
        "smoothquant",
        _ACTIVATION,
        flags=_tensor_cores.flags,
    ),
    *cuda_skus(
        SmoothQuantLinearDescriptor,
        __name__,
        _linear.OUTPUTS,
        _linear.CODES8,
        EpilogueKind,
        launch="skuda.kernels.quantize._cuda_linear:smoothquant",
        flags=_cuda_linear.smoothquant_flags,
        guarantee=_cuda_linear.guarantee,
        constraints=(_ACTIVATION, *_cuda_linear.LIMITS),
        variant="plain",
        summary="64 x 64 tiles, dp4a; serves every shape",
    ),
    *numpy_skus(
        SmoothQuantLinearDescriptor,
        __name__,
        _linear.OUTPUTS,
        _linear.CODES8,
        EpilogueKind,
        precision_guarantee=_linear.GUARANTEE,
        constraints=(_ACTIVATION,),
        summary="exact integer product through BLAS",
    ),
)
OP = Op(
    SmoothQuantLinearDescriptor,
    reference,
    CASES,
    SKUS,
    source="baracuda_kernels/quantize/smoothquant.rs",
)
