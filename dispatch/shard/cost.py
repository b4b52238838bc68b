"""What a sharded layer moves between ranks, and how long that takes: a model of bytes, bandwidth and latency."""

from __future__ import annotations

from collections.abc import Iterable

from skuda.dispatch.shard.shards import Shards
from skuda.registry.value import Value


class Transfer(Value):
    """One collective of a layer.

    Attributes
    ----------
    what : str
        What is moved, and how.
    sent : int
        Bytes that a rank sends, on average over the ranks.
    microseconds : float
        The time that the link's model gives.
    """

    what: str
    sent: int
    microseconds: float

    def __str__(self) -> str:
        return f"{self.what}: {self.sent} bytes a rank, {self.microseconds:.1f} us by the model"


class Traffic(Value):
    """What a layer moves.

    Attributes
    ----------
    m, n, k : int
        Rows, output channels, inner size.
    output_bytes : int
        Bytes of an element of the output.
    dynamic : bool
        Whether the activation is real and each row gets a scale when it runs.
    scale_bytes : int
        Bytes of what each row has beside its codes: its scale and its zero point.
    """

    m: int
    n: int
    k: int
    output_bytes: int
    dynamic: bool
    scale_bytes: int = 4

    def transfers(self, shards: Shards, *, scattered: bool) -> tuple[Transfer, ...]:
        """Return the collectives of a layer, in their order."""
        count = shards.count
        if count == 1:
            return ()
        part = (count - 1) / count
        moved: list[tuple[str, float]] = []
        if self.dynamic and shards.input == "columns":
            moved.append(("all-reduce of the rows' maxima", 2 * part * self.scale_bytes * self.m))
        if shards.axis == "n":
            if shards.input != "whole":
                moved.append(("all-gather of codes", part * self.m * self.k))
            if shards.input == "rows" and self.scale_bytes:
                moved.append(("all-gather of scales", part * self.m * self.scale_bytes))
        elif scattered:
            moved.append(("reduce-scatter of s32 sums", part * self.m * self.n * 4))
        else:
            moved.append(("all-reduce of s32 sums", 2 * part * self.m * self.n * 4))
        if shards.output == "whole" and (shards.axis == "n" or scattered):
            moved.append(("all-gather of the output", part * self.m * self.n * self.output_bytes))
        link = shards.link
        return tuple(
            Transfer(what=what, sent=round(sent), microseconds=link.microseconds(sent)) for what, sent in moved
        )

    def microseconds(self, shards: Shards, *, scattered: bool | None = None) -> float:
        """Return the time of all collectives; `scattered` None for the faster way."""
        if scattered is None:
            scattered = self.scatters(shards)
        return sum(one.microseconds for one in self.transfers(shards, scattered=scattered))

    def scatters(self, shards: Shards) -> bool:
        """Whether finishing each row once, on its owner, is the faster way to the output of axis ``k``, or the only."""
        if shards.output == "rows":
            return True
        return self.microseconds(shards, scattered=True) <= self.microseconds(shards, scattered=False)

    def cheapest(self, choices: Iterable[Shards]) -> Shards:
        """Return the shards whose collectives take the least time, the first of equals."""
        return min(choices, key=self.microseconds)
