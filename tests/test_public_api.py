"""Every public function raises a `SkudaError` for a wrong value of any argument."""

from __future__ import annotations

import enum
from itertools import product
from types import FunctionType

import numpy as np
import pytest
from support import sampled
from wrong import WRONG

import skuda.dispatch
import skuda.registry
from skuda.dispatch import Dispatcher, PlanPreference, Tuning, device_named, log_selection
from skuda.dispatch.backends.numpy import NumpyBackend
from skuda.dispatch.select.environment import Environment
from skuda.dispatch.select.explanation import Verdict
from skuda.kernels.catalog import built_in_ops, built_in_registry
from skuda.kernels.draw import draw
from skuda.kernels.elementwise import FillDescriptor
from skuda.registry import Descriptor, PrecisionRequirement, Reason, Registry, SkudaError, SkuIdentity
from skuda.registry.device import HOST
from skuda.tools.checkpoint import load_layers, save_layers
from skuda.tools.smoothquant import (
    ActivationRanges,
    DynamicLayer,
    SmoothQuantLayer,
    quantize_weight,
    smoothing_factors,
)

DISPATCHER = Dispatcher(built_in_registry(), backends=[NumpyBackend()], tuning="")
FILL = FillDescriptor(numel=2, output_element="f32")
PLAN = DISPATCHER.select(FILL, device="cpu")
FOUND = DISPATCHER.explain(FILL)
ONES = np.ones(3, np.float32)
WEIGHT = np.ones((2, 3), np.float32)
LAYER = SmoothQuantLayer.quantize(DISPATCHER, ONES, WEIGHT, alpha=0.5)
RANGES = ActivationRanges()
RANGES.observe("layer", WEIGHT)
TUNING = Tuning(environment=Environment(device=HOST, skuda="1"))


def record(value):
    """A public record and the fields of an example."""
    return type(value), {name: getattr(value, name) for name in type(value).model_fields}


WRONG |= {"a plan": lambda: PLAN, "a registry": lambda: DISPATCHER.registry}
OTHER = PLAN.sku.model_copy(update={"variant": "other"})
CALLS = {
    "Dispatcher": (
        Dispatcher,
        {"registry": DISPATCHER.registry, "backends": [], "tuning": "", "on_selection": None, "nvtx": False},
    ),
    "Dispatcher.select": (DISPATCHER.select, {"problem": FILL, "preference": PlanPreference(), "device": HOST}),
    "Dispatcher.explain": (DISPATCHER.explain, {"problem": FILL, "preference": PlanPreference(), "device": HOST}),
    "Dispatcher.run": (
        DISPATCHER.run,
        {"problem": FILL, "preference": PlanPreference(), "stream": None, "value": 1.0, "output": ONES[:2].copy()},
    ),
    "Dispatcher.prepare": (DISPATCHER.prepare, {"plan": PLAN}),
    "Dispatcher.choices": (DISPATCHER.choices, {"sku": PLAN.sku, "problem": FILL, "device": HOST}),
    "Dispatcher.describe": (DISPATCHER.describe, {"op": "fill", "numel": 2, "output_element": "f32"}),
    "Plan.run": (PLAN.run, {"value": 1.0, "output": ONES[:2].copy(), "stream": None}),
    "Plan.bind": (PLAN.bind, {"value": 1.0, "output": ONES[:2].copy(), "stream": None}),
    "Plan.can_implement": (PLAN.can_implement, {"value": 1.0, "output": ONES[:2].copy()}),
    "device_named": (device_named, {"name": "h200"}),
    "log_selection": (log_selection, {"selection": None}),
    "Tuning.load": (Tuning.load, {"path": "/no/such/file"}),
    "Tuning.save": (TUNING.save, {"path": "tuning.json"}),
    "Tuning.updated": (TUNING.updated, {"other": TUNING}),
    "Tuning.entry": (TUNING.entry, {"problem": FILL}),
    "Registry": (Registry, {"records": (), "origin": "here"}),
    "Registry.register": (lambda one: DISPATCHER.registry.register(one, origin="here"), {"one": OTHER}),
    "SkuIdentity.parse": (SkuIdentity.parse, {"text": PLAN.sku.id}),
    "KernelSku.on": (PLAN.sku.on, {"backend": "numpy", "arch": None}),
    "quantize_weight": (quantize_weight, {"dispatcher": DISPATCHER, "weight": WEIGHT}),
    "smoothing_factors": (smoothing_factors, {"activation_max": ONES, "weight_max": ONES, "alpha": 0.5}),
    "ActivationRanges.observe": (RANGES.observe, {"layer": "layer", "activation": WEIGHT}),
    "ActivationRanges.channel_max": (RANGES.channel_max, {"layer": "layer"}),
    "DynamicLayer.quantize": (DynamicLayer.quantize, {"dispatcher": DISPATCHER, "weight": WEIGHT, "bias": ONES[:2]}),
    "SmoothQuantLayer.quantize": (
        SmoothQuantLayer.quantize,
        {"dispatcher": DISPATCHER, "activation_max": ONES, "weight": WEIGHT, "bias": ONES[:2], "alpha": 0.5},
    ),
    "SmoothQuantLayer": (SmoothQuantLayer, {**LAYER.tensors(), "act_scale": 0.5, "alpha": 0.5}),
    "SmoothQuantLayer.run": (LAYER.run, {"dispatcher": DISPATCHER, "x": WEIGHT}),
    "save_layers": (save_layers, {"path": "layers", "layers": {"a": LAYER}}),
    "load_layers": (load_layers, {"path": "/no/such/file"}),
    **{
        type(value).__name__: record(value)
        for value in (
            HOST,
            PlanPreference(),
            PrecisionRequirement(),
            FILL,
            PLAN,
            PLAN.sku,
            PLAN.sku.identity,
            PLAN.precision_guarantee,
            FOUND,
            FOUND.decisions[0],
            TUNING,
            DISPATCHER.status["numpy"],
            DISPATCHER.registry.backends["numpy"],
            Reason(code="arch", field="device", wanted="a", had="b"),
            Verdict(origin="a", chosen=False, reason="b"),
            skuda.dispatch.Plugin(group="a", name="b", origin="c", package="d"),
            skuda.registry.Between(field="k", minimum=1),
            skuda.registry.MultipleOf(field="k", divisor=2),
            skuda.registry.OneOf(field="k", allowed=("a",)),
            skuda.registry.ProductAtMost(factors=("k",), maximum=3),
            skuda.registry.WorkspaceTerm(factors=("k",), bytes_each=4),
        )
    },
}
for op in built_in_ops():
    case = op.cases[0]
    fields = {name: value for name, value in vars(case.problem).items() if name != "op"}
    given = dict(draw(op, case, np.random.default_rng(1)).inputs)
    CALLS[f"skuda.ops.{op.name}"] = (getattr(skuda.ops, op.name), {**given, **fields, "dispatcher": DISPATCHER})
    CALLS[op.descriptor.__name__] = (op.descriptor, fields)

NOTHING_VALID = {"log_selection", "Tuning.load", "load_layers"}
"""Functions that are only called with wrong values here."""
MAY_FAIL_TO_OPEN = {"save_layers", "load_layers"}
"""Functions that document `OSError`."""
CHECKED_LATER = {"Argument", "Case", "FunctionalKey", "Op", "Runner", "Selection"}
"""Plain data, whose parts are checked where it is registered, and a protocol."""


def kind_of(name):
    """Return the group of which a sample is tested where not everything runs."""
    return "function" if name.startswith("skuda.ops") else "descriptor" if name.endswith("Descriptor") else name


@pytest.mark.parametrize("name", sampled(CALLS, 3, each=kind_of))
def test_a_wrong_value_gives_an_error_of_ours_or_none(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some of the texts are paths
    ask, valid = CALLS[name]
    if name not in NOTHING_VALID:
        ask(**valid)
    wrong = []
    for argument, (what, value) in product(valid, WRONG.items()):
        try:
            ask(**{**valid, argument: value()})
        except SkudaError as error:
            if len(str(error)) > 4000 or not str(error).replace("\n", "").isprintable():
                wrong.append(f"{argument} = {what}: an unprintable or long error: {str(error)[:200]!r}")
        except Exception as error:  # noqa: BLE001  the subject
            if not (isinstance(error, OSError) and name in MAY_FAIL_TO_OPEN):
                wrong.append(f"{argument} = {what}: {type(error).__name__}: {str(error)[:100]}")
    assert not wrong, "\n".join([f"{len(wrong)} raw errors of {name}", *wrong])


@pytest.mark.parametrize("module", [skuda.dispatch, skuda.registry], ids=lambda module: module.__name__)
def test_every_public_name_is_tried(module):
    public = {name: getattr(module, name) for name in module.__all__}
    data = (Exception, enum.Enum, Descriptor, skuda.dispatch.Backend)
    called = {
        name
        for name, value in public.items()
        if isinstance(value, FunctionType) or (isinstance(value, type) and not issubclass(value, data))
    }
    assert called <= CALLS.keys() | CHECKED_LATER
