"""`Group`: the collectives by which the ranks of a layer exchange arrays and texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from skuda.registry.errors import SkudaError
from skuda.registry.text import one_line

_MOST_REASON = 2000


@runtime_checkable
class Group(Protocol):
    """The ranks that share layers. Every rank calls the same methods in the same order.

    Arrays belong to NumPy in one process, and to torch over torch.distributed. Sums are s32, so they are exact in any
    order. `max` and `sum` may overwrite the given array. A method that cannot return its result raises.
    """

    @property
    def rank(self) -> int:
        """The number of this rank, counted from 0."""

    @property
    def count(self) -> int:
        """The number of ranks."""

    def exchange(self, text: str) -> tuple[str, ...]:
        """Return the texts of all ranks, in rank order."""

    def agree(self, what: str) -> None:
        """Check that all ranks are about to do the same.

        Raises
        ------
        GroupMismatch
            If they are not, on every rank. The error names the ranks.
        """

    def max(self, array: Any) -> Any:
        """Return the maximum over the ranks, element by element. No element is NaN."""

    def sum(self, array: Any) -> Any:
        """Return the s32 sum over the ranks, element by element."""

    def sum_rows(self, array: Any, sizes: tuple[int, ...]) -> Any:
        """Return this rank's rows of the s32 sum over the ranks. `sizes` has the number of rows of each rank."""

    def gather(self, array: Any, axis: int, sizes: tuple[int, ...]) -> Any:
        """Concatenate the arrays of all ranks along axis 0 or 1. `sizes` has the length of each array."""

    def start_sum_rows(self, array: Any, sizes: tuple[int, ...]) -> Callable[[], Any]:
        """Start `sum_rows`. Return a function that waits for the result and returns it.

        A group that cannot overlap does the work at once. Operations finish in the order in which they were started.
        """

    def start_gather(self, array: Any, axis: int, sizes: tuple[int, ...], into: Any = None) -> Callable[[], Any]:
        """Start `gather` likewise. The result is written into the array `into` if there is one."""


class GroupMismatch(SkudaError):
    """The ranks were about to do different things. Nothing was computed.

    Attributes
    ----------
    what : str
        The property in which they differ.
    ranks : tuple of (int, str)
        For each value of the property, the first rank that has it, and the value.
    """

    def __init__(self, what: str, ranks: tuple[tuple[int, str], ...]) -> None:
        super().__init__(what, ranks)
        self.what, self.ranks = what, ranks

    def __str__(self) -> str:
        differences = "; ".join(f"rank {rank} has {one_line(text, _MOST_REASON)}" for rank, text in self.ranks)
        return f"the ranks of a group must have the same {self.what}: {differences}"


class GroupBroken(SkudaError):
    """Other ranks did not finish a collective. The group must not be used again.

    Attributes
    ----------
    ranks : tuple of int
        The ranks that failed or did not take part. Empty if they are unknown.
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
