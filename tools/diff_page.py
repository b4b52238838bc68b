"""``skuda diff``: which problems get another kernel, guarantee or speed class than they did."""

from __future__ import annotations

from pathlib import Path

from skuda.tools.lock_diff import KINDS, compare, summary
from skuda.tools.locking import read_lock
from skuda.tools.output import print_json, records, stdout

_FIRST = 3
"""Differences of one kind and op that are told unless all are asked for."""


def run(old: Path, new: Path, *, show_all: bool = False, as_json: bool = False) -> int:
    """Print in what two locks differ.

    Parameters
    ----------
    old, new : Path
        What `skuda lock` has written.
    show_all : bool
        Every difference; else how many of each kind and op there are, with the first ones.
    as_json : bool
        Every difference, as JSON.

    Returns
    -------
    int
        0 where nothing differs, else 1.

    Raises
    ------
    InvalidProblem
        For a file that is no lock.
    """
    found = compare(read_lock("OLD", old), read_lock("NEW", new))
    console = stdout()
    if as_json:
        print_json([{**difference._asdict(), "means": KINDS[difference.kind]} for difference in found])
    elif console.is_terminal:
        for line in summary(found, None if show_all else _FIRST):
            console.print(line, style=None if line.startswith(" ") else "bold", soft_wrap=True)
    else:
        records(found)
    return 1 if found else 0
