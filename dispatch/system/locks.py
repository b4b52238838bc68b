"""Locks that are open in a forked child.

A child has only the thread that forked, so a lock held by another thread would stay locked in it for ever. Hold a lock
in a ``with`` statement only: CPython runs no signal handler between taking a lock and entering the statement.
"""

from __future__ import annotations

import threading
import weakref

from skuda.dispatch.system.forks import in_child

_locks: weakref.WeakSet[threading.Lock] = weakref.WeakSet()


def lock() -> threading.Lock:
    """Return a new lock."""
    made = threading.Lock()
    _locks.add(made)
    return made


def _open_all() -> None:
    for each in tuple(_locks):
        each._at_fork_reinit()  # type: ignore[attr-defined]  # noqa: SLF001  as the standard library does for its own


in_child(_open_all)
