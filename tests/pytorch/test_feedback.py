"""`calibrated_weight` and `fold_`: their definitions, what may not change a bit, and `Dynamic` with a calibration."""

from __future__ import annotations

import copy

import decoders
import numpy as np
import pytest
import torch
from support import fresh
from tensors import calibrated, normal
from torch import nn

from skuda.registry import InvalidProblem
from skuda.torch import Dynamic, DynamicLinear, calibrate, fold_, fuse_, quantize_
from skuda.torch.exact.exact import exact_
from skuda.torch.formats import feedback
from skuda.torch.formats.int8 import quantized_weight
from skuda.torch.int4 import Moments, calibrated_weight, int4_weight

F32, F64 = np.float32, np.float64


def related(rng, count, k):
    """Rows whose columns depend on each other, some of them large."""
    mixed = normal(rng, count, k) @ normal(rng, k, k) / k**0.5
    return mixed * torch.from_numpy(np.exp(rng.standard_normal(k))).float()


def grid(targets, importance):
    """The scale and offset of a group, one candidate after another."""
    targets, weights = targets.astype(F32), (importance / importance.max()).astype(F32)
    low, high = min(targets.min(), F32(0)), max(targets.max(), F32(0))
    spanning, middle = (high - low) / F32(15), (high + low) / F32(2)
    best = F32(np.inf), 1, 0
    for scale in range(max(1, int(spanning / 2 // 1)), min(18, int(np.ceil(spanning)) + 1) + 1):
        step = max(1, scale // 4)
        for moved in range(-(scale // step) * step, scale + 1, step):
            offset = np.clip(np.rint(middle - F32(scale * 7.5)) + moved, -128, 127)
            level = np.clip(np.rint((targets - offset) / F32(scale)), 0, min(15, (127 - offset) // scale))
            error = (targets - offset) - level * F32(scale)
            terms = list(error * error * weights)
            while len(terms) > 1:
                half = len(terms) // 2
                terms = [a + b for a, b in zip(terms[:half], terms[half:], strict=False)] + terms[2 * half :]
            if terms[0] < best[0]:
                best = terms[0], scale, int(offset)
    return best[1:]


def product(left, right):
    """left right over a block of columns, as `_product` defines it, in integers."""
    parts, exponents = [], []
    for factor, axis in ((left, 1), (right, 0)):
        exponents.append(np.frexp(np.abs(factor).max(axis, keepdims=True, initial=0))[1] - 22)
        wide = np.ldexp(factor, -exponents[-1])
        high = np.rint(wide)
        parts.append((high.astype(np.int64), np.rint(np.ldexp(wide - high, 22)).astype(np.int64)))
    (high, low), (other, rest) = parts
    found = (high @ other).astype(F64) + np.ldexp((high @ rest + low @ other).astype(F64), -22)
    return np.ldexp(found, exponents[0] + exponents[1])


def by_the_book(weight, rows, size):
    """Levels, scales and offsets as the docstrings define them, element by element."""
    n, k = weight.shape
    scale = quantized_weight(weight)[1].numpy()
    rows = rows.numpy().astype(F64)
    codes = np.rint(rows / (np.abs(rows).max() / 32639))
    moments = codes.T @ codes
    left = moments + np.eye(k) * (0.01 * (int(np.trace(moments)) / k))
    rates, root = np.zeros((k, k)), np.zeros((k, k))
    for j in reversed(range(k)):
        start = j // 128 * 128
        column = root[:j, j] = left[:j, j] / np.sqrt(left[j, j])
        rates[:j, j] = column / np.sqrt(left[j, j])
        left[:j, start:j] -= np.outer(column, column[start:])
        if j == start:
            block = root[:start, start : start + 128]
            left[:start, :start] -= product(block, block.T)
    plain = weight.numpy().astype(F64) / scale.astype(F64)[:, None]
    targets, errors = plain.copy(), np.zeros((n, k))
    levels, scales, offsets = np.zeros((n, k)), np.zeros((n, -(-k // size))), np.zeros((n, -(-k // size)))
    for row in range(n):
        for j in range(k):
            group, stop = j // size, min(j // 128 * 128 + 128, k)
            if j % size == 0:
                found = grid(targets[row, j : j + size], np.maximum(moments.diagonal()[j : j + size], 1))
                scales[row, group], offsets[row, group] = found
            s, o = scales[row, group], offsets[row, group]
            levels[row, j] = np.clip(np.rint((targets[row, j] - o) / s), 0, min(15, (127 - o) // s))
            errors[row, j] = plain[row, j] - (s * levels[row, j] + o)
            for after in range(j + 1, stop):
                targets[row, after] += rates[j, after] * errors[row, j]
            if j + 1 == stop:
                block = slice(j // 128 * 128, stop)
                targets[row, stop:] += product(rates[block, stop:].T, errors[row, block, None])[:, 0]
    return levels, scales, offsets


@pytest.mark.parametrize(("k", "size"), [(40, 32), (300, 64), (200, 0), (1, 128)])
def test_a_calibrated_weight_is_the_one_that_is_defined(k, size):
    rng = fresh(k, size)
    weight, rows = normal(rng, 4, k) * torch.tensor([1.0, 0.01, 30.0, 1.0])[:, None], related(rng, 2 * k, k)
    weight[3, k // 2] = 40
    made = calibrated_weight(weight, Moments(rows), size)
    for got, want in zip(made, by_the_book(weight, rows, size or k), strict=False):
        assert np.array_equal(got.numpy(), want)
    assert torch.equal(made.channel_scale, quantized_weight(weight)[1])


@pytest.mark.parametrize("size", [32, 128, 0])
def test_outputs_are_nearer_than_with_the_nearest_levels_and_rows_do_not_depend_on_each_other(size):
    rng = fresh(size)
    weight, rows = normal(rng, 24, 200), related(rng, 600, 200)
    moments = Moments(rows)
    made, plain = calibrated_weight(weight, moments, size), int4_weight(weight, size)

    def error(one):
        lost = weight.double() - one.codes().double() * one.channel_scale.double()[:, None]
        return float(((lost @ moments.sums) * lost).sum())

    assert error(made) < 0.75 * error(plain)
    part = calibrated_weight(weight[5:9], moments, size)
    assert all(torch.equal(got, whole[5:9]) for got, whole in zip(part, made, strict=True))


def test_inputs_and_weights_of_zeros_are_served():
    rng = fresh()
    weight, rows = normal(rng, 3, 40), related(rng, 50, 40)
    rows[:, 7] = 0
    weight[1] = 0
    assert not calibrated_weight(weight, Moments(rows), 32).codes()[1].any()
    made = calibrated_weight(weight, Moments(torch.zeros(40, 40)), 0)  # no column carries anything
    targets = weight.double() / made.channel_scale.double()[:, None]
    scale, offset = made.group_scale.double(), made.group_offset.double()
    nearest = ((targets - offset) / scale).round().clamp(min=0).minimum(((127 - offset) / scale).floor().clamp(max=15))
    assert torch.equal(made.levels.double(), nearest)
    assert calibrated_weight(weight[:0], Moments(rows), 32).levels.shape == (0, 40)


def test_moments_and_weights_that_do_not_fit_are_refused(monkeypatch):
    rows = torch.ones(8, 8)
    with pytest.raises(InvalidProblem, match="at least K, 8"):
        Moments(rows[:7])
    with pytest.raises(InvalidProblem, match="be finite"):
        Moments(rows * torch.inf)
    with pytest.raises(InvalidProblem, match="of shape"):
        Moments(rows.double())
    with pytest.raises(InvalidProblem, match="be of 4 columns"):
        calibrated_weight(torch.ones(2, 4), Moments(rows))
    with pytest.raises(InvalidProblem, match="group_size"):
        calibrated_weight(torch.ones(2, 8), Moments(rows), 16)
    calibration = calibrated(nn.Sequential(nn.Linear(8, 8)), rows)
    with pytest.raises(InvalidProblem, match="symmetric"):
        Dynamic(weights="int4", symmetric=True, calibration=calibration)
    with pytest.raises(InvalidProblem, match="calibration"):
        Dynamic(calibration=3)


def with_outliers(rng, dtype=torch.bfloat16):
    """A decoder whose norms make some channels large, and 3 batches of tokens."""
    model = decoders.small("Llama", rng).to(dtype)
    for name, parameter in model.named_parameters():
        if "layernorm" in name:
            parameter.data[::9] *= 30
    return model, [torch.from_numpy(rng.integers(1, 64, (4, 32))) for _ in range(3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folded_model_has_the_same_bits_and_its_new_calibration_is_that_of_a_run(dtype):
    model, tokens = with_outliers(fresh(str(dtype)), dtype)
    with torch.no_grad():
        want = model(tokens[0]).logits
    calibration = calibrated(model, *tokens, rows=100)
    kept = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    folding = fold_(model, calibration)
    with torch.no_grad():
        assert torch.equal(model(tokens[0]).logits, want)
    assert kept == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    first = "model.layers.0."
    assert folding.folded[f"{first}mlp.up_proj"] == (f"{first}mlp.down_proj",)
    assert len(folding.folded[f"{first}input_layernorm"]) == 3
    assert f"{first}mlp.up_proj" in str(folding)
    for factors in folding.factors.values():
        assert torch.equal(factors.log2().round().exp2(), factors)
    again = calibrated(model, *tokens, rows=100)
    for held, ran in ((folding.calibration.maxima, again.maxima), (folding.calibration.rows, again.rows)):
        assert all(torch.equal(held[name], ran[name]) for name in ran)
    with pytest.raises(InvalidProblem, match="a folded model"):
        fold_(model, folding.calibration)


def test_what_cannot_be_folded_stays_and_says_why():
    model, tokens = with_outliers(fresh())
    calibration = calibrated(model, *tokens)
    for name, layer in (("mlp.down_proj", 0), ("self_attn.q_proj", 1)):
        model.get_submodule(f"model.layers.{layer}.{name}").weight.data[0, 0] = torch.finfo(torch.bfloat16).max
    before = copy.deepcopy(model.state_dict())
    first, second = (model.get_submodule(f"model.layers.{layer}.mlp.gate_proj") for layer in (0, 1))
    first.weight = second.weight
    folding = fold_(model, calibration, alpha=1.0)
    assert "cannot hold" in folding.not_folded["model.layers.0.mlp.up_proj"]
    assert "cannot hold" in folding.not_folded["model.layers.1.input_layernorm"]
    assert "also that of model.layers.1" in folding.not_folded["model.layers.0.post_attention_layernorm"]
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(model.state_dict()[name], before[name])
    model, tokens = with_outliers(fresh())
    calibration = calibrated(model, *tokens)
    for name in ("mlp.up_proj", "self_attn.q_proj"):
        model.get_submodule(f"model.layers.1.{name}").register_forward_hook(lambda *_: None)
    model.model.layers[0].mlp.down_proj = nn.Sequential(model.model.layers[0].mlp.down_proj)  # as an adapter does
    hooks = fold_(model, calibrated(model, *tokens)).not_folded
    assert "it has hooks" in hooks["model.layers.1.mlp.up_proj"]
    assert "it has hooks" in hooks["model.layers.1.input_layernorm"]
    assert "no inputs were seen" in hooks["model.layers.0.mlp.up_proj"]
    without = fold_(with_outliers(fresh())[0], calibration, gates=False)
    assert not any("up_proj" in name for name in without.folded)
    with pytest.raises(InvalidProblem, match="alpha"):
        fold_(model, calibration, alpha=1.5)
    with pytest.raises(InvalidProblem, match="be of this model"):
        fold_(nn.Sequential(nn.Linear(8, 8)), calibration)


def quantized(model, tokens, **config):
    made = copy.deepcopy(model)
    report = quantize_(made, Dynamic(**config))
    return made, report


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_calibrated_model_is_nearer_and_ordinary(weights):
    """Its layers are those of `Dynamic`, so that fused and exact models take them."""
    rng = fresh(weights)
    model, tokens = with_outliers(rng, torch.float32)
    with torch.no_grad():
        want = model(tokens[0]).logits.double()
    calibration = calibrated(model, *tokens, rows=300)
    (plain, _), (made, report) = (
        quantized(model, tokens, weights=weights, calibration=given) for given in (None, calibration)
    )
    with torch.no_grad():
        errors = [float((each(tokens[0]).logits - want).square().mean()) for each in (made, plain)]
    assert errors[0] < errors[1]
    assert ("model.layers.0.mlp.up_proj" in report.folded) == (weights == "int8")
    assert len(report.folded["model.layers.1.post_attention_layernorm"]) == 2
    assert set(report.converted.values()) == {"DynamicLinear"}
    fuse_(made)
    exact_(made)


def test_layers_behind_one_norm_share_moments_and_a_short_sample_is_refused(monkeypatch):
    rng = fresh()
    model, tokens = with_outliers(rng)
    seen = []
    real = feedback.Moments.__init__
    monkeypatch.setattr(feedback.Moments, "__init__", lambda self, rows: (seen.append(rows), real(self, rows))[1])
    made, _ = quantized(model, tokens, weights="int4", calibration=calibrated(model, *tokens, rows=130))
    assert len(seen) == 2 * 4 + 1  # qkv, o, gate and up, down; and the head
    layer = made.get_submodule("model.layers.0.self_attn.k_proj")
    assert isinstance(layer, DynamicLinear)
    calibration = calibrated(model, *tokens, rows=60)
    _, report = quantized(model, tokens, weights="int4", calibration=calibration)
    assert not report.converted
    assert "at least K, 64" in report.left["model.layers.0.self_attn.q_proj"]
    with calibrate(model, lambda layer, name: "q_proj" not in name, rows=130) as less:
        model(tokens[0])
    _, report = quantized(model, tokens, weights="int4", calibration=less)
    assert "no rows of model.layers.0.self_attn.q_proj" in report.left["model.layers.0.self_attn.q_proj"]
