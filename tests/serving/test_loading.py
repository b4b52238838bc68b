"""Weights of vLLM's layers are written in place, at any time and in any of the ways that vLLM has."""

from __future__ import annotations

import itertools

import pytest
import torch
from support import fresh
from torch import nn
from vllm.model_executor.model_loader.reload import layerwise
from vllm_layers import PARTS, K, checkpoint, load, made, memory, quantization, ready, reloading

from skuda.registry import InvalidProblem
from skuda.torch.int8_linear import quantized_weight

SCHEMES = tuple(itertools.product((True, False), repeat=3))
NAMES = ("dynamic", "symmetric", "per_channel")


def named(*values):
    return dict(zip(NAMES, values, strict=True))


def new(kind, dtype, parts, scheme):
    """A layer of vLLM that was never anything else."""
    layer = made(kind, dtype, quantization(**scheme))
    load(layer, parts)
    return ready(layer)


def assert_same(layer, other, rng):
    x = torch.from_numpy(rng.standard_normal((5, K))).to(torch.bfloat16)
    assert torch.equal(layer(x)[0].view(torch.int16), other(x)[0].view(torch.int16))


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize(NAMES, SCHEMES)
def test_weights_are_replaced_in_their_memory(served, kind, dynamic, symmetric, per_channel):
    rng, scheme = fresh(kind, dynamic, symmetric, per_channel), named(dynamic, symmetric, per_channel)
    layer = new(kind, torch.bfloat16, checkpoint(kind, rng, **scheme), scheme)
    before, parts = memory(layer), checkpoint(kind, rng, **scheme)
    load(layer, parts)
    assert memory(layer) == before
    assert_same(layer, new(kind, torch.bfloat16, parts, scheme), rng)
    ready(layer)  # some loaders of vLLM process again
    assert memory(layer) == before
    assert_same(layer, new(kind, torch.bfloat16, parts, scheme), rng)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("per_channel", [True, False])
def test_floating_weights_are_quantized_on_the_way(served, kind, per_channel, dtype):
    rng, scheme = fresh(kind, dtype, per_channel), {"per_channel": per_channel}
    layer = new(kind, torch.bfloat16, checkpoint(kind, rng, **scheme), scheme)
    before = memory(layer)
    floats = {part: torch.from_numpy(rng.standard_normal((n, K))).to(dtype) for part, n in PARTS[kind].items()}
    load(layer, {part: {"weight": weight} for part, weight in floats.items()})
    assert memory(layer) == before
    codes, scale, _ = torch.ops.skuda.dynamic_range(
        torch.cat(list(floats.values())), q_min=-127, q_max=127, output_element="s8"
    )
    assert torch.equal(layer.weight, codes)
    assert torch.equal(layer.weight_scale.view(-1), scale)


def test_a_weight_that_is_not_finite_or_no_matrix_is_refused(served):
    rng = fresh()
    layer = new("row", torch.bfloat16, checkpoint("row", rng), {})
    codes = layer.weight.clone()
    for wrong in (torch.full((PARTS["row"][None], K), torch.nan), torch.ones(K)):
        with pytest.raises(InvalidProblem, match="weight"):
            load(layer, {None: {"weight": wrong}})
    assert torch.equal(layer.weight, codes)


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize(NAMES, SCHEMES)
def test_the_reload_of_vllm_lands_in_the_same_memory(served, kind, dynamic, symmetric, per_channel):
    rng, scheme = fresh(kind, dynamic, symmetric, per_channel), named(dynamic, symmetric, per_channel)
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
    for tensors in parts.values():
        codes, scale = quantized_weight(tensors["weight"])
        tensors |= {"weight": codes, "weight_scale": scale.view(-1, 1)}
    other = made(kind, torch.bfloat16, quantization(**{**scheme, "per_channel": True}))
    load(other, parts)
    assert_same(layer, ready(other), rng)
