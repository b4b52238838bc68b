"""A kernel's source with every header of ours that it includes: what is hashed is what is compiled."""

from __future__ import annotations

import hashlib
import importlib.resources
import re
from functools import cache
from importlib.resources.abc import Traversable
from typing import NamedTuple

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*["<]([^">]+)[">]', re.MULTILINE)
_SHARED = "skuda.kernels"


class Source(NamedTuple):
    """One translation unit.

    Attributes
    ----------
    name : str
        File name of the source, for messages.
    text : bytes
        Its content.
    headers : tuple of (str, bytes)
        Every header found beside it or in an ``include`` folder of ours, by the name it is included under; sorted.
    foreign : tuple of str
        Headers that only the compiler can find, for example ``cuda_fp16.h``; sorted.
    """

    name: str
    text: bytes
    headers: tuple[tuple[str, bytes], ...]
    foreign: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Fingerprint of source and headers."""
        state = hashlib.sha256()
        for name, content in ((self.name, self.text), *self.headers):
            state.update(f"{name}\0{len(content)}\0".encode() + content)
        return state.hexdigest()


def read_source(source: str) -> Source:
    """Read a ``package:file`` source and what it includes, transitively.

    A header of ours is included by its path from the source's folder or from an ``include`` folder.

    Parameters
    ----------
    source : str
        As `KernelSku.source` names it.

    Raises
    ------
    LookupError
        Where the package or the file does not exist.
    """
    package, _, name = source.partition(":")
    folders = _folders(package)
    text = _read(folders[:1], name)
    if text is None:
        raise LookupError(f"{source} cannot be read: there is no {name} in package {package}")
    headers: dict[str, bytes] = {}
    foreign: set[str] = set()
    waiting = [text]
    for content in waiting:
        for found in _INCLUDE.findall(content):
            header = found.decode()
            if header in headers or header in foreign:
                continue
            inside = _read(folders, header)
            if inside is None:
                foreign.add(header)
            else:
                headers[header] = inside
                waiting.append(inside)
    return Source(name, text, tuple(sorted(headers.items())), tuple(sorted(foreign)))


@cache
def _folders(package: str) -> tuple[Traversable, ...]:
    """Return where headers are looked for: beside the source, in its packages' ``include``, in ours."""
    parts = package.split(".")
    packages = [".".join(parts[:depth]) for depth in range(len(parts), 0, -1)]
    try:
        beside = importlib.resources.files(package)
    except ImportError as error:
        raise LookupError(f"package {package} cannot be imported: {error}") from error
    above = [
        importlib.resources.files(name) / "include" for name in dict.fromkeys((*packages, _SHARED)) if name != "skuda"
    ]
    return (beside, *above)


def _read(folders: tuple[Traversable, ...], name: str) -> bytes | None:
    if name.startswith("/") or ".." in name.split("/"):
        return None
    for folder in folders:
        try:
            return folder.joinpath(name).read_bytes()
        except (OSError, ValueError):
            continue
    return None
