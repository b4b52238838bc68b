"""Holds back Ctrl-C while code runs that could lose it."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_back() -> Iterator[None]:
    """Deliver an interrupt (SIGINT) that comes in this block at its end, to the handler that the program has.

    Python calls a handler between any two bytecodes of the main thread, so also in a destructor, or in a function that
    C code calls. There, the exception of the handler may be dropped. Several interrupts of a block become one, as in a
    long call of C code. In other threads no handler runs, so the block changes nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(came[0], sys._getframe())  # noqa: SLF001  a handler gets the frame that it interrupts
