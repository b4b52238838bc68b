"""Time an exact model beside the same model without exactness, in bf16 and in training, and write the times as JSON.

    python tests/programs/exact_cost.py --layers 16 --output docs/evidence/h200-exact.json

The model is a Llama in the sizes of Llama 3 8B with random weights. Without a GPU, `--tiny` runs every path on a CPU.
Times are medians in ms. Those of `update_`, which gives the served model the weights of the trained one, are in s.

- `decode M`: a step of one new token for each of M sequences of 1,024 tokens, replayed from a CUDA graph; `sampled,
  logprob` has a token and its log-probability from the logits, too. `prefill 4096`: one prompt, eager.
- `default`: layers of `Dynamic`, `fuse_` and int8 attention, the head in bf16. `exact` is made by `exact_`.
- `trainer`: layers of `Mixed`, made by `exact_`. It and `bf16`, with torch's attention, take 4 x 1,024 tokens, eager.
  A `step` has the forward and backward pass, without an optimizer.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import skuda.torch as st
from skuda.tools.bench.clock import CudaClock, HostClock
from skuda.torch.attention.interface import Int8Cache
from skuda.torch.exact.exact import exact_

CACHE = next(name for name in ("cache", "past_key_values") if name in signature(LlamaForCausalLM.forward).parameters)
Call = Callable[[], Any]


class Sizes(NamedTuple):
    """Sizes of the model, and what it is timed with.

    `held` is the tokens of a sequence before a step, `sequences` are the batches of steps, `prompt` is the tokens of a
    prefill, and `batch` is the sequences and tokens of a training step.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    held: int
    sequences: tuple[int, ...]
    prompt: int
    batch: tuple[int, int]


LLAMA_3_8B = Sizes(4096, 14336, 32, 8, 128256, 1024, (1, 16, 64), 4096, (4, 1024))
TINY = Sizes(128, 192, 4, 2, 64, 5, (1, 2, 3), 9, (2, 7))


class Timer:
    """Times calls of a model in ms, and keeps them by name; without a GPU, nothing is captured."""

    def __init__(self, sizes: Sizes, layers: int) -> None:
        on_gpu = torch.cuda.is_available()
        self.sizes, self.device = sizes, torch.device("cuda" if on_gpu else "cpu")
        self.clock: Any = CudaClock(torch.cuda, self.device) if on_gpu else HostClock()
        self.found: dict[str, Any] = {"card": torch.cuda.get_device_name() if on_gpu else "CPU", "layers": layers}

    def keep(self, name: str, value: float) -> None:
        self.found[name] = value
        sys.stdout.write(f"{name}: {value:.6g}\n")
        sys.stdout.flush()

    def time(self, name: str, call: Call, before: Call = lambda: None, rounds: int = 5, warm: int = 3) -> None:
        """Keep the median of a call; `before` runs before each round and is not timed."""
        times = [self.clock.measure([call], before)[0] for _ in range(warm + rounds)][warm:]
        self.keep(name, statistics.median(times) / 1e3)

    def ids(self, *shape: int) -> torch.Tensor:
        return torch.randint(1, min(1000, self.sizes.vocabulary), shape, device=self.device)

    @torch.no_grad()
    def decode(self, name: str, model: Any, sequences: int, *, sampled: bool = False) -> None:
        """Time a step, always at the same place of the cache."""
        held = self.sizes.held
        cache = Int8Cache(model.config, max_cache_len=held + 1)
        model(self.ids(sequences, held), **{CACHE: cache}, logits_to_keep=1)
        ids, at = self.ids(sequences, 1), torch.full((sequences, 1), held, device=self.device)
        numbers, first = torch.arange(sequences, device=self.device), torch.zeros_like(at[:, 0])

        def step() -> Any:
            logits = model(ids, **{CACHE: cache}, position_ids=at).logits[:, -1]
            if not sampled:
                return logits
            return st.sample(logits, seed=1, sequence=numbers, position=held), st.log_probs(logits, first)

        def back() -> None:
            cache.sequences.seen -= 1
            cache.sequences.lengths -= 1

        self.time(name, self.clock.capture(step, careful=False), back, rounds=20)

    def served(self, name: str, model: Any) -> None:
        """Time steps and a prefill of a served model."""
        for sequences in self.sizes.sequences:
            self.decode(f"{name} decode {sequences}", model, sequences)
        for sequences in self.sizes.sequences if name == "exact" else ():
            self.decode(f"{name} decode {sequences}, sampled, logprob", model, sequences, sampled=True)
        prompt = self.ids(1, self.sizes.prompt)
        with torch.no_grad():
            self.time(f"{name} prefill {self.sizes.prompt}", partial(model, prompt, use_cache=False, logits_to_keep=1))

    def forward(self, name: str, model: Any) -> Call:
        """Time a forward pass without and with gradients; return a training step."""
        forward = partial(model, self.ids(*self.sizes.batch), use_cache=False)

        def step() -> None:
            forward().logits.float().logsumexp(-1).mean().backward()
            model.zero_grad(set_to_none=True)

        with torch.no_grad():
            self.time(f"{name} forward no grad", forward)
        self.time(f"{name} forward", forward)
        return step

    def update(self, name: str, served: Any, trained: Any) -> None:
        start = time.perf_counter()
        st.update_(served, trained)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.keep(name, time.perf_counter() - start)


def quantized(floats: Any, config: Any, finish: Callable[[Any], object], *, head: bool = True) -> Any:
    """Return a copy of a model with int8 layers, with or without the head, after `fuse_` or `exact_`."""
    model = copy.deepcopy(floats)
    st.quantize_(model, config, lambda _, name: head or name != "lm_head")
    finish(model)
    return model


def cost(sizes: Sizes, layers: int) -> dict[str, Any]:
    """Return all times by name."""
    torch.manual_seed(0)
    timer = Timer(sizes, layers)
    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        num_hidden_layers=layers,
        max_position_embeddings=8192,
        rope_theta=5e5,
        attn_implementation="skuda",
    )
    with timer.device:
        floats = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    timer.served("default", quantized(floats, st.Dynamic(), st.fuse_, head=False))
    timer.served("default, int8 head", quantized(floats, st.Dynamic(), st.fuse_))
    served, trained = quantized(floats, st.Dynamic(), exact_), quantized(floats, st.Mixed(), exact_)
    timer.served("exact", served)
    step = timer.forward("trainer", trained)
    timer.update("update_ first s", served, trained)
    timer.update("update_ s", served, trained)
    timer.time("trainer step", step)
    del served, trained, step
    floats.set_attn_implementation("sdpa")
    timer.time("bf16 step", timer.forward("bf16", floats))
    return timer.found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--output", metavar="FILE", type=Path, help="write the times here")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, which also a CPU can run")
    given = parser.parse_args(arguments)
    found = cost(TINY if given.tiny else LLAMA_3_8B, given.layers)
    if given.output:
        given.output.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
