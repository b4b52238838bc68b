"""Selection, plans, devices and backends: which kernel runs, and how."""

from skuda.dispatch.backends.base import Backend, BackendStatus, Runner
from skuda.dispatch.device import KNOWN_DEVICES, Device, device_named
from skuda.dispatch.dispatcher import Dispatcher
from skuda.dispatch.plan import Plan
from skuda.dispatch.plugins.loading import Plugin
from skuda.dispatch.preference import PlanPreference
from skuda.dispatch.select.explanation import Decision, Explanation
from skuda.dispatch.select.tuning import Tuning
from skuda.dispatch.telemetry import Selection, log_selection

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
