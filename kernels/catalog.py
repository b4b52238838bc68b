"""The built-in ops: every module in a category package that has an `OP`. A new op is a new module, nothing else."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

import skuda.kernels
from skuda.registry.op import Op
from skuda.registry.registry import Registry


@cache
def built_in_ops() -> tuple[Op, ...]:
    """Import every op module and return the ops, by category and name."""
    categories = [m.name for m in pkgutil.iter_modules(skuda.kernels.__path__, "skuda.kernels.") if m.ispkg]
    modules = [
        module.name
        for category in categories
        for module in pkgutil.iter_modules(importlib.import_module(category).__path__, f"{category}.")
        if not module.name.rpartition(".")[2].startswith("_")
    ]
    return tuple(importlib.import_module(module).OP for module in modules)


@cache
def built_in_registry() -> Registry:
    """Return the registry of the built-in ops; a snapshot, so one serves everybody."""
    return Registry(built_in_ops(), origin="skuda")


def exported(package: str, name: str) -> object | None:
    """Return what an op module of `package` defines under `name`, or None.

    Parameters
    ----------
    package : str
        Dotted name of a category package.
    name : str
        A public name, for example that of a descriptor class.
    """
    for op in built_in_ops():
        module = op.reference.__module__
        if module.startswith(f"{package}.") and hasattr(importlib.import_module(module), name):
            found: object = getattr(importlib.import_module(module), name)
            return found
    return None
