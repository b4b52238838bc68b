"""Weights of 4 bits, packed as `skuda.kernels.linear.packed` has them. They stand for s8 codes."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor

from skuda.kernels.linear import packed
from skuda.kernels.linear.packed import BLOCK, GROUP_SIZES, LEVELS
from skuda.registry.elements import ElementKind
from skuda.registry.errors import InvalidProblem
from skuda.torch.formats.feedback import Moments, calibrated_weight
from skuda.torch.formats.grouped import Int4Format, int4_tensors, unpacked_int4
from skuda.torch.formats.int8 import channel_scales, tensor_fields
from skuda.torch.formats.levels import check_group_size, from_grouped, int4_weight
from skuda.torch.formats.others import AwqFormat, GptqFormat
from skuda.torch.formats.reading import ConfigFields, Tensors
from skuda.torch.formats.weight import CodedWeight, Difference, StoredWeight, WeightFormat, register_format

PACKED = "skuda-int4"
"""The format of files with packed weights."""


@dataclass(frozen=True)
class StoredPacked(StoredWeight):
    """How a file holds the packed weights of layers: `weight`, u8, and `weight_scale`, one per output channel."""

    group_size: int = 128

    own = True
    name = "int4"
    file_formats = (PACKED,)

    def fields(self) -> dict[str, Any]:
        """Return the fields of a config's ``weights``."""
        return tensor_fields("group", dynamic=False, symmetric=False, group_size=self.group_size, bits=4)

    @classmethod
    def parse(cls, weights: ConfigFields, file_format: str) -> Self | None:
        """Take the fields of a config's ``weights``, unless they are of another kind."""
        if file_format != PACKED:
            return None
        weights.one_of("strategy", ["group"])
        weights.one_of("dynamic", [False], default=False)
        weights.one_of("symmetric", [False], default=True)
        size = weights.one_of("group_size", [*GROUP_SIZES])
        weights.common(4)
        return cls(size)

    def read(
        self, found: Tensors, shape: tuple[int, int], approximate: str | None = None
    ) -> tuple[Tensor, Tensor, Difference]:
        """Read the weight of a layer; see `StoredWeight.read`."""
        del approximate
        weight = found.take("weight", torch.uint8, packed.shape_of(*shape, self.group_size))
        return weight, channel_scales(found, shape[0]), Difference()


@dataclass(frozen=True)
class Int4(WeightFormat):
    """Packed codes of 4 bits, u8 of shape (units, blocks, bytes).

    Parameters
    ----------
    group_size : int
        32, 64 or 128 elements of K. Whole rows are stored as groups of 128.
    """

    group_size: int = 128

    name = "int4"
    dtype = torch.uint8
    element = ElementKind.S4
    calibrated = True
    units = packed.UNITS
    even = BLOCK
    files = (StoredPacked, Int4Format, GptqFormat, AwqFormat)

    @classmethod
    def of(cls, codes: Tensor, n: int, k: int | None) -> Int4 | None:
        """Return the format of a packed weight."""
        if codes.dtype is torch.uint8 and k is not None:
            for size, found in _OF_SIZES.items():
                if tuple(codes.shape) == packed.shape_of(n, k, size):
                    return found
        return None

    @classmethod
    def wanted(cls, n: int, k: int | None) -> str:
        """Say what `of` takes."""
        if k is None:
            return "packed, uint8, with in_features"
        return f"packed, uint8 of shape {' or '.join(str(list(packed.shape_of(n, k, size))) for size in GROUP_SIZES)}"

    @classmethod
    def layout(cls, subject: str, group_size: object, *, symmetric: bool) -> Self:
        """Return the format for groups of this size; 0 stands for one group a row."""
        del symmetric
        return cls(check_group_size(subject, group_size) or BLOCK)

    @classmethod
    def quantize(
        cls, weight: Tensor, group_size: int = 128, *, symmetric: bool = False, moments: Moments | None = None
    ) -> tuple[Tensor, Tensor]:
        """Quantize a weight; see `int4_weight` and, with moments, `calibrated_weight`."""
        if moments is None:
            made = int4_weight(weight, group_size, symmetric=symmetric)
        elif symmetric:
            raise InvalidProblem("Int4", "symmetric", "True", "be False with calibration, whose levels have offsets")
        else:
            made = calibrated_weight(weight, moments, group_size)
        return made.packed(group_size), made.channel_scale

    def shape(self, n: int, k: int) -> tuple[int, ...]:
        """Return the shape of a packed weight."""
        return packed.shape_of(n, k, self.group_size)

    def integers(self, codes: Tensor, n: int, k: int) -> Tensor:
        """Return the s8 codes of a packed weight."""
        found = torch.ops.skuda.unpack_weight.default(codes, n=n, k=k, group_size=self.group_size)
        return cast("Tensor", found)

    def sizes(self, n: int) -> dict[str, int]:
        """Return N, which a packed weight has in units."""
        return {"n": n}

    def per_row(self, codes: Tensor) -> bool:
        """Whether all groups of each row are alike."""
        groups = codes[:, :, LEVELS:]
        if self.group_size != BLOCK or groups.shape[1] < 2:
            return False
        return bool((groups == groups[:, :1]).all()) and bool(groups[..., ::2].any())  # scales of equal codes are 0

    def text(self) -> str:
        """Return the bits and the size of groups."""
        return f", weights=int4, group_size={self.group_size}"

    def stored(self) -> StoredPacked:
        """Return how a file holds a packed weight."""
        return StoredPacked(self.group_size)

    @classmethod
    def stored_for_others(
        cls, weights: Mapping[str, CodedWeight]
    ) -> Mapping[str, tuple[Mapping[str, Tensor], StoredWeight]] | None:
        """Return the tensors of `skuda.torch.formats.grouped`, if all weights are then read as the same bits."""
        made: dict[str, tuple[dict[str, Tensor], Int4Format]] = {}
        for name, (codes, channel_scale, k) in weights.items():
            weight = unpacked_int4(codes, channel_scale, k)
            try:
                parts, form = made[name] = int4_tensors(name, weight)
            except InvalidProblem:
                return None
            again = from_grouped(parts["weight"], parts["weight_scale"], parts.get("weight_zero_point"))[0]
            same = again.channel_scale.dtype is weight.channel_scale.dtype
            if not same or not torch.equal(again.channel_scale, weight.channel_scale):
                return None  # it would also be read as other codes, of the same weight
        if not all(form.symmetric for _, form in made.values()):  # one group of the scheme for all
            for name, (parts, form) in made.items():
                parts.setdefault("weight_zero_point", torch.zeros_like(parts["weight_scale"], dtype=torch.int8))
                made[name] = parts, Int4Format(form.group_size, symmetric=False)
        return made


def per_row_text(names: Collection[str]) -> str:
    """Return what to know about layers for which `per_row` holds, of which there is at least one."""
    count = f"{len(names)} layers, such as {next(iter(names))}, have" if len(names) > 1 else f"{next(iter(names))} has"
    groups = ", ".join(map(str, GROUP_SIZES[:0:-1]))
    text = "4-bit weights with one scale a row, which are far less accurate than groups: quantize the floats with"
    return f"{count} {text} weights='int4' and group_size={groups} or {GROUP_SIZES[0]}"


def warn_per_row(names: Collection[str], *, stacklevel: int) -> None:
    """Warn of layers with one group a row, if there are any."""
    if names:
        warnings.warn(per_row_text(names), stacklevel=stacklevel + 1)


_OF_SIZES = {size: Int4(size) for size in GROUP_SIZES}
register_format(Int4)
