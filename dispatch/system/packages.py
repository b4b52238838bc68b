"""Whether packages are installed."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any


def installed(name: str) -> bool:
    """Whether a module is installed, without importing it or its parent packages.

    `importlib.util.find_spec` does the same, but holds the import lock. A Ctrl-C at the wrong moment would leave that
    locked, and the next import of every other thread would hang.
    """
    places: Iterable[str] | None = None
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        if end > 1 and places is None:
            return False  # its parent is not a package
        part = ".".join(parts[:end])
        found: Any = sys.modules[part] if part in sys.modules else _spec(part, places)
        if found is None:
            return False
        places = getattr(found, "__path__", None) or getattr(found, "submodule_search_locations", None)
    return True


def _spec(name: str, places: Iterable[str] | None) -> object:
    """Return the module spec, or None."""
    found = (finder.find_spec(name, places) for finder in sys.meta_path)  # type: ignore[arg-type]  # a namespace's places are no list
    return next(filter(None, found), None)
