"""Whether packages are installed."""

from __future__ import annotations

import sys
from collections.abc import Iterable


def installed(name: str) -> bool:
    """Whether a module can be found, without importing it or the packages that it lies in.

    `importlib.util.find_spec` asks the same, but holds the lock of all imports meanwhile, and a Ctrl-C at the wrong
    moment leaves that locked: every other thread's next import would hang.
    """
    places: Iterable[str] | None = None
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        part = ".".join(parts[:end])
        found = (finder.find_spec(part, places) for finder in sys.meta_path)  # type: ignore[arg-type]  # a namespace's places are no list
        spec = next(filter(None, found), None)
        if spec is None or (spec.submodule_search_locations is None and end < len(parts)):
            return False
        places = spec.submodule_search_locations
    return True
