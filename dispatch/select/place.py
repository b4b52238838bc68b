"""The device that holds arrays of any library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skuda.dispatch.cuda.driver import driver
from skuda.dispatch.host.arrays import place_of
from skuda.registry.errors import DriverError, InvalidProblem


def common_place(op: str, arrays: Mapping[str, object]) -> tuple[str, int]:
    """Return the processor and the ordinal of the one device that holds all arrays; ("cpu", 0) if there are none.

    Raises
    ------
    InvalidProblem
        If they are on different devices.
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
