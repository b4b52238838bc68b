"""A group whose ranks are threads of this process, with NumPy. It defines the results of all groups."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import numpy as np

from skuda.dispatch.shard.group import (
    Group,
    GroupBroken,
    GroupMismatch,
    check_array,
    check_sizes,
    check_text,
    differing,
)
from skuda.dispatch.shard.shards import own
from skuda.registry.errors import InvalidProblem
from skuda.registry.value import expect, expect_integer, expect_real

Result = TypeVar("Result")

_MOST_THREADS = 1024


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
    checks_calls: ClassVar[bool] = True

    def exchange(self, text: str) -> tuple[str, ...]:
        check_text("exchange", "text", text)
        return tuple(self._meeting.swap(self.rank, text))

    def agree(self, what: str) -> None:
        check_text("agree", "what", what)
        found = differing(self.exchange(what))
        if found:
            raise GroupMismatch("call", found)

    def max(self, array: Any) -> Any:
        array = _host("max", array)
        if array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16":
            raise InvalidProblem("Group.max", "array", f"elements {array.dtype}", "be floating numbers or integers")
        if array.dtype.kind not in "iu" and np.isnan(array).any():
            raise InvalidProblem("Group.max", "array", "a NaN", "have none, because a NaN has no place in an order")
        return np.maximum.reduce(self._alike(array, f"{array.dtype} of shape {list(array.shape)}"))

    def sum(self, array: Any) -> Any:
        array = _host("sum", array, *_SUMS)
        return np.add.reduce(self._alike(array, f"{array.dtype} of shape {list(array.shape)}"), dtype=array.dtype)

    def sum_rows(self, array: Any, sizes: tuple[int, ...]) -> Any:
        array = _host("sum_rows", array, *_SUMS)
        check_sizes("sum_rows", array, 0, sizes, self, whole=True)
        return own(self.sum(array), 0, sizes, self.rank)

    def gather(self, array: Any, axis: int, sizes: tuple[int, ...]) -> Any:
        return self.start_gather(array, axis, sizes)()

    def start_sum_rows(self, array: Any, sizes: tuple[int, ...]) -> Callable[[], Any]:
        found = self.sum_rows(array, sizes)
        return lambda: found

    def start_gather(self, array: Any, axis: int, sizes: tuple[int, ...], into: Any = None) -> Callable[[], Any]:
        array = _host("gather", array)
        check_sizes("gather", array, axis, sizes, self, into=into)
        beside = array.shape[:axis] + array.shape[axis + 1 :]
        every = self._alike(array, f"{array.dtype}, {list(beside)} beside axis {axis}, sizes {list(sizes)}")
        found = np.concatenate(every, axis=axis, out=into)
        return lambda: found

    def _alike(self, array: Any, form: str) -> list[Any]:
        """Return the arrays of all ranks, which must have the same form."""
        found = self._meeting.swap(self.rank, (form, array))
        forms = differing(tuple(form for form, _ in found))
        if forms:
            raise GroupMismatch("array", forms)
        return [each for _, each in found]


_SUMS = np.dtype(np.int32), np.dtype(np.int64)


def _host(method: str, array: Any, *dtypes: object) -> Any:
    """Return an array of NumPy as it is, and a tensor on the CPU as one."""
    found = array
    if hasattr(array, "__array__") and not isinstance(array, type):
        with suppress(TypeError, ValueError, RuntimeError):  # it is not on the CPU, or its element is not one of NumPy
            found = np.asarray(array)
    check_array(method, found, (np.ndarray,), *dtypes)
    return found


def on_ranks(count: int, work: Callable[[Group], Result], *, patience: float = 60.0) -> list[Result]:
    """Run a function on every rank of a group of threads.

    Parameters
    ----------
    count : int
        Number of ranks, 1 up to 1024.
    work : callable
        The function. It takes the rank's `Group`.
    patience : float
        Seconds that a rank waits for the others in a collective, up to 10^6.

    Returns
    -------
    list
        The results of `work`, by rank.

    Raises
    ------
    InvalidProblem
        For an argument of the wrong type or out of its range.
    Exception
        The exception of the first rank that failed by itself. If none did, the `GroupBroken` of the others.
    """
    count = expect_integer("on_ranks", "count", count, 1, _MOST_THREADS)
    expect("on_ranks", "work", work, Callable, "be a function of a Group")
    meeting = _Meeting(count, expect_real("on_ranks", "patience", patience, 0, 1e6))
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
