"""Kernels and backends of other packages, found through entry points.

Group ``skuda.kernels``: an `Op`, `KernelSku` or `BackendSpec`, several of them, or a callable that returns either.
Group ``skuda.backends``: a `Backend` subclass. A plug-in that fails is set aside with its origin and its reason; the
others go on. How long one takes to load is measured and shown by ``skuda doctor``; nothing is set aside for being slow,
because what a program selects must not depend on a clock.

A plug-in is code in this process. What is caught here are mistakes and bad manners; it is no fence against malice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import Distribution, EntryPoint, distributions, entry_points
from typing import Any, TypeVar

from skuda.dispatch.backends.base import Backend, BackendStatus, Runner
from skuda.dispatch.device import Device
from skuda.dispatch.seal import Seal
from skuda.dispatch.settings import plugin_enabled
from skuda.kernels.launch import Choice
from skuda.registry.backend import BackendSpec
from skuda.registry.descriptor import Descriptor
from skuda.registry.errors import SkudaError
from skuda.registry.op import Op
from skuda.registry.registry import Registry
from skuda.registry.sku import KernelSku
from skuda.registry.value import Value

KERNELS, BACKENDS = "skuda.kernels", "skuda.backends"
PATIENCE = 5.0
"""Seconds of loading after which a warning names the plug-in that everybody waits for."""

Taken = TypeVar("Taken")


class Plugin(Value):
    """An entry point of another package, as it was loaded or set aside.

    Attributes
    ----------
    group, name : str
        Its entry point.
    origin : str
        The distribution that brings it, with version.
    package : str
        The distribution's name.
    seconds : float
        How long loading it took; next to nothing where its module had been imported before.
    reason : str
        Why it is set aside; empty where it is not.
    """

    group: str
    name: str
    origin: str
    package: str
    seconds: float = 0.0
    reason: str = ""

    @property
    def remedy(self) -> str:
        """What to do about it."""
        return f"pip install --upgrade {self.package}, pip uninstall {self.package}, or SKUDA_PLUGINS=-{self.name}"

    def __str__(self) -> str:
        state = f"is set aside: {self.reason}" if self.reason else f"took {self.seconds:.3f} s to load"
        return f"plug-in {self.name} of {self.origin} ({self.group}) {state}"


def found(group: str) -> tuple[tuple[tuple[EntryPoint, Plugin], ...], tuple[Plugin, ...]]:
    """Return a group's entry points in order, and the packages whose metadata cannot be read.

    Returns
    -------
    points : tuple of (EntryPoint, Plugin)
        Each with its record, loaded by nobody yet.
    broken : tuple of Plugin
        With the reason.
    """
    try:
        points = list(entry_points(group=group))
    except Exception:  # noqa: BLE001  one package's broken metadata spoils the call for all
        points, broken = _one_by_one(group)
    else:
        broken = []
    return tuple((point, _entry(point)) for point in sorted(points)), tuple(broken)


def _one_by_one(group: str) -> tuple[list[EntryPoint], list[Plugin]]:
    points: dict[str, list[EntryPoint]] = {}
    broken = []
    for distribution in distributions():
        package = _name(distribution)
        try:
            mine = [point for point in distribution.entry_points if point.group == group]
        except Exception as error:  # noqa: BLE001  however it is broken
            reason = f"its entry points cannot be read: {told(error)}"
            broken.append(Plugin(group=group, name=package, origin=package, package=package, reason=reason))
        else:
            points.setdefault(package, mine)  # the first on the path is the one that is imported
    return [point for mine in points.values() for point in mine], broken


def _entry(point: EntryPoint) -> Plugin:
    package = _name(point.dist) if point.dist is not None else point.value
    version = _attribute(point.dist, "version")
    origin = f"{package} {version}" if version else package
    return Plugin(group=point.group, name=point.name, origin=origin, package=package)


def _name(distribution: Distribution) -> str:
    """Return a distribution's name, or its path where its metadata does not tell."""
    return _attribute(distribution, "name") or str(_attribute(distribution, "_path") or distribution)


def _attribute(distribution: Distribution | None, name: str) -> Any:
    try:
        return getattr(distribution, name, None)
    except Exception:  # noqa: BLE001  metadata can be missing or broken in any way
        return None


def _enabled(group: str) -> tuple[list[tuple[EntryPoint, Plugin]], tuple[Plugin, ...]]:
    """Return what `found` does, without what ``SKUDA_PLUGINS`` leaves out."""
    points, broken = found(group)
    kept = [(point, plugin) for point, plugin in points if plugin_enabled(plugin.name, plugin.package)]
    return kept, tuple(plugin for plugin in broken if plugin_enabled(plugin.package))


def load_backends(
    registry: Registry,
) -> tuple[Registry, tuple[tuple[Backend, Plugin], ...], tuple[Plugin, ...]]:
    """Construct the backends that installed packages bring and register what they are.

    Parameters
    ----------
    registry : Registry
        What exists; a plug-in that claims a name in it is set aside.

    Returns
    -------
    registry : Registry
        A new snapshot.
    backends : tuple of (Backend, Plugin)
        The backends, and who brings each.
    aside : tuple of Plugin
        What is set aside.
    """
    points, broken = _enabled(BACKENDS)
    brought, aside = [], list(broken)
    for point, named in points:
        taken, plugin = _taken(named, Seal(registry), partial(_with_backend, point, named, registry))
        if taken is None:
            aside.append(plugin)
        else:
            registry, backend = taken
            brought.append((backend, plugin))
    return registry, tuple(brought), tuple(aside)


def load_kernels(registry: Registry) -> tuple[Registry, tuple[Plugin, ...]]:
    """Register what installed packages bring; a package is taken whole or not at all.

    Returns
    -------
    registry : Registry
        A new snapshot.
    plugins : tuple of Plugin
        All of them, those set aside with their reason.
    """
    from skuda.kernels.catalog import built_in_registry

    points, broken = _enabled(KERNELS)
    plugins = list(broken)
    for point, named in points:
        # `registry` may be a later snapshot; the first one is what other dispatchers begin with.
        seal = Seal(registry, built_in_registry())
        taken, plugin = _taken(named, seal, partial(_with_kernels, point, named, registry))
        registry = taken or registry
        plugins.append(plugin)
    return registry, tuple(plugins)


def _with_backend(point: EntryPoint, plugin: Plugin, registry: Registry) -> tuple[Registry, Backend]:
    backend = point.load()()
    if not isinstance(backend, Backend) or type(getattr(backend, "spec", None)) is not BackendSpec:
        raise TypeError(f"{point.value} must construct a skuda.dispatch.Backend whose spec is a BackendSpec")
    return registry.register(_valid(backend.spec), origin=plugin.origin), backend


def _with_kernels(point: EntryPoint, plugin: Plugin, registry: Registry) -> Registry:
    loaded = point.load()
    brought = loaded() if callable(loaded) else loaded
    records = (brought,) if isinstance(brought, (Op, KernelSku, BackendSpec)) else brought
    return registry.register(*(_valid(record) for record in records), origin=plugin.origin)


def _taken(plugin: Plugin, seal: Seal, take: Callable[[], Taken]) -> tuple[Taken | None, Plugin]:
    """Return what taking a plug-in in gives, or None where it is set aside; and its record either way."""
    start, reason = time.perf_counter(), ""
    taken = None
    try:
        with _watched(plugin):
            taken = take()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  whatever a plug-in does must not break the rest
        reason = told(error)
    seconds = time.perf_counter() - start
    changed = seal.mend()
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        reason = f"it changed {changed[0]}{more}, which is not its own (put back)" + (f"; {reason}" if reason else "")
    return None if reason else taken, plugin.model_copy(update={"seconds": seconds, "reason": reason})


@contextmanager
def _watched(plugin: Plugin) -> Iterator[None]:
    """Say which plug-in everybody waits for: a load that hangs cannot be broken off from outside."""

    def say() -> None:
        text = "plug-in %s of %s (%s) is still loading after %g s; SKUDA_PLUGINS=-%s leaves it out"
        where = (plugin.name, plugin.origin, plugin.group, PATIENCE, plugin.name)
        logging.getLogger("skuda").warning(text, *where)

    timer = threading.Timer(PATIENCE, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _valid(record: Any) -> Any:
    """Return a record as it would have been validated, whatever its maker left out."""
    if isinstance(record, Op):
        for sku in record.skus:
            _valid(sku)
    elif isinstance(record, (KernelSku, BackendSpec)):
        kind = KernelSku if isinstance(record, KernelSku) else BackendSpec
        if type(record) is not kind:
            raise TypeError(f"{type(record).__name__} must be a {kind.__name__} itself, not a class derived from it")
        if kind.model_validate(record.model_dump(warnings=False)) != record:
            raise ValueError(f"{record!r} must be built by its constructor, which validates it")
    return record


def told(error: BaseException) -> str:
    """Return an error's kind and text, whatever its text does."""
    return f"{type(error).__name__}: {_safely(str, error)}"


def _safely(show: Callable[[Any], str], value: Any) -> str:
    try:
        return show(value)
    except Exception:  # noqa: BLE001  a plug-in's object may fail at that, too
        return f"(a {type(value).__name__} that cannot be shown)"


# --- asking a backend ------------------------------------------------------------------------------------------------


class Misbehaved(Exception):
    """A backend raised where it must answer, or answered with something else.

    Attributes
    ----------
    backend : str
        Its name.
    """

    def __init__(self, backend: str, message: str) -> None:
        super().__init__(message)
        self.backend = backend


def ask_status(backend: Backend) -> BackendStatus:
    """Ask a backend whether it works here; raises `Misbehaved`."""
    found: BackendStatus = _asked(backend, "status", lambda it: isinstance(it, BackendStatus), "a BackendStatus")
    return found


def ask_devices(backend: Backend) -> tuple[Device, ...]:
    """Ask a backend for its devices; raises `Misbehaved`, also for one of another processor or that is not here."""
    processor = backend.spec.processor

    def right(found: Any) -> bool:
        return isinstance(found, tuple) and all(
            isinstance(each, Device) and each.ordinal is not None and each.processor == processor for each in found
        )

    found: tuple[Device, ...] = _asked(backend, "devices", right, f"a tuple of {processor} Devices with an ordinal")
    return found


def ask_words(backend: Backend, question: str, *asked: Any) -> tuple[str, ...]:
    """Ask a backend for its `notes` or what it has `told`; raises `Misbehaved`."""

    def right(found: Any) -> bool:
        return isinstance(found, tuple) and all(isinstance(line, str) for line in found)

    found: tuple[str, ...] = _asked(backend, question, right, "a tuple of str", *asked)
    return found


def ask_choices(backend: Backend, sku: KernelSku, problem: Descriptor, device: Device) -> tuple[str, ...]:
    """Ask a backend for the names of a kernel's configurations; raises `Misbehaved`."""

    def right(found: Any) -> bool:
        return isinstance(found, tuple) and all(isinstance(choice, Choice) for choice in found)

    found: tuple[Choice, ...] = _asked(backend, "choices", right, "a tuple of Choices", sku, problem, device)
    return tuple(choice.name for choice in found)


def ask_runner(backend: Backend, sku: KernelSku, problem: Descriptor, device: Device, choice: str = "") -> Runner:
    """Ask a backend to prepare a kernel; raises `Misbehaved`, or the `SkudaError` with which it refuses."""

    def right(found: Any) -> bool:
        able = all(callable(getattr(found, name, None)) for name in ("run", "check", "bind"))
        return able and isinstance(getattr(found, "notes", None), tuple)

    kind = "a Runner: notes, check, run and bind"
    # A backend without choices need not know of any.
    asked = (sku, problem, device, *filter(None, [choice]))
    found: Runner = _asked(backend, "prepare", right, kind, *asked, refusal=SkudaError)
    return found


class _Never(Exception):
    """What nobody raises."""


def _asked(
    backend: Backend,
    question: str,
    right: Callable[[Any], bool],
    kind: str,
    *asked: Any,
    refusal: type[Exception] = _Never,
) -> Any:
    try:
        found = getattr(backend, question)(*asked)
    except (KeyboardInterrupt, refusal):
        raise
    except BaseException as error:
        raise Misbehaved(backend.spec.name, f"{question}() raised {told(error)}") from error
    if not right(found):
        raise Misbehaved(backend.spec.name, f"{question}() must return {kind}; had {_safely(repr, found)[:80]}")
    return found
