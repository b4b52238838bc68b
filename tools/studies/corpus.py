"""The text that every Python brings along: the sources of its standard library, as bytes.

A file is held out by the hash of its name, so that the division depends on nothing else.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_HELD_OUT = 16
"""One file of this many is held out."""
_FOREIGN = {"site-packages", "dist-packages"}


class Corpus(NamedTuple):
    """The bytes of both parts, u8, and facts about them."""

    trained: npt.NDArray[np.uint8]
    held_out: npt.NDArray[np.uint8]
    facts: dict[str, str | int]


@cache
def load() -> Corpus:
    """Read the standard library of this Python; files are in order of their names."""
    root = Path(sysconfig.get_path("stdlib"))
    parts: tuple[list[bytes], list[bytes]] = [], []
    digest = hashlib.sha256()
    found = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py") if path.is_file()}
    for name, path in sorted(found.items()):
        if _FOREIGN.isdisjoint(path.relative_to(root).parts):
            content = path.read_bytes()
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
            parts[is_held_out(name)].append(content)
    trained, held_out = (np.frombuffer(b"".join(part), np.uint8) for part in parts)
    about = {"python": platform.python_version(), "sha256": digest.hexdigest()}
    sizes = {"files": len(parts[0]), "bytes": trained.size}
    sizes |= {"held_out_files": len(parts[1]), "held_out_bytes": held_out.size}
    return Corpus(trained, held_out, {**about, **sizes})


def is_held_out(name: str) -> bool:
    """Return whether a file is held out; `name` is its path below the library, with slashes."""
    return hashlib.sha256(name.encode()).digest()[0] % _HELD_OUT == 0
