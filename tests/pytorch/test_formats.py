"""A format of weights is one file: all that is done with layers works with one that no module knows."""

from __future__ import annotations

import copy

import decoders
import numpy as np
import pytest
import torch
import toy_format
import transformers
from support import fresh
from tensors import GatedMLP, normal
from torch import nn

from skuda.dispatch.shard import on_ranks
from skuda.registry.errors import InvalidProblem
from skuda.torch import Dynamic, Mixed, dequantize_, fuse_, load_, parallelize_, quantize_, save, update_
from skuda.torch.exact.exact import exact_
from skuda.torch.formats import FORMATS, INT8, format_of, register_format
from skuda.torch.hf.checkpoint import described
from skuda.torch.hf.transformers import SkudaConfig

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    yield from toy_format.added()


def mlp(rng):
    model = GatedMLP(96, 64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(normal(rng, *parameter.shape))
    return model


def pair(model, **filtered):
    """Two copies of a model: with codes of 8 bits, and with the same codes stored backwards."""
    made = copy.deepcopy(model), copy.deepcopy(model)
    for each, config in zip(made, (Dynamic(), Dynamic(weights="backwards")), strict=True):
        quantize_(each, config, **filtered)
    return made


def layers(model):
    return [layer for layer in model.modules() if getattr(layer, "format", None) == toy_format.Backwards()]


@torch.no_grad()
def test_layers_are_quantized_read_fused_compiled_and_dequantized():
    rng = fresh()
    want, got = pair(mlp(rng))
    rows = normal(rng, 5, 96)
    assert len(layers(got)) == 3
    unfused = want(rows)
    assert torch.equal(got(rows), unfused)
    assert torch.equal(got(rows), unfused)  # by launches that are known now
    assert torch.equal(got.up_proj.weight, want.up_proj.weight)
    assert got.up_proj.explain(rows).chosen == want.up_proj.explain(rows).chosen
    compiled = (torch.compile(model, fullgraph=True)(rows) for model in (want, got))
    assert torch.equal(*compiled)  # torch may compile another curve than it runs
    assert list(fuse_(got).fused) == list(fuse_(want).fused) == [""]
    assert torch.equal(got(rows), want(rows))
    state = got.state_dict()
    assert state["up_proj.weight"].shape == (64, 3, 32)
    other = pair(mlp(rng))[1]
    other.load_state_dict(state)
    assert torch.equal(other(rows), unfused)  # the curve of a fused gate is the op's, not torch's
    for model in (want, got):
        dequantize_(model)
    assert torch.equal(got(rows), want(rows))


def test_gradients_pass_through_the_weight():
    rng = fresh()
    inputs = []
    for model in pair(mlp(rng)):
        inputs.append(normal(fresh(), 3, 96).requires_grad_())
        model(inputs[-1]).sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)


@torch.no_grad()
def test_a_checkpoint_is_written_and_read(tmp_path):
    rng = fresh()
    model = nn.Sequential(nn.Linear(70, 40), nn.Linear(40, 9)).eval()
    _, got = pair(model)
    save(got, tmp_path)
    assert "toy-backwards" in (tmp_path / "config.json").read_text()
    load_(copy.deepcopy(model), tmp_path)
    again = copy.deepcopy(model)
    load_(again, tmp_path)
    rows = normal(rng, 5, 70)
    assert len(layers(again)) == 2
    assert torch.equal(again(rows), got(rows))


@torch.no_grad()
def test_a_language_model_is_saved_loaded_and_exact(tmp_path):
    rng = fresh()
    decoders.small("Llama", rng).save_pretrained(tmp_path / "floats")
    load = transformers.AutoModelForCausalLM.from_pretrained
    want, got = pair(load(tmp_path / "floats"), filter_fn=lambda *_: True)
    for model in (want, got):
        exact_(model)
    ids = torch.from_numpy(rng.integers(0, 64, (2, 9)))
    logits = want(ids, use_cache=False).logits
    assert torch.equal(got(ids, use_cache=False).logits, logits)
    got.save_pretrained(tmp_path / "codes")
    given = {"quantization_config": SkudaConfig(weights="backwards", exact=True)}
    for model in (load(tmp_path / "codes"), load(tmp_path / "floats", **given)):
        assert layers(model)
        assert torch.equal(model(ids, use_cache=False).logits, logits)


@torch.no_grad()
def test_a_served_model_takes_the_weights_of_a_trainer():
    rng = fresh()
    trained = mlp(rng)
    want, _ = pair(trained)
    _, served = pair(mlp(rng))
    quantize_(trained, Mixed())
    update_(served, trained)
    rows = normal(rng, 5, 96)
    assert torch.equal(served(rows), want(rows))


class OfTensors:
    """A group of threads that gives tensors."""

    def __init__(self, group):
        self.group = group

    def __getattr__(self, name):
        found = getattr(self.group, name)
        if name not in ("max", "sum", "sum_rows", "gather"):
            return found
        return lambda *given: torch.as_tensor(found(*given))


@torch.no_grad()
@pytest.mark.parametrize("fused", [False, True])
def test_ranks_hold_parts_and_gather_them(fused):
    rng = fresh(fused)
    want, got = pair(mlp(rng))
    rows = normal(rng, 5, 96)
    if fused:
        for model in (want, got):
            fuse_(model)

    def work(group):
        group, model = OfTensors(group), copy.deepcopy(got)
        parallelize_(model, group)
        assert model.down_proj.weight_q.shape[1] == 1  # runs
        assert torch.equal(model(rows), want(rows))
        state = described(model, parts=True)[1]
        assert all(torch.equal(each, got.state_dict()[name]) for name, each in state.items())

    on_ranks(2, work)


def test_codes_of_no_format_and_names_that_are_taken_are_refused():
    for codes in (torch.zeros(4, 8), torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(2, 3, 4, 5, dtype=torch.int8)):
        with pytest.raises(InvalidProblem, match=r"weight must be int8 of shape \[N, K\], or .*packed.*, or backwards"):
            format_of("here", codes, 4, 8)
    assert format_of("here", torch.zeros(4, 8, dtype=torch.int8), 4, None) == INT8
    with pytest.raises(InvalidProblem, match="weights must be 'int8' or 'int4' or 'int16' or 'backwards'"):
        Dynamic(weights="forwards")
    with pytest.raises(InvalidProblem, match="name must be new"):
        register_format(type("Other", (toy_format.Backwards,), {}))
    assert list(FORMATS) == ["int8", "int4", "int16", "backwards"]


def test_every_format_keeps_what_it_cuts_and_joins():
    rng = fresh()
    n, k = 64, 384
    weight = torch.from_numpy(rng.standard_normal((n, k)).astype(np.float32))
    for kind in FORMATS.values():
        codes, scale = kind.quantize(weight)
        form = format_of("test", codes, n, k)
        assert (tuple(codes.shape), codes.dtype, scale.shape) == (form.shape(n, k), form.dtype, (n,))
        integers = form.integers(codes, n, k)
        assert torch.equal(
            form.integers(form.join([form.cut(codes, "n", 0, 16), form.cut(codes, "n", 16, n)]), n, k), integers
        )
        assert torch.equal(form.integers(form.cut(codes, "k", 128, k), n, k - 128), integers[:, 128:])
        unit = form.units["k"]
        if unit > 1:
            assert not form.fits("k", (unit - 1, k - unit + 1))
            with pytest.raises(InvalidProblem, match=f"multiples of {unit}"):
                form.cut(codes, "k", 1, k)
