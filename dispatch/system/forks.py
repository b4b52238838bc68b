"""Runs functions first in every forked child."""

from __future__ import annotations

import os
from collections.abc import Callable


def in_child(act: Callable[[], None]) -> None:
    """Call a function in every child that is forked from now on, on systems with forks."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=act)
