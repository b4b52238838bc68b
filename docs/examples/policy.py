"""Policy gradients on a toy task: a served and a trained model whose log-probabilities have equal bits."""

import copy
import json
import sys
import time
from collections.abc import Callable
from inspect import signature
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

import skuda.torch as st
from skuda.torch.attention import Int8Cache
from skuda.torch.exact import exact_

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, PROMPT, NEW, WORDS, STEPS = 32, 40, 4, 8, 18
SIZES = {"vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
CACHE = next(name for name in ("cache", "past_key_values") if name in signature(Qwen3ForCausalLM.forward).parameters)
CONFIG = Qwen3Config(**SIZES, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)


def rollout(model: nn.Module, cache: Callable[[], object], prompts: Tensor, seed: int) -> tuple[Tensor, ...]:
    """Generate tokens in batches of 12, step by step; return them with the prompts, and their log-probabilities."""
    every, found = [], []
    for first, given in zip(range(0, ROWS, 12), prompts.split(12), strict=True):
        held, sequence, ids, told = cache(), first + torch.arange(len(given), device=DEVICE), [given], []
        for position in range(NEW):
            logits = model(ids[-1], **{CACHE: held}).logits[:, -1]
            token = st.sample(logits, seed=seed, sequence=sequence, position=position)
            told.append(st.log_probs(logits, token)[0])
            ids.append(token[:, None])
        every.append(torch.cat(ids, 1))
        found.append(torch.stack(told, 1))
    return torch.cat(every), torch.cat(found)


def train(name: str, trained: nn.Module, served: nn.Module, cache: Callable[[], object]) -> list[dict[str, float]]:
    """Train with REINFORCE to repeat the last word of the prompt; return what each step found."""
    optimizer = torch.optim.Adam(trained.parameters(), 1e-2)
    generator, course = torch.Generator().manual_seed(1), []
    for step in range(STEPS):
        start = time.perf_counter()
        prompts = torch.randint(WORDS, (ROWS, PROMPT), generator=generator).to(DEVICE)
        with torch.no_grad():
            ids, before = rollout(served, cache, prompts, step)
        reward = (ids[:, PROMPT:] == ids[:, PROMPT - 1 : PROMPT]).float()
        now, _ = st.log_probs(trained(ids[:, :-1]).logits[:, PROMPT - 1 :], ids[:, PROMPT:])
        ratio = (now.detach() - before).exp()
        (-(reward - reward.mean()) * now).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if served is not trained:
            st.update_(served, trained)
        kl = float((ratio - 1 - ratio.log()).mean())
        seconds = time.perf_counter() - start
        course.append({"reward": float(reward.mean()), "ratio": float((ratio - 1).abs().max()), "kl": kl, "s": seconds})
        if step % 8 == 0:
            print(f"{name}, step {step}: reward {course[-1]['reward']:.2f}, seconds {seconds:.2f}")
    print(f"{name}: largest |ratio - 1| of all steps {max(each['ratio'] for each in course):.1e}")
    return course


torch.manual_seed(0)
floats = Qwen3ForCausalLM(CONFIG).to(DEVICE, torch.bfloat16)
served, trained = copy.deepcopy(floats).eval(), copy.deepcopy(floats)
for model, config in ((served, st.Dynamic()), (trained, st.Mixed())):
    st.quantize_(model, config, lambda *_: True)
    exact_(model)
courses = {
    "bf16": train("bf16", floats, floats, lambda: DynamicCache(config=CONFIG)),
    "exact": train("exact", trained, served, lambda: Int8Cache(CONFIG)),
}
if len(sys.argv) > 1:
    Path(sys.argv[1]).write_text(json.dumps({"device": DEVICE, "courses": courses}))
assert all(step["ratio"] == step["kl"] == 0 for step in courses["exact"])
print("every ratio of the exact model was 1, and every KL 0")
