"""`cached_property` without a lock."""

from __future__ import annotations

import functools
from typing import Any, TypeVar, overload

Found = TypeVar("Found")


class cached_property(functools.cached_property[Found]):  # noqa: N801  the name of the standard one
    """A property that is computed once, like `functools.cached_property`, but without the lock of Python 3.11.

    All instances share that lock. Threads wait for each other, and a child that is forked while a thread computes waits
    for ever. Without the lock two threads may both compute. All threads get the value that was stored first.
    """

    @overload
    def __get__(self, instance: None, owner: type[Any] | None = None) -> cached_property[Found]: ...
    @overload
    def __get__(self, instance: object, owner: type[Any] | None = None) -> Found: ...

    def __get__(self, instance: object | None, owner: type[Any] | None = None) -> cached_property[Found] | Found:
        """Compute and store the value. Later reads find it in the instance's dictionary."""
        if instance is None:
            return self
        assert self.attrname is not None
        found: Found = instance.__dict__.setdefault(self.attrname, self.func(instance))
        return found
