"""The exact int8 product in NumPy, and the blocks in which a linear op's reference computes its outputs.

BLAS computes the integer product: a sum of int8 products is exact in f32, in any order and with or without fused
multiply-add, as long as the sum of magnitudes stays within 2^24. So K is cut into runs of that length (1,024 for s8 by
s8), and f64 adds up the runs, which is exact up to 2^53.

Outputs are computed in boxes. The codes of a box's rows are made in parts along K, which bounds the memory for a long
K. Boxes stay tall, because all weights are converted once for every row of boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from skuda.kernels.blocks import BLOCK
from skuda.kernels.linear.epilogue import Epilogue, arithmetic
from skuda.kernels.linear.problem import LinearProblem

Array = npt.NDArray[Any]
Codes = Callable[[slice], Array]
"""Returns the codes of some rows, s8 or u8, in a part of K."""

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
    """Write a linear layer's output, box by box. Temporaries stay within 32 MB.

    Parameters
    ----------
    epilogue : Epilogue
        The epilogue of the product.
    quantized : callable
        Returns the activation's codes and scales, (rows,), of some rows.
    act_zero_point : int or array of shape (M,), s32
        Zero point of the activation, for all rows or for each.
    weight : (array, array or None)
        Codes, (N, K), and zero points, (N,), of the weight.
    output : array of shape (M, N)
        The output to write.
    """
    problem, (weight_q, weight_zero_point) = epilogue.problem, weight
    m, n, k = problem.sizes
    height = max(_MIN_ROWS, min(_ROWS, _CODES_AT_ONCE // max(k, 1)), BLOCK // max(n, k, 1))
    for rows in _cut(m, height):
        codes, row_scale = quantized(rows)
        shift = act_zero_point if isinstance(act_zero_point, int) else act_zero_point[rows].astype(np.int64)
        parts = parts_of_k(len(row_scale), k)
        # The codes are made again for every panel of columns, so panels are wide if K has several parts.
        width = max(_COLUMNS, _SUMS_AT_ONCE // len(row_scale) if len(parts) > 1 else 0)
        for panel in _cut(n, width):
            columns = _cut(panel.stop, _COLUMNS, panel.start)
            weights = [(weight_q[at], None if weight_zero_point is None else weight_zero_point[at]) for at in columns]
            products = exact_products(problem, codes, parts, shift, weights) if parts else repeat(None)
            for at, product in zip(columns, products, strict=False):
                epilogue.apply(row_scale, product, at, output[rows, at])


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
    weights: list[tuple[Array, Array | None]],
) -> Iterator[Array]:
    """Yield ``RN_C(sum_k (a - za)(w - zw))`` for each block of weights: the sum is exact and rounded once.

    An s32 output is the sum itself.

    Parameters
    ----------
    problem : LinearProblem
        Has the elements of the codes and the compute type C.
    codes : callable
        The activation's codes.
    parts : list of slice
        The parts of K, which is not 0; `codes` is called once for each.
    act_zero_point : int or array of shape (rows,), s64
        za; one number lies within the range of the codes, others are any s32.
    weights : list of (array, array or None)
        Codes, (columns, K), s8 or u8, and zero points, (columns,), s32, or None for 0.
    """
    how, k = arithmetic(problem), parts[-1].stop
    run, dtype = how.run, how.product
    sums: list[Any] = [None] * len(weights)
    shift: Any = -k * act_zero_point
    for part in parts:
        a = codes(part)
        if problem.has_weight_zero_point:
            shift = shift + a.sum(axis=1, dtype=np.int64)
        for i, (w, _) in enumerate(weights):
            for at in _cut(part.stop, run, part.start):
                exact = (
                    a[:, at.start - part.start : at.stop - part.start].astype(np.float32)
                    @ w[:, at].astype(np.float32).T
                )
                if sums[i] is None:
                    sums[i] = exact if k <= run else exact.astype(np.float64)
                else:
                    sums[i] += exact
    for product, (w, zw) in zip(sums, weights, strict=True):
        if isinstance(act_zero_point, int) and act_zero_point == 0 and zw is None:
            yield np.asarray(product, dtype)
            continue
        za = np.broadcast_to(np.asarray(act_zero_point, np.int64), len(product))
        exact_sums = subtract_outer(product.astype(np.int64), za, w.sum(axis=1, dtype=np.int64))
        if zw is not None:
            exact_sums = subtract_outer(exact_sums, np.broadcast_to(shift, len(product)), zw.astype(np.int64))
        if exact_sums.dtype == object:
            exact_sums = np.frompyfunc(lambda n: round_integer(n, dtype), 1, 1)(exact_sums)
        yield np.asarray(exact_sums, dtype)


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
