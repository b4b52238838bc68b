"""`Environment`: what measured times depend on besides the kernels."""

from __future__ import annotations

import os
import platform
import re
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from skuda.dispatch.device import Device
from skuda.dispatch.driver import driver
from skuda.registry.errors import DriverError
from skuda.registry.value import Value

_DRIVER = Path("/proc/driver/nvidia/version")
_PROCESSOR = Path("/proc/cpuinfo")


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("be one line of printable characters")
    return text


Line = Annotated[str, Field(max_length=1000), AfterValidator(_printable)]
"""A short text that does nothing to a terminal."""


def _named(device: Device) -> Device:
    _printable(device.name)
    return device


class Environment(Value):
    """Where something was measured.

    Attributes
    ----------
    device : Device
        The device's facts, without its number.
    driver : str
        What runs it: the version of its driver; for a CPU its model and how many of them there are.
    versions : dict
        Versions of what compiled and launched the kernels, by name. They are told, not compared.
    skuda : str
        Version of skuda.
    """

    device: Annotated[Device, AfterValidator(_named)]
    driver: Line = ""
    versions: dict[Line, Line] = Field(default_factory=dict, max_length=100)
    skuda: Line

    def __hash__(self) -> int:
        return hash((self.device, self.driver, self.skuda))

    def mismatch(self, device: Device, driver: str | None) -> str:
        """Say why times measured here mean nothing on a device; nothing where they do.

        Parameters
        ----------
        device : Device
            The device.
        driver : str or None
            What runs it; None where that is not known, as for a device on paper.
        """
        mine = self.device
        if (mine.processor, mine.name, mine.compute_capability) != (
            device.processor,
            device.name,
            device.compute_capability,
        ):
            return f"measured on {mine.describe()}, here {device.describe()}"
        if mine.sm_count != device.sm_count:
            return f"measured with {mine.sm_count} multiprocessors, here {device.sm_count}"
        if driver is not None and _branch(self.driver) != _branch(driver):
            what = "driver" if device.processor == "cuda" else "processor"
            return f"measured with {what} {self.driver or 'unknown'}, here {driver or 'unknown'}"
        return ""


def _branch(driver: str) -> str:
    """Return the major version of a driver; all of what is no version."""
    found = re.match(r"(?:CUDA )?\d+(?=\.)", driver)
    return found[0] if found else driver


def driver_of(device: Device) -> str:
    """Return what runs a device that is here; see `Environment.driver`."""
    return driver_version() if device.processor == "cuda" else _processor()


def driver_version() -> str:
    """Return the kernel driver's version where Linux tells it, else the CUDA version that it speaks."""
    try:
        spoken = f"CUDA {driver().version}"
    except DriverError:
        return ""
    with suppress(OSError):
        match = re.search(r"Module\s+(?:for \S+\s+)?([\d.]+)", _DRIVER.read_text(encoding="utf-8"))
        if match is not None:
            return f"{match[1]} ({spoken})"
    return spoken


def _processor() -> str:
    """Return the model of the CPU where Linux tells it, else its kind; and how many there are."""
    model = platform.machine()
    with suppress(OSError):
        match = re.search(r"^model name\s*:\s*(.+)$", _PROCESSOR.read_text(encoding="utf-8"), re.MULTILINE)
        model = match[1].strip() if match is not None else model
    return f"{model}, {os.cpu_count()} processors"
