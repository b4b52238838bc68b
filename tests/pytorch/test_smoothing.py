"""`SmoothStatic` and `SmoothDynamic`: the bits of their layers, the search for alpha, and folding into norms."""

from __future__ import annotations

import copy
import math
from functools import partial

import decoders
import numpy as np
import pytest
import torch
from support import dispatcher, fresh, sampled
from tensors import GatedMLP, calibrated, normal
from torch import nn

from skuda.registry import InvalidProblem
from skuda.tools.smoothquant import SmoothQuantLayer, smoothing_factors
from skuda.torch import (
    Calibration,
    Dynamic,
    DynamicLinear,
    Int8Linear,
    SmoothDynamic,
    SmoothedLinear,
    SmoothStatic,
    calibrate,
    fuse_,
    linear_dynamic,
    linear_static,
    load_,
    quantize_,
    save,
)
from skuda.torch.convert.dequantize import float_linear
from skuda.torch.convert.smoothing import ALPHAS
from skuda.torch.formats.int8 import quantized_weight
from skuda.torch.int4 import int4_weight
from skuda.torch.linear.int8_linear import propagates

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
SIZES = (None, 32, 64, 128, 0)
TRIED = (None, *ALPHAS)
KINDS = (SmoothStatic, SmoothDynamic)


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


@pytest.mark.parametrize("kind", KINDS)
def test_factors_with_which_inputs_overflow_stay(kind):
    model = nn.Sequential(nn.Linear(2, 2))
    with torch.no_grad():
        model[0].weight.fill_(1e5)
    assert "finite after smoothing" in left(model, kind(calibrated(model, torch.tensor([[3e38, 1]])), 0))


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


@pytest.mark.parametrize("kind", KINDS)
def test_of_equals_no_smoothing_and_then_the_smallest_strength_is_taken(kind):
    layer, x = nn.Linear(3, 2), torch.tensor([[1.0, 10, 100]])
    nn.init.zeros_(layer.weight)  # every strength is exact
    model = nn.Sequential(layer)
    quantize_(model, kind(calibrated(model, x), "search"), strict=True)
    assert getattr(model[0], "smooth", None) is None
    assert tuple(sorted(set(ALPHAS))) == ALPHAS
    assert (ALPHAS[0], ALPHAS[-1]) == (0, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_search_finds_a_strength_whose_error_is_almost_the_least(kind):
    rng = fresh(kind)
    layer, x = linear(rng, 12, 70, bias=False), tensor(rng, 300, 70)
    config = partial(kind, calibrated(nn.Sequential(layer), x, rows=300))
    exact = x.double() @ layer.weight.detach().double().T
    errors = {}
    for alpha in ("search", *TRIED):
        model = nn.Sequential(copy.deepcopy(layer))
        quantize_(model, config(alpha), strict=True)
        with torch.no_grad():
            errors[alpha] = float((model(x).double() - exact).square().sum())
    assert errors["search"] < 1.5 * min(errors.values())
    with pytest.raises(InvalidProblem, match="alpha must be a number"):
        config("search", weights="int4")


def test_what_has_an_error_of_nan_is_not_taken():
    layer, x = nn.Linear(2, 2), torch.tensor([[3e38, 1]])
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1e-5, 1e5]))  # whose scale overflows with that of the row: 0 times infinity
    model = nn.Sequential(layer)
    quantize_(model, SmoothDynamic(calibrated(model, x), "search"), strict=True)
    with torch.no_grad():
        assert model(x).isfinite().all()


# --- dynamic scales, and 4 bits --------------------------------------------------------------------------------------


def alike(one, other):
    """Whether two models have the same tensors."""
    states = one.state_dict(), other.state_dict()
    return states[0].keys() == states[1].keys() and all(torch.equal(states[0][n], t) for n, t in states[1].items())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "size", "alpha"),
    sampled(
        [pytest.param(t, z, a) for t in FLOATS for z in SIZES for a in (None, 0, 0.4, 1)], 2, each=lambda _, z, __: z
    ),
)
def test_a_layer_has_the_bits_of_its_codes_and_divided_input(kind, dtype, size, alpha):
    rng = fresh(kind, dtype, size, alpha)
    n, k = rng.integers(1, 150, 2).tolist()
    layer, x = linear(rng, n, k, bias=bool(rng.integers(2)), dtype=dtype), tensor(rng, 2, 5, k, dtype=dtype)
    model = nn.Sequential(layer)
    given = {} if size is None else {"weights": "int4", "group_size": size}
    quantize_(model, kind(calibrated(model, x), alpha, **given), strict=True)
    maxima, weight, rows = x.flatten(0, 1).abs().amax(0).float(), layer.weight.detach(), x
    if alpha is not None:
        factors = torch.from_numpy(smoothing_factors(maxima.numpy(), weight.abs().amax(0).float().numpy(), alpha))
        maxima, weight, rows = maxima / factors, weight.float() * factors, x.float() / factors
    made = None if size is None else int4_weight(weight, size)
    codes, scale = quantized_weight(weight) if made is None else (made.codes(), made.channel_scale)
    element = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}[dtype]
    if kind is SmoothStatic:
        step, limits = maxima.amax()[None] / 127, {"q_min": -127, "q_max": 127, "output_element": "s8"}
        given = torch.ops.skuda.quantize_per_tensor(rows, step, torch.zeros(1, dtype=torch.int32), **limits)
        want = linear_static(given, step, codes, scale, model[0].bias, output_element=element)
    else:
        want = linear_dynamic(rows, codes, scale, model[0].bias, output_element=element)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for run in (model, model, compiled):  # the second time by a launch
            assert torch.equal(run(x), want)
    assert model[0].group_size == (None if size is None else size or 128)
    assert kind is SmoothStatic or type(model[0]) is (DynamicLinear if alpha is None else SmoothedLinear)


@pytest.mark.parametrize("dtype", FLOATS[1:])
def test_a_smoothed_layer_passes_gradients_on_and_keeps_its_bits(dtype):
    rng = fresh(dtype)
    layer, x = linear(rng, 20, 40, dtype=dtype), tensor(rng, 3, 40, dtype=dtype)
    model = nn.Sequential(layer)
    report = quantize_(model, SmoothDynamic(calibrated(model, x), 0.5, weights="int4"), strict=True)
    assert 'nonfinite="propagate"' in str(report)
    with torch.no_grad():
        want = model(x)
    x.requires_grad_()
    found = model(x)
    assert found.dtype is dtype
    assert torch.equal(found, want)
    grad = tensor(rng, 3, 20, dtype=dtype)
    found.backward(grad)
    weight = float_linear(model[0], torch.float32).weight.detach()
    # The weight, the sums and the quotients are rounded to the dtype, each by at most half an eps.
    bound = 4 * torch.finfo(dtype).eps * (grad.float().abs() @ weight.abs())
    assert ((x.grad.float() - grad.float() @ weight).abs() <= bound).all()


def test_folded_layers_are_dynamic_and_others_divide_for_themselves():
    rng = fresh()
    model, x = Attention(rng, nn.LayerNorm), tensor(rng, 2, 6, 16)
    whole, alone = (copy.deepcopy(model) for _ in range(2))
    calibration = calibrated(model, x)
    given = {"weights": "int4", "group_size": 32, "nonfinite": "propagate"}
    report = quantize_(model, SmoothDynamic(calibration, 0.3, **given), strict=True)
    quantize_(alone, SmoothDynamic(calibration, 0.3, fold=False, **given), strict=True)
    assert dict(report.folded) == NORMS
    kinds = {"o": SmoothedLinear, "down": SmoothedLinear}
    for name in ("q", "k", "v", "up", "o", "down"):
        assert type(model.get_submodule(name)) is kinds.get(name, DynamicLinear), name
        assert propagates(model.get_submodule(name))
    assert report.converted["q"] == "DynamicLinear, nonfinite='propagate'"
    shared = calibration.norms["norm2"]
    assert shared == ("up",)  # whose factors are those of the layer alone
    assert torch.equal(model.up.weight_q, alone.up.weight_q)
    quotient = whole.norm2.weight / model.norm2.weight
    torch.testing.assert_close(alone.up.smooth, quotient, rtol=1e-6, atol=0)
    with torch.no_grad():
        bad = x.clone()
        bad[1, 2, 3] = torch.nan
        assert model.up(bad)[1, 2].isnan().all()


def test_fuse_leaves_layers_that_divide_for_themselves():
    rng = fresh()
    mlp, x = GatedMLP(32, 48), normal(rng, 3, 32)
    quantize_(mlp, SmoothDynamic(calibrated(mlp, x), 0.5), lambda _, name: name == "down_proj")
    quantize_(mlp, Dynamic())
    with torch.no_grad():
        want = mlp(x)
        with pytest.warns(UserWarning, match="down_proj is SmoothedLinear, no DynamicLinear"):
            fuse_(mlp)
        assert torch.equal(mlp(x), want)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_a_filter_smooths_what_norms_take_over_and_the_rest_is_fused(tmp_path):
    rng = fresh()
    model, again = (decoders.small("Llama", fresh("model")) for _ in range(2))
    ids = torch.from_numpy(rng.integers(1, 64, (2, 9)))
    calibration = calibrated(model, ids)
    free = {name for names in calibration.norms.values() for name in names}
    quantize_(model, SmoothDynamic(calibration, 0.3, weights="int4"), lambda _, name: name in free)
    quantize_(model, Dynamic(weights="int4"), lambda _, name: name != "lm_head")
    assert {type(layer) for layer in model.modules() if isinstance(layer, Int8Linear)} == {DynamicLinear}
    assert not fuse_(model).left
    save(model, tmp_path)
    load_(again, tmp_path)
    fuse_(again)
    with torch.no_grad():
        assert torch.equal(again(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", [{"weights": "int2"}, {"weights": "int4", "group_size": 48}, {"group_size": 64}])
def test_other_bits_are_refused(kind, given):
    with pytest.raises(InvalidProblem, match=f"{kind.__name__}: {list(given)[-1]} must be"):
        kind(calibrated(nn.Sequential()), **given)


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
def test_a_norm_that_cannot_be_folded_keeps_its_weight(kind, norm, change, reason):
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


@pytest.mark.parametrize("nonfinite", ["ignore", "propagate"])
def test_a_layer_whose_fixed_scale_is_too_coarse_is_dynamic_or_named(nonfinite):
    rng = fresh(nonfinite)
    model, x = nn.Sequential(nn.LayerNorm(64), linear(rng, 32, 64), nn.ReLU(), linear(rng, 16, 32)), normal(rng, 60, 64)
    rare = x.clone()
    rare[7] *= 300  # a row that makes the scale of all others too coarse
    model[0] = nn.Identity()
    calibration = calibrated(model, rare)
    plain, checked = copy.deepcopy(model), copy.deepcopy(model)
    report = quantize_(plain, SmoothStatic(calibration, None, nonfinite=nonfinite))
    errors = report.static_errors
    assert errors["1"] > 2
    assert "  fixed scales make large errors in 2 layers, " in str(report)
    want = rare.double() @ plain[1].weight.double().T  # that of the codes
    fixed, own = (
        (each(rare).double() - plain[1].bias.double() - want).square().sum()
        for each in (plain[1], DynamicLinear(plain[1].weight_q, plain[1].weight_scale, plain[1].bias))
    )
    assert 0.3 < errors["1"] / float(fixed / own) < 3  # errors of columns do not quite cancel
    limit = (min(errors.values()) + max(errors.values())) / 2
    report = quantize_(checked, SmoothStatic(calibration, None, nonfinite=nonfinite, dynamic_above=limit))
    kinds = {name: "StaticLinear" if error <= limit else "DynamicLinear" for name, error in errors.items()}
    assert {name: kind.partition(",")[0] for name, kind in report.converted.items()} == kinds
    assert sorted(kinds.values()) == ["DynamicLinear", "StaticLinear"]
    assert all(propagates(checked[int(name)]) == (nonfinite == "propagate") for name in kinds)
    with pytest.raises(InvalidProblem, match="dynamic_above"):
        SmoothStatic(calibration, dynamic_above=0)


def test_a_folded_layer_with_scales_per_row_is_dynamic():
    rng = fresh()
    model, x = nn.Sequential(nn.LayerNorm(64), linear(rng, 32, 64)), normal(rng, 60, 64)
    calibration = calibrated(model, x)
    report = quantize_(model, SmoothStatic(calibration, dynamic_above=1e-9))
    assert dict(report.folded) == {"0": ("1",)}
    assert type(model[1]) is DynamicLinear
    assert not report.static_errors
