"""The buffers of int8 layers after loading, moving and casting."""

from __future__ import annotations

import copy

import pytest
import torch
from support import fresh
from tensors import GatedMLP, normal, same
from torch import nn

from skuda.torch import (
    CodesLinear,
    Dynamic,
    FakeQuantLinear,
    SmoothedLinear,
    StaticLinear,
    fuse_,
    observe,
    quantize_,
)
from skuda.torch.formats.int8 import quantized_weight

N, K = 4, 8


def static(rng):
    weight = quantized_weight(normal(rng, N, K))
    return StaticLinear(*weight, normal(rng, N), input_scale=torch.tensor([0.02])), normal(rng, 3, K)


def smoothed(rng):
    smooth = torch.from_numpy(rng.uniform(0.5, 2, K).astype("float32"))
    return SmoothedLinear(*quantized_weight(normal(rng, N, K)), normal(rng, N), smooth=smooth), normal(rng, 3, K)


def codes(rng):
    weight, steps = quantized_weight(normal(rng, N, K)), torch.tensor([0.02])
    layer = CodesLinear(*weight, normal(rng, N), input_scale=steps, output_scale=steps)
    return layer, torch.from_numpy(rng.integers(-127, 127, (3, K), "int8", endpoint=True))


def emptied(layer):
    torch.use_deterministic_algorithms(mode=True)  # memory without values is filled with the largest ones
    try:
        return layer.to_empty(device="cpu")
    finally:
        torch.use_deterministic_algorithms(mode=False)


@pytest.mark.parametrize("make", [smoothed, static, codes])
@pytest.mark.parametrize("assign", [False, True])
def test_a_layer_made_without_data_is_whole_after_loading(make, assign):
    layer, x = make(fresh(assign))
    want, without = layer(x), copy.deepcopy(layer).to("meta")
    again = without if assign else emptied(without)
    again.load_state_dict(layer.state_dict(), assign=assign)
    assert same(again(x), want)
    assert all(tensor.device.type == "cpu" for tensor in again.buffers())


@pytest.mark.parametrize("fused", [False, True])
def test_float_weights_are_not_loaded_as_codes(fused):
    model = GatedMLP(K, N)
    state = copy.deepcopy(model.state_dict())
    quantize_(model, Dynamic())
    assert not fused or fuse_(model).fused
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"gate_proj\.weight.*load before quantizing"):
        model.load_state_dict(state, strict=False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_observed_scales_do_not_depend_on_the_default_dtype(default):
    rng = fresh(default)
    linear, x = nn.Linear(K, N), normal(rng, 3, K)
    torch.set_default_dtype(default)
    try:
        layer = FakeQuantLinear(linear, activation="tensor")
    finally:
        torch.set_default_dtype(torch.float32)
    with observe(layer):
        layer(x)
    assert same(layer.input_scale, (x.abs().max() / 127).reshape(1))
    assert same(layer.to_int8().input_scale, layer.input_scale)
