"""The ways to quantize the encoder's linear layers, and the accuracy of embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from skuda.dispatch import Dispatcher
from skuda.kernels.attention import AttentionDescriptor, RopeQuantizeAppendDescriptor
from skuda.kernels.attention.cache import PAGE
from skuda.tools.demo.encoder import F32, Attend, Encoder, Linear
from skuda.tools.smoothquant import ActivationRanges, DynamicLayer, Int8Layer, SmoothQuantLayer

Tokens = Sequence[Sequence[int]]

BATCH = 16
"""Sentences embedded in one batch; batches are in order of length, so that attention pads little."""
ALPHA = 0.8
"""The smoothing strength; of 0.5 to 1, it gives the calibration sentences the highest mean cosine."""


@dataclass(frozen=True, eq=False)
class Quantized:
    """The whole model quantized in one way: an int8 layer for every linear layer. A `judged` way must be accurate.

    With `int8_attention`, attention is int8, too.
    """

    name: str
    judged: bool
    layers: Mapping[str, Int8Layer]
    int8_attention: bool = False

    def linear(self, dispatcher: Dispatcher) -> Linear:
        """Return the function that runs the layers in place of the encoder's own."""
        return lambda name, x: self.layers[name].run(dispatcher, x)

    def attend(self, dispatcher: Dispatcher) -> Attend | None:
        """Return the function that runs in place of the encoder's attention, if one does."""
        return partial(int8_attention, dispatcher) if self.int8_attention else None


def int8_attention(
    dispatcher: Dispatcher, query: F32, key: F32, value: F32, mask: npt.NDArray[np.bool_], heads: int
) -> F32:
    """Return what `skuda.tools.demo.encoder.attention` returns, over an int8 cache of the sentences."""
    rows, size = len(query), query.shape[1] // heads
    lengths = mask.sum(1).astype(np.int32)
    most = -(-mask.shape[1] // PAGE)
    sizes: dict[str, Any] = {"tokens": rows, "heads": heads, "kv_heads": heads, "head_size": size}
    sizes |= {"sequences": len(mask), "pages": len(mask) * most, "most_blocks": most}
    tables: dict[str, Any] = {
        "block_table": np.arange(len(mask) * most, dtype=np.int32).reshape(-1, most),
        "lengths": lengths,
        "starts": np.append(0, np.cumsum(lengths)).astype(np.int32),
    }
    cache: dict[str, Any] = {
        "k_codes": np.zeros((len(mask) * most, heads, PAGE, size), np.int8),
        "k_scale": np.zeros((len(mask) * most, heads, PAGE), np.float32),
        "v_codes": np.zeros((len(mask) * most, heads, size, PAGE), np.int8),
        "v_scale": np.zeros((len(mask) * most, heads, PAGE), np.float32),
    }
    append = RopeQuantizeAppendDescriptor(**sizes, most_positions=mask.shape[1], rotated=0, input_element="f32")
    turns = np.zeros((mask.shape[1], 0), np.float32)
    q = dispatcher.run(append, q=query, k=key, v=value, cos_sin=turns, **tables, **cache)
    attend = AttentionDescriptor(**sizes, scale=size**-0.5, causal=False, output_element="f32")
    found: F32 = dispatcher.run(attend, **q._asdict(), **tables, **cache).output
    return found.reshape(rows, -1)


def embed(encoder: Encoder, sentences: Tokens, linear: Linear, attend: Attend | None = None) -> F32:
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
    """Quantize the whole model for dynamic W8A8: with the encoder's own attention, and with int8 attention."""
    names = encoder.linear_names
    layers = {name: DynamicLayer.quantize(dispatcher, encoder.weight(name), encoder.bias(name)) for name in names}
    own = Quantized("dynamic", judged=True, layers=layers)
    return own, replace(own, name="dynamic, int8 attention", int8_attention=True)


def cosine(a: F32, b: F32) -> npt.NDArray[np.float64]:
    """Return the cosines between corresponding rows of two arrays of shape (n, d)."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    products: npt.NDArray[np.float64] = (x * y).sum(axis=1) / np.sqrt((x * x).sum(axis=1) * (y * y).sum(axis=1))
    return products
