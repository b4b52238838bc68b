"""Every public function raises a `SkudaError` for a wrong value of any argument."""

from __future__ import annotations

import enum
from functools import partial
from itertools import product
from types import FunctionType

import numpy as np
import pytest
from support import sampled
from wrong import WRONG

import skuda.dispatch
import skuda.dispatch.shard
import skuda.registry
from skuda.dispatch import Dispatcher, PlanPreference, Tuning, device_named, log_selection
from skuda.dispatch.backends.numpy import NumpyBackend
from skuda.dispatch.select.environment import Environment
from skuda.dispatch.select.explanation import Verdict
from skuda.dispatch.shard import NVLINK, Shards, Traffic, explain_shards, on_ranks, select_shards, split
from skuda.kernels.catalog import built_in_ops, built_in_registry
from skuda.kernels.draw import draw
from skuda.kernels.elementwise import FillDescriptor
from skuda.kernels.linear import QuantizedLinearDescriptor
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
LINEAR = QuantizedLinearDescriptor(m=2, c_out=3, k=4, q_min=-127, q_max=127, activation_element="f32")
SHARDS = Shards(axis="k", count=1)
SHARDED = select_shards(DISPATCHER, LINEAR, SHARDS, device="cpu")
SPLIT = explain_shards(DISPATCHER, LINEAR, SHARDS, device="cpu")
S32 = np.ones((2, 3), np.int32)
LAYER_INPUTS = {"activation": np.ones((2, 4), np.float32), "weight_q": np.ones((3, 4), np.int8), "weight_scale": ONES}
TRAFFIC = Traffic(m=2, n=3, k=4, output_bytes=2, dynamic=True)
TUNING = Tuning(environment=Environment(device=HOST, skuda="1"))


def record(value):
    """A public record and the fields of an example."""
    return type(value), {name: getattr(value, name) for name in type(value).model_fields}


def on_one(method, prepare=lambda group: group):
    """A method of a group, or of what is made of a group, as a function on one rank."""
    return lambda **given: on_ranks(1, lambda group: getattr(prepare(group), method)(**given))[0]


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
    "select_shards": (
        select_shards,
        {"dispatcher": DISPATCHER, "problem": LINEAR, "shards": SHARDS, "preference": None, "device": HOST},
    ),
    "explain_shards": (
        explain_shards,
        {"dispatcher": DISPATCHER, "problem": LINEAR, "shards": SHARDS, "preference": None, "device": HOST},
    ),
    "ShardedPlan.bind": (lambda **given: on_ranks(1, lambda g: SHARDED.bind(**{"group": g} | given)), {"name": "up"}),
    "ShardedPlan.bind to a group": (SHARDED.bind, {"group": None}),
    "BoundShards.run": (on_one("run", SHARDED.bind), {**LAYER_INPUTS, "stream": None}),
    "Shards.parts": (SHARDS.parts, {"n": 3, "k": 4}),
    "Shards.columns": (Shards(axis="n", count=1, input="columns").columns, {"k": 4}),
    "Shards.rows": (SHARDS.rows, {"m": 3}),
    "Link.microseconds": (NVLINK.microseconds, {"sent": 5}),
    "split": (split, {"total": 5, "count": 2, "unit": 1}),
    "Traffic.transfers": (TRAFFIC.transfers, {"shards": SHARDS, "scattered": True, "chunks": 1}),
    "Traffic.microseconds": (TRAFFIC.microseconds, {"shards": SHARDS, "scattered": None}),
    "Traffic.scatters": (TRAFFIC.scatters, {"shards": SHARDS}),
    "Traffic.chunks": (TRAFFIC.chunks, {"shards": SHARDS}),
    "Traffic.cheapest": (TRAFFIC.cheapest, {"choices": [SHARDS]}),
    "on_ranks": (partial(on_ranks, work=lambda _: None), {"count": 1, "patience": 1.0}),
    "Group.exchange": (on_one("exchange"), {"text": "here"}),
    "Group.agree": (on_one("agree"), {"what": "a call"}),
    "Group.max": (on_one("max"), {"array": ONES}),
    "Group.sum": (on_one("sum"), {"array": S32}),
    "Group.sum_rows": (on_one("sum_rows"), {"array": S32, "sizes": (2,)}),
    "Group.gather": (on_one("gather"), {"array": S32, "axis": 1, "sizes": (3,)}),
    "Group.start_sum_rows": (on_one("start_sum_rows"), {"array": S32, "sizes": (2,)}),
    "Group.start_gather": (on_one("start_gather"), {"array": S32, "axis": 0, "sizes": (2,), "into": S32.copy()}),
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
            NVLINK,
            SHARDS,
            TRAFFIC,
            SHARDED.precision_guarantee,
            SPLIT,
            SPLIT.steps[0],
            TRAFFIC.transfers(Shards(axis="k", count=2), scattered=True)[0],
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

NOTHING_VALID = {"log_selection", "Tuning.load", "load_layers", "ShardedPlan.bind to a group"}
"""Functions that are only called with wrong values here."""
MAY_FAIL_TO_OPEN = {"save_layers", "load_layers"}
"""Functions that document `OSError`."""
CHECKED_LATER = {
    *("Argument", "ArgumentSpec", "Case", "FunctionalKey", "Op", "Runner", "Selection"),
    *("Choice", "Columns", "Constant", "Launch", "Leading", "Number", "Pointer", "Rows", "Step", "TensorMap"),
    *("pointers", "s32", "s64", "strided", "cuda_skus", "numpy_skus", "resolve", "storage_shape"),
    *("HostRunner", "CudaRunner", "bare", "blocks", "require_exact_mode"),
    *("Group", "BoundShards", "ShardedPlan"),
}
"""Plain data, checked where it is registered, protocols, what plug-ins call, and what only functions of skuda make."""


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


@pytest.mark.parametrize(
    "module", [skuda.dispatch, skuda.dispatch.shard, skuda.registry], ids=lambda module: module.__name__
)
def test_every_public_name_is_tried(module):
    public = {name: getattr(module, name) for name in module.__all__}
    data = (Exception, enum.Enum, Descriptor, skuda.dispatch.Backend)
    called = {
        name
        for name, value in public.items()
        if isinstance(value, FunctionType) or (isinstance(value, type) and not issubclass(value, data))
    }
    assert called <= CALLS.keys() | CHECKED_LATER
