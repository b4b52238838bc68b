"""The cost model of a split layer: bytes that the ranks exchange, and the time by bandwidth and latency."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

from skuda.dispatch.shard.shards import MOST_RANKS, Shards, split
from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown
from skuda.registry.value import Extent, Integer, Real, Size, Value, expect, expect_integer

_MOST_CHUNKS = 4
"""More chunks hide little more, and each costs launches."""
_FEWEST_ROWS = 512
"""Least rows of a chunk. Fewer rows would not fill a GPU with tiles of the product."""
_TILE = 128
"""Rows of the largest tile of the product."""
_Bytes = Annotated[Integer, Field(ge=0, le=64)]


class Transfer(Value):
    """One collective of a layer.

    Attributes
    ----------
    what : str
        The collective and its data.
    sent : int
        Bytes that a rank sends, on average over the ranks.
    microseconds : float
        The predicted time.
    chunks : int
        Number of parts. Each part moves while the product of another chunk runs.
    """

    what: str
    sent: Size
    microseconds: Annotated[Real, Field(ge=0)]
    chunks: Annotated[Integer, Field(ge=1)] = 1

    @property
    def exposed(self) -> float:
        """The least time in microseconds that no product hides: that of one chunk, as no product follows the last."""
        return self.microseconds / self.chunks

    def __str__(self) -> str:
        parts = f" in {self.chunks} chunks" if self.chunks > 1 else ""
        return f"{self.what}{parts}: {self.sent} bytes a rank, {self.microseconds:.1f} us by the model"


class Traffic(Value):
    """The data that a layer exchanges. Methods raise `InvalidProblem` for an argument of the wrong type.

    Attributes
    ----------
    m, n, k : int
        Rows, output channels, inner size.
    output_bytes : int
        Bytes of an element of the output.
    dynamic : bool
        Whether the activation is floating and each row gets a scale at run time.
    scale_bytes : int
        Bytes of the scale and the zero point of a row. 0 if all rows have one scale.
    halves : int
        Bytes of a code. Sums of codes of 1 byte are s32, of 2 bytes s64.
    """

    m: Extent
    n: Extent
    k: Extent
    output_bytes: _Bytes
    dynamic: bool
    scale_bytes: _Bytes = 4
    halves: Annotated[Integer, Field(ge=1, le=2)] = 1

    def transfers(self, shards: Shards, *, scattered: bool, chunks: int = 1) -> tuple[Transfer, ...]:
        """Return the collectives of a layer in order. With several chunks, sums are scattered."""
        _check_shards("transfers", shards)
        expect("Traffic.transfers", "scattered", scattered, bool, "be true or false")
        chunks = expect_integer("Traffic.transfers", "chunks", chunks, 1, MOST_RANKS)
        count = shards.count
        if count == 1:
            return ()
        part, sums = (count - 1) / count, f"s{32 * self.halves}"
        moved: list[tuple[str, float, int]] = []
        if self.dynamic and shards.input == "columns":
            moved.append(("all-reduce of the rows' maxima", 2 * part * self.scale_bytes * self.m, 1))
        if shards.axis == "n":
            if shards.input != "whole":
                moved.append(("all-gather of codes", part * self.m * self.k * self.halves, chunks))
            if shards.input == "rows" and self.scale_bytes:
                moved.append(("all-gather of scales", part * self.m * self.scale_bytes, 1))
        elif scattered:
            moved.append((f"reduce-scatter of {sums} sums", part * self.m * self.n * 4 * self.halves, chunks))
        else:
            moved.append((f"all-reduce of {sums} sums", 2 * part * self.m * self.n * 4 * self.halves, 1))
        if shards.output == "whole" and (shards.axis == "n" or scattered):
            moved.append(("all-gather of the output", part * self.m * self.n * self.output_bytes, chunks))
        return tuple(
            Transfer(
                what=what, sent=round(sent), microseconds=times * shards.link.microseconds(sent / times), chunks=times
            )
            for what, sent, times in moved
        )

    def microseconds(self, shards: Shards, *, scattered: bool | None = None) -> float:
        """Return the time of all collectives. `scattered` None means the faster way."""
        if scattered is None:
            scattered = self.scatters(shards)
        return sum(one.microseconds for one in self.transfers(shards, scattered=scattered))

    def scatters(self, shards: Shards) -> bool:
        """Whether, along axis ``k``, finishing each row once, on its owner, is the faster or the only way."""
        _check_shards("scatters", shards)
        if shards.output == "rows":
            return True
        return self.microseconds(shards, scattered=True) <= self.microseconds(shards, scattered=False)

    def chunks(self, shards: Shards) -> tuple[int, ...]:
        """Return the rows of each chunk. The ranks exchange one chunk while they compute the next.

        If `shards` does not set the number of chunks, it is the largest, up to 4, with 512 rows or more in each chunk
        and collectives that take longer for their bytes than for their latency. It is 1 if every rank gets all sums.
        Rows are multiples of 128 for each rank if there are enough. There are never more chunks than rows.
        """
        _check_shards("chunks", shards)
        number = shards.chunks or self._worthwhile(shards)
        unit = next(unit for unit in (_TILE * shards.count, shards.count, 1) if unit * number <= self.m or unit == 1)
        return tuple(rows for rows in split(self.m, number, unit) if rows) or (0,)

    def _worthwhile(self, shards: Shards) -> int:
        if not shards.divisible or (shards.axis == "k" and not self.scatters(shards)):
            return 1
        for number in range(min(_MOST_CHUNKS, self.m // _FEWEST_ROWS), 1, -1):
            moved = [one for one in self.transfers(shards, scattered=True, chunks=number) if one.chunks > 1]
            if moved and all(one.microseconds > 2 * number * shards.link.latency_us for one in moved):
                return number
        return 1

    def cheapest(self, choices: Iterable[Shards]) -> Shards:
        """Return the shards whose collectives take the least time, the first one of equals; `choices` is not empty."""
        try:
            found = tuple(choices)
        except TypeError:
            found = ()
        if not found or not all(isinstance(each, Shards) for each in found):
            raise InvalidProblem("Traffic.cheapest", "choices", shown(choices), "hold Shards, at least one")
        return min(found, key=self.microseconds)


def _check_shards(call: str, given: object) -> None:
    expect(f"Traffic.{call}", "shards", given, Shards, "be a Shards, such as Shards(axis='k', count=2)")
