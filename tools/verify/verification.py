"""Runs the checks on every kernel that a device accepts, and returns the results as a record."""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby, islice
from typing import Any

import numpy as np

from skuda.dispatch import Dispatcher
from skuda.dispatch.select.environment import driver_version, skuda_version, versions
from skuda.registry.descriptor import FunctionalKey
from skuda.registry.device import Device
from skuda.registry.errors import InvalidProblem
from skuda.registry.sku import KernelSku
from skuda.tools.output import Report
from skuda.tools.ship.cubins import build_cubin
from skuda.tools.verify.checks import CHECKS, device_for, kernels_of, perform
from skuda.tools.verify.compare import NotRun
from skuda.tools.verify.evidence import METHOD, EvidenceFile, SkuEvidence
from skuda.tools.verify.fingerprint import reference_hash, source_hash
from skuda.tools.verify.large import large_problem
from skuda.tools.verify.placement import Placement, placement_for
from skuda.tools.verify.problems import fewer_rows
from skuda.tools.verify.stamps import meaning, stamp
from skuda.tools.verify.trial import Examples, Trial

_DRAWERS, _AHEAD = 4, 8
"""Threads that draw inputs and compute references, and units of kernels that are drawn beyond the present one."""

Finished = Callable[[Sequence[SkuEvidence]], None]
"""Takes the evidence of one op's kernels."""


def verify(
    dispatcher: Dispatcher,
    device: Device,
    *,
    ops: Collection[str] = (),
    skus: Collection[str] = (),
    backends: Collection[str] = (),
    cases: Collection[int] = (),
    seed: int = 0,
    quick: bool = False,
    progress: Report | None = None,
    finished: Finished | None = None,
    placement: Placement | None = None,
) -> EvidenceFile:
    """Run the checks on every kernel that a device accepts; a failure is recorded and the run continues.

    One kernel of each source and entry point, drawn from the seed, has the full battery: all cases in all layouts, and
    the checks of the code around kernels. The others, which differ from it in elements or an epilogue, have a spot
    check: all cases of their op in one layout each, a sample of the others, and one repeated run. With `quick`, every
    kernel has a spot check.

    `ops`, `skus` and `backends` are names, and `cases` are numbers of cases, which are run in the full battery; an
    empty collection stands for all. `progress` is called for every kernel, and `finished` after every op. The placement
    moves arrays to the device and back; None is `placement_for`.

    Raises
    ------
    InvalidProblem
        If no kernel for the device passes the filters, or none has one of the cases.
    """
    kernels = kernels_of(dispatcher, ops=ops, skus=skus, backends=backends, processor=device.processor)
    if not kernels:
        raise InvalidProblem("verify", "the filters", "no kernel", f"leave a kernel for {device.describe()}")
    placement = placement or placement_for(device)
    run = _Verification(dispatcher, device, placement, seed, quick, cases, progress, finished)
    run.all(kernels)
    return EvidenceFile(
        device=device,
        driver=driver_version() if device.processor == "cuda" else "",
        versions=versions(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        skuda=skuda_version(),
        method=METHOD,
        seed=seed,
        quick=quick,
        skus=tuple(run.found[name] for name in sorted(run.found)),
    )


@dataclass
class _Verification:
    """The course of one verification, with what it has found by the ids of kernels."""

    dispatcher: Dispatcher
    device: Device
    placement: Placement
    seed: int
    quick: bool
    only: Collection[int]
    progress: Report | None
    finished: Finished | None
    found: dict[str, SkuEvidence] = field(default_factory=dict)
    meanings: dict[str, Future[str]] = field(default_factory=dict)
    lost_to: str = ""
    done: int = 0
    total: int = 0

    def all(self, kernels: Sequence[KernelSku]) -> None:
        """Verify kernels key by key: kernels of one key, on all backends, share problems, inputs and references."""
        able = []
        for sku in kernels:
            try:
                device_for(self.dispatcher, sku, (self.device,))
                able.append(sku)
            except NotRun as reason:
                note = {"source_hash": source_hash(sku), "verdict": "skipped", "note": str(reason)}
                self.found[sku.id] = SkuEvidence(sku=sku.id, **note)
        self.total, units = len(able), self._units(able)
        if self.only and not any(trial.chosen for unit in units for trial in unit):
            raise InvalidProblem("verify", "--case", str(self.only), "be the number of a case of these kernels")
        # While a GPU runs, the cubins and the references of later kernels are made. What fails to compile here fails
        # again when the kernel is planned, and is recorded then.
        pools = [ThreadPoolExecutor(number) for number in (os.cpu_count(), 1, _DRAWERS, 1)]
        compilers, planner, drawers, stamper = pools
        ahead = self.device.processor == "cuda"
        compiled = deque(planner.submit(_compile, unit, compilers) for unit in units if ahead)
        drawn: deque[Future[None]] = deque()
        ops = {unit[0].op.name: unit[0].op for unit in units if ahead}
        self.meanings = {name: stamper.submit(meaning, op) for name, op in ops.items()}
        coming = iter(units if ahead else ())
        try:
            for op, several in groupby(units, key=lambda unit: unit[0].op):
                verified: list[SkuEvidence] = []
                for unit in several:
                    for later in islice(coming, _AHEAD - len(drawn)):
                        drawn.append(drawers.submit(_prepare_references, later))
                    if ahead:
                        self._report(f"{op.name}, compiling")
                        wait(compiled.popleft().result())
                        wait([drawn.popleft()])
                    verified += map(self._verify, unit)
                    unit.clear()  # the inputs of one key take megabytes
                if self.finished is not None:
                    self.finished(verified)
        finally:
            for pool in pools:
                pool.shutdown(cancel_futures=True)

    def _units(self, kernels: Sequence[KernelSku]) -> list[list[Trial]]:
        """Return the trials of the kernels of each key, in the order of ops."""
        keys: dict[FunctionalKey, list[KernelSku]] = {}
        sources: dict[tuple[str, ...], dict[FunctionalKey, None]] = {}
        for sku in kernels:
            keys.setdefault(sku.key, []).append(sku)
            sources.setdefault(_source(sku), {})[sku.key] = None
        # Kernels of all backends that share a source have the full battery for the same key, and share its references.
        full = {s: list(k)[zlib.crc32(f"{self.seed} {s}".encode()) % len(k)] for s, k in sources.items()}
        units = []
        for op in self.dispatcher.registry.ops.values():
            for key in (key for key in keys if key.op == op.name):
                shared = (self.dispatcher, self.device, self.placement, Examples(op, self.seed))
                unit = [Trial(sku, *shared, only=self.only) for sku in keys[key]]
                for trial in unit:
                    if not self.only and (self.quick or full[_source(trial.sku)] != key):
                        trial.battery = "spot"
                units.append(unit)
        return units

    def _report(self, what: str) -> None:
        if self.progress is not None:
            self.progress(self.done, self.total, what)

    def _verify(self, trial: Trial) -> SkuEvidence:
        """Run the checks of a kernel."""
        self._report(trial.op.name)
        self.done += 1
        for name, check in CHECKS.items():
            if not check.anywhere and (check.spot or trial.battery == "full") and not self.lost_to:
                perform(trial, name)
                self.lost_to = trial.sku.id if trial.failures and not self._answers() else ""
        cut = bool(self.lost_to) and not trial.failures
        dense = sorted({name for names in trial.dense.values() for name in names})
        notes = (trial.note, f"refuses gaps in {', '.join(dense)}" if dense else "")
        note = "; ".join(filter(None, notes)) or ("" if trial.cases_run else "no case of its op is for it")
        found = self.found[trial.sku.id] = SkuEvidence(
            sku=trial.sku.id,
            source_hash=source_hash(trial.sku),
            reference_hash=reference_hash(trial.op),
            **self._stamped(trial),
            verdict="failed" if trial.failures else "skipped" if cut or not trial.cases_run else "verified",
            battery=trial.battery,
            cases=trial.cases_run,
            runs=trial.runs,
            outputs=trial.outputs,
            layouts=tuple(trial.layouts),
            checks=tuple(name for name, reason in trial.checks.items() if not reason),
            failures=tuple(trial.failures.values()),
            note=f"the device was lost to {self.lost_to}" if cut else note,
        )
        self.placement.release()
        return found

    def _stamped(self, trial: Trial) -> dict[str, str]:
        """Return the stamps of a kernel, which has been compiled; none of one that failed."""
        if self.device.processor != "cuda" or trial.failures:
            return {}
        backend = self.dispatcher.backends[trial.sku.backend]
        found = stamp(trial.sku, (case.problem for case in trial.op.cases), self.device, backend)
        return {**found._asdict(), "meaning": self.meanings[trial.op.name].result()}

    def _answers(self) -> bool:
        """Return whether the device still answers after a failure: an illegal access ends all work of the process."""
        probe = np.arange(8, dtype=np.uint8)
        try:
            return bool((self.placement.download(self.placement.upload(probe)) == probe).all())
        except Exception:  # noqa: BLE001  the libraries raise different errors
            return False


def _source(sku: KernelSku) -> tuple[str, ...]:
    return sku.source, sku.entry_point, sku.variant


def _compile(unit: list[Trial], pool: ThreadPoolExecutor) -> list[Future[Any]]:
    """Submit the compilation of what kernels need for the problems that they are run on."""
    found: list[Future[Any]] = []
    for trial in unit:
        problems = [each.numbered.case.problem for each in trial.chosen]
        fewer = (fewer_rows(each.numbered.case.problem) for each in trial.chosen if each.again)
        problems += [problem for problem in fewer if problem is not None]
        if trial.battery == "full" and (large := large_problem(trial)) is not None:
            problems.append(large.problem)
        found += [pool.submit(build_cubin, each) for each in trial.cubins(*problems).values()]
    return found


def _prepare_references(unit: list[Trial]) -> None:
    """Compute the references of a unit; an error occurs again where the example is used, and is recorded there."""
    for trial in list(unit):
        for each in trial.chosen:
            with suppress(Exception):  # a plug-in's reference can fail in any way
                trial.examples.of(each.numbered.case, each.turn)
