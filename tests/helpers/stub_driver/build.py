"""Builds the stub driver for the PyCUDA at hand: every driver function that it imports exists, most of them refuse."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

from paths import HELPERS

HERE = Path(__file__).parent
BEGIN = f"""
import json, sys
sys.path.insert(0, {str(HELPERS)!r})
from fakes import FakeArray
from skuda.dispatch import Dispatcher, PlanPreference
from skuda.registry import *

report = {{}}
X, Y = 0x1000000000010000, 0x1000000000020000    # what the stub takes for addresses on device 0
"""


class Told(NamedTuple):
    """What a process over the stub left in `report`, the driver calls as (thread, name, detail), and its errors."""

    values: dict[str, Any]
    calls: list[tuple[int, str, str]]
    error: str


def run_over_stub(code: str, stub: Path, folder: Path, **environment: str) -> Told:
    """Run code in a process over the stub, without compilers; demand exit status 0."""
    log = folder / "log"
    log.unlink(missing_ok=True)
    fixed = {
        "LD_LIBRARY_PATH": str(stub.parent),
        "SKUDA_STUB_LOG": str(log),
        "SKUDA_PLUGINS": "0",
        "PATH": "/nonexistent",
        "PYTHONWARNINGS": "error",
    }
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SKUDA_", "CUDA_", "PYTHONWARN"))}
    script = BEGIN + textwrap.dedent(code) + "\nprint(json.dumps(report))\n"
    command, settings = [sys.executable, "-c", script], clean | fixed | environment
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    calls = [tuple(line.split(" ", 2)) for line in log.read_text().splitlines()] if log.exists() else []
    found = [(int(thread), name, detail.strip()) for thread, name, detail in calls]
    return Told(json.loads(done.stdout.splitlines()[-1]), found, done.stderr)


def wanted() -> set[str]:
    """Return the driver functions that PyCUDA's extension module imports."""
    found = importlib.util.find_spec("pycuda")
    if found is None or found.submodule_search_locations is None:
        return set()
    (library,) = Path(found.submodule_search_locations[0]).glob("_driver*.so")
    listing = subprocess.run(["nm", "-D", "--undefined-only", library], check=True, capture_output=True, text=True)
    return set(re.findall(r"\b(cu[A-Z]\w*)", listing.stdout))


def build(folder: Path) -> Path:
    """Compile ``libcuda.so.1`` into `folder` and return its path."""
    source = (HERE / "driver.c").read_text()
    defined = set(re.findall(r"^R (cu\w+)\(", source, re.MULTILINE))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "undefined.inc").write_text("".join(f"UNSUPPORTED({name})\n" for name in sorted(wanted() - defined)))
    target = folder / "libcuda.so.1"
    command = ["cc", "-O1", "-g", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-format-zero-length"]
    command += [f"-I{folder}", "-o", str(target), str(HERE / "driver.c")]
    subprocess.run([*command, "-Wl,-soname,libcuda.so.1", "-ldl", "-lpthread"], check=True)
    return target
