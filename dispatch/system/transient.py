"""Errors of a moment: an answer that rests on one must not be kept."""

from __future__ import annotations

import errno
import os

_CODES = {errno.EAGAIN, errno.EINTR, errno.EMFILE, errno.ENFILE, errno.ENOMEM}


def is_transient(error: BaseException) -> bool:
    """Whether an error comes from a shortage of memory, stack, files or processes, so that it may not come again."""
    if not isinstance(error, OSError):
        return isinstance(error, MemoryError | RecursionError)
    # ctypes says in words alone why a library cannot be loaded.
    return error.errno in _CODES or (error.errno is None and any(os.strerror(code) in str(error) for code in _CODES))
