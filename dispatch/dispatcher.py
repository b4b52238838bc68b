"""`Dispatcher`: turns a descriptor into a plan, and a descriptor with arrays into a result."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from skuda.dispatch.backends.base import Backend, BackendStatus
from skuda.dispatch.plan import Plan
from skuda.dispatch.plugins.asking import (
    KERNELS,
    Misbehaved,
    ask_choices,
    ask_devices,
    ask_runner,
    ask_status,
    ask_words,
    error_text,
)
from skuda.dispatch.preference import NO_PREFERENCE, PlanPreference
from skuda.dispatch.select import match
from skuda.dispatch.select.pick import Pick
from skuda.dispatch.select.place import common_place
from skuda.dispatch.settings import nvtx_enabled, tuning_file
from skuda.dispatch.system.locks import Locks, lock
from skuda.dispatch.system.transient import is_transient
from skuda.dispatch.telemetry import Guarded, Observer, Ranges, Selection, Watch, log_selection, logger_of
from skuda.registry.cached import cached_property
from skuda.registry.descriptor import Descriptor
from skuda.registry.device import HOST, KNOWN_DEVICES, Device, device_named
from skuda.registry.errors import InvalidProblem, InvalidRecord, KernelFailed, NotPrepared, Unsupported
from skuda.registry.registry import Registry
from skuda.registry.sku import KernelSku
from skuda.registry.text import shown

if TYPE_CHECKING:
    from skuda.dispatch.plugins.loading import Plugin
    from skuda.dispatch.select.explanation import Explanation
    from skuda.dispatch.select.measured import Tuned
    from skuda.dispatch.select.tuning import Tuning
    from skuda.dispatch.shard.explanation import ShardedExplanation
    from skuda.dispatch.shard.plan import ShardedPlan
    from skuda.dispatch.shard.shards import Shards

_MOST_PLANS = 4096


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
    ) -> None:
        _check("registry", registry, Registry, "be a Registry, or None for the installed ops and kernels")
        _check("on_selection", on_selection, Callable, "be a function of a Selection, or None")
        _check("nvtx", nvtx, bool, "be True, False or None")
        if backends is not None:
            backends = _backends(backends)
        self._tuned = self._tuned_by(tuning_file() if tuning is None else tuning)
        own = registry is None
        if registry is None:
            from skuda.kernels.catalog import built_in_registry

            registry = built_in_registry()
        plugins: list[Plugin] = []
        self._brought: dict[str, Plugin] = {}
        if backends is None:
            # Imported here, because a program that only describes kernels and devices needs no backend.
            from skuda.dispatch.backends.cuda_core import CudaCoreBackend
            from skuda.dispatch.backends.numpy import NumpyBackend
            from skuda.dispatch.backends.pycuda import PycudaBackend
            from skuda.dispatch.plugins.loading import load_backends

            # The caller's registry may contain them already.
            known, brought, aside = load_backends(registry if own else Registry())
            registry = known if own else registry
            backends = (PycudaBackend(), CudaCoreBackend(), NumpyBackend(), *(backend for backend, _ in brought))
            self._brought = {backend.spec.name: plugin for backend, plugin in brought}
            plugins += [*self._brought.values(), *aside]
        if own:
            from skuda.dispatch.plugins.loading import load_kernels

            registry, more = load_kernels(registry)
            plugins += more
        self.registry = registry
        self.backends = {backend.spec.name: backend for backend in backends}
        self.plugins = tuple(plugins)
        self._plans: OrderedDict[Hashable, Plan] = OrderedDict()  # finding the first key of a dict takes long
        self._ran: dict[tuple[Descriptor, PlanPreference | None], Callable[..., Any]] = {}
        """Functions that `run` tries first, by problem. They hold plans; withdrawing plans replaces the dict."""
        self._failed: dict[str, tuple[str, str]] = {}
        """Remedy and reason by id, for every kernel of a plug-in that failed in a launch."""
        self._shortlists = match.Shortlists()
        self._answering = Locks()
        self._lock = lock()
        log = log_selection if logger_of("dispatch") is not None else None
        self._observers = [Guarded(observer) for observer in (log, on_selection) if observer is not None]
        self._ranges: Ranges | None = None
        if nvtx_enabled() if nvtx is None else nvtx:
            self._ranges = Ranges()

    def _tuned_by(self, tuning: Tuning | str | os.PathLike[str] | None) -> Tuned | None:
        if tuning is None or (isinstance(tuning, str) and not tuning):
            return None
        # Imported here, because few programs have measured times.
        from skuda.dispatch.select.measured import Tuned
        from skuda.dispatch.select.tuning import Tuning

        _check("tuning", tuning, (Tuning, str, os.PathLike), "be a Tuning, the path of a file of one, or None")
        if isinstance(tuning, Tuning):
            return Tuned(tuning, "a tuning of this program", self._driver_of, self.choices)
        return Tuned(Tuning.load(Path(tuning)), os.fspath(tuning), self._driver_of, self.choices)

    @property
    def tuning(self) -> Tuning | None:
        """The measured times that may change the choice."""
        return self._tuned.tuning if self._tuned is not None else None

    @staticmethod
    def _driver_of(device: Device) -> str | None:
        from skuda.dispatch.select.environment import driver_of

        return driver_of(device) if device.ordinal is not None else None

    @property
    def quarantined(self) -> tuple[Plugin, ...]:
        """The plug-ins that were set aside, each with the reason."""
        return tuple(plugin for plugin in self.plugins if plugin.reason)

    @cached_property
    def status(self) -> dict[str, BackendStatus]:
        """Whether each registered backend works here."""
        found = {}
        for name in self.registry.backends:
            backend = self.backends.get(name)
            if backend is None:
                remedy = f"install a package that brings the backend {name!r}"
                found[name] = BackendStatus(available=False, detail="no such backend is installed", remedy=remedy)
                continue
            try:
                found[name] = ask_status(backend)
            except Misbehaved as error:
                found[name] = self._blamed(name, error)
        return found

    def _pass_on(self, name: str, error: Misbehaved) -> None:
        """Raise the cause if it is transient and the backend is built in: the dispatcher will ask the backend again."""
        if name not in self._brought and error.__cause__ is not None and is_transient(error.__cause__):
            raise error.__cause__

    def _blamed(self, name: str, error: Misbehaved) -> BackendStatus:
        """Set aside the plug-in that provides a backend. Other kernels then serve its problems."""
        self._pass_on(name, error)
        plugin = self._brought.get(name)
        if plugin is None:
            return BackendStatus(available=False, detail=str(error))
        aside = plugin.model_copy(update={"reason": str(error)})
        with self._lock:
            if not self._brought[name].reason:
                self._brought[name] = aside
                self.plugins = tuple(aside if each is plugin else each for each in self.plugins)
        return BackendStatus(available=False, detail=f"of {plugin.origin}: {error}", remedy=plugin.remedy)

    @cached_property
    def _unavailable(self) -> dict[str, tuple[str, str]]:
        return {name: (s.remedy, s.detail) for name, s in self.status.items() if not s.available}

    def _give_up(self, error: Misbehaved) -> None:
        """Exclude a backend's kernels from all later selections."""
        name = error.backend
        state = self.status[name] = self._blamed(name, error)
        self._unavailable[name] = (state.remedy, state.detail)
        self._shortlists.forget()

    def _known_obstacles(self) -> match.Unavailable:
        return self._obstacles

    @property
    def _obstacles(self) -> match.Unavailable:
        return self._unavailable | self._failed if self._failed else self._unavailable

    def _plugin_of(self, sku: KernelSku) -> Plugin | None:
        """Return the plug-in that registered a kernel, or the one that provides its backend, or None."""
        if not self.plugins:
            return None
        origin = self.registry.origin(sku.id)
        registered = (each for each in self.plugins if (each.group, each.origin) == (KERNELS, origin))
        return next(registered, self._brought.get(sku.backend))

    def _launch_failed(self, sku: KernelSku, plugin: Plugin, error: BaseException) -> None:
        """Set aside a plug-in whose kernel raised an error. Other kernels then serve its problems."""
        if is_transient(error):
            return  # not the kernel's fault
        failure = KernelFailed(sku.id, plugin.origin, error_text(error))
        misbehaved = Misbehaved(sku.backend, f"{sku.id} raised {failure.reason}")
        if plugin.group == KERNELS:
            ids = [each.id for each in self.registry if self.registry.origin(each.id) == plugin.origin]
            aside = plugin.model_copy(update={"reason": str(misbehaved)})
            with self._lock:
                self.plugins = tuple(aside if each == plugin else each for each in self.plugins)
            self._failed |= dict.fromkeys(ids, (plugin.remedy, f"of {plugin.origin}: {misbehaved}"))
            self._shortlists.forget()
        else:
            ids = [each.id for each in self.registry if each.backend == sku.backend]
            self._give_up(misbehaved)
        for key, plan in list(self._plans.items()):
            if plan.sku.id in ids:
                self._plans.pop(key, None)
        self._ran = {}
        raise failure from error

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """The devices of this machine, best first: GPUs in their order, then the CPU."""
        found: dict[tuple[str, int | None], Device] = {}
        for name, backend in self.backends.items():
            if self.status.get(name, BackendStatus(available=False, detail="unregistered")).available:
                try:
                    devices = ask_devices(backend)
                except Misbehaved as error:
                    self._give_up(error)
                    continue
                for device in devices:
                    found.setdefault(device.place, device)
        found.setdefault(HOST.place, HOST)
        return tuple(sorted(found.values(), key=lambda device: device.processor == "cpu"))

    @cached_property
    def _by_place(self) -> dict[tuple[str, int | None], Device]:
        return {device.place: device for device in self.devices}

    def select(
        self,
        problem: Descriptor,
        preference: PlanPreference | None = NO_PREFERENCE,
        device: Device | str | None = None,
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
        try:
            found: Any = self.devices[0] if device is None else device
            # Keyed by place, not by "the current device", which can change between calls.
            plan = self._plans.get((problem, preference, found.place if found.ordinal is not None else found))
        except (AttributeError, TypeError):  # a name, or a value that is refused below
            plan = None
        if plan is not None:
            return plan
        problem, preference, device = self._question(problem, preference, device)
        key = (problem, preference, device.place if device.ordinal is not None else device)
        plan = self._plans.get(key) or self._selected(key, problem, preference, device)
        if plan is None:
            raise Unsupported(self.explain(problem, preference, device))
        return plan

    def _question(
        self, problem: object, preference: PlanPreference | None, device: Device | str | None
    ) -> tuple[Descriptor, PlanPreference, Device]:
        """Return checked arguments with their defaults; raise `InvalidProblem` for an argument of the wrong type."""
        if isinstance(problem, type) and issubclass(problem, Descriptor):
            _refuse("problem", problem, f"be one of its problems: {problem.__name__}(...)")
        if not isinstance(problem, Descriptor) or "op" not in type(problem).__pydantic_fields__:
            _refuse("problem", problem, "be a descriptor, such as Dispatcher.describe(op, ...)")
        _check("preference", preference, PlanPreference, "be a PlanPreference, such as PlanPreference(backend=...)")
        if isinstance(device, str):
            device = self._named(device)
        _check("device", device, Device, "be a Device, the name of one, or None")
        return problem, preference or NO_PREFERENCE, device or self.devices[0]

    def _named(self, name: str) -> Device:
        here: dict[str, Device] = {}
        for device in self.devices:
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

    def _plan(self, key: Hashable, make: Callable[[], Plan | None]) -> Plan | None:
        """Make a plan once, even if several threads ask for it. Threads that ask for other plans do not wait."""
        # Only `with` holds the lock, so no interrupt leaves it locked; see `skuda.dispatch.system.locks`.
        with self._answering.of(key):
            try:
                # Another thread may have made it. If that thread failed, try again: the obstacle may be gone.
                plan = self._plans.get(key)
                if plan is None:
                    plan = make()
                    plan = plan if plan is None else self._kept(key, plan)
                return plan
            finally:
                self._answering.drop(key)

    def _kept(self, key: Hashable, plan: Plan) -> Plan:
        with self._lock:
            while len(self._plans) >= _MOST_PLANS:
                self._plans.popitem(last=False)
            return self._plans.setdefault(key, plan)

    def _selected(
        self,
        key: Hashable,
        problem: Descriptor,
        preference: PlanPreference,
        device: Device,
        behind: KernelSku | None = None,
    ) -> Plan | None:
        """Make a plan with the best kernel, or the best one ranked after `behind`, and notify the observers."""
        while True:
            asked = (self.registry, problem, device, preference)
            shortlist = self._shortlists.of(*asked, self._known_obstacles)
            choose = partial(
                match.choose, *asked, self._obstacles, behind=behind, tuned=self._tuned, shortlist=shortlist
            )
            watch = Watch(choose, partial(self._planned, problem, preference, device))
            try:
                return self._plan(key, watch)
            except Misbehaved as error:
                # Its kernels are refused from now on, so the next kernel of the ranking is chosen.
                self._give_up(error)
            finally:
                # Only after the lock is released, because an observer may ask for the same plan.
                if watch.times is not None and self._observers:
                    explain = partial(self.explain, problem, preference, device)
                    passed = None if behind is None else behind.id
                    details = (watch.pick, *watch.times, watch.error, passed, explain)
                    selection = Selection(problem, device, preference, *details)
                    for observer in self._observers:
                        observer(selection)

    def _planned(self, problem: Descriptor, preference: PlanPreference, device: Device, pick: Pick) -> Plan:
        sku, choice, part = pick.sku, self._within(pick, problem, preference, device), preference.part_of(device)
        runner = None
        if device.ordinal is not None:
            backend = self.backends[sku.backend]
            if sku.backend in self._brought:
                runner = ask_runner(backend, sku, problem, part, choice)
            else:
                # A backend without configurations need not accept the parameter.
                more = {"choice": choice} if choice else {}
                runner = backend.prepare(sku, problem, part, **more)
            if self._ranges is not None:
                runner = self._ranges.round(runner, sku)

        def following() -> Plan | None:
            key = (problem, preference, device.place, sku.id)
            return self._plans.get(key) or self._selected(key, problem, preference, device, sku)

        plugin = self._plugin_of(sku)
        failed = None if plugin is None else partial(self._launch_failed, sku, plugin)
        how = {"choice": choice, "measured": pick.reason if choice == pick.choice else ""}
        return Plan.prepared(sku, problem, device, preference, runner, following, failed, **how)

    def _within(self, pick: Pick, problem: Descriptor, preference: PlanPreference, device: Device) -> str:
        """Return the chosen configuration, or the best one whose workspace is within the caller's limit."""
        most = preference.max_workspace_bytes
        backend = self.backends.get(pick.sku.backend)
        if most is None or backend is None or pick.sku.backend in self._brought:
            return pick.choice
        room = most - pick.sku.workspace_size(problem)
        offered = backend.choices(pick.sku, problem, preference.part_of(device))
        wanted = pick.choice or next((choice.name for choice in offered), "")
        fitting = [choice.name for choice in offered if choice.workspace <= room]
        return pick.choice if wanted in fitting or not fitting else fitting[0]

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
        preference = plan.preference.model_copy(update={"sku": plan.sku.id})
        found = match.choose(self.registry, plan.problem, plan.device, preference, self._obstacles)
        if found is None:
            raise Unsupported(self.explain(plan.problem, preference, plan.device))
        if plan.choice and plan.choice not in self.choices(found.sku, plan.problem, plan.device):
            raise NotPrepared(f"{plan.sku.id} has no configuration {plan.choice!r} any more: select again")
        pick = Pick(found.sku, plan.choice, plan.measured)
        key = (plan.problem, preference, plan.device, plan.choice)
        try:
            ready = self._plan(key, partial(self._planned, plan.problem, preference, plan.device, pick))
        except Misbehaved as error:
            self._give_up(error)
            raise Unsupported(self.explain(plan.problem, preference, plan.device)) from error
        assert ready is not None
        return ready

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
        ran, asked = self._ran, (problem, preference)
        try:
            again = ran.get(asked)
        except TypeError:  # a value without a hash is refused below
            again = None
        if again is not None:
            # The function knows on which device the arrays of such a call are.
            result = again(arrays, stream)
            if result is not None:
                return result
        try:
            op = problem.op_name()
        except (AttributeError, KeyError):
            self._question(problem, preference, HOST)
            raise
        plan = self.select(problem, preference, self._device_of(op, arrays))
        again = plan._run_again()  # noqa: SLF001  for dispatchers only
        if again is not None:
            if len(ran) >= _MOST_PLANS:
                ran.clear()
            ran[asked] = again
        return plan.run(stream=stream, **arrays)

    def _device_of(self, op: str, arrays: dict[str, Any]) -> Device:
        place = common_place(op, arrays)
        device = self._by_place.get(place)
        if device is None:
            device = Device(name=f"CUDA device {place[1]}", processor="cuda", ordinal=place[1])
        return device

    def explain(
        self,
        problem: Descriptor,
        preference: PlanPreference | None = NO_PREFERENCE,
        device: Device | str | None = None,
    ) -> Explanation:
        """Return what `select` would choose for the same arguments and why, even if it would fail.

        Raises
        ------
        InvalidProblem
            For an argument of the wrong type, or an unknown device.
        """
        problem, preference, device = self._question(problem, preference, device)
        notes = [str(plugin) for plugin in self.quarantined]
        if problem.op_name() not in self.registry.ops:
            notes.insert(0, f"op {problem.op_name()!r} is not registered")
        if preference.sku is not None and preference.sku not in self.registry:
            notes.insert(0, f"no kernel with the id {preference.sku!r} is registered; see `skuda list`")
        if preference.backend is not None and preference.backend not in self.registry.backends:
            known = ", ".join(self.registry.backends)
            notes.insert(0, f"no backend named {preference.backend!r} is registered (known: {known})")
        if device.processor == "cuda" and device.ordinal is not None and device.place not in self._by_place:
            notes.insert(0, "no backend here drives CUDA devices; `skuda doctor` says what is missing")
        found = match.explain(
            self.registry, problem, device, preference, self._obstacles, tuple(notes), tuned=self._tuned
        )
        chosen = self.registry.sku(found.chosen or "")
        backend = self.backends.get(chosen.backend) if chosen is not None else None
        more: tuple[str, ...] = ()
        if chosen is not None and backend is not None:
            try:
                part = preference.part_of(device)
                more = ask_words(backend, "describe_choice", chosen, problem, part, *filter(None, [found.choice]))
                more += ask_words(backend, "notes") if device.ordinal is not None else ()
            except Misbehaved as error:
                more += (f"backend {backend.spec.name}: {error}",)
        return found.model_copy(update={"notes": (*found.notes, *more)}) if more else found

    def select_shards(
        self,
        problem: Descriptor,
        shards: Shards,
        preference: PlanPreference | None = NO_PREFERENCE,
        device: Device | str | None = None,
    ) -> ShardedPlan:
        """Choose the kernels for a linear layer that the ranks of a group share.

        Every rank calls this with the same arguments, on its own device, and binds the plan to the group.

        Parameters
        ----------
        problem : Descriptor
            The whole linear layer, with its whole sizes.
        shards : Shards
            How the layer is split.
        preference, device
            As in `select`. A `sku` names the kernel of the product.

        Raises
        ------
        InvalidProblem
            For an argument of the wrong type, an unknown device, or a problem that cannot be split this way.
        Unsupported
            If a step of a rank has no kernel. The error carries every reason.
        """
        from skuda.dispatch.shard.plan import sharded_plan

        problem, preference, device = self._question(problem, preference, device)
        explanation = self.explain_shards(problem, shards, preference, device)
        if explanation.refused is not None:
            raise Unsupported(explanation.refused)
        return sharded_plan(problem, explanation, device, preference, self.registry, self.select)

    def explain_shards(
        self,
        problem: Descriptor,
        shards: Shards,
        preference: PlanPreference | None = NO_PREFERENCE,
        device: Device | str | None = None,
    ) -> ShardedExplanation:
        """Return what `select_shards` would choose for the same arguments and why, and what the ranks would exchange.

        Raises
        ------
        InvalidProblem
            For an argument of the wrong type, an unknown device, or a problem that cannot be split this way.
        """
        from skuda.dispatch.shard.explanation import explain
        from skuda.dispatch.shard.shards import Shards

        problem, preference, device = self._question(problem, preference, device)
        if not isinstance(shards, Shards):
            _refuse("shards", shards, "be a Shards, such as Shards(axis='k', count=2)")
        return explain(problem, shards, preference, lambda local, asked: self.explain(local, asked, device))

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
        problem, _, device = self._question(problem, None, device)
        backend = self.backends.get(sku.backend)
        try:
            return ask_choices(backend, sku, problem, device) if backend is not None else ()
        except Misbehaved as error:
            self._pass_on(sku.backend, error)
            return ()

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


def _backends(given: Iterable[object]) -> tuple[Backend, ...]:
    try:
        found = tuple(given)
    except TypeError:
        _refuse("backends", given, "be several Backends, or None for the installed ones")
    for backend in found:
        if not isinstance(backend, Backend):
            _refuse("backends", backend, "hold Backends, such as NumpyBackend()")
    return tuple(backend for backend in found if isinstance(backend, Backend))


def _check(argument: str, given: object, kind: Any, must: str) -> None:
    if given is not None and not isinstance(given, kind):
        _refuse(argument, given, must)


def _refuse(argument: str, given: object, must: str) -> NoReturn:
    raise InvalidProblem("Dispatcher", argument, shown(given), must)
