"""Errors of a moment: an answer that rests on one must not be kept."""

from __future__ import annotations

import errno

_CODES = {errno.EAGAIN, errno.EINTR, errno.EMFILE, errno.ENFILE, errno.ENOMEM}


def is_transient(error: BaseException | None) -> bool:
    """Whether an error comes from a shortage of memory, stack, files or processes, so that it may not come again."""
    return isinstance(error, MemoryError | RecursionError) or (isinstance(error, OSError) and error.errno in _CODES)
