"""A kernel's source with all headers of skuda and its plug-ins; exactly the hashed bytes are compiled."""

from __future__ import annotations

import hashlib
import importlib.resources
import re
from functools import cache, lru_cache
from importlib.resources.abc import Traversable
from typing import NamedTuple

from skuda.kernels.code import c_tokens, code_hash
from skuda.registry.sku import KernelSku

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*["<]([^">]+)[">]', re.MULTILINE)
_SHARED = "skuda.kernels"


class Source(NamedTuple):
    """One translation unit."""

    name: str  # file name of the source, for messages
    text: bytes  # its content
    headers: tuple[tuple[str, bytes], ...]
    """Headers beside the source or in an ``include`` folder, by the name in the include directive; sorted."""
    foreign: tuple[str, ...]  # headers that only the compiler can find, for example ``cuda_fp16.h``; sorted

    @property
    def digest(self) -> str:
        """Hash of the bytes of source and headers."""
        state = hashlib.sha256()
        for name, content in ((self.name, self.text), *self.headers):
            state.update(f"{name}\0{len(content)}\0".encode() + content)
        return state.hexdigest()

    @property
    def meaning(self) -> str:
        """Hash of the tokens of source and headers; comments and layout do not change it."""
        return _meaning(self)


def read_source(source: str) -> Source:
    """Read a ``package:file`` source, as in `KernelSku.source`, and all headers that it includes, transitively.

    A header is looked up by its path from the source's folder or from an ``include`` folder. Raise `LookupError` if the
    package or the file does not exist.
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
        for header in _includes(content):
            if header in headers or header in foreign:
                continue
            inside = _read(folders, header)
            if inside is None:
                foreign.add(header)
            else:
                headers[header] = inside
                waiting.append(inside)
    return Source(name, text, tuple(sorted(headers.items())), tuple(sorted(foreign)))


@lru_cache(maxsize=1024)
def _includes(content: bytes) -> tuple[str, ...]:
    return tuple(found.decode() for found in _INCLUDE.findall(content))


@cache
def _folders(package: str) -> tuple[Traversable, ...]:
    """Return the folders to search: the source's own, then ``include`` in its packages and in skuda's kernels."""
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
    """Return the hash of everything that determines the bits that a kernel writes, and of what it promises.

    It covers the tokens of its source and headers (for a Python kernel, its function and what that reaches), its entry
    point, flags and architecture, and its launch rule and what that reaches. The promise is included, because a run
    does not verify a promise that was made later. Comments and layout do not count. Raise `LookupError` if its source
    or its launch rule does not exist.
    """
    python = ":" not in sku.source
    content = code_hash(sku.source, sku.entry_point) if python else read_source(sku.source).meaning
    module, _, name = (sku.launch or "").partition(":")
    rule = code_hash(module, name) if module else ""
    promised = sku.precision_guarantee.model_dump_json()
    parts = (content, sku.entry_point, sku.flags, sku.arch.value, rule, promised)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@lru_cache(maxsize=1024)
def _tokens(content: bytes) -> str:
    return c_tokens(content.decode(errors="replace"))


@lru_cache(maxsize=1024)
def _meaning(source: Source) -> str:
    files = [(name, _tokens(content)) for name, content in ((source.name, source.text), *source.headers)]
    return hashlib.sha256(repr(files).encode()).hexdigest()
