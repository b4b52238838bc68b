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
    DynamicLinear,
    FakeQuantLinear,
    MixedLinear,
    SmoothedLinear,
    StaticLinear,
    fuse_,
    observe,
    quantize_,
)
from skuda.torch.int8_linear import quantized_weight

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


@pytest.mark.parametrize("make", [smoothed, static, codes])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_call_what_they_explain(make, dtype):
    layer, x = make(fresh(dtype))
    x = x if make is codes else x.to(dtype)
    name, arguments = layer.call(x)
    if make is smoothed:
        assert arguments["activation"].dtype is torch.float32
        taken = {"activation": torch.ops.skuda.smooth(x, layer.smooth)}
    else:
        taken = {"act_q": layer.codes(x) if make is static else x}
    assert same(getattr(torch.ops.skuda, name)(**{**arguments, **taken}), layer(x))


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


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("lead", [(), (0,), (2, 3)])
@pytest.mark.parametrize(("n", "k"), [(N, 0), (0, K), (0, 0)])
def test_gradients_of_layers_without_channels_are_those_of_the_float_layer(lead, n, k):
    want, rng = nn.Linear(k, n), fresh(lead, n, k)
    mixed = MixedLinear(copy.deepcopy(want))
    frozen = DynamicLinear.from_linear(want)
    frozen.bias = frozen.bias.clone().requires_grad_()
    given = normal(rng, *lead, k)
    x, y, z = (given.clone().requires_grad_() for _ in range(3))
    for layer, each in ((want, x), (mixed, y), (frozen, z)):
        layer(each).sum().backward()
    for got in (mixed.weight, mixed.bias, y):
        assert got.grad.shape == got.shape
    assert same(mixed.weight.grad, want.weight.grad)
    assert same(mixed.bias.grad, want.bias.grad)
    assert same(frozen.bias.grad, want.bias.grad)
    assert z.grad.shape == z.shape
