"""What the two int8 linear layers share: the exact product, the epilogue, and their arguments.

The product goes through BLAS although it is of integers: a sum of int8 products is exact in f32, in any order and with
or without fused multiply-add, as long as the sum of magnitudes stays within 2^24. So K is cut into runs that short
(1,024 for s8 by s8), and the runs are added up in f64, which is exact up to 2^53.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from skuda.kernels.blocks import blocks
from skuda.kernels.dtypes import rounded_to, storage_dtype
from skuda.kernels.quantize import _affine
from skuda.kernels.quantize._activation import gelu, silu
from skuda.registry.constraints import OneOf
from skuda.registry.descriptor import Argument, Descriptor, Role
from skuda.registry.elements import FLOATS, ElementKind
from skuda.registry.guarantee import PrecisionGuarantee
from skuda.registry.vocabulary import ActivationKind, EpilogueKind, LayoutSku, MathPrecision, OpCategory

Array = npt.NDArray[Any]

CODES8 = (ElementKind.S8, ElementKind.U8)
OUTPUTS = (*FLOATS, *CODES8)
ALIGNED_SIZES = ((33, 40, 64), (60, 264, 144), (3, 17, 1040), (64, 136, 400), (1, 8, 16))
"""m, n, k whose rows begin at multiples of 16 bytes, as kernels that copy boxes need."""
SERVED_OUTPUT = OneOf(field="output_element", allowed=OUTPUTS)
GUARANTEE = PrecisionGuarantee(math_precision=MathPrecision.INT8, accumulator=ElementKind.S64)
"""NumPy adds exactly at any K, which is what an s64 accumulator does."""

_ROWS, _COLUMNS = 512, 1024
_CODES_AT_ONCE = 1 << 22


class LinearProblem(Descriptor):
    """What both linear descriptors have in common: y = x W^T with W stored [N, K]."""

    category: ClassVar[OpCategory] = OpCategory.QUANTIZATION
    layout: ClassVar[LayoutSku | None] = LayoutSku.RCR
    aux_field: ClassVar[str | None] = "weight_element"
    weight_element: ElementKind = ElementKind.S8
    epilogue: EpilogueKind = EpilogueKind.IDENTITY
    has_weight_zero_point: bool = False

    @property
    def compute(self) -> ElementKind:
        """The type C that scales and epilogue are computed in."""
        raise NotImplementedError


def tail_arguments(problem: LinearProblem, rows: int, columns: int, output: ElementKind) -> tuple[Argument, ...]:
    """Return the arguments behind the weight: scale, zero point, bias, requantization, output.

    Parameters
    ----------
    problem : LinearProblem
        The problem.
    rows, columns : int
        Sizes of the output.
    output : ElementKind
        Element of the output.
    """
    compute = problem.compute
    wide = tuple(dict.fromkeys((compute, *(e for e in FLOATS if e.bits < compute.bits))))
    arguments = [Argument("weight_scale", Role.INPUT, wide, (columns,))]
    if problem.has_weight_zero_point:
        arguments.append(Argument("weight_zero_point", Role.INPUT, (ElementKind.S32,), (columns,)))
    if problem.epilogue.requires_bias:
        arguments.append(Argument("bias", Role.INPUT, wide, (columns,)))
    if output in CODES8:
        arguments.append(Argument("output_scale", Role.SCALE, (compute,)))
        arguments.append(Argument("output_zero_point", Role.ZERO_POINT, (ElementKind.S32,)))
    return (*arguments, Argument("output", Role.OUTPUT, (output,), (rows, columns)))


@dataclass(frozen=True)
class Epilogue:
    """Everything that happens to an exact product before it is stored."""

    kind: EpilogueKind
    compute: ElementKind
    output: ElementKind
    weight_scale: Array
    bias: Array | None
    output_scale: Any
    output_zero_point: Any

    def apply(self, act_scale: Array, product: Array | None, columns: slice, output: Array) -> None:
        """Write the finished block of outputs.

        Parameters
        ----------
        act_scale : array of shape (rows,), C
            Scale of every row.
        product : array of shape (rows, columns), or None
            The integer product, rounded to C; None stands for K == 0, where the sum is +0 whatever the scales.
        columns : slice
            Which columns these are.
        output : array of shape (rows, columns)
            The block to write.
        """
        compute = storage_dtype(self.compute)
        weight_scale = self.weight_scale[columns].astype(compute)
        bias = None if self.bias is None else self.bias[columns].astype(compute)
        for rows, part in blocks(output.shape):
            value = np.multiply.outer(act_scale[rows], weight_scale[part])
            if product is None:
                value[...] = 0
            else:
                value *= product[rows, part]
            if bias is not None:
                value += bias[part]
            finished = self._requantized(_activated(value, self.kind.activation), compute)
            output[rows, part] = rounded_to(finished, output.dtype)

    def _requantized(self, value: Array, compute: np.dtype[Any]) -> Array:
        limits = self.output.integer_range
        if limits is None:
            return value
        t = _affine.rounded_quotient(value, np.asarray(self.output_scale).astype(compute))
        return _affine.clamp_codes(t, self.output_zero_point, *limits)


def _activated(value: Array, activation: ActivationKind | None) -> Array:
    match activation:
        case None:
            return value
        case ActivationKind.RELU:
            # NaN stays NaN; -0 and everything below become +0.
            value[value <= 0] = 0
            return value
        case ActivationKind.GELU:
            return gelu(value)
        case ActivationKind.SILU:
            return silu(value)


def row_blocks(m: int, k: int) -> Iterator[slice]:
    """Cut M rows so that the codes of one block stay within a few megabytes."""
    step = max(1, min(_ROWS, _CODES_AT_ONCE // max(k, 1)))
    for start in range(0, m, step):
        yield slice(start, min(start + step, m))


def column_blocks(n: int) -> Iterator[slice]:
    """Cut N output channels."""
    for start in range(0, n, _COLUMNS):
        yield slice(start, min(start + _COLUMNS, n))


def exact_product(
    a: Array, w: Array, act_zero_point: int, weight_zero_point: Array | None, compute: ElementKind
) -> Array:
    """``RN_C(sum_k (a - za)(w - zw))``: the sum is exact and rounded once, to the compute type.

    Parameters
    ----------
    a : array of shape (rows, K), s8 or u8
        Activation codes.
    w : array of shape (columns, K), s8 or u8
        Weight codes.
    act_zero_point : int
        za, within the range of `a`.
    weight_zero_point : array of shape (columns,), s32, or None
        zw, or None for 0.
    compute : ElementKind
        C.
    """
    k = a.shape[1]
    dtype = storage_dtype(compute)
    run = (1 << 24) // (_magnitude(a) * _magnitude(w))
    product = a[:, :run].astype(np.float32) @ w[:, :run].astype(np.float32).T
    if k > run:
        product = product.astype(np.float64)
    for start in range(run, k, run):
        part = slice(start, start + run)
        product += a[:, part].astype(np.float32) @ w[:, part].astype(np.float32).T
    if act_zero_point == 0 and weight_zero_point is None:
        return np.asarray(product, dtype)
    exact = product.astype(np.int64) - act_zero_point * w.sum(axis=1, dtype=np.int64)
    if weight_zero_point is None:
        return np.asarray(exact, dtype)
    sums = a.sum(axis=1, dtype=np.int64) - k * act_zero_point
    zw = weight_zero_point.astype(np.int64)
    if k * 510 * int(np.abs(zw).max(initial=0)) < 1 << 62:
        return np.asarray(exact - np.multiply.outer(sums, zw), dtype)
    # Zero points far outside the codes: Python's integers, rounded once.
    wide = exact.astype(object) - np.multiply.outer(sums.astype(object), zw.astype(object))
    return np.asarray(np.frompyfunc(lambda n: _round_integer(n, dtype), 1, 1)(wide), dtype)


def _round_integer(n: int, dtype: np.dtype[Any]) -> Any:
    """Round an integer of any size to f32 or f64: its leading bits, with what is cut off kept as a sticky bit."""
    cut = max(0, n.bit_length() - 62)
    leading = abs(n) >> cut
    sticky = int(leading << cut != abs(n))
    return np.copysign(np.ldexp(np.int64(leading | sticky).astype(dtype), cut), dtype.type(n < 0) * -2 + 1)


def _magnitude(codes: Array) -> int:
    low, high = np.iinfo(codes.dtype).min, np.iinfo(codes.dtype).max
    return max(-int(low), int(high))


def element_holding(q_min: int, q_max: int) -> ElementKind | None:
    """Return s8 or u8, whichever holds [q_min, q_max] (s8 first), or None."""
    for element in CODES8:
        low, high = element.integer_range or (0, 0)
        if low <= q_min and q_max <= high:
            return element
    return None
