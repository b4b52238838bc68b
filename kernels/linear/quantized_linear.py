"""Quantized linear: W8A8 with a dynamic activation scale per token.

Formula
-------
The activation is quantized by dynamic range, symmetric, per token, to [q_min, q_max] (codes a, scale sa[m]); acc =
sum_k a[m, k] (weight_q[n, k] - weight_zero_point[n]), exactly; v = RN_C(RN_C(sa[m] * weight_scale[n]) * RN_C(acc));
then, by epilogue, RN_C(v + bias[n]) and relu, gelu or silu; output = RN_T(v), or clamp(rne(RN_C(v / output_scale)) +
output_zero_point) for an s8 or u8 output. C is f64 where activation or output is f64, else f32. K == 0 gives v = +0.

Bounds beyond s8 and u8, such as -32639 and 32639, have codes of 16 bits. With an s16 weight acc leaves out the product
of the low halves, as in `scaled_linear`.

With `nonfinite` propagate, a NaN counts as an infinity in the range of its row, so sa[m] is infinite, all codes are 0
and every v of the row is NaN, if K is not 0.

relu gives +0 for -0 and for negative values; NaN stays NaN. gelu (erf form) and silu are E(v), where E is the function
of that name in `skuda.kernels.quantize.curves`, in f64: RN_T(E(v)) is rounded once, and codes are those of RN_C(E(v)).

`weight_q` has one row per output channel, as torch stores `Linear.weight`. For s4 it is packed as
`skuda.kernels.linear.packed` says, and stands for the s8 codes scale[n, g] level[n, k] + offset[n, g], with levels 0 to
15 and an integer scale and offset for each group of `group_size` elements of K.

Elements
--------
activation f16, bf16, f32, f64; weight s8, u8, packed s4, or s16 beside codes of 16 bits; output f16, bf16, f32, f64,
s8, u8 (by default that of the activation); `weight_scale` and `bias` C or any narrower float; `weight_zero_point` s32.
The scratch arrays are optional: given, they receive the codes (s8, or u8 or s16 where the bounds need it) and the
scales (f64 for f64 activations, else f32). s16 codes are stored as in `scaled_linear`.

Units
-----
`weight_scale` is real units per code step; `activation` and `bias` are real; `output_scale` is real units per output
code.

Errors
------
`InvalidProblem` for `m`, `c_out` or `k` outside [0, 2^31-1]; a `group_size` other than 32, 64 or 128 for an s4 weight,
and other than 0 for another; weight zero points of an s4 weight, or beside s16 codes; an s16 weight beside other codes,
and a u8 weight beside s16 ones; `q_max` below 1 or below `q_min`; bounds that none of s8, u8 and s16 holds; an argument
that is missing, unknown, of another element or shape, or that overlaps an output; an `output_scale` that is 0 or not
finite.
`Unsupported` for an element outside the lists above.
"""

from __future__ import annotations

from itertools import product
from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import model_validator

from skuda.kernels import nonfinite
from skuda.kernels.blocks import planes
from skuda.kernels.dtypes import compute_dtype
from skuda.kernels.linear import strategies
from skuda.kernels.linear.drawn import draw
from skuda.kernels.linear.epilogue import Epilogue, arithmetic
from skuda.kernels.linear.problem import (
    ALIGNED_SIZES,
    OUTPUTS,
    SHIFTED,
    SIZES,
    LinearProblem,
    code_element_holding,
    packed_cases,
    weight_and_output,
    wide_cases,
)
from skuda.kernels.linear.reference import Codes, parts_of_k, write_layer
from skuda.kernels.quantize import affine
from skuda.kernels.quantize.granularity import per_token
from skuda.registry.argument import ArgumentSpec, Role, storage_shape
from skuda.registry.constraints import OneOf
from skuda.registry.elements import CODES8, FLOATS, ElementKind
from skuda.registry.op import Case, Op
from skuda.registry.sku import WorkspaceTerm
from skuda.registry.value import Extent, Int32
from skuda.registry.vocabulary import EpilogueKind, Nonfinite


class QuantizedLinearDescriptor(LinearProblem):
    """Problem of `quantized_linear`.

    Attributes
    ----------
    m, c_out, k : int
        Rows of the activation, output channels, inner size.
    q_min, q_max : int
        Bounds of the activation's codes, inclusive; -127 and 127 for symmetric s8.
    activation_element : ElementKind
        Element of the activation, a float.
    weight_element : ElementKind
        Element of the weight's codes: s8 or u8; s16 if the activation's have 16 bits; or s4 for a packed weight of
        4-bit levels.
    output_element : ElementKind
        Element of the output; by default the activation's.
    epilogue : EpilogueKind
        Steps fused with the product; all but ``identity`` take `bias`.
    has_weight_zero_point : bool
        Whether `weight_zero_point` is passed; never for s4.
    group_size : int
        Elements of a row of a packed weight that share a scale and an offset: 32, 64 or 128. 0 for others.
    nonfinite : Nonfinite
        ``ignore`` (the range of a row skips a NaN) or ``propagate`` (a NaN counts as an infinity).
    """

    op: Literal["quantized_linear"] = "quantized_linear"
    element_field: ClassVar[str] = "activation_element"
    dynamic: ClassVar[bool] = True
    channels: ClassVar[str] = "c_out"
    m: Extent
    c_out: Extent
    k: Extent
    q_min: Int32
    q_max: Int32
    activation_element: ElementKind
    output_element: ElementKind | None = None
    nonfinite: Nonfinite = Nonfinite.IGNORE
    signature = (
        ArgumentSpec("activation", Role.INPUT, "activation_element", "m, k"),
        *weight_and_output("c_out", "output_element or activation_element"),
        ArgumentSpec("act_q_scratch", Role.SCRATCH, "code_element", "m, k", required=False),
        ArgumentSpec("act_scale_scratch", Role.SCRATCH, "act_scale_element", "m", required=False),
    )

    @model_validator(mode="after")
    def _rules(self) -> Self:
        if self.q_max <= 0:
            self.refuse("q_max", self.q_max, "be greater than 0: it divides the largest magnitude")
        if self.q_max < self.q_min:
            self.refuse("q_max", self.q_max, f"be at least q_min = {self.q_min}")
        if code_element_holding(self.q_min, self.q_max) is None:
            self.refuse("q_min, q_max", (self.q_min, self.q_max), "lie within the range of s8, of u8 or of s16")
        if self.output_element is None:
            # Filled in: the default and the same element given explicitly describe the same problem.
            object.__setattr__(self, "output_element", self.activation_element)
        return self

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, N and K: rows of the activation, output channels, inner size."""
        return self.m, self.c_out, self.k

    @property
    def output(self) -> ElementKind:
        """Element of the output."""
        return self.output_element or self.activation_element

    @property
    def code_element(self) -> ElementKind:
        """Element that the activation's codes are stored in."""
        return code_element_holding(self.q_min, self.q_max) or ElementKind.S8

    @property
    def act_scale_element(self) -> ElementKind:
        """The compute type of the activation."""
        return self.activation_element.compute

    @property
    def compute(self) -> ElementKind:
        """The type C that scales and epilogue are computed in."""
        wide = ElementKind.F64 in (self.activation_element, self.output)
        return ElementKind.F64 if wide else ElementKind.F32


@np.errstate(all="ignore")  # infinities and NaN are valid results here
def reference(
    problem: QuantizedLinearDescriptor,
    *,
    activation: Any,
    weight_q: Any,
    weight_scale: Any,
    output: Any,
    bias: Any = None,
    weight_zero_point: Any = None,
    output_scale: Any = None,
    output_zero_point: Any = None,
    act_q_scratch: Any = None,
    act_scale_scratch: Any = None,
) -> None:
    """Write `output` by the formula of the module."""
    data, bounds, how = problem.activation_element, (problem.q_min, problem.q_max), arithmetic(problem)
    code = problem.code_element
    elements, nan = (data, code), nonfinite.in_range(problem)

    def quantized(rows: slice) -> tuple[Codes, Any]:
        x = activation[rows]
        scale = np.empty(len(x), compute_dtype(data))
        if act_q_scratch is not None or len(parts_of_k(*x.shape)) <= 1:
            whole = np.empty(storage_shape(x.shape, code), how.codes) if act_q_scratch is None else act_q_scratch[rows]
            affine.quantize_rows(elements, bounds, x, scale, whole, nan=nan)
        else:
            whole = None
            affine.dynamic_scales(x, (1,), data, bounds, (scale[:, None], None), asymmetric=False, nan=nan)
        if act_scale_scratch is not None:
            act_scale_scratch[rows] = scale

        def codes(part: slice) -> tuple[Any, ...]:
            if whole is not None:
                return tuple(plane[:, part] for plane in planes(whole, code))
            made = np.empty(storage_shape((len(x), part.stop - part.start), code), how.codes)
            affine.quantize(per_token, elements, bounds, (x[:, part], scale, 0, made))
            return planes(made, code)

        return codes, scale.astype(how.compute, copy=False)

    # The scratch arrays are written even where there are no columns.
    if output.size == 0 and act_q_scratch is None and act_scale_scratch is None:
        return
    epilogue = Epilogue(problem, weight_scale, bias, output_scale, output_zero_point)
    write_layer(epilogue, quantized, 0, (weight_q, weight_zero_point), output)


_BOUNDS = ((-127, 127), (-128, 127), (0, 255), (-8, 7))
_WIDE_BOUNDS = ((-32_639, 32_639), (-300, 32_639), (-32_639, 200))


def _case(sizes: tuple[int, int, int], number: int, *, wide: bool = False, **fields: Any) -> QuantizedLinearDescriptor:
    bounds = _WIDE_BOUNDS if wide else _BOUNDS
    (m, n, k), (q_min, q_max) = sizes, bounds[number % len(bounds)]
    return QuantizedLinearDescriptor(m=m, c_out=n, k=k, q_min=q_min, q_max=q_max, **fields)


def _cases() -> tuple[Case, ...]:
    made = []
    for number, kinds in enumerate(product(FLOATS, CODES8, OUTPUTS, EpilogueKind)):
        fields: dict[str, Any] = dict(
            zip(("activation_element", "weight_element", "output_element", "epilogue"), kinds, strict=True)
        )
        problem = _case(SIZES[number % len(SIZES)], number, **fields, has_weight_zero_point=number % 3 == 1)
        made.append(Case(problem, "special" if number % 5 == 0 else "normal"))
    outputs = (None, *(e for e in OUTPUTS if e is not ElementKind.F64))
    for number, aligned in enumerate(product(FLOATS, CODES8, EpilogueKind)):
        fields = dict(zip(("activation_element", "weight_element", "epilogue"), aligned, strict=True))
        sizes = ALIGNED_SIZES[number % len(ALIGNED_SIZES)]
        problem = _case(sizes, number, **fields, output_element=outputs[number // 2 % 6])
        made.append(Case(problem, "special" if number % 7 == 0 else "normal"))
        # A kernel may quantize as few rows as 2 in the launch of the product.
        sizes = SHIFTED[number % 2][0] if number % 3 else (2, 40, 336)
        problem = _case(sizes, number // 2, **fields, output_element=outputs[number % 6], has_weight_zero_point=True)
        made.append(Case(problem, "special" if number % 5 == 0 else "normal"))
    for number, sizes, _, fields in packed_cases(FLOATS):
        problem = _case(
            sizes, number // 2, activation_element=fields.pop("element"), output_element=outputs[number % 6], **fields
        )
        made.append(Case(problem, "special" if number % 5 == 0 else "normal"))
    for number, sizes, fields in wide_cases(FLOATS):
        data, output = fields.pop("element"), outputs[number % 6]
        problem = _case(sizes, number, activation_element=data, output_element=output, wide=True, **fields)
        made.append(Case(problem, "special" if number % 5 == 0 else "normal"))
    return (*made, *nonfinite.propagating(made[::7]))


CASES = _cases()
SKUS = strategies.skus(
    QuantizedLinearDescriptor,
    __name__,
    FLOATS,
    OneOf(field="output_element", allowed=OUTPUTS),
    workspace=(WorkspaceTerm(factors=("m", "code_bytes"), bytes_each=1), WorkspaceTerm(factors=("m",), bytes_each=8)),
)
OP = Op(QuantizedLinearDescriptor, reference, CASES, SKUS, "baracuda_kernels/quantize/quantized_linear.rs", draw=draw)
