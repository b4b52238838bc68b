"""The program that measures the error of int8 attention."""

from __future__ import annotations

import attention_error
import numpy as np
import pytest
from support import fresh

import skuda


def test_the_table_has_small_errors_of_which_most_are_those_of_the_codes():
    found = attention_error.errors(128)
    assert len(found) == 5
    for error, of_codes in found.values():
        assert 0.003 < of_codes < error < 0.05


def test_the_worst_weights_are_those_that_are_left_out():
    assert 0.3 < attention_error.of_small_weights() < 127 / (127 + 255)


def test_a_wrong_result_shows(monkeypatch):
    right = skuda.ops.attention

    def other(**given):
        found = right(**given)
        return found._replace(output=np.roll(found.output, 1, 0))

    monkeypatch.setattr(skuda.ops, "attention", other)
    assert attention_error.errors(128)["normal"][0] > 0.3


def test_a_model_is_compared_with_itself(monkeypatch, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from decoders import small

    model = small("Llama", fresh(), "sdpa").float()
    ids = torch.randint(1, 64, (1, 30))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda _: lambda *_, **__: Ids(ids))
    model.save_pretrained(tmp_path)
    found = attention_error.of_model(tmp_path, "", [0, 10])
    assert 0 < found["divergence"] < 0.01
    assert found["perplexity"] == pytest.approx(found["perplexity in f32"], rel=0.05)
    assert found["same first choice"] > 0.8


class Ids:
    """What a tokenizer returns."""

    def __init__(self, ids):
        self.input_ids = ids
