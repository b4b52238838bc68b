"""`LaunchCache`: the one cache that leads from a call to its launch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

from skuda.dispatch.system.forks import in_child

CachedLaunch = Callable[..., Any]
"""Runs a prepared kernel on the arrays of a call like the one for which it was made, and returns the op's result, which
is never None. For any other call it does nothing and returns None."""


class PositionalCall(NamedTuple):
    """How an op of torch calls a kernel: arrays by position, with shapes of its own, and all outputs new."""

    names: tuple[str | None, ...]
    """The argument at each position. None for one that was left out."""
    arrays: Mapping[str, Any]
    """The arrays of the call. The kernel gets views of them with other shapes, of the same memory."""
    shapes: Mapping[str, tuple[int, ...]]  # the shape that each output gets, in stored elements
    results: tuple[str, ...]  # the outputs in the order of the result
    several: type[tuple[Any, ...] | list[Any]] | None
    """The type of the result, tuple or list. None for a single output."""
    unless: str
    """An expression. Where it is true, a launch does nothing."""
    known: Mapping[str, Any]  # the names that `unless` uses


class FirstRun(NamedTuple):
    """The result of a first run, and what serves calls like it."""

    result: Any
    launch: CachedLaunch | None
    """Serves calls like this one. None if nothing recognizes them."""
    placed: bool  # whether an array of the call is on the device, so that a call like it runs there


_MOST_KEYS = 8192
_MOST_FORMS = 4
"""Launches under one key: calls that differ in what the key does not tell, such as strides."""

_all: weakref.WeakSet[LaunchCache] = weakref.WeakSet()


class LaunchCache:
    """The launches of the latest calls, by key. Whoever runs a kernel asks here first.

    A key is what its user finds out fastest about a call. `Dispatcher.run` asks by problem and preference, `Plan.run`
    by its plan, and an op of torch by shapes, dtypes and fields. The launch checks the rest. `of` has the launches by
    key, newest first. Read it with ``of.get(key, ())``. It is always the same dictionary.
    """

    def __init__(self) -> None:
        self.of: dict[Hashable, tuple[CachedLaunch, ...]] = {}
        _all.add(self)

    def keep(self, key: Hashable, launch: CachedLaunch) -> None:
        """Keep a launch under a key; if there are too many, the oldest keys go."""
        for oldest in tuple(self.of)[: _MOST_KEYS // 8 + 1] if len(self.of) >= _MOST_KEYS else ():
            self.of.pop(oldest, None)
        self.of[key] = (launch, *self.of.get(key, ()))[:_MOST_FORMS]

    def forget(self) -> None:
        """Forget everything: kernels were set aside."""
        self.of.clear()


def _forget_all() -> None:
    for launches in tuple(_all):
        launches.forget()


# The driver works only in the process that loaded it.
in_child(_forget_all)
