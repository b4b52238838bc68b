"""`cached_property` without a lock."""

from __future__ import annotations

import functools
from typing import Any, TypeVar, overload

Found = TypeVar("Found")


class cached_property(functools.cached_property[Found]):  # noqa: N801  it stands where the standard one would
    """A property that is computed once, as `functools.cached_property`, without the lock that it has in Python 3.11.

    That lock is one for all instances, so that threads wait for each other's, and a child that is forked while one of
    them computes waits for ever. Without it two threads may both compute; all get what the first one kept.
    """

    @overload
    def __get__(self, instance: None, owner: type[Any] | None = None) -> cached_property[Found]: ...
    @overload
    def __get__(self, instance: object, owner: type[Any] | None = None) -> Found: ...

    def __get__(self, instance: object | None, owner: type[Any] | None = None) -> cached_property[Found] | Found:
        """Return the value; the instance's dictionary answers from then on."""
        if instance is None:
            return self
        assert self.attrname is not None
        found: Found = instance.__dict__.setdefault(self.attrname, self.func(instance))
        return found
