"""Builds the stub driver for the PyCUDA at hand: every driver function that it imports exists, most of them refuse."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

HERE = Path(__file__).parent


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
