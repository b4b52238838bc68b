"""`Shards`: how the ranks of a group share a linear layer."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown
from skuda.registry.value import Extent, Integer, Real, Value, expect_integer, expect_real

Axis = Literal["n", "k"]
Part = Literal["whole", "columns", "rows"]

MOST_RANKS = 4096
_MOST = 2**31 - 1
_UNIT = 16
"""Parts begin at multiples of it if the axis is long enough. Rows of codes are then aligned for TMA: to 16 bytes."""

_INPUTS: dict[str, tuple[Part, ...]] = {"n": ("whole", "rows", "columns"), "k": ("columns",)}
_OUTPUTS: dict[str, tuple[Part, ...]] = {"n": ("columns", "whole"), "k": ("whole", "rows")}


class Link(Value):
    """The connection between ranks. A collective takes ``latency_us + bytes sent by a rank / bandwidth``.

    Attributes
    ----------
    latency_us : float
        Time of a collective of no bytes, in microseconds, 0 up to 10^9.
    gigabytes_per_s : float
        Bandwidth of a rank, in 10^9 bytes per second, 10^-9 up to 10^9.
    """

    latency_us: Annotated[Real, Field(ge=0, le=1e9)]
    gigabytes_per_s: Annotated[Real, Field(ge=1e-9, le=1e9)]

    def microseconds(self, sent: float) -> float:
        """Return the time of a collective in which each rank sends this number of bytes.

        Raises
        ------
        InvalidProblem
            If `sent` is no number, or not in [0, 2^80].
        """
        return self.latency_us + expect_real("Link.microseconds", "sent", sent, 0, 2**80) / self.gigabytes_per_s / 1e3


NVLINK = Link(latency_us=10.0, gigabytes_per_s=270.0)
"""Two H200 of one host with NCCL in CUDA graphs. Fits all-reduce of 0.26 to 268 MB, reduce-scatter and all-gather to
within 40 %."""


class Shards(Value):
    """How a linear layer ``y = x W^T`` is split over a group's ranks. The problem has the sizes of the whole layer.

    Attributes
    ----------
    axis : str
        The axis of the weight that is split: ``n``, its output channels ("column parallel"), or ``k``, its inputs ("row
        parallel").
    count : int
        Number of ranks, 1 up to 4096.
    sizes : tuple of int or None
        The length of each rank's part of the axis. None means even parts, as `split` makes them.
    input : str or None
        Each rank's part of the activation: ``whole``, its ``rows`` (the codes are gathered) or its ``columns`` (along
        axis ``n`` the codes are gathered). None means ``whole`` along axis ``n`` and ``columns`` along ``k``.
    output : str or None
        Each rank's part of the output: ``whole``, its ``rows`` (axis ``k``) or its ``columns`` (axis ``n``). None means
        ``columns`` along axis ``n`` and ``whole`` along ``k``.
    input_sizes : tuple of int or None
        Columns of the activation that each rank has, for axis ``n`` and input ``columns``. None means even parts, as
        `split` makes them.
    chunks : int or None
        Number of chunks of rows, 1 up to 4096, if the output is ``whole`` and the input is not ``rows``. The ranks
        exchange one chunk while they multiply the next. None means the number of `Traffic.chunks`. It does not change
        the bits.
    link : Link
        The connection between the ranks. The cost model uses it to choose between ways with the same result.
    """

    axis: Axis
    count: Annotated[Integer, Field(ge=1, le=MOST_RANKS)]
    sizes: tuple[Extent, ...] | None = None
    input: Part | None = None
    output: Part | None = None
    input_sizes: tuple[Extent, ...] | None = None
    chunks: Annotated[Integer, Field(ge=1, le=MOST_RANKS)] | None = None
    link: Link = NVLINK

    @model_validator(mode="after")
    def _rules(self) -> Self:
        for field, choices in (("input", _INPUTS[self.axis]), ("output", _OUTPUTS[self.axis])):
            given = getattr(self, field)
            if given is None:
                # Filled in, so that the default equals the same word given explicitly.
                object.__setattr__(self, field, choices[0])
            elif given not in choices:
                self.refuse(field, given, f"be {' or '.join(choices)} where the axis is {self.axis}")
        for field in ("sizes", "input_sizes"):
            sizes = getattr(self, field)
            if sizes is not None and len(sizes) != self.count:
                self.refuse(field, sizes, f"have one size for each of the {self.count} ranks")
        if self.input_sizes is not None and (self.axis, self.input) != ("n", "columns"):
            self.refuse("input_sizes", self.input_sizes, "be left out where the axis is k or the input is not columns")
        if (self.chunks or 1) > 1 and not self.divisible:
            self.refuse("chunks", self.chunks, "be 1 or left out where the output is not whole or the input is rows")
        return self

    @property
    def divisible(self) -> bool:
        """Whether the layer can run in several chunks of rows. It cannot if a rank owns rows of the whole layer."""
        return self.output == "whole" and self.input != "rows"

    def parts(self, n: int, k: int) -> tuple[int, ...]:
        """Return the length of each rank's part of the split axis, for `n` output channels and `k` inputs.

        Raises
        ------
        InvalidProblem
            If `sizes` does not add up to the length of the axis, or a length is not in [0, 2^31-1].
        """
        n, k = (expect_integer("Shards.parts", name, given, 0, _MOST) for name, given in (("n", n), ("k", k)))
        return _parts("sizes", self.sizes, n if self.axis == "n" else k, self.count)

    def columns(self, k: int) -> tuple[int, ...]:
        """Return the columns that each rank has of an activation with `k` columns, if the input is ``columns``.

        Raises
        ------
        InvalidProblem
            If `input_sizes`, or `sizes` for axis ``k``, does not add up to `k`, or `k` is not in [0, 2^31-1].
        """
        if self.axis == "k":
            return self.parts(0, k)
        expect_integer("Shards.columns", "k", k, 0, _MOST)
        return _parts("input_sizes", self.input_sizes, k, self.count)

    def rows(self, m: int) -> tuple[int, ...]:
        """Return the number of rows that each rank owns, of `m` rows. Raises as `split` does."""
        return split(m, self.count)


def _parts(field: str, sizes: tuple[int, ...] | None, total: int, count: int) -> tuple[int, ...]:
    if sizes is None:
        return split(total, count, _UNIT if total >= _UNIT * count else 1)
    if sum(sizes) != total:
        raise InvalidProblem("Shards", field, shown(sizes), f"add up to {total}")
    return sizes


def split(total: int, count: int, unit: int = 1) -> tuple[int, ...]:
    """Return `count` sizes that add up to `total`, as even as multiples of `unit` allow, larger ones first.

    Raises
    ------
    InvalidProblem
        If `total` is not in [0, 2^31-1], `count` not in [1, 4096], or `unit` not in [1, 2^31-1].
    """
    total = expect_integer("split", "total", total, 0, _MOST)
    count = expect_integer("split", "count", count, 1, MOST_RANKS)
    unit = expect_integer("split", "unit", unit, 1, _MOST)
    whole, more = divmod(-(-total // unit), count)
    ends = [min(total, unit * end) for end in accumulate(whole + (rank < more) for rank in range(count))]
    return tuple(end - start for start, end in pairwise((0, *ends)))


def span(sizes: tuple[int, ...], rank: int) -> slice:
    """Return the slice of a rank's part, for consecutive parts."""
    start = sum(sizes[:rank])
    return slice(start, start + sizes[rank])


def own(array: Any, axis: int, sizes: tuple[int, ...], rank: int) -> Any:
    """Return a rank's part of an array, a view."""
    at = span(sizes, rank)
    return array[at] if axis == 0 else array[..., at]
