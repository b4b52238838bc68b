"""Kernels and backends of other packages, found through entry points.

Group ``skuda.kernels``: an iterable of `Op`, `KernelSku` or `BackendSpec`, or a callable that returns one. Group
``skuda.backends``: a `Backend` subclass. A plug-in that fails is set aside with its reason; the others go on.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points

from skuda.dispatch.backends.base import Backend
from skuda.registry.registry import Registry
from skuda.registry.value import Value

KERNELS, BACKENDS = "skuda.kernels", "skuda.backends"


class Quarantined(Value):
    """A plug-in that was set aside.

    Attributes
    ----------
    group, name : str
        Its entry point.
    origin : str
        The distribution that brings it, with version.
    reason : str
        What went wrong.
    """

    group: str
    name: str
    origin: str
    reason: str

    def __str__(self) -> str:
        return f"plug-in {self.name} of {self.origin} ({self.group}) is set aside: {self.reason}"


def _origin(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value


def _set_aside(point: EntryPoint, error: BaseException) -> Quarantined:
    reason = f"{type(error).__name__}: {error}"
    return Quarantined(group=point.group, name=point.name, origin=_origin(point), reason=reason)


def load_kernels(registry: Registry) -> tuple[Registry, tuple[Quarantined, ...]]:
    """Register what installed packages bring; a package is taken whole or not at all.

    Returns
    -------
    registry : Registry
        A new snapshot.
    quarantined : tuple of Quarantined
        The packages set aside.
    """
    aside = []
    for point in sorted(entry_points(group=KERNELS)):
        try:
            brought = point.load()
            records = tuple(brought() if callable(brought) else brought)
            registry = registry.register(*records, origin=_origin(point))
        except (Exception, SystemExit) as error:  # noqa: BLE001  whatever a plug-in does must not break the rest
            aside.append(_set_aside(point, error))
    return registry, tuple(aside)


def load_backends(taken: Iterable[str]) -> tuple[tuple[Backend, ...], tuple[Quarantined, ...]]:
    """Construct the backends that installed packages bring.

    Parameters
    ----------
    taken : iterable of str
        Names already in use; a plug-in that claims one is set aside.
    """
    names = set(taken)
    found, aside = [], []
    for point in sorted(entry_points(group=BACKENDS)):
        try:
            backend = point.load()()
            if not isinstance(backend, Backend):
                raise TypeError(f"{point.value} must construct a skuda.dispatch.backends.base.Backend")  # noqa: TRY301
            if backend.spec.name in names:
                raise ValueError(f"a backend named {backend.spec.name!r} exists already")  # noqa: TRY301
        except (Exception, SystemExit) as error:  # noqa: BLE001  whatever a plug-in does must not break the rest
            aside.append(_set_aside(point, error))
        else:
            names.add(backend.spec.name)
            found.append(backend)
    return tuple(found), tuple(aside)
