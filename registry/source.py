"""Finds the source, the entry point and the launch rule of a `KernelSku` without running them."""

from __future__ import annotations

import importlib
import importlib.resources
import re
from functools import cache
from typing import Any


@cache
def source_text(source: str) -> str:
    """Return the text of a ``package:file`` source.

    Raises
    ------
    LookupError
        If the package or the file does not exist.
    """
    package, _, name = source.partition(":")
    try:
        return importlib.resources.files(package).joinpath(name).read_text(encoding="utf-8")
    except (ImportError, OSError, TypeError) as error:
        raise LookupError(f"{source} cannot be read: {error}") from error


@cache
def _occurs(name: str, source: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", source_text(source)) is not None


@cache
def resolve(module: str, name: str) -> Any:
    """Return attribute `name` of Python module `module`.

    Raises
    ------
    LookupError
        If either does not exist.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise LookupError(f"{module}:{name} cannot be loaded: {error}") from error


def missing(source: str, entry_point: str, launch: str | None) -> tuple[str, str] | None:
    """Return (field, reason) of the first missing module, file or attribute that a record names, or None."""
    field = "source"
    try:
        if ":" in source:
            if not _occurs(entry_point, source):
                return "entry_point", f"{entry_point} does not occur in {source}"
        else:
            importlib.import_module(source)
            field = "entry_point"
            resolve(source, entry_point)
        if launch is not None:
            field = "launch"
            module, _, name = launch.partition(":")
            resolve(module, name)
    except (LookupError, ImportError) as error:
        return field, str(error)
    return None
