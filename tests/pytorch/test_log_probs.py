"""`log_probs` and `sample`: values of the ops, gradients of torch, numbers for all rows, refusals."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from support import fresh
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from skuda.registry.errors import InvalidProblem
from skuda.torch.ops.sampling import log_probs, sample

INF, NAN = torch.inf, torch.nan


def plain(logits, tokens, temperature=None):
    """Log-probabilities and entropies by torch's own functions, in f64."""
    z = logits.double() if temperature is None else logits.double() / torch.as_tensor(temperature).double()[..., None]
    logarithms = z.log_softmax(-1)
    return logarithms.gather(-1, tokens[..., None])[..., 0], -(logarithms.exp() * logarithms).sum(-1)


@pytest.mark.parametrize("temperature", [None, 0.7, "rows", "one"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_the_log_softmax(dtype, temperature):
    rng = fresh(dtype, temperature)
    logits = torch.from_numpy(rng.normal(0, 3, (2, 3, 50))).to(dtype).requires_grad_()
    tokens = torch.from_numpy(rng.integers(50, size=(2, 3)))
    shape, given = {"rows": (2, 3), "one": ()}.get(temperature), [logits]
    if shape is not None:
        temperature = torch.from_numpy(rng.uniform(0.5, 2, shape)).to(dtype).requires_grad_()
        given.append(temperature)
    weights = torch.from_numpy(rng.normal(size=(2, 2, 3))).float()
    found, want = log_probs(logits, tokens, temperature), plain(logits, tokens, temperature)
    assert found[0].dtype is found[1].dtype is torch.float32
    for a, b in zip(found, want, strict=True):
        assert (a - b).abs().max() < 5e-6
    again = checkpoint(log_probs, logits, tokens, temperature, use_reentrant=False)
    results = (found, want, again)
    got, right, same = (torch.autograd.grad((weights[0] * a + weights[1] * b).sum(), given) for a, b in results)
    assert all(map(torch.equal, got, same))
    for a, b in zip(got, right, strict=True):
        assert a.shape == b.shape
        assert (a - b).abs().max() < (1e-5 if dtype is torch.float32 else 0.02) * b.abs().max()


def test_a_row_of_a_masked_token_has_a_gradient():
    logits, temperature = torch.tensor([[0.5, -INF, 1.0]], requires_grad=True), torch.ones(1, requires_grad=True)
    found, entropy = log_probs(logits, torch.tensor([2]), temperature)
    (found + entropy).sum().backward()
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 1] == 0
    kept = logits.detach()[:, ::2].requires_grad_()
    (want,) = torch.autograd.grad(sum(plain(kept, torch.tensor([1]), temperature)), temperature)
    assert (temperature.grad - want).abs() < 1e-5


@pytest.mark.parametrize("entropy_counts", [False, True])
@pytest.mark.parametrize("way", ["where", "product"])
def test_masked_rows_have_the_gradient_0_and_used_ones_nan(way, entropy_counts):
    rng = fresh(way, entropy_counts)
    logits = torch.from_numpy(rng.normal(size=(8, 40))).float()
    logits[5, 3], logits[6] = NAN, -INF
    temperature = torch.tensor([1.0, 0.5, 2.0, 1.0, 1.0, 1.0, 1.0, -1.0])
    tokens = torch.tensor([1, -100, 40, 2**62, -(2**63), 3, 4, 5])
    for used in (set(), {2, 5, 6, 7}):
        mask = torch.tensor([row == 0 or row in used for row in range(8)])
        given = [each.clone().requires_grad_() for each in (logits, temperature)]
        found, entropy = log_probs(given[0], tokens, given[1])
        assert found.isnan().tolist() == [False] + [True] * 7
        loss = (torch.where(mask, found, 0) if way == "where" else found * mask).sum()
        (loss + entropy_counts * entropy[:5].sum()).backward()
        for row in range(8):
            for grad in (each.grad[row] for each in given):
                if row in used:
                    assert grad.isnan().all(), row
                else:
                    assert grad.isfinite().all(), row
                    assert (grad != 0).any() == (not row or (entropy_counts and row < 5)), row
        good = [each.detach()[1:2].requires_grad_() for each in (logits, temperature)]
        want = torch.autograd.grad(entropy_counts * plain(good[0], tokens[:1], good[1])[1], good)
        for each, grad in zip(given, want, strict=True):
            assert torch.allclose(each.grad[1], grad[0], atol=1e-5)


def test_vmap_second_derivatives_and_torch_func():
    rng = fresh("derivatives")
    logits, heat = (
        torch.from_numpy(rng.normal(size=(3, 4, 9))).float(),
        torch.from_numpy(rng.uniform(0.5, 2, 3)).float(),
    )
    tokens = torch.from_numpy(rng.integers(9, size=(3, 4)))
    for in_dims, given in (
        ((0, 0, 0), (logits, tokens, heat)),
        ((None, 0, None), (logits[0], tokens, heat[0])),
        ((2, 0, 0), (logits.permute(1, 2, 0), tokens, heat[:, None].expand(3, 4))),
        ((0, 0, 0), (logits[:, :, :0], tokens, heat)),
        ((0, 0, 0), (logits[:0], tokens[:0], heat[:0])),
    ):
        mapped = torch.vmap(log_probs, in_dims)(*given)
        parts = [
            [each if axis is None else each.select(axis, at) for axis, each in zip(in_dims, given, strict=True)]
            for at in range(len(given[1]))
        ]
        for at, part in enumerate(parts):
            for a, b in zip(mapped, log_probs(*part), strict=True):
                assert torch.equal(a[at].nan_to_num(9), b.nan_to_num(9))

    def loss(function):
        def of(logits, temperature, tokens):
            found, entropy = function(logits, tokens, temperature)
            return (found.square() + entropy**3 + found * entropy).sum()

        return of

    ours, right, given = loss(log_probs), loss(plain), (logits, heat, tokens)
    for derivative in (
        lambda f: torch.vmap(torch.func.grad(f, (0, 1)))(*given),
        lambda f: torch.func.jacrev(torch.func.jacrev(f, 1), (0, 1))(logits[0], heat[0], tokens[0]),
        lambda f: [torch.autograd.functional.hessian(lambda x: f(x, heat[1], tokens[1]), logits[1], vectorize=True)],
        lambda f: [torch.autograd.functional.jvp(lambda x: f(x, heat[0], tokens[0]), logits[0], logits[1])[1]],
    ):
        for a, b in zip(derivative(ours), derivative(right), strict=True):
            assert torch.allclose(a, b.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", ["jvp", "jvp of vmap", "jacfwd of jacrev", "dual", "compiled"])
@pytest.mark.parametrize("name", ["logits", "temperature"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # torch's own
def test_forward_mode_is_refused_by_name(name, way):
    given = {"logits": torch.ones(2, 7), "tokens": torch.tensor([1, 2]), "temperature": torch.ones(2)}

    def function(x):
        return log_probs(**given | {name: x})[0]

    def mapped(x):
        return torch.vmap(lambda x, k: log_probs(**given | {"tokens": k, name: x})[0], (None, 0))(
            x, torch.ones(3, 2).int()
        )

    def dual():
        with forward_ad.dual_level():
            function(forward_ad.make_dual(given[name], given[name]))

    def pushed(function):
        return torch.func.jvp(function, (given[name],), (given[name],))

    run = {
        "jvp": lambda: pushed(function),
        "jvp of vmap": lambda: pushed(mapped),
        "jacfwd of jacrev": lambda: torch.func.jacfwd(torch.func.jacrev(function))(given[name]),
        "dual": dual,
        "compiled": torch.compile(lambda: pushed(function), backend="aot_eager", fullgraph=True),
    }[way]
    with pytest.raises(Exception, match=f"{name}.*have none: there are no forward-mode") as caught:
        run()
    assert way == "compiled" or caught.type is InvalidProblem


@pytest.mark.parametrize("backend", ["inductor", pytest.param("aot_eager", marks=pytest.mark.full)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
def test_compiled_code_has_the_same_bits(backend):
    rng = fresh(backend)
    logits, tokens = torch.from_numpy(rng.normal(0, 3, (6, 700))).float(), torch.from_numpy(rng.integers(700, size=6))
    tokens[2] = -100

    def step(logits, temperature, position):
        drawn = sample(logits, seed=5, sequence=tokens, position=position, temperature=temperature.detach(), top_k=9)
        return *log_probs(logits, tokens, temperature), drawn

    compiled, frames = torch.compile(step, backend=backend, fullgraph=True), torch._dynamo.utils.counters["stats"]
    for position in range(4):
        found = []
        for run in (compiled, step):
            given = [each.clone().requires_grad_() for each in (logits, torch.tensor(0.8))]
            found.append([*run(*given, position)])
            found[-1] += torch.autograd.grad(torch.where(tokens < 0, found[-1][1], found[-1][0]).square().sum(), given)
        for a, b in zip(*found, strict=True):
            assert torch.equal(a.nan_to_num(9), b.nan_to_num(9))
        frames["first"] = frames["first"] or frames["unique_graphs"]
    assert frames["unique_graphs"] <= frames.pop("first") + 1  # none for each position


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
    ("name", "one", "other"),
    [
        ("top_k", 2**32 + 2, None),
        ("top_k", -(2**63), None),
        ("top_k", torch.tensor([2**32 + 2, 2]), torch.tensor([0, 2], dtype=torch.int32)),
        ("top_k", torch.tensor([-(2**32) + 2, 2]), torch.tensor([-1, 2], dtype=torch.int32)),
        ("top_k", torch.tensor(2**31 + 2, dtype=torch.uint32), 0),
        ("top_k", torch.tensor(2, dtype=torch.uint8), 2),
        ("seed", np.uint64(2**63 - 1), torch.tensor(2**63 - 1)),
        ("position", -(2**63), torch.full((2,), -(2**63))),
        ("sequence", torch.tensor(2**32 - 1, dtype=torch.uint32), 2**32 - 1),
        ("temperature", np.float32(0.7), torch.full((2,), 0.7)),
        ("temperature", Fraction(1, 2), torch.tensor(0.5, dtype=torch.bfloat16)),
        ("top_p", 1, None),
        ("top_p", 1e-40, torch.tensor(0.0)),
    ],
)
def test_numbers_and_tensors_mean_what_they_say(name, one, other):
    rng = fresh(name, one, other)
    given = {"logits": torch.from_numpy(rng.normal(size=(50, 2, 9))).float(), "seed": 3, "sequence": 4}
    given |= {"position": torch.arange(100).view(50, 2)}
    first, second = (
        each.expand(50, 2) if isinstance(each, torch.Tensor) and each.dim() else each for each in (one, other)
    )
    assert torch.equal(sample(**given | {name: first}), sample(**given | {name: second}))


def nested():
    return torch.nested.nested_tensor([torch.zeros(7), torch.zeros(7)], layout=torch.jagged)


FORMS = [None, "1", [1, 1], 1j, np.ones(2), torch.zeros(3), torch.zeros(2, 1), torch.zeros(2).to_sparse(), nested]
FRACTIONS = [*FORMS, 2.0, NAN, Fraction(5, 2), True, np.True_, 2**63, -(2**63) - 1, torch.zeros(2)]
FRACTIONS += [torch.zeros(2, dtype=each) for each in (torch.uint64, torch.float64, torch.bool, torch.complex64)]
REALS = [*FORMS, NAN, -0.1, INF, 10**400, True, torch.ones(2, dtype=torch.int64), torch.ones(2).bool()]
REALS += [torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.complex64), torch.ones(2, device="meta")]
LOGITS = [each for each in FORMS if not isinstance(each, torch.Tensor)] + [
    torch.tensor(1.0),
    torch.zeros(2, 7).to_sparse(),
]
LOGITS += [torch.zeros(2, 7, dtype=each) for each in (torch.int64, torch.float64, torch.complex64, torch.bool)]
TOKENS = [*FORMS, 1, torch.zeros(2, dtype=torch.int64, device="meta")]
TOKENS += [torch.zeros(2, dtype=each) for each in (torch.float32, torch.bool, torch.uint64, torch.int16)]
REFUSED = {
    (log_probs, "logits"): LOGITS,
    (sample, "logits"): LOGITS,
    (log_probs, "tokens"): TOKENS,
    (log_probs, "temperature"): [*REALS[1:], 0, -0.0, 1e-46, 1e39],
    (sample, "temperature"): [*REALS, 1e-46, 1e39, torch.ones(2, requires_grad=True)],
    (sample, "top_p"): [*REALS[1:], 1.001, torch.ones(2, requires_grad=True)],
    (sample, "top_k"): FRACTIONS[1:],
    **{(sample, name): FRACTIONS for name in ("seed", "sequence", "position")},
}


@pytest.mark.parametrize(("function", "name"), REFUSED)
def test_what_has_no_meaning_is_refused_by_name(function, name):
    given = {"logits": torch.zeros(2, 7)}
    given |= {"tokens": torch.tensor([1, 2])} if function is log_probs else {"seed": 1, "sequence": 2, "position": 3}
    function(**given)
    for value in REFUSED[function, name]:
        with pytest.raises(InvalidProblem) as caught:
            function(**given | {name: value() if callable(value) else value})
        assert (caught.value.subject, caught.value.field) == (function.__name__, name)
