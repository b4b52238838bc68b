"""Loads kernels and backends of other packages through entry points.

An entry point of the group ``skuda.kernels`` is an `Op`, `KernelSku` or `BackendSpec`, several of them, or a callable
that returns them. One of the group ``skuda.backends`` is a `Backend` subclass. A plug-in that fails is set aside with
its origin and the reason, and the others still load. ``skuda doctor`` shows the loading time of each. A slow plug-in is
not set aside, because selection must not depend on a clock.

A plug-in is code in this process. These checks catch mistakes and bad behaviour; they do not stop malicious code.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import Distribution, EntryPoint, distributions, entry_points
from typing import Any, TypeVar

from skuda.dispatch.backends.base import Backend
from skuda.dispatch.plugins.asking import KERNELS, error_text, kept_clean
from skuda.dispatch.settings import plugin_enabled
from skuda.dispatch.system.interrupts import held_back
from skuda.registry.backend import BackendSpec
from skuda.registry.op import Op
from skuda.registry.registry import Registry
from skuda.registry.sku import KernelSku
from skuda.registry.text import one_line
from skuda.registry.value import Value

BACKENDS = "skuda.backends"
PATIENCE = 5.0
"""Seconds after which a warning names a plug-in that is still loading."""

Taken = TypeVar("Taken")


class Plugin(Value):
    """An entry point of another package that was loaded or set aside.

    Attributes
    ----------
    group, name : str
        Group and name of the entry point.
    origin : str
        The distribution and its version.
    package : str
        The distribution's name.
    seconds : float
        Loading time. Close to 0 if the module had been imported before.
    reason : str
        Why it was set aside. Empty if it was not.
    """

    group: str
    name: str
    origin: str
    package: str
    seconds: float = 0.0
    reason: str = ""

    @property
    def remedy(self) -> str:
        """How to fix it."""
        return f"pip install --upgrade {self.package}, pip uninstall {self.package}, or SKUDA_PLUGINS=-{self.name}"

    def __str__(self) -> str:
        state = f"is set aside: {self.reason}" if self.reason else f"took {self.seconds:.3f} s to load"
        return f"plug-in {self.name} of {self.origin} ({self.group}) {state}"


def found(group: str) -> tuple[tuple[tuple[EntryPoint, Plugin], ...], tuple[Plugin, ...]]:
    """Return the entry points of a group in order, not loaded yet, and the packages with unreadable metadata."""
    with held_back():
        try:
            points = list(entry_points(group=group))
        except Exception:  # noqa: BLE001  one package with broken metadata makes the call fail for all
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
        except Exception as error:  # noqa: BLE001  metadata can be broken in any way
            reason = f"its entry points cannot be read: {error_text(error)}"
            broken.append(Plugin(group=group, name=package, origin=package, package=package, reason=reason))
        else:
            points.setdefault(package, mine)  # the first on the path is the one that is imported
    return [point for mine in points.values() for point in mine], broken


def _entry(point: EntryPoint) -> Plugin:
    package = _name(point.dist) if point.dist is not None else one_line(point.value)
    version = _attribute(point.dist, "version")
    origin = f"{package} {one_line(version)}" if version else package
    return Plugin(group=point.group, name=one_line(point.name), origin=origin, package=package)


def _name(distribution: Distribution) -> str:
    """Return a distribution's name, or its path if its metadata has no name."""
    return one_line(_attribute(distribution, "name") or str(_attribute(distribution, "_path") or distribution))


def _attribute(distribution: Distribution | None, name: str) -> Any:
    try:
        return getattr(distribution, name, None)
    except Exception:  # noqa: BLE001  metadata can be missing or broken in any way
        return None


def _enabled(group: str) -> tuple[list[tuple[EntryPoint, Plugin]], tuple[Plugin, ...]]:
    """Return the result of `found` without the plug-ins that ``SKUDA_PLUGINS`` leaves out."""
    points, broken = found(group)
    kept = [(point, plugin) for point, plugin in points if plugin_enabled(plugin.name, plugin.package)]
    return kept, tuple(plugin for plugin in broken if plugin_enabled(plugin.package))


def load_backends(registry: Registry) -> tuple[Registry, tuple[tuple[Backend, Plugin], ...], tuple[Plugin, ...]]:
    """Construct the backends of installed packages and register their facts.

    A plug-in that claims the name of a record of `registry` is set aside. Return a new snapshot, each backend with its
    plug-in, and the plug-ins that were set aside.
    """
    points, broken = _enabled(BACKENDS)
    brought, aside = [], list(broken)
    for point, named in points:
        taken, plugin = _taken(named, partial(_with_backend, point, named, registry))
        if taken is None:
            aside.append(plugin)
        else:
            registry, backend = taken
            brought.append((backend, plugin))
    return registry, tuple(brought), tuple(aside)


def load_kernels(registry: Registry) -> tuple[Registry, tuple[Plugin, ...]]:
    """Register the ops and kernels of installed packages. A package is registered as a whole or not at all.

    Return a new snapshot, and all plug-ins. Those that were set aside have a reason.
    """
    points, broken = _enabled(KERNELS)
    plugins = list(broken)
    for point, named in points:
        taken, plugin = _taken(named, partial(_with_kernels, point, named, registry))
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


def _taken(plugin: Plugin, take: Callable[[], Taken]) -> tuple[Taken | None, Plugin]:
    """Return the result of loading a plug-in, or None if it is set aside, and its record."""
    start, reason = time.perf_counter(), ""
    taken = None
    with kept_clean():
        try:
            with _watched(plugin):
                taken = take()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  whatever a plug-in does must not break the rest
            reason = error_text(error)
    seconds = time.perf_counter() - start
    return taken, plugin.model_copy(update={"seconds": seconds, "reason": reason})


@contextmanager
def _watched(plugin: Plugin) -> Iterator[None]:
    """Warn about a plug-in that takes long to load, because loading cannot be interrupted from outside."""

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
        timer.join()  # a thread that still ends would count as one of the program's: see `kept_clean`


def _valid(record: Any) -> Any:
    """Validate a record again, because its maker may have bypassed that. Return it with texts safe to print."""
    if isinstance(record, Op):
        return replace(record, skus=tuple(map(_valid, record.skus)), source=one_line(record.source))
    if isinstance(record, (KernelSku, BackendSpec)):
        kind = KernelSku if isinstance(record, KernelSku) else BackendSpec
        if type(record) is not kind:
            raise TypeError(f"{type(record).__name__} must be a {kind.__name__} itself, not a class derived from it")
        if kind.model_validate(record.model_dump(warnings=False)) != record:
            raise ValueError(f"{record!r} must be built by its constructor, which validates it")
        if isinstance(record, KernelSku):
            return record.model_copy(update={"summary": one_line(record.summary)})
    return record
