"""Selection, plans, devices and backends: which kernel runs, and how."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from skuda.dispatch.backends.base import Backend, BackendStatus, Runner
from skuda.dispatch.dispatcher import Dispatcher
from skuda.dispatch.plan import Plan
from skuda.dispatch.preference import PlanPreference
from skuda.dispatch.telemetry import Selection, log_selection
from skuda.registry.device import KNOWN_DEVICES, Device, device_named

if TYPE_CHECKING:
    from skuda.dispatch.plugins.loading import Plugin
    from skuda.dispatch.select.explanation import Decision, Explanation
    from skuda.dispatch.select.tuning import Tuning

__all__ = [
    "KNOWN_DEVICES",
    "Backend",
    "BackendStatus",
    "Decision",
    "Device",
    "Dispatcher",
    "Explanation",
    "Plan",
    "PlanPreference",
    "Plugin",
    "Runner",
    "Selection",
    "Tuning",
    "device_named",
    "log_selection",
]

_LATER = {
    "Decision": "skuda.dispatch.select.explanation",
    "Explanation": "skuda.dispatch.select.explanation",
    "Plugin": "skuda.dispatch.plugins.loading",
    "Tuning": "skuda.dispatch.select.tuning",
}


def __getattr__(name: str) -> Any:
    # Few programs need these, and importing their modules takes long.
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
