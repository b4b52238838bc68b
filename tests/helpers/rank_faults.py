"""What ranks run in tests: each function is the work of a rank, most of them with a fault.

They stand in a module of their own, because a process of a rank imports what it runs by name.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from types import SimpleNamespace

import numpy as np
import torch

from skuda.tools.studies import certify_rank, parallel_rank
from skuda.torch import Dynamic, RowLinear, TorchGroup, quantize_
from skuda.torch.certification import ways
from skuda.vllm import certified as vllm_ways

LONG = 1000.0


def found(job, rank, save):
    """Save twice; the second result counts."""
    save(None)
    threads = int(torch.get_num_threads())
    save({"rank": rank, "count": job.count, "seed": job.seed, "threads": threads, "pid": os.getpid()})
    print("nobody reads this")  # noqa: T201  a test of what happens to it


def raises(job, rank, save):
    save({"rank": rank, "pid": os.getpid()})
    if rank == 1:
        raise ValueError("what happened")
    time.sleep(LONG)


def is_killed(job, rank, save):
    save({"rank": rank, "pid": os.getpid()})
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(LONG)


def exits(job, rank, save):
    """End rank 1; the others still save when it is gone."""
    if rank == 1:
        save({"pid": os.getpid()})
        sys.exit(7)
    time.sleep(0.3)
    save({"rank": rank, "pid": os.getpid()})
    time.sleep(LONG)


def hangs(job, rank, save):
    save({"rank": rank, "pid": os.getpid()})
    time.sleep(LONG)


def parallel(job, rank, save):
    """Do the work of a rank without code generation, which takes seconds."""
    torch.compile = lambda module, **_: module
    parallel_rank.work(job, rank, save)


def parallel_with_a_wrong_bit(job, rank, save):
    right = RowLinear.forward

    def wrong(self, input):
        made = right(self, input)
        if rank == 1:
            made.view(torch.int16)[..., -1] ^= 1
        return made

    RowLinear.forward = wrong
    parallel(job, rank, save)


def parallel_that_dies(job, rank, save):
    right = parallel_rank.MlpBench.measure

    def measure(self, rows):
        if rank == 1 and rows == 3:
            os._exit(7)
        return right(self, rows)

    parallel_rank.MlpBench.measure = measure
    parallel(job, rank, save)


def parallel_unlike_numpy(job, rank, save):
    """Turn the sign of the weights of the copy that NumPy computes; rounding may hide a single one."""
    right = parallel_rank.copy.deepcopy

    def changed(given):
        made = right(given)
        if isinstance(made, torch.nn.Module):
            codes = next(one for one in made.state_dict().values() if one.dtype is torch.int8)
            codes.copy_(-codes.clamp(min=-127))
        return made

    parallel_rank.copy = SimpleNamespace(deepcopy=changed)
    parallel(job, rank, save)


def certified(job, rank, save):
    certify_rank.work(job, rank, save)


def _with_sums(job, rank, save, change):
    """Change what a rank gets as the sum of all ranks."""
    for name in ("sum", "sum_rows"):
        right = getattr(TorchGroup, name)
        setattr(TorchGroup, name, lambda self, array, *sizes, right=right: change(self, right, array, sizes))
    certified(job, rank, save)


def rounds_sums(job, rank, save):
    def change(group, right, array, sizes):
        return right(group, array.to(torch.bfloat16).to(torch.int32), *sizes)

    _with_sums(job, rank, save, change)


def local_maxima(job, rank, save):
    right = TorchGroup.max

    def local(self, array):
        kept = array.clone()
        right(self, array)
        return kept

    TorchGroup.max = local
    certified(job, rank, save)


class FakeEngine:
    """What vLLM's `LLM` does, by `skuda.torch`: it scores prompts, and has the second time what it had the first."""

    def __init__(self, model, **options):
        from transformers import AutoModelForCausalLM  # not above: other ranks need none of it

        from skuda.torch.exact.exact import exact_

        floats = AutoModelForCausalLM.from_pretrained(model, dtype=options["dtype"])
        self.change(floats)
        quantize_(floats, Dynamic(), lambda *_: True)
        exact_(floats)
        self.model, self.options, self.known, self.seen = floats, options, {}, set()
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=lambda: None))

    def change(self, floats):
        """Leave the model as it is."""

    def apply_model(self, function):
        return [function(self.model)]

    def scores(self, ids):
        given = [torch.tensor(ids)]
        return ways.run(self.model, given, ways.batches(given, 2, torch.Generator())[ways.LEFT])[0].tolist()

    def generate(self, prompts, asked, *, use_tqdm):
        return [self.answer(each["prompt_token_ids"], one) for each, one in zip(prompts, asked, strict=True)]

    def answer(self, ids, asked):
        cached = len(ids) if tuple(ids) in self.seen else 0
        self.seen.add(tuple(ids))
        following = asked.get("logprob_token_ids", [])
        whole = (*ids, *following)
        if whole not in self.known:
            self.known |= {whole[: end + 2]: score for end, score in enumerate(self.scores(whole))}
        each = [{whole[end]: SimpleNamespace(logprob=self.known[whole[: end + 1]])} for end in range(1, len(whole))]
        prompt, new = (None, each[-1:]) if following else ([None, *each], None)
        return SimpleNamespace(
            prompt_logprobs=prompt, outputs=[SimpleNamespace(logprobs=new)], num_cached_tokens=cached
        )


class EngineWithAWrongBit(FakeEngine):
    def scores(self, ids):
        found = super().scores(ids)
        if "max_num_batched_tokens" in self.options:
            found[-1] = float(np.nextafter(np.float32(found[-1]), np.float32(0)))
        return found


class EngineThatRounds(FakeEngine):
    def change(self, floats):
        weight = floats.model.layers[1].mlp.up_proj.weight.data
        weight.copy_(weight.to(torch.float8_e4m3fn))


class EngineWithoutACache(FakeEngine):
    def answer(self, ids, asked):
        self.seen.clear()
        return super().answer(ids, asked)


def served(*given, engine, **job):
    sys.modules["vllm"] = SimpleNamespace(LLM=engine, SamplingParams=dict)
    return vllm_ways.serve(*given, **job)
