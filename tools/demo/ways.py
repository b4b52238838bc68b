"""The ways to quantize the encoder's linear layers, the search for the best alpha, and the accuracy of embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from skuda.dispatch import Dispatcher
from skuda.tools.demo.encoder import F32, Encoder, Linear
from skuda.tools.smoothquant import ActivationRanges, DynamicLayer, Int8Layer, SmoothQuantLayer

Tokens = Sequence[Sequence[int]]
Step = Callable[[str], None]
"""Called with the name of a stage of the work before each of its steps."""

BATCH = 16
"""Sentences embedded in one batch; batches are in order of length, so that attention pads little."""
ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@dataclass(frozen=True, eq=False)
class Observed:
    """Some of the calibration sentences: token ids, f32 embeddings, and the maxima of every linear layer's input."""

    sentences: Tokens
    embeddings: F32
    maxima: Mapping[str, F32]


@dataclass(frozen=True, eq=False)
class Quantized:
    """The whole model quantized in one way: an int8 layer for every linear layer. A `judged` way must be accurate."""

    name: str
    alpha: float | None
    judged: bool
    layers: Mapping[str, Int8Layer]

    def linear(self, dispatcher: Dispatcher) -> Linear:
        """Return the function that runs the layers in place of the encoder's own."""
        return lambda name, x: self.layers[name].run(dispatcher, x)


def embed(encoder: Encoder, sentences: Tokens, linear: Linear) -> F32:
    """Embed sentences in batches, shape (len(sentences), hidden_size)."""
    embeddings = np.empty((len(sentences), encoder.config.hidden_size), np.float32)
    for batch in batches(sentences):
        embeddings[batch] = encoder.embed([sentences[i] for i in batch], linear)
    return embeddings


def batches(sentences: Tokens) -> list[list[int]]:
    """Return the indices of the sentences in batches, the shortest sentences first."""
    order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
    return [order[start : start + BATCH] for start in range(0, len(order), BATCH)]


def observe(encoder: Encoder, sentences: Tokens) -> Observed:
    """Embed sentences in f32 and record the largest magnitudes of every linear layer's input."""
    ranges = ActivationRanges()

    def linear(name: str, x: F32) -> F32:
        ranges.observe(name, x)
        return encoder.linear(name, x)

    embeddings = embed(encoder, sentences, linear)
    return Observed(sentences, embeddings, {name: ranges.channel_max(name) for name in ranges.layers})


def search_alpha(
    encoder: Encoder, dispatcher: Dispatcher, parts: tuple[Observed, Observed], step: Step
) -> dict[float, float]:
    """Return the mean cosine for each of some alphas. The worst one would depend on a single sentence.

    Each part is embedded in static int8 with the maxima of the other one.
    """

    def score(alpha: float) -> float:
        step("search for alpha")
        cosines = []
        for scored, other in (parts, parts[::-1]):
            way = static_way(encoder, dispatcher, other.maxima, alpha)
            embeddings = embed(encoder, scored.sentences, way.linear(dispatcher))
            cosines.append(cosine(embeddings, scored.embeddings))
        return float(np.concatenate(cosines).mean())

    return {alpha: score(alpha) for alpha in ALPHAS}


def static_way(
    encoder: Encoder, dispatcher: Dispatcher, maxima: Mapping[str, F32], alpha: float | None, *, judged: bool = False
) -> Quantized:
    """Quantize the whole model for static W8A8; alpha None means no smoothing."""
    layers = {
        name: SmoothQuantLayer.quantize(dispatcher, maxima[name], encoder.weight(name), encoder.bias(name), alpha=alpha)
        for name in encoder.linear_names
    }
    return Quantized("static, unsmoothed" if alpha is None else f"static, alpha {alpha:g}", alpha, judged, layers)


def dynamic_way(encoder: Encoder, dispatcher: Dispatcher) -> Quantized:
    """Quantize the whole model for dynamic W8A8."""
    names = encoder.linear_names
    layers = {name: DynamicLayer.quantize(dispatcher, encoder.weight(name), encoder.bias(name)) for name in names}
    return Quantized("dynamic", None, judged=True, layers=layers)


def cosine(a: F32, b: F32) -> npt.NDArray[np.float64]:
    """Return the cosines between corresponding rows of two arrays of shape (n, d)."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    products: npt.NDArray[np.float64] = (x * y).sum(axis=1) / np.sqrt((x * x).sum(axis=1) * (y * y).sum(axis=1))
    return products
