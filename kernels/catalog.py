"""The built-in ops: every module of a category package that defines `OP`, or `OPS` for several.

Modules that define neither are helpers. To add an op, add its module.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

import skuda.kernels
from skuda.registry.op import Op
from skuda.registry.registry import Registry
from skuda.registry.vocabulary import OpCategory


@cache
def built_in_ops() -> tuple[Op, ...]:
    """Import every module of every category package and return the ops, sorted by category and name."""
    found: list[Op] = []
    for package in pkgutil.iter_modules(skuda.kernels.__path__, "skuda.kernels."):
        if package.ispkg:
            for name in pkgutil.iter_modules(importlib.import_module(package.name).__path__, f"{package.name}."):
                module = importlib.import_module(name.name)
                found += (module.OP,) if hasattr(module, "OP") else getattr(module, "OPS", ())
    categories = tuple(OpCategory)
    return tuple(sorted(found, key=lambda op: (categories.index(op.category), op.name)))


@cache
def built_in_registry() -> Registry:
    """Return the registry of the built-in ops; it is immutable, so all callers share it."""
    return Registry(built_in_ops(), origin="skuda")


def exported(name: str) -> object:
    """Return a public class that a category package re-exports: an op's descriptor or its result type.

    Raises
    ------
    AttributeError
        If no built-in op has a class of that name.
    """
    for op in built_in_ops():
        for found in (op.descriptor, op.descriptor.result):
            if getattr(found, "__name__", None) == name:
                return found
    raise AttributeError(f"no built-in op has a class {name}")
