"""WHICH kernel and HOW: selection, plans, devices and backends."""

from skuda.dispatch.backends.base import Backend, BackendStatus, Runner
from skuda.dispatch.device import KNOWN_DEVICES, Device, device_named
from skuda.dispatch.dispatcher import Dispatcher
from skuda.dispatch.explanation import Decision, Explanation
from skuda.dispatch.plan import Plan
from skuda.dispatch.plugins import Plugin
from skuda.dispatch.preference import PlanPreference
from skuda.dispatch.telemetry import Selection, log_selection
from skuda.dispatch.tuning import Tuning

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
