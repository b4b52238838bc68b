"""Whether packages are installed."""

from __future__ import annotations

from importlib.util import find_spec


def installed(name: str) -> bool:
    """Whether a module is installed. It is not imported, but its parent packages are."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # a parent is missing
        return False
