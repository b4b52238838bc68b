"""Sends the output that plug-ins print while they load or are called to standard error."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from skuda.dispatch.system.forks import in_child
from skuda.dispatch.system.locks import lock

_lock = lock()
_inside = threading.local()
_depth = 0


class _Routed:
    """A stream that is standard error for threads inside `kept_clean`, and the original stream for all others."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        aside = sys.stderr if getattr(_inside, "depth", 0) else None
        return getattr(aside or self.stream, name)


def _count_in_child() -> None:
    global _depth  # noqa: PLW0603  there is one standard output
    _depth = getattr(_inside, "depth", 0)  # no other thread came along


in_child(_count_in_child)


@contextmanager
def kept_clean() -> Iterator[None]:
    """Send the output of this thread to standard error, and that of other threads where it belongs.

    In a program with one thread, file descriptor 1 is redirected, too, for C code and child processes. With several
    threads it is not, because the others use it.
    """
    global _depth  # noqa: PLW0603  there is one standard output
    before = getattr(_inside, "depth", 0)
    alone = not before and threading.active_count() == 1
    with _lock:
        if sys.stdout and not isinstance(sys.stdout, _Routed):  # a program can run without any
            sys.stdout = _Routed(sys.stdout)
        _depth += 1
    saved = None
    try:
        _inside.depth = before + 1
        if alone:
            with suppress(OSError):  # a program can run without these descriptors
                saved = os.dup(1)
                os.dup2(2, 1)
        yield
    finally:
        if saved is not None:
            os.dup2(saved, 1)
            os.close(saved)
        _inside.depth = before
        with _lock:
            _depth -= 1
            if not _depth and isinstance(sys.stdout, _Routed):
                sys.stdout = sys.stdout.stream
