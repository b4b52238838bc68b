"""`update_`: a served model has the bits of the trained one, in the memory that it had."""

import copy

import decoders
import pytest
import torch
from support import fresh
from torch import nn

from skuda.registry.errors import InvalidProblem
from skuda.torch import Dynamic, FakeQuant, Mixed, quantize_
from skuda.torch.exact import exact_
from skuda.torch.update import update_


def pair(rng, config, **more):
    floats = decoders.small("Qwen2", rng, **more)
    models = floats, copy.deepcopy(floats)
    for model, how in zip(models, (Dynamic(), config), strict=True):
        quantize_(model, how, lambda *_: True)
        exact_(model)
    return models


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("config", [Mixed(), FakeQuant()], ids=str)
def test_after_a_step_the_served_model_has_the_bits_of_the_trained_one(config, tied):
    rng = fresh(config, tied)
    served, trained = pair(rng, config, tie_word_embeddings=tied)
    ids = torch.from_numpy(rng.integers(1, 64, (2, 9)))
    addresses = {name: tensor.data_ptr() for name, tensor in served.state_dict().items()}
    optimizer = torch.optim.SGD(trained.parameters(), 1.0)
    for _ in range(2):
        found = trained(ids, use_cache=False).logits
        with torch.no_grad():
            assert torch.equal(served(ids, use_cache=False).logits, found)
        nn.functional.cross_entropy(found.flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            assert not torch.equal(served(ids, use_cache=False).logits, trained(ids, use_cache=False).logits)
        update_(served, trained)
    assert {name: tensor.data_ptr() for name, tensor in served.state_dict().items()} == addresses


BAD = {
    "nan": (lambda _, trained: trained.lm_head.weight.data[3, 5].fill_(torch.nan), "lm_head.weight must be finite"),
    "shape": (
        lambda _, trained: setattr(trained.model, "norm", nn.RMSNorm(32)),
        "model.norm.weight must have the shape",
    ),
    "names": (lambda served, _: served.register_buffer("more", torch.zeros(1)), "had no more"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused_and_changes_nothing(case):
    served, trained = pair(fresh(case), Mixed())
    before = {name: tensor.clone() for name, tensor in served.state_dict().items()}
    change, message = BAD[case]
    change(served, trained)
    trained.model.embed_tokens.weight.data += 1
    with pytest.raises(InvalidProblem, match=message):
        update_(served, trained)
    after = served.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
