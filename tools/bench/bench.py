"""Running a bench: every case against its rivals, interleaved, behind the same flushed cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

from skuda.dispatch.backends.cuda import CudaBackend
from skuda.dispatch.plan import Plan
from skuda.dispatch.select.environment import driver_version, skuda_version, versions
from skuda.dispatch.select.explanation import as_json
from skuda.registry.descriptor import Descriptor
from skuda.registry.errors import SkudaError
from skuda.tools.bench.clock import Replay
from skuda.tools.bench.lab import Ceiling
from skuda.tools.bench.measurement import Arrays, Measurement, Offer, error_line, time_interleaved
from skuda.tools.bench.record import BenchRecord, CaseResult, Ceilings, HostCost, RivalResult, measurer_hash
from skuda.tools.bench.rivals import Alternatives, Rival, absence, rivals_of
from skuda.tools.bench.work import work_of
from skuda.tools.output import Report
from skuda.tools.verify.fingerprint import source_hash
from skuda.tools.words.cases import BenchCase

RivalsOf = Callable[[Descriptor], tuple[Rival, ...]]

_PACKAGES = ("triton", "bitsandbytes", "torchao", "cupy-cuda12x", "cupy-cuda13x")
_OURS = "skuda"
_QUICK = 5
"""Rounds that choose the fastest of several alternatives."""
_NEAR = 1.5
"""Alternatives that take longer than this multiple of the fastest in a first round have no part in the others."""


class _Entrant(NamedTuple):
    """A rival in one case: its repeatable call, the microseconds of one run, and the chosen alternative."""

    replay: Replay | None = None
    us: float = 0.0
    chosen: str = ""
    refused: str = ""


@dataclass(frozen=True)
class Bench(Measurement):
    """Measures the kernels that the dispatcher chooses.

    `rivals` returns the rivals for a problem. `absent` gives the reason for each rival that is known to be unavailable.
    """

    rivals: RivalsOf = rivals_of
    absent: dict[str, str] = field(default_factory=dict)

    def run(
        self,
        cases: Sequence[BenchCase],
        *,
        command: str,
        host: Callable[[], tuple[HostCost, ...]] = tuple,
        progress: Report | None = None,
    ) -> BenchRecord:
        """Measure cases between two measurements of the ceilings; a refusal is recorded and the run continues.

        `command` is the command line that repeats the run, and `host` returns the costs of a launch on the host.
        """
        start = time.perf_counter()
        report: Report = progress or (lambda done, total, what: None)  # noqa: ARG005  nobody watches
        self.compile(self._offers(cases), report)
        makers = self.lab.ceilings()
        first = self._ceilings(makers)
        results = []
        for number, case in enumerate(cases):
            report(number, len(cases), case.label)
            results.append(self.measure(case))
        ceilings = first.best(self._ceilings(makers))
        report(len(cases), len(cases), "host")
        return BenchRecord(
            device=self.device,
            driver=driver_version() if self.device.processor == "cuda" else "",
            versions=versions(_PACKAGES),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            skuda=skuda_version(),
            seed=self.seed,
            repeats=self.repeats,
            command=command,
            flush="clean",
            ceilings=ceilings,
            absent=self.absent,
            cases=tuple(result.judged(ceilings) for result in results),
            host=_safely(host),
            measurer_hash=measurer_hash(),
            seconds=round(time.perf_counter() - start, 1),
        )

    def measure(self, case: BenchCase) -> CaseResult:
        """Measure one case; if the result is wrong or missing, the case is recorded as refused and not timed."""
        result = self.described(case)
        try:
            plan = self.dispatcher.select(case.problem, self.preference, self.device)
            result = result.model_copy(update=self._named(plan))
            return result.model_copy(update=self._timed(plan))
        except SkudaError as error:
            return result.model_copy(update={"refused": str(error).partition("\n")[0]})
        except Exception as error:  # noqa: BLE001  too little memory, a device that is lost
            return result.model_copy(update={"refused": error_line(error)})
        finally:
            self.tidy()

    def described(self, case: BenchCase) -> CaseResult:
        """Return a case's result without times."""
        work = work_of(case.problem)
        return CaseResult(
            label=case.label,
            op=case.op,
            shape=case.shape,
            element=case.element,
            problem=as_json(case.problem),
            bytes=work.bytes,
            operations=work.operations,
        )

    def _named(self, plan: Plan) -> dict[str, Any]:
        """Return the result's fields for the kernel of a plan and its launch."""
        sku, backend = plan.sku, self.dispatcher.backends[plan.sku.backend]
        steps: tuple[str, ...] = ()
        if isinstance(backend, CudaBackend):
            launch = backend.launch_of(sku, plan.problem, self.device, plan.choice)
            steps = tuple(f"{s.entry} grid {_dim(s.grid)} block {_dim(s.block)}" for s in launch.steps)
        return {"sku": sku.id, "steps": steps, "source_hash": source_hash(sku)}

    def _timed(self, plan: Plan) -> dict[str, Any]:
        """Return the times of a plan and its rivals, or the reason why the plan's result is wrong."""
        problem = plan.problem
        inputs, outputs = self.draw(problem)
        ours, us, wrong = self.checked(plan.bind(**inputs, **outputs), plan.sku, problem, inputs, outputs)
        if wrong:
            return {"refused": wrong}
        return self.compared(ours, us, self.rivals(problem), problem, inputs)

    def compared(
        self, ours: Replay, us: float, rivals: Sequence[Rival], problem: Descriptor, inputs: Arrays
    ) -> dict[str, Any]:
        """Return the times of a call of ours, which takes about `us`, and of rivals, as fields of a result."""
        entrants = {rival.name: self._entrant(rival, problem, inputs) for rival in rivals}
        replays = {_OURS: ours} | {name: one.replay for name, one in entrants.items() if one.replay is not None}
        self.lab.reading()  # what was read before is not about these rounds
        timings = self.timed(replays, {_OURS: us} | {name: one.us for name, one in entrants.items()})
        read = self.lab.reading()
        results = (
            RivalResult(
                name=rival.name,
                computes=rival.computes,
                timing=timings.get(rival.name),
                refused=entrants[rival.name].refused,
                chosen=entrants[rival.name].chosen,
            )
            for rival in rivals
        )
        return {"timing": timings[_OURS], "rivals": tuple(results)} | (read._asdict() if read else {})

    def _entrant(self, rival: Rival, problem: Descriptor, inputs: Arrays) -> _Entrant:
        """Prepare a rival, or give the reason why it does not take part."""
        if rival.name not in self.absent and (reason := absence(rival)):
            self.absent[rival.name] = reason
        if rival.name in self.absent:
            return _Entrant(refused=self.absent[rival.name])
        try:
            call = rival.make(problem, inputs)
            if isinstance(call, Alternatives):
                replay, chosen = self._fastest(problem, inputs, call)
            else:
                replay, chosen = self.lab.capture(call) if rival.graph else call, ""
            return _Entrant(replay, self.lab.measure([replay])[0], chosen)
        except Exception as error:  # noqa: BLE001  a foreign routine can fail in any way, and says how
            return _Entrant(refused=error_line(error))

    def _fastest(self, problem: Descriptor, inputs: Arrays, alternatives: Alternatives) -> tuple[Replay, str]:
        """Return the fastest alternative of a few quick runs and its name, after checking its result."""
        lab, able, failed = self.lab, dict(alternatives.calls), []
        for name, call in alternatives.calls.items():
            try:
                lab.measure([call])  # the first run loads the kernel
            except Exception as error:  # noqa: BLE001  as every foreign routine; one of them may refuse the shape
                able.pop(name)
                failed.append(error_line(error))
        if not able:
            raise RuntimeError(failed[0] if failed else "there is no alternative")
        first = dict(zip(able, lab.measure(list(able.values())), strict=True))
        able = {name: able[name] for name, us in first.items() if us <= _NEAR * min(first.values())}
        quick = time_interleaved(lab, able, dict.fromkeys(able, _QUICK))
        best = min(quick, key=lambda name: quick[name].median)
        replay = lab.capture(able[best])
        lab.poison(alternatives.outputs)
        lab.measure([replay])
        op = self.dispatcher.registry.ops[problem.op_name()]
        wrong = lab.mismatch(op, problem, inputs, alternatives.outputs, 0)
        if wrong:
            raise RuntimeError(f"{best}: {wrong}")
        return replay, best

    def _ceilings(self, makers: Sequence[Ceiling]) -> Ceilings:
        found: dict[str, Any] = {}
        notes = [self.lab.unwatched] if self.lab.unwatched else []
        for ceiling in makers:
            try:
                call = ceiling.make()
                replay = self.lab.capture(call) if ceiling.graph else call
                timing = self.timed({ceiling.name: replay}, {ceiling.name: 0.0})[ceiling.name]
                value = ceiling.amount / timing.median * 1e6 if ceiling.amount else timing.median
                found[ceiling.name] = max(value, found.get(ceiling.name, 0.0))
            except Exception as error:  # noqa: BLE001  a card without fp8, too little memory
                notes.append(f"{ceiling.name}: {error_line(error)}")
            finally:
                self.tidy()
        return Ceilings(**found, notes=tuple(notes))

    def _offers(self, cases: Sequence[BenchCase]) -> list[Offer]:
        """Return the kernels that the dispatcher will choose for the cases."""
        found = []
        for case in cases:
            explained = self.dispatcher.explain(case.problem, self.preference, self.device)
            sku = self.dispatcher.registry.sku(explained.chosen or "")
            if sku is not None:
                found.append(Offer(sku, case.problem, explained.choice))
        return found


def _safely(host: Callable[[], tuple[HostCost, ...]]) -> tuple[HostCost, ...]:
    try:
        return host()
    except Exception as error:  # noqa: BLE001  a device that is lost must not cost the record
        return (HostCost(name="all", refused=error_line(error)),)


def _dim(size: tuple[int, int, int]) -> str:
    """Format a grid or block without its trailing ones."""
    kept = max((at + 1 for at, n in enumerate(size) if n != 1), default=1)
    return "x".join(map(str, size[:kept]))
