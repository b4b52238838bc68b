"""`update_`: a served model has the bits of the trained one, in the memory that it had."""

import copy

import decoders
import pytest
import torch
from support import fresh
from tensors import calibrated, same
from torch import nn

from skuda.registry.errors import InvalidProblem
from skuda.torch import Dynamic, FakeQuant, Mixed, fold_, fuse_, quantize_
from skuda.torch.convert.update import update_
from skuda.torch.exact.exact import exact_


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


@pytest.mark.parametrize(
    ("how", "trained_as"),
    [({"group_size": 32}, None), ({"group_size": 0}, Mixed()), ({"symmetric": True}, FakeQuant())],
    ids=str,
)
def test_served_weights_of_4_bits_become_those_of_the_quantizer(how, trained_as):
    """In the memory of a fused model, whose head has 8 bits. In training, such layers may also be those of torch."""
    rng = fresh(how, trained_as)
    config = Dynamic(weights="int4", **how)
    served, trained = (decoders.small("Qwen2", rng).bfloat16() for _ in range(2))
    fresh_ = copy.deepcopy(trained)
    for model in (served, fresh_):
        quantize_(model, config, lambda _, name: name != "lm_head")
        quantize_(model, Dynamic())
        fuse_(model)
    quantize_(trained, trained_as or Mixed(), None if trained_as else lambda _, name: name == "lm_head")
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in served.state_dict().items()}
    update_(served, trained, *([] if how == {"group_size": 32} else [config]))
    want = fresh_.state_dict()
    for name, tensor in served.state_dict().items():
        assert tensor.data_ptr() == before[name][0]
        assert same(tensor, want[name])
        assert not torch.equal(tensor, before[name][1])


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_folded_model_gets_the_codes_of_one_that_is_folded_alike(weights):
    rng = fresh(weights)
    floats = decoders.small("Qwen2", rng)
    calibration = calibrated(floats, torch.from_numpy(rng.integers(1, 64, (4, 32))))
    folded = copy.deepcopy(floats)
    folding = fold_(folded, calibration)
    config = Dynamic(weights=weights, calibration=folding.calibration)
    given = [config] if weights == "int4" else []
    served, trained = copy.deepcopy(folded), copy.deepcopy(folded)
    quantize_(served, config)
    quantize_(trained, Mixed(), None if weights == "int8" else lambda *_: False)
    want = copy.deepcopy(served.state_dict())
    for tensor in served.state_dict().values():
        tensor.zero_()
    with pytest.raises(InvalidProblem, match="trained must be folded as the served one"):
        update_(served, floats, *given)
    with pytest.raises(InvalidProblem, match="calibration must be that of the folded model"):
        update_(served, trained, Dynamic(weights="int4", calibration=calibration))
    update_(served, trained, *given)
    assert all(same(tensor, want[name]) for name, tensor in served.state_dict().items())


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


INT4 = Dynamic(weights="int4", group_size=32)


@pytest.mark.parametrize(
    ("value", "config", "message"),
    [
        (torch.nan, None, "0.weight must be finite; nothing was changed"),
        (1.0, INT4, r"0.weight must have the shape of the served one.*\[1, 1, 1152\], served \[1, 1, 1056\]"),
        (1.0, Dynamic(), "config must be a Dynamic with weights='int4'"),
    ],
)
def test_weights_of_4_bits_that_do_not_fit_are_refused(value, config, message):
    served, trained = nn.Sequential(nn.Linear(40, 16)), nn.Sequential(nn.Linear(40, 16))
    quantize_(served, Dynamic(weights="int4"))
    before = served.state_dict()["0.weight"].clone()
    trained[0].weight.data[3, 5] = value
    with pytest.raises(InvalidProblem, match=message):
        update_(served, trained, config)
    assert same(served.state_dict()["0.weight"], before)
