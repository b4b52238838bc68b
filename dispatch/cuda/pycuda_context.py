"""A device's primary context on PyCUDA's own stack, for as long as a call needs it.

No context is left pushed: if one is, PyCUDA aborts the process when a thread ends or the interpreter exits.
"""

from __future__ import annotations

import contextlib
import ctypes
import operator
import threading
from collections.abc import Iterator
from typing import Any

_contexts: dict[int, Any] = {}
_retaining = threading.Lock()


def keep_forever(value: Any) -> Any:
    """Keep an object beyond the interpreter's end.

    PyCUDA's destructors push contexts; they fail in a thread other than the one that retained them, and at exit the
    driver may be gone. The driver cleans up after a process by itself.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    return value


def _context(ordinal: int) -> Any:
    import pycuda.driver

    with _retaining:
        if ordinal not in _contexts:
            pycuda.driver.init()
            _contexts[ordinal] = keep_forever(pycuda.driver.Device(ordinal).retain_primary_context())
        return _contexts[ordinal]


@contextlib.contextmanager
def pushed(ordinal: int) -> Iterator[None]:
    """Push a device's primary context on PyCUDA's stack inside a ``with`` block."""
    context = _context(ordinal)
    done: list[None] = []
    try:
        # One call into C pushes and remembers it, so that no interrupt arrives in between.
        done.extend(map(operator.methodcaller("push"), (context,)))
        yield
    finally:
        if done:
            context.pop()
