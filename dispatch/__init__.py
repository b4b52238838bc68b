"""Selection, plans, devices and backends: which kernel runs, and how; and what kernels and backends of others need."""

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
    from skuda.dispatch.backends.numpy import HostRunner
    from skuda.dispatch.cuda.driver import driver
    from skuda.dispatch.cuda.runner import CudaRunner
    from skuda.dispatch.host import rules
    from skuda.dispatch.host.arrays import bare
    from skuda.dispatch.host.floating import require_exact_mode
    from skuda.dispatch.plugins.loading import Plugin
    from skuda.dispatch.select.explanation import Decision, Explanation
    from skuda.dispatch.select.tuning import Tuning
    from skuda.dispatch.telemetry import KERNELS
    from skuda.kernels.blocks import blocks
    from skuda.kernels.launch import (
        Choice,
        Columns,
        Constant,
        Launch,
        Leading,
        Number,
        Parameter,
        Pointer,
        Rows,
        Step,
        TensorMap,
        pointers,
        s32,
        s64,
        strided,
    )
    from skuda.kernels.offers import cuda_skus, numpy_skus

__all__ = [
    "KERNELS",
    "KNOWN_DEVICES",
    "Backend",
    "BackendStatus",
    "Choice",
    "Columns",
    "Constant",
    "CudaRunner",
    "Decision",
    "Device",
    "Dispatcher",
    "Explanation",
    "HostRunner",
    "Launch",
    "Leading",
    "Number",
    "Parameter",
    "Plan",
    "PlanPreference",
    "Plugin",
    "Pointer",
    "Rows",
    "Runner",
    "Selection",
    "Step",
    "TensorMap",
    "Tuning",
    "bare",
    "blocks",
    "cuda_skus",
    "device_named",
    "driver",
    "log_selection",
    "numpy_skus",
    "pointers",
    "require_exact_mode",
    "rules",
    "s32",
    "s64",
    "strided",
]

_RULE = ("Choice", "Columns", "Constant", "Launch", "Leading", "Number", "Parameter", "Pointer", "Rows", "Step")
_LATER = {
    **dict.fromkeys((*_RULE, "TensorMap", "pointers", "s32", "s64", "strided"), "skuda.kernels.launch"),
    **dict.fromkeys(("cuda_skus", "numpy_skus"), "skuda.kernels.offers"),
    **dict.fromkeys(("Decision", "Explanation"), "skuda.dispatch.select.explanation"),
    "KERNELS": "skuda.dispatch.telemetry",
    "CudaRunner": "skuda.dispatch.cuda.runner",
    "HostRunner": "skuda.dispatch.backends.numpy",
    "Plugin": "skuda.dispatch.plugins.loading",
    "Tuning": "skuda.dispatch.select.tuning",
    "bare": "skuda.dispatch.host.arrays",
    "blocks": "skuda.kernels.blocks",
    "driver": "skuda.dispatch.cuda.driver",
    "require_exact_mode": "skuda.dispatch.host.floating",
}


def __getattr__(name: str) -> Any:
    # Few programs need these, and importing their modules takes long.
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    if name == "rules":
        return importlib.import_module("skuda.dispatch.host.rules")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
