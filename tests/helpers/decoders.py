"""Small random decoders of transformers, batches with padding, and calls in parts."""

from inspect import signature

import torch
import transformers

from skuda.torch.attention.interface import NAME

CACHE = next(
    each for each in ("cache", "past_key_values") if each in signature(transformers.LlamaModel.forward).parameters
)
FAMILIES = {
    "Llama": {},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 15, "max_window_layers": 1},
    "Qwen3": {},
    "Mistral": {"sliding_window": 20},
}


def small(family, rng, name=NAME, **more):
    """Return a model of two layers with random weights, also in its norms."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"num_hidden_layers": 2, "vocab_size": 64, "head_dim": 32, "pad_token_id": 0, "bos_token_id": None}
    torch.manual_seed(int(rng.integers(1 << 30)))
    made = sizes | {"eos_token_id": None, "attn_implementation": name} | FAMILIES[family] | more
    config = getattr(transformers, f"{family}Config")(**made)
    model = getattr(transformers, f"{family}ForCausalLM")._from_config(config).bfloat16().eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.copy_(torch.from_numpy(rng.uniform(0.3, 1.7, parameter.shape)))
    return model


def padded(rng, lengths, *, right=False):
    """Return random ids of a batch, its mask, and the ids of positions."""
    ids = torch.from_numpy(rng.integers(1, 64, (len(lengths), max(lengths))))
    mask = torch.ones_like(ids)
    for row, length in zip(mask, lengths, strict=True):
        row[slice(length, None) if right else slice(len(row) - length)] = 0
    return ids, mask, (mask.cumsum(1) - 1).clamp(min=0)


def states(model, ids, **given):
    given = {"use_cache": CACHE in given} | given
    return model.model(ids, **given).last_hidden_state


def split(model, cache, ids, mask, positions, ends):
    """Return the states of all columns, given to the model in parts that end there."""
    parts = []
    for start, end in zip([0, *ends], [*ends, ids.shape[1]], strict=True):
        given = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end], CACHE: cache}
        parts.append(states(model, ids[:, start:end], **given))
    return torch.cat(parts, 1)


def same_states(got, want, mask):
    """Whether the states of all tokens have the same bits."""
    return torch.equal(got.float()[mask == 1].view(torch.int32), want.float()[mask == 1].view(torch.int32))
