"""Checks the arguments of a `Dispatcher`, and fills in their defaults."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from skuda.dispatch.backends.base import Backend
from skuda.dispatch.preference import NO_PREFERENCE, PlanPreference
from skuda.registry.descriptor import Descriptor
from skuda.registry.device import KNOWN_DEVICES, Device, device_named
from skuda.registry.errors import InvalidProblem, InvalidRecord
from skuda.registry.text import shown

if TYPE_CHECKING:
    from skuda.dispatch.machine import Machine
    from skuda.dispatch.select.measured import Tuned
    from skuda.dispatch.select.tuning import Tuning
    from skuda.registry.sku import KernelSku


def checked(
    machine: Machine, problem: object, preference: PlanPreference | None, device: Device | str | None
) -> tuple[Descriptor, PlanPreference, Device]:
    """Return the arguments of a selection with their defaults.

    Raise `InvalidProblem` for an argument of the wrong type, or an unknown device.
    """
    if isinstance(problem, type) and issubclass(problem, Descriptor):
        refuse("problem", problem, f"be one of its problems: {problem.__name__}(...)")
    if not isinstance(problem, Descriptor) or "op" not in type(problem).__pydantic_fields__:
        refuse("problem", problem, "be a descriptor, such as Dispatcher.describe(op, ...)")
    check("preference", preference, PlanPreference, "be a PlanPreference, such as PlanPreference(backend=...)")
    if isinstance(device, str):
        device = _named(machine, device)
    check("device", device, Device, "be a Device, the name of one, or None")
    return problem, preference or NO_PREFERENCE, device or machine.devices[0]


def _named(machine: Machine, name: str) -> Device:
    here: dict[str, Device] = {}
    for device in machine.devices:
        here.setdefault(device.processor, device)
        here[f"{device.processor}:{device.ordinal}"] = device
    found = here.get(name.strip().lower())
    if found is None:
        try:
            found = device_named(name)
        except InvalidRecord:
            cards = ", ".join(card for card in KNOWN_DEVICES if card not in here)
            refuse("device", name, f"be one of {', '.join(here)}, which are here, or of {cards}")
    return found


def tuned_by(
    tuning: Tuning | str | os.PathLike[str] | None, choices: Callable[[KernelSku, Descriptor, Device], tuple[str, ...]]
) -> Tuned | None:
    """Return the measured times that are given, or those of a file. Return None for None and for an empty string."""
    if tuning is None or (isinstance(tuning, str) and not tuning):
        return None
    # Imported here, because few programs have measured times.
    from skuda.dispatch.select.environment import driver_of
    from skuda.dispatch.select.measured import Tuned
    from skuda.dispatch.select.tuning import Tuning

    def driver(device: Device) -> str | None:
        return driver_of(device) if device.ordinal is not None else None

    check("tuning", tuning, (Tuning, str, os.PathLike), "be a Tuning, the path of a file of one, or None")
    if isinstance(tuning, Tuning):
        return Tuned(tuning, "a tuning of this program", driver, choices)
    return Tuned(Tuning.load(Path(tuning)), os.fspath(tuning), driver, choices)


def backends_of(given: Iterable[object]) -> tuple[Backend, ...]:
    """Return backends, or raise `InvalidProblem` for anything else."""
    try:
        found = tuple(given)
    except TypeError:
        refuse("backends", given, "be several Backends, or None for the installed ones")
    for backend in found:
        if not isinstance(backend, Backend):
            refuse("backends", backend, "hold Backends, such as NumpyBackend()")
    return tuple(backend for backend in found if isinstance(backend, Backend))


def check(argument: str, given: object, kind: Any, must: str) -> None:
    """Raise `InvalidProblem` for an argument that is neither None nor of a kind."""
    if given is not None and not isinstance(given, kind):
        refuse(argument, given, must)


def refuse(argument: str, given: object, must: str) -> NoReturn:
    """Raise `InvalidProblem` for an argument of a `Dispatcher`."""
    raise InvalidProblem("Dispatcher", argument, shown(given), must)
