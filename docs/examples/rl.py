"""Policy gradients with vLLM as the server, or without it a toy: log-probabilities have the bits of the trainer's."""

import os
from collections.abc import Callable
from importlib.util import find_spec
from tempfile import TemporaryDirectory

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

import skuda.torch as st
from skuda.torch.exact import exact_

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, PROMPT, NEW, WORDS, STEPS = 32, 40, 4, 8, 60 if DEVICE == "cuda" else 4
SIZES = {"vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
CONFIG = Qwen3Config(**SIZES, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
Answers = list[list[tuple[int, float]]]  # of each prompt, its tokens and their log-probabilities
Server = tuple[Callable[..., Answers], Callable[[nn.Module], None]]


def by_vllm(folder: str) -> Server:
    """Serve a floating checkpoint by vLLM in this process; return functions that generate, and take new weights."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    exact = {"quantization_config": {"quant_method": "skuda", "exact": True}}
    how = {"skip_tokenizer_init": True, "max_model_len": 128, "gpu_memory_utilization": 0.3}
    llm = LLM(folder, hf_overrides=exact, logprobs_mode="processed_logprobs", **how)

    def rollout(prompts: list[list[int]], seed: int, **more: object) -> Answers:
        more |= {"ignore_eos": True, "logprobs": 0, "detokenize": False}
        asked = [SamplingParams(seed=seed * len(prompts) + row, **more) for row in range(len(prompts))]
        done = llm.generate([{"prompt_token_ids": ids} for ids in prompts], asked, use_tqdm=False)
        every = [zip(o.outputs[0].token_ids, o.outputs[0].logprobs, strict=True) for o in done]
        return [[(token, place[token].logprob) for token, place in row] for row in every]

    def update(trained: nn.Module) -> None:
        weights = {name: weight.detach() for name, weight in trained.named_parameters()}
        llm.apply_model(lambda model: model.load_weights(weights.items()))  # it makes codes on the way, in place
        llm.reset_prefix_cache()

    return rollout, update


def by_toy(folder: str) -> Server:
    """Do the same with a model of transformers, prompt by prompt and token by token."""
    model = exact(folder, st.Dynamic()).eval()

    @torch.no_grad()
    def answer(ids, seed, sequence, max_tokens, temperature=1.0, stop_token_ids=()):
        for position in range(len(ids), len(ids) + max_tokens):
            logits = model(torch.tensor([ids], device=DEVICE)).logits[:, -1]
            token = st.sample(logits, seed=seed, sequence=sequence, position=position, temperature=temperature)
            yield int(token), float(st.log_probs(logits, token, temperature)[0])
            if int(token) in stop_token_ids:
                return
            ids = [*ids, int(token)]

    def rollout(prompts: list[list[int]], seed: int, **more: object) -> Answers:
        return [list(answer(ids, seed, sequence, **more)) for sequence, ids in enumerate(prompts)]

    return rollout, lambda trained: st.update_(model, trained)


def exact(folder: str, config: st.Dynamic | st.Mixed) -> nn.Module:
    """Load a floating checkpoint as an exact model."""
    model = AutoModelForCausalLM.from_pretrained(folder).to(DEVICE)
    st.quantize_(model, config, lambda *_: True)
    exact_(model)
    return model


serve = by_vllm if DEVICE == "cuda" and find_spec("vllm") else by_toy
if __name__ == "__main__":
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    with TemporaryDirectory() as folder:
        Qwen3ForCausalLM(CONFIG).bfloat16().save_pretrained(folder)
        rollout, update = serve(folder)
        trained = exact(folder, st.Mixed())
        optimizer = torch.optim.Adam(trained.parameters(), 1e-2)
        for step in range(STEPS):
            prompts = torch.randint(WORDS, (ROWS, PROMPT), generator=generator)
            answers = rollout(prompts.tolist(), step, max_tokens=NEW)
            tokens = torch.tensor([[token for token, _ in row] for row in answers], device=DEVICE)
            before = torch.tensor([[found for _, found in row] for row in answers], device=DEVICE)
            ids = torch.cat((prompts.to(DEVICE), tokens), 1)
            reward = (tokens == ids[:, PROMPT - 1 : PROMPT]).float()
            now, _ = st.log_probs(trained(ids[:, :-1]).logits[:, PROMPT - 1 :], tokens)
            ratio = (now.detach() - before).exp()
            assert (ratio == 1).all(), f"step {step}: |ratio - 1| is up to {(ratio - 1).abs().max()}"
            (-(reward - reward.mean()) * now).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            update(trained)
            print(f"{serve.__name__}, step {step}: reward {float(reward.mean()):.2f}")
    print("every ratio was 1 before an update, and so every KL 0")
