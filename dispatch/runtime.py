"""`Runtime`: what works here: the backends and their devices, and the plug-ins and kernels that were set aside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from skuda.dispatch.backends.base import Backend, BackendStatus, Runner
from skuda.dispatch.cuda.driver import driver
from skuda.dispatch.host.arrays import place_of
from skuda.dispatch.plugins.asking import KERNELS, Misbehaved, ask, error_text
from skuda.dispatch.select.match import Unavailable
from skuda.dispatch.system.interrupts import held_back
from skuda.dispatch.system.locks import lock
from skuda.dispatch.system.transient import is_transient
from skuda.registry.cached import cached_property
from skuda.registry.descriptor import Descriptor
from skuda.registry.device import HOST, Device
from skuda.registry.errors import DriverError, InvalidProblem, KernelFailed
from skuda.registry.registry import Registry
from skuda.registry.sku import KernelSku

if TYPE_CHECKING:
    from skuda.dispatch.plugins.loading import Plugin
    from skuda.dispatch.preference import PlanPreference


class Runtime:
    """The kernels of a registry, the backends that run them here, and what was set aside.

    Backends of plug-ins are asked with care: whatever they raise sets the plug-in aside, and other kernels serve.
    `plugins` were found, loaded or not. `brought` has the plug-in of each backend that comes from one, by the backend's
    name. `changed` is called with the ids of kernels that cannot be used any more.
    """

    def __init__(
        self,
        registry: Registry,
        backends: Iterable[Backend],
        plugins: Iterable[Plugin] = (),
        brought: Mapping[str, Plugin] | None = None,
    ) -> None:
        self.registry = registry
        self.backends = {backend.spec.name: backend for backend in backends}
        self.plugins = tuple(plugins)
        self.changed: Callable[[set[str]], None] = lambda _: None
        self._brought = dict(brought or {})
        self._lock = lock()

    @classmethod
    def found(cls, registry: Registry | None, backends: Iterable[Backend] | None) -> Runtime:
        """Return the runtime with the given registry and backends, or with the built-in and installed ones for None."""
        own = registry is None
        if registry is None:
            with held_back():
                from skuda.kernels.catalog import built_in_registry

                registry = built_in_registry()
        plugins: list[Plugin] = []
        by_name: dict[str, Plugin] = {}
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
            by_name = {backend.spec.name: plugin for backend, plugin in brought}
            plugins += [*by_name.values(), *aside]
        if own:
            from skuda.dispatch.plugins.loading import load_kernels

            registry, more = load_kernels(registry)
            plugins += more
        return cls(registry, backends, plugins, by_name)

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
                found[name] = ask(backend, "status")
            except Misbehaved as error:
                found[name] = self._blamed(name, error)
        return found

    @cached_property
    def obstacles(self) -> Unavailable:
        """The backends and kernels that cannot be used here. A failure replaces it."""
        return Unavailable({name: (s.remedy, s.detail) for name, s in self.status.items() if not s.available})

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """The devices, best first: GPUs in their order, then the CPU."""
        found: dict[tuple[str, int | None], Device] = {}
        for name, backend in self.backends.items():
            if self.status.get(name, BackendStatus(available=False, detail="unregistered")).available:
                try:
                    devices = ask(backend, "devices")
                except Misbehaved as error:
                    self.set_aside(error)
                    continue
                for device in devices:
                    found.setdefault(device.place, device)
        found.setdefault(HOST.place, HOST)
        return tuple(sorted(found.values(), key=lambda device: device.processor == "cpu"))

    @cached_property
    def _by_place(self) -> dict[tuple[str, int | None], Device]:
        return {device.place: device for device in self.devices}

    def device_of(self, op: str, arrays: Mapping[str, object]) -> Device:
        """Return the one device that holds all arrays; the CPU if there are none.

        Raise `InvalidProblem` if they are on different devices.
        """
        place = common_place(op, arrays)
        found = self._by_place.get(place)
        return found or Device(name=f"CUDA device {place[1]}", processor="cuda", ordinal=place[1])

    def prepared(self, sku: KernelSku, problem: Descriptor, device: Device, choice: str) -> Runner:
        """Return a runner of a kernel. Raise `Misbehaved` if the backend of a plug-in fails."""
        backend = self.backends[sku.backend]
        if sku.backend in self._brought:
            runner: Runner = ask(backend, "prepare", sku, problem, device, *filter(None, [choice]))
            return runner
        # A backend without configurations need not accept the parameter.
        return backend.prepare(sku, problem, device, **({"choice": choice} if choice else {}))

    def make_ready(self, sku: KernelSku, problem: Descriptor, device: Device, choice: str) -> bool | None:
        """Load a kernel, and return whether it was compiled; see `Backend.make_ready`.

        Raise `Misbehaved` if the backend of a plug-in fails.
        """
        if sku.backend in self._brought:
            self.prepared(sku, problem, device, choice)
            return None
        return self.backends[sku.backend].make_ready(sku, problem, device, choice)

    def choices(self, sku: KernelSku, problem: Descriptor, device: Device) -> tuple[str, ...]:
        """Return the names of a kernel's configurations, best first. Empty if it has one, or if its backend fails."""
        backend = self.backends.get(sku.backend)
        try:
            return ask(backend, "choices", sku, problem, device) if backend is not None else ()
        except Misbehaved as error:
            self._pass_on(sku.backend, error)
            return ()

    def choice_within(self, sku: KernelSku, problem: Descriptor, device: Device, wanted: str, most: int | None) -> str:
        """Return the wanted configuration, or the best one whose workspace is at most this many bytes."""
        backend = self.backends.get(sku.backend)
        if most is None or backend is None or sku.backend in self._brought:
            return wanted
        room = most - sku.workspace_size(problem)
        offered = backend.choices(sku, problem, device)
        best = wanted or next((choice.name for choice in offered), "")
        fitting = [choice.name for choice in offered if choice.workspace <= room]
        return wanted if best in fitting or not fitting else fitting[0]

    def remarks(self, sku: KernelSku, problem: Descriptor, device: Device, choice: str) -> tuple[str, ...]:
        """Return the backend's remarks on how a kernel would run."""
        backend = self.backends.get(sku.backend)
        if backend is None:
            return ()
        try:
            remarks: tuple[str, ...] = ask(backend, "describe_choice", sku, problem, device, *filter(None, [choice]))
            return remarks + (ask(backend, "notes") if device.ordinal is not None else ())
        except Misbehaved as error:
            return (f"backend {backend.spec.name}: {error}",)

    def notes(self, problem: Descriptor, preference: PlanPreference, device: Device) -> tuple[str, ...]:
        """Return what a selection lacks here: op, kernel, backend, device, and the plug-ins that were set aside."""
        notes = [str(plugin) for plugin in self.plugins if plugin.reason]
        if problem.op_name() not in self.registry.ops:
            notes.insert(0, f"op {problem.op_name()!r} is not registered")
        if preference.sku is not None and preference.sku not in self.registry:
            notes.insert(0, f"no kernel with the id {preference.sku!r} is registered; see `skuda list`")
        if preference.backend is not None and preference.backend not in self.registry.backends:
            known = ", ".join(self.registry.backends)
            notes.insert(0, f"no backend named {preference.backend!r} is registered (known: {known})")
        if device.processor == "cuda" and device.ordinal is not None and device.place not in self._by_place:
            notes.insert(0, "no backend here drives CUDA devices; `skuda doctor` says what is missing")
        return tuple(notes)

    def set_aside(self, error: Misbehaved) -> None:
        """Exclude the kernels of a backend that failed from all later selections."""
        name = error.backend
        state = self.status[name] = self._blamed(name, error)
        self._exclude({name: (state.remedy, state.detail)})
        self.changed({sku.id for sku in self.registry if sku.backend == name})

    def plugin_of(self, sku: KernelSku) -> Plugin | None:
        """Return the plug-in that registered a kernel, or the one that provides its backend, or None."""
        if not self.plugins:
            return None
        origin = self.registry.origin(sku.id)
        registered = (each for each in self.plugins if (each.group, each.origin) == (KERNELS, origin))
        return next(registered, self._brought.get(sku.backend))

    def launch_failed(self, sku: KernelSku, plugin: Plugin, error: BaseException) -> None:
        """Set aside a plug-in whose kernel raised an error. Other kernels then serve its problems.

        Raise `KernelFailed` unless the error is transient, and so not the kernel's fault.
        """
        if is_transient(error):
            return
        failure = KernelFailed(sku.id, plugin.origin, error_text(error))
        misbehaved = Misbehaved(sku.backend, f"{sku.id} raised {failure.reason}")
        if plugin.group == KERNELS:
            ids = {each.id for each in self.registry if self.registry.origin(each.id) == plugin.origin}
            self._replace(plugin, plugin.model_copy(update={"reason": str(misbehaved)}))
            why = (plugin.remedy, f"of {plugin.origin}: {misbehaved}")
            self._exclude(dict.fromkeys(ids, why))
            self.changed(ids)
        else:
            self.set_aside(misbehaved)
        raise failure from error

    def _pass_on(self, name: str, error: Misbehaved) -> None:
        """Raise the cause if it is transient and the backend is built in, because it will be asked again."""
        if name not in self._brought and error.__cause__ is not None and is_transient(error.__cause__):
            raise error.__cause__

    def _blamed(self, name: str, error: Misbehaved) -> BackendStatus:
        """Return the status of a backend that failed, and set aside the plug-in that provides it."""
        self._pass_on(name, error)
        plugin = self._brought.get(name)
        if plugin is None:
            return BackendStatus(available=False, detail=str(error))
        if not plugin.reason:
            self._brought[name] = aside = plugin.model_copy(update={"reason": str(error)})
            self._replace(plugin, aside)
        return BackendStatus(available=False, detail=f"of {plugin.origin}: {error}", remedy=plugin.remedy)

    def _exclude(self, more: Mapping[str, tuple[str, str]]) -> None:
        _ = self.obstacles  # computed outside the lock, because that may set plug-ins aside
        with self._lock:
            self.obstacles = Unavailable({**self.obstacles, **more})

    def _replace(self, plugin: Plugin, aside: Plugin) -> None:
        with self._lock:
            self.plugins = tuple(aside if each == plugin else each for each in self.plugins)


def common_place(op: str, arrays: Mapping[str, object]) -> tuple[str, int]:
    """Return the processor and the ordinal of the one device that holds all arrays; ("cpu", 0) if there are none.

    Raise `InvalidProblem` if they are on different devices.
    """
    places = {}
    for name, value in arrays.items():
        place = None if value is None else place_of(op, name, value)
        if place is not None:
            places[name] = (place[0], _ordinal_of(value) if place[1] is None else place[1])
    if len(set(places.values())) > 1:
        devices = ", ".join(f"{name} on {kind}:{ordinal}" for name, (kind, ordinal) in places.items())
        raise InvalidProblem(op, "arrays", devices, "all be on one device; move them there first")
    return next(iter(places.values()), ("cpu", 0))


def _ordinal_of(value: Any) -> int:
    """Return the ordinal, according to the driver, of an array's device; 0 if there is no memory or no driver."""
    try:
        return driver().ordinal_of(int(value.__cuda_array_interface__["data"][0])) or 0
    except (AttributeError, DriverError, LookupError, TypeError, ValueError):  # a malformed array is refused later
        return 0
