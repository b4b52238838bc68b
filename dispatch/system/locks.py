"""Locks that are open in a forked child.

A child has only the thread that forked, so a lock held by another thread would stay locked in it for ever. Hold a lock
in a ``with`` statement only: CPython runs no signal handler between taking a lock and entering the statement.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable

from skuda.dispatch.system.forks import in_child

_single: weakref.WeakSet[threading.Lock] = weakref.WeakSet()
_named: weakref.WeakSet[Locks] = weakref.WeakSet()


def lock() -> threading.Lock:
    """Return a new lock."""
    made = threading.Lock()
    _single.add(made)
    return made


class Locks:
    """One lock for each name."""

    def __init__(self) -> None:
        self._found: dict[Hashable, threading.Lock] = {}
        _named.add(self)

    def __len__(self) -> int:
        return len(self._found)

    def of(self, name: Hashable) -> threading.Lock:
        """Return the lock of a name."""
        return self._found.setdefault(name, threading.Lock())

    def drop(self, name: Hashable) -> None:
        """Forget the lock of a name that will not be used again. Threads that have it keep it."""
        self._found.pop(name, None)

    def drop_all(self) -> None:
        """Forget all locks."""
        self._found.clear()


def _open_all() -> None:
    for single in tuple(_single):
        single._at_fork_reinit()  # type: ignore[attr-defined]  # noqa: SLF001  as the standard library does for its own
    for named in tuple(_named):
        named.drop_all()


in_child(_open_all)
