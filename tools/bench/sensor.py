"""SM clock and power of a card, read by NVML, the library of NVIDIA's driver."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Iterable
from typing import NamedTuple

_SM_CLOCK = 1
_POWER_NOW = 186
"""Of NVML's field values: the power of this moment, in mW. The older query returns the average of a second."""


class Reading(NamedTuple):
    """SM clock in MHz, and power in W."""

    mhz: float
    watts: float


class _FieldValue(ctypes.Structure):
    """NVML's ``nvmlFieldValue_t``; the value is the one of an unsigned int."""

    _fields_ = (
        ("field", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency", ctypes.c_longlong),
        ("kind", ctypes.c_int),
        ("status", ctypes.c_int),
        ("value", ctypes.c_uint),
        ("padding", ctypes.c_uint),
    )


class Sensor:
    """One card, by its UUID (``GPU-...``); an OSError if the library or the card is not there or may not be read."""

    def __init__(self, uuid: str, library: str = "libnvidia-ml.so.1") -> None:
        self._nvml, self._card = ctypes.CDLL(library), ctypes.c_void_p()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._card))
        self.read()

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._nvml, name)(*arguments)
        if status:
            raise OSError(f"{name} of NVML returned {status}")

    def read(self) -> Reading:
        """Return what the card does at this moment."""
        clock, power, field = ctypes.c_uint(), ctypes.c_uint(), _FieldValue(field=_POWER_NOW)
        self._call("nvmlDeviceGetClockInfo", self._card, _SM_CLOCK, ctypes.byref(clock))
        self._call("nvmlDeviceGetPowerUsage", self._card, ctypes.byref(power))
        self._nvml.nvmlDeviceGetFieldValues(self._card, 1, ctypes.byref(field))
        return Reading(clock.value, (power.value if field.status or not field.value else field.value) / 1e3)


def median(readings: Iterable[Reading]) -> Reading | None:
    """Return the medians of some readings; None if there are none."""
    found = list(readings)
    return Reading(*(statistics.median(values) for values in zip(*found, strict=True))) if found else None
