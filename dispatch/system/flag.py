"""A flag that C code raises."""

from __future__ import annotations

import ctypes
import sys
import weakref
from functools import cache

_BYTES = 64
"""Enough for a ``sem_t`` of any C library."""


class Flag:
    """A flag that C code raises from any thread, without the interpreter: a semaphore of the C library.

    Its memory is freed when the flag is, but not before it was raised, because it may be raised at any time until then,
    even while the process ends. Raise `OSError` where the C library has no such semaphores. `raiser` and `address` are
    the C function that raises it, and what that function takes.
    """

    __slots__ = ("__weakref__", "address", "raiser")

    def __init__(self) -> None:
        library = _library()
        self.raiser = ctypes.cast(library.sem_post, ctypes.c_void_p)
        self.address = ctypes.c_void_p(library.malloc(ctypes.c_size_t(_BYTES)))
        if not self.address.value or library.sem_init(self.address, 0, 0):
            raise OSError("there are no semaphores")
        weakref.finalize(self, _free, library, self.address).atexit = False

    def up(self) -> None:
        """Raise it."""
        _library().sem_post(self.address)

    def __call__(self) -> bool:
        """Whether it was raised."""
        return _raised(_library(), self.address)


def _raised(library: ctypes.PyDLL, address: ctypes.c_void_p) -> bool:
    value = ctypes.c_int()
    # It is asked and not taken down, so that an interrupt loses no answer.
    library.sem_getvalue(address, ctypes.byref(value))
    return value.value > 0


def _free(library: ctypes.PyDLL, address: ctypes.c_void_p) -> None:
    if _raised(library, address):
        library.free(address)


@cache
def _library() -> ctypes.PyDLL:
    if sys.platform == "win32":
        raise OSError("the C library of Windows has no semaphores")
    library = ctypes.PyDLL(None)
    library.malloc.restype, library.free.restype = ctypes.c_void_p, None
    return library
