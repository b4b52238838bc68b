"""`calibrate`: exact maxima, a fair sample of rows, and which norms feed linear layers alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from support import fresh
from tensors import calibrated
from torch import nn
from transformers.pytorch_utils import Conv1D

from skuda.registry import InvalidProblem
from skuda.tools.smoothquant import ActivationRanges
from skuda.torch import calibrate

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def tensor(rng, *shape, dtype=torch.float32):
    return torch.from_numpy(rng.standard_normal(shape) * np.exp(2 * rng.standard_normal(shape[-1]))).to(dtype)


def hooks(model):
    kinds = ("_forward_hooks", "_forward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


@pytest.mark.parametrize("dtype", FLOATS)
def test_maxima_are_those_of_activation_ranges_bit_for_bit(dtype):
    rng, ranges = fresh(dtype), ActivationRanges()
    model = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3)).to(dtype)
    batches = [tensor(rng, *shape, 7, dtype=dtype) for shape in [(), (4,), (2, 3), (0,), (2, 0, 3)]]
    batches[1][2, 3], batches[1][3, 0], batches[2][1, 1, 5] = math.nan, -0.0, -math.inf
    calibration = calibrated(model, *batches)
    for batch in batches:
        with torch.no_grad():
            ranges.observe("0", batch)
            ranges.observe("2", torch.relu(model[0](batch)))
    assert list(calibration.maxima) == list(ranges.layers)
    for name, found in calibration.maxima.items():
        assert found.dtype is torch.float32
        assert np.array_equal(found.numpy().view(np.int32), ranges.channel_max(name).view(np.int32))


def test_under_autocast_the_cast_input_counts():
    rng, ranges = fresh(), ActivationRanges()
    model, x = nn.Sequential(nn.Linear(9, 2)), tensor(rng, 5, 9)
    with calibrate(model) as calibration, torch.autocast("cpu", torch.bfloat16):
        model(x)
    ranges.observe("0", x.bfloat16())
    assert np.array_equal(calibration.maxima["0"].numpy(), ranges.channel_max("0"))


def test_an_input_by_keyword_counts():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.layer = nn.LayerNorm(3), nn.Linear(3, 2)

        def forward(self, x):
            return self.layer(input=self.norm(x))

    with calibrate(model := Model()) as calibration:
        model(torch.ones(1, 3))
    assert list(calibration.maxima) == ["layer"]
    assert calibration.norms == {"norm": ("layer",)}


def test_a_filter_selects():
    model, seen = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), []
    with calibrate(model, lambda module, name: seen.append((module, name)) or name == "1") as calibration:
        model(torch.ones(2, 3))
    assert list(calibration.maxima) == ["1"]
    assert seen == [(model[0], "0"), (model[1], "1")]


def test_a_layer_that_does_not_run_is_named():
    model = nn.ModuleDict({"used": nn.Linear(3, 3), "unused": nn.Linear(3, 3)})
    with calibrate(model) as calibration:
        model["used"](torch.ones(1, 3))
    assert set(calibration.maxima) == {"used"}
    assert calibration.left == {"unused": "it did not run in calibration"}


def test_a_layer_with_inputs_in_f64_is_named():
    model = nn.Sequential(nn.Linear(3, 3)).double()
    calibration = calibrated(model, torch.ones(1, 3).double())
    assert "torch.float64" in calibration.left["0"]


def test_hooks_go_whatever_happens():
    model = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 3))
    assert hooks(model) == 0
    block = calibrate(model)
    calibration = block.__enter__()
    assert hooks(model) > 0
    assert not block.__exit__(ZeroDivisionError, ZeroDivisionError(), None)  # the exception goes on
    assert hooks(model) == 0
    assert not calibration.complete
    with calibrate(model) as calibration:
        with pytest.raises(RuntimeError, match="shape"):
            model(torch.ones(1, 4))
        model(torch.ones(1, 3))
        assert not calibration.complete
    assert hooks(model) == 0
    assert calibration.complete
    assert calibration.norms == {"0": ("1",)}
    assert torch.is_grad_enabled()


def test_a_compiled_model_is_watched():
    model = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 3))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        compiled(torch.ones(2, 3))
    for asked in (model, compiled):
        with calibrate(asked) as calibration:
            compiled(torch.ones(2, 3))
        assert len(calibration.maxima) == len(calibration.norms) == 1


# --- rows ------------------------------------------------------------------------------------------------------------


def drawn(batches, **more):
    return calibrated(nn.Sequential(nn.Linear(2, 1)), *batches, **more).rows.get("0")


def numbered(count):
    return torch.stack([torch.arange(count), torch.arange(count) + 1000], 1).float()


def test_few_rows_are_all_kept():
    rows = numbered(20)
    assert torch.equal(drawn(rows.split([7, 0, 9, 4]), rows=20), rows)
    assert torch.equal(drawn(rows.reshape(2, 2, 5, 2).unbind(), rows=128), rows)
    assert drawn([rows], rows=0) is None


def test_rows_are_whole_distinct_and_the_same_for_a_seed():
    rows, seed = numbered(500), int(fresh().integers(1000))
    found = drawn(rows.split(60), rows=32, seed=seed)
    assert found.shape == (32, 2)
    assert torch.equal(found[:, 0] + 1000, found[:, 1])
    assert len(found[:, 0].unique()) == 32
    assert torch.equal(found, drawn(rows.split(60), rows=32, seed=seed))
    assert not torch.equal(found, drawn(rows.split(60), rows=32, seed=seed + 1))


@pytest.mark.parametrize("spoiled", [False, True])
def test_layers_share_the_sample_of_the_inputs_that_they_share(spoiled):
    class Twins(nn.ModuleDict):
        def forward(self, first, second):
            self["a"](first)
            if spoiled:
                first += 1
            self["b"](second)

    batches = [(each, each) for each in numbered(500).split(60)]
    twins = Twins({name: nn.Linear(2, 1) for name in "ab"})
    with calibrate(twins, rows=32) as same:
        for batch in batches:
            twins(*batch)
    assert (same.rows["a"] is same.rows["b"]) is not spoiled
    assert torch.equal(same.rows["a"] + spoiled, same.rows["b"])
    with calibrate(twins, rows=32) as other:
        for first, second in batches:
            twins(first.clone(), second if first[0, 0] < 300 else second + 1)
    assert not torch.equal(other.rows["a"], other.rows["b"])
    assert torch.equal(other.rows["b"], drawn([each + (each[0, 0] >= 300) for each, _ in batches], rows=32))


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"model": None}, "model"),
        ({"filter_fn": "0"}, "filter_fn"),
        ({"filter_fn": lambda module: True}, "filter_fn"),
        ({"filter_fn": lambda module, name: None}, "filter_fn"),
        ({"rows": -1}, "rows"),
        ({"rows": True}, "rows"),
        ({"rows": 1.0}, "rows"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_arguments(arguments, field):
    with pytest.raises(InvalidProblem) as refused, calibrate(**{"model": nn.Sequential(nn.Linear(3, 4))} | arguments):
        pass
    assert refused.value.field == field


# --- what norms feed -------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A norm, two layers, and what a test says happens between them."""

    def __init__(self, flow):
        super().__init__()
        self.norm, self.first, self.second = nn.RMSNorm(4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.other, self.flow, self.kept = nn.Linear(4, 4), flow, None

    def forward(self, x):
        return self.flow(self, x)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def looks(block, h):
    """What models ask of a tensor without using its elements."""
    assert (h.shape[-1], h.ndim, h.dim(), h.size(0), len(h)) == (4, 2, 2, 3, 3)
    assert (h.dtype, h.device.type, h.requires_grad, h.is_contiguous()) == (torch.float32, "cpu", False, True)
    return block.first(h) + block.second(h)


def both(block, h):
    return block.first(h) + block.second(h)


@pytest.mark.parametrize("flow", [both, looks, lambda block, h: block.first(h) * block.second(h).sum()])
def test_a_norm_that_feeds_layers_alone(flow):
    block = Block(lambda self, x: x + flow(self, self.norm(x)))
    with calibrate(block) as calibration:
        for _ in range(3):
            block(torch.randn(3, 4))
    assert calibration.norms == {"norm": ("first", "second")}
    assert not calibration.not_folded


def keeps(block, h):
    block.kept = h
    return both(block, h)


def writes(block, h):
    h += 1
    return both(block, h)


def reads_data(block, h):
    return both(block, h) + block.other(h.data)


USES = {
    "residual": (lambda block, h: both(block, h) + h, "add"),
    "in a list": (lambda block, h: torch.cat([both(block, h), h]), "cat"),
    "by keyword": (lambda block, h: both(block, h) + torch.relu(input=h), "relu"),
    "a view": (lambda block, h: both(block, h) + block.other(h[:1]), "getitem"),
    "its data": (reads_data, "data"),
    "in place": (writes, "add"),
    "NumPy": (lambda block, h: both(block, h) * float(h.numpy().sum()), "numpy"),
    "an address": (lambda block, h: both(block, h) * bool(h.data_ptr()), "data_ptr"),
    "an op": (lambda block, h: both(block, h) + torch.ops.aten.relu.default(h), "relu"),
    "a function of autograd": (lambda block, h: both(block, h) + Twice.apply(h), "mul"),
    "a product with another weight": (lambda block, h: both(block, h) + F.linear(h, torch.ones(4, 4)), "linear"),
    "as a weight": (lambda block, h: both(block, h) + F.linear(torch.ones(4), h[:, :]).sum(), "getitem"),
    "a weight read": (lambda block, h: both(block, h) + F.linear(h, block.other.weight), "without calling"),
    "kept": (keeps, "outlives"),
    "returned": (lambda block, h: (both(block, h), h), "outlives"),
    "the norm's weight": (lambda block, h: both(block, h) * block.norm.weight, "its weight is also used by mul"),
    "a layer with other inputs": (lambda block, h: block.second(block.first(h)) + block.second(h), "other inputs"),
}


@pytest.mark.parametrize("use", USES)
def test_a_norm_that_feeds_anything_else(use):
    flow, reason = USES[use]
    block = Block(lambda self, x: flow(self, self.norm(x)))
    with calibrate(block) as calibration:
        result = block(torch.randn(3, 4))
    del result
    assert not calibration.norms
    assert reason in calibration.not_folded["norm"]


def test_one_use_in_one_batch_is_enough():
    block = Block(lambda self, x: both(self, h := self.norm(x)) + (h if len(x) == 2 else 0))
    with calibrate(block) as calibration:
        for count in (3, 2, 3):
            block(torch.randn(count, 4))
    assert not calibration.norms


def test_a_layer_that_is_not_selected_is_another_use():
    block = Block(lambda self, x: both(self, self.norm(x)))
    calibration = calibrated(block, torch.randn(3, 4), filter_fn=lambda _, name: name != "second")
    assert "linear" in calibration.not_folded["norm"]


def test_a_tied_layer_is_another_use():
    block = Block(lambda self, x: both(self, self.norm(x)))
    block.second.weight = block.first.weight
    calibration = calibrated(block, torch.randn(3, 4))
    assert not calibration.norms


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (both, None),
        (lambda block, h: both(block, h) + h.view(-1, 4), "its output is also used by view"),
        (lambda block, h: both(block, h.clone()) + both(block, h), "its output is also used by clone"),
    ],
)
def test_a_norm_that_feeds_layers_of_gpt2(use, reason):
    block = Block(lambda self, x: use(self, self.norm(x)))
    block.first, block.second, block.other = (Conv1D(4, 4) for _ in range(3))
    with calibrate(block) as calibration:
        with pytest.raises(RuntimeError):
            block.other(torch.randn(3, 5))  # what fails does not run on
        block(x := torch.randn(3, 4))
    assert calibration.norms == ({} if reason else {"norm": ("first", "second")})
    assert calibration.not_folded == ({"norm": reason} if reason else {})
    assert torch.equal(calibration.maxima["first"], block.norm(x).abs().amax(0))
    assert hooks(block) == 0
