"""The checks: what is promised of kernels, ops and backends, and how each promise is tested.

``skuda verify`` runs them on the kernels of a device; `skuda.tools.testing` runs them under pytest. A check returns, or
raises `Broken` or `NotRun`. `check_cases` records failures in the trial instead, one for each case.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from skuda.dispatch import Dispatcher
from skuda.dispatch.backends.base import Backend, BackendStatus
from skuda.dispatch.backends.cuda import CudaBackend
from skuda.dispatch.settings import environment
from skuda.registry.arch import ArchSku
from skuda.registry.device import Device, device_named
from skuda.registry.errors import InvalidProblem, Unsupported
from skuda.registry.op import Op
from skuda.registry.sku import KernelSku
from skuda.tools.output import nearest
from skuda.tools.ship.cubins import build_cubins, cubins_of
from skuda.tools.verify.calls import check_calls, check_outputs, check_reuse
from skuda.tools.verify.compare import Broken, NotRun
from skuda.tools.verify.large import check_large
from skuda.tools.verify.misuse import check_refusals
from skuda.tools.verify.problems import refused_by
from skuda.tools.verify.process import unchanged_state
from skuda.tools.verify.trial import Trial

HEAVY = frozenset(
    {"cuda", "cupy", "jax", "matplotlib", "numba", "pandas", "pycuda", "scipy", "tensorflow", "torch", "triton"}
)
"""Modules that loading a plug-in must not import: each would delay the start of every program by about a second."""

_THREADS, _TURNS = 4, 8
_CARDS = ("a100", "h100", "b200")
"""Cards, one per generation, that CUDA kernels are compiled for where their architecture allows it."""
_SWITCH = 1e-5
"""Thread switch interval in seconds: short, so that races become likely."""


# --- which kernels, and where ----------------------------------------------------------------------------------------


def kernels_of(
    dispatcher: Dispatcher,
    *,
    ops: Collection[str] = (),
    skus: Collection[str] = (),
    backends: Collection[str] = (),
    processor: str = "",
    package: str = "",
) -> tuple[KernelSku, ...]:
    """Return the registered kernels that pass all filters; an empty one lets all pass.

    The kernels of a package are those that it registers, and all that run on its backends.
    """
    registry = dispatcher.registry
    own = {name for name in registry.backends if owns(dispatcher, package, name)}
    return tuple(
        sku
        for sku in registry
        if (not ops or sku.op in ops)
        and (not skus or sku.id in skus)
        and (not backends or sku.backend in backends)
        and (not processor or (sku.arch is ArchSku.CPU) is (processor == "cpu"))
        and (not package or sku.backend in own or owns(dispatcher, package, sku.id))
    )


def owns(dispatcher: Dispatcher, package: str, name: str) -> bool:
    """Return whether a package has registered a kernel's id, an op or a backend."""
    origin = dispatcher.registry.origin(name) or ""
    return plain(package) in {plain(origin), plain(origin.rpartition(" ")[0])}


def plain(package: str) -> str:
    """Return a package's name in the form in which names are compared."""
    return package.replace("_", "-").replace(".", "-").lower()


def device_for(dispatcher: Dispatcher, sku: KernelSku, devices: Sequence[Device]) -> Device:
    """Return the first device that can run a kernel; raise `NotRun` if there is none."""
    state = dispatcher.status.get(sku.backend)
    if state is None or not state.available:
        remedy = f" ({state.remedy})" if state is not None and state.remedy else ""
        raise NotRun(f"backend {sku.backend}: {state.detail if state is not None else 'unknown'}{remedy}")
    for device in devices:
        same = (sku.arch is ArchSku.CPU) is (device.processor == "cpu")
        if same and sku.arch.runs_on(device.compute_capability):
            return device
    raise NotRun(f"it needs {sku.arch.describe()}")


# --- kernels ---------------------------------------------------------------------------------------------------------


def check_record(trial: Trial) -> None:
    """Check that the record has a summary, and that a case fits the kernel."""
    if not trial.sku.summary:
        raise Broken("it has no summary, the line that `skuda show` prints beside it; pass summary= to KernelSku")
    if not trial.cases:
        rule = f"its key or its constraints accept none of {len(trial.op.cases)}; give the suite `cases` that fit"
        raise Broken(f"no case of {trial.op.name} is for it: {rule}")


def check_cases(trial: Trial) -> None:
    """Run all chosen cases once; `meaning`, `memory`, `deterministic` and `batch_invariant` look at the results."""
    if "cases" in trial.tried:
        return
    trial.tried.add("cases")
    for numbered, turn, layouts, again in trial.chosen:
        before = trial.cases_run
        try:
            example = trial.example(numbered, turn)
        except Exception as error:  # noqa: BLE001  a plug-in's reference can fail in any way
            message = f"the reference fails: {type(error).__name__}: {error}; problem {numbered.case.problem!r}"
            trial.fail("meaning", Broken(message, case=numbered.number))
            continue
        rng = np.random.default_rng([trial.examples.seed, numbered.number])
        trial.run(example, layouts, rng, again=again)
        if trial.cases_run == before and not trial.failures:
            trial.fail("meaning", Broken(f"its constraints accept this problem; {trial.note}"), example)


def check_meaning(trial: Trial) -> None:
    """Check that, in every layout, the outputs are within the promised distance of the reference."""
    check_cases(trial)
    if not trial.runs:
        raise NotRun("no case was run")


def check_memory(trial: Trial) -> None:
    """Check that nothing is written but outputs: neither guard zones around arrays nor inputs."""
    check_meaning(trial)


def check_deterministic(trial: Trial) -> None:
    """Check that a second run, with other bytes around the arrays and other poison, gives the same bits."""
    _check_promised(trial, "deterministic", "no case was run twice")


def check_batch_invariant(trial: Trial) -> None:
    """Check that a row does not depend on the other rows: permuted rows, and some of the rows, give the same rows."""
    _check_promised(trial, "batch_invariant", "no case has two independent rows")


def _check_promised(trial: Trial, promise: str, otherwise: str) -> None:
    if not getattr(trial.sku.precision_guarantee, promise):
        raise NotRun(f"it does not promise {promise}")
    check_cases(trial)
    if promise not in trial.tried:
        raise NotRun(otherwise)


def check_constraints(trial: Trial) -> None:
    """Check that problems beyond an edge of a constraint are refused, with a constraint as the reason."""
    refused = refused_by(trial.sku, trial.op, trial.more)
    if not refused:
        raise NotRun("its constraints refuse none of the problems")
    for problem in refused:
        try:
            trial.plan(problem)
        except Unsupported as error:
            (decision,) = [each for each in error.explanation.decisions if each.sku == trial.sku.id]
            if not any(reason.code == "constraint" for reason in decision.reasons):
                raise Broken(f"{problem!r} is refused for another reason than its constraints: {decision}") from error
        else:
            raise Broken(f"{problem!r} was planned, and its constraints refuse it")


def check_compiles(trial: Trial) -> None:
    """Check that CUDA source compiles, and fits its launch rule, for cards that need not be present."""
    sku, backends = trial.sku, trial.dispatcher.backends
    backend = backends.get(sku.backend)
    if not isinstance(backend, CudaBackend):
        raise NotRun("it has no CUDA source that skuda compiles")
    if backend.compiler() is None:
        raise NotRun(f"no compiler here: {backend.compilers}")
    problems = [each.case.problem for each in trial.cases]
    jobs = cubins_of([sku], {sku.op: problems}, backends, *map(device_named, _CARDS))
    if not jobs:
        raise NotRun(f"it runs on none of {', '.join(_CARDS)}")
    for outcome in build_cubins(jobs):
        if outcome.state == "failed":
            raise Broken(f"for {outcome.wanted.arch}: {outcome.reason}")


def check_threads(trial: Trial) -> None:
    """Check that threads that share a plan, each with its own inputs, get the results of one thread."""
    examples = [trial.another(turn) for turn in range(_THREADS)]
    plan = trial.plan(examples[0].case.problem)
    alone = [trial.once(plan, each) for each in examples]
    together = threading.Barrier(_THREADS)

    def work(mine: int) -> None:
        together.wait()
        for turn in range(_TURNS):
            got = trial.once(plan, examples[mine])
            trial.agree(examples[mine], got, alone[mine], f"thread {mine} of {_THREADS}, run {turn}")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH)
    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            try:
                list(pool.map(work, range(_THREADS)))
            finally:
                together.abort()  # an interrupt leaves threads that wait for ones that were never started
    finally:
        sys.setswitchinterval(interval)


def check_streams(trial: Trial) -> None:
    """Check that work is enqueued on the given stream, after the work that is already on it."""
    if trial.device.processor == "cpu":
        raise NotRun("a CPU has no streams; that one is refused is among the refusals")
    placement: Any = trial.placement
    if not hasattr(placement, "late"):
        raise NotRun(f"{placement.name} cannot hold inputs back; install torch")
    example = trial.telling
    plan = trial.plan(example.case.problem)
    first, call = trial.once(plan, example), trial.call(example)
    for buffer in call.buffers.values():
        buffer[...] = 0
    stream = placement.late(call)
    try:
        plan.run(stream=stream, **call.arguments)
    except InvalidProblem as error:
        if error.field != "stream":
            raise
        raise NotRun(f"it refuses the stream: {error}") from error
    finally:
        placement.finish(stream)
    trial.agree(example, call.contents(), first, "it did not wait for earlier work on the stream")


def digest(trial: Trial) -> str:
    """Return a digest of the outputs of all cases of a kernel's op."""
    state = hashlib.sha256()
    for numbered in (each for each in trial.cases if each.own):
        example = trial.example(numbered)
        for array in trial.once(trial.plan(example.case.problem), example).values():
            state.update(array.tobytes())
    return state.hexdigest()


class Check(NamedTuple):
    """A check of a kernel: whether a spot check has it too, and whether it needs no device.

    ``skuda verify`` runs those that need a device.
    """

    run: Callable[[Trial], None]
    spot: bool = True
    anywhere: bool = False


CHECKS = {
    "record": Check(check_record, anywhere=True),
    "meaning": Check(check_meaning),
    "memory": Check(check_memory),
    "deterministic": Check(check_deterministic),
    "batch_invariant": Check(check_batch_invariant),
    "outputs": Check(check_outputs),
    "reuse": Check(check_reuse),
    "calls": Check(check_calls),
    "refusals": Check(check_refusals, spot=False),
    "threads": Check(check_threads, spot=False),
    "streams": Check(check_streams, spot=False),
    "constraints": Check(check_constraints, spot=False),
    "large": Check(check_large, spot=False),
    "compiles": Check(check_compiles, anywhere=True),
}
"""The checks of kernels, in the order in which they are run."""


def perform(trial: Trial, name: str) -> None:
    """Run a check of a kernel once; failures are recorded in its trial, and nothing is raised."""
    if name in trial.checks:
        return
    trial.checks[name] = ""
    try:
        with unchanged_state():
            try:
                CHECKS[name].run(trial)
            except NotRun as reason:
                trial.checks[name] = str(reason)
            except Exception as error:  # noqa: BLE001  a kernel may raise anything
                broken = Broken.by(error)
                trial.fail(name, broken, broken.example)
    except Broken as changed:
        trial.fail("calls", changed)


# --- packages, ops and backends --------------------------------------------------------------------------------------


def check_loaded(dispatcher: Dispatcher, package: str) -> None:
    """Check that every plug-in of the package is installed and loaded."""
    aside = [str(each) for each in dispatcher.plugins if plain(each.package) == plain(package) and each.reason]
    if aside:
        raise Broken("\n".join(aside))
    registry = dispatcher.registry
    if not any(owns(dispatcher, package, n) for n in (*registry.ops, *registry.backends, *(s.id for s in registry))):
        known = sorted({plugin.package for plugin in dispatcher.plugins})
        near = nearest(package, known)
        raise Broken(
            f"nothing is registered by {package!r}; packages with plug-ins here: {', '.join(known) or 'none'}. "
            + (f"Did you mean {near[0]!r}? " if near else "")
            + "`package` is the name in pyproject.toml, and the package needs an entry point in the group "
            "skuda.kernels or skuda.backends. Install it again after a change of entry points: pip install -e ."
        )


def check_light(dispatcher: Dispatcher, package: str) -> None:
    """Check that loading the package's plug-ins imports no heavy module, so that programs start fast."""
    if not any(plain(plugin.package) == plain(package) for plugin in dispatcher.plugins):
        raise NotRun(f"{package!r} is not an installed package with plug-ins")
    code = f"import sys; sys.path[:] = {sys.path!r}; from skuda.dispatch import Dispatcher; Dispatcher(); "
    command, changed = [sys.executable, "-c", f"{code}print(*sys.modules)"], environment(SKUDA_PLUGINS=package)
    ran = subprocess.run(command, env=changed, capture_output=True, text=True, check=False)
    heavy = sorted(HEAVY & set(ran.stdout.split()))
    if ran.returncode:
        raise Broken(f"another process failed with status {ran.returncode}:\n{ran.stderr[-2000:]}")
    if heavy:
        raise Broken(f"loading its plug-ins imports {', '.join(heavy)}; import them where they are used")


def check_op(op: Op, dispatcher: Dispatcher) -> None:
    """Check that an op is documented, has a reference, and has cases that survive JSON."""
    sections = ("Formula", *(() if op.descriptor.signature else ("Shapes",)), "Elements", "Units", "Errors")
    absent = [name for name in sections if f"\n{name}\n---" not in op.documentation]
    if absent:
        raise Broken(f"the documentation of its module, which `skuda show` prints, has no {', '.join(absent)}")
    skus = dispatcher.registry.skus_of(op.name)
    if not any(dispatcher.registry.backends[sku.backend].reference for sku in skus):
        raise Broken("none of its kernels is on a reference backend; offer `reference` on numpy")
    for case in op.cases:
        again = type(case.problem).model_validate_json(case.problem.model_dump_json())
        if again != case.problem:
            raise Broken(f"{case.problem!r} comes back from JSON as {again!r}")
        if not any(sku.key == case.problem.key() for sku in skus):
            raise Broken(f"no kernel has the key of its case {case.problem!r}")


def check_status(backend: Backend, dispatcher: Dispatcher) -> None:
    """Check that `status` and `devices` do not raise, are complete, and are consistent."""
    if backend.spec.name not in dispatcher.registry.backends:
        raise Broken("its BackendSpec is not registered")
    states = [_answered(backend.status) for _ in range(2)]
    for state in states:
        if not isinstance(state, BackendStatus):
            raise Broken(f"status() must return a BackendStatus; had {state!r}")
        if not state.detail or (not state.available and not state.remedy):
            raise Broken(f"status() must give a detail and, where it does not work, a remedy; had {state!r}")
    if states[0] != states[1]:
        raise Broken(f"status() must give the same answer twice; had {states[0]!r}, then {states[1]!r}")
    devices = _answered(backend.devices)
    for device in devices:
        if not isinstance(device, Device) or device.processor != backend.spec.processor or device.ordinal is None:
            raise Broken(f"devices() must return {backend.spec.processor} Devices with an ordinal; had {device!r}")
    if bool(devices) is not states[0].available:
        raise Broken(f"status() says available={states[0].available}, and devices() returns {devices!r}")


def _answered(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except Exception as error:
        raise Broken(f"{ask.__name__}() must not raise; raised {type(error).__name__}: {error}") from error
