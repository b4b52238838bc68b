"""The parts of a report as data, and their two views: a terminal and Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from skuda.tools.output import facts, heading, indented, plain_table

_ANY = 10_000
"""A width at which no table is folded."""


class Table(NamedTuple):
    """A table; the style of a cell that is a `Text` shows in a terminal.

    The first `words` columns hold words, the others numbers. A narrow terminal leaves out some of the last `extra`
    columns, and names them instead.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    title: str = ""
    words: int = 1
    extra: int = 0


Facts = dict[str, str]
"""Names and values; empty values are not shown."""
Parts = tuple[Table | Facts | Text | str, ...]
"""Parts of a report, one below the other; a text is a paragraph."""
Sections = Mapping[str, Parts]
"""The parts of a report by the names that ``--markdown`` takes."""


def markdown(parts: Iterable[Table | Facts | Text | str]) -> str:
    """Return parts as Markdown; equal parts give equal text."""
    made = []
    for part in parts:
        if isinstance(part, Table):
            title = f"### {part.title}\n\n" if part.title else ""
            made += [title + markdown_table(part.columns, part.rows)] if part.rows else []
        elif isinstance(part, dict):
            values = {
                name: f"`{value}`" if name == "command" else escaped(value) for name, value in part.items() if value
            }
            made.append("".join(f"- {escaped(name)}: {value}\n" for name, value in values.items()))
        else:
            made.append(f"{escaped(str(part))}\n")
    return "\n".join(made)


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table; line breaks and bars inside a cell are escaped."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join("| " + " | ".join(_cell(value) for value in line) + " |\n" for line in lines)


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")


def escaped(text: str) -> str:
    """Escape the characters that Markdown reads as emphasis."""
    return text.replace("*", "\\*").replace("_", "\\_")


def show(console: Console, parts: Iterable[Table | Facts | Text | str]) -> None:
    """Print parts for a person."""
    for part in parts:
        if isinstance(part, Table):
            if part.title:
                console.print(heading(part.title))
            _show_table(console, part)
        elif isinstance(part, dict):
            console.print(facts((name, Text(value)) for name, value in part.items() if value))
        else:
            console.print(indented(part if isinstance(part, Text) else Text(part, style="dim"), 2))


def _show_table(console: Console, table: Table) -> None:
    """Print a table without those of its extra columns for which the console is too narrow."""
    for left_out in range(table.extra + 1):
        shown = len(table.columns) - left_out
        made = _rich(table, shown)
        if Measurement.get(console, console.options.update_width(_ANY), made).maximum <= console.width:
            break
    if table.rows:
        console.print(made)
    if left_out:
        console.print(
            indented(Text(f"a wider terminal also shows: {', '.join(table.columns[shown:])}", style="dim"), 2)
        )


def _rich(table: Table, shown: int) -> RichTable:
    # The headings of numbers are folded, so that their columns are as narrow as the numbers; no number is broken.
    names = [name if at < table.words else name.replace(" ", "\n") for at, name in enumerate(table.columns[:shown])]
    made = plain_table(*names, indent=2, numbers=table.words)
    for column in made.columns[1 + table.words :]:
        column.no_wrap = True
    for row in table.rows:
        made.add_row("", *(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row[:shown]))
    return made
