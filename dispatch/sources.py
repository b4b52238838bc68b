"""A kernel's source with every header of ours that it includes: what is hashed is what is compiled."""

from __future__ import annotations

import hashlib
import importlib.resources
import importlib.util
import re
from functools import cache
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import NamedTuple

from skuda.registry.sku import KernelSku

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


def source_hash(sku: KernelSku) -> str:
    """Return the fingerprint of everything that makes a kernel and its launch.

    Its source with every header of ours that it includes, its entry point, flags and architecture, the module of its
    launch rule, and what it promises: a promise that was made after the run was not verified by it.

    Parameters
    ----------
    sku : KernelSku
        The kernel.

    Raises
    ------
    LookupError
        Where its source or its launch rule does not exist.
    """
    state = hashlib.sha256()
    promised = sku.precision_guarantee.model_dump_json()
    parts = [_content(sku.source), sku.entry_point, *sku.flags, sku.arch.value, promised]
    if sku.launch is not None:
        parts += [sku.launch, _content(sku.launch.partition(":")[0])]
    for part in parts:
        state.update(f"{len(part)}\0{part}".encode())
    return state.hexdigest()


def _content(source: str) -> str:
    """Return the digest of a ``package:file`` source with its headers, or of a Python module."""
    if ":" in source:
        return read_source(source).digest
    # A module of the interpreter itself has no file; its version is in the record.
    path = module_file(source)
    return hashlib.sha256(path.read_bytes() if path.is_file() else source.encode()).hexdigest()


def module_file(module: str) -> Path:
    """Return where a Python module's text is, without importing it.

    Raises
    ------
    LookupError
        Where it does not exist.
    """
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        raise LookupError(f"{module} cannot be found: {error}") from error
    if spec is None:
        raise LookupError(f"{module} cannot be found")
    return Path(spec.origin or "")
