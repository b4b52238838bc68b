"""`log_probs` and `sample`: values of the ops, gradients of torch, numbers for all rows, refusals."""

import pytest
import torch
from support import fresh

from skuda.registry.errors import InvalidProblem
from skuda.torch.sampling import log_probs, sample


@pytest.mark.parametrize("temperature", [None, 0.7, "rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_the_log_softmax(dtype, temperature):
    rng = fresh(dtype, temperature)
    logits = torch.from_numpy(rng.normal(0, 3, (2, 3, 50))).to(dtype).requires_grad_()
    tokens = torch.from_numpy(rng.integers(50, size=(2, 3)))
    heat = torch.from_numpy(rng.uniform(0.5, 2, (2, 3))).float() if temperature == "rows" else temperature
    weights = torch.from_numpy(rng.normal(size=(2, 2, 3))).float()
    found, entropy = log_probs(logits, tokens, heat)
    (weights[0] * found + weights[1] * entropy).sum().backward()
    got, logits.grad = logits.grad, None
    z = logits.double() / (1 if heat is None else heat[..., None] if temperature == "rows" else heat)
    logarithms = z.log_softmax(-1)
    want = logarithms.gather(-1, tokens[..., None])[..., 0], -(logarithms.exp() * logarithms).sum(-1)
    (weights[0] * want[0] + weights[1] * want[1]).sum().backward()
    assert found.dtype is entropy.dtype is torch.float32
    assert (found - want[0]).abs().max() < 5e-6
    assert (entropy - want[1]).abs().max() < 5e-6
    assert (got - logits.grad).abs().max() < (1e-5 if dtype is torch.float32 else 0.02) * logits.grad.abs().max()


def test_a_row_of_a_masked_token_has_a_gradient():
    logits = torch.tensor([[0.5, -torch.inf, 1.0]], requires_grad=True)
    found, entropy = log_probs(logits, torch.tensor([2]))
    (found + entropy).sum().backward()
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 1] == 0


def test_numbers_stand_for_all_rows():
    rng = fresh("numbers")
    logits = torch.from_numpy(rng.normal(size=(2, 4, 30))).float()
    seed = int(rng.integers(1 << 60))
    sequence, position = torch.arange(2)[:, None].expand(2, 4), torch.arange(4).expand(2, 4)
    drawn = sample(logits, seed=seed, sequence=sequence, position=position, top_k=5)
    assert drawn.shape == (2, 4)
    for row in range(2):
        for column in range(4):
            given = {"seed": seed, "sequence": row, "position": column, "top_k": 5}
            assert sample(logits[row, column], **given) == drawn[row, column]
    greedy = sample(logits, seed=seed, sequence=0, position=0, temperature=0)
    assert torch.equal(greedy, logits.argmax(-1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: log_probs(x, torch.zeros(3).long()), r"tokens must have shape \[2\]"),
        (lambda x: log_probs(x, torch.zeros(2).long(), torch.ones(3)), "temperature must be a number, or have shape"),
        (lambda x: sample(x, seed=1, sequence=torch.zeros(5), position=0), "sequence must be a number, or have shape"),
    ],
)
def test_other_shapes_are_refused(call, message):
    with pytest.raises(InvalidProblem, match=message):
        call(torch.zeros(2, 7))
