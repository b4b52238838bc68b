"""Files that options name: where they go, checked before the work, and what is read from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from skuda.dispatch.compile.files import check_folder, check_place, replacing, write_whole
from skuda.registry.errors import InvalidProblem

__all__ = ["check", "read_json", "read_text", "replacing", "write_whole"]

_LARGEST = 64 << 20


def check(command: str, option: str, path: Path, *, folder: bool = False) -> None:
    """Refuse a file, or a `folder` that may be new, that cannot be written to, before any slow work starts."""
    try:
        (check_folder if folder else check_place)(path)
    except OSError as error:
        rule = f"be a {'place' if folder else 'file in a folder that exists,'} that can be written ({error.strerror})"
        raise InvalidProblem(command, option, str(path), rule) from error


def read_text(path: Path) -> str:
    """Read a text of at most 64 MiB.

    Raises
    ------
    OSError
        If it cannot be read.
    ValueError
        If it is longer, or not UTF-8, or the name is not one of a file.
    """
    with path.open("rb") as file:
        content = file.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise ValueError(f"it has more than {_LARGEST >> 20} MiB")
    return content.decode()


def read_json(text: str) -> Any:
    """Parse JSON; raise `ValueError` for any other text, and for one that is nested too deep."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
