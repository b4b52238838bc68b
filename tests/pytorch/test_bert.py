"""The demo's encoder as a model of transformers."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
from support import dispatcher, fresh

pytest.importorskip("torch", minversion="2.6")
pytest.importorskip("transformers", minversion="5")

from skuda.registry.device import HOST
from skuda.registry.errors import MissingDependency
from skuda.tools.demo.bert import BertEncoder, BertModel
from skuda.tools.demo.command import read_sentences, run_demo
from skuda.tools.demo.encoder import Encoder, EncoderConfig, Model, load_model

CONFIG = EncoderConfig(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    layer_norm_eps=1e-12,
    max_position_embeddings=20,
    hidden_act="gelu",
)


def tiny(rng):
    """Return an encoder of random weights, and the same in torch."""
    layers = [f"encoder.layer.{i}" for i in range(CONFIG.num_hidden_layers)]
    shapes = {f"{layer}.attention.self.{part}": (32, 32) for layer in layers for part in ("query", "key", "value")}
    shapes |= {f"{layer}.attention.output.dense": (32, 32) for layer in layers}
    shapes |= {f"{layer}.intermediate.dense": (48, 32) for layer in layers}
    shapes |= {f"{layer}.output.dense": (32, 48) for layer in layers}
    norms = ["embeddings", *(f"{layer}{part}" for layer in layers for part in (".attention.output", ".output"))]
    tensors = {f"{name}.weight": rng.normal(size=shape) / 4 for name, shape in shapes.items()}
    tensors |= {f"{name}.bias": rng.normal(size=shape[0]) for name, shape in shapes.items()}
    tensors |= {f"{norm}.LayerNorm.weight": rng.normal(1, 0.1, 32) for norm in norms}
    tensors |= {f"{norm}.LayerNorm.bias": rng.normal(size=32) for norm in norms}
    for name, rows in (("word", 50), ("position", CONFIG.max_position_embeddings), ("token_type", 2)):
        tensors[f"embeddings.{name}_embeddings.weight"] = rng.normal(size=(rows, 32))
    encoder = Encoder(CONFIG, {name: tensor.astype(np.float32) for name, tensor in tensors.items()})
    return encoder, BertEncoder.of(encoder, HOST)


def drawn(rng, count):
    """Return sentences of different lengths."""
    return [rng.integers(0, 50, rng.integers(1, 21)).tolist() for _ in range(count)]


def assert_close(found, want):
    assert np.abs(found - want).max() < 3e-6


def test_embeddings_in_f32_are_those_of_the_numpy_encoder():
    rng = fresh()
    numpy, torch = tiny(rng)
    sentences = drawn(rng, 5)
    want = numpy.embed(sentences, numpy.linear)
    assert_close(torch.embed(sentences, torch.linear), want)
    # The whole model, without a function for each layer.
    assert isinstance(torch.bert, BertModel)
    assert_close(torch.embed(sentences, torch.bert), want)


@pytest.mark.parametrize("alpha", ["dynamic", None, 0.5, 0.85])
def test_int8_layers_give_the_bits_of_the_numpy_ones(alpha):
    rng = fresh(alpha)
    numpy, torch = tiny(rng)
    maxima, inputs = {}, {}

    def linear(name, x):
        maxima[name], inputs[name] = np.abs(x).max(0), x
        return numpy.linear(name, x)

    numpy.embed(drawn(rng, 5), linear)
    given = (None, None) if alpha == "dynamic" else (maxima, alpha)
    ours, theirs = (encoder.int8(dispatcher(), *given) for encoder in (torch, numpy))
    for name in numpy.linear_names:
        found, want = (layers[name].run(dispatcher(), inputs[name]) for layers in (ours, theirs))
        assert np.array_equal(found, want), name
        assert ours[name].descriptor(3).sizes == theirs[name].descriptor(3).sizes


def test_a_quantized_model_is_what_its_layers_are():
    rng = fresh()
    _, torch = tiny(rng)
    layers, sentences = torch.int8(dispatcher(), None, None), drawn(rng, 5)
    whole = torch.embed(sentences, layers.linear(dispatcher()))
    one_by_one = torch.embed(sentences, lambda name, x: layers[name].run(dispatcher(), x))
    assert np.array_equal(whole, one_by_one)


def test_the_whole_job_finds_what_that_of_numpy_finds(tmp_path):
    rng = fresh()
    numpy, torch = tiny(rng)
    sentences = drawn(rng, 40)
    model = Model("tiny", "0", numpy, lambda texts: [sentences[int(text)] for text in texts])

    def result(encoder):
        texts = [str(i) for i in range(len(sentences))]
        return run_demo(replace(model, encoder=encoder), texts, dispatcher(), plot=tmp_path / "plot.png")

    one, other = result(numpy), result(torch)
    assert (one.framework, other.framework) == ("numpy", "torch")
    for ours, theirs in zip(other.layers, one.layers, strict=True):
        # Each layer gets its own f32 input, so that only rounding in f32 differs, and a code now and then.
        assert ours.sqnr_db["dynamic"] == pytest.approx(theirs.sqnr_db["dynamic"], abs=0.1)
    # Codes that differ change codes of later layers: the noise is another one, of the same size.
    assert other.ways[0].mean_cosine == pytest.approx(one.ways[0].mean_cosine, abs=2e-3)


def test_the_real_model_is_the_same_in_both():
    try:
        model = load_model()
    except MissingDependency as error:
        pytest.skip(str(error))
    text = read_sentences()
    sentences = model.tokenize([text[i] for i in fresh().permutation(len(text))[:2]])
    torch = BertEncoder.of(model.encoder, HOST)
    assert_close(torch.embed(sentences, torch.bert), model.encoder.embed(sentences, model.encoder.linear))


@pytest.mark.parametrize("absent", ["torch", "transformers"])
def test_without_a_package_the_error_names_the_command(monkeypatch, absent):
    monkeypatch.delitem(sys.modules, "skuda.tools.demo.bert")
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(MissingDependency, match=f"pip install {absent}"):
        import_module("skuda.tools.demo.bert")
