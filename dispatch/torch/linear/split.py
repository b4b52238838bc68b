"""`Split`: which part of a whole layer a rank of a group holds. It stands beside the format and the activation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from skuda.dispatch.shard.group import Group
from skuda.dispatch.shard.shards import Shards, own, span, split
from skuda.kernels.linear.problem import longest_k
from skuda.registry.cached import cached_property
from skuda.registry.elements import ElementKind
from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown
from skuda.torch.formats import WeightFormat
from skuda.torch.formats.weight import Axis

Parts = tuple[tuple[int, ...], ...]
"""The length of each rank's part of the split axis, for each of the joined layers."""


@dataclass(frozen=True)
class Split:
    """How a layer is cut over the ranks of a group.

    Attributes
    ----------
    group : Group
    shards : Shards
    whole : tuple of int
        N and K of the whole layer.
    parts : Parts
    """

    group: Group
    shards: Shards
    whole: tuple[int, int]
    parts: Parts

    @classmethod
    def of(
        cls,
        subject: str,
        whole: tuple[int, int],
        form: WeightFormat,
        axis: Axis,
        group: Group,
        shards: Shards | None = None,
        parts: Parts | None = None,
    ) -> Split:
        """Return the split of a weight of this form, by default into even parts.

        Raises
        ------
        InvalidProblem
            For sizes that do not add up, for parts that begin where the form cannot be cut, and for a split K whose
            sums could leave s32.
        """
        longest = longest_k(ElementKind.S8, ElementKind.S8)
        if axis == "k" and whole[1] > longest:
            rule = f"be at most {longest} where it is split, or split n"
            raise InvalidProblem(subject, "k", str(whole[1]), rule)
        shards = Shards(axis=axis, count=group.count) if shards is None else shards
        if shards.axis != axis or shards.count != group.count:
            had, rule = f"axis {shards.axis}, {shards.count} ranks", f"have axis {axis} and {group.count} ranks"
            raise InvalidProblem(subject, "shards", had, rule)
        shards = _even(shards, *whole, form.even)
        if parts is not None:
            if axis != "n" or any(len(each) != group.count for each in parts) or shards.output == "whole":
                rule = "have a size for each rank, with the output columns"
                raise InvalidProblem(subject, "parts", shown(parts), rule)
            shards = shards.model_copy(update={"sizes": tuple(map(sum, zip(*parts, strict=True)))})
        cut = parts or (shards.parts(*whole),)
        shards.parts(*whole)
        check_parts(subject, "parts" if parts else "shards", form, axis, cut)
        return cls(group, shards, whole, cut)

    @cached_property
    def text(self) -> str:
        """The split in words."""
        return f"{list(self.whole)} split by {self.shards}"

    @property
    def axis(self) -> Axis:
        """The axis of the weight that is split."""
        return self.shards.axis

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The length of this rank's part of the split axis, for each of the joined layers."""
        return tuple(sizes[self.group.rank] for sizes in self.parts)

    @property
    def whole_sizes(self) -> tuple[int, ...]:
        """The length of the whole split axis, for each of the joined layers."""
        return tuple(map(sum, self.parts))

    @cached_property
    def columns(self) -> tuple[int, ...]:
        """The columns of the input that each rank has, if the input is split so, or nothing."""
        return self.shards.columns(self.whole[1]) if self.shards.input == "columns" else ()

    @cached_property
    def width(self) -> int:
        """K of this rank's part of the weight."""
        return self.whole[1] if self.axis == "n" else self.sizes[0]

    @cached_property
    def features(self) -> tuple[int, int]:
        """Columns of this rank's output and input."""
        n, k = self.whole
        rank = self.group.rank
        columns = self.shards.parts(n, k)[rank] if self.shards.output == "columns" else n
        return columns, self.columns[rank] if self.columns else k

    def cut(self, name: str, form: WeightFormat, held: Tensor, parts: Parts | None = None) -> Tensor:
        """Return this rank's part of a buffer of the whole layer, or of the joined layers with these parts."""
        parts, rank = parts or self.parts, self.group.rank
        if name == "smooth" and self.columns:
            return torch.as_tensor(own(held, 0, self.columns, rank)).clone()
        if name == "weight":
            starts = itertools.accumulate(map(sum, parts), initial=0)
            spans = [(start, span(sizes, rank)) for start, sizes in zip(starts, parts, strict=False)]
            found = [form.cut(held, self.axis, start + at.start, start + at.stop) for start, at in spans]
            return form.join(found) if self.axis == "n" else found[0].clone(memory_format=torch.contiguous_format)
        if self.axis == "n" and name in ("weight_scale", "bias"):
            pieces = held.split(tuple(map(sum, parts)))
            return torch.cat([own(piece, 0, sizes, rank) for piece, sizes in zip(pieces, parts, strict=True)])
        return held

    def gathered(self, name: str, form: WeightFormat, held: Tensor) -> Tensor:
        """Return a buffer of the whole layer: what `cut` was given. Every rank calls this."""
        if name == "smooth" and self.columns:
            return torch.as_tensor(self.group.gather(held, 0, self.columns))
        parts = [form.lengths(self.axis, sizes) if name == "weight" else sizes for sizes in self.parts]
        if self.axis == "k" and name == "weight":
            return torch.as_tensor(self.group.gather(held, form.k_axis, parts[0]))
        if self.axis == "k" or name not in ("weight", "weight_scale", "bias"):
            return held
        pieces = zip(held.split([sizes[self.group.rank] for sizes in parts]), parts, strict=True)
        return torch.cat([torch.as_tensor(self.group.gather(piece, 0, sizes)) for piece, sizes in pieces])


def check_parts(subject: str, field: str, form: WeightFormat, axis: Axis, parts: Sequence[tuple[int, ...]]) -> None:
    """Raise `InvalidProblem` for parts that do not begin where the format of a weight can be cut."""
    if not form.fits(axis, tuple(itertools.chain.from_iterable(parts))):
        unit, what = form.units[axis], {"n": "output channels", "k": "inputs"}[axis]
        rule = (
            f"begin at multiples of {unit} {what}, as its {form.name} weights are packed: take other sizes or ranks, "
            "or 8 bits"
        )
        raise InvalidProblem(subject, field, f"parts of {' and '.join(shown(sizes) for sizes in parts)}", rule)


def _even(shards: Shards, n: int, k: int, multiple: int) -> Shards:
    """Return shards with parts of multiples of a number where sizes are left out."""
    if multiple == 1:
        return shards
    lengths = {"sizes": n if shards.axis == "n" else k}
    if (shards.axis, shards.input) == ("n", "columns"):
        lengths["input_sizes"] = k
    even = {field: split(length, shards.count, multiple) for field, length in lengths.items()}
    return shards.model_copy(update={field: even[field] for field in even if getattr(shards, field) is None})
