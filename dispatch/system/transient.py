"""Recognizes temporary errors. A result that depends on one must not be cached."""

from __future__ import annotations

import errno
import os

_CODES = {errno.EAGAIN, errno.EINTR, errno.EMFILE, errno.ENFILE, errno.ENOMEM}


def is_transient(error: BaseException) -> bool:
    """Whether an error comes from a shortage of memory, stack, files or processes, and so may not happen again."""
    if not isinstance(error, OSError):
        return isinstance(error, MemoryError | RecursionError)
    # ctypes gives the reason only in words.
    return error.errno in _CODES or (error.errno is None and any(os.strerror(code) in str(error) for code in _CODES))
