"""Makes foreign text safe to print. Such a text can have any length and any character."""

from __future__ import annotations

import os
from pathlib import Path
from reprlib import Repr

MOST = 1000
"""Characters of a line."""
_MOST_LINES = 1000
_repr = Repr()
_repr.maxlevel, _repr.maxdict, _repr.maxset = 3, 8, 8
_repr.maxlist = _repr.maxtuple = 12
_repr.maxstring = _repr.maxlong = _repr.maxother = 80


def one_line(text: object, most: int = MOST) -> str:
    """Return a text as one `printable` line of at most `most` characters.

    A run of white space becomes one blank. A shortened text ends with its full length. For a value that is not a string
    its type is shown.
    """
    if not isinstance(text, str):
        return f"(a {type(text).__name__})"
    # Read only the beginning, since a text can have any length, and with str's own method: a subclass may override it.
    start = str.__getitem__(text, slice(4 * most))
    line = printable(" ".join(start.split()))
    if len(line) <= most and len(start) == str.__len__(text):
        return line
    rest = f"... ({str.__len__(text)} characters)"
    return line[: most - len(rest)] + rest


def lines(text: str) -> str:
    """Return a text as several `printable` lines. Long lines and surplus lines are cut."""
    return "\n".join(printable(line[:MOST].expandtabs()) for line in text.splitlines()[:_MOST_LINES])


def printable(text: str) -> str:
    """Return a text with ``?`` in place of control and format characters, which terminals interpret, and surrogates."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def path_of(given: object) -> Path | None:
    """Return a str or a path as a `Path`, or None if no file can have such a path."""
    if not isinstance(given, (str, os.PathLike)):
        return None
    try:
        path = Path(given)
        return path if path.name and b"\0" not in os.fsencode(path) else None
    except (TypeError, ValueError):  # a path of bytes, a lone surrogate
        return None


def shown(value: object) -> str:
    """Return a value as errors show it: short, on one line, even if its ``__repr__`` fails."""
    try:
        return one_line(_repr.repr(value))
    except Exception:  # noqa: BLE001  a `repr` of somebody else, or an integer of too many digits
        return f"a {type(value).__name__}"
