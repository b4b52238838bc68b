"""The rivals of the ops on logits: what torch has for them, and how engines of serving sample with torch."""

from __future__ import annotations

from functools import partial
from typing import Any

from skuda.kernels.sampling.log_softmax_at import LogSoftmaxAtDescriptor
from skuda.kernels.sampling.sample import SampleDescriptor
from skuda.kernels.sampling.weights import LogitsProblem
from skuda.tools.bench.formulas import Inputs, torch_module
from skuda.tools.bench.rival import Call, Rival


def logits_rivals(problem: LogitsProblem) -> tuple[Rival, ...]:
    """Return the rivals of an op on logits."""
    if isinstance(problem, LogSoftmaxAtDescriptor):
        return (Rival("eager", "torch.log_softmax and gather: no entropies, which the op has too", _log_softmax),)
    if not isinstance(problem, SampleDescriptor):
        return (Rival("eager", "torch.argmax", _argmax),)
    noise = "the largest quotient of a probability by exponential noise"
    if problem.has_top_k and problem.has_top_p:
        return (Rival("sorted", f"torch.sort, masks of top-k and top-p in that order, and {noise}", _sorted),)
    return (
        Rival("multinomial", "softmax and torch.multinomial", _multinomial),
        Rival("exponential", f"softmax and {noise}", _exponential),
    )


def _log_softmax(_problem: Any, inputs: Inputs) -> Call:
    torch, logits, tokens = torch_module(), inputs["logits"], inputs["tokens"]
    return lambda: torch.log_softmax(logits, -1, dtype=torch.float32).gather(-1, tokens)


def _argmax(_problem: Any, inputs: Inputs) -> Call:
    return partial(torch_module().argmax, inputs["logits"], -1)


def _scaled(inputs: Inputs) -> Any:
    return inputs["logits"].float() / inputs["temperature"][:, None]


def _drawn(weights: Any) -> Any:
    """Return a column of `weights` for every row, each with a probability in proportion to it; they are overwritten."""
    return weights.div_(torch_module().empty_like(weights).exponential_()).argmax(-1, keepdim=True)


def _multinomial(_problem: Any, inputs: Inputs) -> Call:
    return lambda: torch_module().multinomial(_scaled(inputs).softmax(-1), 1)


def _exponential(_problem: Any, inputs: Inputs) -> Call:
    return lambda: _drawn(_scaled(inputs).softmax(-1))


def _sorted(problem: Any, inputs: Inputs) -> Call:
    place = torch_module().arange(problem.v, device=inputs["logits"].device)
    top_k, top_p = inputs["top_k"][:, None], inputs["top_p"][:, None]

    def call() -> Any:
        z, tokens = _scaled(inputs).sort(-1, descending=True)
        p = z.masked_fill_(place >= top_k, -torch_module().inf).softmax(-1)
        return tokens.gather(-1, _drawn(p.masked_fill_(p.cumsum(-1) - p >= top_p, 0)))

    return call
