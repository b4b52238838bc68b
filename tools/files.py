"""Files that options name: whether they can be written, checked before the work, and their text, read within bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic_core import from_json

from skuda.dispatch.system.files import open_regular
from skuda.dispatch.system.writing import check_place, replacing, write_whole
from skuda.registry.errors import InvalidProblem

__all__ = ["check", "read_json", "read_text", "replacing", "write_whole"]

_LARGEST = 64 << 20


def check(command: str, option: str, path: Path) -> None:
    """Refuse a file that cannot be written, before any slow work starts."""
    try:
        check_place(path)
    except OSError as error:
        rule = f"be a file in a folder that exists, that can be written ({error.strerror})"
        raise InvalidProblem(command, option, str(path), rule) from error


def read_text(path: Path) -> str:
    """Read a text file of at most 64 MiB; a pipe, a device or a folder is not read.

    Raises
    ------
    OSError
        If it cannot be read, or is not a regular file.
    ValueError
        If it is longer, or not UTF-8, or the path cannot name a file.
    """
    with open_regular(path) as file:
        content = file.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise ValueError(f"it has more than {_LARGEST >> 20} MiB")
    return content.decode()


def read_json(text: str) -> Any:
    """Parse JSON; raise `ValueError` for any other text, and for one of more than 200 levels."""
    return from_json(text)
