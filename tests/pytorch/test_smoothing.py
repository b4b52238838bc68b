"""`SmoothStatic`: the bits of `skuda.tools.smoothquant`, the search for alpha, and folding into norms."""

from __future__ import annotations

import copy
import math
from functools import partial

import numpy as np
import pytest
import torch
from support import dispatcher, fresh, sampled
from tensors import calibrated
from torch import nn

from skuda.registry import InvalidProblem
from skuda.tools.smoothquant import ActivationRanges, SmoothQuantLayer, smoothing_factors
from skuda.torch import Calibration, SmoothStatic, calibrate, quantize_
from skuda.torch.int8_linear import quantized_weight
from skuda.torch.smoothing import ALPHAS

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def tensor(rng, *shape, dtype=torch.float32):
    """Numbers some of whose columns are much larger than others."""
    return torch.from_numpy(rng.standard_normal(shape) * np.exp(1.5 * rng.standard_normal(shape[-1]))).to(dtype)


def linear(rng, n, k, *, bias=True, dtype=torch.float32):
    made = nn.Linear(k, n, bias=bias, dtype=dtype)
    with torch.no_grad():
        made.weight.copy_(tensor(rng, n, k))
        if bias:
            made.bias.copy_(tensor(rng, n))
    return made


def layer_of_tools(layer, ranges, alpha):
    """The layer that `skuda.tools.smoothquant` makes."""
    bias = None if layer.bias is None else layer.bias.detach().float().numpy()
    return SmoothQuantLayer.quantize(dispatcher(), ranges, layer.weight.detach(), bias, alpha=alpha)


def same(found, want, x):
    """Check that a layer holds and computes what one of `skuda.tools.smoothquant` does."""
    assert np.array_equal(found.weight_q.numpy(), want.weight_q)
    assert np.array_equal(found.weight_scale.numpy()[:, 0], want.weight_scale)
    assert found.input_scale.item() == want.act_scale
    assert found.input_scale.dtype is torch.float32
    if want.alpha is None:
        assert found.smooth is None
    else:
        assert np.array_equal(found.smooth.numpy(), want.smooth)
    assert torch.equal(found(x), torch.from_numpy(want.run(dispatcher(), x)).to(x.dtype))


@pytest.mark.parametrize(
    ("dtype", "alpha", "bias"),
    sampled(
        [pytest.param(t, a, b) for t in FLOATS for a in (None, 0, 0.5, 0.83, 1) for b in (True, False)],
        3,
        each=lambda t, *_: t,
    ),
)
def test_a_layer_has_the_bits_of_the_other_half(dtype, alpha, bias):
    rng = fresh(dtype, alpha, bias)
    n, k = rng.integers(1, 40, 2).tolist()
    layer, x = linear(rng, n, k, bias=bias, dtype=dtype), tensor(rng, 5, k, dtype=dtype)
    with torch.no_grad():
        layer.weight[:, 0] = 0
        x[:, -1] = 0
    ranges = ActivationRanges()
    ranges.observe("0", x)
    want = layer_of_tools(layer, ranges.channel_max("0"), alpha)
    model = nn.Sequential(layer)
    report = quantize_(model, SmoothStatic(calibrated(model, x), alpha), strict=True)
    assert dict(report.converted) == {"0": "StaticLinear"}
    same(model[0], want, x)


def test_an_input_of_zeros():
    model, x = nn.Sequential(nn.Linear(4, 3)), torch.zeros(2, 4)
    config = SmoothStatic(calibrated(model, x))
    want = layer_of_tools(model[0], np.zeros(4, np.float32), 0.5)
    quantize_(model, config, strict=True)
    same(model[0], want, x)


# --- what cannot be served -------------------------------------------------------------------------------------------


def left(model, config):
    report = quantize_(model, config)
    assert not report.converted
    return report.left["0"]


def test_layers_that_calibration_did_not_see_stay():
    model = nn.Sequential(nn.Linear(3, 3))
    assert "did not run" in left(model, SmoothStatic(calibrated(model)))
    other = nn.ModuleDict({"other": nn.Linear(3, 3)})
    assert "no inputs of 0" in left(model, SmoothStatic(calibrated(other)))
    smaller = nn.Sequential(nn.Linear(2, 2))
    assert "2 channels" in left(model, SmoothStatic(calibrated(smaller, torch.ones(1, 2))))


def test_values_that_are_not_finite_stay():
    model = nn.Sequential(nn.Linear(3, 3))
    assert "infinite input" in left(model, SmoothStatic(calibrated(model, torch.full((1, 3), torch.inf))))
    config = SmoothStatic(calibrated(model, torch.ones(1, 3)))
    with torch.no_grad():
        model[0].weight[1, 1] = torch.nan
    assert "finite" in left(model, config)


def test_a_search_needs_rows():
    model, x = nn.Sequential(nn.Linear(3, 3)), torch.ones(2, 3)
    assert "no finite rows" in left(model, SmoothStatic(calibrated(model, x, rows=0), "search"))
    x[:, 1] = torch.nan
    assert "no finite rows" in left(model, SmoothStatic(calibrated(model, x), "search"))


@pytest.mark.parametrize("alpha", [-0.1, 1.5, math.nan, True, "best", np.float32(0.5), ()])
def test_bad_strengths(alpha):
    with pytest.raises(InvalidProblem, match="alpha"):
        SmoothStatic(calibrated(nn.Sequential()), alpha)


def test_bad_calibrations():
    for calibration in (None, Calibration(), Calibration):
        with pytest.raises(InvalidProblem, match="calibration"):
            SmoothStatic(calibration)
    with calibrate(nn.Sequential()) as calibration, pytest.raises(InvalidProblem, match="a finished"):
        SmoothStatic(calibration)
    with pytest.raises(InvalidProblem, match="fold"):
        SmoothStatic(calibration, fold=1)


# --- the search ------------------------------------------------------------------------------------------------------


def errors(layer, x):
    """The squared error of the layer of `skuda.tools.smoothquant` at each strength."""
    weight = layer.weight.detach().double()
    exact = x.double() @ weight.T
    plain = copy.deepcopy(layer)
    plain.bias = None
    found = [
        layer_of_tools(plain, x.abs().amax(0).float().numpy(), alpha).run(dispatcher(), x.float()) for alpha in ALPHAS
    ]
    return [float((torch.from_numpy(y).double() - exact).square().sum()) for y in found]


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_search_finds_the_least_error(dtype):
    rng = fresh(dtype)
    layer, x = linear(rng, 12, 20, dtype=dtype), tensor(rng, 30, 20, dtype=dtype)
    model = nn.Sequential(copy.deepcopy(layer))
    calibration = calibrated(model, x)
    quantize_(model, SmoothStatic(calibration, "search"), strict=True)
    found = errors(layer, x)
    same(model[0], layer_of_tools(layer, x.abs().amax(0).float().numpy(), ALPHAS[found.index(min(found))]), x)
    again = nn.Sequential(layer)
    quantize_(again, SmoothStatic(calibration, "search"), strict=True)
    assert torch.equal(again[0].smooth, model[0].smooth)


def test_of_equal_strengths_the_smallest_is_taken():
    layer, x = nn.Linear(3, 2), torch.tensor([[1.0, 10, 100]])
    nn.init.zeros_(layer.weight)  # every strength is exact
    model = nn.Sequential(layer)
    quantize_(model, SmoothStatic(calibrated(model, x), "search"), strict=True)
    want = smoothing_factors(x[0].numpy(), np.zeros(3, np.float32), ALPHAS[0])
    assert np.array_equal(model[0].smooth.numpy(), want)
    assert tuple(sorted(set(ALPHAS))) == ALPHAS
    assert (ALPHAS[0], ALPHAS[-1]) == (0, 1)


# --- folding ---------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention and a feed-forward part, each after a norm."""

    def __init__(self, rng, norm, width=16, dtype=torch.float32):
        super().__init__()
        self.norm1, self.norm2 = norm(width), norm(width)
        self.q, self.k, self.v, self.o = (linear(rng, width, width, dtype=dtype) for _ in range(4))
        self.up, self.down = linear(rng, 2 * width, width, dtype=dtype), linear(rng, width, 2 * width, dtype=dtype)
        with torch.no_grad():
            for layer in (self.q, self.k, self.v, self.o, self.up, self.down):
                layer.weight.mul_(0.1)
            for parameter in (*self.norm1.parameters(), *self.norm2.parameters()):
                parameter.copy_(tensor(rng, width))
        self.to(dtype)

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.o(nn.functional.scaled_dot_product_attention(self.q(h), self.k(h), self.v(h)))
        return x + self.down(nn.functional.silu(self.up(self.norm2(x))))


NORMS = {"norm1": ("q", "k", "v"), "norm2": ("up",)}


class OddRMSNorm(nn.Module):
    """As in models on Hugging Face: a norm of its own."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        f = x.float()
        return self.weight * (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class ShiftedRMSNorm(OddRMSNorm):
    """As Gemma's: scales by 1 + weight."""

    def forward(self, x):
        f = x.float()
        return (1 + self.weight) * (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class CountingRMSNorm(OddRMSNorm):
    """Changes when it runs."""

    def __init__(self, width):
        super().__init__(width)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def inputs_of(model, x):
    """The input of every linear layer and norm."""
    found, handles = {}, []
    for name, module in model.named_modules():
        if name and not list(module.children()):

            def keep(_, args, name=name):
                found[name] = args[0].detach()

            handles.append(module.register_forward_pre_hook(keep))
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, OddRMSNorm])
@pytest.mark.parametrize("alpha", [0.5, "search"])
def test_a_folded_model_is_as_close_as_its_steps_allow(norm, alpha):
    rng = fresh(norm, alpha)
    model, x = Attention(rng, norm), tensor(rng, 2, 6, 16)
    plain, seen = copy.deepcopy(model), inputs_of(model, x)
    report = quantize_(model, SmoothStatic(calibrated(model, x), alpha), strict=True)
    assert dict(report.folded) == NORMS
    assert not report.not_folded
    assert "folded into norm1: q, k, v" in str(report)
    for name in ("q", "k", "v", "up"):
        source = "norm2" if name == "up" else "norm1"
        layer, float_layer = model.get_submodule(name), plain.get_submodule(name)
        assert layer.smooth is None
        # The factors, as the norm tells them.
        factors = plain.get_submodule(source).weight.double() / model.get_submodule(source).weight.double()
        with torch.no_grad():
            given = plain.get_submodule(source)(seen[source])
            want = given.double() @ float_layer.weight.double().T + float_layer.bias.double()
            got = layer(model.get_submodule(source)(seen[source])).double()
        step = layer.input_scale.double()
        # |a'w' - aw| <= |a||w' - w| + |a' - a||w| + |a' - a||w' - w|, and a step moves a value by at most its half.
        a, w = (given.double() / factors).abs(), (float_layer.weight.double() * factors).abs()
        da, dw = step / 2, layer.weight_scale.double() / 2
        bound = a @ dw.expand_as(w).T + da * w.sum(1) + 16 * da * dw[:, 0]
        # Sums, quotients and products in f32 on the way: less than 64 of them.
        bound += 64 * 2**-24 * (a @ w.T + float_layer.bias.double().abs() + want.abs())
        assert ((got - want).abs() <= bound).all()


def test_all_layers_of_a_norm_get_the_factors_of_all_their_weights():
    rng = fresh()
    model, x = Attention(rng, nn.LayerNorm), tensor(rng, 2, 6, 16)
    plain = copy.deepcopy(model)
    maxima = {name: value.abs().flatten(0, -2).amax(0) for name, value in inputs_of(model, x).items()}
    quantize_(model, SmoothStatic(calibrated(model, x), 0.7), strict=True)
    for norm, names in NORMS.items():
        weights = torch.stack([plain.get_submodule(name).weight.detach().abs().amax(0) for name in names]).amax(0)
        factors = torch.from_numpy(smoothing_factors(maxima[names[0]].numpy(), weights.numpy(), 0.7))
        for part in ("weight", "bias"):
            old, new = (getattr(m.get_submodule(norm), part).detach() for m in (plain, model))
            assert torch.equal(new, old / factors)
        for name in names:
            codes, scale = quantized_weight(plain.get_submodule(name).weight * factors)
            assert torch.equal(model.get_submodule(name).weight_q, codes)
            assert torch.equal(model.get_submodule(name).weight_scale[:, 0], scale)
    assert model.o.smooth is not None
    same(model.o, layer_of_tools(plain.o, maxima["o"].numpy(), 0.7), x)


def test_a_bf16_model_keeps_its_dtype_and_its_flags():
    rng = fresh()
    model, x = Attention(rng, OddRMSNorm, dtype=torch.bfloat16), tensor(rng, 2, 6, 16, dtype=torch.bfloat16)
    model.requires_grad_(requires_grad=False)
    model.norm2.requires_grad_()
    report = quantize_(model, SmoothStatic(calibrated(model, x)), strict=True)
    assert dict(report.folded) == NORMS
    assert model.norm1.weight.dtype is torch.bfloat16
    assert not model.norm1.weight.requires_grad
    assert model.norm2.weight.requires_grad
    assert set(dict(model.named_parameters())) == {"norm1.weight", "norm2.weight"}


def test_folding_does_not_run_the_norm_itself():
    rng = fresh()
    model, x = Attention(rng, CountingRMSNorm), tensor(rng, 2, 6, 16)
    calibration = calibrated(model, x)
    calls = model.norm1.calls.clone()
    report = quantize_(model, SmoothStatic(calibration), strict=True)
    assert dict(report.folded) == NORMS
    assert torch.equal(model.norm1.calls, calls)


def hooked(model):
    model.k.register_forward_hook(lambda *_: None)


def infinite(model):
    with torch.no_grad():
        model.v.weight[2, 3] = torch.inf


class Residual(Attention):
    def forward(self, x):
        h = self.norm1(x)
        return h + self.q(h) + self.k(h) + self.v(h)


NOT_FOLDED = {
    "scales by one plus its weight": (Attention, ShiftedRMSNorm, None, "not proportional"),
    "is used elsewhere": (Residual, nn.LayerNorm, None, "add"),
    "a layer of it stays": (Attention, nn.LayerNorm, hooked, "k stays as it is"),
    "a layer of it is broken": (Attention, nn.LayerNorm, infinite, "finite"),
    "has hooks": (
        Attention, nn.LayerNorm, lambda model: model.norm1.register_forward_hook(lambda *_: None), "hooks"
    ),
    "has no weight": (Attention, partial(nn.LayerNorm, elementwise_affine=False), None, "no weight of shape [16]"),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "norm", "change", "reason"), NOT_FOLDED.values(), ids=NOT_FOLDED)
def test_a_norm_that_cannot_be_folded_keeps_its_weight_and_its_layers_divide_for_themselves(kind, norm, change, reason):
    rng = fresh(reason)
    model = kind(rng, norm)
    config = SmoothStatic(calibrated(model, tensor(rng, 2, 6, 16)))
    if change is not None:
        change(model)
    plain = copy.deepcopy(model)
    report = quantize_(model, config)
    assert "norm1" not in report.folded
    assert reason in report.not_folded["norm1"]
    for name, weight in plain.norm1.named_parameters():
        assert torch.equal(model.norm1.get_parameter(name), weight)
    for name in NORMS["norm1"]:
        if name in report.converted:
            layer, maxima = plain.get_submodule(name), config.calibration.maxima[name].numpy()
            same(model.get_submodule(name), layer_of_tools(layer, maxima, config.alpha), torch.ones(2, 16))


def test_a_norm_one_of_whose_layers_fails_at_last_is_not_folded():
    rng = fresh()
    model, x = Attention(rng, nn.LayerNorm), tensor(rng, 2, 6, 16)
    config = SmoothStatic(calibrated(model, x))
    model.v.double().weight = nn.Parameter(model.v.weight.detach().float())  # which leaves a bias that no layer takes
    before = model.norm1.weight
    report = quantize_(model, config)
    assert "bias" in report.left["v"]
    assert "not all of its layers" in report.not_folded["norm1"]
    assert model.norm1.weight is before
    assert model.q.smooth is not None
    assert torch.equal(model.q.smooth, model.k.smooth)
    assert dict(report.folded) == {"norm2": ("up",)}


def test_a_quotient_that_f16_cannot_hold_is_not_folded():
    rng = fresh()
    model, x = Attention(rng, OddRMSNorm, dtype=torch.float16), tensor(rng, 2, 6, 16, dtype=torch.float16)
    with torch.no_grad():
        model.norm1.weight.fill_(1e-4)  # normal in f16, unlike a hundredth of it
    calibration = calibrated(model, x)
    for name in NORMS["norm1"]:
        calibration.maxima[name] = torch.full((16,), 1e6)
    config = SmoothStatic(calibration, 1)
    report = quantize_(model, config)
    assert "cannot hold" in report.not_folded["norm1"]
    assert (model.norm1.weight == torch.tensor(1e-4, dtype=torch.float16)).all()
    assert model.q.smooth is not None


@pytest.mark.parametrize("more", [{"fold": False}, {"alpha": None}])
def test_nothing_is_folded_where_nothing_shall_be(more):
    rng = fresh()
    model = Attention(rng, nn.LayerNorm)
    before = model.norm1.weight
    report = quantize_(model, SmoothStatic(calibrated(model, tensor(rng, 2, 6, 16)), **more), strict=True)
    assert model.norm1.weight is before
    assert not report.folded
    assert not report.not_folded
    assert (model.q.smooth is None) == ("alpha" in more)


def test_strict_folds_nothing_if_it_refuses():
    rng = fresh()
    model, x = Attention(rng, nn.LayerNorm), tensor(rng, 2, 6, 16)
    config = SmoothStatic(calibrated(model, x))
    with torch.no_grad():
        model.down.weight[2, 3] = torch.inf
    before = model.norm1.weight.detach().clone()
    with pytest.raises(InvalidProblem, match="down"):
        quantize_(model, config, strict=True)
    assert torch.equal(model.norm1.weight, before)
    assert all(type(model.get_submodule(name)) is nn.Linear for name in ("q", "k", "v", "o", "up", "down"))
