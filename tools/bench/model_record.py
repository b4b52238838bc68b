"""The record of ``skuda bench-model``: times of a whole stack."""

from __future__ import annotations

import hashlib
from typing import Literal

from pydantic import Field

from skuda.dispatch.compile.code import code_hash
from skuda.dispatch.select.tuning import Timing
from skuda.registry.device import Device
from skuda.registry.value import Real, Size, Value
from skuda.tools.bench.record import HostCost
from skuda.tools.record import Record

REAL = ("bf16", "bf16 compiled")
"""Names of the ways that quantize nothing."""
Phase = Literal["decode", "prefill"]
_DRAWN = "random Gaussian weights of deviation 1 / sqrt(K), norms of 1; no embeddings, last norm and head"


class WayResult(Value):
    """One way in one phase.

    Attributes
    ----------
    name : str
        The way.
    timing : Timing or None
        Of the whole stack; None if it did not run, for the reason `refused`.
    ratio : float or None
        Its median over that of the fastest way of ours: above 1 if ours is faster.
    error : float or None
        Relative distance of its output from that of the first way, in the norm of L2.
    """

    name: str
    timing: Timing | None = None
    ratio: Real | None = None
    error: Real | None = None
    refused: str = ""


class PhaseResult(Value):
    """The stack with inputs of one shape.

    Attributes
    ----------
    phase : str
        ``decode``: `rows` sequences, of which each has one new position at the end of a cache of `cache` positions;
        ``prefill``: one sequence of `rows` positions, which fill the cache.
    ways : tuple of WayResult
        In the order of their columns.
    compared : int
        Inputs for which the outputs of all ways of ours, eager, compiled and as they are timed, were compared.
    wrong : str
        How they differ in a bit; empty if they do not.
    """

    phase: Phase
    rows: Size
    cache: Size
    ways: tuple[WayResult, ...]
    compared: Size = 0
    wrong: str = ""

    @property
    def gain(self) -> float | None:
        """The time of the faster way in bf16 over that of the fastest of ours; None if one is missing."""
        ratios = [way.ratio for way in self.ways if way.name in REAL and way.ratio is not None]
        return min(ratios, default=None)


class ModelRecord(Record):
    """One run of ``skuda bench-model``.

    Attributes
    ----------
    device, driver, versions, date, skuda, seed, repeats, command, seconds, measurer_hash
        As in `skuda.tools.bench.record.BenchRecord`.
    sizes : dict
        Sizes of the stack; see `skuda.tools.bench.llama.Sizes`.
    weights : str
        What the weights are.
    graph : bool
        Whether what is timed is a replay of a CUDA graph; on a CPU it is a call.
    computes : dict
        What each way is, by name.
    bytes : dict
        Bytes of the weights and scales of each way's linear layers.
    absent : dict
        Why a way did not take part, by name.
    phases : tuple of PhaseResult
        The times.
    host : tuple of HostCost
        The cost of one call of a layer on the host.
    """

    kind: Literal["skuda bench-model"] = "skuda bench-model"
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
    measurer_hash: str = ""
    sizes: dict[str, Size]
    weights: str = _DRAWN
    graph: bool
    computes: dict[str, str]
    bytes: dict[str, Size] = Field(default_factory=dict)
    absent: dict[str, str] = Field(default_factory=dict)
    phases: tuple[PhaseResult, ...]
    host: tuple[HostCost, ...] = ()

    @property
    def outdated(self) -> str:
        """Why all of its times are stale; empty if the measuring code has not changed."""
        return "" if self.measurer_hash == model_measurer_hash() else "measured by other measuring code"

    @property
    def wrong(self) -> tuple[PhaseResult, ...]:
        """The phases in which outputs of ours differ."""
        return tuple(phase for phase in self.phases if phase.wrong)


def model_measurer_hash() -> str:
    """Return the hash of the code that measures, and of the stack, without the code that shows the times."""
    roots = ("skuda.tools.bench.model", "skuda.tools.bench.ways", "skuda.tools.bench.llama")
    parts = [code_hash(root, "", ("skuda.tools.bench",), ("skuda.tools.bench.model_record",)) for root in roots]
    return hashlib.sha256(repr(parts).encode()).hexdigest()
