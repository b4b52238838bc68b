"""The record of ``skuda bench``: the times of kernels and of their rivals, and the device's ceilings."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, JsonValue

from skuda.dispatch.select.tuning import Timing
from skuda.kernels.attention.attention import AttentionDescriptor
from skuda.kernels.attention.cache import PAGE
from skuda.kernels.attention.rope_quantize_append import RopeQuantizeAppendDescriptor
from skuda.kernels.dtypes import storage_dtype
from skuda.kernels.linear.problem import LinearProblem
from skuda.registry.descriptor import Argument, Descriptor, Role, storage_shape
from skuda.registry.registry import Registry
from skuda.registry.value import Real, Size, Value
from skuda.tools.frame.record import Record
from skuda.tools.verify.evidence import DIGITS, Digest
from skuda.tools.verify.fingerprint import source_hash

OURS = "skuda"


class RivalResult(Value):
    """The times of another library's routine on the same problem, in the same rounds, or why it did not run.

    `computes` says how its computation differs from the op's. `chosen` is the fastest of its alternatives, if it has
    several.
    """

    name: str
    computes: str
    timing: Timing | None = None
    refused: str = ""
    chosen: str = ""


class Ceilings(Value):
    """The highest rates of this device in the same run; None if one could not be measured, with the reason in `notes`.

    `copy_bandwidth` is bytes per second, read and written, of the fastest large copy; `bf16` and `fp8` are operations
    per second of a large matrix product. int8 has the tensor rate of fp8. `empty` is the time in microseconds of a
    kernel that does nothing, launched like all others: the least time of any kernel.
    """

    copy_bandwidth: Real | None = None
    bf16: Real | None = None
    fp8: Real | None = None
    empty: Real | None = None
    notes: tuple[str, ...] = ()

    def least(self, moved: int, operations: int) -> float | None:
        """Return the least microseconds of moving some bytes and doing some operations; None if no ceiling is known."""
        memory = moved / self.copy_bandwidth * 1e6 if self.copy_bandwidth else 0.0
        compute = operations / self.fp8 * 1e6 if self.fp8 else 0.0
        return max(memory, compute) or None


class CaseResult(Value):
    """The result of one problem.

    Attributes
    ----------
    label, op, element, shape, problem
        The case's label, its op, the element of its data, rows and columns or M, N and K, and the descriptor's fields.
    drawn : bool
        Whether the shape was drawn at random.
    sku, steps
        Id of the kernel that the dispatcher chose, empty if there is none; entry, grid and block of its launches.
    source_hash : str
        See `skuda.tools.verify.fingerprint.source_hash`; if the kernel's hash differs today, the result is stale.
    machine_code, launches : str
        See `skuda.tools.verify.stamps`; they show whether a kernel with other sources is still the same.
    bytes, operations : int
        See `least_work`.
    timing : Timing or None
        None if it was refused.
    mhz, watts : float or None
        SM clock and power of the card in earlier records, each the median of several readings.
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
    drawn: bool = False
    sku: str = ""
    steps: tuple[str, ...] = ()
    source_hash: Digest = ""
    machine_code: Digest = ""
    launches: Digest = ""
    bytes: Size
    operations: Size
    timing: Timing | None = None
    mhz: Real | None = None
    watts: Real | None = None
    rivals: tuple[RivalResult, ...] = ()
    refused: str = ""

    @property
    def size(self) -> str:
        """The shape as it is typed, ``4096x4096``."""
        return "x".join(map(str, self.shape))

    @property
    def times(self) -> dict[str, float]:
        """The medians by name, ours first under the name ``skuda``."""
        timed = {OURS: self.timing} | {rival.name: rival.timing for rival in self.rivals}
        return {name: timing.median for name, timing in timed.items() if timing is not None}

    @property
    def ratios(self) -> dict[str, float]:
        """The rivals' medians over ours, by name: above 1 if ours is faster."""
        return {name: us / self.times[OURS] for name, us in self.times.items() if name != OURS}

    def stale(self, registry: Registry) -> bool:
        """Whether the measured kernel is gone or has changed since."""
        sku = registry.sku(self.sku)
        try:
            return bool(self.sku) and (sku is None or source_hash(sku)[:DIGITS] != self.source_hash)
        except LookupError:
            return True


class BenchRecord(Record):
    """One run of ``skuda bench`` on one device.

    Attributes
    ----------
    flush : str
        How the L2 cache was flushed: ``clean`` writes and then reads a large array, so that evictions cost the timed
        call nothing.
    absent : dict
        Why a rival is not available, by name.
    """

    kind: Literal["skuda bench"] = "skuda bench"
    schema_version: Literal[1] = 1
    repeats: Size
    flush: Literal["clean"]
    ceilings: Ceilings
    absent: dict[str, str] = Field(default_factory=dict)
    cases: Annotated[tuple[CaseResult, ...], Field(min_length=1)]

    @property
    def wrong(self) -> tuple[str, ...]:
        """The problems that were not timed."""
        return tuple(f"{case.label}: {case.refused}" for case in self.cases if case.refused)


def least_work(problem: Descriptor) -> tuple[int, int]:
    """Return the bytes and the operations that a problem takes at least.

    Every required array is read or written once, and numbers are free. The operations are the multiplications and
    additions of a product, and of attention where its mask leaves a key; they are 0 for every other op, which is bound
    by memory. On a paged cache, sequences are those of `full_tables`: attention reads the whole cache; an append reads
    the cosines of the new positions, and writes their slots.
    """

    def size(one: Argument) -> int:
        return math.prod(storage_shape(one.shape, one.elements[0])) * storage_dtype(one.elements[0]).itemsize

    moved = sum(size(one) for one in problem.arguments() if one.role in (Role.INPUT, Role.OUTPUT))
    if isinstance(problem, RopeQuantizeAppendDescriptor):
        moved += problem.tokens * problem.kv_heads * (2 * problem.head_size + 8)
        moved -= 4 * problem.rotated * (problem.most_positions - problem.tokens // max(problem.sequences, 1))
    if isinstance(problem, AttentionDescriptor):
        return moved, 4 * problem.head_size * problem.heads * _scores(problem)
    return moved, 2 * math.prod(problem.sizes) if isinstance(problem, LinearProblem) else 0


def _scores(problem: AttentionDescriptor) -> int:
    """Return the pairs of a new token and a key that it sees."""
    keys, new = problem.most_blocks * PAGE, problem.tokens // max(problem.sequences, 1)
    most = min(keys, problem.window or keys) if problem.causal else keys
    seen = new * most - (math.comb(most - (keys - new), 2) if problem.causal and most > keys - new else 0)
    return problem.sequences * seen
