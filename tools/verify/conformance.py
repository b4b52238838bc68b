"""Conformance checks of a package's kernels and backends; `skuda.tools.testing` runs them under pytest."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from skuda.dispatch.backends.base import Backend, BackendStatus
from skuda.dispatch.backends.cuda import CudaBackend
from skuda.dispatch.plan import Plan
from skuda.registry.device import Device, device_named
from skuda.registry.errors import InvalidProblem, Unsupported
from skuda.registry.op import Op
from skuda.registry.sku import KernelSku, SkuIdentity
from skuda.tools.ship.cubins import build_cubins, cubins_of
from skuda.tools.verify.calls import Laid, Outputs
from skuda.tools.verify.compare import disagreement
from skuda.tools.verify.edges import accepts, edges
from skuda.tools.verify.evidence import Failure
from skuda.tools.verify.kit import Broken, Kit, NotRun, run
from skuda.tools.verify.misuse import Misuse, misuses
from skuda.tools.verify.placement import Placement
from skuda.tools.verify.trial import Question

_THREADS, _TURNS = 4, 8
_CARDS = ("a100", "h100", "b200")
"""Cards, one per generation, that CUDA kernels are compiled for where their architecture allows it."""
_SWITCH = 1e-5
"""Thread switch interval in seconds: short, so that races become likely."""


class Checks(Kit):
    """The conformance checks; each returns, or raises `Broken` or `NotRun`."""

    # --- checks of the package ---------------------------------------------------------------------------------------

    def check_loaded(self) -> None:
        """Check that every plug-in of the package loaded, and that something is registered."""
        aside = [str(plugin) for plugin in self.plugins if plugin.reason]
        if aside:
            raise Broken("\n".join(aside))
        if not (self.ops or self.skus or self.backends):
            names = ", ".join(sorted({plugin.package for plugin in self.dispatcher.plugins})) or "none"
            raise Broken(f"nothing is registered by {self.package!r}; packages with plug-ins here: {names}")

    def check_op(self, op: Op) -> None:
        """Check that an op is documented, has a reference kernel, and has cases that survive JSON."""
        sections = ("Formula", "Shapes", "Elements", "Units", "Errors")
        absent = [name for name in sections if f"\n{name}\n---" not in op.documentation]
        if absent:
            raise Broken(f"the documentation of its module, which `skuda show` prints, has no {', '.join(absent)}")
        skus = self.dispatcher.registry.skus_of(op.name)
        if not any(self.dispatcher.registry.backends[sku.backend].reference for sku in skus):
            raise Broken("none of its kernels is on a reference backend; offer `reference` on numpy")
        for case in op.cases:
            again = type(case.problem).model_validate_json(case.problem.model_dump_json())
            if again != case.problem:
                raise Broken(f"{case.problem!r} comes back from JSON as {again!r}")
            if not any(sku.key == case.problem.key() for sku in skus):
                raise Broken(f"no kernel has the key of its case {case.problem!r}")

    # --- checks of a backend -----------------------------------------------------------------------------------------

    def check_status(self, backend: Backend) -> None:
        """Check that `status()` and `devices()` are complete, repeatable and consistent, and do not raise."""
        name = backend.spec.name
        if name not in self.dispatcher.registry.backends:
            raise Broken("its BackendSpec is not registered")
        states = [_answered(backend.status) for _ in range(2)]
        for state in states:
            if not isinstance(state, BackendStatus):
                raise Broken(f"status() must return a BackendStatus; had {state!r}")
            if not state.detail or (not state.available and not state.remedy):
                raise Broken(f"status() must say a detail and, where it does not work, a remedy; had {state!r}")
        if states[0] != states[1]:
            raise Broken(f"status() must say the same twice; had {states[0]!r}, then {states[1]!r}")
        devices = _answered(backend.devices)
        wanted = f"{backend.spec.processor} Devices with an ordinal"
        for device in devices:
            if not isinstance(device, Device) or device.processor != backend.spec.processor or device.ordinal is None:
                raise Broken(f"devices() must return {wanted}; had {device!r}")
        if bool(devices) is not states[0].available:
            raise Broken(f"status() says available={states[0].available}, and devices() returns {devices!r}")
        blamed = [plugin.reason for plugin in self.plugins if plugin.reason]
        if blamed:
            raise Broken(blamed[0])

    # --- checks of a kernel ------------------------------------------------------------------------------------------

    def check_record(self, sku: KernelSku) -> None:
        """Check that the id parses back, that the record survives JSON, and that a case fits the kernel."""
        if SkuIdentity.parse(sku.id) != sku.identity or SkuIdentity.parse(sku.id).id != sku.id:
            raise Broken(f"its id parses back as {SkuIdentity.parse(sku.id)!r}")
        again = KernelSku.model_validate_json(sku.model_dump_json())
        if again != sku:
            raise Broken(f"it comes back from JSON as {again!r}")
        if not sku.summary:
            raise Broken("it has no summary, the line that `skuda show` prints beside it")
        self.cases(sku)

    def check_meaning(self, sku: KernelSku) -> None:
        """Check that the outputs of every case, in every layout, are within the promised distance of the reference."""
        self._held(sku, f"max_ulp={sku.precision_guarantee.max_ulp}", "bits", "ulp", "error")

    def check_memory(self, sku: KernelSku) -> None:
        """Check that nothing outside the outputs is written: neither guard zones nor inputs."""
        self._held(sku, "writes its outputs only", "guard", "input")
        self._exercised(sku, bool(self.finding(sku).cases))

    def check_deterministic(self, sku: KernelSku) -> None:
        """Check that a second run, with other bytes around the arrays, gives the same bits."""
        self._promised(sku, "deterministic")
        self._held(sku, "deterministic", "repeat")
        self._exercised(sku, "deterministic" in self.finding(sku).promises)

    def check_batch_invariant(self, sku: KernelSku) -> None:
        """Check that a row's output does not depend on the other rows: permuted rows and a subset give equal rows."""
        self._promised(sku, "batch_invariant")
        self._held(sku, "batch_invariant", "rows")
        self._exercised(sku, "batch_invariant" in self.finding(sku).promises, "no case has two independent rows")

    def _promised(self, sku: KernelSku, promise: str) -> None:
        if not getattr(sku.precision_guarantee, promise):
            raise NotRun(f"it does not promise {promise}")

    def _held(self, sku: KernelSku, promise: str, *checks: str) -> None:
        failures: dict[str, Failure] = self.finding(sku).failures
        for check in checks:
            if check in failures:
                failure = failures[check]
                raise Broken(f"promises {promise}\n{failure.describe()}\nproblem {failure.problem}")

    def _exercised(self, sku: KernelSku, tried: bool, why: str = "") -> None:  # noqa: FBT001  a fact, not a mode
        if not tried:
            failure = self.finding(sku).failure
            raise NotRun(f"not reached: {failure.describe()}" if failure else why or "no case was run")

    def check_constraints(self, sku: KernelSku) -> None:
        """Check that problems beyond an edge of a constraint are refused, with a constraint as the reason."""
        known = self.known(sku)
        problems = (*(case.problem for case in known), *edges(sku, known))
        refused = [problem for problem in problems if not accepts(sku, problem)]
        if not refused:
            raise NotRun("its constraints refuse none of the problems")
        for problem in refused:
            try:
                self.select(sku, problem)
            except Unsupported as error:
                (decision,) = [each for each in error.explanation.decisions if each.sku == sku.id]
                if not any(reason.code == "constraint" for reason in decision.reasons):
                    raise Broken(
                        f"{problem!r} is refused for another reason than its constraints: {decision}"
                    ) from error
            else:
                raise Broken(f"{problem!r} was planned, and its constraints refuse it")

    def check_compiles(self, sku: KernelSku) -> None:
        """Check that CUDA source compiles, and fits its launch rule, for cards that need not be present."""
        backend = self.dispatcher.backends.get(sku.backend)
        if not isinstance(backend, CudaBackend):
            raise NotRun("it has no CUDA source that skuda compiles")
        if backend.compiler() is None:
            raise NotRun(f"no compiler here: {backend.compilers}")
        problems = [case.problem for case in self.cases(sku)]
        jobs = cubins_of([sku], {sku.op: problems}, self.dispatcher.backends, *map(device_named, _CARDS))
        if not jobs:
            raise NotRun(f"it runs on none of {', '.join(_CARDS)}")
        for outcome in build_cubins(jobs):
            if outcome.state == "failed":
                raise Broken(f"for {outcome.wanted.arch}: {outcome.reason}")

    def check_refusals(self, sku: KernelSku) -> None:
        """Check that every wrong argument raises `InvalidProblem` and leaves all memory as it was."""
        placement = self.place(self.device_for(sku))
        number, case = self.largest(sku)
        plan, question = self.select(sku, case.problem), self.question(sku, number, case)
        for misuse in misuses(case.problem, question.drawn, placement):
            self._refused(plan, misuse, placement)

    def _refused(self, plan: Plan, misuse: Misuse, placement: Placement) -> None:
        ways = {"can_implement": plan.can_implement, "run": plan.run}
        for name, call in ways.items():
            if name == "can_implement" and "stream" in misuse.arguments:
                continue
            try:
                call(**misuse.arguments)
            except InvalidProblem as error:
                if not str(error):
                    raise Broken(f"{misuse.what}: {name}() refuses it without a word") from error
            except Exception as error:
                told = f"{type(error).__name__}: {error}"
                raise Broken(f"{misuse.what}: {name}() must raise InvalidProblem; raised {told}") from error
            else:
                raise Broken(f"{misuse.what}: {name}() must raise InvalidProblem, and accepted it")
            for argument, (buffer, image) in misuse.memory.items():
                at = image.changed(placement.download(buffer))
                if at is not None:
                    raise Broken(f"{misuse.what}: {name}() refused it and had written to {argument}, byte {at}")

    def check_outputs(self, sku: KernelSku) -> None:
        """Check that a given output is written and returned, and that an omitted one is a new array."""
        self._called(sku, "returns its outputs and leaves its inputs alone", "outputs")

    def check_calls(self, sku: KernelSku) -> None:
        """Check that many calls all give the same outputs, print nothing and leave the process state unchanged."""
        self._called(sku, "the same at every call, silently", "calls", "process")

    def _called(self, sku: KernelSku, promise: str, *checks: str) -> None:
        self._held(sku, promise, *checks)
        self._exercised(sku, self.finding(sku).called, "no case is small enough to be run many times")

    def check_reuse(self, sku: KernelSku) -> None:
        """Check that one plan serves several runs, and that `bind` and a plan from JSON give the same outputs."""
        self._held(sku, "serves what it is bound to", "bind")
        placement = self.place(self.device_for(sku))
        number, case = self.largest(sku)
        plan = self.select(sku, case.problem)
        first, second = (self.question(sku, number, case, turn) for turn in range(2))
        before, other = (run(self.fresh(sku, case.problem), each, placement) for each in (first, second))
        saved = self.dispatcher.prepare(Plan.model_validate_json(plan.model_dump_json()))
        for how, each, question, want in (
            ("the first run", plan, first, before),
            ("a run on other inputs", plan, second, other),
            ("a run on the first inputs again", plan, first, before),
            ("a run of the plan from JSON", saved, first, before),
        ):
            wrong = _wrong(plan, question, run(each, question, placement), want)
            if wrong:
                raise Broken(f"{how}, against a plan made for it alone: {wrong}")

    def check_threads(self, sku: KernelSku) -> None:
        """Check that threads that share a plan, each with its own inputs, get the same outputs as one thread alone."""
        placement = self.place(self.device_for(sku))
        number, case = self.largest(sku)
        plan = self.select(sku, case.problem)
        questions = [self.question(sku, number, case, turn) for turn in range(_THREADS)]
        alone = [run(plan, question, placement) for question in questions]
        together = threading.Barrier(_THREADS)

        def work(mine: int) -> str:
            together.wait()
            for turn in range(_TURNS):
                got = run(plan, questions[mine], placement)
                wrong = _wrong(plan, questions[mine], got, alone[mine])
                if wrong:
                    return f"thread {mine} of {_THREADS}, run {turn}: {wrong}"
            return ""

        interval = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH)
        try:
            with ThreadPoolExecutor(_THREADS) as pool:
                wrong = next(filter(None, list(pool.map(work, range(_THREADS)))), "")
        finally:
            sys.setswitchinterval(interval)
        if wrong:
            raise Broken(f"other results than one thread alone: {wrong}")

    def check_streams(self, sku: KernelSku) -> None:
        """Check that work is enqueued on the given stream, after the work that is already on it."""
        device = self.device_for(sku)
        if device.processor == "cpu":
            raise NotRun("a CPU has no streams; that one is refused is among the refusals")
        placement: Any = self.place(device)
        if not hasattr(placement, "late"):
            raise NotRun(f"{placement.name} cannot hold inputs back; install torch")
        number, case = self.largest(sku)
        plan, question = self.select(sku, case.problem), self.question(sku, number, case)
        before = run(plan, question, placement)
        laid = Laid.out(case.problem, question.drawn, placement)
        right = {name: placement.download(buffer) for name, buffer in laid.buffers.items()}
        for name, image in laid.images.items():
            laid.buffers[name][...] = placement.upload(np.where(image.geometry.outside, image.before, 0))
        stream = placement.late(laid.buffers, right)
        try:
            plan.run(stream=stream, **laid.inputs, **laid.outputs)
        except InvalidProblem as error:
            if error.field != "stream":
                raise
            raise NotRun(f"it refuses the stream: {error}") from error
        finally:
            placement.finish(stream)
        wrong = _wrong(plan, question, laid.written(), before)
        if wrong:
            raise Broken(f"it did not wait for what stood on the stream before it: {wrong}")

    def digests(self) -> dict[str, str]:
        """Return a digest of the outputs of every kernel that promises stable bits and runs here, by SKU id."""
        stable = (sku for sku in self.skus if sku.precision_guarantee.bit_stable_on_same_hardware)
        return {sku.id: digest for sku in stable if (digest := self._digest(sku))}

    def _digest(self, sku: KernelSku) -> str:
        state = hashlib.sha256()
        try:
            placement = self.place(self.device_for(sku))
            for number, case in enumerate(self.cases(sku)):
                question = self.question(sku, number, case)
                for array in run(self.select(sku, case.problem), question, placement).values():
                    state.update(array.tobytes())
        except Exception:  # noqa: BLE001  `check_meaning` reports it
            return ""
        return state.hexdigest()


def _answered(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except Exception as error:
        raise Broken(f"{ask.__name__}() must not raise; raised {type(error).__name__}: {error}") from error


def _wrong(plan: Plan, question: Question, got: Outputs, first: Outputs) -> str:
    """Return a description of a broken promise: wrong bits, or too far from the reference; empty if there is none."""
    said = disagreement(plan, got, question.want, first)
    if not said:
        return ""
    return f"{said['output']}{list(said['at'])}: got {said['got']}, want {said['want']}; {said['message']}"
