"""Runs functions first in every forked child, and lets a fork wait for imports.

CPython does not open the locks of modules in a child. A child that is forked while another thread imports a module
would wait for ever for that module.
"""

from __future__ import annotations

import _thread
import logging  # noqa: F401  the hooks registered last run first, and that of logging takes a lock that imports need
import os
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

PATIENCE = 10.0
"""Most seconds that a fork waits for imports. An import may itself wait for the thread that forks."""
_LOOK = 0.001
_SLICE = 0.05
"""Least seconds of the interpreter's lock that a thread has about a fork: more than the last look and the fork take."""
_slices: list[float] = []
"""What the program has set, while a fork is under way."""


def in_child(act: Callable[[], None]) -> None:
    """Call a function in every child that is forked from now on, on systems with forks."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=act)


def _await_imports() -> None:
    """Wait until no other thread is in an import that code of skuda began, and let none run until the fork is done."""
    mine, until = threading.get_ident(), time.monotonic() + PATIENCE
    others = sys._current_frames()  # noqa: SLF001  the only way to see other threads
    if len(others) == 1:
        return
    _slices.append(sys.getswitchinterval())
    sys.setswitchinterval(_SLICE)
    try:
        waits = True
        while waits:
            time.sleep(_LOOK)  # begins a new slice, in which no thread runs between the look and the fork
            others = sys._current_frames()  # noqa: SLF001
            del others[mine]
            waits = any(map(_imports, others.values())) and time.monotonic() < until
    except KeyboardInterrupt:
        # Python drops what a hook of a fork raises. It comes again after the fork.
        threading.Timer(0.05, _thread.interrupt_main).start()


def _go_on() -> None:
    if _slices:
        sys.setswitchinterval(_slices[0])
        _slices.clear()


def _imports(frame: FrameType | None) -> bool:
    """Whether a thread, of which this is the innermost frame, is in an import that code of skuda began."""
    inside = False
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            inside = True
        elif inside and str(frame.f_globals.get("__name__")).partition(".")[0] == "skuda":
            return True
        frame = frame.f_back
    return False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_await_imports, after_in_parent=_go_on, after_in_child=_go_on)
