"""The record of ``skuda bench-model``, and what is shown of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from rich.text import Text

from skuda.dispatch.select.tuning import Timing
from skuda.registry.device import device_named
from skuda.registry.value import Real, Size, Value
from skuda.tools.study.plot import Panel, Plot, by_rows
from skuda.tools.study.record import Record
from skuda.tools.study.requirement import Requirement, requirements
from skuda.tools.study.view import Parts, Sections, Table

Phase = Literal["decode", "prefill"]
REAL, OURS = ("bf16", "bf16 compiled"), ("skuda", "skuda compiled")
"""Names of the forms that quantize nothing, and of ours."""
LLAMA_3_8B = {"hidden": 4096, "intermediate": 14336, "heads": 32, "kv_heads": 8}
GAINS: dict[tuple[Phase, int], float] = {
    ("decode", 1): 1.75,
    ("decode", 16): 1.6,
    ("decode", 64): 1.45,
    ("prefill", 2048): 1.65,
    ("prefill", 8192): 1.65,
}
"""The least time of bf16, eager or compiled, over ours, by phase and rows."""
_RIVALS = ("torchao", "bitsandbytes")
_OVER_RIVALS = 1.3


class FormResult(Value):
    """One form in one phase: the times of the whole stack, or why it did not run.

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
        ``prefill``: one sequence of `rows` positions, which fill the cache.
    ways : tuple of FormResult
        The forms, in the order of their columns.
    compared : int
        Inputs for which the outputs of all forms of ours, eager, compiled and as they are timed, were compared.
    wrong : str
        How they differ in a bit; empty if they do not.
    """

    phase: Phase
    rows: Size
    cache: Size
    ways: Annotated[tuple[FormResult, ...], Field(min_length=1)]
    compared: Size = 0
    wrong: str = ""

    @property
    def times(self) -> dict[str, float]:
        """The medians by form."""
        return {one.name: one.timing.median for one in self.ways if one.timing is not None}

    @property
    def ratios(self) -> dict[str, float]:
        """The medians over that of the fastest form of ours: above 1 if ours is faster; empty without ours."""
        ours = min((us for name, us in self.times.items() if name in OURS), default=None)
        return {name: us / ours for name, us in self.times.items()} if ours else {}

    @property
    def gain(self) -> float | None:
        """The time of the faster form in bf16 over that of the fastest of ours; None if one is missing."""
        return min((self.ratios[name] for name in REAL if name in self.ratios), default=None)


class HostCost(Value):
    """The cost of one call on the host, which does not wait for the device.

    Attributes
    ----------
    over : str
        The name of the call that it replaces; empty for a call of torch.
    at_most : float or None
        How many times that call's cost is wanted at most.
    """

    name: str
    timing: Timing | None = None
    refused: str = ""
    over: str = ""
    at_most: float | None = None


class ModelRecord(Record):
    """One run of ``skuda bench-model``.

    Attributes
    ----------
    repeats : int
        The requested rounds.
    sizes : dict
        Sizes of the stack; see `skuda.tools.studies.llama.LlamaSizes`.
    graph : bool
        Whether replays of a CUDA graph are timed; on a CPU, calls are.
    computes, absent : dict
        A description of each form, and why a form did not take part, by name.
    """

    measured_by: ClassVar[tuple[str, ...]] = ("skuda.tools.studies.model_bench:bench",)
    retired: ClassVar[frozenset[str]] = frozenset({"ratio", "bytes", "weights"})
    kind: Literal["skuda bench-model"] = "skuda bench-model"
    schema_version: Literal[1] = 1
    repeats: Size
    sizes: dict[str, Size]
    graph: bool
    computes: dict[str, str]
    absent: dict[str, str] = Field(default_factory=dict)
    phases: Annotated[tuple[PhaseResult, ...], Field(min_length=1)]
    host: tuple[HostCost, ...] = ()

    @property
    def host_ratios(self) -> dict[str, float]:
        """The median of a call over that of the call that it replaces, by name."""
        medians = {cost.name: cost.timing.median for cost in self.host if cost.timing is not None}
        both = (cost for cost in self.host if {cost.name, cost.over} <= medians.keys())
        return {cost.name: medians[cost.name] / medians[cost.over] for cost in both}

    @property
    def wrong(self) -> tuple[str, ...]:
        """The phases in which outputs of ours differ."""
        return tuple(f"{phase.phase} {phase.rows}: {phase.wrong}" for phase in self.phases if phase.wrong)


def lines(record: ModelRecord) -> Iterator[tuple[object, ...]]:
    """Yield phase, rows, cache, form, median, p10 and p90 in us, ratio, error, rounds, and what went wrong."""
    for phase in record.phases:
        for one in phase.ways:
            rest = (phase.ratios.get(one.name), one.error, one.timing and one.timing.rounds, one.refused or phase.wrong)
            yield (phase.phase, phase.rows, phase.cache, one.name, *_times(one.timing), *rest)
    for cost in record.host:
        ratio = record.host_ratios.get(cost.name)
        yield ("host", None, None, cost.name, *_times(cost.timing), ratio, None, None, cost.refused)


def _times(t: Timing | None) -> tuple[float | None, ...]:
    return (t.median, t.p10, t.p90) if t else (None,) * 3


def sections(record: ModelRecord) -> Sections:
    """Return the sections: ``phases`` (times), ``requirements``, ``host`` (the cost of a call) and ``facts``."""
    sizes = ", ".join(f"{name.replace('_', ' ')} {size}" for name, size in record.sizes.items())
    about = {
        "stack": f"{sizes}; Gaussian weights of deviation 1 / sqrt(K); no embeddings, last norm and head",
        "timed": "replays of a CUDA graph" if record.graph else "calls on the CPU",
        **record.computes,
        **{f"absent: {name}": why for name, why in record.absent.items()},
    }
    ratios = record.host_ratios
    costs = [
        (
            one.name,
            f"{t.median:.2f}",
            f"{t.p90:.2f}",
            f"{ratios[one.name]:.2f} x {one.over}" if one.name in ratios else "",
        )
        for one in record.host
        if (t := one.timing) is not None
    ]
    return {
        "phases": _phases(record),
        "requirements": _requirements(record),
        "host": (Table(("call", "median, us", "p90, us", "over"), costs, "Calls on the host"),) if costs else (),
        "facts": (record.facts(**about),),
    }


def _phases(record: ModelRecord) -> Parts:
    """Return the microseconds of a layer by phase and form, with the ratio to the fastest of ours, and the gain."""
    names, layers, rows = list(record.computes), record.sizes["layers"], []
    for phase in record.phases:
        missing = Text("wrong", style="bold red") if phase.wrong else Text("-", style="dim")
        times, ratios = phase.times, phase.ratios
        cells = [f"{times[n] / layers:.1f} ({ratios[n]:.2f})" if n in ratios else missing for n in names]
        rows.append((phase.phase, phase.rows, "-" if phase.gain is None else f"{phase.gain:.2f}", *cells))
    table = Table(("phase", "M", "gain", *names), rows, extra=len(names))
    about = "Microseconds of a layer, and in brackets over the fastest of ours; gain: the faster of bf16 over ours."
    return table, about


def _requirements(record: ModelRecord) -> Parts:
    """Judge a record; figures are for CUDA graphs of layers of Llama 3 8B on an H200."""
    wrong = ", ".join(f"{phase.phase} {phase.rows}" for phase in record.phases if phase.wrong)
    compared = sum(phase.compared for phase in record.phases)
    bits = Requirement.equal("bits of ours, eager, compiled and replayed", wrong, compared)
    # The faster form in bf16 is known where both were timed.
    gains = {(p.phase, p.rows): p.gain for p in record.phases if set(REAL) <= p.times.keys()}
    figures = [
        Requirement.ratio(f"{p} {m}: faster form in bf16 over ours", gains.get((p, m)), GAINS[p, m]) for p, m in GAINS
    ]
    for name in _RIVALS:
        ratios = [phase.ratios[name] for phase in record.phases if name in phase.ratios]
        figures.append(Requirement.ratio(f"{name} over ours, lowest", min(ratios, default=None), _OVER_RIVALS))
    for one in record.host:
        if one.at_most is not None:
            what, ratio = f"{one.name} on the host over {one.over}", record.host_ratios.get(one.name)
            figures.append(Requirement.ratio(what, ratio, one.at_most, at_most=True))
    wanted = device_named("h200").name
    unlike = (
        (record.card == wanted, f"the device is {record.card}, not {wanted}"),
        (record.graph, "no CUDA graph is timed"),
        ({**record.sizes, **LLAMA_3_8B} == record.sizes, "the sizes are not those of Llama 3 8B"),
    )
    return requirements(bits, figures, unlike)


def plots(record: ModelRecord) -> list[Plot]:
    """Return the plot of microseconds of a layer by rows, and of each form's time over ours."""
    layers, pairs = record.sizes["layers"], list[tuple[Panel, Panel]]()
    for name, label in (("decode", "sequences, M"), ("prefill", "positions, M")):
        mine = sorted((p for p in record.phases if p.phase == name and p.times), key=lambda phase: phase.rows)
        points = [(p.rows, {form: us / layers for form, us in p.times.items()}, p.ratios) for p in mine]
        labels = ("", "") if pairs else ("us a layer", "time over ours")
        pairs += [by_rows(points, label, labels, name)] if points else []
    title = f"Time of a layer of {record.sizes['hidden']} channels: {record.where}"
    return [Plot("layers", title, list(zip(*pairs, strict=True)))] if pairs else []
