"""`linear_dynamic`, `linear_scaled`, `linear_static` and `linear_codes`: one product with four fronts."""

from __future__ import annotations

import pytest
import torch
from support import fresh

from skuda.torch import (
    linear_codes,
    linear_dynamic,
    linear_scaled,
    linear_static,
)

SKUDA = torch.ops.skuda


@pytest.fixture(params=range(4))
def layer(request):
    rng = fresh("functions", request.param)
    m, n, k = (int(rng.integers(1, 40)) for _ in range(3))
    torch.manual_seed(int(rng.integers(2**31)))
    weight_q = torch.randint(-127, 128, (n, k), dtype=torch.int8)
    x = torch.randn(2, m, k)
    return {"x": x, "weight_q": weight_q, "weight_scale": torch.rand(n) + 0.01, "bias": torch.randn(n)}


def test_a_dynamic_layer_is_a_scaled_one_of_its_codes(layer):
    x, *weight = layer.values()
    codes, scale, _ = SKUDA.dynamic_range(x, q_min=-127, q_max=127, output_element="s8")
    given = {"epilogue": "bias_silu", "output_element": "bf16"}
    assert torch.equal(linear_scaled(codes, scale, *weight, **given), linear_dynamic(x, *weight, **given))


def test_a_static_layer_is_a_scaled_one_with_equal_scales(layer):
    x, *weight = layer.values()
    scale = torch.rand(1) + 0.01
    codes = SKUDA.quantize_per_tensor(x, scale, torch.zeros(1, dtype=torch.int32), q_min=-127, output_element="s8")
    static = linear_static(codes, scale, *weight, output_element="f32")
    assert torch.equal(static, linear_scaled(codes, scale.expand(x.shape[:-1]), *weight, output_element="f32"))
    sums = codes.double() @ weight[0].double().T
    exact = sums * scale.double() * weight[1].double() + weight[2].double()
    bound = (sums.abs() * scale * weight[1] + weight[2].abs()) * 4 * 2**-24
    assert ((static.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("element", ["s8", "u8"])
def test_codes_are_those_of_the_real_output(layer, element):
    x, *weight = layer.values()
    scale, step, zero = torch.rand(1) + 0.01, torch.rand(1) + 0.5, torch.randint(-9, 99, (1,), dtype=torch.int32)
    codes = SKUDA.quantize_per_tensor(x, scale, torch.zeros(1, dtype=torch.int32), q_min=-127, output_element="s8")
    real = linear_static(codes, scale, *weight, epilogue="bias_relu", output_element="f32")
    want = SKUDA.quantize_per_tensor(real, step, zero, output_element=element)
    got = linear_codes(codes, scale, *weight, step, zero, epilogue="bias_relu", output_element=element)
    assert got.dtype is want.dtype
    assert torch.equal(got, want)
