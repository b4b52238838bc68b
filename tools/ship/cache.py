"""``skuda cache``: list, verify and shrink the cubin cache."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from skuda.dispatch.compile.cache import CubinCache, Entry, outdated, remove
from skuda.registry.errors import InvalidProblem
from skuda.registry.text import printable
from skuda.tools.output import count, folded, plain_table, print_json, records, stdout, tell

_SIZES = {"": 1, "b": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("kmgt", 1)
    for ending, base in (("ib", 1024), ("b", 1000))
}
_AGES = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_AMOUNT = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*([a-z]*)", re.IGNORECASE)
_OTHER_COLUMNS = 45
_UNFINISHED = 86400
"""Seconds after which a temporary file is abandoned: the longest compilation takes half an hour."""


def show(*, as_json: bool = False, only_wrong: bool = False) -> int:
    """Run ``skuda cache ls``: print the entries, or only those whose checksum or place is wrong.

    Return the exit status: 0; 1 if the cache cannot be read, or if `only_wrong` finds an entry.
    """
    cache = CubinCache()
    entries = _survey(cache)
    if entries is None:
        return 1
    shown = [entry for entry in entries if entry.trouble] if only_wrong else entries
    now = time.time()
    if as_json:
        print_json({"folder": str(cache.folder), "entries": [_as_json(entry, now) for entry in shown]})
    elif not stdout().is_terminal:
        records(tuple(_as_json(entry, now).values()) for entry in shown)
    elif entries:
        _print(cache, entries, shown, now)
    return 1 if only_wrong and shown else 0


def verify(*, as_json: bool = False) -> int:
    """Run ``skuda cache verify``; see `show`."""
    return show(as_json=as_json, only_wrong=True)


def gc(*, max_size: str | None = None, older_than: str | None = None) -> int:
    """Run ``skuda cache gc``: remove entries that are too old, then the oldest until the rest fits.

    Return the exit status: 0; 1 if an entry cannot be read or removed. Raise `InvalidProblem` for an amount that cannot
    be read, or if neither is given.
    """
    if max_size is None and older_than is None:
        rule = "be given; `skuda cache clear` removes everything"
        raise InvalidProblem("cache gc", "--max-size or --older-than", "neither", rule)
    size = None if max_size is None else int(_amount("--max-size", max_size, _SIZES, "1GiB"))
    age = None if older_than is None else _amount("--older-than", older_than, _AGES, "30d")
    cache = CubinCache()
    entries = _survey(cache)
    if not entries:
        return 0 if entries is not None else 1
    now = time.time()
    going = outdated(entries, now, max_size=size, max_age=age)
    return _remove(cache, entries, going, cache.leftovers(now - _UNFINISHED))


def clear(*, yes: bool = False) -> int:
    """Run ``skuda cache clear``: remove every entry, and the folders of earlier formats.

    Return the exit status: 0; 1 if an entry cannot be read or removed, or if the answer was no. Raise `InvalidProblem`
    if `yes` is not given and standard input is not a terminal.
    """
    cache = CubinCache()
    entries = _survey(cache)
    if entries is None:
        return 1
    leftovers = [*cache.leftovers(), *cache.earlier()]
    if not entries and not leftovers:
        return 0
    if not yes:
        if not sys.stdin.isatty():
            raise InvalidProblem("cache clear", "--yes", "nothing", "be given where nobody can be asked")
        import typer

        if not typer.confirm(f"Remove {_total(entries)} from {cache.folder}?"):
            return 1
    return _remove(cache, entries, entries, leftovers)


def _amount(option: str, text: str, units: dict[str, int], example: str) -> float:
    """Return an amount with a unit as a number of the smallest unit."""
    found = _AMOUNT.fullmatch(text.strip())
    if found is None or found[2].lower() not in units:
        names = ", ".join(filter(None, units))
        rule = f"be a number and a unit such as {example}; units: {names}"
        raise InvalidProblem("cache gc", option, repr(text), rule)
    return float(found[1]) * units[found[2].lower()]


def size_words(size: int) -> str:
    """Format a number of bytes with a unit: ``412 B``, ``1.5 KiB``."""
    power = min(max(size.bit_length() - 1, 0) // 10, 4)
    return f"{size / 1024**power:.1f} {'KMGT'[power - 1]}iB" if power else f"{size} B"


def compiler_words(identity: str) -> str:
    """Return the name and version of a compiler, without the language standard, which never differs."""
    return identity.partition(" -std")[0]


def age_words(seconds: float) -> str:
    """Format an age in the largest unit that leaves two digits: ``3d``."""
    unit, length = next(((u, n) for u, n in _AGES.items() if seconds < 100 * n), ("w", _AGES["w"]))
    return f"{int(max(seconds, 0) // length)}{unit}"


def _survey(cache: CubinCache) -> list[Entry] | None:
    """Return the entries, or None if the cache cannot be read; print a message if it is missing or unreadable."""
    try:
        entries = cache.survey()
    except FileNotFoundError:
        missing = f"there is no cache in {cache.folder}: nothing was compiled there yet"
        tell(f"{missing}; SKUDA_CACHE_DIR names another place")
        return []
    except OSError as error:
        tell(f"the cache {cache.folder} cannot be read: {error.strerror or error}")
        return None
    trouble = cache.distrust()
    if trouble:
        tell(trouble)
    if not entries:
        tell(f"the cache {cache.folder} is empty")
    return entries


def _as_json(entry: Entry, now: float) -> dict[str, Any]:
    return {
        **{name: getattr(entry.facts, name, None) for name in ("sku", "arch", "compiler")},
        "size": entry.size,
        "age": int(max(now - entry.written, 0)),
        "trouble": entry.trouble,
        "path": printable(str(entry.path)),
    }


def _print(cache: CubinCache, entries: Sequence[Entry], shown: Sequence[Entry], now: float) -> None:
    console = stdout()
    table = plain_table("kernel", "arch", "compiler", "size", "age", numbers=3)
    for column in table.columns[3:]:
        column.no_wrap = True
    for entry in shown:
        facts = entry.facts
        name = printable(str(entry.path.relative_to(cache.folder))) if facts is None else facts.sku
        table.add_row(
            Text(folded(name, max(console.width - _OTHER_COLUMNS, 24)), style="cyan"),
            facts.arch if facts is not None else "",
            compiler_words(facts.compiler) if facts is not None else "",
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
    gone = [entry for entry in going if not os.path.lexists(entry.path)]
    paths = {entry.path for entry in gone}
    left = [entry for entry in entries if entry.path not in paths]
    stdout().print(f"removed {_total(gone)} from {cache.folder}; {_total(left)} left", soft_wrap=True)
    for trouble in troubles:
        tell(trouble)
    return 1 if troubles else 0
