"""Ways of ``skuda certify --engine vllm``: exact engines of vLLM score prompts, and tell digests of their weights.

A request for the log-probabilities of its prompt computes all of it, also where the cache has a prefix. So after a
prefix, each token is scored by a request for what follows the tokens before it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from skuda.dispatch.settings import vllm_in_this_process
from skuda.kernels.attention.cache import PAGE
from skuda.registry.errors import InvalidProblem, SkudaError
from skuda.registry.text import one_line
from skuda.torch.certification import certificate
from skuda.torch.certification.weights import digests, first_difference
from skuda.vllm.status import NAME

Prompt = Sequence[int]
Scores = list[list[float]]
"""Of each prompt, the log-probability of each token after the first; a float has the value of its f32."""

ALONE, BATCH, WARM, CHUNKS = "vLLM alone", "vLLM in a batch", "vLLM after a warm prefix", "vLLM in chunks"
_CHUNK = 64
"""Tokens of a step, and the most requests in one, of an engine whose prompts are computed in chunks."""


@dataclass(frozen=True)
class EngineWay:
    """A way of `certify`: what an engine of vLLM computes, in a process that has its memory only until it is done.

    Attributes
    ----------
    name : str
        The way.
    model : PreTrainedModel
        The exact model of torch.
    job, found : dict
        The arguments of `serve`, and its result, which all ways of an engine share.
    """

    name: str
    model: Any
    job: dict[str, Any]
    found: dict[str, Any]

    def __call__(self, prompts: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return the log-probabilities of prompts; raise `SkudaError` if the engine fails."""
        if not self.found:
            torch.cuda.empty_cache()
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                given = [ids.tolist() for ids in prompts]
                try:
                    self.found.update(process.submit(serve, given, **self.job).result())
                except BrokenProcessPool as error:
                    raise SkudaError("vLLM: its process was killed") from error
        return {number: torch.tensor(scores) for number, scores in enumerate(self.found["ways"][self.name])}

    def why(self) -> str:
        """Say which weights differ first, if the engine has all of each."""
        other = self.found["weights"]
        return first_difference(digests(self.model.state_dict().items()), other, "vLLM") if other else ""


def ways_of(
    model: Any, floats: Any, folder: str, *, codes: str, prompts: int | None, ranks: int, seed: int, batch: int
) -> dict[str, EngineWay]:
    """Save a model in floating point, and return the ways of the engines that serve it.

    Parameters
    ----------
    model, floats : PreTrainedModel
        The exact model of torch, and the one that it was made from.
    folder : str
    codes : {"int8", "int16"}
        Those of weights and of inputs.
    prompts : int or None
        The first of those that `certify` draws, or all.
    ranks : int
        GPUs of the last engine, if there are several.
    seed, batch : int
        What draws the other prompts of a batch, and their number.

    Raises
    ------
    InvalidProblem
        If no prompt is so long that a page of the cache holds its beginning.
    """
    if max(certificate.LENGTHS[:prompts]) < PAGE + 2:
        raise InvalidProblem("certify", "prompts", str(prompts), f"have one of more than {PAGE + 1} tokens for vLLM")
    floats.save_pretrained(folder)
    dtype = str(floats.dtype).removeprefix("torch.")
    job = {"seed": seed, "batch": batch, "path": folder, "dtype": dtype, "codes": codes}
    every: list[tuple[tuple[str, ...], dict[str, int]]] = [((ALONE, BATCH, WARM), {})]
    every += [((CHUNKS,), {"max_num_batched_tokens": _CHUNK})]
    every += [((f"vLLM on {ranks} ranks",), {"tensor_parallel_size": ranks})] if ranks > 1 else []
    found: dict[str, EngineWay] = {}
    for names, more in every:
        own, shared = job | {"names": names, "more": more}, dict[str, Any]()
        found |= {name: EngineWay(name, model, own, shared) for name in names}
    return found


def options(path: str, dtype: str, longest: int, codes: str = "int8") -> dict[str, Any]:
    """Return the options of vLLM's `LLM` for an exact model of a floating checkpoint.

    Parameters
    ----------
    path : str
        The folder of the checkpoint. It needs no tokenizer.
    dtype : str
        That of both sides.
    longest : int
        The most tokens of a request.
    codes : {"int8", "int16"}
        Those of weights and of inputs.
    """
    described = {"quant_method": NAME, "exact": True, "weights": codes, "activations": codes}
    return {
        "model": path,
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "max_model_len": longest + 1,
        "hf_overrides": {"quantization_config": described},
        "enable_prefix_caching": True,
        "max_num_seqs": _CHUNK,
        # Beside a model of torch on the same card: a cache of this size, whatever is free.
        "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": 2 << 30,
    }


def serve(
    prompts: Sequence[Prompt],
    *,
    path: str,
    dtype: str,
    codes: str,
    names: Sequence[str],
    seed: int,
    batch: int,
    more: Any,
) -> dict[str, Any]:
    """Start an engine in this process, which does nothing else, and return what it computes.

    Parameters
    ----------
    prompts : sequence of sequence of int
        Ids, two or more of each.
    path, dtype, codes
        As in `options`, beside which there are `more`.
    names : sequence of str
        The ways.
    seed, batch
        As in `ways_of`.

    Returns
    -------
    dict
        ``ways``: the `Scores` of each way. ``weights``: the digests of all weights, of an engine of one rank.

    Raises
    ------
    SkudaError
        If the engine fails, or a prefix did not come from its cache.
    """
    os.dup2(2, 1)  # what vLLM prints is no output of the command
    vllm_in_this_process()
    try:
        vllm: Any = import_module("vllm")
        llm = vllm.LLM(**options(path, dtype, max(map(len, prompts)), codes), **more)
        runs: dict[str, Any] = {ALONE: _alone, WARM: _warm}
        ways = {name: runs.get(name, _batched)(llm, prompts, np.random.default_rng(seed), batch) for name in names}
        weights = {} if "tensor_parallel_size" in more else llm.apply_model(weights_of)[0]
        llm.llm_engine.engine_core.shutdown()
    except Exception as error:  # errors of vLLM may not be sent to other processes
        raise SkudaError(f"vLLM: {type(error).__name__}: {one_line(str(error))}") from error
    return {"ways": ways, "weights": weights}


def weights_of(model: nn.Module) -> dict[str, str]:
    """Return the digests of the weights of vLLM's model on one rank, by the names that a checkpoint has."""
    return digests(_as_saved(model))


def _as_saved(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model, with joined layers in parts, and without what pads a vocabulary."""
    joined = getattr(model, "packed_modules_mapping", {})
    for name, tensor in model.state_dict().items():
        path, _, own = name.rpartition(".")
        inside, dot, last = path.rpartition(".")
        layer, names = model.get_submodule(path), joined.get(last, [last])
        rows = tensor[: getattr(layer, "org_vocab_size", None)] if tensor.dim() else tensor[None]
        widths = layer.output_sizes if len(names) > 1 else [1]
        for part, piece in zip(names, rows.split([len(rows) * one // sum(widths) for one in widths]), strict=True):
            yield f"{inside}{dot}{part}.{own}", piece


def _alone(llm: Any, prompts: Sequence[Prompt], *_: Any) -> Scores:
    return [_scored(llm, [ids])[0] for ids in prompts]


def _batched(llm: Any, prompts: Sequence[Prompt], rng: np.random.Generator, batch: int) -> Scores:
    """Score prompts together with others, in a random order."""
    known = [token for ids in prompts for token in ids]
    lengths = rng.integers(2, max(map(len, prompts)), batch, endpoint=True)
    every = [*prompts, *(rng.choice(known, length).tolist() for length in lengths)]
    order = rng.permutation(len(every)).tolist()
    scores = dict(zip(order, _scored(llm, [every[number] for number in order]), strict=True))
    return [scores[number] for number in range(len(prompts))]


def _scored(llm: Any, prompts: Sequence[Prompt]) -> Scores:
    """Score whole prompts together."""
    found = _generated(llm, prompts, [{"prompt_logprobs": 0}] * len(prompts))
    return [
        [place[token].logprob for token, place in zip(ids[1:], each.prompt_logprobs[1:], strict=True)]
        for ids, each in zip(prompts, found, strict=True)
    ]


def _warm(llm: Any, prompts: Sequence[Prompt], *_: Any) -> Scores:
    """Score each token after those before it, of which the cache has all whole pages the second time."""
    given = [ids[:end] for ids in prompts for end in range(1, len(ids))]
    following = [token for ids in prompts for token in ids[1:]]
    asked = [{"logprob_token_ids": [token]} for token in following]
    _generated(llm, given, asked)
    found = _generated(llm, given, asked)
    for ids, each in zip(given, found, strict=True):
        pages, cached = (len(ids) - 1) // PAGE, each.num_cached_tokens
        if cached < pages * PAGE:
            raise SkudaError(f"vLLM computed a prefix of {len(ids)} tokens again: {cached} of them came from its cache")
    scores = iter(each.outputs[0].logprobs[0][token].logprob for token, each in zip(following, found, strict=True))
    return [[next(scores) for _ in ids[1:]] for ids in prompts]


def _generated(llm: Any, prompts: Sequence[Prompt], asked: Sequence[dict[str, Any]]) -> Any:
    """Return what an engine gives for one new token after each prompt."""
    made: Any = import_module("vllm").SamplingParams
    every = [made(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False, **each) for each in asked]
    return llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], every, use_tqdm=False)
