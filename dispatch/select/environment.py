"""`Environment`: the conditions that measured times depend on besides the kernels; versions of installed software."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from skuda.dispatch.compile.compilers import find_nvcc, nvrtc_version, version_of
from skuda.dispatch.cuda.driver import driver
from skuda.dispatch.settings import bundle_names
from skuda.registry.device import Device
from skuda.registry.errors import DriverError
from skuda.registry.value import Value

_DRIVER = Path("/proc/driver/nvidia/version")
_PROCESSOR = Path("/proc/cpuinfo")
_PACKAGES = ("numpy", "ml_dtypes", "torch", "cupy", "pycuda", "cuda-bindings")


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("be one line of printable characters")
    return text


Line = Annotated[str, Field(max_length=1000), AfterValidator(_printable)]
"""One line of printable characters, which is safe to print on a terminal."""


def _named(device: Device) -> Device:
    _printable(device.name)
    return device


class Environment(Value):
    """The conditions of a measurement."""

    device: Annotated[Device, AfterValidator(_named)]  # properties of the device, without its ordinal
    driver: Line = ""  # version of a GPU's driver; for a CPU its model and the number of processors
    versions: dict[Line, Line] = Field(default_factory=dict, max_length=100)
    """Versions, by name, of what compiled and launched the kernels. They are shown, not compared."""
    skuda: Line  # version of skuda

    def __hash__(self) -> int:
        return hash((self.device, self.driver, self.skuda))

    def mismatch(self, device: Device, driver: str | None) -> str:
        """Return why times measured here do not apply to a device; an empty string if they apply.

        `driver` is its `Environment.driver`; None if unknown, for example for a device that is not here.
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
    """Return the major version of a driver, or the whole text if it is not a version."""
    found = re.match(r"(?:CUDA )?\d+(?=\.)", driver)
    return found[0] if found else driver


def driver_of(device: Device) -> str:
    """Return the driver, or the CPU, of a device of this machine; see `Environment.driver`."""
    return driver_version() if device.processor == "cuda" else _processor()


def driver_version() -> str:
    """Return the kernel driver's version if Linux reports it, and the CUDA version; empty if there is no driver."""
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
    """Return the CPU model if Linux reports it, else the machine type, and the number of processors."""
    model = platform.machine()
    with suppress(OSError):
        match = re.search(r"^model name\s*:\s*(.+)$", _PROCESSOR.read_text(encoding="utf-8"), re.MULTILINE)
        model = match[1].strip() if match is not None else model
    return f"{model}, {os.cpu_count()} processors"


def versions(more: Iterable[str] = ()) -> dict[str, str]:
    """Return the versions of what compiles, launches and checks kernels, as far as it is installed.

    `more` are further distributions to look for.
    """
    found = {"python": platform.python_version()}
    found |= {name: version for name in (*_PACKAGES, *more) if (version := version_of(name))}
    nvcc = find_nvcc()
    if nvcc is not None:
        found["nvcc"] = nvcc.version
    if nvrtc_version():
        found["nvrtc"] = nvrtc_version()
    # Cubins from a bundle were not compiled by these compilers.
    return found | ({"bundle": os.pathsep.join(bundle_names())} if bundle_names() else {})


def skuda_version() -> str:
    """Return the version of skuda; ``unknown`` if it is not installed."""
    return version_of("skuda") or "unknown"
