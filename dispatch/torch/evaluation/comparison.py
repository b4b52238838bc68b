"""`compare`: how far a model's next tokens are from those of a reference, without labels."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown
from skuda.registry.value import Real, Size, Value
from skuda.torch.evaluation.layers import replacements, results_with
from skuda.torch.models.replaceable_layers import check_model

_CHUNK = 1 << 22
"""Logits that are in f64 at a time."""
_COSTLIEST = 5
"""Layers that a text shows."""


class Comparison(Value):
    """What `compare` found. Standard errors take tokens as independent.

    Attributes
    ----------
    tokens : int
        Positions that count: all numbers are of these.
    divergence, divergence_error, divergence_median, divergence_p99 : float
        KL(reference || model) of the next token's distribution in nats: mean over the tokens, standard error of the
        mean, median and 99th percentile.
    agreement : float
        Share of tokens with the same first choice.
    perplexity, reference_perplexity : float, optional
        Of the actual next tokens; None for logits of anything else.
    likelihood, likelihood_error : float, optional
        Log-likelihood of a token by the model minus that by the reference, in nats: mean over the tokens, and the
        standard error of this paired difference. None as above.
    layers : dict of str to float
        By int8 layer, the mean divergence of the reference with only this layer replaced; None for a layer that no
        input has reached. Empty without ``by_layer=True``.
    """

    tokens: Size
    divergence: Real
    divergence_error: Real
    divergence_median: Real
    divergence_p99: Real
    agreement: Real
    perplexity: Real | None = None
    reference_perplexity: Real | None = None
    likelihood: Real | None = None
    likelihood_error: Real | None = None
    layers: dict[str, Real | None] = Field(default_factory=dict)

    def __str__(self) -> str:
        found = {"tokens": f"{self.tokens}"}
        if self.perplexity is not None:
            found["perplexity"] = f"{self.perplexity:.6g}, reference {self.reference_perplexity:.6g}"
            found["log-likelihood"] = f"{self.likelihood:+.3g} +- {self.likelihood_error:.2g} from the reference"
        found["divergence"] = f"{self.divergence:.3g} +- {self.divergence_error:.2g}"
        found["its median"], found["its 99%"] = f"{self.divergence_median:.3g}", f"{self.divergence_p99:.3g}"
        found["same choice"] = f"{self.agreement:.4f}"
        costs = sorted(((cost, name) for name, cost in self.layers.items() if cost is not None), reverse=True)
        found |= {name or "the model": f"{cost:.3g} alone" for cost, name in costs[:_COSTLIEST]}
        width = max(map(len, found))
        return "\n".join(f"{name:{width}}  {value}" for name, value in found.items())


class PerToken(NamedTuple):
    """Numbers of tokens, f64, on the CPU.

    Attributes
    ----------
    divergence, agrees : tensor of shape (tokens,)
        Divergence in nats, and 1 where the first choices are equal, else 0.
    likelihoods : tensor of shape (2, tokens), optional
        Log-likelihoods of the actual next token by the model and by the reference.
    """

    divergence: Tensor
    agrees: Tensor
    likelihoods: Tensor | None = None


def compare(
    model: nn.Module, reference: nn.Module, inputs: Iterable[Tensor | Mapping[str, Any]], *, by_layer: bool = False
) -> Comparison:
    """Compare the next tokens of a model with those of a reference, such as the model before it was quantized.

    No labels are needed: for each token, the two distributions of the next one are compared, in f64. Standard errors
    take tokens as independent. Those of one text are not quite, so true errors are somewhat larger. The logits of one
    input are in memory at a time. Both models run in eval mode without gradients, and are left as they were.

    Parameters
    ----------
    model, reference : torch.nn.Module
        Causal language models of transformers, or modules that return logits, or an object with ``logits``. They may be
        on different devices.
    inputs : iterable of tensor or mapping
        Token ids of shape (B, T), or mappings of arguments of the models, such as ``input_ids`` and ``attention_mask``.
        Tokens with a mask of 0 do not count, nor does the last of each row, which has no next one. If the logits are
        not of shape (B, T, ...) of ids, as those of a classifier, each row of them counts, and there is no likelihood.
    by_layer : bool
        Whether to find what the codes of each int8 layer alone cost: the divergence of the reference if only this layer
        is replaced, for its inputs in the reference. This calls the reference once for each layer and input. Factors
        that were folded in this process divide inputs, and multiply outputs.

    Returns
    -------
    Comparison

    Raises
    ------
    InvalidProblem
        For inputs of less than two tokens, logits of different shapes, and logits that are not finite. With `by_layer`,
        for a model without int8 layers, for an int8 layer that the reference lacks or that is a rank's part, and for
        a reference that is folded otherwise, by factors that are not known.
    """
    check_model("compare", model, None)
    check_model("compare", reference, None)
    if not isinstance(by_layer, bool):
        raise InvalidProblem("compare", "by_layer", shown(by_layer), "be True or False")
    if isinstance(inputs, (Tensor, Mapping)) or not isinstance(inputs, Iterable):
        raise InvalidProblem("compare", "inputs", shown(inputs), "be a list of tensors of ids, or of mappings")
    found: list[PerToken] = []
    with torch.no_grad(), evaluating(model, reference):
        layers = replacements(model, reference) if by_layer else {}
        costs: dict[str, list[float]] = {name: [] for name in layers}
        for given in inputs:
            call = partial(logits_of, reference, "reference", given)
            want = call()
            places = Places.of(given, want)
            found.append(compared(logits_of(model, "model", given), want, places))
            for name, logits in results_with(layers, call):
                costs[name].append(float(compared(logits, want, places, f"reference with {name}").divergence.sum()))
    return summary(found, costs)


def summary(found: Sequence[PerToken], costs: Mapping[str, Sequence[float]] | None = None) -> Comparison:
    """Return the comparison of all tokens of some inputs, of which layers alone cost these divergences.

    Raises
    ------
    InvalidProblem
        For less than two tokens.
    """
    tokens = sum(len(one.divergence) for one in found)
    if tokens < 2:
        had = f"{tokens} tokens to compare, in {len(found)} inputs"
        raise InvalidProblem("compare", "inputs", had, "have two or more, with a next one and a mask that is not 0")
    divergence = torch.cat([one.divergence for one in found])
    fields: dict[str, Any] = {}
    likelihoods = [one.likelihoods for one in found if one.likelihoods is not None]
    if len(likelihoods) == len(found):
        mine, other = torch.cat(likelihoods, 1)
        fields = {"perplexity": math.exp(-mine.mean()), "reference_perplexity": math.exp(-other.mean())}
        fields |= {"likelihood": float((mine - other).mean()), "likelihood_error": _error(mine - other)}
    median, high = np.quantile(divergence.numpy(), (0.5, 0.99))
    return Comparison(
        tokens=tokens,
        divergence=float(divergence.mean()),
        divergence_error=_error(divergence),
        divergence_median=float(median),
        divergence_p99=float(high),
        agreement=float(torch.cat([one.agrees for one in found]).mean()),
        layers={name: sum(each) / tokens if each else None for name, each in (costs or {}).items()},
        **fields,
    )


def _error(values: Tensor) -> float:
    """Return the standard error of a mean."""
    return float(values.std()) / math.sqrt(len(values))


def compared(logits: Tensor, reference: Tensor, places: Places, who: str = "model") -> PerToken:
    """Return the numbers of a model's logits beside those of the reference; errors name whose they are."""
    if logits.shape != reference.shape:
        rule = f"return logits of the reference's shape, {list(reference.shape)}"
        raise InvalidProblem("compare", who, f"logits of shape {list(logits.shape)}", rule)
    mine, other = (each.reshape(-1, each.shape[-1]) for each in (logits, reference))
    parts, likelihoods = list[tuple[Tensor, Tensor]](), list[Tensor]()
    size = max(1, _CHUNK // logits.shape[-1])
    for start in range(0, max(1, len(places.rows)), size):
        at = places.rows[start : start + size]
        p = _log_probs(other[at.to(other.device)], "reference")
        q = _log_probs(mine[at.to(mine.device)].to(other.device), who)
        parts.append(((p.exp() * (p - q)).sum(1).cpu(), (p.argmax(1) == q.argmax(1)).double().cpu()))
        if places.following is not None:
            column = places.following[start : start + size, None].to(p.device)
            likelihoods.append(torch.stack([each.gather(1, column)[:, 0] for each in (q, p)]).cpu())
    divergence, agrees = (torch.cat(each) for each in zip(*parts, strict=True))
    return PerToken(divergence, agrees, torch.cat(likelihoods, 1) if likelihoods else None)


def _log_probs(logits: Tensor, who: str) -> Tensor:
    found = logits.double().log_softmax(1)
    if not bool(found.isfinite().all()):
        raise InvalidProblem("compare", who, "logits that are not finite", "return finite ones for tokens that count")
    return found


class Places(NamedTuple):
    """The rows of logits that count, of shape (tokens,), and the actual next tokens if the logits are of ids."""

    rows: Tensor
    following: Tensor | None

    @classmethod
    def of(cls, given: Tensor | Mapping[str, Any], logits: Tensor) -> Places:
        """Return those of an input."""
        named: Mapping[str, Any] = given if isinstance(given, Mapping) else {"input_ids": given}
        ids, mask = named.get("input_ids"), named.get("attention_mask")
        counts = torch.ones(logits.shape[:-1], dtype=torch.bool)
        if mask is not None and counts.dim() > 1:
            if mask.shape != counts.shape:
                rule = f"have the shape of the tokens, {list(counts.shape)}"
                raise InvalidProblem("compare", "attention_mask", f"shape {list(mask.shape)}", rule)
            counts &= mask.cpu() != 0
        if ids is None or ids.shape != counts.shape or ids.is_floating_point() or int(ids.max()) >= logits.shape[-1]:
            return cls(counts.flatten().nonzero()[:, 0], None)
        counts[:, :-1] &= counts[:, 1:].clone()
        counts[:, -1] = False
        rows = counts.flatten().nonzero()[:, 0]
        return cls(rows, ids.cpu().flatten()[rows + 1].long())


def logits_of(model: Any, who: str, given: object) -> Tensor:
    """Return a model's logits for an input, of shape (..., classes); errors say whose they are."""
    if not isinstance(given, (Tensor, Mapping)):
        raise InvalidProblem("compare", "inputs", shown(given), "hold tensors of ids, or mappings of arguments")
    place = next((each.device for each in chain(model.parameters(), model.buffers())), None)
    several = given if isinstance(given, Mapping) else {"": given}
    named = {name: value.to(place) if isinstance(value, Tensor) else value for name, value in several.items()}
    positional = [named.pop("")] if "" in named else []
    if "use_cache" in inspect.signature(model.forward).parameters:
        named = {"use_cache": False, **named}
    found = model(*positional, **named)
    logits = getattr(found, "logits", found)
    if not isinstance(logits, Tensor) or logits.dim() < 2 or not logits.is_floating_point():
        rule = "return logits of two or more axes, or an object with them"
        raise InvalidProblem("compare", who, f"a {type(found).__name__} as a result", rule)
    return logits


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Put models into eval mode, and each of their modules back into its own."""
    was = {module: module.training for model in models for module in model.modules()}
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for module, training in was.items():
            module.training = training
