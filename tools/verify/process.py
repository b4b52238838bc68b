"""What a call must leave alone beside its outputs: standard output, warnings, and the state of the process."""

from __future__ import annotations

import ctypes
import io
import os
import random
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import numpy as np

from skuda.dispatch.settings import environment
from skuda.tools.verify.compare import Broken


@contextmanager
def unchanged_state() -> Iterator[None]:
    """Raise `Broken` if the block changes the state of the process, and change it back.

    This is NumPy's handling of floating-point errors, the generators of random numbers, the folder and the environment.
    A library that is imported in the block may change the environment.
    """
    before, numbers, loaded = _state(), np.random.get_state(), len(sys.modules)  # noqa: NPY002  others may use it
    try:
        yield
    finally:
        after = _state()
        np.seterr(**before["NumPy's handling of floating-point errors"])
        random.setstate(before["the state of random"])
        np.random.set_state(numbers)  # noqa: NPY002  others may use it
    if len(sys.modules) > loaded:
        after["the environment"] = before["the environment"]
    changed = [name for name, value in before.items() if value != after[name]]
    if changed:
        raise Broken(f"a call changes {', '.join(changed)}")


def _state() -> dict[str, Any]:
    numbers: Any = np.random.get_state()  # noqa: NPY002  others may use it
    return {
        "NumPy's handling of floating-point errors": np.geterr(),
        "the state of random": random.getstate(),
        "the state of np.random": (bytes(numbers[1]), numbers[2]),
        "the folder": Path.cwd(),
        "the environment": environment(),
    }


@contextmanager
def silence() -> Iterator[None]:
    """Raise `Broken` if this thread or compiled code prints, or this thread warns, within the block."""
    listeners = [_Listener(sys.stdout), _Listener(sys.stderr)]
    warned = _Listener(None)
    with ExitStack() as stack, tempfile.TemporaryFile() as heard:
        _flush()
        # A terminal may show another thread's progress bar, so it is not redirected.
        for number in (1, 2):
            with suppress(OSError):  # it may be closed
                if not os.isatty(number):
                    stack.callback(_restore, os.dup(number), number)
                    os.dup2(heard.fileno(), number)
        stack.enter_context(redirect_stdout(listeners[0]))
        stack.enter_context(redirect_stderr(listeners[1]))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: print(message, file=warned)
        yield
        _flush()
        heard.seek(0)
        said = "".join(each.heard.getvalue() for each in listeners) or heard.read(100).decode(errors="replace")
    if warned.heard.getvalue():
        raise Broken(f"a call warns: {warned.heard.getvalue().partition(chr(10))[0][:200]}")
    if said:
        raise Broken(f"a call prints {said[:60]!r}")


def _flush() -> None:
    """Flush the buffers of Python and of the C library."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).fflush(None)


def _restore(saved: int, number: int) -> None:
    os.dup2(saved, number)
    os.close(saved)


class _Listener:
    """A stream that keeps what one thread writes and passes on what other threads write."""

    def __init__(self, stream: Any) -> None:
        self.heard, self._stream, self._thread = io.StringIO(), stream, threading.get_ident()

    def write(self, text: str) -> int:
        """Keep the text if this thread wrote it; pass it on otherwise."""
        if threading.get_ident() == self._thread:
            return self.heard.write(text)
        return int(self._stream.write(text)) if self._stream is not None else len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
