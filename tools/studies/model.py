"""The record of ``skuda bench-model``, and what is shown of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from skuda.dispatch.select.tuning import Timing
from skuda.registry.value import Real, Size, Value
from skuda.tools.frame.record import Record
from skuda.tools.frame.view import Parts, Sections, Table

Phase = Literal["decode", "prefill"]
REAL_ONE, REAL_ALL, INT8_ONE, INT8_ALL = ("bf16 x1", "bf16 xN", "skuda x1", "skuda xN")
RANKED = {REAL_ONE: "nothing quantized, on one rank", REAL_ALL: "nothing quantized, on all ranks"}
RANKED |= {INT8_ONE: "DynamicLinear and fuse_, on one rank", INT8_ALL: "the same and parallelize_, on all ranks"}
"""The forms of an MLP that ranks share, each with what it computes."""
REAL, OURS = ("bf16", "bf16 compiled"), ("skuda", "skuda compiled")
"""Names of the forms that quantize nothing, and of ours with torch's attention."""
LLAMA_3_70B = {"hidden": 8192, "intermediate": 28672}


class FormResult(Value):
    """One form in one phase: its times, or why it did not run.

    `error` is the relative distance of its output from that of the first form, in the norm of L2.
    """

    name: str
    timing: Timing | None = None
    error: Real | None = None
    refused: str = ""


class PhaseResult(Value):
    """The stack with inputs of one shape.

    Attributes
    ----------
    phase : str
        ``decode``: `rows` sequences, of which each has one new position at the end of a cache of `cache` positions;
        ``prefill``: one sequence of `rows` positions, which fill the cache; ``mlp``: `rows` of an MLP that ranks share.
        Of each round of it, the time is that of the slowest rank.
    ways : tuple of FormResult
        What the forms did in the same rounds, in the order of their columns.
    compared : int
        Inputs for which the outputs of all forms of ours, eager, compiled and as they are timed, were compared.
    with_numpy : int
        Rows that were compared with NumPy, on one rank.
    wrong : str
        How they differ in a bit, or which rank failed; empty if neither.
    """

    phase: Phase | Literal["mlp"]
    rows: Size
    cache: Size
    ways: Annotated[tuple[FormResult, ...], Field(min_length=1)]
    compared: Size = 0
    with_numpy: Size = 0
    wrong: str = ""

    @property
    def times(self) -> dict[str, float]:
        """The medians by form."""
        return {one.name: one.timing.median for one in self.ways if one.timing is not None}

    @property
    def ratios(self) -> dict[str, float]:
        """The medians over that of the fastest form of ours, or of ours on all ranks; empty without ours."""
        ours = min((us for name, us in self.times.items() if name in (*OURS, INT8_ALL)), default=None)
        return {name: us / ours for name, us in self.times.items()} if ours else {}

    @property
    def gain(self) -> float | None:
        """The time of the faster form in bf16 over that of the fastest of ours; None if one is missing."""
        return min((self.ratios[name] for name in REAL if name in self.ratios), default=None)


class ModelRecord(Record):
    """One run of ``skuda bench-model``.

    Attributes
    ----------
    repeats : int
        The requested rounds.
    sizes : dict
        Sizes of the stack; see `skuda.tools.studies.llama.LlamaSizes`. Of an MLP that ranks share, its two.
    ranks : int
        Ranks that share an MLP; 0 for a stack on one device.
    graph : bool
        Whether replays of a CUDA graph are timed; on a CPU, calls are.
    computes, absent : dict
        A description of each form, and why a form did not take part, by name.
    """

    kind: Literal["skuda bench-model"] = "skuda bench-model"
    schema_version: Literal[1] = 1
    repeats: Size
    sizes: dict[str, Size]
    ranks: Size = 0
    graph: bool
    computes: dict[str, str] = Field(default_factory=dict)
    absent: dict[str, str] = Field(default_factory=dict)
    phases: Annotated[tuple[PhaseResult, ...], Field(min_length=1)]

    @property
    def wrong(self) -> tuple[str, ...]:
        """The phases in which outputs of ours differ."""
        return tuple(f"{phase.phase} {phase.rows}: {phase.wrong}" for phase in self.phases if phase.wrong)


def sections(record: ModelRecord) -> Sections:
    """Return the sections: ``phases`` (times) and ``facts``."""
    weights = "Gaussian weights of deviation 1 / sqrt(K)" + (
        "" if record.ranks else "; no embeddings, last norm and head"
    )
    about = {
        "MLP" if record.ranks else "stack": f"{_named(record.sizes)}; {weights}",
        "ranks": str(record.ranks) if record.ranks else "",
        "timed": "replays of a CUDA graph" if record.graph else "calls on the CPU",
        **record.computes,
        **{f"absent: {name}": why for name, why in record.absent.items()},
    }
    return {"phases": _phases(record), "facts": (record.facts(**about),)}


def _named(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {size}" for name, size in sizes.items())


def _phases(record: ModelRecord) -> Parts:
    """Return the microseconds of a layer by phase and form, with the ratio to the fastest of ours, and the gain."""
    names, layers, rows = list(record.computes), record.sizes.get("layers", 1), []
    for phase in record.phases:
        missing = "wrong" if phase.wrong else "-"
        times, ratios = phase.times, phase.ratios
        cells = [f"{times[n] / layers:.1f} ({ratios[n]:.2f})" if n in ratios else missing for n in names]
        rows.append((phase.phase, phase.rows, phase.cache, "-" if phase.gain is None else f"{phase.gain:.2f}", *cells))
    if record.ranks:
        table = Table(("M", *names), [(row[1], *row[4:]) for row in rows])
        return table, f"Microseconds, and in brackets over {INT8_ALL}.", *record.wrong
    table = Table(("phase", "M", "cache", "gain", *names), rows)
    about = (
        "Microseconds of a layer, and in brackets over the fastest of ours with torch's attention; "
        "gain: the faster of bf16 over that."
    )
    return table, about
