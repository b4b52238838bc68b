"""Output shared by the commands: consoles, tab-separated records, JSON, and the error for an unknown word."""

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

_NARROWEST = 40
"""The fewest columns that output is laid out for; a narrower terminal wraps it."""

_LONGEST_LINE = 4000


def stdout() -> Console:
    """Return a console on standard output; `is_terminal` is true if a person reads it."""
    return _wide_enough(Console(highlight=False, markup=False, emoji=False))


def stderr() -> Console:
    """Return a console on standard error."""
    return _wide_enough(Console(stderr=True, highlight=False, markup=False, emoji=False))


def _wide_enough(console: Console) -> Console:
    console.width = max(console.width, _NARROWEST)
    return console


def tell(text: str, style: str = "yellow") -> None:
    """Print one line about the run on standard error."""
    stderr().print(f"skuda: {one_line(text)}", style=style, soft_wrap=True)


def one_line(text: str) -> str:
    """Return text as one line, whatever is in it: long words are shortened, and what is not printable is escaped."""
    line = " ".join(map(shortened, text.split()))
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return shortened(line, _LONGEST_LINE, _LONGEST_LINE)


def shortened(text: str, longest: int = 300, shown: int = 80) -> str:
    """Return text that is longer than `longest` as its first `shown` characters and its length."""
    return text if len(text) <= longest else f"{text[:shown]}... ({len(text)} characters)"


def records(rows: Iterable[Sequence[object]]) -> None:
    """Print one line per row with fields separated by tabs; None is an empty field, and nothing is cut off.

    Tabs and line breaks inside a field become blanks, so that each record stays on one line.
    """
    sys.stdout.writelines("\t".join(_field(value) for value in row) + "\n" for row in rows)


def _field(value: object) -> str:
    return "" if value is None else " ".join(str(value).split())


def print_json(value: object) -> None:
    """Print JSON values, indented."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def plain_table(*headings: str, indent: int = 0, numbers: int | None = None) -> Table:
    """Return a table without lines: one blank between columns, headings dim.

    It is indented by `indent` blanks. Columns hold numbers from the heading `numbers` on.
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
        # This column holds blanks; the table's padding adds one more.
        table.add_column("", width=indent - 1)
    for at, heading in enumerate(headings):
        # Long text is folded and never cut, because half an id is useless.
        table.add_column(heading, overflow="fold", justify="left" if numbers is None or at < numbers else "right")
    return table


def facts(rows: Iterable[tuple[str, RenderableType]], width: int | None = None) -> Table:
    """Return a table of names, dim and `width` columns wide, and values."""
    table = plain_table(indent=2)
    table.add_column(style="dim", width=width)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row("", name, value)
    return table


def indented(text: RenderableType, by: int) -> Padding:
    """Indent text for printing, without filling its lines with blanks."""
    return Padding(text, (0, 0, 0, by), expand=False)


def heading(text: str) -> Text:
    """Return a section's heading."""
    return Text(text, style="bold")


SavePage = Callable[..., None]
"""Writes the report page of a command's ``--html``: `skuda.tools.report.page.save` without its first parameter."""

Report = Callable[[int, int, str], None]
"""Takes the number of finished steps, the number of all steps, and the current step's name."""


@contextmanager
def progress() -> Iterator[Report | None]:
    """Show a bar on standard error if it is a terminal; yield the function that updates it, else None."""
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
    """Return a number with its noun: ``1 kernel``, ``2 kernels``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def split(given: Iterable[str]) -> tuple[str, ...]:
    """Return the values of an option that may be repeated and may hold several values, separated by commas."""
    return tuple(dict.fromkeys(part.strip() for text in given for part in text.split(",") if part.strip()))


OP_WORDS = {"kind": "a registered op", "more": "`skuda list` names all"}
"""Arguments of `refuse` for an unknown op."""


def chosen(
    command: str, option: str, given: Iterable[str], known: Iterable[str], *, kind: str = "", more: str = ""
) -> tuple[str, ...]:
    """Return the values of an option as `split` does, all of them known; see `refuse`."""
    values, known = split(given), tuple(known)
    for value in values:
        if value not in known:
            refuse(command, option, value, known, kind=kind, more=more)
    return values


def refuse(command: str, what: str, had: str, known: Iterable[str], *, kind: str = "", more: str = "") -> NoReturn:
    """Raise `InvalidProblem` for an unknown word: name the nearest known ones, or all of them without a `kind`.

    `what` is the command's argument or option, `had` the word, and `known` the accepted words. If there are too many to
    list, `kind` describes them and `more` says where the full list is.
    """
    # Imported here, so that the doctor can print without pydantic.
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
    """Return the known words that are most similar to `word`, best first."""
    return get_close_matches(word, tuple(known), n=most, cutoff=0.55)


def folded(sku_id: str, width: int) -> str:
    """Break an id that is wider than `width` after a dot."""
    if len(sku_id) <= width:
        return sku_id
    at = sku_id.rfind(".", 0, width) + 1 or width
    return f"{sku_id[:at]}\n  {folded(sku_id[at:], max(width - 2, _NARROWEST // 2))}"


def reflowed(documentation: str, width: int) -> Iterator[Text]:
    """Wrap a docstring to a width: underlined lines become headings, and each paragraph below them is filled again.

    A line that ends a sentence stays the end of a line.
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
            text = " ".join(sentence)
            filled = textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
            yield from map(Text, filled)
            sentence = []
