"""A group whose ranks are threads of this process, with NumPy. It defines the results of all groups."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from skuda.dispatch.shard.group import Group, GroupBroken, GroupMismatch, differing
from skuda.dispatch.shard.shards import own
from skuda.registry.errors import InvalidProblem

Result = TypeVar("Result")


class _Meeting:
    """The meeting point of the ranks. In each round every rank contributes an object and receives all of them."""

    def __init__(self, count: int, patience: float) -> None:
        self._count, self._patience = count, patience
        self._changed = threading.Condition()
        self._left: dict[int, str] = {}
        """Why ranks have left, by rank."""
        self._rounds = [0] * count
        self._put: dict[int, dict[int, Any]] = {}
        """The objects of each unfinished round, by rank."""
        self._takers: dict[int, int] = {}

    def swap(self, rank: int, what: Any) -> list[Any]:
        """Contribute an object. Return the objects of all ranks in this round, by rank."""
        with self._changed:
            number = self._rounds[rank]
            self._rounds[rank] += 1
            put = self._put.setdefault(number, {})
            put[rank] = what
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(put) == self._count or self._gone(put), self._patience)
            if len(put) < self._count:
                silent = f"nothing was heard for {self._patience:g} s"
                lost = self._gone(put) or {one: silent for one in range(self._count) if one not in put}
                raise GroupBroken(tuple(sorted(lost)), "; ".join(dict.fromkeys(lost.values())))
            self._takers[number] = self._takers.get(number, 0) + 1
            if self._takers[number] == self._count:
                del self._put[number], self._takers[number]
            return [put[one] for one in range(self._count)]

    def _gone(self, put: dict[int, Any]) -> dict[int, str]:
        """Return the ranks that left before they contributed to a round, with the reasons."""
        return {rank: reason for rank, reason in self._left.items() if rank not in put}

    def leave(self, rank: int, reason: str) -> None:
        """Leave: the rank takes part in no further round."""
        with self._changed:
            self._left[rank] = reason
            self._changed.notify_all()


@dataclass(frozen=True)
class _Rank:
    """One rank of a local group; a `Group`."""

    rank: int
    count: int
    _meeting: _Meeting = field(repr=False)

    def exchange(self, text: str) -> tuple[str, ...]:
        return tuple(self._meeting.swap(self.rank, text))

    def agree(self, what: str) -> None:
        found = differing(self.exchange(what))
        if found:
            raise GroupMismatch("call", found)

    def max(self, array: Any) -> Any:
        return np.maximum.reduce(self._like(array))

    def sum(self, array: Any) -> Any:
        return np.add.reduce(self._like(array), dtype=np.int32)

    def sum_rows(self, array: Any, sizes: tuple[int, ...]) -> Any:
        return own(self.sum(array), 0, sizes, self.rank)

    def gather(self, array: Any, axis: int, sizes: tuple[int, ...]) -> Any:
        self._check(axis, sizes, array)
        return np.concatenate(self._meeting.swap(self.rank, array), axis=axis)

    def start_sum_rows(self, array: Any, sizes: tuple[int, ...]) -> Callable[[], Any]:
        found = self.sum_rows(array, sizes)
        return lambda: found

    def start_gather(self, array: Any, axis: int, sizes: tuple[int, ...], into: Any = None) -> Callable[[], Any]:
        found = self.gather(array, axis, sizes)
        if into is not None:
            into[...] = found
            found = into
        return lambda: found

    def _check(self, axis: int, sizes: tuple[int, ...], array: Any) -> None:
        if array.shape[axis] != sizes[self.rank]:
            rule = f"have {sizes[self.rank]} elements along axis {axis}, as the sizes say"
            raise InvalidProblem("Group.gather", "array", f"shape {list(array.shape)}", rule)

    def _like(self, array: Any) -> list[Any]:
        found = self._meeting.swap(self.rank, array)
        forms = differing(tuple(f"{one.dtype} of shape {list(one.shape)}" for one in found))
        if forms:
            raise GroupMismatch("array", forms)
        return found


def on_ranks(count: int, work: Callable[[Group], Result], *, patience: float = 60.0) -> list[Result]:
    """Run a function on every rank of a group of threads.

    Parameters
    ----------
    count : int
        Number of ranks.
    work : callable
        The function. It takes the rank's `Group`.
    patience : float
        Seconds that a rank waits for the others in a collective.

    Returns
    -------
    list
        The results of `work`, by rank.

    Raises
    ------
    Exception
        The exception of the first rank that failed by itself. If none did, the `GroupBroken` of the others.
    """
    meeting = _Meeting(count, patience)
    results: list[Any] = [None] * count
    errors: dict[int, BaseException] = {}

    def rank(number: int) -> None:
        try:
            results[number] = work(_Rank(number, count, meeting))
        except BaseException as error:  # noqa: BLE001  raised again below, in the thread that asked
            errors[number] = error
            meeting.leave(number, f"{type(error).__name__}: {error}")
        else:
            meeting.leave(number, "it had finished")

    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    own_errors = [error for error in errors.values() if not isinstance(error, GroupBroken)]
    for error in (*own_errors, *errors.values()):
        raise error
    return results
