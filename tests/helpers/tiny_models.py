"""Models of transformers that can be made small by the names of their config's fields, with random weights."""

import re
import warnings
from inspect import signature

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

_SIZES = {
    r"(num|n)_.*heads?|(en|de)coder_attention_heads|heads": 2,
    r"(num|n)_.*layers?|num_blocks|depth|(en|de)coder_layers": 2,
    r"(out_|word_)?hidden_(size|dim)|d_model|n_embd|emb_dim|embed(ding)?_(dim|size)|dim|projection_dim|d_embed": 64,
    r".*(intermediate|ffn|inner|feed_forward|mlp).*(size|dim)|n_inner|d_ff|d_inner": 64,
    r"head_dim|d_kv|.*_head_dim|head_size|attention_head_size": 32,
    r".*vocab_size.*": 80,
    r"(moe_)?(num|n)_.*experts|num_experts_per_tok|(moe_)?top_?k|moe_k": 4,  # all: a choice can turn on rounding
    r"n_group|topk_group|first_k_dense_replace": 1,
    r"attention_multiplier": 32**-0.5,
    r"speaking_rate": 1e9,  # a sound of few samples, whatever is predicted
    r"image_size": 32,
    r"patch_size": 8,
    r".*_token_(id|index)": 1,
    r"attention_types": [[["global", "local"], 1]],
    r".*dropout.*|.*drop_path.*|layerdrop|.*_pdrop|.*drop_prob": 0.0,
}
"""Sizes by the name of a field, the first that fits."""
_MOST = 30_000_000
"""Parameters of a model that is small."""
KINDS = sorted(name for name, kind in CONFIG_MAPPING.items() if kind in MODEL_MAPPING)


def small_config(kind, **more):
    """Return a config of a class, with small configs of its parts."""
    usual, given = kind(), {}
    for name, value in usual.to_dict().items():
        size = next((size for names, size in _SIZES.items() if re.fullmatch(names, name)), None)
        if name in kind.sub_configs:
            if (part := getattr(usual, name, None)) is not None:
                given[name] = small_config(type(part)).to_dict()
        elif size is not None and isinstance(value, (type(size), int, float)) and not isinstance(value, bool):
            given[name] = size
    return kind(**given | more)


def small_model(name, seed):
    """Return a model of a type with eager attention, which weighs tokens very differently; None if it is not small."""
    config = small_config(CONFIG_MAPPING[name], attn_implementation="eager")
    kind = (MODEL_MAPPING if type(config) in MODEL_MAPPING else MODEL_FOR_CAUSAL_LM_MAPPING)[type(config)]
    kind = kind[0] if isinstance(kind, tuple) else kind
    with torch.device("meta"):
        if sum(each.numel() for each in kind(small_config(type(config))).parameters()) > _MOST:
            return None
    torch.manual_seed(seed)
    model = kind(config).float().eval()
    for key, parameter in model.named_parameters():
        if parameter.dim() > 1:
            table = "emb" in key and "mapping" not in key
            parameter.data.normal_(std=1.0 if table else 1.5 * parameter[0].numel() ** -0.5)
    return model


def calls(model):
    """Return arguments of calls, without padding and with padding to the right, where the model has masks."""
    names = signature(model.forward).parameters
    given = {"use_cache": False} if "use_cache" in names else {}
    if "input_ids" not in names:
        size, channels = getattr(model.config, "image_size", 32), getattr(model.config, "num_channels", 3)
        return [given | {"pixel_values": torch.randn(2, channels, size, size)}]
    given["input_ids"] = torch.randint(5, 80, (2, 12))
    if "decoder_input_ids" in names:
        given["decoder_input_ids"] = given["input_ids"]
    mask = (torch.arange(12) < torch.tensor([[12], [8]])).long()
    return [given, *([given | {"attention_mask": mask}] if "attention_mask" in names else [])]


def result(model, given):
    """Return a model's first result for these arguments, without that of padding."""
    torch.manual_seed(0)  # some draw what they look at
    found = model(**given)
    found = found.get("last_hidden_state", found.get("logits", found[0]))
    return found[given["attention_mask"] == 1] if "attention_mask" in given and found.shape[1] == 12 else found


def answers(name, seed):
    """Return a small model and its calls with what they give; None for a type that cannot be made in this way."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = small_model(name, seed)
            found = [(given, result(model, given)) for given in calls(model)] if model else []
        except Exception:  # noqa: BLE001  hundreds of types, each with its own needs
            return None
    # Where numbers grow from layer to layer, any rounding leads to another result.
    known = found and all(isinstance(want, torch.Tensor) and want.abs().max() < 1000 for _, want in found)
    return (model, found) if known else None
