"""A made-up cubin, its key, and how tests ask a cubin cache for it."""

from __future__ import annotations

import struct
from typing import NamedTuple

from skuda.dispatch.compile.member import Key

KEY = Key("5" * 64, ("-fmad=false",), "sm_90", "scaled rule", "pycuda")
CUBIN = b"\x7fELF" + bytes(range(256)) * 2


def elf(text):
    """An ELF file without kernels, with a text behind its only section header."""
    header = b"\x7fELF\x02\x01" + bytes(34) + struct.pack("<Q", 64) + bytes(10) + struct.pack("<HHH", 64, 1, 0)
    return header + struct.pack("<IIQQQQ", 0, 8, 0, 0, 128, 1) + bytes(24) + b"\0" + text.encode()


class NoCompiler(Exception):
    """What is raised where a kernel is needed and nothing can compile it."""


def cannot():
    raise NoCompiler


class Got(NamedTuple):
    """What a test looks at of what a cache has found."""

    cubin: bytes
    notes: tuple[str, ...]


def get(cache, build=lambda: CUBIN, key=KEY, compiler="nvcc 13.0"):
    found = cache.get(key, compiler, build, sku="an id", file="package:file.cu")
    return Got(found.cubin, found.notes)


def entry_of(cache):
    (path,) = cache.folder.glob("*.cubin")
    return path
