"""What is set aside, for commands whose output does not say it."""

from __future__ import annotations

from skuda.dispatch import Dispatcher
from skuda.tools.output import tell


def tell_aside(dispatcher: Dispatcher) -> None:
    """Print one line on standard error for every plug-in that is set aside, and what to do about it."""
    for plugin in dispatcher.quarantined:
        tell(f"{plugin}; {plugin.remedy}")
