"""The exact int8 product in NumPy, and the blocks in which a linear op's reference computes its outputs.

The product goes through BLAS although it is of integers: a sum of int8 products is exact in f32, in any order and with
or without fused multiply-add, as long as the sum of magnitudes stays within 2^24. So K is cut into runs of
that length (1,024 for s8 by s8), and the runs are added up in f64, which is exact up to 2^53.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from skuda.kernels.dtypes import storage_dtype
from skuda.kernels.linear.epilogue import Epilogue
from skuda.registry.elements import ElementKind

Array = npt.NDArray[Any]

_ROWS, _COLUMNS = 512, 1024
_CODES_AT_ONCE = 1 << 22


def write_layer(
    epilogue: Epilogue,
    quantized: Callable[[slice], tuple[Array, Array]],
    act_zero_point: int,
    weight: tuple[Array, Array | None],
    output: Array,
) -> None:
    """Write a linear layer's output, block by block: the codes of a block stay within a few megabytes.

    Parameters
    ----------
    epilogue : Epilogue
        The epilogue of the product.
    quantized : callable
        Returns the activation's codes, (rows, K), and scales, (rows,), of some rows.
    act_zero_point : int
        Zero point of the activation.
    weight : (array, array or None)
        Codes, (N, K), and zero points, (N,), of the weight.
    output : array of shape (M, N)
        The output to write.
    """
    m, n, k = epilogue.problem.sizes
    weight_q, weight_zero_point = weight
    compute = epilogue.problem.compute
    for rows in _cut(m, max(1, min(_ROWS, _CODES_AT_ONCE // max(k, 1)))):
        codes, row_scale = quantized(rows)
        for columns in _cut(n, _COLUMNS):
            zero_point = None if weight_zero_point is None else weight_zero_point[columns]
            product = exact_product(codes, weight_q[columns], act_zero_point, zero_point, compute) if k > 0 else None
            epilogue.apply(row_scale, product, columns, output[rows, columns])


def _cut(extent: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, extent)) for start in range(0, extent, step)]


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
