"""Tokens and log-probabilities of rows of logits by skuda's ops: a row has the same bits whatever the batch.

The random number of a token follows from the seed of its request and the token's position. So it depends neither on
other requests nor on the order of steps, and `skuda.torch.sample` draws the same.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from skuda.registry.descriptor import Descriptor
from skuda.torch.ops.sampling import as_top_k
from skuda.torch.ops.tensor_op import OPS

_LEAST_TEMPERATURE = 1e-5
"""Below this, engines take the largest logit."""
_SIGN = 31
_WORD = 32
_ROWS = 64
"""Rows at a time in what takes several times the memory of logits."""


def greedy(logits: Tensor) -> Tensor:
    """Return the lowest id among the largest logits of each row, s64; -1 for a row without a distribution."""
    found: Tensor = torch.ops.skuda.argmax.default(logits)
    best = logits.gather(1, found[:, None])[:, 0]
    return found.masked_fill_((best - best).isnan(), -1)  # of what is not finite; fewer launches than `isfinite`


def draw(logits: Tensor, seed: Tensor, position: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Draw a token for each row.

    Parameters
    ----------
    logits : tensor of shape (rows, V)
        After the temperature.
    seed, position : tensors of shape (rows,), s64
    top_k, top_p : tensors of shape (rows,), optional

    Returns
    -------
    tensor of shape (rows,), s64
        Ids; -1 for a row without a distribution: with a NaN, plus infinity, or nothing but minus infinity.
    """
    ones, zeros = torch.ones_like(seed, dtype=torch.float32), torch.zeros_like(seed)
    top_k = None if top_k is None else as_top_k(top_k)
    found: Tensor = torch.ops.skuda.sample.default(logits, ones, seed, zeros, position, top_k, top_p)
    return found


class Undefined:
    """Counts rows of logits without a distribution, and warns of them.

    A GPU's count is read at a later step, so that no step waits for it.

    Attributes
    ----------
    rows : int
        Rows that this process has seen so far, of those that are known already.

    Parameters
    ----------
    log : Logger
    hint : str
        What a user of the engine can do to find such requests.
    """

    def __init__(self, log: logging.Logger, hint: str) -> None:
        self._log, self._hint = log, hint
        self.rows, self._told = 0, 0
        self._count: Tensor | None = None
        self._host = torch.zeros((), dtype=torch.int64)
        self._event: torch.cuda.Event | None = None
        self._under_way = False

    def settle(self, tokens: Tensor) -> Tensor:
        """Count the ids of -1, and turn them into 0 in place, since engines look every id up.

        Parameters
        ----------
        tokens : tensor of shape (rows,), s64

        Returns
        -------
        tensor of shape (rows,), s64
        """
        self._read()
        if self._count is None or self._count.device != tokens.device:
            self._count = torch.zeros((), dtype=torch.int64, device=tokens.device)
            self._host = torch.zeros((), dtype=torch.int64, pin_memory=tokens.is_cuda)
            self._event, self._under_way = torch.cuda.Event() if tokens.is_cuda else None, False
        self._count += (tokens < 0).sum()
        if not self._under_way:
            self._host.copy_(self._count, non_blocking=True)
            self._under_way = True
            if self._event is None:
                self._read()
            else:
                self._event.record()
        return tokens.clamp_(min=0)

    def _read(self) -> None:
        """Take a count that has arrived, and tell at the first row and whenever the number has doubled."""
        if not self._under_way or not (self._event is None or self._event.query()):
            return
        self.rows, self._under_way = int(self._host), False
        if self.rows >= max(2 * self._told, 1):
            self._told = self.rows
            self._log.warning(
                "skuda: %d rows of logits so far had a NaN or an infinity, and no distribution. Their token is id 0, "
                "and its log-probability is NaN. %s",
                self.rows,
                self._hint,
            )


def chosen(temperature: Tensor, largest_ones: Tensor, drawn: Tensor) -> Tensor:
    """Return the tokens with the largest logit where the temperature is 0, and the drawn ones elsewhere."""
    return torch.where(temperature < _LEAST_TEMPERATURE, largest_ones, drawn)


def verified(drawn: Tensor, drafts: Tensor, starts: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Take what was drawn for each request while drafts equal it, and the first that no equal draft stands for.

    Parameters
    ----------
    drawn : tensor of shape (rows,)
        A token for each row. The rows of a request lie together: its next token, and those after each of its drafts.
    drafts : tensor of shape (rows,)
        What was guessed for each row; -1 in the last row of a request.
    starts : tensor of shape (requests,)
        The first row of each request.
    most : int
        The most rows of a request.

    Returns
    -------
    tensor, tensor of shape (requests, most)
        Tokens, -1 where there are no more, and the row of each.
    """
    rows = starts[:, None] + torch.arange(most, device=drawn.device)
    rows = rows.clamp_(max=len(drawn) - 1)
    right = (drawn == drafts)[rows[:, :-1]].int().cumprod(1).bool()
    taken = torch.cat([torch.ones_like(rows[:, :1], dtype=torch.bool), right], 1)
    return drawn[rows].masked_fill(~taken, -1), rows


def log_probabilities(logits: Tensor, ids: Tensor | None = None) -> Tensor:
    """Return the log-probabilities of ids of each row, or of all, f32 of shape (rows, ids)."""
    run = torch.ops.skuda.log_softmax_at.default
    if ids is not None:
        found: Tensor = run(logits, ids)[0]
        return found
    every = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    result = torch.empty_like(logits, dtype=torch.float32)
    for rows, part in zip(logits.split(_ROWS), result.split(_ROWS), strict=True):
        part.copy_(run(rows, every.expand(rows.shape).contiguous())[0])
    return result


def largest(scores: Tensor, count: int) -> Tensor:
    """Return the ids of the largest scores, the largest first, of equal ones that of the lower id first.

    Parameters
    ----------
    scores : tensor of shape (rows, V)
    count : int

    Returns
    -------
    tensor of shape (rows, count), s64
    """
    if not count:
        return torch.empty((len(scores), 0), dtype=torch.int64, device=scores.device)
    return torch.cat([_ordered(part).topk(count, dim=1).indices for part in scores.split(_ROWS)])


def _ordered(scores: Tensor) -> Tensor:
    """Return an s64 for each score, in the same order. None are equal, since topk leaves the order of equals open."""
    bits = (scores.float() + 0.0).view(torch.int32)  # minus zero equals zero
    lower = torch.arange(scores.shape[1] - 1, -1, -1, device=scores.device)
    return (bits ^ (bits >> _SIGN & 0x7FFFFFFF)).long().bitwise_left_shift_(_WORD).add_(lower)


def ranks_of(scores: Tensor, ids: Tensor) -> Tensor:
    """Return how many scores of each row are at least that of its id, s64 of shape (rows,)."""
    return (scores >= scores.gather(1, ids[:, None])).sum(1)


def problems(width: int) -> Iterator[Descriptor]:
    """Return the problems of a step with one row of so many logits, and one id to score."""
    logits, number, long = (torch.empty(shape, device="meta") for shape in ((1, width), (1,), (1,)))
    long = long.long()
    yield OPS["argmax"].problem(logits=logits)
    yield OPS["log_softmax_at"].problem(logits=logits, tokens=long[:, None])
    keys: dict[str, Any] = {"temperature": number, "seed": long, "sequence": long, "position": long}
    top_k, top_p = {"top_k": number.int()}, {"top_p": number}
    for sets in ({}, top_k, top_p, top_k | top_p):
        yield OPS["sample"].problem(logits=logits, **keys, **sets)


def signed(seed: int) -> int:
    """Return the s64 with the bits of a seed."""
    return (seed + 2**63) % 2**64 - 2**63


@lru_cache(maxsize=4096)
def hashed(seed: int, name: str) -> int:
    """Return a seed for a request without one."""
    return int.from_bytes(blake2b(f"{seed} {name}".encode(), digest_size=8).digest(), "little", signed=True)
