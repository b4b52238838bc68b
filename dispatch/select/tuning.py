"""`Tuning`: a file with measured times of kernels on one device. It does not state which kernel is fastest."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, Field, JsonValue

from skuda.dispatch.select.environment import Environment, Line
from skuda.dispatch.select.explanation import as_json
from skuda.dispatch.system.files import open_regular
from skuda.dispatch.system.writing import write_whole
from skuda.registry.cached import cached_property
from skuda.registry.descriptor import Descriptor
from skuda.registry.errors import InvalidRecord
from skuda.registry.sku import SkuIdentity
from skuda.registry.text import one_line, path_of, shown
from skuda.registry.value import Integer, Real, Size, Value

MARGIN = 3.0
"""Per cent by which a kernel must be faster than the first of the ranking, unless a file says otherwise."""

Percent = Annotated[Real, Field(ge=0, lt=100)]
Microseconds = Annotated[Real, Field(gt=0)]

_KIND = ("skuda tuning", 1)
_LARGEST = 64 << 20
_TOLD = 200
_short = partial(one_line, most=_TOLD)


def _identity(text: str) -> str:
    if not text.isprintable() or len(text) > _TOLD:
        raise ValueError("be the id of a kernel")
    SkuIdentity.parse(text)
    return text


class Timing(Value):
    """Statistics of the time of one launch, in microseconds."""

    median: Microseconds
    p10: Microseconds  # 10th percentile
    p90: Microseconds
    best: Microseconds  # the least
    rounds: Annotated[Integer, Field(ge=1, lt=2**63)]
    """Number of samples. Fewer than requested if the time budget ran out."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        if not self.best <= self.p10 <= self.median <= self.p90:
            had = f"best {self.best:g}, p10 {self.p10:g}, median {self.median:g}, p90 {self.p90:g}"
            self.refuse("median", had, "stand in this order, from the least to the greatest")

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Return the statistics of at least one sample, in microseconds."""
        p10, p90 = np.percentile(samples, (10, 90))
        return cls(
            median=statistics.median(samples), p10=float(p10), p90=float(p90), best=min(samples), rounds=len(samples)
        )

    def shared_by(self, launches: int) -> Timing:
        """Return the times of one launch, out of several equal launches that were timed together."""
        names = ("median", "p10", "p90", "best")
        return self.model_copy(update={name: getattr(self, name) / launches for name in names})


class Candidate(Value):
    """One kernel in one configuration, as measured."""

    sku: Annotated[str, AfterValidator(_identity)]  # id of the kernel
    choice: Line = ""  # name of the configuration; empty if the kernel has only one
    source_hash: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """See `skuda.kernels.sources.source_hash`; the times apply only while it is unchanged."""
    timing: Timing | None = None  # the times; None if it was refused
    refused: Line = ""  # why it was not timed: a wrong result or an error

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        if (self.timing is None) is not bool(self.refused):
            self.refuse("timing", repr(self.timing), "be given, or else refused must say why it was not measured")

    @property
    def label(self) -> str:
        """Kernel and configuration in one line."""
        return f"{self.sku}, {self.choice}" if self.choice else self.sku


class TuningEntry(Value):
    """The times of one problem."""

    problem: dict[str, JsonValue]  # the descriptor's fields, with its ``op``
    date: Line  # time of the measurement, UTC
    seed: Size  # seed of the inputs
    layers: Annotated[Integer, Field(ge=1)] = 1
    """Launches in one graph. The times are those of one launch; see `skuda.tools.bench.tune.Tuner`."""
    candidates: Annotated[tuple[Candidate, ...], Field(min_length=1)]
    """Every kernel that can run the problem, in each of its configurations."""

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
        """The key of its problem."""
        return key_of(self.problem)

    @property
    def op(self) -> str:
        """Name of the op."""
        return str(self.problem["op"])


class Tuning(Value):
    """Measured times on one device, for the choice of kernels.

    Attributes
    ----------
    kind : str
        Distinguishes these files from other JSON.
    schema_version : int
        Version of the record's schema.
    environment : Environment
        The conditions of all measurements.
    margin : float
        Per cent by which a kernel must be faster than the first of the ranking to replace it.
    entries : tuple of TuningEntry
        The times of each problem. No problem occurs twice.
    """

    kind: Literal["skuda tuning"] = "skuda tuning"
    schema_version: Literal[1] = 1
    environment: Environment
    margin: Percent = MARGIN
    entries: tuple[TuningEntry, ...] = ()

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        if len(self._by_problem) < len(self.entries):
            keys = [entry.key for entry in self.entries]
            twice = next(key for number, key in enumerate(keys) if key in keys[:number])
            self.refuse("entries", f"{_short(twice)} twice", "hold a problem once")

    @cached_property
    def _by_problem(self) -> dict[str, TuningEntry]:
        return {entry.key: entry for entry in self.entries}

    def entry(self, problem: Descriptor) -> TuningEntry | None:
        """Return the times of exactly this problem, or None."""
        given: object = problem
        if not isinstance(given, Descriptor):
            self.refuse("problem", shown(given), "be a descriptor")
        return self._by_problem.get(key_of(as_json(problem)))

    def updated(self, other: Tuning) -> Tuning:
        """Return a copy with the entries of another record, which replace those of the same problems.

        Raises
        ------
        InvalidRecord
            If the other record has another environment or another margin.
        """
        given: object = other
        if not isinstance(given, Tuning):
            self.refuse("other", shown(given), "be a Tuning")
        mine, theirs = self.conditions(), other.conditions()
        for name in dict.fromkeys((*mine, *theirs)):
            had, must = theirs.get(name, "none"), mine.get(name, "none")
            if had != must:
                self.refuse(name, _short(str(had)), f"be that of the entries there are, {_short(str(must))}")
        return self.model_copy(update={"entries": tuple({**self._by_problem, **other._by_problem}.values())})

    def conditions(self) -> dict[str, object]:
        """Return, by name, the conditions that all entries share."""
        where = self.environment
        versions = {f"the version of {name}": version for name, version in where.versions.items()}
        own = {"device": where.device, "driver": where.driver, "skuda": where.skuda, "margin": self.margin}
        return {**own, **versions}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file atomically into an existing folder.

        Raises
        ------
        InvalidRecord
            If the file cannot be written.
        """
        path = _path(path)
        try:
            write_whole(path, self.model_dump_json(indent=1) + "\n")
        except OSError as error:
            why = error.strerror or str(error)
            raise InvalidRecord(f"tuning {one_line(str(path))}", "the file", why, "be writable") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Tuning:
        """Read a file.

        Raises
        ------
        InvalidRecord
            If it cannot be read, is not a valid tuning file or has no problem; the error names the file and the field.
        """
        path = _path(path)
        subject, written = f"tuning {one_line(str(path))}", "be a file that `skuda tune` wrote"
        try:
            if not path.is_file():
                raise InvalidRecord(subject, "the file", "no file there", written)
            with open_regular(path) as file:
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
            made = cls.model_validate(found)
        except InvalidRecord as error:
            where = "" if error.subject == cls.__name__ else f"{error.subject}."
            raise InvalidRecord(subject, f"{where}{error.field}", _short(error.had), error.must) from error
        if not made.entries:
            raise InvalidRecord(subject, "entries", "none", "hold the times of at least one problem")
        return made


def _path(given: object) -> Path:
    path = path_of(given)
    if path is None:
        Tuning.refuse("path", shown(given), "be the path of a file")
    return path


def key_of(problem: Mapping[str, Any]) -> str:
    """Return the key of a problem in JSON values: a text that is equal for equal problems."""
    return json.dumps(problem, sort_keys=True, separators=(",", ":"))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is given twice")
    return found


def _number(text: str) -> float:
    raise ValueError(f"{text} is no number in JSON")
