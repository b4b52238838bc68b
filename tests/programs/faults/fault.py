"""`Fault`: one wrong edit that a test must notice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Fault(NamedTuple):
    """One wrong edit of one file.

    Attributes
    ----------
    name : str
        Names the fault on the command line and in the report.
    path : str
        The file to edit, relative to the repository.
    old : str
        The text to replace. It must stand in the file exactly once.
    new : str
        The wrong text.
    tests : sequence of str
        What pytest runs: files or test ids. At least one of their tests must fail.
    """

    name: str
    path: str
    old: str
    new: str
    tests: Sequence[str]


def listed(edits: Mapping[str, Mapping[str, tuple[str, str, Sequence[str]]]]) -> list[Fault]:
    """Return faults that are given by path and name, as (old, new, tests)."""
    return [Fault(name, path, *edit) for path, named in edits.items() for name, edit in named.items()]
