"""4-bit weights of other projects, with scales in floating point: those of compressed-tensors, and `Int4Weight`.

A weight there is (value - zero point) scale. The values are -8 to 7, and so are zero points; the scales are floats, one
for each group of 32, 64 or 128 elements of K, or one a row. A layer has one of these sets of tensors:

- format int-quantized: `weight`, s8 of shape (N, K); `weight_scale`, of shape (N, groups); `weight_zero_point`, s8 of
  shape (N, groups), if the weight is not symmetric.
- format pack-quantized: `weight_packed`, s32 of shape (N, K / 8): bits 4 i to 4 i + 3 of a word are the value plus 8 of
  element i of eight; `weight_shape`, N and K; `weight_scale`; `weight_zero_point`, packed along N.

Groups then need scales that are integer multiples of one f32 a row. A scale a row is always that. Other weights are
approximated if the user says so: in 4 bits with the multiples of `from_grouped`, or by codes of 8 bits.

Source: the package compressed-tensors 0.20. The tests read and write with it.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, Self

import torch
from torch import Tensor

from skuda.kernels.linear.packed import GROUP_SIZES, grouped
from skuda.registry.errors import InvalidProblem
from skuda.torch.formats.int8 import INT_QUANTIZED, quantized_weight, tensor_fields
from skuda.torch.formats.levels import Int4Weight, ends, from_grouped, spread, width_of
from skuda.torch.formats.reading import SCALES, ConfigFields, Tensors
from skuda.torch.formats.weight import Difference, StoredWeight

PACK_QUANTIZED = "pack-quantized"
"""The format with eight values in a word."""


Grouped = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""The arguments of `from_grouped`, and the group of each element of K, s32, if groups are not runs."""


class GroupedWeight(StoredWeight):
    """How a checkpoint of other projects holds 4-bit weights, with scales in floating point. Whole rows have size 0."""

    symmetric: bool
    """Whether there are no zero points."""
    names: ClassVar[tuple[str, str]]
    """The tensors of scales and zero points."""
    converts = True
    dynamic = True
    name = "int4"

    def fields(self) -> dict[str, Any]:
        """Return the fields of a config's ``weights``."""
        strategy, size = "group" if self.group_size else "channel", self.group_size or None
        return tensor_fields(strategy, dynamic=False, symmetric=self.symmetric, group_size=size, bits=4)

    @abstractmethod
    def grouped(self, found: Tensors, n: int, k: int, groups: int) -> Grouped:
        """Take the tensors of a layer."""

    def read(
        self, found: Tensors, shape: tuple[int, int], approximate: str | None = None
    ) -> tuple[Tensor, Tensor, Difference]:
        """Read the weight of a layer; see `StoredWeight.read`.

        `int4_tensors` returns the tensors of an exact weight again, but for scales of groups without a value other than
        0, for negative scales, and for zero points of groups with large scales that leave some of their 16 values
        unused.
        """
        groups = -(-shape[1] // self.group_size) if self.group_size else 1
        given = self.grouped(found, *shape, groups)
        if given[3] is None:
            try:
                made, difference = from_grouped(*given[:3])
            except InvalidProblem as error:
                found.refuse(self.names[error.field != "scales"], error.had, error.must)
            made = made if difference.largest else _kept(made, *given[:3])
            if approximate == "int4" or not difference.largest:
                return made.packed(self.group_size or 0), made.channel_scale[:, None], difference
            if approximate is None:
                had = f"others, which make weights differ by up to {difference.largest:.2g} of their root mean square"
                rule = "be multiples of one f32 in each row, with products in -128..127; approximate='int4' rounds them"
                found.refuse(self.names[0], had, f"{rule}, and 'int8' makes codes of 8 bits, which are closer")
        elif approximate != "int8":
            rule = "be k // group_size; approximate='int8' takes any order, as does quantizing without desc_act"
            found.refuse("g_idx", "groups in another order", rule)
        return _in_8_bits(given)


@dataclass(frozen=True)
class Int4Format(GroupedWeight):
    """How compressed-tensors holds 4-bit weights.

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

    names = "weight_scale", "weight_zero_point"
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

    def grouped(self, found: Tensors, n: int, k: int, groups: int) -> Grouped:
        """Take the tensors of a layer."""
        flat = ((n,),) if groups == 1 else ()
        scales = found.take("weight_scale", SCALES, (n, groups), *flat).reshape(n, groups)
        if self.packed:
            levels = values_of(found.take("weight_packed", torch.int32, (n, -(-k // 8))), k)
            own = found.take("weight_shape", (torch.int64, torch.int32), (2,)).tolist()
            if own != [n, k]:
                found.refuse("weight_shape", str(own), f"be {[n, k]}, as in the model")
        else:
            levels = found.take("weight", torch.int8, (n, k))
            if bool(((levels < -8) | (levels > 7)).any()):
                found.refuse("weight", "other values", "be -8 to 7: the config says that it has 4 bits")
        zero_points = None
        if self.symmetric:
            found.take_zeros("weight_zero_point")
        elif self.packed:
            words = found.take("weight_zero_point", torch.int32, (-(-n // 8), groups))
            zero_points = values_of(words.T, n).T.contiguous()
        else:
            zero_points = found.take("weight_zero_point", torch.int8, (n, groups), *flat).reshape(n, groups)
        return levels, scales, zero_points, None


def values_of(words: Tensor, count: int) -> Tensor:
    """Return the first values of rows of packed words, less 8, s8."""
    pairs = words.contiguous().view(torch.uint8)
    return torch.stack([pairs & 15, pairs >> 4], dim=2).reshape(len(words), -1)[:, :count].view(torch.int8) - 8


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


def _in_8_bits(given: Grouped) -> tuple[Tensor, Tensor, Difference]:
    """Return codes of 8 bits, and their scales."""
    levels, scales, zero_points, order = given
    each = spread(torch.arange(scales.shape[1], device=levels.device)[None], levels)[0] if order is None else order
    weight = (levels - (0 if zero_points is None else zero_points[:, each])).float() * scales.float()[:, each]
    codes, scale = quantized_weight(weight)
    error = (codes * scale[:, None] - weight).abs()
    return codes, scale[:, None], Difference.of(error, error.square(), weight.square(), weight.numel())


def _refuse(name: str, had: str, rule: str) -> NoReturn:
    raise InvalidProblem("checkpoint", name, had, rule)
