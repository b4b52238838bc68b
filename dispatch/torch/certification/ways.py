"""Ways to run prompts through a language model: alone, in chunks, step by step, padded, in batches, after a prefix."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from skuda.torch.certification.recorder import Recorder
from skuda.torch.ops.sampling import log_probs

ALONE, LEFT, FIXED = "each prompt alone", "padding to the left", "with a fixed cache"

Logprobs = dict[int, Tensor]
"""By the number of a prompt, f32 of shape (tokens - 1,): of each token after the first, given those before it."""


class Batch(NamedTuple):
    """Calls of a model on some prompts.

    Attributes
    ----------
    ids, mask : tensors of shape (sequences, columns), s64
        Tokens, and ones where there is no padding.
    owners : tuple of int
        The prompt that each sequence is; -1 for another one, whose results do not count.
    ends : tuple of int
        Columns after which a call ends and another one follows. The calls share a cache.
    most : int or None
        Columns of a cache of fixed length.
    forked : bool
        Whether the first call has one sequence only, and the others begin with its part of the cache.
    """

    ids: Tensor
    mask: Tensor
    owners: tuple[int, ...]
    ends: tuple[int, ...] = ()
    most: int | None = None
    forked: bool = False


def batches(prompts: Sequence[Tensor], most: int, rng: torch.Generator) -> dict[str, list[Batch]]:
    """Return the ways that need nothing but calls of the model, each as batches.

    Parameters
    ----------
    prompts : sequence of tensors of shape (tokens,), s64
    most : int
        Sequences of the largest batch.
    rng : Generator
        Draws the rest.
    """
    every = tuple(range(len(prompts)))
    single = [Batch(prompt[None], torch.ones(1, len(prompt)).long(), (n,)) for n, prompt in enumerate(prompts)]
    left, right = (Batch(*_padded(prompts, to_left=side), every) for side in (True, False))
    columns = left.ids.shape[1]
    ends = torch.randint(1, columns, (3,), generator=rng)
    fixed = sorted({max(1, end) for end in (columns // 2, columns - 2, columns - 1)})
    found = {
        ALONE: single,
        "step by step": [each._replace(ends=tuple(range(1, each.ids.shape[1]))) for each in single],
        "in chunks": [left._replace(ends=tuple(sorted({*ends.tolist(), columns - 1})))],
        FIXED: [left._replace(ends=tuple(fixed), most=columns)],
        LEFT: [left],
        "padding to the right": [right],
        "after a shared prefix": [_forked(prompt, n, rng) for n, prompt in enumerate(prompts)],
    }
    size = 2
    while size <= most:
        found[f"in batches of {size}"] = [_placed(prompts, n, size, rng) for n in every]
        size = most if size < most < 8 * size else 8 * size
    return found


def _padded(sequences: Sequence[Tensor], *, to_left: bool) -> tuple[Tensor, Tensor]:
    columns = max(map(len, sequences))
    ids, mask = torch.zeros(2, len(sequences), columns, dtype=torch.int64)
    for number, each in enumerate(sequences):
        at = slice(columns - len(each), None) if to_left else slice(len(each))
        ids[number, at], mask[number, at] = each, 1
    return ids, mask


def _placed(prompts: Sequence[Tensor], number: int, size: int, rng: torch.Generator) -> Batch:
    """Return a batch with a prompt at a random place, and random others of random lengths."""
    place = int(torch.randint(size, (1,), generator=rng))
    own = prompts[number]
    others = [_random_like(prompts, int(n), rng) for n in torch.randint(1, len(own) + 9, (size,), generator=rng)]
    others[place] = own
    owners = tuple(number if each == place else -1 for each in range(size))
    return Batch(*_padded(others, to_left=True), owners)


def _forked(prompt: Tensor, number: int, rng: torch.Generator) -> Batch:
    """Return a batch of a prompt and another continuation of its first tokens, which are computed once."""
    end = max(1, 2 * len(prompt) // 3)
    other = torch.cat((prompt[:end], _random_like([prompt], len(prompt) - end, rng)))
    return Batch(torch.stack((other, prompt)), torch.ones(2, len(prompt)).long(), (-1, number), (end,), forked=True)


def _random_like(prompts: Sequence[Tensor], tokens: int, rng: torch.Generator) -> Tensor:
    """Return tokens of the prompts in a random order."""
    known = torch.cat(tuple(prompts))
    return known[torch.randint(len(known), (tokens,), generator=rng)]


def run(
    model: Any,
    prompts: Sequence[Tensor],
    several: Sequence[Batch],
    *,
    call: Callable[..., Any] | None = None,
    recorded: bool = False,
    recorder: Recorder | None = None,
) -> Logprobs:
    """Run batches, and return the log-probabilities of the prompts in them.

    Parameters
    ----------
    model : PreTrainedModel
    prompts : sequence of tensors of shape (tokens,), s64
    several : sequence of Batch
    call : callable, optional
        What is called; by default the model.
    recorded : bool
        Whether gradients are recorded. Then the batches must not need a cache.
    recorder : Recorder, optional
        What sees the rows of the calls.
    """
    found: Logprobs = {}
    device, called = model.device, model if call is None else call
    for batch in several:
        positions = (batch.mask.cumsum(1) - 1).clamp(min=0)
        cuts = (0, *batch.ends, batch.ids.shape[1])
        cache: Any = cache_of(model, batch) if batch.ends else None
        for start, end in pairwise(cuts):
            rows = slice(1) if batch.forked and not start else slice(None)
            if batch.forked and start == cuts[1]:
                cache.batch_select_indices(torch.zeros(len(batch.owners), dtype=torch.int64, device=device))
            given: dict[str, Any] = {"attention_mask": batch.mask[rows, :end]}
            given["position_ids"] = positions[rows, start:end]
            given = {name: tensor.to(device) for name, tensor in given.items()}
            given |= {"use_cache": False} if cache is None else {cache_name(model): cache, "use_cache": True}
            owners = batch.owners if not batch.forked or start else batch.owners[-1:]
            at, seen = given["position_ids"].tolist(), batch.mask[rows, start:end].tolist()
            tokens = [
                [(owner, p) if one and owner >= 0 else None for p, one in zip(*row, strict=True)]
                for owner, *row in zip(owners, at, seen, strict=True)
            ]
            scope: AbstractContextManager[Any] = nullcontext() if recorder is None else recorder.call(tokens)
            with torch.set_grad_enabled(recorded), scope:
                logits = called(batch.ids[rows, start:end].to(device), **given).logits
            keep(found, prompts, logits.detach(), tokens)
    return found


def keep(found: Logprobs, prompts: Sequence[Tensor], logits: Tensor, tokens: Sequence[Sequence[Any]]) -> None:
    """Add the log-probabilities of the tokens that follow those of a call."""
    flat = [each for row in tokens for each in row]
    follow = [int(prompts[t[0]][t[1] + 1]) if t and t[1] + 1 < len(prompts[t[0]]) else 0 for t in flat]
    values, _ = log_probs(logits.flatten(0, 1), torch.tensor(follow, device=logits.device))
    for token, value in zip(flat, values.cpu(), strict=True):
        if token and token[1] + 1 < len(prompts[token[0]]):
            own = found.setdefault(token[0], torch.full((len(prompts[token[0]]) - 1,), torch.nan))
            own[token[1]] = value


def cache_of(model: Any, batch: Batch) -> Any:
    """Return an empty cache of the model's kind."""
    if model.config._attn_implementation == "skuda":  # noqa: SLF001  of transformers
        from skuda.torch.attention.kv_cache import Int8Cache  # it needs transformers

        return Int8Cache(model.config, batch.most)
    caches = importlib.import_module("transformers.cache_utils")
    if batch.most is None:
        return caches.DynamicCache(config=model.config)
    return caches.StaticCache(config=model.config, max_cache_len=batch.most)


def cache_name(model: Any) -> str:
    """Return how a model's `forward` calls its cache."""
    names = signature(model.base_model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"
