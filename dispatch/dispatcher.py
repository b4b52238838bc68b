"""`Dispatcher`: turns a descriptor into a plan, and a descriptor with arrays into a result."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from skuda.dispatch.advance import Prepared, Progress, Rows, prepare_rows
from skuda.dispatch.backends.base import Backend, BackendStatus
from skuda.dispatch.launch_cache import LaunchCache, PositionalCall
from skuda.dispatch.plan import Plan
from skuda.dispatch.planner import Planner
from skuda.dispatch.preference import NO_PREFERENCE, PlanPreference
from skuda.dispatch.runtime import Runtime
from skuda.dispatch.settings import nvtx_enabled, tuning_file
from skuda.dispatch.telemetry import Guarded, Observer, Ranges, log_selection, logger_of
from skuda.registry.descriptor import Descriptor
from skuda.registry.device import HOST, KNOWN_DEVICES, Device, device_named
from skuda.registry.errors import InvalidProblem, InvalidRecord, Unsupported
from skuda.registry.registry import Registry
from skuda.registry.sku import KernelSku
from skuda.registry.text import shown
from skuda.registry.value import expect

if TYPE_CHECKING:
    from skuda.dispatch.plugins.loading import Plugin
    from skuda.dispatch.select.explanation import Explanation
    from skuda.dispatch.select.measured import Tuned
    from skuda.dispatch.select.tuning import Tuning

_expect = partial(expect, "Dispatcher")


class Dispatcher:
    """Chooses, prepares and runs kernels. Threads can share a dispatcher.

    Parameters
    ----------
    registry : Registry or None
        The ops and kernels. None means the built-in ones and those of installed plug-ins.
    backends : iterable of Backend, or None
        The backends. None means the built-in ones and those of installed plug-ins.
    tuning : Tuning, path or None
        Measured times that may change the choice, or a file that holds them. None means the file that ``SKUDA_TUNING``
        names, if it names one. An empty string means no times. The dispatcher never measures or writes any.
    on_selection : callable or None
        Called with a `Selection` after every selection, successful or not. Taking a plan from the cache is not a
        selection. The first exception that it raises is logged. Exceptions never stop a selection.
    nvtx : bool or None
        Whether every launch is an NVTX range. None means the value of ``SKUDA_NVTX``.
    launches : LaunchCache or None
        Where the launches of the latest calls are kept. None means a cache of its own.

    Raises
    ------
    MissingDependency
        If NVTX ranges are requested and the package ``nvtx`` is not installed.
    InvalidRecord
        For a missing or malformed file of measured times, or an invalid environment variable.
    InvalidProblem
        For an argument of the wrong type.
    """

    def __init__(
        self,
        registry: Registry | None = None,
        *,
        backends: Iterable[Backend] | None = None,
        tuning: Tuning | str | os.PathLike[str] | None = None,
        on_selection: Observer | None = None,
        nvtx: bool | None = None,
        launches: LaunchCache | None = None,
    ) -> None:
        _expect("registry", registry, Registry | None, "be a Registry, or None for the installed ops and kernels")
        _expect("on_selection", on_selection, Callable | None, "be a function of a Selection, or None")
        _expect("nvtx", nvtx, bool | None, "be True, False or None")
        _expect("launches", launches, LaunchCache | None, "be a LaunchCache, or None for one of its own")
        given = None if backends is None else _backends_of(backends)
        self._runtime = Runtime.found(registry, given)
        self._tuned = _tuned_by(tuning_file() if tuning is None else tuning, self._runtime)
        self._launches = LaunchCache() if launches is None else launches
        log = log_selection if logger_of("dispatch") is not None else None
        observers = [Guarded(observer) for observer in (log, on_selection) if observer is not None]
        ranges = Ranges() if (nvtx_enabled() if nvtx is None else nvtx) else None
        self._planner = Planner(self._runtime, self._launches, self._tuned, observers, ranges)
        self._runtime.changed = self._planner.forget
        self.registry, self.backends = self._runtime.registry, self._runtime.backends

    @property
    def tuning(self) -> Tuning | None:
        """The measured times that may change the choice."""
        return self._tuned.tuning if self._tuned is not None else None

    @property
    def plugins(self) -> tuple[Plugin, ...]:
        """The installed plug-ins."""
        return self._runtime.plugins

    @property
    def quarantined(self) -> tuple[Plugin, ...]:
        """The plug-ins that were set aside, each with the reason."""
        return tuple(plugin for plugin in self.plugins if plugin.reason)

    @property
    def status(self) -> dict[str, BackendStatus]:
        """Whether each registered backend works here."""
        return self._runtime.status

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices of this machine, best first: GPUs in their order, then the CPU."""
        return self._runtime.devices

    def select(
        self, problem: Descriptor, preference: PlanPreference | None = NO_PREFERENCE, device: Device | str | None = None
    ) -> Plan:
        """Choose the best kernel for a problem and prepare it.

        Parameters
        ----------
        problem : Descriptor
            The problem.
        preference : PlanPreference or None
            The caller's requirements. None means no requirements.
        device : Device, str or None
            The device to run on. None means the best device of this machine. A name is a device of this machine
            (``cpu``, ``cuda`` for the first GPU, ``cuda:1``) or a card that `device_named` knows (``h200``). A plan for
            an absent device can be inspected, but not run.

        Returns
        -------
        Plan
            The plan. Plans are cached: the same arguments give the same plan.

        Raises
        ------
        InvalidProblem
            For an argument of the wrong type, or an unknown device.
        Unsupported
            If no kernel can serve the problem. The error carries every reason.
        """
        return self._plan(*_checked(self._runtime, problem, preference, device))

    def _plan(self, problem: Descriptor, preference: PlanPreference, device: Device) -> Plan:
        plan = self._planner.plan(problem, preference, device)
        if plan is None:
            raise Unsupported(self._planner.explain(problem, preference, device))
        return plan

    def prepare_rows(
        self, rows: Iterable[Rows], device: Device | str | None = None, progress: Progress | None = None
    ) -> Prepared:
        """Load every kernel that problems with any number of rows can choose: compile or find them, side by side.

        Parameters
        ----------
        rows : iterable of Rows
            The problems; `skuda.dispatch.advance.rows_of` makes them.
        device : Device, str or None
            As in `select`. A CPU needs nothing.
        progress : callable or None
            Called with the number of kernels that are ready, and that of all, whenever there is one more.
        """
        rows, here = tuple(rows), HOST
        for each in rows:
            _, _, here = _checked(self._runtime, each.problem, None, device)
        return prepare_rows(self._planner, self._runtime, rows, here, progress)

    def recorded(self) -> AbstractContextManager[set[tuple[Descriptor, Device]]]:
        """Return a context whose value gets every problem that is planned inside, with its device."""
        return self._planner.recorded()

    def prepare(self, plan: Plan) -> Plan:
        """Make a plan from JSON, a pickle or another dispatcher ready to run here, with the same kernel.

        Raises
        ------
        InvalidProblem
            For an argument that is not a plan.
        Unsupported
            If the kernel is not registered here, or no longer serves the problem.
        NotPrepared
            If the kernel no longer has the plan's configuration.
        """
        if not isinstance(plan, Plan):
            _refuse("plan", plan, "be a Plan, such as Plan.model_validate_json(...)")
        return self._planner.prepare(plan)

    def run(
        self,
        problem: Descriptor,
        preference: PlanPreference | None = NO_PREFERENCE,
        *,
        stream: object = None,
        **arrays: Any,
    ) -> Any:
        """Choose a kernel and run it on the device of the arrays. The choice is cached.

        Parameters
        ----------
        problem : Descriptor
            The problem.
        preference : PlanPreference or None
            The caller's requirements. None means no requirements.
        stream : object
            See `Plan.run`.
        **arrays
            The op's arguments by name.

        Raises
        ------
        InvalidProblem
            For a bad argument, or arrays on different devices.
        Unsupported
            If no kernel can serve the problem on that device.
        KernelFailed
            See `Plan.run`.
        """
        asked = (problem, preference)
        try:
            known = self._launches.of.get(asked, ())
        except TypeError:  # a value without a hash is refused below
            known = ()
        for launch in known:
            # It knows on which device the arrays of such a call are.
            result = launch(arrays, stream)
            if result is not None:
                return result
        try:
            device = self._runtime.device_of(type(problem).op_name(), arrays)
        except (AttributeError, KeyError):
            _checked(self._runtime, problem, preference, HOST)
            raise
        if preference is not NO_PREFERENCE and preference is not None:
            problem, preference, device = _checked(self._runtime, problem, preference, device)
        return self._plan(problem, preference or NO_PREFERENCE, device).first_run(asked, arrays, stream)

    def first_run(self, key: Hashable, problem: Descriptor, arrays: Mapping[str, Any], at: PositionalCall) -> Any:
        """Run a call of an op of torch that no known launch serves; see `Plan.first_run`."""
        plan = self._plan(problem, NO_PREFERENCE, self._runtime.device_of(problem.op_name(), arrays))
        return plan.first_run(key, arrays, None, at)

    def explain(
        self, problem: Descriptor, preference: PlanPreference | None = NO_PREFERENCE, device: Device | str | None = None
    ) -> Explanation:
        """Return what `select` would choose for the same arguments and why, even if it would fail.

        Raises
        ------
        InvalidProblem
            For an argument of the wrong type, or an unknown device.
        """
        return self._planner.explain(*_checked(self._runtime, problem, preference, device))

    def choices(self, sku: KernelSku, problem: Descriptor, device: Device | str | None) -> tuple[str, ...]:
        """Return the names of the configurations in which a kernel can run a problem on a device, best first.

        Empty if it has only one, or if its launch rule fails.

        Raises
        ------
        InvalidProblem
            For an argument of the wrong type.
        """
        if not isinstance(sku, KernelSku):
            _refuse("sku", sku, "be a KernelSku, such as Registry.sku(...)")
        problem, _, device = _checked(self._runtime, problem, None, device)
        return self._runtime.choices(sku, problem, device)

    def describe(self, op: str, **fields: Any) -> Descriptor:
        """Build the descriptor of an op by its name.

        Raises
        ------
        InvalidProblem
            For an unknown op or a bad field.
        """
        named: object = op
        known = self.registry.ops.get(named) if isinstance(named, str) else None
        if known is None:
            raise InvalidProblem("Dispatcher.describe", "op", shown(op), f"be one of {', '.join(self.registry.ops)}")
        return known.descriptor(**fields)


def _checked(
    runtime: Runtime, problem: object, preference: PlanPreference | None, device: Device | str | None
) -> tuple[Descriptor, PlanPreference, Device]:
    """Return the arguments of a selection with their defaults.

    Raise `InvalidProblem` for an argument of the wrong type, or an unknown device.
    """
    if isinstance(problem, type) and issubclass(problem, Descriptor):
        _refuse("problem", problem, f"be one of its problems: {problem.__name__}(...)")
    if not isinstance(problem, Descriptor) or "op" not in type(problem).__pydantic_fields__:
        _refuse("problem", problem, "be a descriptor, such as Dispatcher.describe(op, ...)")
    _expect("preference", preference, PlanPreference | None, "be a PlanPreference, such as PlanPreference(backend=...)")
    if isinstance(device, str):
        device = _named(runtime, device)
    _expect("device", device, Device | None, "be a Device, the name of one, or None")
    return problem, preference or NO_PREFERENCE, device or runtime.devices[0]


def _named(runtime: Runtime, name: str) -> Device:
    here: dict[str, Device] = {}
    for device in runtime.devices:
        here.setdefault(device.processor, device)
        here[f"{device.processor}:{device.ordinal}"] = device
    found = here.get(name.strip().lower())
    if found is None:
        try:
            found = device_named(name)
        except InvalidRecord:
            cards = ", ".join(card for card in KNOWN_DEVICES if card not in here)
            _refuse("device", name, f"be one of {', '.join(here)}, which are here, or of {cards}")
    return found


def _tuned_by(tuning: Tuning | str | os.PathLike[str] | None, runtime: Runtime) -> Tuned | None:
    """Return the measured times that are given, or those of a file. Return None for None and for an empty string."""
    if tuning is None or (isinstance(tuning, str) and not tuning):
        return None
    # Imported here, because few programs have measured times.
    from skuda.dispatch.select.environment import driver_of
    from skuda.dispatch.select.measured import Tuned
    from skuda.dispatch.select.tuning import Tuning

    _expect("tuning", tuning, (Tuning, str, os.PathLike), "be a Tuning, the path of a file of one, or None")
    origin, times = "a tuning of this program", tuning
    if not isinstance(times, Tuning):
        origin, times = os.fspath(times), Tuning.load(times)
    return Tuned(times, origin, lambda device: None if device.ordinal is None else driver_of(device), runtime.choices)


def _backends_of(given: Iterable[object]) -> tuple[Backend, ...]:
    """Return backends, or raise `InvalidProblem` for anything else."""
    try:
        found: tuple[Any, ...] = tuple(given)
    except TypeError:
        _refuse("backends", given, "be several Backends, or None for the installed ones")
    for backend in found:
        if not isinstance(backend, Backend):
            _refuse("backends", backend, "hold Backends, such as NumpyBackend()")
    return found


def _refuse(argument: str, given: object, must: str) -> NoReturn:
    """Raise `InvalidProblem` for an argument of a `Dispatcher`."""
    raise InvalidProblem("Dispatcher", argument, shown(given), must)
