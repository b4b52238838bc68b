"""Output of the commands: consoles, tables, JSON, progress, and the error for an unknown word."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:  # the conformance suite, which uses this module, also works without rich
    from rich.console import Console, RenderableType
    from rich.padding import Padding
    from rich.table import Table

_NARROWEST, _PIPED = 40, 1000
"""The layout needs this many columns, so a narrower terminal wraps the lines; in a pipe, lines are not folded."""

_LONGEST_LINE = 4000


def new_console(*, stderr: bool = False) -> Console:
    """Return a console on standard output, or on standard error; `is_terminal` is true if a person reads it."""
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    console.width = max(console.width, _NARROWEST if console.is_terminal else _PIPED)
    return console


def tell(text: str, style: str = "yellow") -> None:
    """Print one line on standard error."""
    new_console(stderr=True).print(f"skuda: {one_line(text)}", style=style, soft_wrap=True)


def one_line(text: str) -> str:
    """Return any text as one printable line: escape control characters, and shorten long words."""
    line = " ".join(map(shortened, text.split()))
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return shortened(line, _LONGEST_LINE, _LONGEST_LINE)


def shortened(text: str, longest: int = 300, shown: int = 80) -> str:
    """Return a text, or if it is longer than `longest`, its first `shown` characters and its length."""
    return text if len(text) <= longest else f"{text[:shown]}... ({len(text)} characters)"


def present(value: object, person: Callable[[Console], None], *, as_json: bool) -> None:
    """Print an answer: `value` as JSON, or what `person` prints."""
    if as_json:
        sys.stdout.write(json.dumps(value, indent=2) + "\n")
    else:
        person(new_console())


def plain_table(*headings: str, indent: int = 0, numbers: int | None = None) -> Table:
    """Return a table without lines: one blank between columns, dim headings.

    The first column is preceded by `indent` blanks. Columns from the index `numbers` on are aligned right.
    """
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=bool(headings), header_style="dim")
    if indent:
        # The padding adds one more blank.
        table.add_column("", width=indent - 1)
    for at, heading in enumerate(headings):
        # Long text is folded and never cut, because half an id is useless.
        table.add_column(heading, overflow="fold", justify="left" if numbers is None or at < numbers else "right")
    return table


def table_of(rows: Iterable[Sequence[object]], *headings: str, numbers: int | None = None) -> Table:
    """Return rows as a `plain_table`; None is an empty cell."""
    from rich.text import Text

    table = plain_table(*headings, numbers=numbers)
    for row in rows:
        table.add_row(*("" if cell is None else cell if isinstance(cell, Text) else str(cell) for cell in row))
    return table


def facts(rows: Iterable[tuple[str, RenderableType]], width: int | None = None) -> Table:
    """Return a table of names, dim and `width` columns wide, and values."""
    table = plain_table(indent=2)
    table.add_column(style="dim", width=width, overflow="fold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row("", name, value)
    return table


def indented(text: RenderableType, by: int) -> Padding:
    """Indent text without blanks at the ends of its lines."""
    from rich.padding import Padding

    return Padding(text, (0, 0, 0, by), expand=False)


Report = Callable[[int, int, str], None]
"""Takes the number of finished steps, the number of all steps, and the name of the current step."""


@contextmanager
def progress() -> Iterator[Report | None]:
    """Show a progress bar on standard error; yield the function that updates it, or None without a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = new_console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("")
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


def words(values: Iterable[object]) -> str:
    """Join values with commas."""
    return ", ".join(map(str, values))


def count(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 kernel``, ``2 kernels``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def split(given: Iterable[str] | None) -> tuple[str, ...]:
    """Return the values of an option that may be repeated and may hold several values, separated by commas."""
    return tuple(dict.fromkeys(part.strip() for text in given or () for part in text.split(",") if part.strip()))


OP_WORDS = {"kind": "a registered op", "more": "`skuda list` names all"}
"""Arguments of `refuse` for an unknown op."""


def chosen(
    command: str, option: str, given: Iterable[str] | None, known: Iterable[str], *, kind: str = "", more: str = ""
) -> tuple[str, ...]:
    """Return the values of an option as `split` does; `refuse` an unknown one."""
    values, known = split(given), tuple(known)
    for value in values:
        one_of(command, option, value, known, kind=kind, more=more)
    return values


def one_of(command: str, what: str, had: str | None, known: Iterable[str], *, kind: str = "", more: str = "") -> None:
    """Raise as `refuse` does for a word that is not known. None stands for no word."""
    if had is not None and had not in (known := tuple(known)):
        refuse(command, what, had, known, kind=kind, more=more)


def refuse(command: str, what: str, had: str, known: Iterable[str], *, kind: str = "", more: str = "") -> NoReturn:
    """Raise `InvalidProblem` for an unknown word, with the known words nearest to it.

    `command` and `what` are the command and its argument or option. The error lists all known words, unless `kind` says
    what they are; `more` is where the list is.
    """
    # The doctor prints without pydantic, so this is not imported with the module.
    from skuda.registry.errors import InvalidProblem

    known = tuple(known)
    near = nearest(had, known)
    rule = f"be {kind or f'one of {words(known)}'}" + (f" (near: {words(near)})" if near else "")
    raise InvalidProblem(command, what, repr(had), rule + (f"; {more}" if more else ""))


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """Return the known words that are most similar to `word`, best first; ``s8`` for ``int8``, ``f16`` for ``half``."""
    known = tuple(known)
    word = {"half": "f16", "float": "f32", "double": "f64"}.get(word.lower(), word)
    # int8 is s8, uint4 is u4, float16 and fp16 are f16, bfloat16 is bf16.
    element = re.sub(r"^(?:i|int)(?=\d)", "s", word.lower().replace("uint", "u"))
    element = re.sub(r"(?:float|fp)(?=\d)", "f", element)
    return [element] if element in known else get_close_matches(word, known, cutoff=0.55)


def folded(sku_id: str, width: int) -> str:
    """Break an id that is wider than `width` after a dot."""
    if len(sku_id) <= width:
        return sku_id
    at = sku_id.rfind(".", 0, width) + 1 or width
    return f"{sku_id[:at]}\n  {folded(sku_id[at:], max(width - 2, _NARROWEST // 2))}"
