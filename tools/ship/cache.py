"""``skuda cache``: list, verify and shrink the cubin cache."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.console import Console
from rich.text import Text

from skuda.dispatch.compile.cache import CacheEntry, CubinCache, outdated, remove
from skuda.registry.errors import InvalidProblem
from skuda.registry.text import printable
from skuda.tools.options import Json, Word, flag, option
from skuda.tools.output import count, new_console, present, table_of, tell

_AGES = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_AGE = re.compile(rf"(\d{{1,9}}(?:\.\d{{1,9}})?) ?([{''.join(_AGES)}])")
_SIZE = re.compile(r"\d{1,15}(\.\d{1,15})? ?[a-zA-Z]*")
_UNFINISHED = 86400
"""Seconds after which a temporary file is abandoned: the longest compilation takes half an hour."""


def ls(*, as_json: Json = False) -> int:
    """List what is in the cache."""
    return _show(as_json=as_json)


def verify(*, as_json: Json = False) -> int:
    """Check every checksum; exit with 1 where one is wrong."""
    return _show(as_json=as_json, only_wrong=True)


def _show(*, as_json: bool, only_wrong: bool = False) -> int:
    """Print the entries, or only those whose checksum or place is wrong; return 1 if `only_wrong` finds an entry."""
    cache, entries = _survey()
    shown = [entry for entry in entries if entry.trouble] if only_wrong else entries
    now = time.time()
    rows = [_as_json(entry, now) for entry in shown]
    value = {"folder": str(cache.folder), "entries": rows}
    present(value, lambda console: _print(console, cache, entries, shown), as_json=as_json)
    return 1 if only_wrong and shown else 0


def gc(
    *,
    max_size: Annotated[Word, option("SIZE", "Remove the oldest until the rest fits into this, such as 1GiB.")] = None,
    older_than: Annotated[Word, option("AGE", "Remove what was compiled longer ago, such as 30d.")] = None,
) -> int:
    """Remove what is old or too much."""
    if max_size is None and older_than is None:
        rule = "be given; `skuda cache clear` removes everything"
        raise InvalidProblem("cache gc", "--max-size or --older-than", "neither", rule)
    size = None if max_size is None else _size(max_size)
    age = None if older_than is None else _age(older_than)
    cache, entries = _survey()
    if not entries:
        return 0
    now = time.time()
    going = outdated(entries, now, max_size=size, max_age=age)
    return _remove(cache, entries, going, cache.leftovers(now - _UNFINISHED))


def clear(*, yes: Annotated[bool, flag("--yes", help="Without asking.")] = False) -> int:
    """Remove everything."""
    cache, entries = _survey()
    leftovers = [*cache.leftovers(), *cache.earlier()]
    if not entries and not leftovers:
        return 0
    if not yes:
        if not sys.stdin.isatty():
            raise InvalidProblem("cache clear", "--yes", "nothing", "be given where nobody can be asked")
        if not typer.confirm(f"Remove {_total(entries)} from {cache.folder}?"):
            return 1
    return _remove(cache, entries, entries, leftovers)


def _size(text: str) -> int:
    try:
        if _SIZE.fullmatch(text.strip()):
            return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        pass
    raise InvalidProblem("cache gc", "--max-size", repr(text), "be a number and a unit such as 1GiB, 500MB or 4096B")


def _age(text: str) -> float:
    found = _AGE.fullmatch(text.strip().lower())
    if found is None:
        rule = "be a number and one of s, m, h, d, w, such as 30d"
        raise InvalidProblem("cache gc", "--older-than", repr(text), rule)
    return float(found[1]) * _AGES[found[2]]


def size_words(size: int) -> str:
    """Format a number of bytes with a unit: ``412 B``, ``1.5 KiB``."""
    return ByteSize(size).human_readable(separator=" ")


def compiler_words(identity: str) -> str:
    """Return the name and version of a compiler, without the language standard, which never differs."""
    return identity.partition(" -std")[0]


def _age_words(seconds: float) -> str:
    """Format an age in the largest unit that leaves two digits: ``3d``."""
    unit, length = next(((u, n) for u, n in _AGES.items() if seconds < 100 * n), ("w", _AGES["w"]))
    return f"{int(max(seconds, 0) // length)}{unit}"


def _survey() -> tuple[CubinCache, list[CacheEntry]]:
    """Return the cache and its entries; say if it is absent, empty or not trusted."""
    cache = CubinCache()
    try:
        entries = cache.survey()
    except FileNotFoundError:
        missing = f"there is no cache in {cache.folder}: nothing was compiled there yet"
        tell(f"{missing}; SKUDA_CACHE_DIR names another place")
        return cache, []
    trouble = cache.distrust()
    if trouble:
        tell(trouble)
    if not entries:
        tell(f"the cache {cache.folder} is empty")
    return cache, entries


def _as_json(entry: CacheEntry, now: float) -> dict[str, Any]:
    return {
        **{name: getattr(entry.facts, name, None) for name in ("sku", "arch", "compiler")},
        "size": entry.size,
        "age": int(max(now - entry.written, 0)),
        "trouble": entry.trouble,
        "path": printable(str(entry.path)),
    }


def _print(console: Console, cache: CubinCache, entries: Sequence[CacheEntry], shown: Sequence[CacheEntry]) -> None:
    rows: list[tuple[object, ...]] = []
    for entry in shown:
        facts, age = entry.facts, _age_words(time.time() - entry.written)
        name = printable(str(entry.path.relative_to(cache.folder))) if facts is None else facts.sku
        made = ("", "") if facts is None else (facts.arch, compiler_words(facts.compiler))
        rows.append((Text(name, style="cyan"), *made, size_words(entry.size), age))
        rows += [(Text(f"  not used: {entry.trouble}", style="bold red"),)] if entry.trouble else []
    if rows:
        console.print(table_of(rows, "kernel", "arch", "compiler", "size", "age", numbers=3))
    wrong = sum(bool(entry.trouble) for entry in entries)
    if entries:
        console.print(f"\n{_total(entries)}, {f'{wrong} wrong' if wrong else 'all whole'}.")
        console.print(f"in {cache.folder}", style="dim", soft_wrap=True)


def _total(entries: Sequence[CacheEntry]) -> str:
    return f"{count(len(entries), 'cubin')}, {size_words(sum(entry.size for entry in entries))}"


def _remove(
    cache: CubinCache, entries: Sequence[CacheEntry], going: Sequence[CacheEntry], leftovers: Sequence[Path]
) -> int:
    troubles = remove([*(entry.path for entry in going), *leftovers])
    gone = [entry for entry in going if not os.path.lexists(entry.path)]
    paths = {entry.path for entry in gone}
    left = [entry for entry in entries if entry.path not in paths]
    new_console().print(f"removed {_total(gone)} from {cache.folder}; {_total(left)} left", soft_wrap=True)
    for trouble in troubles:
        tell(trouble)
    return 1 if troubles else 0
