"""4-bit weights from calibration: the error of each column is made good by the columns after it (GPTQ).

With E the difference between a weight and its quantized form, and H the second moments of the layer's inputs, the
squared error of the outputs is the trace of E H E'. With H = R R', R upper triangular, it is the squared sum of E R.
Column j of E R depends on the columns 0 to j of E, so the columns are quantized in this order, and the target of column
j is its weight plus the sum of E[:, i] R[i, j] / R[j, j] over the columns i before it. This is the method of Frantar et
al., "GPTQ" (arXiv 2210.17323), without the inverse of H.

The result has the same bits on every device. Sums of H are of integers and exact, and so are those over blocks of 128
columns, see `_product`. Every other operation is rounded by itself, in f64 but for the choice of a group's levels, and
in the order that is written here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from skuda.registry.cached import cached_property
from skuda.registry.errors import InvalidProblem
from skuda.torch.formats.int8 import quantized_weight
from skuda.torch.formats.levels import HIGHEST, LOWEST, STEPS, WIDEST_SYMMETRIC, Int4Weight, check_group_size

DAMPING = 0.01
"""What is added to the diagonal of H, as a part of its mean."""
_BLOCK = 128
"""Columns whose part in later ones is one product."""
_AT_A_TIME = 1 << 22
"""Differences from levels that are in memory at a time."""
_LARGEST = 32639
"""The largest code of a calibrated input. Below 2^15, so that sums of 2^23 products are exact in f64."""


class Moments:
    """The second moments of a layer's inputs, for `calibrated_weight`.

    Parameters
    ----------
    rows : tensor of shape (R, K), f16, bf16 or f32
        Inputs of the layer, at least K of them: from fewer, a weight can become worse than by rounding. They become
        codes of 16 bits with one scale, their largest magnitude over 32,639.

    Attributes
    ----------
    sums : tensor of shape (K, K), f64
        Sums of products of codes, which are integers.

    Raises
    ------
    InvalidProblem
        For rows that are not a finite matrix of such a dtype, fewer than K or more than 2^23.
    """

    def __init__(self, rows: Tensor) -> None:
        if rows.dim() != 2 or rows.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            had = f"{rows.dtype} of shape {list(rows.shape)}"
            raise InvalidProblem("Moments", "rows", had, "be float16, bfloat16 or float32 of shape [R, K]")
        if not rows.shape[1] <= len(rows) <= 1 << 23:
            rule = f"be at least K, {rows.shape[1]}, and at most 2^23: calibrate(..., rows=...) says how many are kept"
            raise InvalidProblem("Moments", "rows", f"{len(rows)} rows", rule)
        if not bool(rows.isfinite().all()):
            raise InvalidProblem("Moments", "rows", "an infinity or NaN", "be finite")
        wide = rows.detach().double()
        step = wide.abs().amax() / _LARGEST if wide.numel() else wide.new_ones(())
        codes = torch.where(step > 0, wide / step, 0.0).round()
        self.sums = codes.T @ codes

    @cached_property
    def carried(self) -> Tensor:
        """The part of the error of column i that column j makes good: R[i, j] / R[j, j], for damped sums R R'.

        R is found from the last column to the first: R[j, j] is the square root of what is left of the diagonal, and
        R[i, j] what is left of column j over it. R[i, j] R[k, j] is subtracted from what is left of element (i, k): for
        columns k of the same block at once, and for those before it as one product of all columns of the block.
        """
        left, size = self.sums.clone(), len(self.sums)
        mean = float(left.diagonal().long().sum()) / max(size, 1)  # in s64, so that no order matters
        left.diagonal().add_(DAMPING * mean if mean else 1.0)
        found = torch.zeros_like(left)
        for start in reversed(range(0, size, _BLOCK)):
            stop = min(start + _BLOCK, size)
            block = left.new_zeros(stop, stop - start)
            for j in reversed(range(start, stop)):
                root = left[j, j].sqrt()
                column = block[:j, j - start] = left[:j, j] / root
                found[:j, j] = column / root
                left[:j, start:j] -= column[:, None] * column[start:]
            left[:start, :start] -= _product(block[:start], block[:start].T)
        return found


def calibrated_weight(weight: Tensor, moments: Moments, group_size: int = 128) -> Int4Weight:
    """Quantize a weight of shape (N, K) to 4 bits with the least error of its layer's outputs.

    Columns are quantized in order, to the level nearest to their target, the even one of two. What a column adds to the
    targets of its block of 128 is added at once; to later ones, a block adds one product. When the first column of a
    group is reached, the group takes the scale and the offset with the least squared error of the targets that its
    columns have then, weighted by the diagonal of the moments, at least 1. It is found in f32. Scales are 1 to 18, from
    half of what would span the targets to one more. Offsets have levels around the middle of the targets, and are moved
    by up to one scale, in steps of a quarter. Of equals the first in ascending order is taken.

    Parameters
    ----------
    weight : tensor of shape (N, K), f16, bf16 or f32
    moments : Moments
        Those of the layer's inputs, on the weight's device.
    group_size : int
        32, 64 or 128 elements of K; or 0, for one group a row.

    Raises
    ------
    InvalidProblem
        For a weight or moments of another shape, dtype or value, or another group size.
    """
    check_group_size("calibrated_weight", group_size)
    _, channel_scale = quantized_weight(weight)
    n, k = weight.shape
    if moments.sums.shape != (k, k) or moments.sums.device != weight.device:
        had = f"of {len(moments.sums)} columns on {moments.sums.device}"
        raise InvalidProblem("calibrated_weight", "moments", had, f"be of {k} columns on {weight.device}")
    size = group_size or max(k, 1)
    # A row for each column of the weight: what follows a column lies together.
    targets = (weight.detach().double() / channel_scale.double()[:, None]).T.contiguous()
    rates, importance = moments.carried, moments.sums.diagonal().clamp(min=1)
    levels = torch.empty(k, n, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(-(-k // size), n, dtype=torch.float64, device=weight.device)
    offsets = torch.empty_like(scales)
    plain = targets.clone()
    for start in range(0, k, _BLOCK):
        stop = min(start + _BLOCK, k)
        errors = targets.new_empty(stop - start, n)
        for j in range(start, stop):
            if j % size == 0:
                scale, offset = _grid(targets[j : j + size], importance[j : j + size])
                scale, offset = scale.double(), offset.double()
                scales[j // size], offsets[j // size], most = scale, offset, _most(scale, offset)
            levels[j] = level = ((targets[j] - offset) / scale).round().clamp_(min=0).minimum(most)
            error = errors[j - start] = plain[j] - (scale * level + offset)
            targets[j + 1 : stop] += rates[j, j + 1 : stop, None] * error
        targets[stop:] += _product(rates[start:stop, stop:].T, errors)
    group_scale, group_offset = scales.T.contiguous().to(torch.uint8), offsets.T.contiguous().to(torch.int8)
    return Int4Weight(levels.T.contiguous(), group_scale, group_offset, channel_scale)


def _most(scale: Tensor | float, offset: Tensor) -> Tensor:
    """Return the largest levels whose codes are s8."""
    return ((HIGHEST - offset) / scale).floor().clamp(max=STEPS)


def _grid(targets: Tensor, importance: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale and offset of each row of a group, given targets of shape (columns, rows)."""
    targets, importance = targets.float(), (importance / importance.amax()).float()[:, None, None]
    low, high = targets.amin(0).clamp(max=0), targets.amax(0).clamp(min=0)
    spanning, middle = (high - low) / STEPS, (high + low) / 2
    best = torch.full_like(low, torch.inf)
    scale, offset = torch.ones_like(low), torch.zeros_like(low)
    first = int((spanning.amin() / 2).floor().clamp(min=1)) if len(low) else 1
    last = int((spanning.amax().ceil() + 1).clamp(max=WIDEST_SYMMETRIC)) if len(low) else 0
    for tried in range(first, last + 1):
        which = ((tried >= (spanning / 2).floor()) & (tried <= spanning.ceil() + 1)).nonzero()[:, 0]
        if not len(which):
            continue
        step = max(1, tried // 4)
        moved = torch.arange(-(tried // step) * step, tried + 1, step, device=low.device)[:, None]
        places = torch.arange(len(moved), device=low.device)[:, None]
        for part in which.split(max(1, _AT_A_TIME // targets[:, :1].numel() // len(moved))):
            start = ((middle[part] - tried * STEPS / 2).round() + moved).clamp(LOWEST, HIGHEST)
            error = targets[:, None, part] - start
            error -= (error / tried).round_().clamp_(min=0).minimum(_most(tried, start)).mul_(tried)
            total = _sum(error.mul_(error).mul_(importance))
            least = total.amin(0)
            first = torch.where(total == least, places, len(places)).amin(0, keepdim=True)
            better = least < best[part]
            scale[part] = torch.where(better, tried, scale[part])
            offset[part] = torch.where(better, start.gather(0, first)[0], offset[part])
            best[part] = torch.where(better, least, best[part])
    return scale, offset


def _sum(rows: Tensor) -> Tensor:
    """Return the sum of all rows, which are added in pairs: the first half to the second, until one is left."""
    while len(rows) > 1:
        half = len(rows) // 2
        rows = torch.cat((rows[:half] + rows[half : 2 * half], rows[2 * half :]))
    return rows[0]


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return left right, over a block of columns of `left`, with the same bits on every device.

    A row of `left`, or a column of `right`, is a power of two times numbers below 2^22, each the sum of an integer and
    a multiple of 2^-22 up to a half. Sums of products of these parts are integers below 2^53, so no order changes a
    bit. Those of two small parts are left out.
    """
    high, low, units = [], [], []
    for factor, axis in ((left, 1), (right, 0)):
        largest = factor.abs().amax(axis, keepdim=True) if factor.numel() else factor.sum(axis, keepdim=True)
        power = torch.where(largest > 0, largest / torch.frexp(largest).mantissa, 1.0)
        units.append(power * 2.0**-22)
        wide = factor / units[-1]
        high.append(wide.round())
        low.append(((wide - high[-1]) * 2.0**22).round())
    small = high[0] @ low[1] + low[0] @ high[1]
    return (high[0] @ high[1] + small * 2.0**-22) * (units[0] * units[1])
