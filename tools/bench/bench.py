"""``skuda bench``: every case against its rivals, interleaved, behind the same flushed cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from skuda.dispatch import Dispatcher
from skuda.dispatch.backends.cuda import CudaBackend
from skuda.dispatch.plan import Plan
from skuda.dispatch.select.explanation import as_json
from skuda.registry.descriptor import Descriptor
from skuda.registry.errors import SkudaError
from skuda.registry.registry import Registry
from skuda.tools.bench import report
from skuda.tools.bench.cutlass.rival import Cutlass
from skuda.tools.bench.lab import Ceiling, TorchLab
from skuda.tools.bench.record import OURS, BenchRecord, CaseResult, Ceilings, RivalResult, least_work
from skuda.tools.bench.rival import Alternatives, Rival
from skuda.tools.bench.rivals import absence, rivals_of
from skuda.tools.bench.timing import (
    Arrays,
    Measurement,
    Ready,
    WrongResult,
    error_line,
    max_ulps,
    prepared,
    time_interleaved,
)
from skuda.tools.bench.vllm import Vllm
from skuda.tools.frame.run import Findings, NoDevice, Study
from skuda.tools.options import (
    Element,
    File,
    Json,
    Markdown,
    Output,
    Random,
    Repeats,
    Seed,
    Show,
    Word,
    Words,
    argument,
    option,
)
from skuda.tools.output import Report, chosen, one_of, split
from skuda.tools.parse.cases import BenchCase, random_shapes, rank_of, select_cases, select_ops
from skuda.tools.parse.shapes import read_rows, read_shapes
from skuda.tools.verify.fingerprint import source_hash
from skuda.tools.verify.stamps import stamp

_FEW = ("cutlass", "vllm", "bf16")
"""Rivals at random shapes, where compiling and tuning the others would take most of the time."""
_QUICK = 5
"""Rounds that choose the fastest of several alternatives."""
_NEAR = 1.5
"""Alternatives that take longer than this multiple of the fastest in a first round have no part in the others."""


def measure(
    watch: Report,
    *,
    ops: Sequence[str] = (),
    shapes: Sequence[str] = (),
    m: Sequence[str] = (),
    random: int | None = None,
    element: Sequence[str] = (),
    rivals: Sequence[str] = (),
    backend: str | None = None,
    repeats: int = 20,
    cutlass: Path | None = None,
    vllm: Path | None = None,
    seed: int = 0,
) -> Findings:
    """Measure the kernels that the dispatcher chooses for some cases; `skuda bench --help` explains the options."""
    dispatcher = Dispatcher()
    registry = dispatcher.registry
    cases = cases_of(registry, split(ops), split(shapes), split(m), split(element), random, seed)
    one_of("bench", "--backend", backend, registry.backends)
    known = dict.fromkeys(rival.name for case in cases for rival in rivals_of(case.problem))
    wanted = chosen("bench", "--rivals", rivals, known)
    device = next((one for one in dispatcher.devices if one.processor == "cuda"), None)
    libraries = (Cutlass.load(cutlass, device), Vllm.load(vllm))
    if device is None:
        raise NoDevice("a bench needs a CUDA device, and none is here: `skuda doctor` says what is missing")
    drawn = {case.problem for case, is_drawn in cases.items() if is_drawn}

    def selected(problem: Descriptor) -> list[Rival]:
        names = wanted or (_FEW if problem in drawn else known)
        return [rival for rival in rivals_of(problem, libraries) if rival.name in names]

    bench = KernelBench(dispatcher, device, TorchLab(device), seed, repeats, backend, rivals=selected)
    return device, bench.run(cases, watch)


def cases_of(
    registry: Registry,
    names: Sequence[str],
    shapes: Sequence[str],
    rows: Sequence[str],
    elements: Sequence[str],
    random: int | None,
    seed: int,
) -> dict[BenchCase, bool]:
    """Return the cases, and whether the shape of each was drawn at random; raise `InvalidProblem` for bad ones."""
    ranks = {op: rank_of(registry.ops[op]) for op in select_ops(registry, names)}
    sizes = read_shapes(shapes, set(ranks.values()), read_rows(rows))
    found = dict.fromkeys(select_cases(registry, names, sizes, elements), False)
    drawn = random_shapes(registry, names, random, seed)
    products = [op for op, rank in ranks.items() if rank == 3] if drawn else []
    more = (case for op in products for case in select_cases(registry, [op], drawn, elements))
    return found | {case: True for case in more if case not in found}


@dataclass(frozen=True)
class KernelBench(Measurement):
    """Measures the kernels that the dispatcher chooses, against what `rivals` returns for a problem.

    `absent` holds the reason for each rival that is known to be unavailable.
    """

    rivals: Callable[[Descriptor], Sequence[Rival]] = rivals_of
    absent: dict[str, str] = field(default_factory=dict)

    def run(self, cases: Mapping[BenchCase, bool], watch: Report) -> dict[str, Any]:
        """Measure the ceilings and then cases; return the fields of the record.

        The value of a case says whether its shape was drawn at random. A refusal is recorded and the run continues.
        """
        watch(0, len(cases), "ceilings")
        ceilings, results = self._ceilings(), []
        for number, (case, drawn) in enumerate(cases.items()):
            watch(number, len(cases), case.label)
            results.append(self.measure(case).model_copy(update={"drawn": drawn}))
        measured = {"repeats": self.repeats, "flush": "clean", "ceilings": ceilings, "absent": self.absent}
        return {**measured, "cases": tuple(results)}

    def measure(self, case: BenchCase) -> CaseResult:
        """Measure one case; if the result is wrong or missing, the case is recorded as refused and not timed."""
        moved, operations = least_work(case.problem)
        found: dict[str, Any] = {}
        try:
            plan = self.dispatcher.select(case.problem, self.preference, self.device)
            found |= self._named(plan)
            found |= self._timed(plan)
        except (SkudaError, WrongResult) as error:
            found["refused"] = str(error).partition("\n")[0]
        except Exception as error:  # noqa: BLE001  too little memory, a device that is lost
            found["refused"] = error_line(error)
        finally:
            self.tidy()
        return CaseResult(
            label=case.label,
            op=case.op,
            shape=case.shape,
            element=case.element,
            problem=as_json(case.problem),
            bytes=moved,
            operations=operations,
            **found,
        )

    def _named(self, plan: Plan) -> dict[str, Any]:
        """Return the result's fields for the kernel of a plan and its launch."""
        sku, backend = plan.sku, self.dispatcher.backends[plan.sku.backend]
        steps: tuple[str, ...] = ()
        if isinstance(backend, CudaBackend):
            launch = backend.launch_of(sku, plan.problem, self.device, plan.choice)
            steps = tuple(f"{s.entry} grid {_size(s.grid)} block {_size(s.block)}" for s in launch.steps)
        made = stamp(sku, (plan.problem,), self.device, backend, plan.choice)
        return {"sku": sku.id, "steps": steps, "source_hash": source_hash(sku), **made._asdict()}

    def _timed(self, plan: Plan) -> dict[str, Any]:
        """Return the times of a plan and its rivals; raise `WrongResult` if the plan's result is wrong."""
        problem, (inputs, outputs) = plan.problem, self.draw(plan.problem)
        wrong = partial(self.mismatch, problem, inputs, outputs, max_ulps(plan.sku, problem))
        ours = self.checked(plan.bind(**inputs, **outputs), partial(self.lab.poison, outputs), wrong)
        rivals = self.rivals(problem)
        self.absent.update((one.name, why) for one in rivals if one.name not in self.absent and (why := absence(one)))
        able = {one.name: partial(self._ready, one, problem, inputs) for one in rivals if one.name not in self.absent}
        ready, refused = prepared(able)
        timings = self.timed({OURS: ours, **ready})
        results = (
            RivalResult(
                name=one.name,
                computes=one.computes,
                timing=timings.get(one.name),
                refused=(self.absent | refused).get(one.name, ""),
                chosen=ready[one.name].chosen if one.name in ready else "",
            )
            for one in rivals
        )
        return {"timing": timings[OURS], "rivals": tuple(results)}

    def _ready(self, rival: Rival, problem: Descriptor, inputs: Arrays) -> Ready:
        """Prepare a rival; one that has alternatives is its fastest."""
        call = rival.make(problem, inputs)
        if isinstance(call, Alternatives):
            return self._fastest(call)
        replay = self.lab.capture(call)
        return Ready(replay, self.lab.measure([replay])[0])

    def _fastest(self, alternatives: Alternatives) -> Ready:
        """Return the fastest alternative of a few quick runs, after checking its results."""
        measure = self.lab.measure
        # The first run loads the kernel; one of them may refuse the shape.
        loads = {
            name: partial(lambda call: Ready(call, measure([call])[0]), one) for name, one in alternatives.calls.items()
        }
        able, failed = prepared(loads)
        if not able:
            raise RuntimeError(next(iter(failed.values()), "there is no alternative"))
        calls = {name: one.replay for name, one in able.items()}
        first = dict(zip(calls, measure(list(calls.values())), strict=True))
        calls = {name: calls[name] for name, us in first.items() if us <= _NEAR * min(first.values())}
        quick = time_interleaved(measure, calls, dict.fromkeys(calls, _QUICK))
        best = min(quick, key=lambda name: quick[name].median)

        def fresh() -> None:
            for check in alternatives.checks:
                self.lab.poison(check.outputs)

        def wrong() -> str:
            found = next(filter(None, (self.mismatch(*check) for check in alternatives.checks)), "")
            return f"{best}: {found}" if found and best else found

        return self.checked(calls[best], fresh, wrong)._replace(chosen=best)

    def _ceilings(self) -> Ceilings:
        found: dict[str, Any] = {}
        notes: list[str] = []
        for ceiling in self.lab.ceilings():
            ready, refused = prepared({ceiling.name: partial(self._ceiling, ceiling)})
            notes += [f"{name}: {why}" for name, why in refused.items()]
            found |= {name: max(one.us, found.get(name, 0.0)) for name, one in ready.items()}
            self.tidy()
        return Ceilings(**found, notes=tuple(notes))

    def _ceiling(self, ceiling: Ceiling) -> Ready:
        call = ceiling.make()
        replay = self.lab.capture(call) if ceiling.graph else call
        us = self.timed({ceiling.name: Ready(replay, 0.0)})[ceiling.name].median
        return Ready(replay, ceiling.amount / us * 1e6 if ceiling.amount else us)


def _size(size: tuple[int, int, int]) -> str:
    """Format a grid or block without its trailing ones."""
    kept = max((at + 1 for at, n in enumerate(size) if n != 1), default=1)
    return "x".join(map(str, size[:kept]))


STUDY = Study(BenchRecord, measure, report.sections, report.apart)


def run(
    ops: Annotated[
        Words, argument("[OPS]...", "Ops, or quantize, linear, cache, logits, all; all if left out.")
    ] = None,
    *,
    shapes: Annotated[
        Words,
        option(
            "SHAPE",
            "ROWSxCOLUMNS, MxNxK for a product, SEQUENCESxNEWxKEYSxHEAD_SIZE on a cache, a file of these, "
            "or llama-3-8b, llama-3-70b, minilm.",
        ),
    ] = None,
    m: Annotated[Words, option("ROWS", "Numbers of rows for a model's shapes.", "--m")] = None,
    random: Random = None,
    element: Element = None,
    rivals: Annotated[Words, option("NAME", "Only these rivals; cutlass, vllm and bf16 at random shapes.")] = None,
    backend: Annotated[Word, option("NAME", "Insist on this backend.", "--backend", "--prefer-backend")] = None,
    seed: Seed = None,
    repeats: Repeats = None,
    cutlass: Annotated[File, option("FOLDER", "Compare products with CUTLASS, built into this folder.")] = None,
    vllm: Annotated[File, option("LIBRARY", "Compare with the kernels of this library, or package, of vLLM.")] = None,
    output: Output = None,
    show: Show = None,
    markdown: Markdown = None,
    as_json: Json = False,
) -> int:
    """Measure the kernels that are chosen, against rivals.

    Needs a CUDA device and torch. Results are compared before they are timed; a wrong one is refused, and the exit
    status is 1. Rivals are timed alternately with the kernel, after a flush of the cache; absent ones are named.
    CUTLASS takes part where --cutlass names a folder of its built objects; else the record says what builds them. The
    int8 kernels of vLLM take part where --vllm names its library.
    """
    return STUDY.run(**locals())
