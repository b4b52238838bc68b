"""`Group`: the few ways in which the ranks that share a layer exchange arrays and texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from skuda.registry.errors import SkudaError
from skuda.registry.text import one_line

_MOST_REASON = 2000


@runtime_checkable
class Group(Protocol):
    """The ranks that share layers. Every rank calls the same methods in the same order.

    Arrays are those of the carrier: NumPy's in one process, torch's over torch.distributed. All methods return what the
    definition says or raise; the sums are of s32, exact in any order. `max` and `sum` may overwrite the given array.
    """

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""

    @property
    def count(self) -> int:
        """Ranks."""

    def exchange(self, text: str) -> tuple[str, ...]:
        """Return the texts of all ranks, in their order."""

    def agree(self, what: str) -> None:
        """Refuse to go on where another rank is about to do something else.

        Raises
        ------
        GroupMismatch
            On every rank, naming them.
        """

    def max(self, array: Any) -> Any:
        """Return the maximum over the ranks, element by element; no element is NaN."""

    def sum(self, array: Any) -> Any:
        """Return the sum over the ranks, s32, element by element."""

    def sum_rows(self, array: Any, sizes: tuple[int, ...]) -> Any:
        """Return this rank's rows of the sum over the ranks, s32; `sizes` are the rows of each."""

    def gather(self, array: Any, axis: int, sizes: tuple[int, ...]) -> Any:
        """Return the arrays of all ranks one after the other along axis 0 or 1; `sizes` are theirs along it."""

    def start_sum_rows(self, array: Any, sizes: tuple[int, ...]) -> Callable[[], Any]:
        """Start `sum_rows`, and return a function that waits for its result and returns it.

        A group that cannot go on meanwhile does it at once. What was started is finished in the order of the starts.
        """

    def start_gather(self, array: Any, axis: int, sizes: tuple[int, ...], into: Any = None) -> Callable[[], Any]:
        """Start `gather`, likewise; where an array is given, the result is written into it and it is returned."""


class GroupMismatch(SkudaError):
    """Ranks that were about to do different things; nothing was computed.

    Attributes
    ----------
    what : str
        What they differ in.
    ranks : tuple of (int, str)
        For each difference the first rank that has it, and what it has.
    """

    def __init__(self, what: str, ranks: tuple[tuple[int, str], ...]) -> None:
        super().__init__(what, ranks)
        self.what, self.ranks = what, ranks

    def __str__(self) -> str:
        told = "; ".join(f"rank {rank} has {one_line(text, _MOST_REASON)}" for rank, text in self.ranks)
        return f"the ranks of a group must have the same {self.what}: {told}"


class GroupBroken(SkudaError):
    """A collective that other ranks did not finish; the group must not be used again.

    Attributes
    ----------
    ranks : tuple of int
        The ranks that failed or did not come; empty where that is unknown.
    reason : str
        What happened.
    """

    def __init__(self, ranks: tuple[int, ...], reason: str) -> None:
        super().__init__(ranks, reason)
        self.ranks, self.reason = ranks, one_line(reason, _MOST_REASON)

    def __str__(self) -> str:
        who = ", ".join(f"rank {rank}" for rank in self.ranks) or "a rank that is not known"
        return f"{who} of the group did not take part: {self.reason}; make a new group"


def differing(texts: tuple[str, ...]) -> tuple[tuple[int, str], ...]:
    """Return the first rank of each different text, or nothing if all are equal."""
    first = {text: texts.index(text) for text in texts}
    return tuple((rank, text) for text, rank in first.items()) if len(first) > 1 else ()
