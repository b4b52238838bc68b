"""`quantize_` with a `Budget`: what costs the most gets more bits, and the report says what that saves."""

from __future__ import annotations

import copy

import decoders
import pytest
import torch
from support import fresh
from tensors import calibrated
from torch import nn

from skuda.registry import InvalidProblem
from skuda.torch import Budget, Dynamic, SmoothDynamic, compare, load_, quantize_, save
from skuda.torch.convert import budget as budgets

INT4 = Dynamic(weights="int4", group_size=32)


def decoder(rng):
    """A model in which one layer is hard to quantize, and tokens."""
    model = decoders.small("Llama", rng, "sdpa", hidden_size=128, intermediate_size=128).float()
    model.model.layers[1].mlp.down_proj.weight.data[::2] *= 8
    return model, [torch.from_numpy(rng.integers(1, 64, (1, 24))) for _ in range(2)]


def bits(model, layers):
    return 8 * sum(budgets.bytes_of(model.get_submodule(name)) for name in layers)


def test_layers_that_cost_the_most_get_more_bits_and_none_is_over_the_budget():
    rng = fresh()
    model, tokens = decoder(rng)
    plain, made = copy.deepcopy(model), copy.deepcopy(model)
    before = quantize_(plain, INT4)
    report = quantize_(made, INT4, budget=Budget(7.5, tokens))
    layers, weights = list(before.converted), sum(each.numel() for each in model.parameters() if each.dim() > 1)
    weights -= model.model.embed_tokens.weight.numel()
    assert bits(plain, layers) < bits(made, layers) <= 7.5 * weights
    assert {name for each in report.choices for name in each.layers} == set(layers)
    by_layer = {name: each for each in report.choices for name in each.layers}
    first = "model.layers.0."
    assert by_layer[f"{first}self_attn.q_proj"].layers == tuple(f"{first}self_attn.{part}_proj" for part in "qkv")
    assert by_layer[f"{first}mlp.up_proj"].layers == (f"{first}mlp.gate_proj", f"{first}mlp.up_proj")
    costs = compare(plain, model, tokens, by_layer=True).layers
    saved = max(report.choices, key=lambda each: each.saved)
    assert saved.saved
    assert f"{saved.bits:.3g} bits a weight cost {saved.cost:.3g} nats" in str(report)
    for each in report.choices:
        if len(each.layers) == 1:
            assert each.cost + each.saved == pytest.approx(costs[each.layers[0]], rel=1e-9)
        assert bits(made, each.layers) == pytest.approx(
            each.bits * sum(model.get_submodule(name).weight.numel() for name in each.layers)
        )
        assert each.saved >= 0
        if not each.saved:
            assert all(
                torch.equal(made.get_submodule(name).weight_q, plain.get_submodule(name).weight_q)
                for name in each.layers
            )
    assert compare(made, model, tokens).divergence < compare(plain, model, tokens).divergence


def test_all_or_nothing():
    rng = fresh()
    model, tokens = decoder(rng)
    plain, made = copy.deepcopy(model), copy.deepcopy(model)
    layers = list(quantize_(plain, INT4).converted)
    weights = sum(model.get_submodule(name).weight.numel() for name in layers)
    least = bits(plain, layers) / weights
    report = quantize_(made, INT4, budget=Budget(least, tokens))
    assert not any(each.saved for each in report.choices)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in made.state_dict().items())
    everything = copy.deepcopy(model)
    report = quantize_(everything, Dynamic(), budget=Budget(33, tokens))
    assert not report.converted
    assert compare(everything, model, tokens).divergence == 0
    with pytest.raises(InvalidProblem, match=f"be at least {least:.4g}"):
        quantize_(copy.deepcopy(model), INT4, budget=Budget(least * 0.99, tokens))


def test_a_planned_model_is_calibrated_saved_and_loaded(tmp_path):
    rng = fresh()
    model, tokens = decoder(rng)
    floats = copy.deepcopy(model)
    calibration = calibrated(model, *tokens * 3, rows=200)
    config = Dynamic(weights="int4", group_size=32, calibration=calibration, nonfinite="propagate")
    report = quantize_(model, config, lambda _, name: name != "lm_head", budget=Budget(7, tokens))
    assert report.folded
    kinds = {getattr(layer.format, "name", None) for layer in map(model.get_submodule, report.converted)}
    assert kinds == {"int4", "int8"}
    assert all(model.get_submodule(name).nonfinite == "propagate" for name in report.converted)
    save(model, tmp_path)
    load_(floats, tmp_path)
    with torch.no_grad():
        assert all(torch.equal(floats(ids).logits, model(ids).logits) for ids in tokens)


def test_a_layer_that_cannot_be_converted_or_is_not_reached_stays_as_without_a_budget():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.broken, self.idle = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x):
            return self.used(x) + self.broken(x)

    model = Half()
    model.broken.weight.data[0, 0] = 1e38
    model.broken.weight.data[0, 1] = torch.nan
    given = torch.ones(3, 8)
    with pytest.raises(InvalidProblem, match="not finite"):
        quantize_(model, Dynamic(), budget=Budget(40, [given]))
    model.broken.weight.data.zero_()
    model.broken.to(torch.float64)
    model.forward = lambda x: model.used(x) + model.broken(x.double()).float()
    report = quantize_(model, Dynamic(), budget=Budget(17, [given]))
    assert [each.layers for each in report.choices] == [("used",)]
    assert "float64" in report.left["broken"]
    assert "idle" in report.converted


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda model: Budget(0, 3), "inputs"),
        (lambda model: Budget("4", [1]), "bits"),
        (lambda model: quantize_(model, INT4, budget=5), "budget"),
        (lambda model: quantize_(model, INT4, strict=True, budget=Budget(5, [torch.ones(2, 8)])), "strict"),
        (
            lambda model: quantize_(model, SmoothDynamic(calibrated(model, torch.ones(2, 8))), budget=Budget(5, [1])),
            "config",
        ),
    ],
)
def test_what_has_no_budget_is_refused(call, field):
    with pytest.raises(InvalidProblem) as caught:
        call(nn.Sequential(nn.Linear(8, 8)))
    assert caught.value.field == field
