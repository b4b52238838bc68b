"""Ctrl-C at a chosen bytecode, calls with a time limit, and forks."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any


def bytecodes(call: Callable[[], Any], *within: str) -> int:
    """Return how many bytecodes `call` runs in files whose path contains one of `within`."""
    return _traced(call, within, 0)


def interrupted(call: Callable[[], Any], at: int, *within: str, error: bool = False) -> bool:
    """Run `call` and let Ctrl-C arrive before bytecode `at`, counted from 1 as by `bytecodes`; return if it raised.

    With `error` it is no signal, which code can hold back, but an error of the bytecode.
    """
    try:
        _traced(call, within, at, error=error)
    except KeyboardInterrupt:
        return True
    return False


def elsewhere(call: Callable[[], Any], patience: float = 20.0) -> Any:
    """Return what `call` returns in another thread; fail if it does not return."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(patience)
    assert not thread.is_alive(), "it hangs"
    return found[0]


def fork() -> int:
    """Fork as `os.fork` does, without the warning that other threads run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _traced(call: Callable[[], Any], within: tuple[str, ...], at: int, *, error: bool = False) -> int:
    # Looking up a missing key runs C code alone. After a call in Python, the handler would run here, not in `call`.
    arrive = defaultdict(partial(_thread.interrupt_main, signal.SIGINT))
    count = 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal count
        if not any(part in frame.f_code.co_filename for part in within):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            count += 1
            if count == at:
                sys.settrace(None)
                if error:
                    raise KeyboardInterrupt
                arrive[at]
        return trace

    before, handler = sys.gettrace(), signal.signal(signal.SIGINT, signal.default_int_handler)
    sys._getframe().f_trace_opcodes = True  # CPython 3.12 needs a frame that asks before it begins to trace
    try:
        sys.settrace(trace)
        call()
        # Of a signal before the last bytecode, the handler runs here.
    finally:
        sys.settrace(before)
        signal.signal(signal.SIGINT, handler)
    return count
