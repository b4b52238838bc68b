"""Replaces files atomically: a reader sees either the old content or all of the new content."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

_KINDS = {"d": "a folder", "c": "a device", "b": "a device", "p": "a named pipe", "s": "a socket"}
"""Kinds that are not replaced, by the first letter of `stat.filemode`."""


def check_place(path: Path) -> None:
    """Check that `replacing` can write the path, and raise its `OSError` if not. Nothing is left behind.

    An existing file must be regular and writable. A new file needs a writable folder.
    """
    with _about(path):
        fresh = _beside(_target(path))
        try:
            _make(fresh)
        finally:
            fresh.unlink(missing_ok=True)


def check_folder(path: Path) -> None:
    """Raise an `OSError` if files cannot be made in a folder, or in the folder that will contain it."""
    with _about(path):
        missing = [folder for folder in (path, *path.absolute().parents) if not os.path.lexists(folder)]
        check_place(missing[-1] if missing else _beside(path / "any"))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield an empty file beside a path. It replaces the path at the end of the block, unless the block fails.

    A link stays, and its target is replaced or made. The new file gets the permissions and, if allowed, the owner of
    the old file. Without an old file, it gets those of any new file. Raise `OSError` if the file cannot be written, or
    is a folder, a device, a pipe or a socket. The error names the path.
    """
    with _about(path):
        target = _target(path)
        fresh = _beside(target)
        try:
            _make(fresh)
            yield fresh
            _finish(fresh, target)
        finally:
            fresh.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a text file with `replacing`. Characters that UTF-8 cannot encode become escapes."""
    with replacing(path) as fresh:
        fresh.write_text(text, encoding="utf-8", errors="backslashreplace")


@contextlib.contextmanager
def _about(path: Path) -> Iterator[None]:
    """Make errors name the path instead of the temporary file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno or errno.EIO, error.strerror or str(error), str(path)) from error


def _target(path: Path) -> Path:
    """Return the regular file of a path, whether or not it exists."""
    if str(path) in (".", "-"):
        raise OSError(errno.EINVAL, "it names no file", path)
    try:
        status = path.stat()
    except FileNotFoundError:
        status = None
    except ValueError as error:  # a NUL, or half of a surrogate pair
        raise OSError(errno.EINVAL, "it is no name of a file", path) from error
    try:
        target = Path(os.path.realpath(path))
    except FileNotFoundError as error:
        raise OSError(errno.ENOENT, "the working directory has been deleted", path) from error
    if status is None:
        if not target.parent.is_dir():
            raise OSError(errno.ENOENT, "there is no such folder", path)
    elif not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, f"it is {_KINDS.get(stat.filemode(status.st_mode)[0])}, not a file", path)
    elif any(os.path.samestat(status, stream) for stream in _streams()):
        raise OSError(errno.EINVAL, "standard output or standard error goes there", path)
    elif not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    return target


def _streams() -> Iterator[os.stat_result]:
    for number in (1, 2):
        with contextlib.suppress(OSError):
            yield os.fstat(number)


def _beside(target: Path) -> Path:
    # Not derived from the target's name, which may have the maximum length.
    return target.with_name(f".{secrets.token_hex(8)}.new")


def _make(fresh: Path) -> None:
    """Make a new file with the permissions of the umask."""
    os.close(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))


def _finish(fresh: Path, target: Path) -> None:
    """Replace the old file by the complete one."""
    with fresh.open("r+b") as file:
        os.fsync(file.fileno())
    with contextlib.suppress(FileNotFoundError):
        old = target.stat()
        with contextlib.suppress(PermissionError, AttributeError):  # not every system has owners
            os.chown(fresh, old.st_uid, old.st_gid)
        fresh.chmod(stat.S_IMODE(old.st_mode))
    fresh.replace(target)
