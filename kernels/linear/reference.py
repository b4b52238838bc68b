"""The exact product of codes in NumPy, and the blocks in which a linear op's reference computes its outputs.

BLAS computes the integer product: a sum of int8 products is exact in f32, in any order and with or without fused
multiply-add, as long as the sum of magnitudes stays within 2^24. So K is cut into runs of that length (1,024 for s8 by
s8), and f64 adds up the runs, which is exact up to 2^53. Codes of 16 bits are two planes of s8, and f64 also adds up
their products, each times a power of two.

Outputs are computed in boxes. The codes of a box's rows are made in parts along K, which bounds the memory for a long
K. Boxes stay tall, because all weights are converted once for every row of boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product, repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from skuda.kernels.blocks import BLOCK, planes
from skuda.kernels.linear import packed
from skuda.kernels.linear.epilogue import Epilogue, arithmetic
from skuda.kernels.linear.problem import LinearProblem
from skuda.registry.elements import ElementKind

Array = npt.NDArray[Any]
Codes = Callable[[slice], tuple[Array, ...]]
"""Returns the planes of the codes of some rows, s8 or u8, in a part of K: one, or the two of 16-bit codes."""

_MIN_ROWS, _ROWS, _COLUMNS = 64, 512, 1024
_CODES_AT_ONCE = 1 << 22
_SUMS_AT_ONCE = 1 << 20


def write_layer(
    epilogue: Epilogue,
    quantized: Callable[[slice], tuple[Codes, Array]],
    act_zero_point: int | Array,
    weight: tuple[Array, Array | None],
    output: Array,
) -> None:
    """Write a linear layer's output, box by box. Temporaries stay within 32 MB, beside the codes of a packed weight.

    Parameters
    ----------
    epilogue : Epilogue
        The epilogue of the product.
    quantized : callable
        Returns the activation's codes and scales, (rows,), of some rows.
    act_zero_point : int or array of shape (M,), s32
        Zero point of the activation, for all rows or for each.
    weight : (array, array or None)
        Codes, (N, K), or the packed weight, and zero points, (N,), of the weight.
    output : array of shape (M, N)
        The output to write.
    """
    problem = epilogue.problem
    m, n, k = problem.sizes
    if problem.weight_element is ElementKind.S4:
        weight = _unpacked(weight[0], n, k), None
    of_weight = planes(weight[0], problem.weight_element), weight[1]
    height = _MIN_ROWS
    if m > height:
        height = max(_MIN_ROWS, min(_ROWS, _CODES_AT_ONCE // max(k, 1)), BLOCK // max(n, k, 1))
    for rows in _cut(m, height):
        codes, row_scale = quantized(rows)
        shift = act_zero_point if isinstance(act_zero_point, int) else act_zero_point[rows].astype(np.int64)
        parts = parts_of_k(len(row_scale), k)
        # The codes are made again for every panel of columns, so panels are wide if K has several parts.
        width = max(_COLUMNS, _SUMS_AT_ONCE // len(row_scale)) if len(parts) > 1 else _COLUMNS
        for panel in _cut(n, width):
            columns = _cut(panel.stop, _COLUMNS, panel.start)
            for at, sums in exact_products(problem, codes, parts, shift, of_weight, columns):
                epilogue.apply(row_scale, sums, at, output[rows, at])


def _unpacked(weight: Array, n: int, k: int) -> Array:
    """Return the codes (N, K) of a packed weight. Units of rows are unpacked a few at a time, to save temporaries."""
    codes = np.empty((n, k), np.int8)
    step = max(1, _CODES_AT_ONCE // (packed.ROWS * max(k, 1)))
    for units in _cut(len(weight), step):
        rows = codes[units.start * packed.ROWS : units.stop * packed.ROWS]
        rows[...] = packed.unpacked(weight[units], len(rows), k)
    return codes


def parts_of_k(rows: int, k: int) -> list[slice]:
    """Return the parts of K in which the codes of some rows are made. It is one part unless K is very long."""
    return _cut(k, max(1, _CODES_AT_ONCE // max(1, rows)))


def _cut(stop: int, step: int, start: int = 0) -> list[slice]:
    if 0 < stop - start <= step:
        return [slice(start, stop)]
    return [slice(at, min(at + step, stop)) for at in range(start, stop, step)]


def exact_products(
    problem: LinearProblem,
    codes: Codes,
    parts: list[slice],
    act_zero_point: int | Array,
    weight: tuple[tuple[Array, ...], Array | None],
    columns: list[slice],
) -> Iterator[tuple[slice, Array | None]]:
    """Yield every block of columns with ``RN_C(sum_k (a - za)(w - zw))``: the sum is exact and rounded once.

    An output of sums is the sum itself. For K == 0 there is None in place of the sums. Where both have codes of 16
    bits, the product of their low halves is left out.

    Parameters
    ----------
    problem : LinearProblem
        Has the elements of the codes and the compute type C.
    codes : callable
        The activation's codes.
    parts : list of slice
        The parts of K, none if it is 0; `codes` is called once for each.
    act_zero_point : int or array of shape (rows,), s64
        za; one number lies within the range of the codes, others are any s32.
    weight : (tuple of array, array or None)
        Planes of the codes, (N, K), s8 or u8, and zero points, (N,), s32, or None for 0.
    columns : list of slice
        The blocks.
    """
    if not parts:
        yield from zip(columns, repeat(None))
        return
    (of_weight, weight_zero_point), how, k = weight, arithmetic(problem), parts[-1].stop
    is_short = k <= how.run and len(how.pairs) == 1
    sums: list[Any] = [None] * len(columns)
    shift: Any = -k * act_zero_point
    for part in parts:
        a = codes(part)
        if weight_zero_point is not None:
            shift = shift + a[0].sum(axis=1, dtype=np.int64)
        for i, block in enumerate(columns):
            for at, (of_a, of_w, bits) in product(_cut(part.stop, how.run, part.start), how.pairs):
                exact = (
                    a[of_a][:, at.start - part.start : at.stop - part.start].astype(np.float32)
                    @ of_weight[of_w][block, at].astype(np.float32).T
                )
                if not is_short:
                    exact = exact.astype(np.float64) * 2.0**bits
                if sums[i] is None:
                    sums[i] = exact
                else:
                    sums[i] += exact
    shifted = weight_zero_point is not None or not isinstance(act_zero_point, int) or act_zero_point != 0
    for block, found in zip(columns, sums, strict=True):
        if shifted:
            zw = None if weight_zero_point is None else weight_zero_point[block].astype(np.int64)
            found = _shifted(found, (act_zero_point, of_weight[0][block]), (shift, zw), how.product)  # noqa: PLW2901
        yield block, np.asarray(found, how.product)


def _shifted(
    product: Array, activation: tuple[int | Array, Array], weight: tuple[Any, Array | None], dtype: np.dtype[Any]
) -> Array:
    """Subtract ``za sum_k w`` and ``zw sum_k (a - za)`` from exact products ``sum_k a w``, and round to `dtype`.

    `activation` is (za, w), and `weight` is (sum_k (a - za), zw), with None for a zw of 0.
    """
    za, w = activation
    rows = np.broadcast_to(np.asarray(za, np.int64), len(product))
    exact_sums = subtract_outer(product.astype(np.int64), rows, w.sum(axis=1, dtype=np.int64))
    shift, zw = weight
    if zw is not None:
        exact_sums = subtract_outer(exact_sums, np.broadcast_to(shift, len(product)), zw)
    if exact_sums.dtype == object:
        exact_sums = np.frompyfunc(lambda n: round_integer(n, dtype), 1, 1)(exact_sums)
    return np.asarray(exact_sums, dtype)


def subtract_outer(exact: Array, rows: Array, columns: Array) -> Array:
    """Return ``exact[m, n] - rows[m] columns[n]``, as Python integers where 64 bits may not hold it."""
    largest = int(np.abs(rows).max(initial=0)) * int(np.abs(columns).max(initial=0))
    if exact.dtype != object and int(np.abs(exact).max(initial=0)) + largest < 1 << 63:
        return np.asarray(exact - np.multiply.outer(rows, columns))
    return np.asarray(exact.astype(object) - np.multiply.outer(rows.astype(object), columns.astype(object)))


def round_integer(n: int, dtype: np.dtype[Any]) -> Any:
    """Round an integer of any size to f32 or f64. Its leading bits are kept, with a sticky bit for the others."""
    cut = max(0, n.bit_length() - 62)
    leading = abs(n) >> cut
    sticky = int(leading << cut != abs(n))
    return np.copysign(np.ldexp(np.int64(leading | sticky).astype(dtype), cut), dtype.type(n < 0) * -2 + 1)
