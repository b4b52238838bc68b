"""Generation with Llama of transformers in bf16 and in int8, with every kind of cache, on the wall clock."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import product
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from skuda.dispatch.select.tuning import Timing
from skuda.tools.bench.lab import TorchLab
from skuda.tools.bench.rival import Rival
from skuda.tools.bench.rivals import absence
from skuda.tools.bench.timing import WrongResult, error_line
from skuda.tools.studies.host import fused
from skuda.tools.studies.llama import LlamaSizes, config_of
from skuda.tools.studies.model import CACHES, SEQUENCES, Cache, FormResult, GenerateResult

FORMS: dict[str, Callable[[Any], Any]] = {"bf16": lambda model: model, "skuda": fused}
"""What makes the forms from the model in bf16, which they must not change."""
ROUNDS = 5
_WARM_UP = 2
"""Calls before the rounds: the first compiles, the second captures graphs."""
_MOST_LAYERS, _VOCABULARY, _PROMPT = 8, 32_000, 32
_TOKENS = {"cuda": 64, "cpu": 4}
"""New tokens of a sequence."""


def generated(lab: TorchLab, sizes: LlamaSizes, seed: int) -> dict[str, Any]:
    """Time generation in every form; return the fields of the record.

    A form that fails, or gives another number of tokens than it was asked for, is recorded as refused.
    """
    layers, tokens = min(sizes.layers, _MOST_LAYERS), _TOKENS[lab.place.type]
    facts = {"layers": layers, "vocabulary": _VOCABULARY, "prompt": _PROMPT, "tokens": tokens}
    models: dict[str, Any] = {}
    refused = dict.fromkeys(FORMS, absence(Rival("generate", "", lambda *_: lambda: None, "transformers")))
    for name, make in FORMS.items() if not any(refused.values()) else ():
        try:
            models[name] = make(models["bf16"] if models else _llama(lab.place, sizes, layers, seed))
        except Exception as error:  # noqa: BLE001  too little memory; it is recorded
            refused[name] = error_line(error)
    found = []
    for cache, rows in product(CACHES, SEQUENCES):
        random = torch.Generator().manual_seed(seed)
        prompts = torch.randint(_VOCABULARY, (rows, _PROMPT), generator=random).to(lab.place)
        calls = {name: partial(_MEASURES[cache], model, prompts, tokens) for name, model in models.items()}
        found.append(GenerateResult(cache=cache, rows=rows, ways=_timed(calls, refused)))
        for model in models.values():
            _release(model)
        lab.tidy()
    return {"generation": facts, "generated": tuple(found)}


def _timed(calls: Mapping[str, Callable[[], float]], refused: Mapping[str, str]) -> tuple[FormResult, ...]:
    """Time calls, which return milliseconds a token, in turn in the same rounds."""
    failed, samples = dict(refused), {name: list[float]() for name in calls}
    for turn in range(_WARM_UP + ROUNDS):
        for name in list(samples)[:: 1 if turn % 2 else -1]:
            try:
                samples[name].append(calls[name]())
            except Exception as error:  # noqa: BLE001  foreign code, and too little memory; it is recorded
                failed[name] = error_line(error)
                del samples[name]
    timings = {name: Timing.of(found[_WARM_UP:]) for name, found in samples.items()}
    return tuple(FormResult(name=name, timing=timings.get(name), refused=why) for name, why in failed.items())


def _llama(place: torch.device, sizes: LlamaSizes, layers: int, seed: int) -> Any:
    """Return a model with random weights, which no token ends."""
    from transformers import AutoModelForCausalLM

    words = {"vocab_size": _VOCABULARY, "eos_token_id": None, "bos_token_id": None}
    config = config_of(replace(sizes, layers=layers), **words)
    with torch.random.fork_rng([place] if place.type == "cuda" else []), place:
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def _with_cache(kind: str | None, model: Any, prompts: Tensor, tokens: int) -> float:
    """Generate greedily with a cache of a kind, None for the dynamic one; return milliseconds a token."""
    asked = {"do_sample": False, "min_new_tokens": tokens, "max_new_tokens": tokens, "pad_token_id": 0}
    began = perf_counter()
    found = model.generate(prompts, attention_mask=torch.ones_like(prompts), cache_implementation=kind, **asked)
    found = found.cpu()  # waits for the device
    seconds = perf_counter() - began
    _refuse_other([found.shape[1] - prompts.shape[1]] * len(found), prompts, tokens)
    return 1e3 * seconds / tokens


def _continuous(model: Any, prompts: Tensor, tokens: int) -> float:
    """Generate greedily in continuous batches; return milliseconds a token, between the first and the last."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    # The names of torch's attention over pages, before transformers 5.23 and since.
    since = "auto_switch_to_flash" in signature(ContinuousBatchingConfig).parameters
    model.set_attn_implementation("sdpa" if since else "paged|sdpa")
    more = {"auto_switch_to_flash": False} if since else {}
    # Two models share the memory, which one would fill with its cache.
    pages = ContinuousBatchingConfig(num_blocks=4 * len(prompts), max_batch_tokens=prompts.numel(), **more)
    asked = GenerationConfig(do_sample=False, max_new_tokens=tokens, eos_token_id=-1, pad_token_id=0)
    log = logging.getLogger("ContinuousBatchingLogger")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        results = model.generate_batch(
            prompts.tolist(), asked, pages, record_timestamps=True, persistent_manager=True, max_new_tokens=tokens
        ).values()
    finally:
        log.setLevel(level)
    for one in results:
        if one.error:
            raise RuntimeError(one.error)
    _refuse_other([len(one.generated_tokens) for one in results], prompts, tokens)
    stamps: list[float] = [stamp for one in results for stamp in one.timestamps]
    return 1e3 * (max(stamps) - min(stamps)) / (tokens - 1)


def _release(model: Any) -> None:
    """Free what a model keeps for continuous batching, and let it attend as before."""
    if hasattr(model, "destroy_cached_continuous_batching_manager"):
        model.destroy_cached_continuous_batching_manager()
    model.set_attn_implementation("sdpa")


def _refuse_other(counts: Sequence[int], prompts: Tensor, tokens: int) -> None:
    """Raise `WrongResult` unless each sequence got its tokens."""
    if list(counts) != [tokens] * len(prompts):
        raise WrongResult(f"{len(prompts)} sequences got {sorted(set(counts))} tokens, not {tokens} each")


_MEASURES: dict[Cache, Callable[[Any, Tensor, int], float]] = {
    "dynamic cache": partial(_with_cache, None),
    "static cache": partial(_with_cache, "static"),
    "continuous batching": _continuous,
}
