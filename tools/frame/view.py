"""The parts of a report as data, and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from skuda.registry.text import printable


class Table(NamedTuple):
    """A table with a title, or none."""

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    title: str = ""


Facts = dict[str, str]
"""Names and values; empty values are not shown."""
Parts = tuple[Table | Facts | str, ...]
"""Parts of a report, one below the other; a text is a paragraph."""
Sections = Mapping[str, Parts]
"""The parts of a report by the names that ``--markdown`` takes."""


def markdown(parts: Iterable[Table | Facts | str], *, padded: bool = False) -> str:
    """Return parts as Markdown; equal parts give equal text. `padded` tables have columns of equal width."""
    made = []
    for part in parts:
        if isinstance(part, Table):
            title = f"### {part.title}\n\n" if part.title else ""
            made += [title + markdown_table(part.columns, part.rows, padded=padded)] if part.rows else []
        elif isinstance(part, dict):
            values = {
                name: f"`{value}`" if name == "command" else escaped(value) for name, value in part.items() if value
            }
            made.append("".join(f"- {escaped(name)}: {value}\n" for name, value in values.items()))
        else:
            made.append(f"{escaped(part)}\n")
    # A text in a file must not control a terminal.
    return "\n".join(map(printable, "\n".join(made).split("\n")))


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[object]], *, padded: bool = False) -> str:
    """Return a Markdown table; line breaks and bars inside a cell are escaped."""
    lines = [[_cell(value) for value in line] for line in (headings, ["---"] * len(headings), *rows)]
    widths = [max(map(len, column)) if padded else 0 for column in zip(*lines, strict=True)]
    return "".join("| " + " | ".join(map(str.ljust, line, widths)) + " |\n" for line in lines)


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")


def escaped(text: str) -> str:
    """Escape the characters that Markdown reads as emphasis."""
    return text.replace("*", "\\*").replace("_", "\\_")
