"""Reads files that somebody else may have put there: never a pipe, a device, or more than a limit."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path, *, follow: bool = True) -> BinaryIO:
    """Open a regular file for reading. Nothing else is opened, so this neither blocks nor has a side effect.

    Raise `OSError` if it cannot be opened, or is not a regular file. `follow` says whether it may be a symbolic link.
    """
    _refuse_others(path.stat(follow_symlinks=follow), path)
    # Another file may have taken its place, so check the descriptor again. A pipe would block without O_NONBLOCK.
    flags = getattr(os, "O_NONBLOCK", 0) | (0 if follow else getattr(os, "O_NOFOLLOW", 0))
    file = open(path, "rb", opener=lambda name, mode: os.open(name, mode | flags))  # noqa: SIM115
    try:
        _refuse_others(os.fstat(file.fileno()), path)
    except BaseException:
        file.close()
        raise
    return file


def _refuse_others(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "no regular file", str(path))


def shared(status: os.stat_result) -> bool:
    """Whether users other than this one and root can change a file or folder. Code in it must then not be run."""
    return hasattr(os, "geteuid") and (status.st_uid not in {os.geteuid(), 0} or bool(status.st_mode & 0o022))
