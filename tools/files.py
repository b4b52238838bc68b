"""Files that options name: where they go, checked before the work, and what is read from them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skuda.dispatch.system.writing import check_folder, check_place, replacing, write_whole
from skuda.registry.errors import InvalidProblem

__all__ = ["check", "check_all", "read_json", "read_text", "replacing", "write_whole"]

_LARGEST = 64 << 20


def check(command: str, option: str, path: Path, *, folder: bool = False) -> None:
    """Refuse a file, or a `folder` that may be new, that cannot be written to, before any slow work starts."""
    try:
        (check_folder if folder else check_place)(path)
    except OSError as error:
        rule = f"be a {'place' if folder else 'file in a folder that exists,'} that can be written ({error.strerror})"
        raise InvalidProblem(command, option, str(path), rule) from error


def check_all(command: str, given: Mapping[str, Path]) -> None:
    """Refuse the files of several options as `check` does, and one file for two of them."""
    seen: dict[str, str] = {}
    for option, path in given.items():
        check(command, option, path)
        first = seen.setdefault(os.path.realpath(path), option)
        if first != option:
            raise InvalidProblem(command, option, str(path), f"be another file than that of {first}")


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
