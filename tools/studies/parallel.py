"""The record of ``skuda bench-parallel``, a gated MLP on one GPU and on several, and what is shown of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from rich.text import Text

from skuda.dispatch.select.tuning import Timing
from skuda.registry.device import device_named
from skuda.registry.value import Size, Value
from skuda.tools.output import words
from skuda.tools.studies.processes import RankJob
from skuda.tools.study.record import Record
from skuda.tools.study.requirement import Requirement, requirements
from skuda.tools.study.view import Parts, Sections, Table

REAL_ONE, REAL_ALL, INT8_ONE, INT8_ALL = FORMS = ("bf16 x1", "bf16 xN", "skuda x1", "skuda xN")
"""What is timed: in bf16 and in int8, on one rank and on all."""
_COMPARED = (INT8_ONE, REAL_ALL)
LLAMA_3_70B = (8192, 28672)
"""Hidden and intermediate size."""
_FEW, _MANY = 16, 2048
_GAINS = {True: (1.6, 1.5), False: (1.8, 1.7)}
"""For few rows and for many: the least time of ours on one rank, and of bf16 on all, over ours on all.

For numbers of rows between, nothing is required.
"""


class MlpJob(RankJob):
    """What the ranks do: a gated MLP of some sizes, for some numbers of rows, in a number of rounds."""

    hidden: Size
    intermediate: Size
    rows: tuple[Size, ...]
    repeats: Size


class RowsResult(Value):
    """The MLP with one number of rows.

    Attributes
    ----------
    rows : int
        Rows.
    timings : dict
        Microseconds by form; of each round that of the slowest rank. Empty if nothing was timed.
    compared : int
        Inputs for which every rank's output was compared with that of one rank: called, replayed, compiled.
    with_numpy : int
        Rows that were compared with NumPy, on one rank.
    wrong : str
        How an output differs in a bit, or what failed; empty if nothing did.
    """

    rows: Size
    timings: dict[str, Timing] = Field(default_factory=dict)
    compared: Size = 0
    with_numpy: Size = 0
    wrong: str = ""

    @property
    def times(self) -> dict[str, float]:
        """The medians by form."""
        return {form: timing.median for form, timing in self.timings.items()}

    @property
    def ratios(self) -> dict[str, float]:
        """The medians over that of ours on all ranks; empty without it."""
        ours = self.times.get(INT8_ALL)
        return {form: us / ours for form, us in self.times.items()} if ours else {}


class ParallelRecord(Record):
    """One run of ``skuda bench-parallel``; `graph` says whether replays of CUDA graphs were timed, or calls."""

    kind: Literal["skuda bench-parallel"] = "skuda bench-parallel"
    schema_version: Literal[1] = 1
    orders: MlpJob
    graph: bool
    results: Annotated[tuple[RowsResult, ...], Field(min_length=1)]

    @property
    def wrong(self) -> tuple[str, ...]:
        """What failed."""
        return tuple(f"{result.rows} rows: {result.wrong}" for result in self.results if result.wrong)


def results_of(job: MlpJob, found: Sequence[Sequence[Mapping[str, Any]] | None], failed: str) -> tuple[RowsResult, ...]:
    """Return the results for each number of rows, from those of the ranks; where a rank has none, why."""
    results = []
    for at, rows in enumerate(job.rows):
        each = [mine[at] for mine in found if mine and at < len(mine)]
        wrong = next(filter(None, (one["wrong"] for one in each)), "")
        if len(each) < job.count:
            silent = words(rank for rank, mine in enumerate(found) if at >= len(mine or ()))
            why = "; ".join(filter(None, (failed, wrong, f"rank {silent} has no result")))
            results.append(RowsResult(rows=rows, wrong=why))
            continue
        measured = {
            "timings": {form: Timing.of(times) for form, times in each[0].get("times", {}).items()},
            "compared": min(one.get("compared", 0) for one in each),
            "with_numpy": max(one.get("with_numpy", 0) for one in each),
        }
        results.append(RowsResult(rows=rows, wrong=wrong, **measured))
    return tuple(results)


def sections(record: ParallelRecord) -> Sections:
    """Return the sections: ``times`` (microseconds by rows), ``requirements`` and ``facts``."""
    job, rows = record.orders, []
    for result in record.results:
        times = (f"{result.times[form]:.1f}" if form in result.times else "-" for form in FORMS)
        gains = (f"{result.ratios[form]:.2f}" if form in result.ratios else "-" for form in _COMPARED)
        rows.append((result.rows, *times, *gains))
    headings = ("M", *(f"{form}, us" for form in FORMS), *(f"{form} over {INT8_ALL}" for form in _COMPARED))
    timed = "replays of a CUDA graph" if record.graph else "calls on the CPU"
    about = {"ranks": str(job.count), "MLP": f"{job.hidden} x {job.intermediate}", "timed": timed}
    return {
        "times": (Table(headings, rows, words=0, extra=2), *(Text(line, style="red") for line in record.wrong)),
        "requirements": _requirements(record),
        "facts": (record.facts(**about),),
    }


def _requirements(record: ParallelRecord) -> Parts:
    """Judge a record; figures are for CUDA graphs of Llama 3 70B's MLP on two H200s."""
    wanted, job = device_named("h200").name, record.orders
    wrong = ", ".join(str(result.rows) for result in record.results if result.wrong)
    compared = sum(result.compared for result in record.results)
    figures = [
        Requirement.ratio(f"{result.rows} rows: {form} over {INT8_ALL}", result.ratios.get(form), bound)
        for result in record.results
        if not _FEW < result.rows < _MANY
        for form, bound in zip(_COMPARED, _GAINS[result.rows <= _FEW], strict=True)
    ]
    unlike = (
        (record.card == wanted, f"the device is {record.card}, not {wanted}"),
        (job.count == 2, f"there are {job.count} ranks, not 2"),
        (record.graph, "no CUDA graph is timed"),
        ((job.hidden, job.intermediate) == LLAMA_3_70B, "the sizes are not those of Llama 3 70B"),
    )
    return requirements(Requirement.equal("bits on all ranks and on one", wrong, compared), figures, unlike)
