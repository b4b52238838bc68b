"""Compares what a serving engine says of its likeliest tokens with a reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log
from typing import Any

import torch
from torch import Tensor

from skuda.torch.evaluation.comparison import PerToken, logits_of

_LEAST = 1e-6
"""The least probability of an engine's other tokens together; its log-probabilities are rounded to f32."""


def likeliest(reference: Any, ids: Tensor, places: Sequence[Mapping[int, float]]) -> PerToken:
    """Compare an engine's log-probabilities of some tokens with those of a reference.

    The divergence is a lower bound: that of the given tokens, with all others taken together as one.

    Parameters
    ----------
    reference : torch.nn.Module
        As in `compare`.
    ids : tensor of shape (T,), s64
        A prompt.
    places : sequence of T mappings of int to float
        For each token of the prompt, log-probabilities of tokens in its place by id: its own, and those of the
        likeliest ones. The first is not read.
    """
    with torch.no_grad():
        every = logits_of(reference, "reference", ids[None])[0].double().log_softmax(1).cpu()
    rows = []
    for own, token, known in zip(every, ids[1:].tolist(), places[1:], strict=False):
        q, p = torch.tensor(list(known.values()), dtype=torch.float64), own[list(known)]
        left = max(0.0, 1.0 - float(p.exp().sum()))
        others = left * log(left / max(_LEAST, 1.0 - float(q.exp().sum()))) if left else 0.0
        same = float(max(known, key=known.__getitem__) == int(own.argmax()))
        rows.append((float((p.exp() * (p - q)).sum()) + others, same, known[token], float(own[token])))
    divergence, agrees, *likelihoods = torch.tensor(rows, dtype=torch.float64).T
    return PerToken(divergence, agrees, torch.stack(likelihoods))
