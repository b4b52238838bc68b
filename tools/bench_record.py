"""What ``skuda bench`` measured, as a record: times, what they are worth, and against whom."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, JsonValue

from skuda.dispatch.device import Device
from skuda.dispatch.timing import Timing
from skuda.registry.errors import InvalidRecord
from skuda.registry.registry import Registry
from skuda.registry.value import Real, Size, Value
from skuda.tools.bench_cases import Work
from skuda.tools.evidence import evidence_directory
from skuda.tools.fingerprint import source_hash

_KIND = ("skuda bench", 1)


class RivalResult(Value):
    """What somebody else's routine did on the same problem, in the same rounds.

    Attributes
    ----------
    name : str
        Who.
    computes : str
        What it computes, where that is not the very same thing.
    timing : Timing or None
        None where it refused.
    ratio : float or None
        Its median over ours: above 1 where ours is faster.
    refused : str
        Why it did not run: absent, or its own words.
    chosen : str
        Which of its ways was the fastest and was timed; empty where it has one only.
    """

    name: str
    computes: str
    timing: Timing | None = None
    ratio: Real | None = None
    refused: str = ""
    chosen: str = ""


class Ceilings(Value):
    """The most that this device did in the same run; None where it cannot do it.

    Attributes
    ----------
    copy_bandwidth : float or None
        Bytes per second, read and written, of the fastest large copy.
    bf16, fp8 : float or None
        Operations per second of a large matrix product. int8 has the tensor rate of fp8.
    notes : tuple of str
        Why one is None.
    """

    copy_bandwidth: Real | None = None
    bf16: Real | None = None
    fp8: Real | None = None
    notes: tuple[str, ...] = ()

    def bound(self, work: Work) -> tuple[Literal["memory", "compute"], float | None]:
        """Say what bounds some work, and how many microseconds that takes; None where no ceiling is known."""
        memory = work.bytes / self.copy_bandwidth * 1e6 if self.copy_bandwidth else None
        compute = work.operations / self.fp8 * 1e6 if self.fp8 and work.operations else None
        if compute is not None and compute >= (memory or 0):
            return "compute", compute
        return "memory", memory


class CaseResult(Value):
    """What one problem took.

    Attributes
    ----------
    label, op : str
        The case in words, and its op.
    shape : tuple of int
        Rows and columns, or M, N and K.
    element : str
        Element of the data.
    problem : dict
        The descriptor's fields.
    sku : str
        Id of the kernel that the dispatcher chose; empty where it found none.
    steps : tuple of str
        What it launches: entry, grid and block.
    source_hash : str
        See `skuda.tools.fingerprint.source_hash`: with another one the record does not speak for today's kernel.
    bytes, operations : int
        See `Work`.
    timing : Timing or None
        None where it was refused.
    bound : str
        ``memory`` or ``compute``: which ceiling is the lower one.
    bytes_per_second, operations_per_second : float or None
        Work over the median; operations of products only.
    ceiling_share : float or None
        Time at the ceiling over the median: 1 is as fast as the ceiling.
    rivals : tuple of RivalResult
        The others.
    refused : str
        Why it was not timed: a wrong result, or no kernel.
    """

    label: str
    op: str
    shape: tuple[Size, ...]
    element: str
    problem: dict[str, JsonValue]
    sku: str = ""
    steps: tuple[str, ...] = ()
    source_hash: str = ""
    bytes: Size
    operations: Size
    timing: Timing | None = None
    bound: Literal["memory", "compute"] = "memory"
    bytes_per_second: Real | None = None
    operations_per_second: Real | None = None
    ceiling_share: Real | None = None
    rivals: tuple[RivalResult, ...] = ()
    refused: str = ""

    def __hash__(self) -> int:
        return hash((self.label, self.sku, self.timing))

    def judged(self, ceilings: Ceilings) -> CaseResult:
        """Return the same result with what follows from its times and the ceilings."""
        if self.timing is None:
            return self
        us = self.timing.median
        bound, floor = ceilings.bound(Work(self.bytes, 0, self.operations))
        derived: dict[str, Any] = {
            "bound": bound,
            "bytes_per_second": self.bytes / us * 1e6,
            "operations_per_second": self.operations / us * 1e6 if self.operations else None,
            "ceiling_share": floor / us if floor is not None else None,
            "rivals": tuple(
                rival.model_copy(update={"ratio": rival.timing.median / us}) if rival.timing else rival
                for rival in self.rivals
            ),
        }
        return self.model_copy(update=derived)

    def stale(self, registry: Registry) -> bool:
        """Whether the kernel that was measured is gone or has changed since."""
        sku = registry.sku(self.sku)
        try:
            return bool(self.sku) and (sku is None or source_hash(sku) != self.source_hash)
        except LookupError:
            return True


class HostCost(Value):
    """What one way to launch costs the host.

    Attributes
    ----------
    name : str
        The way.
    timing : Timing or None
        Of one call, without synchronization; None where it is absent.
    refused : str
        Why it is absent.
    """

    name: str
    timing: Timing | None = None
    refused: str = ""


class BenchRecord(Value):
    """One run of ``skuda bench`` on one device.

    Attributes
    ----------
    kind : str
        What tells these files from other JSON in the same folder.
    schema_version : int
        Of this record.
    device : Device
        The device's facts.
    driver : str
        Version of its driver.
    versions : dict
        Versions of what was run and compared with, by name.
    date : str
        When it was made, UTC.
    skuda : str
        Version of skuda.
    seed : int
        What the inputs were drawn from.
    repeats : int
        Rounds asked for.
    command : str
        The command line that does it again.
    seconds : float
        How long all of it took.
    flush : str
        How the L2 cache was flushed: ``clean`` by writing and then reading something large, so that what a call evicts
        costs nothing; ``dirty`` by writing only, so that every call also paid for writing that back. Records that do
        not say are of the latter kind.
    ceilings : Ceilings
        The most that the device did in this run.
    absent : dict
        Rivals that are not installed, and why.
    cases : tuple of CaseResult
        The problems.
    host : tuple of HostCost
        What launching costs the host.
    """

    kind: Literal["skuda bench"] = "skuda bench"
    schema_version: Literal[1] = 1
    device: Device
    driver: str = ""
    versions: dict[str, str] = Field(default_factory=dict)
    date: str
    skuda: str
    seed: Size
    repeats: Size
    command: str
    seconds: Real = 0.0
    flush: Literal["dirty", "clean"] = "dirty"
    ceilings: Ceilings
    absent: dict[str, str] = Field(default_factory=dict)
    cases: tuple[CaseResult, ...]
    host: tuple[HostCost, ...] = ()

    @property
    def refused(self) -> tuple[CaseResult, ...]:
        """The problems that were not timed."""
        return tuple(case for case in self.cases if case.refused)

    def save(self, path: Path) -> None:
        """Write the file; a reader never sees half of it.

        Parameters
        ----------
        path : Path
            Where to; its folder is made.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}.new")
        fresh.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        fresh.replace(path)

    @classmethod
    def load(cls, path: Path) -> BenchRecord:
        """Read a file.

        Raises
        ------
        InvalidRecord
            Where it cannot be read, or is no record of a bench.
        """
        found = _read(path)
        said = _kind_of(found)
        if said != _KIND:
            rule = f"be a record of kind {_KIND[0]!r}, schema {_KIND[1]}: `skuda bench --output FILE` makes one"
            raise InvalidRecord("bench", str(path), f"kind {said[0]!r}, schema {said[1]!r}", rule)
        try:
            return cls.model_validate(found)
        except InvalidRecord as error:
            raise InvalidRecord(f"bench {path}: {error.subject}", error.field, error.had, error.must) from error


def load_benches(directory: Path | None = None) -> tuple[BenchRecord, ...]:
    """Read every record of a bench in a folder, the earliest first.

    Parameters
    ----------
    directory : Path or None
        The folder; None for the checkout's ``docs/evidence``, which may be absent.

    Raises
    ------
    InvalidRecord
        Where a file cannot be read, or says that it is a record of a bench and is not.
    """
    folder = directory if directory is not None else evidence_directory()
    paths = sorted(folder.glob("*.json")) if folder is not None else ()
    found = (BenchRecord.load(path) for path in paths if _kind_of(_read(path)) == _KIND)
    return tuple(sorted(found, key=lambda record: record.date))


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRecord("bench", str(path), str(error), "be readable JSON") from error


def _kind_of(found: Any) -> tuple[object, object]:
    return (found.get("kind"), found.get("schema_version")) if isinstance(found, dict) else (None, None)
