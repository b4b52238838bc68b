"""What the commands share: a console, tab-separated records, JSON, and how a wrong word is refused."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import NoReturn

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text


def stdout() -> Console:
    """Return a console on standard output; `is_terminal` says whether a person reads it."""
    return Console(highlight=False, markup=False, emoji=False)


def stderr() -> Console:
    """Return a console on standard error."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def records(rows: Iterable[Sequence[object]]) -> None:
    """Print one line per row, fields separated by tabs, nothing cut off; None is an empty field.

    Parameters
    ----------
    rows : iterable of sequence
        Tabs and line breaks inside a field become blanks, so that a line stays a record.
    """
    sys.stdout.writelines("\t".join(_field(value) for value in row) + "\n" for row in rows)


def _field(value: object) -> str:
    return "" if value is None else " ".join(str(value).split())


def print_json(value: object) -> None:
    """Print JSON values, indented."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def plain_table(*headings: str, indent: int = 0) -> Table:
    """Return a table without lines: one blank between columns, headings dim.

    Parameters
    ----------
    *headings : str
        Column headings; none for a table without a heading row.
    indent : int
        Blanks before the first column.
    """
    table = Table(
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        show_header=bool(headings),
        header_style="dim",
        title_justify="left",
    )
    if indent:
        # A column of blanks: the padding of the table above adds one.
        table.add_column("", width=indent - 1)
    for heading in headings:
        # Folded, never cut: half an id is of no use.
        table.add_column(heading, overflow="fold")
    return table


def indented(text: RenderableType, by: int) -> Padding:
    """Indent what is printed, without filling the lines up with blanks."""
    return Padding(text, (0, 0, 0, by), expand=False)


def heading(text: str) -> Text:
    """Return a section's heading."""
    return Text(text, style="bold")


Report = Callable[[int, int, str], None]
"""Takes what is done, how much there is, and what is being done."""


@contextmanager
def progress() -> Iterator[Report | None]:
    """Show a bar on standard error, where a person sees it; gives what to tell about it, else None."""
    console = stderr()
    if not console.is_terminal:
        yield None
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("")

        def report(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield report


def words(values: Iterable[object]) -> str:
    """Join values with commas."""
    return ", ".join(str(value) for value in values)


def count(number: int, noun: str) -> str:
    """Say how many: ``1 kernel``, ``2 kernels``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def split(given: Iterable[str]) -> tuple[str, ...]:
    """Return the values of an option that may be repeated and may hold several, separated by commas."""
    return tuple(dict.fromkeys(part.strip() for text in given for part in text.split(",") if part.strip()))


def refuse(command: str, what: str, had: str, known: Iterable[str], *, kind: str = "", more: str = "") -> NoReturn:
    """Refuse a word that is not known: name the nearest ones, or all where none is near.

    Parameters
    ----------
    command, what : str
        The command, and its argument or option.
    had : str
        The word.
    known : iterable of str
        The words that would do.
    kind : str
        What the words are, where there are too many to list all of them.
    more : str
        Where the full list is.

    Raises
    ------
    InvalidProblem
        Always.
    """
    # Here, so that the doctor can print where pydantic is missing.
    from skuda.registry.errors import InvalidProblem

    known = tuple(known)
    near = nearest(had, known)
    if kind:
        hint = f" (near: {words(near)})" if near else ""
        rule = f"be {kind}{hint}" + (f"; {more}" if more else "")
    else:
        rule = f"be one of {words(known)}"
    raise InvalidProblem(command, what, repr(had), rule)


def nearest(word: str, known: Iterable[str], most: int = 3) -> list[str]:
    """Return the known words that look most like `word`, best first."""
    return get_close_matches(word, tuple(known), n=most, cutoff=0.55)


def folded(sku_id: str, width: int) -> str:
    """Break an id that is wider than `width` behind a dot; anything narrower stays as it is."""
    if len(sku_id) <= width:
        return sku_id
    at = sku_id.rfind(".", 0, width) + 1 or width
    return f"{sku_id[:at]}\n  {folded(sku_id[at:], width - 2)}"


def reflowed(documentation: str, width: int) -> Iterator[Text]:
    """Wrap a docstring to a width: underlined lines become headings, each paragraph below them is filled anew.

    Parameters
    ----------
    documentation : str
        As written; a line that ends a sentence stays the end of a line.
    width : int
        Columns.
    """
    lines = documentation.splitlines()
    sentence: list[str] = []
    indent = ""
    for line, below in zip(lines, (*lines[1:], ""), strict=True):
        if below and not below.strip("-"):
            yield Text(line, style="bold")
            indent = "  "
        elif line.strip("-"):
            sentence.append(line.strip())
        if sentence and (line.endswith(".") or not below):
            said = " ".join(sentence)
            wrapped = textwrap.wrap(
                said, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
            )
            yield from map(Text, wrapped)
            sentence = []
