"""The record of ``skuda bench-model``, and what is shown of it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self, get_args

from pydantic import Field, model_validator
from rich.text import Text

from skuda.dispatch.select.tuning import Timing
from skuda.registry.device import device_named
from skuda.registry.errors import InvalidRecord
from skuda.registry.value import Real, Size, Value
from skuda.tools.frame.record import Record
from skuda.tools.frame.view import Parts, Requirement, Sections, Table, requirements

Phase = Literal["decode", "prefill"]
REAL_ONE, REAL_ALL, INT8_ONE, INT8_ALL = ("bf16 x1", "bf16 xN", "skuda x1", "skuda xN")
RANKED = {REAL_ONE: "nothing quantized, on one rank", REAL_ALL: "nothing quantized, on all ranks"}
RANKED |= {INT8_ONE: "DynamicLinear and fuse_, on one rank", INT8_ALL: "the same and parallelize_, on all ranks"}
"""The forms of an MLP that ranks share, each with what it computes."""
REAL, OURS = ("bf16", "bf16 compiled"), ("skuda", "skuda compiled")
"""Names of the forms that quantize nothing, and of ours with torch's attention."""
LLAMA_3_70B = {"hidden": 8192, "intermediate": 28672}
_FEW, _MANY = 16, 2048
_RANK_GAINS = {True: (1.6, 1.5), False: (1.8, 1.7)}
"""For few rows and for many: the least time of ours on one rank, and of bf16 on all, over ours on all.

For numbers of rows between, nothing is required.
"""
INT8_ATTENTION = "skuda int8 attention"
"""The name of the form whose attention is ours, too."""
INT4 = "skuda int4, int8 attention"
"""The same with weights of 4 bits."""
LLAMA_3_8B = {"hidden": 4096, "intermediate": 14336, "heads": 32, "kv_heads": 8}
GAINS: dict[tuple[Phase, int], float] = {
    ("decode", 1): 1.75,
    ("decode", 16): 1.6,
    ("decode", 64): 1.45,
    ("prefill", 2048): 1.65,
    ("prefill", 8192): 1.65,
}
"""The least time of bf16, eager or compiled, over ours, by phase and rows, where decoding sees `_CACHE` positions."""
_CACHE = 1024
FURTHER_GAINS: dict[str, dict[tuple[Phase, int, int], float]] = {
    INT8_ATTENTION: {
        ("decode", 1, _CACHE): 1.9,
        ("decode", 16, _CACHE): 1.9,
        ("decode", 64, _CACHE): 1.9,
        ("decode", 64, 8192): 1.9,
        ("prefill", 8192, 8192): 1.5,
    },
    INT4: {("decode", 1, _CACHE): 2.6, ("decode", 16, _CACHE): 2.6},
}
"""The same of other forms of ours, by phase, rows and cache."""
OPS = 8
"""Ops of a compiled function, where the cost of an op inside it counts."""
NO_OP = "no op, compiled"
"""The compiled function whose cost is taken off that of others."""


class Replaced(NamedTuple):
    """The call that another one replaces, and how many times its cost is wanted at most.

    With `less`, the cost of that call is taken off both.
    """

    over: str
    at_most: float | None = None
    less: str = ""


HOST = {
    "plan.run(output=)": Replaced("torch.mul(out=)", 1.15),
    "Dispatcher.run": Replaced("F.linear", 1.0),
    **dict.fromkeys(("DynamicLinear", "joined layers", "StaticLinear"), Replaced("nn.Linear", 1.1)),
    "gated MLP, fused": Replaced("gated MLP, bf16", 0.9),
    "Llama layer, quantized": Replaced("Llama layer, bf16"),
    "Llama layer, fused": Replaced("Llama layer, bf16", 0.85),
    "compiled layer, fused": Replaced("compiled layer, bf16", 0.95),
    f"{OPS} x quantized_linear, compiled": Replaced(f"{OPS} x mm, compiled", 1.5, NO_OP),
    f"{OPS} x rms_norm_quantize, compiled": Replaced(f"{OPS} x mm, compiled", 1.5, NO_OP),
}
"""Calls on the host by name; see `skuda.tools.studies.host`."""
Cache = Literal["dynamic cache", "static cache", "continuous batching"]
CACHES: tuple[Cache, ...] = get_args(Cache)
SEQUENCES = (1, 16)
_GENERATED = 1.0
"""The most time of a token by ours over bf16, with every cache and for every number of sequences."""
_RIVALS = ("torchao", "bitsandbytes")
_OVER_RIVALS = 1.3


class FormResult(Value):
    """One form in one phase, or one call of `HOST`: its times, or why it did not run.

    `error` is the relative distance of its output from that of the first form, in the norm of L2.
    """

    name: str
    timing: Timing | None = None
    error: Real | None = None
    refused: str = ""


Ways = Annotated[tuple[FormResult, ...], Field(min_length=1)]


class Timed:
    """What several forms did in the same rounds; `ways` are in the order of their columns."""

    if TYPE_CHECKING:  # a field of the base would be the first in a file
        ways: Ways

    @property
    def times(self) -> dict[str, float]:
        """The medians by form."""
        return {one.name: one.timing.median for one in self.ways if one.timing is not None}

    @property
    def ratios(self) -> dict[str, float]:
        """The medians over that of the fastest form of ours, or of ours on all ranks; empty without ours."""
        ours = min((us for name, us in self.times.items() if name in (*OURS, INT8_ALL)), default=None)
        return {name: us / ours for name, us in self.times.items()} if ours else {}


class PhaseResult(Timed, Value):
    """The stack with inputs of one shape.

    Attributes
    ----------
    phase : str
        ``decode``: `rows` sequences, of which each has one new position at the end of a cache of `cache` positions;
        ``prefill``: one sequence of `rows` positions, which fill the cache; ``mlp``: `rows` of an MLP that ranks share.
        Of each round of it, the time is that of the slowest rank.
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
    ways: Ways
    compared: Size = 0
    with_numpy: Size = 0
    wrong: str = ""

    @property
    def gain(self) -> float | None:
        """The time of the faster form in bf16 over that of the fastest of ours; None if one is missing."""
        return min((self.ratios[name] for name in REAL if name in self.ratios), default=None)

    def gain_of(self, name: str) -> float | None:
        """Return the same over another form of ours."""
        return self.gain / self.ratios[name] if self.gain and name in self.ratios else None


class GenerateResult(Timed, Value):
    """A model of transformers that generates for `rows` sequences; times are milliseconds a token on the wall clock.

    With a dynamic or static `cache`, whole calls are timed; in continuous batching, from the first token to the last.
    """

    cache: Cache
    rows: Size
    ways: Ways

    @property
    def ratio(self) -> float | None:
        """The time of ours over that of bf16; None if one is missing."""
        return 1 / self.ratios["bf16"] if "bf16" in self.ratios else None


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
    generation : dict
        Of the model that generates: layers, vocabulary, and tokens of a prompt and new ones.
    """

    kind: Literal["skuda bench-model"] = "skuda bench-model"
    schema_version: Literal[1] = 1
    repeats: Size
    sizes: dict[str, Size]
    ranks: Size = 0
    graph: bool
    computes: dict[str, str] = Field(default_factory=dict)
    absent: dict[str, str] = Field(default_factory=dict)
    phases: tuple[PhaseResult, ...] = ()
    host: tuple[FormResult, ...] = ()
    generation: dict[str, Size] = Field(default_factory=dict)
    generated: tuple[GenerateResult, ...] = ()

    @model_validator(mode="after")
    def _of_something(self) -> Self:
        if not (self.phases or self.host or self.generated):
            self.refuse("phases", "none", "be given where neither calls on the host nor generation was measured")
        return self

    @classmethod
    def _read(cls, path: Path) -> Any:
        """Read a file; what the retired ``skuda bench-parallel`` recorded becomes a record of this kind."""
        found = super()._read(path)
        if not isinstance(found, dict) or found.get("kind") != "skuda bench-parallel":
            return found
        try:
            job = found.pop("orders")
            phases = [{"phase": "mlp", "cache": 0, **result} for result in found.pop("results")]
            for phase in phases:
                timings = phase.pop("timings", {})
                phase["ways"] = [
                    {"name": name, **({"timing": timings[name]} if name in timings else {"refused": "not timed"})}
                    for name in RANKED
                ]
            sizes = {name: job[name] for name in LLAMA_3_70B}
            own = {"repeats": job["repeats"], "ranks": job["count"], "sizes": sizes, "computes": RANKED}
        except (AttributeError, KeyError, TypeError) as error:
            rule = "have orders and results, as `skuda bench-parallel` wrote them"
            raise InvalidRecord(cls.maker(), str(path), f"{type(error).__name__}: {error}", rule) from error
        return {**found, **own, "kind": "skuda bench-model", "seed": job.get("seed"), "phases": phases}

    @property
    def host_ratios(self) -> dict[str, float]:
        """The cost of a call over that of the call that it replaces, by name."""
        costs = {cost.name: cost.timing.median for cost in self.host if cost.timing is not None}
        found = {}
        for name, (over, _, less) in HOST.items():
            off = costs.get(less, 0.0)
            if {name, over, less} - {""} <= costs.keys() and costs[over] > off:
                found[name] = (costs[name] - off) / (costs[over] - off)
        return found

    @property
    def wrong(self) -> tuple[str, ...]:
        """The phases in which outputs of ours differ, and where ours does not generate but bf16 does."""
        differ = (f"{phase.phase} {phase.rows}: {phase.wrong}" for phase in self.phases if phase.wrong)
        failed = (
            f"{each.cache}, {each.rows} sequences: {one.name}: {one.refused}"
            for each in self.generated
            for one in each.ways
            if one.refused and one.name in OURS and each.times
        )
        return (*differ, *failed)


def sections(record: ModelRecord) -> Sections:
    """Return the sections: ``phases`` (times), ``requirements``, ``host`` (calls), ``generate`` and ``facts``."""
    weights = "Gaussian weights of deviation 1 / sqrt(K)" + (
        "" if record.ranks else "; no embeddings, last norm and head"
    )
    about = {
        "MLP" if record.ranks else "stack": f"{_named(record.sizes)}; {weights}",
        "ranks": str(record.ranks) if record.ranks else "",
        "timed": "replays of a CUDA graph" if record.graph else "calls on the CPU",
        "generation": _named(record.generation),
        **record.computes,
        **{f"absent: {name}": why for name, why in record.absent.items()},
    }
    return {
        "phases": _phases(record) if record.phases else (),
        "requirements": (_rank_requirements if record.ranks else _requirements)(record),
        "host": _host(record) if record.host else (),
        "generate": _generate(record) if record.generated else (),
        "facts": (record.facts(**about),),
    }


def _named(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {size}" for name, size in sizes.items())


def _host(record: ModelRecord) -> Parts:
    ratios, timed = record.host_ratios, [(one.name, one.timing) for one in record.host if one.timing is not None]
    rows = [
        (name, f"{t.median:.2f}", f"{t.p90:.2f}", f"{ratios[name]:.2f} x {HOST[name].over}" if name in ratios else "")
        for name, t in timed
    ]
    notes = (Text(f"{one.name}: {one.refused}", "yellow") for one in record.host if one.refused)
    return (Table(("call", "median, us", "p90, us", "over"), rows, "Calls on the host"), *notes)


def _generate(record: ModelRecord) -> Parts:
    """Return the milliseconds of a token by cache, sequences and form, and why forms were refused."""
    names = list(dict.fromkeys(one.name for each in record.generated for one in each.ways))
    rows, notes = [], []
    for each in record.generated:
        cells = (f"{each.times[name]:.2f}" if name in each.times else "-" for name in names)
        rows.append((each.cache, each.rows, *cells, "-" if each.ratio is None else f"{each.ratio:.2f}"))
        where = f"{each.cache}, {each.rows} sequences"
        notes += [Text(f"{one.name} refuses {where}: {one.refused}", "yellow") for one in each.ways if one.refused]
    headings = ("cache", "sequences", *(f"{name}, ms" for name in names), "ours over bf16")
    return (Table(headings, rows, "Milliseconds of a token that transformers generates"), *notes)


def _phases(record: ModelRecord) -> Parts:
    """Return the microseconds of a layer by phase and form, with the ratio to the fastest of ours, and the gain."""
    names, layers, rows = list(record.computes), record.sizes.get("layers", 1), []
    for phase in record.phases:
        missing = Text("wrong", style="bold red") if phase.wrong else Text("-", style="dim")
        times, ratios = phase.times, phase.ratios
        cells = [f"{times[n] / layers:.1f} ({ratios[n]:.2f})" if n in ratios else missing for n in names]
        rows.append((phase.phase, phase.rows, phase.cache, "-" if phase.gain is None else f"{phase.gain:.2f}", *cells))
    if record.ranks:
        table = Table(("M", *names), [(row[1], *row[4:]) for row in rows], words=0)
        wrong = (Text(line, style="red") for line in record.wrong)
        return table, f"Microseconds, and in brackets over {INT8_ALL}.", *wrong
    table = Table(("phase", "M", "cache", "gain", *names), rows, extra=len(names))
    about = (
        "Microseconds of a layer, and in brackets over the fastest of ours with torch's attention; "
        "gain: the faster of bf16 over that."
    )
    return table, about


def _rank_requirements(record: ModelRecord) -> Parts:
    """Judge a record of ranks; figures are for CUDA graphs of Llama 3 70B's MLP on two H200s."""
    figures = [
        Requirement.ratio(f"{phase.rows} rows: {form} over {INT8_ALL}", phase.ratios.get(form), bound)
        for phase in record.phases
        if not _FEW < phase.rows < _MANY
        for form, bound in zip((INT8_ONE, REAL_ALL), _RANK_GAINS[phase.rows <= _FEW], strict=True)
    ]
    ranks = (record.ranks == 2, f"there are {record.ranks} ranks, not 2")
    sizes = (record.sizes == LLAMA_3_70B, "the sizes are not those of Llama 3 70B")
    return _judged(record, "bits on all ranks and on one", figures, ranks, sizes)


def _judged(record: ModelRecord, what: str, figures: list[Requirement], *unlike: tuple[bool, str]) -> Parts:
    """Return the table of requirements: bits, and figures, which are for an H200 and a run like `unlike` says."""
    wrong = ", ".join(f"{phase.phase} {phase.rows}" for phase in record.phases if phase.wrong)
    bits = Requirement.equal(what, wrong, sum(phase.compared for phase in record.phases))
    card = device_named("h200").name
    here = (record.card == card, f"the device is {record.card}, not {card}")
    return requirements(bits, figures, (here, (record.graph, "no CUDA graph is timed"), *unlike))


def _requirements(record: ModelRecord) -> Parts:
    """Judge a record; figures are for CUDA graphs of layers of Llama 3 8B on an H200."""
    # The faster form in bf16 is known where both were timed.
    timed = [p for p in record.phases if set(REAL) <= p.times.keys()]
    gains = {(p.phase, p.rows): p.gain for p in timed if p.phase == "prefill" or p.cache == _CACHE}
    figures = [
        Requirement.ratio(f"{p} {m}: faster form in bf16 over ours", gains.get((p, m)), GAINS[p, m]) for p, m in GAINS
    ]
    phases = {(p.phase, p.rows, p.cache): p for p in timed}
    for name, wanted in FURTHER_GAINS.items():
        for (phase, m, seen), least in wanted.items():
            what = f"{phase} {m} over {seen} positions: faster form in bf16 over {name}"
            found = phases.get((phase, m, seen))
            gain = None if found is None else found.gain_of(name)
            figures.append(Requirement.ratio(what, gain, least))
    for name in _RIVALS:
        ratios = [phase.ratios[name] for phase in record.phases if name in phase.ratios]
        figures.append(Requirement.ratio(f"{name} over ours, lowest", min(ratios, default=None), _OVER_RIVALS))
    for name, (over, at_most, _) in HOST.items():
        if at_most is not None:
            what, cost = f"{name} on the host over {over}", record.host_ratios.get(name)
            figures.append(Requirement.ratio(what, cost, at_most, at_most=True))
    generated = {(each.cache, each.rows): each.ratio for each in record.generated}
    for cache, rows in product(CACHES, SEQUENCES):
        what, time = f"a token, {cache}, {rows} at once: ours over bf16", generated.get((cache, rows))
        figures.append(Requirement.ratio(what, time, _GENERATED, at_most=True))
    sizes = ({**record.sizes, **LLAMA_3_8B} == record.sizes, "the sizes are not those of Llama 3 8B")
    return _judged(record, "bits of ours, eager, compiled and replayed", figures, sizes)
