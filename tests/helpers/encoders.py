"""An encoder like that of the demo, but tiny."""

from __future__ import annotations

import numpy as np

from skuda.tools.demo.encoder import Encoder, EncoderConfig

CONFIG = EncoderConfig(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    layer_norm_eps=1e-12,
    max_position_embeddings=20,
    hidden_act="gelu",
)
VOCABULARY = 50


def tiny_encoder(rng):
    """Make an encoder of random weights: 64 wide, 2 layers, 2 heads."""
    tensors = {}

    def add(name, *shape, around=0.0, spread=1.0):
        tensors[name] = (around + spread * rng.normal(size=shape)).astype(np.float32)

    width = CONFIG.hidden_size
    add("embeddings.word_embeddings.weight", VOCABULARY, width)
    add("embeddings.position_embeddings.weight", CONFIG.max_position_embeddings, width)
    add("embeddings.token_type_embeddings.weight", 2, width)
    norms = ["embeddings.LayerNorm"]
    encoder = Encoder(CONFIG, tensors)
    for name in encoder.linear_names:
        n = 4 * width if "intermediate" in name else width
        k = 4 * width if name.split(".")[3] == "output" else width
        add(f"{name}.weight", n, k, spread=k**-0.5)
        add(f"{name}.bias", n, spread=0.1)
    for i in range(CONFIG.num_hidden_layers):
        norms += [f"encoder.layer.{i}.attention.output.LayerNorm", f"encoder.layer.{i}.output.LayerNorm"]
    for name in norms:
        add(f"{name}.weight", width, around=1.0, spread=0.1)
        add(f"{name}.bias", width, spread=0.1)
    return encoder
