"""GRPO by TRL with vLLM as the server, or without it a toy: every importance ratio that TRL logs is exactly 1."""

from tempfile import TemporaryDirectory
from types import SimpleNamespace

import torch
from datasets import Dataset
from rl import CONFIG, WORDS, Server, exact, serve
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

import skuda.torch as st


class ExactTrainer(GRPOTrainer):
    """Let a server answer, which gets the weights before, and compute the log-probabilities as it does."""

    def __init__(self, server: Server, **more: object) -> None:
        self.rollout, update = server
        super().__init__(rollout_func=ExactTrainer.answer, **more)
        # TRL takes the server for its own vLLM: it calls `sync_weights`, compares log-probabilities and logs ratios.
        self.vllm_generation = SimpleNamespace(sync_weights=lambda: update(self.model))
        self.use_vllm, self._last_loaded_step = True, -1

    @staticmethod
    def answer(prompts: list[str], trainer: "ExactTrainer") -> dict[str, list]:
        """Return a completion of each prompt; TRL repeats a prompt as often as it wants completions of it."""
        ids = trainer.processing_class(prompts)["input_ids"]
        how = {"max_tokens": trainer.max_completion_length, "stop_token_ids": trainer.eos_token_ids}
        answers = trainer.rollout(ids, trainer.state.global_step, **how, temperature=trainer.temperature)
        tokens, found = ([[pair[at] for pair in row] for row in answers] for at in (0, 1))
        return {"prompt_ids": ids, "completion_ids": tokens, "logprobs": found}

    def _get_per_token_logps_and_entropies(
        self, model: nn.Module, ids: Tensor, mask: Tensor, new: int, batch_size: int | None = None, **_: object
    ) -> tuple[Tensor, Tensor, None]:
        every = []
        for some, seen in zip(ids.split(batch_size or len(ids)), mask.split(batch_size or len(ids)), strict=True):
            positions = (seen.cumsum(1) - 1).clamp(0)  # prompts are padded to the left
            logits = model(some, seen, positions, logits_to_keep=new + 1).logits[:, :-1]
            every.append(st.log_probs(logits, some[:, -new:], self.temperature))
        found, entropy = (torch.cat(each) for each in zip(*every, strict=True))
        return found, entropy, None


def reward(completions: list[str], **_: object) -> list[float]:
    """Reward a completion for each 1 in it."""
    return [float(given.count("1")) for given in completions]


words = {"<end>": 0} | {str(word): word for word in range(1, WORDS)}
tokenizer = Tokenizer(models.WordLevel(words))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
drawn = torch.randint(1, WORDS, (60, 12), generator=torch.Generator().manual_seed(1)).tolist()
prompts = [" ".join(map(str, row[: 4 + at % 9])) for at, row in enumerate(drawn)]
torch.manual_seed(0)
with TemporaryDirectory() as folder:
    Qwen3ForCausalLM(CONFIG).bfloat16().save_pretrained(folder)
    options = GRPOConfig(
        folder,
        bf16=False,  # no autocast
        learning_rate=1e-2,
        logging_steps=1,
        max_completion_length=6,
        max_steps=6,
        num_generations=4,
        per_device_train_batch_size=16,
        report_to="none",
        save_strategy="no",
        temperature=0.8,
    )
    trainer = ExactTrainer(
        serve(folder),
        model=exact(folder, st.Mixed()),
        reward_funcs=reward,
        args=options,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=next(iter(words))),
    )
    trainer.train()
steps = [log for log in trainer.state.log_history if "reward" in log]
for step in steps:
    print(f"{serve.__name__}, step {step['step']}: reward {step['reward']:.2f}")
    assert step["sampling/sampling_logp_difference/max"] == 0
    assert step["sampling/importance_sampling_ratio/min"] == step["sampling/importance_sampling_ratio/max"] == 1
assert len(steps) == options.max_steps
print("every ratio was 1, and every difference of log-probabilities 0")
