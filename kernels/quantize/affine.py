"""The arithmetic of affine quantization, once, for every granularity.

The formulas come first. Each computes one block of elements; scale and zero point broadcast against the block. The
functions below them traverse an array of any strides in such blocks. C is the compute type (f64 for f64 data, else f32)
and T the type of the data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from skuda.kernels.blocks import BLOCK, Index, blocks, scalar_of_one, write
from skuda.kernels.dtypes import compute_dtype, storage_dtype
from skuda.kernels.quantize.granularity import Spread, per_token
from skuda.registry.elements import ElementKind

Array = npt.NDArray[Any]

_SEGMENTS = 4096
"""Fewest segments whose ranges are computed at a time."""


def rounded_quotient(x: Array, scale: Any) -> Array:
    """``t = rne(RN_C(x / s))`` as f64, which holds it exactly; NaN where x or the quotient is NaN."""
    return np.asarray(np.rint(np.divide(x, scale)), np.float64)


def clamp_codes(t: Array, zero_point: Any, q_min: int, q_max: int) -> Array:
    """``clamp(t + z, q_min, q_max)``, in the memory of an f64 `t`, without wrapping; a NaN counts as 0 (real zero).

    A zero may have a sign.
    """
    t, z = np.asarray(t, np.float64), _wide(zero_point)
    t[np.isnan(t)] = 0
    # |q - z| < 2^33, so bounds and sums are exact in f64 even where t is 1e300.
    np.maximum(t, q_min - z, out=t)
    np.minimum(t, q_max - z, out=t)
    return t if isinstance(zero_point, int) and zero_point == 0 else np.add(t, z, out=t)


def in_range(t: Array, zero_point: Any, q_min: int, q_max: int) -> Array:
    """``q_min <= t + z <= q_max``, inclusive; False for a NaN `t`."""
    z = _wide(zero_point)
    return np.asarray((t >= q_min - z) & (t <= q_max - z))


def real_value(q: Array, zero_point: Any, scale: Any, compute: np.dtype[Any]) -> Array:
    """``RN_C(C(q - z) * s)``; the difference is exact before it is rounded to C."""
    offset = q.astype(np.float64) - _wide(zero_point)
    return np.asarray(np.multiply(offset.astype(compute), scale))


def _wide(zero_point: Any) -> Any:
    return float(zero_point) if isinstance(zero_point, int) else np.asarray(zero_point, np.float64)


def segments(
    shape: tuple[int, ...], spread: Spread, scale: Any, zero_point: Any, compute: np.dtype[Any]
) -> Iterator[tuple[Index, Any, Any]]:
    """Cut data of any shape into boxes; yield each with its scales, widened to C, and its zero points.

    A number as the zero point stands for all.
    """
    for index in blocks(shape):
        z = zero_point if isinstance(zero_point, int) else spread(zero_point, index)
        yield index, scalar_of_one(np.asarray(spread(scale, index), compute)), z


@np.errstate(all="ignore")  # infinities and NaN are valid results here
def quantize(
    spread: Spread,
    elements: tuple[ElementKind, ElementKind],
    bounds: tuple[int, int],
    arrays: tuple[Array, Any, Any, Array],
) -> None:
    """Quantize ``input`` into ``output``; arrays are (input, scale, zero_point, output)."""
    data, code = elements
    x, scale, zero_point, output = arrays
    compute = compute_dtype(data)
    for index, s, z in segments(x.shape, spread, scale, zero_point, compute):
        t = rounded_quotient(x[index].astype(compute, copy=False), s)
        write(output, code, index, clamp_codes(t, z, *bounds))


def quantize_rows(
    elements: tuple[ElementKind, ElementKind],
    bounds: tuple[int, int],
    x: Array,
    scales: Array,
    output: Array,
    *,
    nan: float = 0.0,
) -> None:
    """Write the symmetric scale of every row of `x`, (rows,), and its codes. The caller ignores errors of NumPy.

    A NaN counts as `nan` in the range of its row.
    """
    compute = compute_dtype(elements[0])
    if not 0 < x.size <= BLOCK:
        dynamic_scales(x, (1,), elements[0], bounds, (scales[:, None], None), asymmetric=False, nan=nan)
        quantize(per_token, elements, bounds, (x, scales, 0, output))
        return
    scale = _scale(_range(x, (1,), compute, asymmetric=False, nan=nan)[1], bounds[1])
    scales[...] = scale[:, 0]
    t = rounded_quotient(x.astype(compute, copy=False), scalar_of_one(scale))
    write(output, elements[1], (slice(0, len(x)), slice(0, x.shape[1])), clamp_codes(t, 0, *bounds))


def coded_rows(
    elements: tuple[ElementKind, ElementKind], bounds: tuple[int, int], x: Array, *, nan: float = 0.0
) -> tuple[Array, Array]:
    """Return the scales and codes of `quantize_rows` as new arrays; codes have a byte each."""
    scales = np.empty(len(x), compute_dtype(elements[0]))
    codes = np.empty(x.shape, storage_dtype(elements[1]))
    quantize_rows(elements, bounds, x, scales, codes, nan=nan)
    return scales, codes


@np.errstate(all="ignore")
def straight_through(
    spread: Spread,
    data: ElementKind,
    bounds: tuple[int, int],
    arrays: tuple[Array, Array, Any, Any, Array],
    *,
    divide: bool,
) -> None:
    """Pass the gradient where the forward did not clip; arrays are (d_output, input, scale, zero_point, d_input).

    Parameters
    ----------
    divide : bool
        True for quantize (dy / s), False for fake_quantize (dy).
    """
    dy, x, scale, zero_point, dx = arrays
    compute = compute_dtype(data)
    for index, s, z in segments(x.shape, spread, scale, zero_point, compute):
        passes = in_range(rounded_quotient(x[index].astype(compute), s), z, *bounds)
        gradient = np.divide(dy[index].astype(compute), s) if divide else dy[index]
        dx[index] = np.where(passes, gradient, gradient.dtype.type(0)).astype(dx.dtype)


@np.errstate(all="ignore")
def dynamic_scales(
    x: Array,
    axes: tuple[int, ...],
    data: ElementKind,
    bounds: tuple[int, int],
    outputs: tuple[Array, Array | None],
    *,
    asymmetric: bool,
    nan: float = 0.0,
) -> None:
    """Write scale and zero point of every segment from the range of its data.

    Parameters
    ----------
    x : array
        The data, in a view whose segments run over whole axes.
    axes : tuple of int
        Those axes.
    data : ElementKind
        Element of the data.
    bounds : (int, int)
        ``q_min`` and ``q_max``.
    outputs : (array, array or None)
        Scales and zero points, with extent 1 along `axes`. Symmetric zero points are 0 and may be left out.
    asymmetric : bool
        Whether [min(0, min x), max(0, max x)] maps onto the bounds, rather than max abs x onto ``q_max``.
    nan : float
        What a NaN counts as in a range: 0, which changes none, or an infinity.
    """
    compute = compute_dtype(data)
    q_min, q_max = bounds
    scale_out, zero_point_out = outputs
    if zero_point_out is not None:
        zero_point_out[...] = 0
    length = math.prod([x.shape[axis] for axis in axes])
    if length == 0:
        scale_out[...] = 1
        return
    for index in blocks(scale_out.shape, max(_SEGMENTS, BLOCK // length)):
        whole = tuple([slice(None) if axis in axes else at for axis, at in enumerate(index)])
        low, high = _range(x[whole], axes, compute, asymmetric=asymmetric, nan=nan)
        scale = _scale(high - low, q_max - q_min) if asymmetric else _scale(high, q_max)
        scale_out[index] = scale
        if asymmetric and zero_point_out is not None:
            offset = rounded_quotient(low, scale)
            zero_point_out[index] = np.clip(q_min - np.where(np.isnan(offset), 0.0, offset), q_min, q_max)


def _scale(extent: Array, steps: int) -> Array:
    """Return the scales, in C, that give ranges of some extent as many steps, which C holds exactly; 1 for none."""
    scale = np.asarray(extent / steps)
    scale[scale == 0] = 1
    return scale


def _range(
    x: Array, axes: tuple[int, ...], compute: np.dtype[Any], *, asymmetric: bool, nan: float
) -> tuple[Any, Array]:
    """Return the smallest and largest value over `axes`, both starting from 0; a NaN counts as `nan`.

    Symmetric ranges are 0 and the largest magnitude.
    """
    if x.size <= BLOCK:
        return _range_of_block(x, axes, compute, asymmetric=asymmetric, nan=nan)
    low = np.zeros([1 if axis in axes else extent for axis, extent in enumerate(x.shape)], compute)
    high = low.copy()
    for index in blocks(x.shape):
        place = tuple(slice(0, 1) if axis in axes else at for axis, at in enumerate(index))
        lowest, highest = _range_of_block(x[index], axes, compute, asymmetric=asymmetric, nan=nan)
        low[place] = np.minimum(low[place], lowest)
        high[place] = np.maximum(high[place], highest)
    return low, high


def _range_of_block(
    x: Array, axes: tuple[int, ...], compute: np.dtype[Any], *, asymmetric: bool, nan: float
) -> tuple[Any, Array]:
    block = x.astype(compute)
    if not asymmetric:
        np.abs(block, out=block)
    block[np.isnan(block)] = nan  # fmax skips a quiet NaN, but not a signalling one
    high = np.maximum.reduce(block, axes, keepdims=True)
    if not asymmetric:
        return 0, high
    return np.minimum(np.minimum.reduce(block, axes, keepdims=True), 0), np.maximum(high, 0)
