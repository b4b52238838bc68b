"""4-bit weights of compressed-tensors checkpoints, and `Int4Weight`.

A weight there is (value - zero point) scale. The values are -8 to 7, and so are zero points; the scales are floats, one
for each group of 32, 64 or 128 elements of K, or one a row. A layer has one of these sets of tensors:

- format int-quantized: `weight`, s8 of shape (N, K); `weight_scale`, of shape (N, groups); `weight_zero_point`, s8 of
  shape (N, groups), if the weight is not symmetric.
- format pack-quantized: `weight_packed`, s32 of shape (N, K / 8): bits 4 i to 4 i + 3 of a word are the value plus 8 of
  element i of eight; `weight_shape`, N and K; `weight_scale`; `weight_zero_point`, packed along N.

Groups then need scales that are integer multiples of one f32 a row. A scale a row is always that.

Source: the package compressed-tensors 0.20. The tests read and write with it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

from skuda.kernels.linear.packed import GROUP_SIZES, grouped
from skuda.registry.errors import InvalidProblem
from skuda.torch.formats.int8 import INT_QUANTIZED, tensor_fields
from skuda.torch.formats.levels import Int4Weight, ends, from_grouped, spread, width_of
from skuda.torch.formats.reading import SCALES, ConfigFields, Tensors
from skuda.torch.formats.weight import StoredWeight

PACK_QUANTIZED = "pack-quantized"
"""The format with eight values in a word."""
_TENSORS = {"scales": "weight_scale", "zero_points": "weight_zero_point"}
"""The tensors of arguments of `from_grouped`."""


@dataclass(frozen=True)
class Int4Format(StoredWeight):
    """How a checkpoint of other projects holds 4-bit weights.

    Attributes
    ----------
    group_size : int
        32, 64 or 128 elements of K; or 0, for one group a row.
    symmetric : bool
        Whether there are no zero points.
    packed : bool
        Whether a word has eight values: the format pack-quantized.
    """

    group_size: int = 0
    symmetric: bool = True
    packed: bool = False

    converts = True
    dynamic = True
    name = "int4"
    file_formats = (INT_QUANTIZED, PACK_QUANTIZED)

    def __new__(cls, *fields: Any, **_: Any) -> Self:
        """Make an object. A pickle of version 0.1, where this was a tuple, gives the fields here and nowhere else."""
        made = super().__new__(cls)
        vars(made).update(zip(cls.__dataclass_fields__, fields, strict=False))
        return made

    @property
    def file_format(self) -> str:
        """The config's ``format``."""
        return PACK_QUANTIZED if self.packed else INT_QUANTIZED

    @classmethod
    def parse(cls, weights: ConfigFields, file_format: str) -> Self | None:
        """Take the fields of a config's ``weights``, unless they are of another kind.

        A weight is stored in the order of its columns if activations only ordered its quantization ("weight", or
        "static"). Any other ordering is refused.
        """
        bits = weights.fields.get("num_bits")
        if file_format != PACK_QUANTIZED and (file_format != INT_QUANTIZED or bits != 4):
            return None
        weights.one_of("num_bits", [4])
        weights.one_of("type", ["int"], default="int")
        weights.one_of("dynamic", [False], default=False)
        groups = weights.one_of("strategy", ["group", "channel"]) == "group"
        size = weights.one_of("group_size", [*GROUP_SIZES] if groups else [None, -1], default=None)
        symmetric = weights.one_of("symmetric", [True, False], default=True)
        weights.one_of("actorder", [None, False, "weight", "static"], default=None)
        weights.absent("block_structure")
        weights.free("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
        weights.finish()
        return cls(size if groups else 0, symmetric, file_format == PACK_QUANTIZED)

    def fields(self) -> dict[str, Any]:
        """Return the fields of a config's ``weights``."""
        strategy, size = "group" if self.group_size else "channel", self.group_size or None
        return tensor_fields(strategy, dynamic=False, symmetric=self.symmetric, group_size=size, bits=4)

    def read(
        self, found: Tensors, shape: tuple[int, int], *, device: torch.device | None = None, round_scales: bool = False
    ) -> tuple[Tensor, Tensor, float]:
        """Read the weight of a layer; see `StoredWeight.read`, and `read_int4`."""
        made, difference = read_int4(found, shape, self, device=device, round_scales=round_scales)
        return made.packed(self.group_size), made.channel_scale[:, None], difference


def read_int4(
    found: Tensors,
    shape: tuple[int, int],
    stored: Int4Format,
    *,
    device: torch.device | None = None,
    round_scales: bool = False,
) -> tuple[Int4Weight, float]:
    """Read the weight of a layer.

    `int4_tensors` returns equal tensors, but for scales of groups without a value other than 0, for negative scales,
    and for zero points of groups with large scales that leave some of their 16 values unused.

    Parameters
    ----------
    found : Tensors
        The layer's tensors.
    shape : tuple of int
        N and K.
    stored : Int4Format
    device : device, optional
        Where to compute and hold the result. By default where the tensors are.
    round_scales : bool
        Whether scales of groups may become the nearest multiples, as `from_grouped` finds them.

    Returns
    -------
    weight : Int4Weight
        Its codes times its channel scale are exactly the stored weight, unless scales were rounded.
    difference : float
        The largest difference between a scale and the multiple in its place, over the scale; see `warn_rounded`.

    Raises
    ------
    InvalidRecord
        For a tensor that is missing, or has another dtype, shape or range; and, without `round_scales`, for scales that
        are not multiples.
    """
    n, k = shape

    def taken(name: str, dtypes: torch.dtype | tuple[torch.dtype, ...], *shapes: tuple[int, ...]) -> Tensor:
        return found.take(name, dtypes, *shapes).detach().to(device)

    groups = -(-k // stored.group_size) if stored.group_size else 1
    flat = ((n,),) if groups == 1 else ()
    scales = taken("weight_scale", SCALES, (n, groups), *flat).reshape(n, groups)
    if stored.packed:
        words = taken("weight_packed", torch.int32, (n, -(-k // 8)))
        own = taken("weight_shape", (torch.int64, torch.int32), (2,)).tolist()
        if own != [n, k]:
            found.refuse("weight_shape", str(own), f"be {[n, k]}, as in the model")
        levels = _values(words, k)
    else:
        levels = taken("weight", torch.int8, (n, k))
        if bool(((levels < -8) | (levels > 7)).any()):
            found.refuse("weight", "other values", "be -8 to 7: the config says that it has 4 bits")
    zero_points = None
    if stored.symmetric:
        found.take_zeros("weight_zero_point")
    elif stored.packed:
        words = taken("weight_zero_point", torch.int32, (-(-n // 8), groups))
        zero_points = _values(words.T, n).T.contiguous()
    else:
        zero_points = taken("weight_zero_point", torch.int8, (n, groups), *flat).reshape(n, groups)
    try:
        made, difference = from_grouped(levels, scales, zero_points)
    except InvalidProblem as error:
        found.refuse(_TENSORS[error.field], error.had, error.must)
    if difference and not round_scales:
        rule = "be multiples of one f32 in each row, with products in -128..127; round_scales=True rounds them"
        found.refuse("weight_scale", f"scales that differ from multiples by up to {difference:.2g} of a scale", rule)
    return _kept(made, levels, scales, zero_points), difference


def warn_rounded(differences: Mapping[str, float], *, stacklevel: int) -> None:
    """Warn of layers with rounded scales, given the largest difference by the name of each layer."""
    rounded = {name: difference for name, difference in differences.items() if difference}
    if rounded:
        most = max(rounded, key=rounded.__getitem__)
        text = f"{len(rounded)} layers have group scales rounded to multiples of a channel scale, by up to"
        warnings.warn(f"{text} {rounded[most]:.2g} of a scale, in {most}", stacklevel=stacklevel + 1)


def int4_tensors(
    name: str, weight: Int4Weight, *, symmetric: bool | None = None, dtype: torch.dtype = torch.float32
) -> tuple[dict[str, Tensor], Int4Format]:
    """Return the tensors of a weight in the format int-quantized, and its format. Their weight is exactly the same.

    Parameters
    ----------
    name : str
        The layer, for errors.
    weight : Int4Weight
    symmetric : bool, optional
        Whether there are no zero points. By default there are none if the weight does not need them.
    dtype : dtype
        Dtype of the scales.

    Raises
    ------
    InvalidProblem
        If the format cannot express the weight exactly: an offset is no multiple of its group's scale, or a larger one
        than zero points allow; a group's scale times the channel scale is not exact in `dtype`; K is no multiple of the
        group size.
    """
    k, groups = weight.levels.shape[1], weight.group_scale.shape[1]
    size = 0 if groups == 1 else width_of(k, groups) or 0
    if size and k % size:
        _refuse(name, f"K = {k} and groups of {size}", "have a multiple of the group size as K, as readers need")
    scale, offset = weight.group_scale.to(torch.int16), weight.group_offset.to(torch.int16)
    flat = scale == 0  # all codes of the group are the offset: 1, 0 or -1 times its magnitude
    step = torch.where(flat, offset.abs().clamp(min=1), scale)
    shift = offset.div(step, rounding_mode="floor")
    for n, g in (shift * step != offset).nonzero()[:1].tolist():
        had = f"the offset {offset[n, g]} and the scale {step[n, g]} in group {g} of row {n}"
        _refuse(name, had, "have offsets that are multiples of their group's scale, as zero points are")
    values = spread(shift, weight.levels) + torch.where(spread(flat, weight.levels), 0, weight.levels)
    low, high = ends(values, groups)
    least, most = (-8 - low).clamp(min=-8), (7 - high).clamp(max=7)  # zero points with which all values fit
    for n, g in (least > most).nonzero()[:1].tolist():
        had = f"{low[n, g]} to {high[n, g]} times the scale in group {g} of row {n}"
        _refuse(name, had, "have values of -8 to 7 less a zero point of -8 to 7")
    fits = not bool(((least > 0) | (most < 0)).any())
    if symmetric and not fits:
        _refuse(name, "values outside of -8..7", "need no zero points with symmetric=True")
    symmetric = fits if symmetric is None else symmetric
    zero_points = torch.zeros_like(low) if symmetric else torch.minimum(torch.maximum(-8 - shift, least), most)
    exact = step.double() * weight.channel_scale.double()[:, None]
    scales = exact.to(dtype)
    if not torch.equal(scales.double(), exact):
        _refuse(name, "other scales", f"have group scales that are exact in {dtype}, times the channel scale")
    made = {
        "weight": (values + spread(zero_points.to(torch.int16), values)).to(torch.int8),
        "weight_scale": scales,
    }
    if not symmetric:
        made["weight_zero_point"] = zero_points.to(torch.int8)
    return made, Int4Format(size, symmetric)


def unpacked_int4(packed: Tensor, channel_scale: Tensor, k: int) -> Int4Weight:
    """Return the weight of a packed one. Groups that are all equal in each row become one group a row.

    Parameters
    ----------
    packed : tensor, u8
        As `Int4Weight.packed` returns it.
    channel_scale : tensor of shape (N,) or (N, 1), f32
    k : int
        K.
    """
    parts = grouped(packed.cpu().numpy(), channel_scale.numel(), k)
    levels, scale, offset = (torch.from_numpy(part.copy()).to(packed.device) for part in parts)
    if k and all(torch.equal(part, part[:, :1].expand_as(part)) for part in (scale, offset)):
        scale, offset = scale[:, :1].contiguous(), offset[:, :1].contiguous()
    return Int4Weight(levels, scale, offset, channel_scale.reshape(-1))


def _kept(made: Int4Weight, levels: Tensor, scales: Tensor, zero_points: Tensor | None) -> Int4Weight:
    """Return the same codes, with zero points of -8 - offset / scale where such offsets fit, so that none is lost."""
    lowest = torch.full_like(made.group_offset, 8, dtype=torch.int16)
    lowest += 0 if zero_points is None else zero_points
    offset = -lowest * made.group_scale
    fits = (scales > 0) & (offset >= -128)
    return made._replace(
        levels=torch.where(spread(fits, levels), (levels + 8).to(torch.uint8), made.levels),
        group_offset=torch.where(fits, offset.to(torch.int8), made.group_offset),
    )


def _values(words: Tensor, count: int) -> Tensor:
    """Return the first values of rows of packed words, s8."""
    pairs = words.contiguous().view(torch.uint8)
    return torch.stack([pairs & 15, pairs >> 4], dim=2).reshape(len(words), -1)[:, :count].view(torch.int8) - 8


def _refuse(name: str, had: str, rule: str) -> NoReturn:
    raise InvalidProblem("checkpoint", name, had, rule)
