"""``skuda doctor``: what works on this machine, what is missing, and the command that fixes it.

The doctor must run even if packages are absent. Optional packages are therefore imported inside a check, and a check
that fails is itself a finding.
"""

from __future__ import annotations

import contextlib
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
from pathlib import Path
from typing import TYPE_CHECKING

from skuda.tools.show import findings
from skuda.tools.show.findings import Finding
from skuda.tools.show.packages import meets, optional_packages, required_packages, requirements

if TYPE_CHECKING:
    from rich.console import Console

    from skuda.dispatch import Dispatcher

_COLOURS = {"ok": "green", "missing": "yellow", "broken": "bold red"}
_SLOW = 1.0
"""Seconds that a plug-in may add to every start before it is reported as slow."""
_CUDA_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


def run(*, as_json: bool = False) -> int:
    """Run ``skuda doctor``; return 0 if everything required works, else 1."""
    from skuda.tools.output import print_json, records, stdout

    found = examine()
    works = all(finding.state == "ok" for finding in found if finding.required)
    console = stdout()
    if as_json:
        print_json({"works": works, "findings": [asdict(finding) for finding in found]})
    elif not console.is_terminal:
        records((f.state, f.section, f.name, f.detail, f.fix) for f in found)
    else:
        _print(console, found, works=works)
    return 0 if works else 1


def examine() -> list[Finding]:
    """Return every finding, by section."""
    # One registry serves all checks, so that a plug-in is imported, and its import timed, only once.
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
        except Exception as error:  # noqa: BLE001  a check that fails is a finding
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
        own = findings.NOT_INSTALLED.filled()
    version = platform.python_version()
    if meets(version, needed):
        yield Finding(section, "ok", "python", f"{version} at {sys.executable}", required=True)
    else:
        yield findings.PYTHON_OLD.filled(version=version, needed=needed)
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
            yield findings.SETTING_WRONG.filled(variable=setting.name, value=setting.given, rule=rule)
        elif setting.given:
            yield Finding("Environment", "ok", setting.name, setting.given)


def _driver() -> Iterator[Finding]:
    section = "NVIDIA driver"
    try:
        library = ctypes.CDLL(_CUDA_LIBRARY)
    except OSError:
        yield findings.DRIVER_ABSENT.filled(library=_CUDA_LIBRARY)
        return
    version = ctypes.c_int()
    # This is the only driver call that needs no initialization, so it creates no context on the card.
    status = library.cuDriverGetVersion(ctypes.byref(version))
    if status != 0 or version.value == 0:
        yield findings.DRIVER_BROKEN.filled(library=_CUDA_LIBRARY, status=status)
        return
    major, minor = version.value // 1000, version.value % 1000 // 10
    yield Finding(section, "ok", "driver", f"supports CUDA {major}.{minor}")


def _compilers() -> Iterator[Finding]:
    yield _nvcc()
    yield _nvrtc()


def _nvcc() -> Finding:
    path = shutil.which("nvcc")
    if path is None:
        return findings.NVCC_ABSENT
    try:
        output = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return findings.NVCC_BROKEN.filled(path=path, error=error)
    version = re.search(r"release ([\d.]+)", output)
    return Finding("Compilers", "ok", "nvcc", f"{version[1] if version else 'unknown version'} at {path}")


def _nvrtc() -> Finding:
    name = "nvidia-cuda-nvrtc"
    wanted = next((f"{one.name}{one.specifier}" for one, _ in requirements() if one.name == name), name)
    try:
        wheel = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        system = ctypes.util.find_library("nvrtc")
        if system is not None:
            return Finding("Compilers", "ok", "nvrtc", f"{system} of the system")
        return findings.NVRTC_ABSENT.filled(requirement=wanted)
    libraries = [file for file in wheel.files or () if re.match(r"(lib)?nvrtc(64_\w+\.dll|\.so)", file.name)]
    if not any(wheel.locate_file(file).is_file() for file in libraries):  # type: ignore[attr-defined]  # a Path here
        return findings.NVRTC_BROKEN.filled(requirement=wanted, package=name, version=wheel.version)
    return Finding("Compilers", "ok", "nvrtc", f"{wheel.version} from {name}")


def _dispatcher() -> Dispatcher:
    from skuda.dispatch import Dispatcher

    # The file of measured times has its own check.
    return Dispatcher(tuning="")


def _backends(dispatcher: Dispatcher) -> Iterator[Finding]:
    section = "Kernels and backends"
    registry = dispatcher.registry
    yield Finding(section, "ok", "registry", f"{len(registry)} kernels of {len(registry.ops)} ops", required=True)
    for name, status in dispatcher.status.items():
        required = registry.backends[name].reference
        absent = findings.BACKEND_BROKEN if required else findings.BACKEND_ABSENT
        if status.available:
            yield Finding(section, "ok", name, status.detail, status.remedy, required)
        else:
            yield absent.filled(backend=name, trouble=status.detail, remedy=status.remedy)
    for device in dispatcher.devices:
        ordinal = f"{device.processor}:{device.ordinal}"
        facts = [device.describe()]
        if device.sm_count:
            facts += [f"{device.sm_count} SMs", f"{device.memory / 2**30:.0f} GiB"]
        yield Finding(section, "ok", ordinal, ", ".join(facts))


def _plugins(get: Callable[[], Dispatcher]) -> Iterator[Finding]:
    from skuda.dispatch.plugins.asking import KERNELS
    from skuda.dispatch.plugins.loading import BACKENDS, found

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
            yield findings.PLUGIN_OFF.filled(plugin=each.name, what=what)
        elif plugin.reason:
            yield findings.PLUGIN_BROKEN.filled(
                plugin=each.name, what=what, reason=plugin.reason, package=plugin.package
            )
        elif plugin.seconds > _SLOW:
            yield findings.PLUGIN_SLOW.filled(plugin=each.name, what=what, seconds=f"{plugin.seconds:.3f}")
        else:
            yield Finding(section, "ok", each.name, f"{what}, {plugin.seconds:.3f} s to load")


def _cache() -> Iterator[Finding]:
    from skuda.dispatch.settings import cache_directory
    from skuda.tools.output import count
    from skuda.tools.ship.cache import size_words

    section, path = "Cache", cache_directory()
    # The folder is created with the first compiled kernel; until then its nearest existing parent decides.
    there = next((folder for folder in (path, *path.absolute().parents) if folder.exists()), Path(path.anchor))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        yield findings.CACHE_CLOSED.filled(path=path)
    elif there != path:
        yield Finding(section, "ok", "directory", f"{path}, made when needed")
    else:
        sizes = list(_sizes(path))
        yield Finding(section, "ok", "directory", f"{path}, {count(len(sizes), 'file')}, {size_words(sum(sizes))}")


def _sizes(folder: Path) -> Iterator[int]:
    """Yield the sizes of the files below a folder; others may remove them meanwhile."""
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                yield Path(parent, name).lstat().st_size


def _bundles(get: Callable[[], Dispatcher]) -> Iterator[Finding]:
    from skuda.dispatch.settings import bundle_names

    for name in bundle_names():
        yield _bundle(name, get)


def _bundle(name: str, get: Callable[[], Dispatcher]) -> Finding:
    from skuda.dispatch.compile.bundle import open_bundle
    from skuda.registry.errors import BundleError
    from skuda.tools.output import count, words
    from skuda.tools.ship.bundle import foreign_members

    try:
        bundle = open_bundle(name)
    except BundleError as error:
        return findings.BUNDLE_BROKEN.filled(path=error.path, trouble=error.reason)
    members, troubles = bundle.manifest.members, bundle.troubles()
    if troubles:
        trouble = f"{len(troubles)} of {count(len(members), 'cubin')} cannot be used: {troubles[0]}"
        return findings.BUNDLE_BROKEN.filled(path=bundle.path, trouble=trouble)
    served = words(sorted({f"{member.arch} under {member.backend}" for member in members}))
    made = f"{bundle.path}, made by skuda {bundle.manifest.skuda}"
    contents = f"{made}: {count(len(members), 'cubin')} for {served}, all whole"
    foreign = len(foreign_members(bundle, get().registry))
    if not foreign:
        return Finding("Bundles", "ok", "bundle", contents)
    found = findings.BUNDLE_FOREIGN.filled(contents=contents, foreign=foreign)
    # The other kernels still work.
    return found if foreign == len(members) else replace(found, state="ok")


def _tuning() -> Iterator[Finding]:
    from skuda.dispatch.select.tuning import Tuning
    from skuda.dispatch.settings import tuning_file
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


def _print(console: Console, found: list[Finding], *, works: bool) -> None:
    from rich.text import Text

    from skuda.tools.output import count, heading, indented, plain_table

    width = max(len(finding.name) for finding in found)
    for section, lines in groupby(found, key=lambda finding: finding.section):
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
        number = sum(finding.state == state and not finding.required for finding in found)
        if number:
            console.print(f"{count(number, 'optional part')} {state}.", style=_COLOURS[state])
    bad = [finding.name for finding in found if finding.required and finding.state != "ok"]
    if works:
        console.print("Everything required works.", style="bold green")
    else:
        console.print(f"Required, and not working: {', '.join(bad)}.", style="bold red")
