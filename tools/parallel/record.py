"""The record of ``skuda bench-parallel``: times and bits of a gated MLP on several ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from skuda.dispatch.compile.code import code_hash
from skuda.dispatch.select.tuning import Timing
from skuda.registry.device import device_named
from skuda.registry.value import Real, Size, Value
from skuda.tools.parallel.trace import Trace
from skuda.tools.record import Record
from skuda.tools.requirement import Judged, Requirement, differences

REAL_ONE, REAL_ALL, INT8_ONE, INT8_ALL = WAYS = ("bf16 x1", "bf16 xN", "skuda x1", "skuda xN")
"""What is timed: in bf16 and in int8, on one rank and on all."""
LLAMA_3_70B = {"hidden": 8192, "intermediate": 28672}
_FEW, _MANY = 16, 2048
_GAINS = {True: (1.6, 1.5), False: (1.8, 1.7)}
"""For few rows and for many: the least time of ours on one rank, and of bf16 on all, over ours on all.

For numbers of rows between, nothing is asked.
"""


class Orders(Value):
    """What the ranks do.

    Attributes
    ----------
    backend : str
        Of torch.distributed: ``nccl`` with a GPU for each rank, or ``gloo`` on the CPU.
    count : int
        Ranks.
    hidden, intermediate : int
        Sizes of the MLP.
    rows : tuple of int
        Numbers of rows.
    repeats : int
        Rounds.
    seed : int
        Of weights and inputs.
    patience : float
        Seconds that a rank waits for the others.
    trace : bool
        Whether replays are traced when everything is timed.
    """

    backend: Literal["nccl", "gloo"]
    count: Size
    hidden: Size
    intermediate: Size
    rows: tuple[Size, ...]
    repeats: Size
    seed: Size
    patience: float
    trace: bool = False


class RowsResult(Value):
    """The MLP with one number of rows.

    Attributes
    ----------
    rows : int
        Rows.
    timings : dict
        Microseconds by way; of each round that of the slowest rank. Empty if nothing was timed.
    compared : int
        Inputs for which every rank's output was compared with that of one rank: called, replayed, compiled.
    with_numpy : int
        Rows that were compared with NumPy, on one rank.
    wrong : str
        How an output differs in a bit, or what failed; empty if nothing did.
    traces : dict
        By way, of every rank, the replay whose time, of the slowest rank, was the median of a few.
    """

    rows: Size
    timings: dict[str, Timing] = Field(default_factory=dict)
    traces: dict[str, tuple[Trace, ...]] = Field(default_factory=dict)
    compared: Size = 0
    with_numpy: Size = 0
    wrong: str = ""

    def gain(self, way: str) -> float | None:
        """Return the time of a way over that of ours on all ranks; None if one is missing."""
        if way not in self.timings or INT8_ALL not in self.timings:
            return None
        return self.timings[way].median / self.timings[INT8_ALL].median


class ParallelRecord(Record):
    """One run of ``skuda bench-parallel``.

    Attributes
    ----------
    device : str
        Name of the GPU, or ``cpu``.
    versions : dict
        Versions by name, those of packages and of NCCL.
    date, skuda, command, seconds, measurer_hash
        As in `skuda.tools.bench.record.BenchRecord`.
    orders : Orders
        What was asked for.
    graph : bool
        Whether what is timed is a replay of a CUDA graph; on a CPU it is a call.
    results : tuple of RowsResult
        In the order of the rows.
    untraced : str
        Why something that was timed has no trace though one was asked for; empty if all have one.
    """

    kind: Literal["skuda bench-parallel"] = "skuda bench-parallel"
    schema_version: Literal[1] = 1
    device: str
    versions: dict[str, str]
    date: str
    skuda: str
    command: str
    seconds: Real
    measurer_hash: str = ""
    orders: Orders
    graph: bool
    results: tuple[RowsResult, ...]
    untraced: str = ""

    @property
    def outdated(self) -> str:
        """Why all of its times are stale; empty if the measuring code has not changed."""
        return "" if self.measurer_hash == parallel_measurer_hash() else "measured by other measuring code"

    @property
    def wrong(self) -> tuple[RowsResult, ...]:
        """What failed."""
        return tuple(result for result in self.results if result.wrong)


def parallel_measurer_hash() -> str:
    """Return the hash of the code that measures."""
    parts = code_hash("skuda.tools.parallel.worker", "", ("skuda.tools.parallel",), ("skuda.tools.parallel.record",))
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def judged(record: ParallelRecord) -> Judged:
    """Judge a record; figures are judged for CUDA graphs of Llama 3 70B's MLP on two H200s, and bits everywhere."""
    wanted = device_named("h200").name
    orders = record.orders
    unlike = differences(
        (
            (record.device == wanted, f"the device is {record.device}, not {wanted}"),
            (orders.count == 2, f"there are {orders.count} ranks, not 2"),
            (record.graph, "no CUDA graph is timed"),
            (
                {"hidden": orders.hidden, "intermediate": orders.intermediate} == LLAMA_3_70B,
                "the sizes are not those of Llama 3 70B",
            ),
        )
    )
    return Judged((_bits(record), *_figures(record, unlike)), unlike)


def _bits(record: ParallelRecord) -> Requirement:
    wrong = ", ".join(str(result.rows) for result in record.wrong)
    compared = sum(result.compared for result in record.results)
    told = f"failed for {wrong} rows" if wrong else f"equal on {compared} inputs" if compared else "not compared"
    return Requirement("bits on all ranks and on one", "equal", told, not wrong if wrong or compared else None)


def _figures(record: ParallelRecord, unlike: str) -> Iterator[Requirement]:
    for result in record.results:
        if _FEW < result.rows < _MANY:
            continue
        for way, bound in zip((INT8_ONE, REAL_ALL), _GAINS[result.rows <= _FEW], strict=True):
            what, gain = f"{result.rows} rows: {way} over {INT8_ALL}", result.gain(way)
            if gain is None:
                yield Requirement(what, f"at least {bound:g}x", "not timed", None)
            else:
                yield Requirement(what, f"at least {bound:g}x", f"{gain:.3f}x", None if unlike else gain >= bound)
