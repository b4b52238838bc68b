"""Running a bench: every case against its rivals, in turn, behind the same flushed cache."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

from skuda.dispatch import Dispatcher, PlanPreference
from skuda.dispatch.backends.cuda import CudaBackend
from skuda.dispatch.device import Device
from skuda.dispatch.environment import driver_version
from skuda.dispatch.explanation import as_json
from skuda.dispatch.plan import Plan
from skuda.dispatch.timing import Timing
from skuda.registry.descriptor import Descriptor, Role
from skuda.registry.errors import SkudaError
from skuda.registry.sku import KernelSku
from skuda.tools.bench_cases import BenchCase, work_of
from skuda.tools.bench_lab import Ceiling, Lab, Replay
from skuda.tools.bench_record import BenchRecord, CaseResult, Ceilings, HostCost, RivalResult
from skuda.tools.bench_rivals import Rival, Ways, absence, rivals_of, said
from skuda.tools.cubins import Wanted, build_cubins, cubins_of
from skuda.tools.fingerprint import source_hash
from skuda.tools.output import Report
from skuda.tools.trial import allowed_ulps
from skuda.tools.verifying import skuda_version, versions

Name = TypeVar("Name", bound=Hashable)
RivalsOf = Callable[[Descriptor], tuple[Rival, ...]]

_PACKAGES = ("triton", "bitsandbytes", "torchao", "cupy-cuda12x", "cupy-cuda13x")
_OURS = "skuda"
_FEWEST = 3
"""Rounds of what one budget holds less often."""
_QUICK = 5
"""Rounds that choose the fastest of several ways."""


@dataclass(frozen=True)
class Bench:
    """How to measure.

    Attributes
    ----------
    dispatcher : Dispatcher
        What chooses the kernels.
    device : Device
        Where.
    lab : Lab
        Arrays and clock there.
    seed : int
        What inputs are drawn from.
    repeats : int
        Rounds of everything that a budget holds as often.
    budget : float
        Seconds for the rounds of one contestant of one case.
    backend : str or None
        The backend to insist on.
    rivals : callable
        Returns the rivals for a problem.
    """

    dispatcher: Dispatcher
    device: Device
    lab: Lab
    seed: int
    repeats: int = 20
    budget: float = 0.4
    backend: str | None = None
    rivals: RivalsOf = rivals_of
    absent: dict[str, str] = field(default_factory=dict)

    @property
    def preference(self) -> PlanPreference:
        """What selection insists on."""
        return PlanPreference(backend=self.backend)

    def run(
        self,
        cases: Sequence[BenchCase],
        *,
        command: str,
        host: Callable[[], tuple[HostCost, ...]] = tuple,
        progress: Report | None = None,
    ) -> BenchRecord:
        """Measure cases, between two measurements of the ceilings.

        What is refused is recorded and the rest goes on.

        Parameters
        ----------
        cases : sequence of BenchCase
            What to measure.
        command : str
            The command line that does it again.
        host : callable
            Returns what launching costs the host; none where it is left out.
        progress : callable or None
            Told about every case.
        """
        start = time.perf_counter()
        report: Report = progress or (lambda done, total, what: None)  # noqa: ARG005  nobody is told
        self._compile(cases, report)
        makers = self.lab.ceilings()
        first = self._ceilings(makers)
        results = []
        for number, case in enumerate(cases):
            report(number, len(cases), case.label)
            results.append(self.measure(case))
        last = self._ceilings(makers)
        report(len(cases), len(cases), "host")
        costs = self._host(host)
        ceilings = best_ceilings(first, last)
        return BenchRecord(
            device=self.device,
            driver=driver_version() if self.device.processor == "cuda" else "",
            versions=versions(_PACKAGES),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            skuda=skuda_version(),
            seed=self.seed,
            repeats=self.repeats,
            command=command,
            seconds=round(time.perf_counter() - start, 1),
            flush="clean",
            ceilings=ceilings,
            absent=self.absent,
            cases=tuple(result.judged(ceilings) for result in results),
            host=costs,
        )

    def measure(self, case: BenchCase) -> CaseResult:
        """Measure one case; a wrong result, or none, is recorded as refused and not timed.

        Parameters
        ----------
        case : BenchCase
            The case.
        """
        work = work_of(case.problem)
        result = CaseResult(
            label=case.label,
            op=case.op,
            shape=case.shape,
            element=case.element,
            problem=as_json(case.problem),
            bytes=work.bytes,
            operations=work.operations,
        )
        try:
            plan = self.dispatcher.select(case.problem, self.preference, self.device)
            result = result.model_copy(update=self._named(plan))
            return self._timed(case, plan, result)
        except SkudaError as error:
            return result.model_copy(update={"refused": str(error).partition("\n")[0]})
        except Exception as error:  # noqa: BLE001  too little memory, a device that is lost
            return result.model_copy(update={"refused": said(error)})
        finally:
            self._tidy()

    def _tidy(self) -> None:
        # A device that is lost says so here too; the next case says it again, where it is recorded.
        with suppress(Exception):
            self.lab.tidy()

    @staticmethod
    def _host(host: Callable[[], tuple[HostCost, ...]]) -> tuple[HostCost, ...]:
        try:
            return host()
        except Exception as error:  # noqa: BLE001  a device that is lost must not cost the record
            return (HostCost(name="all", refused=said(error)),)

    def _named(self, plan: Plan) -> dict[str, Any]:
        """Say which kernel a plan runs, and what that launches."""
        sku, backend = plan.sku, self.dispatcher.backends[plan.sku.backend]
        steps: tuple[str, ...] = ()
        if isinstance(backend, CudaBackend):
            launch = backend.launch_of(sku, plan.problem, self.device, plan.choice)
            steps = tuple(f"{s.entry} grid {_dim(s.grid)} block {_dim(s.block)}" for s in launch.steps)
        return {"sku": sku.id, "steps": steps, "source_hash": source_hash(sku)}

    def _timed(self, case: BenchCase, plan: Plan, result: CaseResult) -> CaseResult:
        lab, problem = self.lab, case.problem
        inputs = lab.draw(problem, zlib.crc32(f"{self.seed} {case.label}".encode()))
        outputs = lab.outputs(problem)
        ours = lab.capture(plan.bind(**inputs, **outputs), careful=False)
        # What is compared is what is timed: one replay into poisoned outputs.
        lab.poison(outputs)
        estimates = {_OURS: lab.measure([ours])[0]}
        ulps = max_ulps(plan.sku, problem)
        wrong = lab.mismatch(self.dispatcher.registry.ops[case.op], problem, inputs, outputs, ulps)
        if wrong:
            return result.model_copy(update={"refused": wrong})
        rivals, replays, refused = self.rivals(problem), {_OURS: ours}, {}
        chosen: dict[str, str] = {}
        for rival in rivals:
            if rival.name not in self.absent and (away := absence(rival)):
                self.absent[rival.name] = away
            if rival.name in self.absent:
                refused[rival.name] = self.absent[rival.name]
                continue
            try:
                call = rival.make(problem, inputs)
                if isinstance(call, Ways):
                    replays[rival.name], chosen[rival.name] = self._fastest(case, inputs, call)
                else:
                    replays[rival.name] = lab.capture(call) if rival.graph else call
                estimates[rival.name] = lab.measure([replays[rival.name]])[0]
            except Exception as error:  # noqa: BLE001  a foreign routine can fail in any way, and says how
                replays.pop(rival.name, None)
                refused[rival.name] = said(error)
        timings = self._rounds(replays, {name: estimates[name] for name in replays})
        return result.model_copy(
            update={
                "timing": timings[_OURS],
                "rivals": tuple(
                    RivalResult(
                        name=rival.name,
                        computes=rival.computes,
                        timing=timings.get(rival.name),
                        refused=refused.get(rival.name, ""),
                        chosen=chosen.get(rival.name, "") if rival.name in timings else "",
                    )
                    for rival in rivals
                ),
            }
        )

    def _fastest(self, case: BenchCase, inputs: Mapping[str, Any], ways: Ways) -> tuple[Replay, str]:
        """Return the way that quick runs of all found to be the fastest, once its result is right, and its name."""
        lab, able, failed = self.lab, dict(ways.calls), []
        for name, call in ways.calls.items():
            try:
                lab.measure([call])  # the first run loads the kernel
            except Exception as error:  # noqa: BLE001  as every foreign routine; one of them may refuse the shape
                able.pop(name)
                failed.append(said(error))
        if not able:
            raise RuntimeError(failed[0] if failed else "there is no way to do it")
        quick = time_in_turn(lab, able, dict.fromkeys(able, _QUICK))
        best = min(quick, key=lambda name: quick[name].median)
        replay = lab.capture(able[best])
        lab.poison(ways.outputs)
        lab.measure([replay])
        wrong = lab.mismatch(self.dispatcher.registry.ops[case.op], case.problem, inputs, ways.outputs, 0)
        if wrong:
            raise RuntimeError(f"{best}: {wrong}")
        return replay, best

    def _rounds(self, replays: Mapping[str, Replay], estimates: Mapping[str, float]) -> dict[str, Timing]:
        return time_in_turn(self.lab, replays, rounds_each(estimates, self.repeats, self.budget))

    def _ceilings(self, makers: Sequence[Ceiling]) -> Ceilings:
        found: dict[str, Any] = {}
        notes = []
        for ceiling in makers:
            try:
                call = ceiling.make()
                replay = self.lab.capture(call) if ceiling.graph else call
                timing = self._rounds({ceiling.name: replay}, {ceiling.name: 0.0})[ceiling.name]
                speed = ceiling.amount / timing.median * 1e6
                found[ceiling.name] = max(speed, found.get(ceiling.name, 0.0))
            except Exception as error:  # noqa: BLE001  a card without fp8, too little memory
                notes.append(f"{ceiling.name}: {said(error)}")
            finally:
                self._tidy()
        return Ceilings(**found, notes=tuple(notes))

    def _compile(self, cases: Sequence[BenchCase], report: Report) -> None:
        """Fill the cubin cache: one kernel after the other would take minutes."""
        jobs: list[Wanted] = []
        for case in cases:
            explained = self.dispatcher.explain(case.problem, self.preference, self.device)
            sku = self.dispatcher.registry.sku(explained.chosen or "")
            if sku is not None:
                problems, backends, choice = {sku.op: (case.problem,)}, self.dispatcher.backends, explained.choice
                jobs += cubins_of((sku,), problems, backends, self.device, choices=lambda *_, only=choice: (only,))
        # What goes wrong here goes wrong again when the kernel is selected, and is recorded there.
        build_cubins(list({job.identity: job for job in jobs}.values()), report)


def time_in_turn(lab: Lab, replays: Mapping[Name, Replay], rounds: Mapping[Name, int]) -> dict[Name, Timing]:
    """Time contestants in the rounds that they share.

    Parameters
    ----------
    lab : Lab
        Runs them and has the clock.
    replays : mapping of name to callable
        The contestants.
    rounds : mapping of name to int
        How often each runs, at least once.
    """
    turns = schedule(rounds)
    samples: dict[Name, list[float]] = {name: [] for name in replays}
    for name, us in zip(turns, lab.measure([replays[name] for name in turns]), strict=True):
        samples[name].append(us)
    return {name: Timing.of(found) for name, found in samples.items()}


def rounds_each(estimates: Mapping[Name, float], repeats: int, budget: float) -> dict[Name, int]:
    """Return how often each contestant runs.

    As often as asked for, or as its budget allows, though thrice; once where one run takes the whole budget.

    Parameters
    ----------
    estimates : mapping of name to float
        Microseconds of one run, by name.
    repeats : int
        Rounds asked for.
    budget : float
        Seconds for each contestant.
    """
    found = {}
    for name, us in estimates.items():
        seconds = us / 1e6
        fewest = min(repeats, _FEWEST if seconds < budget else 1)
        found[name] = repeats if seconds * repeats <= budget else max(fewest, int(budget / seconds))
    return found


def schedule(rounds: Mapping[Name, int]) -> list[Name]:
    """Return contestants in the order of their runs: all in turn, from another one on every round.

    Who runs less often is spread over the rounds, so that a clock that drifts hits all alike.

    Parameters
    ----------
    rounds : mapping of name to int
        How often each runs.
    """
    names, most = list(rounds), max(rounds.values(), default=0)
    turns: list[Name] = []
    for turn in range(most):
        start = turn % len(names)
        rotated = names[start:] + names[:start]
        turns += [n for n in rotated if (turn + 1) * rounds[n] // most > turn * rounds[n] // most]
    return turns


def best_ceilings(first: Ceilings, last: Ceilings) -> Ceilings:
    """Return the higher of two measurements of each ceiling.

    Parameters
    ----------
    first, last : Ceilings
        Measured before and after everything else.
    """

    def best(a: float | None, b: float | None) -> float | None:
        return max((value for value in (a, b) if value is not None), default=None)

    return Ceilings(
        copy_bandwidth=best(first.copy_bandwidth, last.copy_bandwidth),
        bf16=best(first.bf16, last.bf16),
        fp8=best(first.fp8, last.fp8),
        notes=tuple(dict.fromkeys((*first.notes, *last.notes))),
    )


def max_ulps(sku: KernelSku, problem: Descriptor) -> int | None:
    """Return how far from the definition any output of a kernel may be, in representable values; None: any distance.

    Parameters
    ----------
    sku : KernelSku
        Who promises.
    problem : Descriptor
        The problem.
    """
    made = [argument.elements[0] for argument in problem.arguments() if argument.role is Role.OUTPUT]
    each = [allowed_ulps(sku, problem, element) for element in made]
    distances = [ulps for ulps in each if ulps is not None]
    return None if len(distances) < len(each) else max(distances, default=0)


def _dim(size: tuple[int, int, int]) -> str:
    """Write a grid or block, trailing ones left out."""
    kept = max((at + 1 for at, n in enumerate(size) if n != 1), default=1)
    return "x".join(map(str, size[:kept]))
