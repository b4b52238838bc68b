"""Tiny models of many architectures of transformers, with random weights, and an input of each."""

from __future__ import annotations

from inspect import signature

import numpy as np
import torch
import transformers

WIDTH, IMAGE, PATCH = 32, 16, 8
SIZES = {
    "vocab_size": 64,
    "hidden_size": WIDTH,
    "d_model": WIDTH,
    "embed_dim": WIDTH,
    "n_embd": WIDTH,
    "embedding_size": WIDTH,
    "intermediate_size": 64,
    "d_ff": 64,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "ffn_dim": 64,
    "hidden_dim": 64,
    "num_hidden_layers": 1,
    "num_layers": 1,
    "num_decoder_layers": 1,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "n_layers": 1,
    "n_layer": 1,
    "depth": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "n_heads": 2,
    "n_head": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "d_kv": 16,
    "max_position_embeddings": 40,
    "n_positions": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "image_size": IMAGE,
    "patch_size": PATCH,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
TEXT = SIZES | {"model_type": "llama"}
VISION = SIZES | {"model_type": "clip_vision_model", "projection_dim": WIDTH}
SIGLIP = SIZES | {"model_type": "siglip_vision_model", "projection_dim": WIDTH}
SPEECH = {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
SPEECH |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}

LANGUAGE = {
    "LlamaForCausalLM": {"tie_word_embeddings": True},
    "MistralForCausalLM": {},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {},
    "GemmaForCausalLM": {},
    "Gemma2ForCausalLM": {},
    "Phi3ForCausalLM": {},
    "PhiForCausalLM": {},
    "GPT2LMHeadModel": {},
    "GPTNeoXForCausalLM": {},
    "GPTJForCausalLM": {"rotary_dim": 8},
    "OPTForCausalLM": {"word_embed_proj_dim": WIDTH},
    "BloomForCausalLM": {},
    "MptForCausalLM": {},
    "CohereForCausalLM": {},
    "StableLmForCausalLM": {},
    "MambaForCausalLM": {"state_size": 4, "time_step_rank": 8},
    "MixtralForCausalLM": {"num_local_experts": 4},
    "Qwen2MoeForCausalLM": MOE,
    "Qwen3MoeForCausalLM": MOE,
    "GptOssForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "BertForMaskedLM": {},
    "RobertaForMaskedLM": {},
    "XLMRobertaForMaskedLM": {},
    "DistilBertForMaskedLM": {"dim": WIDTH},
    "AlbertForMaskedLM": {},
    "ElectraForMaskedLM": {},
    "MPNetForMaskedLM": {},
    "DebertaV2ForMaskedLM": {},
    "ModernBertForMaskedLM": {},
    "NomicBertForMaskedLM": {},
}
SEQUENCES = {
    "T5ForConditionalGeneration": {},
    "MT5ForConditionalGeneration": {},
    "UMT5ForConditionalGeneration": {},
    "LongT5ForConditionalGeneration": {},
    "SwitchTransformersForConditionalGeneration": {"num_experts": 2},
    "BartForConditionalGeneration": {},
    "MBartForConditionalGeneration": {},
    "M2M100ForConditionalGeneration": {},
    "MarianMTModel": {},
    "PegasusForConditionalGeneration": {},
    "BlenderbotForConditionalGeneration": {},
}
OTHERS = {
    "WhisperForConditionalGeneration": {"num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16},
    "Wav2Vec2ForCTC": SPEECH,
    "HubertForCTC": SPEECH,
    "ViTForImageClassification": {},
    "Dinov2ForImageClassification": {},
    "CLIPModel": {"text_config": SIZES, "vision_config": SIZES, "projection_dim": WIDTH},
    "SiglipModel": {"text_config": SIZES | {"projection_size": WIDTH}, "vision_config": SIZES},
    "LlavaForConditionalGeneration": {"text_config": TEXT, "vision_config": VISION},
    "Qwen2VLForConditionalGeneration": {
        "text_config": SIZES | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
        "vision_config": SIZES | {"embed_dim": WIDTH},
    },
    "PaliGemmaForConditionalGeneration": {
        "text_config": SIZES | {"model_type": "gemma"},
        "vision_config": SIGLIP,
        "projection_dim": WIDTH,
    },
    "Gemma3ForConditionalGeneration": {"text_config": SIZES, "vision_config": SIZES, "mm_tokens_per_image": 4},
}
ALL = LANGUAGE | SEQUENCES | OTHERS


def tiny(name, rng, dtype=torch.float32, **more):
    """Return a model of one layer, all of whose parameters are random."""
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**SIZES | ALL[name] | more)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.from_numpy(np.asarray(rng.standard_normal(parameter.shape) / 4)))
    return model.to(dtype)


def inputs_of(model, rng):
    """Return the inputs of a model, for two rows."""
    ids = torch.from_numpy(rng.integers(3, 64, (2, 9)))
    floats = {"pixel_values": (2, 3, IMAGE, IMAGE), "input_values": (2, 200), "input_features": (2, 8, 16)}
    taken = signature(model.forward).parameters
    names = {model.main_input_name} | ({"input_ids", "pixel_values"} if "return_loss" in taken else set())
    given = dict.fromkeys((names | {"decoder_input_ids"}) & taken.keys() - floats.keys(), ids)
    drawn = {name: torch.from_numpy(rng.standard_normal(floats[name])) for name in names & floats.keys()}
    return given | {name: value.to(model.dtype) for name, value in drawn.items()}
