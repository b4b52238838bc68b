"""What a forked child does before anything else."""

from __future__ import annotations

import os
from collections.abc import Callable


def in_child(act: Callable[[], None]) -> None:
    """Call a function in every child that is forked from now on, where there are forks."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=act)
