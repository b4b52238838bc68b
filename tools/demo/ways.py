"""The ways to quantize the encoder's linear layers, and the accuracy of embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from skuda.dispatch import Dispatcher
from skuda.kernels.attention.attention import AttentionDescriptor
from skuda.kernels.attention.cache import PAGE
from skuda.kernels.attention.rope_quantize_append import RopeQuantizeAppendDescriptor
from skuda.tools.demo.encoder import F32, Attention, Encoder, Linear, attention
from skuda.tools.smoothquant import ActivationRanges, DynamicLayer, Int8Layer, SmoothQuantLayer

Tokens = Sequence[Sequence[int]]

BATCH = 16
"""Sentences embedded in one batch; batches are in order of length, so that attention pads little."""
ALPHA = 0.8
"""The smoothing strength; of 0.5 to 1, it gives the calibration sentences the highest mean cosine."""


@dataclass(frozen=True, eq=False)
class Quantized:
    """The whole model quantized in one way: an int8 layer for every linear layer. A `judged` way must be accurate.

    If it `attends`, attention is int8, too.
    """

    name: str
    judged: bool
    layers: Mapping[str, Int8Layer]
    attends: bool = False

    def linear(self, dispatcher: Dispatcher) -> Linear:
        """Return the function that runs the layers in place of the encoder's own."""
        return lambda name, x: self.layers[name].run(dispatcher, x)

    def attention(self, dispatcher: Dispatcher) -> Attention:
        """Return the attention between the layers."""
        return int8_attention(dispatcher) if self.attends else attention


def int8_attention(dispatcher: Dispatcher) -> Attention:
    """Return attention over int8 codes."""

    def attend(query: F32, key: F32, value: F32, mask: npt.NDArray[np.bool_], heads: int) -> F32:
        lengths = mask.sum(axis=1, dtype=np.int32)
        sequences, blocks, size = len(mask), -(-mask.shape[1] // PAGE), query.shape[1] // heads
        sizes = {"tokens": len(query), "heads": heads, "kv_heads": heads, "head_size": size}
        sizes |= {"sequences": sequences, "pages": sequences * blocks, "most_blocks": blocks}
        tables: dict[str, Any] = {
            "block_table": np.arange(sequences * blocks, dtype=np.int32).reshape(sequences, blocks),
            "lengths": lengths,
            "starts": np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
        }
        pages = (sequences * blocks, heads)
        kv: dict[str, Any] = {
            "k_codes": np.zeros((*pages, PAGE, size), np.int8),
            "k_scale": np.zeros((*pages, PAGE), np.float32),
        }
        kv |= {"v_codes": np.zeros((*pages, size, PAGE), np.int8), "v_scale": np.zeros((*pages, PAGE), np.float32)}
        still: dict[str, Any] = {"cos_sin": np.empty((blocks * PAGE, 0), np.float32)}  # positions are in the embeddings
        append = RopeQuantizeAppendDescriptor(**sizes, most_positions=blocks * PAGE, rotated=0, input_element="f32")
        codes, scale = dispatcher.run(append, q=query, k=key, v=value, **still, **tables, **kv)
        problem = AttentionDescriptor(**sizes, scale=1 / sqrt(size), causal=False, output_element="f32")
        found: F32 = dispatcher.run(problem, q_codes=codes, q_scale=scale, **kv, **tables)
        return found.reshape(query.shape)

    return attend


def embed(encoder: Encoder, sentences: Tokens, linear: Linear, attend: Attention | None = None) -> F32:
    """Embed sentences in batches, shape (len(sentences), hidden_size)."""
    embeddings = np.empty((len(sentences), encoder.config.hidden_size), np.float32)
    for batch in batches(sentences):
        embeddings[batch] = encoder.embed([sentences[i] for i in batch], linear, attend)
    return embeddings


def batches(sentences: Tokens) -> list[list[int]]:
    """Return the indices of the sentences in batches, the shortest sentences first."""
    order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
    return [order[start : start + BATCH] for start in range(0, len(order), BATCH)]


def observe(encoder: Encoder, sentences: Tokens) -> dict[str, F32]:
    """Embed sentences in f32; return the largest magnitudes of every linear layer's input."""
    ranges = ActivationRanges()

    def linear(name: str, x: F32) -> F32:
        ranges.observe(name, x)
        return encoder.linear(name, x)

    embed(encoder, sentences, linear)
    return {name: ranges.channel_max(name) for name in ranges.layers}


def static_way(
    encoder: Encoder, dispatcher: Dispatcher, maxima: Mapping[str, F32], alpha: float | None, *, judged: bool
) -> Quantized:
    """Quantize the whole model for static W8A8; alpha None means no smoothing."""
    layers = {
        name: SmoothQuantLayer.quantize(dispatcher, maxima[name], encoder.weight(name), encoder.bias(name), alpha=alpha)
        for name in encoder.linear_names
    }
    return Quantized("static, unsmoothed" if alpha is None else f"static, alpha {alpha:g}", judged, layers)


def dynamic_ways(encoder: Encoder, dispatcher: Dispatcher) -> tuple[Quantized, Quantized]:
    """Quantize the whole model for dynamic W8A8, with attention in floating point and in int8."""
    names = encoder.linear_names
    layers = {name: DynamicLayer.quantize(dispatcher, encoder.weight(name), encoder.bias(name)) for name in names}
    return (
        Quantized("dynamic", judged=True, layers=layers),
        Quantized("dynamic, int8 attention", judged=True, layers=layers, attends=True),
    )


def cosine(a: F32, b: F32) -> npt.NDArray[np.float64]:
    """Return the cosines between corresponding rows of two arrays of shape (n, d)."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    products: npt.NDArray[np.float64] = (x * y).sum(axis=1) / np.sqrt((x * x).sum(axis=1) * (y * y).sum(axis=1))
    return products
