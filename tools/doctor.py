"""``skuda doctor``: what works on this machine, what is missing, and the command that fixes it.

Nothing here may fail because something is absent, so everything that could be is imported inside a check, and a check
that fails is itself a finding.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import cache
from importlib import metadata
from itertools import groupby
from typing import TYPE_CHECKING

from skuda.tools import findings as known
from skuda.tools.findings import Finding
from skuda.tools.packages import meets, optional_packages, required_packages, requirements

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from skuda.dispatch import Dispatcher

_COLOURS = {"ok": "green", "missing": "yellow", "broken": "bold red"}
_SLOW = 1.0
"""Seconds of every start that a plug-in may take before it is called slow."""
_CUDA_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


def run(*, as_json: bool = False) -> int:
    """Check everything and print it.

    Parameters
    ----------
    as_json : bool
        JSON instead of text.

    Returns
    -------
    int
        Exit status: 0 where everything required works, else 1.
    """
    from skuda.tools.output import print_json, records, stdout

    findings = examine()
    works = all(finding.state == "ok" for finding in findings if finding.required)
    console = stdout()
    if as_json:
        print_json({"works": works, "findings": [asdict(finding) for finding in findings]})
    elif not console.is_terminal:
        records((f.state, f.section, f.name, f.detail, f.fix) for f in findings)
    else:
        _print(console, findings, works=works)
    return 0 if works else 1


def examine() -> list[Finding]:
    """Return every finding, by section."""
    # One for all: a plug-in's module is imported, and the time that takes measured, once.
    dispatcher = cache(_dispatcher)
    checks: tuple[tuple[str, bool, Callable[[], Iterator[Finding]]], ...] = (
        ("Python", True, _python),
        ("Required packages", True, required_packages),
        ("Optional packages", False, optional_packages),
        ("NVIDIA driver", False, _driver),
        ("Compilers", False, _compilers),
        ("Environment", True, _environment),
        ("Kernels and backends", True, lambda: _backends(dispatcher())),
        ("Plug-ins", False, lambda: _plugins(dispatcher)),
        ("Cache", False, _cache),
        ("Bundles", False, lambda: _bundles(dispatcher)),
        ("Tuning", False, _tuning),
    )
    found: list[Finding] = []
    for section, required, check in checks:
        try:
            found.extend(check())
        except Exception as error:  # noqa: BLE001  a doctor that dies of a finding tells nothing
            detail = f"{type(error).__name__}: {error}"
            fix = "install the packages named above, or reinstall skuda" if required else ""
            found.append(Finding(section, "broken", section.lower(), detail, fix, required))
    return found


def _python() -> Iterator[Finding]:
    section = "Python"
    needed = ">=3.11"
    try:
        needed = str(metadata.metadata("skuda")["Requires-Python"])
        own = Finding(section, "ok", "skuda", metadata.version("skuda"), required=True)
    except metadata.PackageNotFoundError:
        own = known.NOT_INSTALLED.found()
    version = platform.python_version()
    if meets(version, needed):
        yield Finding(section, "ok", "python", f"{version} at {sys.executable}", required=True)
    else:
        yield known.PYTHON_OLD.found(version=version, needed=needed)
    yield own
    yield Finding(section, "ok", "platform", f"{platform.system()} {platform.release()}, {platform.machine()}")


def _environment() -> Iterator[Finding]:
    from skuda.dispatch.settings import SETTINGS, logged_topics, nvtx_enabled
    from skuda.registry.errors import InvalidRecord

    wrong = {}
    for read in (logged_topics, nvtx_enabled):
        try:
            read()
        except InvalidRecord as error:
            wrong[error.field] = error.must
    for setting in SETTINGS:
        if setting.name in wrong:
            rule = wrong[setting.name]
            yield known.SETTING_WRONG.found(variable=setting.name, value=setting.given, rule=rule)
        elif setting.given:
            yield Finding("Environment", "ok", setting.name, setting.given)


def _driver() -> Iterator[Finding]:
    section = "NVIDIA driver"
    try:
        library = ctypes.CDLL(_CUDA_LIBRARY)
    except OSError:
        yield known.DRIVER_ABSENT.found(library=_CUDA_LIBRARY)
        return
    version = ctypes.c_int()
    # The one call of the driver that needs no initialization, so no context and no trace of this process on the card.
    status = library.cuDriverGetVersion(ctypes.byref(version))
    if status != 0 or version.value == 0:
        yield known.DRIVER_BROKEN.found(library=_CUDA_LIBRARY, status=status)
        return
    major, minor = version.value // 1000, version.value % 1000 // 10
    yield Finding(section, "ok", "driver", f"supports CUDA {major}.{minor}")


def _compilers() -> Iterator[Finding]:
    yield _nvcc()
    yield _nvrtc()


def _nvcc() -> Finding:
    section = "Compilers"
    path = shutil.which("nvcc")
    if path is None:
        return known.NVCC_ABSENT.found()
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return known.NVCC_BROKEN.found(path=path, error=error)
    version = re.search(r"release ([\d.]+)", said)
    return Finding(section, "ok", "nvcc", f"{version[1] if version else 'unknown version'} at {path}")


def _nvrtc() -> Finding:
    section, name = "Compilers", "nvidia-cuda-nvrtc"
    wanted = next((wanted for package, wanted, _ in requirements() if package == name), "")
    try:
        brought = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        system = ctypes.util.find_library("nvrtc")
        if system is not None:
            return Finding(section, "ok", "nvrtc", f"{system} of the system")
        return known.NVRTC_ABSENT.found(requirement=f"{name}{wanted}")
    libraries = [file for file in brought.files or () if re.match(r"(lib)?nvrtc(64_\w+\.dll|\.so)", file.name)]
    if not any(brought.locate_file(file).is_file() for file in libraries):  # type: ignore[attr-defined]  # a Path here
        return known.NVRTC_BROKEN.found(requirement=f"{name}{wanted}", package=name, version=brought.version)
    return Finding(section, "ok", "nvrtc", f"{brought.version} from {name}")


def _dispatcher() -> Dispatcher:
    from skuda.dispatch import Dispatcher

    # A file of measured times is a finding of its own.
    return Dispatcher(tuning="")


def _backends(dispatcher: Dispatcher) -> Iterator[Finding]:
    section = "Kernels and backends"
    registry = dispatcher.registry
    yield Finding(section, "ok", "registry", f"{len(registry)} kernels of {len(registry.ops)} ops", required=True)
    for name, status in dispatcher.status.items():
        required = registry.backends[name].reference
        absent = known.BACKEND_BROKEN if required else known.BACKEND_ABSENT
        if status.available:
            yield Finding(section, "ok", name, status.detail, status.remedy, required)
        else:
            yield absent.found(backend=name, trouble=status.detail, remedy=status.remedy)
    for device in dispatcher.devices:
        ordinal = f"{device.processor}:{device.ordinal}"
        facts = [device.describe()]
        if device.sm_count:
            facts += [f"{device.sm_count} SMs", f"{device.memory / 2**30:.0f} GiB"]
        yield Finding(section, "ok", ordinal, ", ".join(facts))


def _plugins(get: Callable[[], Dispatcher]) -> Iterator[Finding]:
    from skuda.dispatch.plugins import BACKENDS, KERNELS, found

    section = "Plug-ins"
    groups = [found(group) for group in (KERNELS, BACKENDS)]
    named = [plugin for points, broken in groups for plugin in (*(plugin for _, plugin in points), *broken)]
    if not named:
        yield Finding(section, "ok", "plug-ins", "none installed")
        return
    dispatcher = get()
    _ = dispatcher.devices  # a backend may show what it is only when it is asked
    taken = {(plugin.group, plugin.name, plugin.origin): plugin for plugin in dispatcher.plugins}
    for each in named:
        plugin = taken.get((each.group, each.name, each.origin))
        what = f"{each.group} of {each.origin}"
        if plugin is None:
            yield known.PLUGIN_OFF.found(plugin=each.name, what=what)
        elif plugin.reason:
            yield known.PLUGIN_BROKEN.found(plugin=each.name, what=what, reason=plugin.reason, package=plugin.package)
        elif plugin.seconds > _SLOW:
            yield known.PLUGIN_SLOW.found(plugin=each.name, what=what, seconds=f"{plugin.seconds:.3f}")
        else:
            yield Finding(section, "ok", each.name, f"{what}, {plugin.seconds:.3f} s to load")


def _cache() -> Iterator[Finding]:
    from pathlib import Path

    from skuda.dispatch.settings import cache_directory

    section = "Cache"
    path = cache_directory()
    # The folder is made when the first kernel is compiled; until then its nearest parent decides.
    there = next((folder for folder in (path, *path.absolute().parents) if folder.exists()), Path(path.anchor))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        yield known.CACHE_CLOSED.found(path=path)
    elif there != path:
        yield Finding(section, "ok", "directory", f"{path}, made when needed")
    else:
        yield Finding(section, "ok", "directory", f"{path}, {_size(path)}")


def _bundles(get: Callable[[], Dispatcher]) -> Iterator[Finding]:
    from skuda.dispatch.settings import bundle_names

    for name in bundle_names():
        yield _bundle(name, get)


def _bundle(name: str, get: Callable[[], Dispatcher]) -> Finding:
    from skuda.dispatch.bundle import open_bundle
    from skuda.registry.errors import BundleError
    from skuda.tools.bundling import foreign_members
    from skuda.tools.output import count, words

    try:
        bundle = open_bundle(name)
    except BundleError as error:
        return known.BUNDLE_BROKEN.found(path=error.path, trouble=error.reason)
    members, troubles = bundle.manifest.members, bundle.troubles()
    if troubles:
        told = f"{len(troubles)} of {count(len(members), 'cubin')} cannot be used: {troubles[0]}"
        return known.BUNDLE_BROKEN.found(path=bundle.path, trouble=told)
    served = words(sorted({f"{member.arch} under {member.backend}" for member in members}))
    made = f"{bundle.path}, made by skuda {bundle.manifest.skuda}"
    contents = f"{made}: {count(len(members), 'cubin')} for {served}, all whole"
    foreign = len(foreign_members(bundle, get().registry))
    if not foreign:
        return Finding("Bundles", "ok", "bundle", contents)
    found = known.BUNDLE_FOREIGN.found(contents=contents, foreign=foreign)
    # What is left still serves.
    return found if foreign == len(members) else replace(found, state="ok")


def _tuning() -> Iterator[Finding]:
    from skuda.dispatch.settings import tuning_file
    from skuda.dispatch.tuning import Tuning
    from skuda.registry.errors import InvalidRecord

    section, path = "Tuning", tuning_file()
    if path is None:
        yield Finding(section, "ok", "measured times", "none: SKUDA_TUNING names no file")
        return
    try:
        tuning = Tuning.load(path)
    except InvalidRecord as error:
        yield Finding(section, "broken", "measured times", str(error), "unset SKUDA_TUNING, or write it: skuda tune")
        return
    where, number = tuning.environment.device.describe(), len(tuning.entries)
    yield Finding(section, "ok", "measured times", f"{path}, {number} problems, measured on {where}")


def _size(folder: Path) -> str:
    sizes = [file.stat().st_size for file in folder.rglob("*") if file.is_file()]
    size, unit = float(sum(sizes)), "bytes"
    for larger in ("KiB", "MiB", "GiB"):
        if size >= 1024:
            size, unit = size / 1024, larger
    return f"{len(sizes)} files, {size:.3g} {unit}"


def _print(console: Console, findings: list[Finding], *, works: bool) -> None:
    from rich.text import Text

    from skuda.tools.output import count, heading, indented, plain_table

    width = max(len(finding.name) for finding in findings)
    for section, lines in groupby(findings, key=lambda finding: finding.section):
        console.print(heading(section))
        for finding in lines:
            table = plain_table(indent=2)
            table.add_column(width=7)
            table.add_column(width=min(width, 22))
            table.add_column(overflow="fold")
            table.add_row("", Text(finding.state, style=_COLOURS[finding.state]), finding.name, finding.detail)
            console.print(table)
            if finding.fix:
                console.print(indented(Text(f"fix: {finding.fix}", style="yellow"), 10))
    console.print()
    for state in ("missing", "broken"):
        number = sum(finding.state == state and not finding.required for finding in findings)
        if number:
            console.print(f"{count(number, 'optional part')} {state}.", style=_COLOURS[state])
    bad = [finding.name for finding in findings if finding.required and finding.state != "ok"]
    if works:
        console.print("Everything required works.", style="bold green")
    else:
        console.print(f"Required, and not working: {', '.join(bad)}.", style="bold red")
