"""The record of ``skuda bench``: times, their share of the ceilings, and the rivals' times."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, ClassVar, Literal

from pydantic import Field, JsonValue

from skuda.dispatch.compile.code import code_hash
from skuda.dispatch.select.tuning import Timing
from skuda.registry.device import Device
from skuda.registry.registry import Registry
from skuda.registry.value import Real, Size, Value
from skuda.tools.bench.work import Work
from skuda.tools.record import Record
from skuda.tools.verify.fingerprint import source_hash


class RivalResult(Value):
    """The result of another library's routine on the same problem, in the same rounds.

    Attributes
    ----------
    name, computes : str
        Its name, and how its computation differs from the op's.
    timing : Timing or None
        None if it did not run; `refused` gives the reason.
    ratio : float or None
        Its median over ours: above 1 if ours is faster.
    chosen : str
        The fastest of its alternatives, which was timed; empty if there is only one.
    """

    name: str
    computes: str
    timing: Timing | None = None
    ratio: Real | None = None
    refused: str = ""
    chosen: str = ""


class Ceilings(Value):
    """The highest rates of this device in the same run; None if it could not be measured, with the reason in `notes`.

    `copy_bandwidth` is bytes per second, read and written, of the fastest large copy; `bf16` and `fp8` are operations
    per second of a large matrix product. int8 has the tensor rate of fp8. `empty` is the time in microseconds of a
    kernel that does nothing, launched like all others: the least time of any kernel.
    """

    copy_bandwidth: Real | None = None
    bf16: Real | None = None
    fp8: Real | None = None
    empty: Real | None = None
    notes: tuple[str, ...] = ()

    def best(self, other: Ceilings) -> Ceilings:
        """Return the higher rates and the shorter time of two measurements, and the notes of both."""

        def of(name: str, choose: Callable[[Iterable[float]], float]) -> float | None:
            known = [value for value in (getattr(self, name), getattr(other, name)) if value is not None]
            return choose(known) if known else None

        rates = {name: of(name, max) for name in ("copy_bandwidth", "bf16", "fp8")}
        notes = tuple(dict.fromkeys((*self.notes, *other.notes)))
        return Ceilings(**rates, empty=of("empty", min), notes=notes)

    def bound(self, work: Work) -> tuple[Literal["memory", "compute"], float | None]:
        """Return what bounds some work, and its least time in microseconds; None if no ceiling is known."""
        memory = work.bytes / self.copy_bandwidth * 1e6 if self.copy_bandwidth else None
        compute = work.operations / self.fp8 * 1e6 if self.fp8 and work.operations else None
        if compute is not None and compute >= (memory or 0):
            return "compute", compute
        return "memory", memory


class CaseResult(Value):
    """The result of one problem.

    Attributes
    ----------
    label, op, element, shape, problem
        The case's label, its op, the element of its data, rows and columns or M, N and K, and the descriptor's fields.
    sku, steps
        Id of the kernel that the dispatcher chose, empty if there is none; entry, grid and block of its launches.
    source_hash : str
        See `skuda.tools.verify.fingerprint.source_hash`; if the kernel's hash differs today, the result is stale.
    bytes, operations : int
        See `Work`.
    timing : Timing or None
        None if it was refused.
    bound, ceiling_share
        The ceiling that bounds it, and the least time at that ceiling over the median: 1 is as fast as the ceiling.
    bytes_per_second, operations_per_second : float or None
        Work over the median; operations of products only.
    mhz, watts : float or None
        SM clock and power of the card while the kernel and its rivals were timed, each the median of several readings;
        None if they could not be read.
    operations_per_cycle : float or None
        Operations per second over that clock: the rate that a change of the clock does not explain.
    layers : int
        Dependent layers that one graph runs in turn; times, bytes and operations are those of one of them.
    rivals : tuple of RivalResult
        The rivals' results.
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
    mhz: Real | None = None
    watts: Real | None = None
    operations_per_cycle: Real | None = None
    layers: Size = 1
    rivals: tuple[RivalResult, ...] = ()
    refused: str = ""

    def __hash__(self) -> int:
        return hash((self.label, self.sku, self.timing))

    @property
    def size(self) -> str:
        """The shape as it is typed, ``4096x4096``, and the number of layers if there are several."""
        return "x".join(map(str, self.shape)) + (f", {self.layers} layers" if self.layers > 1 else "")

    def judged(self, ceilings: Ceilings) -> CaseResult:
        """Return the same result with the fields that follow from its times and the ceilings."""
        if self.timing is None:
            return self
        us = self.timing.median
        bound, floor = ceilings.bound(Work(self.bytes, 0, self.operations))
        derived: dict[str, Any] = {
            "bound": bound,
            "bytes_per_second": self.bytes / us * 1e6,
            "operations_per_second": self.operations / us * 1e6 if self.operations else None,
            "ceiling_share": floor / us if floor is not None else None,
            "operations_per_cycle": self.operations / us / self.mhz if self.operations and self.mhz else None,
            "rivals": tuple(
                rival.model_copy(update={"ratio": rival.timing.median / us}) if rival.timing else rival
                for rival in self.rivals
            ),
        }
        return self.model_copy(update=derived)

    def stale(self, registry: Registry) -> bool:
        """Whether the measured kernel is gone or has changed since."""
        sku = registry.sku(self.sku)
        try:
            return bool(self.sku) and (sku is None or source_hash(sku) != self.source_hash)
        except LookupError:
            return True


class HostCost(Value):
    """The cost of one call on the host, without synchronization; if it is absent, `refused` gives the reason."""

    name: str
    timing: Timing | None = None
    refused: str = ""


class BenchRecord(Record):
    """One run of ``skuda bench`` on one device.

    Attributes
    ----------
    device, driver, versions
        The device's facts, the version of its driver, and the versions of the packages that took part, by name.
    date, skuda : str
        Time of the run in UTC, and the version of skuda.
    seed, repeats : int
        Seed of the inputs, and the requested rounds.
    command : str
        The command line that repeats the run.
    seconds : float
        Duration of the whole run.
    measurer_hash : str
        Hash of the code that measured; see the function `measurer_hash`. A record without it is outdated.
    flush : str
        How the L2 cache was flushed. ``clean`` writes and then reads a large array, so that evictions cost the timed
        call nothing. ``dirty`` only writes, so that every call also pays for writing that back; it is the default for
        records without this field.
    absent : dict
        Why a rival is not available, by name.
    """

    # Older records lack the fields of cases and the ceiling.
    undrawn: ClassVar[Any] = {
        "measurer_hash": True,
        "ceilings": {"empty"},
        "cases": {"__all__": {"mhz", "watts", "operations_per_cycle", "layers"}},
    }
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
    measurer_hash: str = ""
    seconds: Real = 0.0
    flush: Literal["dirty", "clean"] = "dirty"
    ceilings: Ceilings
    absent: dict[str, str] = Field(default_factory=dict)
    cases: tuple[CaseResult, ...]
    host: tuple[HostCost, ...] = ()

    @property
    def outdated(self) -> str:
        """Why all of its times are stale; empty if the measuring code has not changed."""
        return "" if self.measurer_hash == measurer_hash() else "measured by other measuring code"

    @property
    def refused(self) -> tuple[CaseResult, ...]:
        """The problems that were not timed."""
        return tuple(case for case in self.cases if case.refused)


@cache
def measurer_hash() -> str:
    """Return the hash of the code that measures, from the inputs to the times, without the code that shows them."""
    shown = tuple(f"skuda.tools.bench.{name}" for name in ("record", "summary", "markdown", "terminal"))
    roots = ("skuda.tools.bench.chain", "skuda.tools.bench.lab", "skuda.tools.bench.host")
    parts = [code_hash(root, "", ("skuda.tools.bench",), shown) for root in roots]
    return hashlib.sha256(repr(parts).encode()).hexdigest()
