"""4-bit weights: s8 codes that a group of elements takes from 16 levels, equally far apart.

The product stays that of W8A8, because the codes are exactly s8: code[n, k] = group_scale[n, g] level[n, k] +
group_offset[n, g], and the weight is about code[n, k] channel_scale[n]. Groups are runs of elements of K; the last one
may be shorter. `skuda.kernels.linear.packed` has the layout that kernels read.
"""

from __future__ import annotations

from itertools import chain
from math import inf
from typing import NamedTuple, NoReturn, cast

import torch
from torch import Tensor, nn

from skuda.kernels.linear.packed import GROUP_SIZES
from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown
from skuda.registry.value import expect
from skuda.torch.formats.int8 import quantized_weight
from skuda.torch.formats.weight import Difference
from skuda.torch.ops.tensor_op import check_tensors

STEPS = 15
"""The largest level."""
LOWEST, HIGHEST = -128, 127
"""The bounds of codes."""
_WIDEST = (HIGHEST - LOWEST) // STEPS
"""The scale at which the levels span all codes."""
WIDEST_SYMMETRIC = HIGHEST // 7
"""The largest scale with codes of -7 to 7 times it."""
_MOST_GROUPS, _MOST_ELEMENTS = 1024, 1 << 22
"""Groups, and elements, that are in memory as more than bytes at a time."""
_MORE_ON_A_GPU = 16
"""Times as many groups there, where launches take the time."""
_TRIED = [1 + step / 64 for step in range(64)]
"""Channel scales that are tried beside fractions, over the least one: smaller ones would cut off large weights."""
_KEYS = 1 << 13
"""More than there are scales and offsets to try."""


class Int4Weight(NamedTuple):
    """A weight in 4 bits.

    Attributes
    ----------
    levels : tensor of shape (N, K), u8
        0 to 15.
    group_scale : tensor of shape (N, groups), u8
    group_offset : tensor of shape (N, groups), s8
    channel_scale : tensor of shape (N,), f32
        Real units per code of each output channel.
    """

    levels: Tensor
    group_scale: Tensor
    group_offset: Tensor
    channel_scale: Tensor

    def packed(self, group_size: int) -> Tensor:
        """Return the weight in the layout that kernels read; `group_size` 0 stands for one group a row."""
        check_group_size("Int4Weight.packed", group_size)
        # All codes are s8, so none can misfit.
        packed, _ = torch.ops.skuda.pack_weight.default(
            self.levels, self.group_scale.int(), self.group_offset.int(), group_size=group_size
        )
        return cast("Tensor", packed)

    def codes(self) -> Tensor:
        """Return the codes, s8 of shape (N, K)."""
        scale, offset = (spread(part, self.levels) for part in (self.group_scale, self.group_offset))
        return (self.levels * scale).to(torch.int8) + offset  # modulo 256, like kernels


def check_group_size(subject: str, group_size: object) -> int:
    """Return the size of a group; raise `InvalidProblem` unless `int4_weight` has such groups."""
    if type(group_size) is not int or group_size not in (0, *GROUP_SIZES):
        rule = f"be {', '.join(map(str, GROUP_SIZES))}, or 0 for one group a row"
        raise InvalidProblem(subject, "group_size", shown(group_size), rule)
    return group_size


def int4_weight(weight: Tensor, group_size: int = 128, *, symmetric: bool = False) -> Int4Weight:
    """Quantize a weight of shape (N, K) to 4 bits, rounding to the nearest level.

    The codes are first those of `quantized_weight`. Of the scales 1 to 17 and all offsets, each group takes the pair
    with the least squared error in its codes; of equal ones the smallest scale, and of these the largest offset. A
    whole row takes the smallest scale up to 18 whose levels, one of them 0, have each code within half a scale: the
    least squared error would cut off the largest weights, and harm a model more. A code between two levels goes to the
    lower. If all differences in a group have a common divisor above 17, as in a weight of three values, the greatest
    one is the scale, and the group is exact. A group of equal codes has the scale 0.

    Symmetric weights are what others read; see `skuda.torch.formats.grouped`. Codes are then -8 to 7 times a scale of 1
    to 18, or one above that divides all. Channel scales are rounded towards 0 to 17 bits, so that multiples are exact.

    All sums are sums of integers, and exact, so the result has the same bits on every device.

    Parameters
    ----------
    weight : tensor of shape (N, K), f16, bf16 or f32
    group_size : int
        32, 64 or 128 elements of K; or 0, for one group a row.
    symmetric : bool
        Whether all codes of a group are multiples of its scale.

    Raises
    ------
    InvalidProblem
        If the weight is not a finite matrix of such a dtype, or for another group size.
    """
    check_group_size("int4_weight", group_size)
    expect("int4_weight", "symmetric", symmetric, bool, "be True or False")
    codes, channel_scale = quantized_weight(weight)
    (n, k), size = codes.shape, group_size or max(codes.shape[1], 1)
    levels = torch.empty_like(codes, dtype=torch.uint8)
    scale = levels.new_empty(n, -(-k // size))
    offset = torch.empty_like(scale, dtype=torch.int8)
    whole = k // size
    for groups, elements in (
        (slice(whole), slice(whole * size)),
        (slice(whole, None), slice(whole * size, None)),  # the last group, if it is shorter
    ):
        part = codes[:, elements]
        if part.numel():
            found = _quantized(part.reshape(-1, min(size, part.shape[1])), symmetric=symmetric, whole=not group_size)
            levels[:, elements], scale[:, groups], offset[:, groups] = (each.view(n, -1) for each in found)
    made = Int4Weight(levels, scale, offset, channel_scale)
    return _readable(made) if symmetric else made


def _readable(made: Int4Weight) -> Int4Weight:
    """Return a symmetric weight in the form in which `from_grouped` returns it, with a channel scale of 17 bits."""
    values = made.codes() // spread(made.group_scale.to(torch.int8), made.levels)
    short = (made.channel_scale.view(torch.int32) & -(1 << 7)).view(torch.float32)
    return from_grouped(values, made.group_scale * short[:, None])[0]


def from_grouped(levels: Tensor, scales: Tensor, zero_points: Tensor | None = None) -> tuple[Int4Weight, Difference]:
    """Express a weight (level - zero point) scale, with a scale in floating point for each group.

    Group scales become integer multiples of a channel scale. This is exact for one group a row, and where a channel's
    scales have such ratios. Elsewhere they are rounded. The channel scale is a fraction of the scale that leaves the
    least room in s8, the largest if several are exact. If none is, it is the best of these and of numbers in between:
    that with the least sum of fourth powers of the groups' largest errors. Their squares leave the largest weights, on
    which models depend most, too far off; the largest error of the row alone leaves the others.

    Parameters
    ----------
    levels : tensor of shape (N, K), s8
        -8 to 7.
    scales : tensor of shape (N, groups), f16, bf16 or f32
        Groups of 32, 64 or 128 elements of K, or one a row.
    zero_points : tensor of shape (N, groups), s8, optional
        -8 to 7. By default 0.

    Returns
    -------
    weight : Int4Weight
    difference : Difference
        0 if the codes times the channel scale are exactly the weight.

    Raises
    ------
    InvalidProblem
        For a tensor of another dtype, shape or range, or scales that are not finite.
    """
    check_tensors("from_grouped", levels=levels, scales=scales)
    if zero_points is not None:
        check_tensors("from_grouped", zero_points=zero_points)
    if levels.dtype is not torch.int8 or levels.dim() != 2 or _outside(levels):
        _refuse("levels", levels, "be int8 of shape [N, K], in -8..7")
    n, k = levels.shape
    fits = scales.dim() == 2 and len(scales) == n and scales.dtype in (torch.float16, torch.bfloat16, torch.float32)
    size = width_of(k, scales.shape[1]) if fits else None
    if size is None or not bool(scales.isfinite().all()):
        _refuse("scales", scales, f"be finite floats of shape [{n}, groups], groups of 32, 64, 128 or all elements")
    if zero_points is not None and (
        zero_points.dtype is not torch.int8 or zero_points.shape != scales.shape or _outside(zero_points)
    ):
        _refuse("zero_points", zero_points, f"be int8 of shape {list(scales.shape)}, in -8..7")
    shift = torch.zeros_like(scales, dtype=torch.int8) if zero_points is None else zero_points
    sign = torch.where(scales < 0, -1, 1).to(torch.int8)
    values = (levels - spread(shift, levels)) * spread(sign, levels)
    low, high = ends(values, scales.shape[1])
    largest = torch.maximum(-low, high)
    below, above = LOWEST // low.clamp(max=-1), HIGHEST // high.clamp(min=1)
    room = torch.where(high > 0, torch.minimum(below, above), below)
    wanted = scales.detach().double().abs() * (largest > 0)  # of a group of zeros, any scale will do
    channel = _channel_scale(wanted, room, largest)
    multiple = torch.minimum((wanted / channel).round(), room)
    error = (multiple * channel - wanted).abs()
    parts = nn.functional.pad(values, (0, size * scales.shape[1] - k)).view(*scales.shape, size)
    squares = parts.short().square().sum(2)
    made = Int4Weight(
        (values - spread(low.to(torch.int8), values)).to(torch.uint8),
        multiple.to(torch.uint8),
        (low * multiple).to(torch.int8),
        channel[:, 0].float(),
    )
    return made, Difference.of(error * largest, error.square() * squares, wanted.square() * squares, n * k)


def _channel_scale(wanted: Tensor, room: Tensor, largest: Tensor) -> Tensor:
    """Return channel scales (N, 1), f32 in f64, for group scales whose multiples are at most `room`."""
    tight = wanted / room
    best = torch.full((len(wanted), 1), inf, dtype=wanted.dtype, device=wanted.device)
    channel = torch.ones_like(best)
    if not wanted.numel():
        return channel
    least = tight.amax(1, keepdim=True)
    best[least == 0] = 0  # of zeros, which keep 1
    # Of several groups with the least room, those with the largest scale have more fractions.
    widest = (wanted * (tight == least)).amax(1, keepdim=True)
    most = int((widest / least).nan_to_num(0).max().round())
    for exact in chain((widest / multiple for multiple in range(1, most + 1)), (least * step for step in _TRIED)):
        tried = exact.float().double()
        error = (torch.minimum((wanted / tried).round(), room) * tried - wanted) * largest
        error = _sums(error.square().square())
        better = error < best
        best, channel = torch.where(better, error, best), torch.where(better, tried, channel)
        if not bool(best.any()):
            break
    return channel


def _sums(rows: Tensor) -> Tensor:
    """Return the sums of rows, added in one order on every device."""
    while rows.shape[1] > 1:
        rows = nn.functional.pad(rows, (0, rows.shape[1] % 2))
        rows = rows[:, ::2] + rows[:, 1::2]
    return rows


def ends(elements: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest element of each of a row's groups, s32; 0 for a group without elements."""
    n, k = elements.shape
    size = width_of(k, groups)
    assert size is not None
    group = torch.arange(k, device=elements.device) // size
    low, high = (
        elements.new_zeros(n, groups).scatter_reduce_(1, group.expand(n, k), elements, how, include_self=False)
        for how in ("amin", "amax")
    )
    return low.int(), high.int()


def width_of(k: int, groups: int) -> int | None:
    """Return the elements of a group, given how many groups a row has; None if there are no such groups."""
    sizes = (size for size in GROUP_SIZES if -(-k // size) == groups)
    return next(sizes, max(k, 1) if groups == 1 else None)


def spread(groups: Tensor, elements: Tensor) -> Tensor:
    """Return the value of every element's group."""
    k, count = elements.shape[1], groups.shape[1]
    size = width_of(k, count)
    assert size is not None
    return groups.repeat_interleave(size, 1, output_size=count * size)[:, :k]


def _outside(levels: Tensor) -> bool:
    return bool(((levels < -8) | (levels > 7)).any())


def _refuse(field: str, tensor: Tensor, rule: str) -> NoReturn:
    raise InvalidProblem("from_grouped", field, f"{tensor.dtype} of shape {list(tensor.shape)}", rule)


def _quantized(codes: Tensor, *, symmetric: bool, whole: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the levels, scales and offsets of groups of s8 codes above -128, a row each."""
    groups, size = codes.shape
    levels = torch.empty_like(codes, dtype=torch.uint8)
    scales, offsets = levels.new_empty(groups), codes.new_empty(groups)
    low, high = codes.amin(1).int(), codes.amax(1).int()
    # Similar groups are tried together, because few scales and offsets can be the best for any of them.
    alike = ((high - low) // 8 * 256 + low).argsort()
    at_once = min(_MOST_GROUPS * (_MORE_ON_A_GPU if codes.is_cuda else 1), _MOST_ELEMENTS // size)
    for which in alike.split(max(1, at_once)):
        own, least, most = codes[which].int(), low[which], high[which]
        scale, offset = _best(own, least, most, symmetric=symmetric, whole=whole)
        scales[which], offsets[which] = scale.to(torch.uint8), offset.to(torch.int8)
        levels[which] = _nearest(own, scale[:, None], offset[:, None]).to(torch.uint8)
    return levels, scales, offsets


def _nearest(codes: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """Return the levels of which codes are nearest to given ones; all are integers."""
    step = scale.clamp(min=1)
    level = (2 * (codes - offset) + step - 1).div(2 * step, rounding_mode="floor")
    return torch.minimum(level.clamp(0, STEPS), (HIGHEST - offset).div(step, rounding_mode="floor"))


def _best(codes: Tensor, low: Tensor, high: Tensor, *, symmetric: bool, whole: bool) -> tuple[Tensor, Tensor]:
    """Return the best scale and offset of each group, given its smallest and largest code; see `int4_weight`."""
    scale, offset = _multiples(codes) if symmetric else _candidates(codes, low, high)
    bottom, top = int(low.min()), int(high.max())
    values = torch.arange(bottom, top + 1, dtype=torch.int32, device=codes.device)[:, None]
    errors = values - offset - scale * _nearest(values, scale, offset)
    # Integers below 2^53, so that no order of a sum changes a bit, whatever the precision set for products of f32.
    one = torch.ones((), dtype=torch.float64, device=codes.device)
    counts = torch.zeros(len(codes), len(values), dtype=torch.float64, device=codes.device)
    counts.scatter_add_(1, (codes - bottom).long(), one.expand(codes.shape))
    keys = counts @ (errors * errors).double().mul_(_KEYS)
    keys += torch.arange(len(scale), device=codes.device)
    best = keys.amin(1).remainder_(_KEYS).long()
    scale, offset = scale[best], offset[best]
    if whole and not symmetric:
        scale, offset = _reaching(low, high)
    if not symmetric:
        scale, offset = torch.where(low == high, 0, scale), torch.where(low == high, low, offset)
    few = ((counts > 0).sum(1) <= STEPS).nonzero()[:, 0]
    divisor = _common_divisor(codes[few] - (0 if symmetric else low[few, None]))
    exact = divisor > (WIDEST_SYMMETRIC if symmetric else _WIDEST)
    scale[few[exact]], offset[few[exact]] = divisor[exact], low[few[exact]]
    return scale, offset


def _reaching(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest scales of which one level is 0 and none of the codes is further than half a scale away."""
    scale, offset = torch.full_like(low, WIDEST_SYMMETRIC), torch.full_like(low, -7 * WIDEST_SYMMETRIC)
    for tried in range(WIDEST_SYMMETRIC - 1, 0, -1):
        below = (-2 * low + tried - 1).div(2 * tried, rounding_mode="floor").clamp(0, -LOWEST // tried)
        above = (STEPS - below).clamp(max=HIGHEST // tried)
        reaches = ((2 * below + 1) * tried >= -2 * low) & ((2 * above + 1) * tried >= 2 * high)
        scale, offset = torch.where(reaches, tried, scale), torch.where(reaches, -below * tried, offset)
    return scale, offset


def _multiples(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and offsets with codes of -8 to 7 times the scale, or of -7 to 7 times one above 16."""
    scale = torch.arange(1, WIDEST_SYMMETRIC + 1, dtype=torch.int32, device=codes.device)
    return scale, -scale * (8 - (8 * scale > -LOWEST).int())


def _candidates(codes: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and offsets that include the best of every group, in the order of preference between equals.

    Where level 0 would be nearer to no code than level 1, moving the levels up by one loses nothing. Where the levels
    reach above all codes and level 0 is too far above the smallest, moving them down is better, if that is an s8.
    """
    span = high - low
    wide = (span + STEPS - 1).div(STEPS, rounding_mode="floor").clamp(min=1)
    # A bound of the error: that of levels from the smallest code to the largest, as near to each other as they can be.
    # With a smaller scale, the smallest and the largest code alone have at least half the square of the excess.
    start = torch.minimum(low, HIGHEST - STEPS * wide)
    rest = (codes - start[:, None]).remainder(wide[:, None])
    rest = torch.minimum(rest, wide[:, None] - rest)
    bound = (rest * rest).sum(1)
    excess = (2 * bound).double().sqrt().ceil().long()
    first = (span - excess + STEPS - 1).div(STEPS, rounding_mode="floor").clamp(min=1)
    begin, bottom, bottoms, top = torch.stack([first.min(), low.min(), low.max(), high.max()]).tolist()
    scales, offsets = [], []
    for scale in range(begin, _WIDEST + 1):
        lowest = max(bottom - (scale - 1) // 2, LOWEST)
        highest = min(max(max(bottoms, top - STEPS * scale) + scale // 2, LOWEST + scale - 1), HIGHEST)
        offsets.append(torch.arange(highest, lowest - 1, -1, dtype=torch.int32, device=codes.device))
        scales.append(torch.full_like(offsets[-1], scale))
    return torch.cat(scales), torch.cat(offsets)


def _common_divisor(values: Tensor) -> Tensor:
    """Return the greatest common divisor of each row."""
    while values.shape[1] > 1:
        half = (values.shape[1] + 1) // 2
        values = torch.gcd(values[:, :half], values[:, -half:])
    return values[:, 0]
