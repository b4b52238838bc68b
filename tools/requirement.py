"""What a record has to show, and whether it does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from rich.console import Console
from rich.text import Text

from skuda.tools.output import heading, indented, plain_table

HEADINGS = ("requirement", "required", "measured", "verdict")
_STYLES = {"met": "green", "missed": "red", "not judged": "dim"}


class Requirement(NamedTuple):
    """One requirement.

    Attributes
    ----------
    what, required, measured : str
        What is measured, its bound, and the value in this record; `measured` says why if there is none.
    met : bool or None
        Whether the value is within the bound; None if the record does not decide that.
    """

    what: str
    required: str
    measured: str
    met: bool | None

    @property
    def verdict(self) -> Literal["met", "missed", "not judged"]:
        """The last column of a table."""
        return "not judged" if self.met is None else "met" if self.met else "missed"

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """The columns of a table; see `HEADINGS`."""
        return (self.what, self.required, self.measured, self.verdict)


class Judged(NamedTuple):
    """The requirements on a record.

    Attributes
    ----------
    requirements : tuple of Requirement
        In the order of their rows.
    unlike : str
        How the run differs from the one that they are for; its figures are then not judged. Empty if it does not.
    """

    requirements: tuple[Requirement, ...]
    unlike: str

    @property
    def note(self) -> str:
        """A sentence about figures that are not judged; empty if all can be."""
        return f"figures are not judged: {self.unlike}" if self.unlike else ""


def print_judged(console: Console, judged: Judged) -> None:
    """Print requirements for a person."""
    console.print(heading("requirements"))
    table = plain_table(*HEADINGS, indent=2)
    for one in judged.requirements:
        *cells, verdict = one.cells
        table.add_row("", *cells, Text(verdict, style=_STYLES[one.verdict]))
    console.print(table)
    if judged.note:
        console.print(indented(Text(judged.note, style="yellow"), 2))


def differences(checks: Iterable[tuple[bool, str]]) -> str:
    """Return what does not hold, of pairs of whether and what else is the case."""
    return ", ".join(text for holds, text in checks if not holds)
