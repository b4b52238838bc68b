"""`Tuning`: measured times of kernels on one device, as a file. Which one is the fastest is never written down."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, JsonValue

from skuda.dispatch.environment import Environment, Line
from skuda.dispatch.explanation import as_json
from skuda.dispatch.timing import Timing
from skuda.registry.descriptor import Descriptor
from skuda.registry.errors import InvalidRecord
from skuda.registry.sku import SkuIdentity
from skuda.registry.value import Real, Size, Value

MARGIN = 3.0
"""Per cent by which a kernel must be faster than the first of the ranking, unless a file says otherwise."""

Percent = Annotated[Real, Field(ge=0, lt=100)]

_KIND = ("skuda tuning", 1)
_LARGEST = 64 << 20
_TOLD = 200


def _identity(text: str) -> str:
    if not text.isprintable() or len(text) > _TOLD:
        raise ValueError("be the id of a kernel")
    SkuIdentity.parse(text)
    return text


class Candidate(Value):
    """One kernel, in one configuration, as it was measured.

    Attributes
    ----------
    sku : str
        Id of the kernel.
    choice : str
        Name of the configuration; empty where the kernel has but one.
    source_hash : str
        See `skuda.dispatch.sources.source_hash`: with another one the times do not speak for today's kernel.
    timing : Timing or None
        None where it was refused.
    refused : str
        Why it was not timed: a wrong result, or what went wrong.
    """

    sku: Annotated[str, AfterValidator(_identity)]
    choice: Line = ""
    source_hash: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    timing: Timing | None = None
    refused: Line = ""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        if (self.timing is None) is not bool(self.refused):
            self.refuse("timing", repr(self.timing), "be given, or else refused must say why it was not measured")
        if self.timing is not None and self.timing.median < 0:
            self.refuse("timing.median", self.timing.median, "be at least 0")

    @property
    def label(self) -> str:
        """Kernel and configuration in one line."""
        return f"{self.sku}, {self.choice}" if self.choice else self.sku


class Entry(Value):
    """The times of one problem.

    Attributes
    ----------
    problem : dict
        The descriptor's fields, with its ``op``.
    date : str
        When it was measured, UTC.
    seed : int
        What the inputs were drawn from.
    candidates : tuple of Candidate
        Every kernel that served the problem, in each of its configurations.
    """

    problem: dict[str, JsonValue]
    date: Line
    seed: Size
    candidates: Annotated[tuple[Candidate, ...], Field(min_length=1)]

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        op = self.problem.get("op")
        if not isinstance(op, str) or not op.isidentifier():
            self.refuse("problem.op", repr(op), "be the name of an op")
        seen: set[tuple[str, str]] = set()
        for candidate in self.candidates:
            if SkuIdentity.parse(candidate.sku).op != op:
                self.refuse("candidates", candidate.sku, f"be kernels of {op}")
            if (candidate.sku, candidate.choice) in seen:
                self.refuse("candidates", f"{candidate.label} twice", "be measured once each")
            seen.add((candidate.sku, candidate.choice))

    def __hash__(self) -> int:
        return hash((self.key, self.candidates))

    @cached_property
    def key(self) -> str:
        """What tells its problem from every other."""
        return _key(self.problem)

    @property
    def op(self) -> str:
        """Name of the op."""
        return str(self.problem["op"])


class Tuning(Value):
    """Measured times on one device, to choose kernels by.

    Attributes
    ----------
    kind : str
        What tells these files from other JSON.
    schema_version : int
        Of this record.
    environment : Environment
        Where everything was measured.
    margin : float
        Per cent by which a kernel must be faster than the first of the ranking, to be chosen before it.
    entries : tuple of Entry
        The problems, each once.
    """

    kind: Literal["skuda tuning"] = "skuda tuning"
    schema_version: Literal[1] = 1
    environment: Environment
    margin: Percent = MARGIN
    entries: tuple[Entry, ...] = ()

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        if len(self._by_problem) < len(self.entries):
            keys = [entry.key for entry in self.entries]
            twice = next(key for number, key in enumerate(keys) if key in keys[:number])
            self.refuse("entries", f"{_short(twice)} twice", "hold a problem once")

    @cached_property
    def _by_problem(self) -> dict[str, Entry]:
        return {entry.key: entry for entry in self.entries}

    def entry(self, problem: Descriptor) -> Entry | None:
        """Return what was measured of exactly this problem, or None."""
        return self._by_problem.get(_key(as_json(problem)))

    def updated(self, other: Tuning) -> Tuning:
        """Return this with the entries of another, which replace those of the same problems.

        Raises
        ------
        InvalidRecord
            Where the other was made in another environment, or has another margin.
        """
        mine, theirs = self._conditions(), other._conditions()
        for name in dict.fromkeys((*mine, *theirs)):
            had, must = theirs.get(name, "none"), mine.get(name, "none")
            if had != must:
                self.refuse(name, _short(str(had)), f"be that of the entries there are, {_short(str(must))}")
        return self.model_copy(update={"entries": tuple({**self._by_problem, **other._by_problem}.values())})

    def _conditions(self) -> dict[str, object]:
        """Return, by name, what all entries have in common."""
        where = self.environment
        versions = {f"the version of {name}": version for name, version in where.versions.items()}
        return {"device": where.device, "driver": where.driver, "skuda": where.skuda, "margin": self.margin, **versions}

    def save(self, path: Path) -> None:
        """Write the file; a reader never sees half of it.

        Parameters
        ----------
        path : Path
            Where to; its folder must be there.

        Raises
        ------
        InvalidRecord
            Where it cannot be written.
        """
        fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
        try:
            fresh.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
            fresh.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                fresh.unlink()
            raise InvalidRecord(f"tuning {path}", "the file", str(error), "be writable") from error

    @classmethod
    def load(cls, path: Path) -> Tuning:
        """Read a file.

        Raises
        ------
        InvalidRecord
            Where it cannot be read, or is no tuning; the error names the file and the field.
        """
        subject, written = f"tuning {path}", "be a file that `skuda tune` wrote"
        try:
            if not path.is_file():
                raise InvalidRecord(subject, "the file", "no file there", written)
            with path.open("rb") as file:
                content = file.read(_LARGEST + 1)
        except OSError as error:
            raise InvalidRecord(subject, "the file", str(error), "be readable") from error
        if len(content) > _LARGEST:
            raise InvalidRecord(subject, "the file", f"more than {_LARGEST >> 20} MiB", written)
        try:
            found: Any = json.loads(content.decode(), object_pairs_hook=_once, parse_constant=_number)
        except (ValueError, RecursionError) as error:
            raise InvalidRecord(subject, "the file", _short(str(error)), f"{written}, in JSON") from error
        said = (found.get("kind"), found.get("schema_version")) if isinstance(found, dict) else (None, None)
        if said != _KIND:
            had = _short(f"kind {said[0]!r}, schema {said[1]!r}")
            raise InvalidRecord(subject, "the file", had, f"be of kind {_KIND[0]!r}, schema {_KIND[1]}")
        try:
            return cls.model_validate(found)
        except InvalidRecord as error:
            where = "" if error.subject == cls.__name__ else f"{error.subject}."
            raise InvalidRecord(subject, f"{where}{error.field}", _short(error.had), error.must) from error


def _key(problem: Mapping[str, Any]) -> str:
    return json.dumps(problem, sort_keys=True, separators=(",", ":"))


def _short(text: str) -> str:
    """Return the start of what may be a whole file, in one printable line."""
    text = re.sub(r"[^ -~]", "?", text)
    return text if len(text) <= _TOLD else f"{text[:_TOLD]}..."


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is given twice")
    return found


def _number(text: str) -> float:
    raise ValueError(f"{text} is no number in JSON")
