"""Layers that pass on what is not finite: their rows, their checkpoints, and what leaves them alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import fresh, sampled
from tensors import GatedMLP, assert_same, normal
from torch import nn

from skuda.registry.errors import InvalidProblem
from skuda.torch import (
    Dynamic,
    FakeQuant,
    SmoothDynamic,
    SmoothStatic,
    calibrate,
    fuse_,
    load_,
    prepare,
    quantize_,
    save,
)
from skuda.torch.linear.int8_linear import propagates, propagating

VALUES = (np.nan, np.inf, -np.inf)
K = 24


class Two(nn.Module):
    """Two layers, the second of which would see codes of the first."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(K, 16), nn.Linear(16, 7)

    def forward(self, x):
        return self.second(self.first(x))


def converted(kind, nonfinite, dtype=torch.float32, state=None):
    model = Two().to(dtype)
    if state is not None:
        model.load_state_dict(state)
    if kind == "dynamic":
        quantize_(model, Dynamic(nonfinite=nonfinite))
    else:
        with calibrate(model) as calibration, torch.no_grad():
            model(torch.ones(2, K, dtype=dtype))
        kind = SmoothStatic if kind == "static" else SmoothDynamic
        quantize_(model, kind(calibration, 0.5, nonfinite=nonfinite))
    return model


@pytest.mark.parametrize("value", sampled(VALUES))
@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("kind", ["dynamic", "smoothed", "static"])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's compiler does it
def test_a_row_that_is_not_finite_becomes_nan_and_no_other_changes(kind, compiles, value):
    rng = fresh(kind, compiles, value)
    state = Two().state_dict()
    plain, model = (converted(kind, how, state=state) for how in ("ignore", "propagate"))
    torch.compiler.reset()
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiles else model
    x = normal(rng, 2, 4, K)
    bad = x.clone()
    bad[1, 2, 5] = value
    with torch.no_grad():
        wanted = plain(x)
        assert_same(run(x), wanted)
        assert not plain(bad).isnan().any()  # which is why there is this option
        for _ in range(2):  # the second time by a launch
            found = run(bad)
            assert found[1, 2].isnan().all()
            found[1, 2] = wanted[1, 2]
            assert_same(found, wanted)
        assert run(x[:, :0]).shape == (2, 0, 7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["dynamic", "smoothed", "static"])
def test_what_autocast_makes_infinite_is_noticed(kind, dtype):
    model = converted(kind, "propagate")
    x = torch.ones(2, K)
    x[1, 3] = 3.4e38
    with torch.no_grad(), torch.autocast("cpu", dtype):
        found = model(x).isnan()
    assert found[1].all()
    assert not found[0].any()


@pytest.mark.parametrize("kind", ["dynamic", "smoothed", "static"])
def test_checkpoints_hold_the_layers_and_loading_keeps_what_they_do(kind, tmp_path):
    rng = fresh(kind)
    model, other = (converted(kind, "propagate") for _ in range(2))
    save(model, tmp_path)
    load_(other, tmp_path)
    assert type(other.first) is type(model.first)
    assert propagates(model.first)
    assert (getattr(model.first, "smooth", None) is None) is (kind == "dynamic")
    x = normal(rng, 3, K)
    x[1, 0] = np.nan
    with torch.no_grad():
        assert_same(other(x), model(x))
        assert model(x)[1].isnan().all()
    assert len(prepare(model, rows=(2,))) == 2


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_fused_layers_propagate(weights, value):
    rng = fresh(weights, value)
    mlp = GatedMLP(K, 48, nn.SiLU())
    quantize_(mlp, Dynamic(nonfinite="propagate", weights=weights))
    assert len(fuse_(mlp).fused) == 1
    x = normal(rng, 4, K)
    with torch.no_grad():
        wanted = mlp(x)
        x[1, 2] = value
        found = mlp(x)
        assert found[1].isnan().all()
        assert_same(found[[0, 2, 3]], wanted[[0, 2, 3]])
        mlp.gate_up_proj.bias[3] = torch.nan  # of a gate, which every row has
        assert mlp(x).isnan().all()


def test_layers_that_differ_are_not_joined():
    mlp = GatedMLP(K, 48, nn.SiLU())
    quantize_(mlp, Dynamic())
    propagating(mlp.up_proj)
    with pytest.warns(UserWarning, match="gate_proj and up_proj differ in what they do with a NaN"):
        fuse_(mlp)


def test_what_no_config_or_layer_accepts():
    with pytest.raises(InvalidProblem, match="Dynamic: nonfinite must be 'ignore' or 'propagate'; had 'raise'"):
        Dynamic(nonfinite="raise")
    model = Two()
    with calibrate(model) as calibration:
        model(torch.ones(1, K))
    with pytest.raises(InvalidProblem, match="SmoothStatic: nonfinite must be"):
        SmoothStatic(calibration, nonfinite=True)
    with pytest.raises(InvalidProblem, match="layer must be a DynamicLinear or a StaticLinear; had a Linear"):
        propagating(nn.Linear(2, 2))


@pytest.mark.parametrize(("config", "told"), [(Dynamic(), 1), (Dynamic(nonfinite="propagate"), 0), (FakeQuant(), 0)])
def test_the_report_says_what_becomes_of_what_is_not_finite(config, told):
    assert str(quantize_(Two(), config)).count('nonfinite="propagate"') == told
