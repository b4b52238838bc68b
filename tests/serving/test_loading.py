"""Weights of vLLM's layers are written in place, at any time and in any of the ways that vLLM has."""

from __future__ import annotations

import pytest
import torch
import toy_format
from support import fresh, sampled
from torch import nn
from vllm.model_executor.model_loader.reload import layerwise
from vllm_layers import PARTS, SCHEMES, K, checkpoint, load, made, memory, quantization, ready, reloading

from skuda.registry import InvalidProblem
from skuda.torch.formats.int8 import quantized_weight
from skuda.torch.int4 import int4_weight
from skuda.vllm.config import SkudaVllmConfig


def coded(weight, group_size=None):
    """What becomes of a floating weight."""
    if group_size is None:
        codes, scale = quantized_weight(weight)
    else:
        found = int4_weight(weight, group_size)
        codes, scale = found.packed(group_size), found.channel_scale
    return {"weight": codes, "weight_scale": scale.view(-1, 1)}


def new(kind, dtype, parts, scheme):
    """A layer of vLLM that was never anything else."""
    layer = made(kind, dtype, quantization(**scheme))
    load(layer, parts)
    return ready(layer)


def assert_same(layer, other, rng):
    x = torch.from_numpy(rng.standard_normal((5, K))).to(torch.bfloat16)
    assert torch.equal(layer(x)[0].view(torch.int16), other(x)[0].view(torch.int16))


@pytest.mark.parametrize("kind", sampled(PARTS, 2))
@pytest.mark.parametrize("name", SCHEMES)
def test_weights_are_replaced_in_their_memory(served, kind, name):
    rng, scheme = fresh(kind, name), SCHEMES[name]
    layer = new(kind, torch.bfloat16, checkpoint(kind, rng, **scheme), scheme)
    before, parts = memory(layer), checkpoint(kind, rng, **scheme)
    load(layer, parts)
    assert memory(layer) == before
    assert_same(layer, new(kind, torch.bfloat16, parts, scheme), rng)
    ready(layer)  # some loaders of vLLM process again
    assert memory(layer) == before
    assert_same(layer, new(kind, torch.bfloat16, parts, scheme), rng)


@pytest.mark.parametrize("dtype", sampled([torch.float32, torch.float16, torch.bfloat16]), ids=str)
@pytest.mark.parametrize("kind", sampled(PARTS, 2))
@pytest.mark.parametrize("name", [name for name, scheme in SCHEMES.items() if scheme.get("dynamic", True)])
def test_floating_weights_are_quantized_on_the_way(served, kind, name, dtype):
    rng, scheme = fresh(kind, dtype, name), SCHEMES[name]
    layer = new(kind, torch.bfloat16, checkpoint(kind, rng, **scheme), scheme)
    before = memory(layer)
    floats = {part: torch.from_numpy(rng.standard_normal((n, K))).to(dtype) for part, n in PARTS[kind].items()}
    load(layer, {part: {"weight": weight} for part, weight in floats.items()})
    assert memory(layer) == before
    want = coded(torch.cat(list(floats.values())), scheme.get("group_size"))
    assert torch.equal(layer.weight, want["weight"])
    assert torch.equal(layer.weight_scale, want["weight_scale"])


@pytest.mark.parametrize("kind", sampled(PARTS, 2))
def test_a_format_that_no_module_knows_is_quantized_loaded_and_run(served, kind):
    rng = fresh(kind)
    floats = {part: torch.from_numpy(rng.standard_normal((n, K))).float() for part, n in PARTS[kind].items()}
    for known in toy_format.added():
        layer = made(kind, torch.bfloat16, SkudaVllmConfig(weights=known.name), bias=False)
        load(layer, {part: {"weight": weight} for part, weight in floats.items()})
        ready(layer)
        assert torch.equal(layer.weight, known.quantize(torch.cat(list(floats.values())))[0])
        plain = made(kind, torch.bfloat16, SkudaVllmConfig(), bias=False)
        load(plain, {part: {"weight": weight} for part, weight in floats.items()})
        assert_same(layer, ready(plain), rng)
        codes = {part: {"weight": known.quantize(weight)[0]} for part, weight in floats.items()}
        load(layer, {part: each | {"weight_scale": torch.ones(len(each["weight"]), 1)} for part, each in codes.items()})
        assert torch.equal(layer.weight, torch.cat([each["weight"] for each in codes.values()]))


WRONG = {
    "not finite": torch.full((PARTS["row"][None], K), torch.nan),
    "no matrix": torch.ones(K),
    "codes of one axis": torch.ones(K, dtype=torch.int8),
}
PACKED = {
    "codes of 8 bits": torch.ones(PARTS["row"][None], K, dtype=torch.int8),
    "unpacked codes of three axes": torch.ones(3, 1, 1088, dtype=torch.int8),
    "packed in other groups": torch.zeros(3, 1, 1152, dtype=torch.uint8),
}


@pytest.mark.parametrize(
    ("group_size", "wrong"), [*((None, wrong) for wrong in WRONG), *((64, w) for w in WRONG | PACKED)]
)
def test_a_weight_that_a_layer_cannot_hold_is_refused(served, group_size, wrong):
    rng, scheme = fresh(), {"group_size": group_size}
    layer = new("row", torch.bfloat16, checkpoint("row", rng, **scheme), scheme)
    codes = layer.weight.clone()
    with pytest.raises(InvalidProblem, match="weight"):
        load(layer, {None: {"weight": (WRONG | PACKED)[wrong]}})
    assert torch.equal(layer.weight, codes)


@pytest.mark.parametrize("kind", sampled(PARTS, 2))
@pytest.mark.parametrize("name", SCHEMES)
def test_the_reload_of_vllm_lands_in_the_same_memory(served, kind, name):
    rng, scheme = fresh(kind, name), SCHEMES[name]
    model = nn.ModuleDict({"layer": made(kind, torch.bfloat16, quantization(**scheme))})
    layer = model["layer"]
    layerwise.record_metadata_for_reloading(model)
    load(layer, checkpoint(kind, rng, **scheme))
    ready(layer)
    before, parts = memory(layer), checkpoint(kind, rng, **scheme)
    with reloading(model):
        load(layer, parts)
    assert memory(layer) == before
    assert_same(layer, new(kind, torch.bfloat16, parts, scheme), rng)
    # Floating weights alone: scale and zero point of the input stay.
    for part, n in PARTS[kind].items():
        parts[part]["weight"] = torch.from_numpy(rng.standard_normal((n, K))).to(torch.bfloat16)
    with reloading(model):
        load(layer, {part: {"weight": tensors["weight"]} for part, tensors in parts.items()})
    assert memory(layer) == before
    for part, tensors in parts.items():
        parts[part] = tensors | coded(tensors["weight"], scheme.get("group_size"))
    per_channel = scheme | {"per_channel": True}
    assert_same(layer, new(kind, torch.bfloat16, parts, per_channel), rng)
