"""`certify`: an exact model has the same bits in every way, any other differs, and a planted fault is found by name."""

import copy

import decoders
import numpy as np
import pytest
import torch
from support import fresh

from skuda.kernels.attention import attention
from skuda.kernels.quantize import norm
from skuda.registry.errors import InvalidProblem
from skuda.torch import Dynamic, Mixed, quantize_
from skuda.torch.certification.certificate import certify
from skuda.torch.certification.ways import LEFT, batches, run
from skuda.torch.exact.exact import exact_


def exact(rng, family="Llama", config=None, **more):
    model = decoders.small(family, rng, **more).float()
    for parameter in model.parameters():  # sums of squares of bf16 numbers are exact, whatever the order
        parameter.data *= torch.from_numpy(rng.uniform(0.99, 1.01, parameter.shape)).float()
    quantize_(model, Dynamic() if config is None else config, lambda *_: True)
    exact_(model)
    return model


def prompts(rng, *lengths):
    return [torch.from_numpy(rng.integers(64, size=length)) for length in lengths]


def test_an_exact_model_has_the_same_bits_and_the_plain_one_has_not():
    rng = fresh("certify")
    floats = decoders.small("Qwen3", rng)
    served, trained = copy.deepcopy(floats), copy.deepcopy(floats)
    for model, config in ((served, Dynamic()), (trained, Mixed())):
        quantize_(model, config, lambda *_: True)
        exact_(model)
    given, told = prompts(rng, 2, 45, 9), []
    found = certify(served, given, batch=3, trainer=trained, report=told.append, seed=int(rng.integers(1 << 30)))
    assert found.ok, found
    assert found.tokens == 53
    assert len({way.digest for way in found.ways}) == 1
    assert told == [way.name for way in found.ways]
    assert {"step by step", "in batches of 3", "compiled by aot_eager", "in training"} < set(told)
    floats.set_attn_implementation("sdpa")
    other = certify(floats, given, batch=3, compiler="")
    assert not other.ok
    assert "step by step" in [way.name for way in other.ways if not way.same]
    assert "first in model.layers.0" in str(other)


def test_the_log_probabilities_are_those_of_the_model():
    rng = fresh("values")
    model, (ids,) = exact(rng), prompts(rng, 20)
    with torch.no_grad():
        logits = model(ids[None], use_cache=False).logits[0, :-1]
    want = logits.double().log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    found = run(model, [ids], batches([ids], 2, torch.Generator())[LEFT])
    assert (found[0] - want).abs().max() < 2e-6


def another_power(right):
    """Return E with the exact exponential where there are few rows, as a kernel for them might have."""

    def power(u):
        return right(u) if u.shape[2] > 2 else np.exp2(np.maximum(u, -100) - attention.ONE).astype(np.float32)

    return power


def another_order(right):
    """Return a fold of one row with another order of sums."""

    def fold(values, rows, columns, compute):
        return right(values, rows, columns, compute) if rows > 1 else values(slice(0, columns)).cumsum(1)[:, -1]

    return fold


def another_split(right):
    """Return the parts of blocks that few rows see, cut in the middle, each half with weights of its own."""

    def blocks(query, z, kv, seen):
        if z.shape[1] > 2:
            return right(query, z, kv, seen)
        first = np.arange(seen.shape[-1]) < 64
        return attention._added(right(query, z, kv, seen & first), right(query, z, kv, seen & ~first))

    return blocks


FAULTS = {
    "ex2.approx": (attention, "power_of_two", another_power, "attention", 60),
    "order": (norm, "fold", another_order, "rms_norm_quantize", 150),
    "split": (attention, "_blocks", another_split, "attention", 150),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_by_layer_op_and_row(fault, monkeypatch):
    rng = fresh(fault)
    module, name, change, op, length = FAULTS[fault]
    for _ in range(6):  # codes may hide a fault: in every other model, if weights are small and so scores alike
        model = exact(rng, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, initializer_range=0.2)
        given, seed = prompts(rng, length), int(rng.integers(1 << 30))
        assert certify(model, given, batch=2, compiler="", seed=seed).ok
        with monkeypatch.context() as planted:
            planted.setattr(module, name, change(getattr(module, name)))
            found = certify(model, given, batch=2, compiler="", seed=seed)
        if not found.ok:
            break
    assert not found.ok
    (way,) = (way for way in found.ways if way.name == "step by step")
    assert f"of {op}, output" in way.note, found
    assert "first in model.layers.0, call 1 of" in way.note


def test_another_model_in_training_is_found():
    rng = fresh("trainer")
    served, trained = exact(rng), exact(rng, config=Mixed())
    found = certify(served, prompts(rng, 9), batch=2, compiler="", trainer=trained)
    assert [way.name for way in found.ways if not way.same] == ["in training"]
    missing = certify(served, prompts(rng, 9), batch=2, compiler="", others={"elsewhere": lambda _: {}})
    assert [way.note for way in missing.ways if not way.same] == ["prompt 0 has no result"]


@pytest.mark.parametrize(
    ("given", "named", "message"),
    [
        ([torch.zeros(1).long()], {}, "prompts must be ids of two"),
        (None, {"batch": 1}, "batch must be an integer, at least 2"),
    ],
)
def test_what_cannot_be_compared_is_refused(given, named, message):
    with pytest.raises(InvalidProblem, match=message):
        certify(exact(fresh()), given, **named)
