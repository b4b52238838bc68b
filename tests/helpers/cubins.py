"""A made-up cubin, its key, and how tests ask a cubin cache for it."""

from __future__ import annotations

from skuda.dispatch.compile.member import Key

KEY = Key("5" * 64, ("-fmad=false",), "sm_90", "scaled rule", "pycuda")
CUBIN = b"\x7fELF" + bytes(range(256)) * 2


class NoCompiler(Exception):
    """What is raised where a kernel is needed and nothing can compile it."""


def cannot():
    raise NoCompiler


def get(cache, build=lambda: CUBIN, key=KEY, compiler="nvcc 13.0"):
    return cache.get(key, compiler, build, sku="an id", file="package:file.cu")


def entry_of(cache):
    (path,) = cache.folder.glob("*/*.cubin")
    return path
