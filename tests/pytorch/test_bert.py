"""The demo's encoder as a model of transformers."""

from __future__ import annotations

import sys
from importlib import import_module

import numpy as np
import pytest
from support import dispatcher, fresh, sampled

pytest.importorskip("torch", minversion="2.6")
pytest.importorskip("transformers", minversion="5")

from skuda.dispatch.device import HOST
from skuda.registry.errors import MissingDependency
from skuda.tools.demo.bert import BertEncoder
from skuda.tools.demo.command import read_sentences
from skuda.tools.demo.encoder import load_model


@pytest.fixture(scope="module")
def encoders():
    """Return the encoder of NumPy, that of torch, and two sentences."""
    try:
        model = load_model()
    except MissingDependency as error:
        pytest.skip(str(error))
    sentences = read_sentences()
    drawn = [sentences[i] for i in fresh().permutation(len(sentences))[:2]]
    return model.encoder, BertEncoder.of(model.encoder, HOST), model.tokenize(drawn)


def test_embeddings_in_f32_are_those_of_the_numpy_encoder(encoders):
    numpy, torch, sentences = encoders
    want = numpy.embed(sentences, numpy.linear)
    assert torch.embed(sentences, torch.linear) == pytest.approx(want, abs=2e-6)
    # One whole product instead of one for each layer.
    assert torch.embed(sentences, torch.bert) == pytest.approx(want, abs=2e-6)


@pytest.mark.parametrize("alpha", sampled(["dynamic", None, 0.85]))
def test_int8_layers_give_the_bits_of_the_numpy_ones(alpha, encoders):
    numpy, torch, sentences = encoders
    maxima, inputs = {}, {}

    def linear(name, x):
        maxima[name], inputs[name] = np.abs(x).max(0), x
        return numpy.linear(name, x)

    numpy.embed(sentences, linear)
    given = (None, None) if alpha == "dynamic" else (maxima, alpha)
    ours, theirs = (encoder.int8(dispatcher(), *given) for encoder in (torch, numpy))
    for name in fresh(alpha).permutation(numpy.linear_names)[:4]:
        found, want = (layers[name].run(dispatcher(), inputs[name]) for layers in (ours, theirs))
        assert np.array_equal(found, want), name
        assert ours[name].descriptor(3).output_element == "f32"


def test_a_quantized_model_is_what_its_layers_are(encoders):
    _, torch, sentences = encoders
    layers = torch.int8(dispatcher(), None, None)
    whole = torch.embed(sentences, layers.linear(dispatcher()))
    one_by_one = torch.embed(sentences, lambda name, x: layers[name].run(dispatcher(), x))
    assert np.array_equal(whole, one_by_one)


@pytest.mark.parametrize("absent", ["torch", "transformers"])
def test_without_a_package_the_error_names_the_command(monkeypatch, absent):
    monkeypatch.delitem(sys.modules, "skuda.tools.demo.bert")
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(MissingDependency, match=f"pip install {absent}"):
        import_module("skuda.tools.demo.bert")
