"""Gradients of the functions: their formulas, refusals, and that no gradient is lost silently."""

import numpy as np
import pytest
import torch
from support import fresh, sampled
from tensors import GatedMLP, assert_same, normal
from torch import nn
from torch.autograd import forward_ad

from skuda.registry.errors import InvalidProblem
from skuda.torch import (
    CodesLinear,
    Dynamic,
    DynamicLinear,
    StaticLinear,
    fake_quantize,
    frozen_linear,
    fuse_,
    linear_dynamic,
    mixed_linear,
    quantize_,
)
from skuda.torch.formats.int8 import quantized_weight
from skuda.torch.linear.autograd import dequantized, round_rows

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LEADING = ((), (3,), (0,), (1,), (2, 3), (2, 0, 3), (2, 1, 3))


def compute(dtype):
    return torch.float64 if dtype is torch.float64 else torch.float32


def codes(x, scale):
    """Return the code before clamping, of each element."""
    return (x.to(scale.dtype) / scale).round()


def layer(rng, k=24, n=7):
    weight_q, scale = quantized_weight(normal(rng, n, k))
    return weight_q, scale, normal(rng, n)


# --- fake_quantize ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_row", [True, False])
@pytest.mark.parametrize("leading", sampled(LEADING, 3))
@pytest.mark.parametrize("dtype", FLOATS)
def test_fake_quantize_has_the_codes_and_the_inclusive_mask(dtype, leading, per_row):
    rng = fresh(dtype, leading, per_row)
    scale = torch.from_numpy(rng.uniform(0.001, 0.1, leading if per_row else 1)).to(compute(dtype))
    spread = scale.unsqueeze(-1) if per_row else scale
    # Steps around both bounds, of which those at halves are ties.
    steps = torch.from_numpy(rng.integers(-520, 520, (*leading, 40)) / 4).to(compute(dtype))
    steps[..., :2] = torch.tensor([200, 3])
    x = (steps * spread).to(dtype).requires_grad_()
    y = fake_quantize(x, scale)
    t = codes(x.detach(), spread)
    assert_same(y.detach(), (t.clamp(-127, 127) * spread).to(dtype) + 0.0)
    grad = normal(rng, *y.shape, dtype=dtype)
    y.backward(grad)
    assert_same(x.grad, torch.where(t.abs() <= 127, grad, 0))
    assert y.numel() == 0 or 0 < (t.abs() > 127).sum() < t.numel()


def test_fake_quantize_of_what_is_not_finite():
    x = torch.tensor([[np.nan, np.inf, -np.inf, 1.0]], requires_grad=True)
    scale = torch.tensor([0.5], requires_grad=True)
    y = fake_quantize(x, scale)
    assert_same(y.detach(), torch.tensor([[np.nan, np.nan, np.nan, 1.0]]))
    y.sum().backward()
    assert_same(x.grad, torch.tensor([[0.0, 0.0, 0.0, 1.0]]))
    assert float(scale.grad) == 0  # 127 - 127 + 0, and nothing for NaN


@pytest.mark.parametrize("per_row", [True, False])
def test_learned_scale_has_the_slope_of_finite_differences(per_row):
    """With the rounding error held constant, which is what goes straight through, the result is differentiable."""
    rng = fresh(per_row)
    x = normal(rng, 5, 32, dtype=torch.float64)
    scale = torch.from_numpy(rng.uniform(0.005, 0.012, 5 if per_row else 1)).requires_grad_()  # some are clipped
    grad = normal(rng, 5, 32, dtype=torch.float64)
    fake_quantize(x, scale).backward(grad)
    spread = scale.detach().unsqueeze(-1) if per_row else scale.detach()
    error = (x / spread).round() - x / spread
    clipped = codes(x, spread).abs() > 127
    assert 0 < clipped.sum() < clipped.numel()

    def loss(s):
        within = s * (x / s + error)
        beyond = s * 127 * x.sign()
        terms = grad * torch.where(clipped, beyond, within)
        return terms.sum(-1) if per_row else terms.sum()

    h = 1e-6 * spread
    slope = (loss(spread + h) - loss(spread - h)) / (2 * h).squeeze()
    torch.testing.assert_close(scale.grad, (slope / (127 * 32) ** 0.5).reshape(scale.shape), rtol=1e-6, atol=1e-8)


# --- linear layers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("leading", LEADING)
@pytest.mark.parametrize("dtype", sampled(FLOATS, 2))
def test_gradients_of_the_linear_functions(dtype, leading, bias):
    rng = fresh(dtype, leading, bias)
    master = normal(rng, 7, 24).requires_grad_()
    weight_q, scale = quantized_weight(master)
    b = normal(rng, 7).requires_grad_() if bias else None
    x = normal(rng, *leading, 24, dtype=dtype).requires_grad_()
    grad = normal(rng, *leading, 7, dtype=dtype)
    wanted = linear_dynamic(x.detach(), weight_q, scale, None if b is None else b.detach())
    rows = grad.reshape(-1, 7)
    for function, weights in ((frozen_linear, ()), (mixed_linear, (master,))):
        given = (x, weight_q, scale, b) if function is frozen_linear else (x, master, b, weight_q, scale)
        y = function(*given)
        assert_same(y.detach(), wanted)
        found = torch.autograd.grad(y, [t for t in (x, b, *weights) if t is not None], grad)
        assert_same(found[0], grad @ dequantized(weight_q, scale, dtype))
        if bias:
            assert_same(found[1], rows.sum(0).float())
        if weights:
            assert_same(found[-1], (rows.t() @ x.detach().reshape(-1, 24)).float())


def test_only_what_requires_grad_gets_one():
    rng = fresh()
    weight_q, scale, bias = layer(rng)
    x = normal(rng, 3, 24)
    master = normal(rng, 7, 24)
    assert frozen_linear(x, weight_q, scale, bias).grad_fn is None
    assert mixed_linear(x, master, bias, weight_q, scale).grad_fn is None
    assert fake_quantize(x, torch.ones(3)).grad_fn is None
    with torch.no_grad():
        assert DynamicLinear(weight_q, scale, bias)(x.requires_grad_()).grad_fn is None
    y = mixed_linear(x.detach(), master.requires_grad_(), bias, weight_q, scale)
    y.sum().backward()
    assert x.grad is None
    assert bias.grad is None
    assert master.grad is not None


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_autocast_casts_the_input_of_a_frozen_layer_and_its_gradient_back(low):
    rng = fresh(low)
    module = DynamicLinear(*layer(rng))
    x = normal(rng, 3, 24).requires_grad_()
    with torch.autocast("cpu", low):
        y = module(x)
    assert_same(y.detach(), module(x.detach().to(low)))
    grad = normal(rng, 3, 7, dtype=low)
    y.backward(grad)
    assert_same(x.grad, (grad @ dequantized(module.weight_q, module.weight_scale.view(-1), low)).float())


# --- what is refused -------------------------------------------------------------------------------------------------


def _results(rng):
    """Return each function's result and what it depends on."""
    weight_q, scale, bias = layer(rng)
    x, master = normal(rng, 3, 24).requires_grad_(), normal(rng, 7, 24).requires_grad_()
    steps = torch.full((3,), 0.01).requires_grad_()
    return {
        "frozen": (frozen_linear(x, weight_q, scale, bias), x),
        "mixed": (mixed_linear(x, master, bias, weight_q, scale), x),
        "mixed weight": (mixed_linear(x.detach(), master, bias, weight_q, scale), master),
        "fake": (fake_quantize(x, torch.full((3,), 0.01)), x),
        "learned": (fake_quantize(x.detach(), steps), steps),
    }


@pytest.mark.parametrize("name", ["frozen", "mixed", "mixed weight", "fake", "learned"])
def test_a_second_derivative_is_refused_and_the_first_with_create_graph_is_not(name):
    y, leaf = _results(fresh(name))[name]
    (plain,) = torch.autograd.grad((y * y).sum(), leaf, retain_graph=True)
    (first,) = torch.autograd.grad((y * y).sum(), leaf, create_graph=True)
    assert_same(first.detach(), plain)
    with pytest.raises(InvalidProblem, match=r"skuda.torch: gradient must not be differentiated.*create_graph"):
        torch.autograd.grad(first.sum(), leaf)


def test_torch_func_takes_first_derivatives_and_vmap_is_refused():
    rng = fresh()
    weight_q, scale, bias = layer(rng)
    x = normal(rng, 3, 24)
    grad = torch.func.grad(lambda x: frozen_linear(x, weight_q, scale, bias).square().sum())(x)
    y = linear_dynamic(x, weight_q, scale, bias)
    assert_same(grad, (2 * y) @ dequantized(weight_q, scale, torch.float32))
    for function in (
        lambda row: frozen_linear(row, weight_q, scale, bias),
        lambda row: fake_quantize(row, torch.ones(1)),
    ):
        with pytest.raises(InvalidProblem, match=r"skuda.torch: input must not be mapped over"):
            torch.vmap(function)(x)


def _derivative(way, function, x):
    """Return a derivative of a function at x, in one of torch's ways."""
    if way == "dual":
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(function(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
    if way == "compiled":
        found = torch.compile(lambda x: torch.func.jvp(function, (x,), (x,))[1], backend="aot_eager", fullgraph=True)
        return found(x)
    return {
        "jvp": lambda: torch.func.jvp(function, (x,), (torch.ones_like(x),))[1],
        "linearize": lambda: torch.func.linearize(function, x)[1](torch.ones_like(x)),
        "jacfwd": lambda: torch.func.jacfwd(function)(x),
        "grad": lambda: torch.func.grad(lambda x: function(x).sum())(x),
        "vjp": lambda: torch.func.vjp(function, x)[1](torch.ones(3, 7)),
    }[way]()


@pytest.mark.parametrize("way", ["dual", "jvp", "linearize", "jacfwd", "compiled", "grad", "vjp"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # torch's own
def test_a_derivative_that_an_op_does_not_have_is_refused_and_not_zero(way):
    rng = fresh(way)
    weight_q, scale, bias = layer(rng)
    x, gated = normal(rng, 3, 24), GatedMLP(24, 48, nn.SiLU())
    quantize_(gated, Dynamic())
    fuse_(gated)
    modules = _modules(rng)
    functions = {
        "op": lambda x: linear_dynamic(x, weight_q, scale, bias),
        "several results": lambda x: torch.ops.skuda.dynamic_range(x, q_min=-127, q_max=127, output_element="s8")[1],
        "numbers": lambda x: torch.ops.skuda.fake_quantize.number(x, 0.1, 0, q_min=-127, q_max=127),
        "smooth": lambda x: torch.ops.skuda.smooth(x, torch.ones(24)),
        "static": modules["static"],
        "dynamic": modules["dynamic"],
        "fused": gated,
    }
    reverse = way in ("grad", "vjp")
    for name, function in functions.items():
        with torch.no_grad():
            function(x)  # what a launch serves afterwards
        if reverse and name in ("dynamic", "fused"):
            continue  # has a gradient
        rule = "be detached" if reverse else "have none: there are no forward-mode derivatives"
        with pytest.raises(Exception, match=rule):
            _derivative(way, function, x)


@pytest.mark.parametrize("name", ["frozen", "mixed", "fake", "rows"])
@pytest.mark.parametrize("way", ["dual", "jvp"])
def test_forward_mode_through_a_function_is_refused(way, name):
    rng = fresh(way, name)
    weight_q, scale, bias = layer(rng)
    master = normal(rng, 7, 24).requires_grad_()
    function = {
        "frozen": lambda x: frozen_linear(x, weight_q, scale, bias),
        "mixed": lambda x: mixed_linear(x, master, bias, weight_q, scale),
        "fake": lambda x: fake_quantize(x, torch.ones(3)),
        "rows": round_rows,
    }[name]
    with pytest.raises((InvalidProblem, NotImplementedError), match="forward"):
        _derivative(way, function, normal(rng, 3, 24))


def _modules(rng):
    weight_q, scale, bias = layer(rng)
    fixed = {"input_scale": torch.tensor([0.02])}
    return {
        "dynamic": DynamicLinear(weight_q, scale, bias),
        "static": StaticLinear(weight_q, scale, bias, **fixed, smooth=torch.ones(24)),
        "codes": CodesLinear(weight_q, scale, bias, **fixed, output_element="f32"),
    }


@pytest.mark.parametrize("name", ["dynamic", "static", "codes"])
def test_no_module_stops_a_gradient_silently(name):
    rng = fresh(name)
    x = normal(rng, 3, 24)
    asked = [
        key for key, value in _modules(rng)[name]._buffers.items() if value is not None and value.is_floating_point()
    ]
    for key in ("input", *asked):
        module = _modules(rng)[name]
        given = x.mul(10).to(torch.int8) if name == "codes" else x.clone()
        leaf = given if key == "input" else module._buffers[key]
        if not leaf.is_floating_point():
            continue  # codes have no gradient, and torch refuses to give them one
        leaf.requires_grad_()
        if name == "dynamic" and key in ("input", "bias"):
            module(given).sum().backward()
            want = torch.ones(3, 7) @ dequantized(module.weight_q, module.weight_scale.view(-1), torch.float32)
            assert_same(leaf.grad, want if key == "input" else torch.full((7,), 3.0))
        else:
            with pytest.raises(InvalidProblem, match="detached"):
                module(given)
