"""Running every kernel over every case of its op, and writing down what came of it."""

from __future__ import annotations

import os
import platform
import zlib
from collections.abc import Callable, Collection, Iterable
from datetime import UTC, datetime
from functools import partial
from importlib import metadata

import numpy as np

from skuda.dispatch import Dispatcher, PlanPreference
from skuda.dispatch.compiling import find_nvcc
from skuda.dispatch.device import Device
from skuda.dispatch.environment import driver_version
from skuda.dispatch.plan import Plan
from skuda.dispatch.settings import bundle_names
from skuda.registry.arch import ArchSku
from skuda.registry.descriptor import Descriptor
from skuda.registry.op import Op
from skuda.registry.sku import KernelSku
from skuda.tools.cubins import build_cubins, cubins_of
from skuda.tools.evidence import EvidenceFile, SkuEvidence
from skuda.tools.fingerprint import reference_hash, source_hash
from skuda.tools.large import MEMORY, large_problems, run_large, suitable
from skuda.tools.placing import LAYOUTS, Layout, Placement, TorchPlacement, placement_for
from skuda.tools.trial import Question, Trial

Progress = Callable[[int, int, str], None]
"""Takes what is done, how much there is, and what is being done."""

_PACKAGES = ("numpy", "ml_dtypes", "torch", "cupy", "pycuda", "cuda-bindings")


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
    placement: Placement | None = None,
) -> EvidenceFile:
    """Run every kernel that a device accepts over every case of its op.

    A failure is recorded and the rest goes on.

    Parameters
    ----------
    dispatcher : Dispatcher
        What to verify.
    device : Device
        Where; it must be here.
    ops, skus, backends : collection of str
        Only these; empty for all.
    seed : int
        What inputs are drawn from.
    quick : bool
        Two layouts a case rather than all, and no large problems.
    progress : callable or None
        Told about every case of every kernel.
    placement : Placement or None
        How arrays get to the device; None for what is installed.
    """
    kernels = [
        sku
        for sku in dispatcher.registry
        if (not ops or sku.op in ops)
        and (not skus or sku.id in skus)
        and (not backends or sku.backend in backends)
        and (sku.arch is ArchSku.CPU) is (device.processor == "cpu")
    ]
    placement = placement or placement_for(device)
    run = _Run(dispatcher, device, placement, seed, quick=quick, progress=progress or _silent)
    found = run.all(kernels)
    return EvidenceFile(
        device=device,
        driver=driver_version() if device.processor == "cuda" else "",
        versions=versions(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        skuda=skuda_version(),
        seed=seed,
        quick=quick,
        skus=tuple(found[sku.id] for sku in kernels),
    )


def _silent(done: int, total: int, what: str) -> None:
    """Tell nobody."""


class _Run:
    """One verification."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        device: Device,
        placement: Placement,
        seed: int,
        *,
        quick: bool,
        progress: Progress,
    ) -> None:
        self._dispatcher, self._device, self._placement = dispatcher, device, placement
        self._seed, self._quick, self._progress = seed, quick, progress
        self._done = self._total = 0
        self._lost = ""

    def all(self, kernels: list[KernelSku]) -> dict[str, SkuEvidence]:
        """Verify kernels, op by op, so that a case's reference is worked out once for all of them."""
        found = {sku.id: self._skipped(sku, note) for sku in kernels if (note := self._obstacle(sku))}
        able = [sku for sku in kernels if sku.id not in found]
        registry = self._dispatcher.registry
        by_op = {name: [sku for sku in able if sku.op == name] for name in dict.fromkeys(sku.op for sku in able)}
        self._total = sum(
            case.problem.key() == sku.key
            for name, skus in by_op.items()
            for case in registry.ops[name].cases
            for sku in skus
        )
        self._compile(able)
        for name, skus in by_op.items():
            found |= self._op(registry.ops[name], skus)
        return found

    def _obstacle(self, sku: KernelSku) -> str:
        """Say why a kernel cannot run here at all; nothing where it can."""
        if not sku.arch.runs_on(self._device.compute_capability):
            return f"needs {sku.arch.describe()}"
        state = self._dispatcher.status.get(sku.backend)
        if state is None or not state.available:
            return f"backend {sku.backend}: {state.detail if state is not None else 'unknown'}"
        return ""

    @staticmethod
    def _skipped(sku: KernelSku, note: str) -> SkuEvidence:
        return SkuEvidence(sku=sku.id, source_hash=source_hash(sku), verdict="skipped", note=note)

    def _select(self, sku: KernelSku, problem: Descriptor) -> Plan:
        return self._dispatcher.select(problem, PlanPreference(sku=sku.id), self._device)

    def _compile(self, skus: list[KernelSku]) -> None:
        """Fill the cubin cache: one kernel after the other would take minutes."""
        cases = {op.name: [case.problem for case in op.cases] for op in self._dispatcher.registry.ops.values()}
        jobs = cubins_of(skus, cases, self._dispatcher.backends, self._device)
        # What goes wrong here goes wrong again when the kernel is selected, and is recorded there.
        build_cubins(jobs, self._progress)

    def _op(self, op: Op, skus: list[KernelSku]) -> dict[str, SkuEvidence]:
        hashes = {sku.id: source_hash(sku) for sku in skus}
        trials = {sku.id: Trial(sku, partial(self._select, sku), self._placement) for sku in skus}
        for number, case in enumerate(op.cases):
            mine = [trial for trial in trials.values() if trial.sku.key == case.problem.key()]
            if not mine:
                continue
            rng = np.random.default_rng([self._seed, zlib.crc32(f"{op.name} {number}".encode())])
            question: Question | None = None
            trouble = ""
            try:
                question = Question.ask(op, number, case, rng)
            except Exception as error:  # noqa: BLE001  a plug-in's reference can fail in any way
                trouble = f"the reference failed: {type(error).__name__}: {error}"
            for trial in mine:
                self._done += 1
                self._progress(self._done, self._total, op.name)
                if question is None:
                    trial.refuse(number, case, trouble)
                elif not self._lost:
                    trial.run(question, self._layouts(number), rng)
                    self._look_after(trial)
        self._large(op, list(trials.values()))
        meaning = reference_hash(op)
        return {name: self._evidence(trial, hashes[name], meaning) for name, trial in trials.items()}

    def _layouts(self, number: int) -> tuple[Layout, ...]:
        return LAYOUTS if not self._quick else ("contiguous", LAYOUTS[1 + number % 3])

    def _look_after(self, trial: Trial) -> None:
        """After an error, see whether the device still answers: an illegal access ends all work in the process."""
        failure = trial.finding.failure
        if failure is None or failure.check != "error":
            return
        try:
            probe = np.arange(8, dtype=np.uint8)
            alive = bool((self._placement.download(self._placement.upload(probe)) == probe).all())
        except Exception:  # noqa: BLE001  however it says so
            alive = False
        if not alive:
            self._lost = trial.sku.id

    def _large(self, op: Op, trials: list[Trial]) -> None:
        if self._quick or self._device.memory < MEMORY or not isinstance(self._placement, TorchPlacement):
            return
        for trial in trials:
            problems = (case.problem for case in op.cases if case.problem.key() == trial.sku.key)
            problem = suitable(problems)
            for large in () if problem is None else large_problems(problem):
                if not self._lost:
                    self._progress(self._done, self._total, f"{op.name}, {large.name}")
                    # A dispatcher of its own: a kept plan would keep gigabytes of scratch.
                    apart = Dispatcher(self._dispatcher.registry, backends=self._dispatcher.backends.values())
                    select = partial(apart.select, preference=PlanPreference(sku=trial.sku.id), device=self._device)
                    run_large(trial, op, large, select, self._placement, self._seed)
                    self._look_after(trial)

    def _evidence(self, trial: Trial, digest: str, meaning: str) -> SkuEvidence:
        found = trial.finding
        note = found.note
        if found.failure is None and self._lost:
            note = f"the device was lost to {self._lost}"
        elif found.cases == 0:
            note = note or "no case of its op is for it"
        elif found.gapless:
            note = "; ".join(filter(None, (note, f"refuses gaps between rows of {', '.join(sorted(found.gapless))}")))
        cut = self._lost and found.failure is None
        verdict = "failed" if found.failure else "skipped" if cut or not found.cases else "verified"
        return SkuEvidence(
            sku=trial.sku.id,
            source_hash=digest,
            reference_hash=meaning,
            verdict=verdict,
            cases=found.cases,
            outputs=found.outputs,
            layouts=tuple(found.layouts),
            first_failure=found.failure,
            promises=found.record(),
            note=note,
        )


def versions(more: Iterable[str] = ()) -> dict[str, str]:
    """Return the versions of what kernels are compiled, launched and compared with, as far as they are here.

    Parameters
    ----------
    more : iterable of str
        Further distributions to look for.
    """
    found = {"python": platform.python_version()}
    found |= {name: version for name in (*_PACKAGES, *more) if (version := _version(name))}
    nvcc = find_nvcc()
    if nvcc is not None:
        found["nvcc"] = nvcc.version
    nvrtc = _version("nvidia-cuda-nvrtc") or _version("nvidia-cuda-nvrtc-cu12")
    if nvrtc:
        found["nvrtc"] = nvrtc
    # What lies in a bundle was not compiled here.
    return found | ({"bundle": os.pathsep.join(bundle_names())} if bundle_names() else {})


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def skuda_version() -> str:
    """Return the version of skuda; ``unknown`` where it is not installed."""
    return _version("skuda") or "unknown"
