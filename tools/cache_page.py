"""``skuda cache``: what is in the cubin cache, whether it is whole, and how it gets smaller."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from skuda.dispatch.cubin_cache import CubinCache, Entry, outdated, remove
from skuda.registry.errors import InvalidProblem
from skuda.tools.output import count, folded, plain_table, print_json, records, stderr, stdout

_SIZES = {"": 1, "b": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("kmgt", 1)
    for ending, base in (("ib", 1024), ("b", 1000))
}
_AGES = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)
_OTHER_COLUMNS = 45
_UNFINISHED = 86400
"""Seconds after which nobody is still writing a file: the longest compilation takes half an hour."""


def show(*, as_json: bool = False) -> int:
    """Print every entry; piped, a record of SKU, architecture, compiler, bytes, seconds of age and trouble.

    Parameters
    ----------
    as_json : bool
        JSON instead.

    Returns
    -------
    int
        0; 1 where the cache cannot be read.
    """
    return _list(CubinCache(), as_json=as_json)


def verify(*, as_json: bool = False) -> int:
    """Compare the checksum and the place of every entry, and print those that are wrong.

    Parameters
    ----------
    as_json : bool
        JSON instead.

    Returns
    -------
    int
        0; 1 where an entry is wrong, or the cache cannot be read.
    """
    return _list(CubinCache(), as_json=as_json, only_wrong=True)


def gc(*, max_size: str | None, older_than: str | None) -> int:
    """Remove entries that are too old, then the oldest until the rest fits.

    Parameters
    ----------
    max_size : str or None
        What may stay, such as ``1GiB``.
    older_than : str or None
        The age from which entries go, such as ``30d``.

    Returns
    -------
    int
        0; 1 where something cannot be read or removed.

    Raises
    ------
    InvalidProblem
        For an amount that cannot be read, or where neither is given.
    """
    if max_size is None and older_than is None:
        raise InvalidProblem(
            "cache gc", "--max-size or --older-than", "neither", "be given; `skuda cache clear` takes all"
        )
    size = None if max_size is None else int(amount("--max-size", max_size, _SIZES, "1GiB"))
    age = None if older_than is None else amount("--older-than", older_than, _AGES, "30d")
    cache = CubinCache()
    entries = _survey(cache)
    if not entries:
        return 0 if entries is not None else 1
    now = time.time()
    going = outdated(entries, now, max_size=size, max_age=age)
    return _remove(cache, entries, going, cache.leftovers(now - _UNFINISHED))


def clear(*, yes: bool = False) -> int:
    """Remove every entry.

    Parameters
    ----------
    yes : bool
        Without asking.

    Returns
    -------
    int
        0; 1 where something cannot be read or removed, or the answer was no.

    Raises
    ------
    InvalidProblem
        Where nobody can be asked.
    """
    cache = CubinCache()
    entries = _survey(cache)
    if entries is None:
        return 1
    leftovers = cache.leftovers()
    if not entries and not leftovers:
        return 0
    if not yes:
        if not sys.stdin.isatty():
            raise InvalidProblem("cache clear", "--yes", "nothing", "be given where nobody can be asked")
        import typer

        if not typer.confirm(f"Remove {_total(entries)} from {cache.folder}?"):
            return 1
    return _remove(cache, entries, entries, leftovers)


def amount(option: str, text: str, units: dict[str, int], example: str) -> float:
    """Return an amount with a unit in the smallest one.

    Raises
    ------
    InvalidProblem
        For anything else than a number and one of the units.
    """
    found = _AMOUNT.fullmatch(text.strip())
    if found is None or found[2].lower() not in units:
        names = ", ".join(filter(None, units))
        raise InvalidProblem(
            "cache gc", option, repr(text), f"be a number and a unit such as {example}; units: {names}"
        )
    return float(found[1]) * units[found[2].lower()]


def size_words(size: int) -> str:
    """Say how many bytes: ``412 B``, ``1.5 KiB``."""
    for power, unit in reversed(list(enumerate(("B", "KiB", "MiB", "GiB", "TiB")))):
        if size >= 1024**power and power:
            return f"{size / 1024**power:.1f} {unit}"
    return f"{size} B"


def age_words(seconds: float) -> str:
    """Say how long ago in the largest unit that is not a fraction: ``3d``."""
    seconds = max(seconds, 0)
    unit, length = next(((u, n) for u, n in _AGES.items() if n <= seconds < 100 * n), ("w", _AGES["w"]))
    return "0s" if seconds < 1 else f"{int(seconds // length)}{unit}"


def _survey(cache: CubinCache) -> list[Entry] | None:
    """Return the entries; none where there is no cache yet, and None where it cannot be read. Tells both."""
    try:
        entries = cache.survey()
    except FileNotFoundError:
        _tell(
            f"there is no cache in {cache.folder}: nothing was compiled there yet; SKUDA_CACHE_DIR names another place"
        )
        return []
    except OSError as error:
        _tell(f"the cache {cache.folder} cannot be read: {error.strerror or error}")
        return None
    trouble = cache.distrust()
    if trouble:
        _tell(trouble)
    if not entries:
        _tell(f"the cache {cache.folder} is empty")
    return entries


def _tell(line: str) -> None:
    stderr().print(f"skuda: {line}", style="yellow", soft_wrap=True)


def _list(cache: CubinCache, *, as_json: bool, only_wrong: bool = False) -> int:
    entries = _survey(cache)
    if entries is None:
        return 1
    wrong = [entry for entry in entries if entry.trouble]
    shown, now = wrong if only_wrong else entries, time.time()
    if as_json:
        print_json({"folder": str(cache.folder), "entries": [_as_json(entry, now) for entry in shown]})
    elif not stdout().is_terminal:
        records(tuple(_as_json(entry, now).values()) for entry in shown)
    elif entries:
        _print(cache, entries, shown, now)
    return 1 if only_wrong and wrong else 0


def _as_json(entry: Entry, now: float) -> dict[str, Any]:
    return {
        "sku": entry.facts.get("sku"),
        "arch": entry.facts.get("arch"),
        "compiler": entry.facts.get("compiler"),
        "size": entry.size,
        "age": int(max(now - entry.written, 0)),
        "trouble": entry.trouble,
        "path": str(entry.path),
    }


def _print(cache: CubinCache, entries: Sequence[Entry], shown: Sequence[Entry], now: float) -> None:
    console = stdout()
    table = plain_table("kernel", "arch", "compiler", "size", "age")
    for column in table.columns[3:]:
        column.justify, column.no_wrap = "right", True
    for entry in shown:
        name, facts = entry.facts.get("sku") or entry.path.relative_to(cache.folder), entry.facts
        # The language standard is the same for all.
        compiler = str(facts.get("compiler", "")).partition(" -std")[0]
        table.add_row(
            Text(folded(str(name), max(console.width - _OTHER_COLUMNS, 24)), style="cyan"),
            facts.get("arch", ""),
            compiler,
            size_words(entry.size),
            age_words(now - entry.written),
        )
        if entry.trouble:
            table.add_row(Text(f"  not used: {entry.trouble}", style="bold red"))
    if shown:
        console.print(table)
        console.print()
    wrong = sum(bool(entry.trouble) for entry in entries)
    console.print(f"{_total(entries)}, {f'{wrong} wrong' if wrong else 'all whole'}.")
    console.print(f"in {cache.folder}", style="dim", soft_wrap=True)


def _total(entries: Sequence[Entry]) -> str:
    return f"{count(len(entries), 'cubin')}, {size_words(sum(entry.size for entry in entries))}"


def _remove(cache: CubinCache, entries: Sequence[Entry], going: Sequence[Entry], leftovers: Sequence[Path]) -> int:
    troubles = remove([*(entry.path for entry in going), *leftovers])
    gone = [entry for entry in going if not entry.path.exists()]
    paths = {entry.path for entry in gone}
    left = [entry for entry in entries if entry.path not in paths]
    stdout().print(f"removed {_total(gone)} from {cache.folder}; {_total(left)} left", soft_wrap=True)
    for trouble in troubles:
        _tell(trouble)
    return 1 if troubles else 0
