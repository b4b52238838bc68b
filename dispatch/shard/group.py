"""`Group`: the collectives by which the ranks of a layer exchange arrays and texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from skuda.registry.errors import InvalidProblem, SkudaError
from skuda.registry.text import one_line, shown
from skuda.registry.value import expect

_MOST_REASON = 2000


@runtime_checkable
class Group(Protocol):
    """The ranks that share layers. Every rank calls the same methods in the same order.

    Arrays belong to NumPy in one process, and to torch over torch.distributed. `max` and `sum` may overwrite the given
    array. A method that cannot return its result raises.

    Raises
    ------
    InvalidProblem
        On the rank at fault, for an argument of the wrong type, sums that are not s32 or s64, and sizes that do not
        add up.
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
        """Return the maximum over the ranks, element by element, of floating numbers or integers.

        A NaN is refused. On a GPU, where the host would have to wait, it is not noticed, and the result is undefined.
        """

    def sum(self, array: Any) -> Any:
        """Return the sum over the ranks, element by element. Elements are s32 or s64, so it is exact in any order."""

    def sum_rows(self, array: Any, sizes: tuple[int, ...]) -> Any:
        """Return this rank's rows of what `sum` returns. `sizes` has the number of rows of each rank."""

    def gather(self, array: Any, axis: int, sizes: tuple[int, ...]) -> Any:
        """Concatenate the arrays of all ranks along axis 0 or 1. `sizes` has the length of each array."""

    def start_sum_rows(self, array: Any, sizes: tuple[int, ...]) -> Callable[[], Any]:
        """Start `sum_rows`. Return a function that waits for the result and returns it.

        A group that cannot overlap does the work at once. Operations finish in the order in which they were started.
        """

    def start_gather(self, array: Any, axis: int, sizes: tuple[int, ...], into: Any = None) -> Callable[[], Any]:
        """Start `gather` likewise. The result is written into the array `into`, of its shape and dtype, if given."""


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


def check_array(method: str, array: Any, kinds: tuple[type, ...], *dtypes: object) -> None:
    """Check that an argument is an array, of one of some dtypes if there are any: sums of others may be rounded."""
    if not isinstance(array, kinds):
        rule = f"be a {' or '.join(kind.__name__ for kind in kinds)}"
        raise InvalidProblem(f"Group.{method}", "array", shown(array), rule)
    dtype = getattr(array, "dtype", None)
    if dtypes and dtype not in dtypes:
        raise InvalidProblem(f"Group.{method}", "array", f"elements {dtype}", "be s32 or s64, so that the sum is exact")


def check_text(method: str, argument: str, given: object) -> None:
    """Check that an argument is a string."""
    expect(f"Group.{method}", argument, given, str, "be a string")


def check_sizes(
    method: str, array: Any, axis: object, sizes: Any, group: Group, *, whole: bool = False, into: Any = None
) -> None:
    """Check that an array is a rank's part along an axis, or all parts, and that all parts fit into `into`."""
    call, count = f"Group.{method}", group.count
    if type(axis) is not int or axis not in (0, 1) or axis >= array.ndim:
        raise InvalidProblem(call, "axis", shown(axis), f"be 0 or 1, an axis of the array of shape {list(array.shape)}")
    if not isinstance(sizes, tuple | list) or len(sizes) != count or not all(type(n) is int and n >= 0 for n in sizes):
        raise InvalidProblem(call, "sizes", shown(sizes), f"have one size for each of the {count} ranks")
    wanted = sum(sizes) if whole else sizes[group.rank]
    if array.shape[axis] != wanted:
        rule = f"have {wanted} elements along axis {axis}, as the sizes say"
        raise InvalidProblem(call, "array", f"shape {list(array.shape)}", rule)
    if into is not None:
        shape = [*array.shape[:axis], sum(sizes), *array.shape[axis + 1 :]]
        if type(into) is not type(array) or into.dtype != array.dtype or list(into.shape) != shape:
            raise InvalidProblem(
                call, "into", shown(into), f"be a {type(array).__name__} of {array.dtype}, shape {shape}"
            )
