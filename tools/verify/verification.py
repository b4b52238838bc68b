"""Runs every kernel over the cases of its op and returns the results as a record."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import UTC, datetime
from functools import partial

import numpy as np

from skuda.dispatch import Dispatcher, PlanPreference
from skuda.dispatch.plan import Plan
from skuda.dispatch.select.environment import driver_version, skuda_version, versions
from skuda.registry.arch import ArchSku
from skuda.registry.descriptor import Descriptor
from skuda.registry.device import Device
from skuda.registry.op import Case, Op
from skuda.registry.sku import KernelSku
from skuda.tools.ship.cubins import Wanted, build_cubin, cubins_of
from skuda.tools.verify.calls import CALLS
from skuda.tools.verify.edges import accepts, always
from skuda.tools.verify.evidence import EvidenceFile, SkuEvidence
from skuda.tools.verify.fingerprint import reference_hash, source_hash, verifier_hash
from skuda.tools.verify.large import LARGE, Copies, Large, Sizes, failed, large_problems, suitable
from skuda.tools.verify.placement import LAYOUTS, Layout, Placement, placement_for
from skuda.tools.verify.trial import Question, Trial, fewer_rows

Progress = Callable[[int, int, str], None]
"""Takes the number of finished runs, the number of all runs, and the op."""

Finished = Callable[[Sequence[SkuEvidence]], None]
"""Takes the evidence of one op's kernels."""

_FEW = 8
"""Number of consecutive calls that a quick verification compares."""


def verify(
    dispatcher: Dispatcher,
    device: Device,
    *,
    ops: Collection[str] = (),
    skus: Collection[str] = (),
    backends: Collection[str] = (),
    seed: int = 0,
    quick: bool = False,
    progress: Progress | None = None,
    finished: Finished | None = None,
    placement: Placement | None = None,
    sizes: Sizes = LARGE,
) -> EvidenceFile:
    """Run every kernel that a device accepts over every case of its op; a failure is recorded and the run continues.

    Parameters
    ----------
    dispatcher : Dispatcher
        Its registry and backends are verified.
    device : Device
        A device of this machine.
    ops, skus, backends : collection of str
        Names to verify; empty for all.
    seed : int
        Seed of the inputs.
    quick : bool
        Whether to use two layouts per case, a few consecutive calls, and no large problems.
    progress : callable or None
        Called for every case of every kernel.
    finished : callable or None
        Called after every op.
    placement : Placement or None
        Moves arrays to the device and back; None for `placement_for`.
    sizes : Sizes
        Sizes of the large problems.
    """
    kernels = [
        sku
        for sku in dispatcher.registry
        if (not ops or sku.op in ops)
        and (not skus or sku.id in skus)
        and (not backends or sku.backend in backends)
        and (sku.arch is ArchSku.CPU) is (device.processor == "cpu")
    ]
    verifier = verifier_hash()
    run = _Run(dispatcher, device, placement or placement_for(device), seed, None if quick else sizes, progress)
    found = run.all(kernels, finished)
    return EvidenceFile(
        device=device,
        driver=driver_version() if device.processor == "cuda" else "",
        versions=versions(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        skuda=skuda_version(),
        verifier_hash=verifier,
        seed=seed,
        quick=quick,
        skus=tuple(found[sku.id] for sku in kernels),
    )


class _Run:
    """One verification; a quick one if `sizes` is None."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        device: Device,
        placement: Placement,
        seed: int,
        sizes: Sizes | None,
        progress: Progress | None,
    ) -> None:
        self._dispatcher, self._device, self._placement = dispatcher, device, placement
        self._seed, self._sizes, self._progress = seed, sizes, progress
        self._done = self._total = 0
        self._always: dict[str, dict[Case, None]] = {}
        self._lost = ""

    def all(self, kernels: list[KernelSku], finished: Finished | None) -> dict[str, SkuEvidence]:
        """Verify kernels op by op, so that the kernels of all backends share a case's reference."""
        found = {sku.id: self._skipped(sku, note) for sku in kernels if (note := self._obstacle(sku))}
        able: dict[str, list[KernelSku]] = {}
        for sku in kernels:
            if sku.id not in found:
                able.setdefault(sku.op, []).append(sku)
        ops = self._dispatcher.registry.ops
        keys = {name: [case.problem.key() for case in ops[name].cases] for name in able}
        every = [sku for skus in able.values() for sku in skus]
        self._always = {sku.id: dict.fromkeys(always(sku, ops[sku.op].cases)) for sku in every}
        self._total = sum(map(len, self._always.values()))
        self._total += sum(keys[sku.op].count(sku.key) for sku in every)
        # A thread pool fills the cubin cache while earlier ops run. What fails to compile here fails again when the
        # kernel is selected, and is recorded then.
        compiling = ThreadPoolExecutor(os.cpu_count())
        try:
            compiled = {
                name: [compiling.submit(build_cubin, wanted) for wanted in self._cubins(ops[name], skus)]
                for name, skus in able.items()
            }
            for name, skus in able.items():
                self._report(f"{name}, compiling")
                wait(compiled[name])
                mine = self._op(ops[name], skus)
                found |= mine
                if finished is not None:
                    finished(list(mine.values()))
        finally:
            compiling.shutdown(cancel_futures=True)
        return found

    def _report(self, what: str) -> None:
        if self._progress is not None:
            self._progress(self._done, self._total, what)

    def _obstacle(self, sku: KernelSku) -> str:
        """Return why a kernel cannot run here at all; an empty string if it can."""
        if not sku.arch.runs_on(self._device.compute_capability):
            return f"needs {sku.arch.describe()}"
        state = self._dispatcher.status.get(sku.backend)
        if state is None or not state.available:
            return f"backend {sku.backend}: {state.detail if state is not None else 'unknown'}"
        return ""

    @staticmethod
    def _skipped(sku: KernelSku, note: str) -> SkuEvidence:
        return SkuEvidence(sku=sku.id, source_hash=source_hash(sku), verdict="skipped", note=note)

    def _cubins(self, op: Op, skus: list[KernelSku]) -> list[Wanted]:
        """Return the cubins that the kernels need for all problems that they are run on."""
        added = (case.problem for sku in skus for case in self._always[sku.id])
        own = [case.problem for case in op.cases]
        fewer = (part for problem in own if (part := fewer_rows(problem)) is not None)
        large = (each.problem for several in self._large_problems(op, skus) for each in several)
        problems = {op.name: tuple(dict.fromkeys((*own, *fewer, *added, *large)))}
        return cubins_of(skus, problems, self._dispatcher.backends, self._device)

    def _op(self, op: Op, skus: list[KernelSku]) -> dict[str, SkuEvidence]:
        hashes, meaning = {sku.id: source_hash(sku) for sku in skus}, reference_hash(op)
        preferences = {sku.id: PlanPreference(sku=sku.id) for sku in skus}

        def select(sku: KernelSku, problem: Descriptor) -> Plan:
            return self._dispatcher.select(problem, preferences[sku.id], self._device)

        calls = CALLS if self._sizes else _FEW
        trials = [Trial(sku, partial(select, sku), self._placement, calls) for sku in skus]
        for number, case in enumerate(op.cases):
            layouts: tuple[Layout, ...] = LAYOUTS if self._sizes else ("contiguous", LAYOUTS[1 + number % 3])
            self._case(op, number, case, [t for t in trials if t.sku.key == case.problem.key()], layouts)
        added = dict.fromkeys(case for sku in skus for case in self._always[sku.id])
        for number, case in enumerate(added, len(op.cases)):
            mine = [trial for trial in trials if case in self._always[trial.sku.id]]
            self._case(op, number, case, mine, (LAYOUTS[number % len(LAYOUTS)],), again=False)
        self._large(op, trials)
        return {trial.sku.id: self._evidence(trial, hashes[trial.sku.id], meaning) for trial in trials}

    def _case(
        self, op: Op, number: int, case: Case, trials: list[Trial], layouts: tuple[Layout, ...], *, again: bool = True
    ) -> None:
        if not trials:
            return
        rng = np.random.default_rng([self._seed, zlib.crc32(f"{op.name} {number}".encode())])
        question, trouble = None, ""
        try:
            question = Question.ask(op, number, case, rng)
        except Exception as error:  # noqa: BLE001  a plug-in's reference can fail in any way
            trouble = f"the reference failed: {type(error).__name__}: {error}"
        for trial in trials:
            self._done += 1
            self._report(op.name)
            reason = next(filter(None, (rule.check(case.problem) for rule in trial.sku.constraints)), None)
            if question is None:
                trial.refuse(number, case, trouble)
            elif reason is not None:
                trial.finding.note = f"some cases are refused: {reason}"
            elif not self._lost:
                trial.run(question, layouts, rng, again=again)
                self._check_device(trial)

    def _large(self, op: Op, trials: list[Trial]) -> None:
        """Run large problems; kernels with the same problem share its inputs and its reference."""
        of = {trial.sku.id: trial for trial in trials}
        for several, skus in self._large_problems(op, [trial.sku for trial in trials]).items():
            for large in several:
                self._report(f"{op.name}, {large.name}")
                self._share(op, large, [of[sku.id] for sku in skus])

    def _large_problems(self, op: Op, skus: Iterable[KernelSku]) -> dict[tuple[Large, ...], list[KernelSku]]:
        """Return large problems with the kernels to run on them; none in a quick run or with too little memory."""
        sizes = self._sizes
        found: dict[tuple[Large, ...], list[KernelSku]] = {}
        if sizes is None or self._device.memory < sizes.memory:
            return found
        for sku in skus:
            mine = (case.problem for case in op.cases if case.problem.key() == sku.key)
            problem = suitable(problem for problem in mine if accepts(sku, problem))
            if problem is not None:
                found.setdefault(tuple(large_problems(problem, sizes)), []).append(sku)
        return found

    def _share(self, op: Op, large: Large, trials: list[Trial]) -> None:
        copies = None
        for trial in trials:
            if self._lost:
                return
            try:
                copies = copies or Copies(op, large, self._placement, self._seed)
            except Exception as error:  # noqa: BLE001  memory may be short, and a reference can fail in any way
                failed(trial, large, check="error", message=f"{type(error).__name__}: {error}")
            else:
                copies.run(trial, self._fresh(trial.sku))
            self._check_device(trial)
            self._placement.release()

    def _fresh(self, sku: KernelSku) -> Callable[[Descriptor], Plan]:
        # A separate dispatcher: a cached plan would keep gigabytes of scratch allocated.
        apart = Dispatcher(self._dispatcher.registry, backends=self._dispatcher.backends.values())
        return partial(apart.select, preference=PlanPreference(sku=sku.id), device=self._device)

    def _check_device(self, trial: Trial) -> None:
        """Test after an error whether the device still answers: an illegal access ends all work of the process."""
        if "error" not in trial.finding.failures:
            return
        try:
            probe = np.arange(8, dtype=np.uint8)
            alive = bool((self._placement.download(self._placement.upload(probe)) == probe).all())
        except Exception:  # noqa: BLE001  the libraries raise different errors
            alive = False
        if not alive:
            self._lost = trial.sku.id

    def _evidence(self, trial: Trial, digest: str, meaning: str) -> SkuEvidence:
        found = trial.finding
        cut = bool(self._lost) and found.failure is None
        gaps = f"refuses gaps between rows of {', '.join(sorted(found.gapless))}" if found.gapless else ""
        if cut:
            note = f"the device was lost to {self._lost}"
        elif found.cases == 0:
            note = found.note or "no case of its op is for it"
        else:
            note = "; ".join(filter(None, (found.note, gaps)))
        return SkuEvidence(
            sku=trial.sku.id,
            source_hash=digest,
            reference_hash=meaning,
            verdict="failed" if found.failure else "skipped" if cut or not found.cases else "verified",
            cases=found.cases,
            outputs=found.outputs,
            layouts=tuple(found.layouts),
            first_failure=found.failure,
            promises=found.record(),
            note=note,
        )
