"""The ways in which the encoder's linear layers can run in int8, and the search for the best alpha among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import numpy.typing as npt

from skuda.dispatch import Dispatcher
from skuda.tools.demo.encoder import Encoder, Linear
from skuda.tools.demo.metrics import cosine
from skuda.tools.demo.result import AlphaScore
from skuda.tools.smoothquant import ActivationRanges, DynamicLayer, Int8Layer, SmoothQuantLayer

F32 = npt.NDArray[np.float32]
Tokens = Sequence[Sequence[int]]
Advance = Callable[[], None]

BATCH = 16
"""Sentences embedded at a time, taken in order of length so that attention pads little."""

COARSE_ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
FINE_STEP = 0.05
COMPARED_ALPHAS = (None, 0.5, 0.8)
"""Static ways shown beside the one found; None is without smoothing."""


@dataclass(frozen=True, eq=False)
class Part:
    """Some of the calibration sentences: token ids, f32 embeddings, activation ranges."""

    sentences: Tokens
    embeddings: F32
    ranges: ActivationRanges


@dataclass(frozen=True, eq=False)
class Way:
    """The whole model quantized one way: one int8 layer for every linear layer of the encoder."""

    name: str
    alpha: float | None
    judged: bool
    layers: dict[str, Int8Layer]
    prepare_seconds: float

    def linear(self, dispatcher: Dispatcher) -> Linear:
        """Return the function that runs the layers, to be injected into the encoder."""
        return lambda name, x: self.layers[name].run(dispatcher, x)


def embed(encoder: Encoder, sentences: Tokens, linear: Linear, advance: Advance = lambda: None) -> F32:
    """Embed sentences batch by batch, shape (len(sentences), hidden_size); `advance` is called after each batch."""
    embeddings = np.empty((len(sentences), encoder.config.hidden_size), np.float32)
    for batch in batches(sentences):
        embeddings[batch] = encoder.embed([sentences[i] for i in batch], linear)
        advance()
    return embeddings


def observe(encoder: Encoder, sentences: Tokens, advance: Advance) -> Part:
    """Embed sentences in f32 and record the range of every linear layer's input."""
    ranges = ActivationRanges()

    def linear(name: str, x: F32) -> F32:
        ranges.observe(name, x)
        return encoder.linear(name, x)

    part = Part(sentences, embed(encoder, sentences, linear), ranges)
    advance()
    return part


def union(parts: Sequence[ActivationRanges]) -> ActivationRanges:
    """Return the ranges of all parts together: a part's maxima are observed like a batch of one row."""
    together = ActivationRanges()
    for part in parts:
        for layer in part.layers:
            together.observe(layer, part.channel_max(layer))
    return together


def search_alpha(
    encoder: Encoder, dispatcher: Dispatcher, parts: tuple[Part, Part], advance: Advance
) -> tuple[AlphaScore, ...]:
    """Score alphas on a coarse grid, then on both sides of the best; in order of alpha.

    Each part is embedded in static int8 with the ranges of the other. The mean cosine decides: the worst one hangs on
    a single sentence.
    """

    def score(alpha: float) -> AlphaScore:
        cosines = []
        for scored, other in (parts, parts[::-1]):
            way = static_way(encoder, dispatcher, other.ranges, alpha)
            embeddings = embed(encoder, scored.sentences, way.linear(dispatcher))
            cosines.append(cosine(embeddings, scored.embeddings))
        together = np.concatenate(cosines)
        advance()
        return AlphaScore(alpha=alpha, worst_cosine=float(together.min()), mean_cosine=float(together.mean()))

    coarse = [score(alpha) for alpha in COARSE_ALPHAS]
    best = max(coarse, key=lambda result: result.mean_cosine).alpha
    neighbours = (round(best - FINE_STEP, 2), round(best + FINE_STEP, 2))
    fine = [score(alpha) for alpha in neighbours if alpha <= 1]
    return tuple(sorted(coarse + fine, key=lambda result: result.alpha))


def static_way(
    encoder: Encoder, dispatcher: Dispatcher, ranges: ActivationRanges, alpha: float | None, *, judged: bool = False
) -> Way:
    """Quantize the whole model for static W8A8; alpha None leaves it unsmoothed."""
    begin = perf_counter()
    layers: dict[str, Int8Layer] = {}
    for name in encoder.linear_names:
        weight, bias = encoder.weight(name), encoder.bias(name)
        layers[name] = SmoothQuantLayer.quantize(dispatcher, ranges.channel_max(name), weight, bias, alpha=alpha)
    title = "static, unsmoothed" if alpha is None else f"static, alpha {alpha:g}"
    return Way(title, alpha, judged, layers, perf_counter() - begin)


def dynamic_way(encoder: Encoder, dispatcher: Dispatcher) -> Way:
    """Quantize the whole model for dynamic W8A8."""
    begin = perf_counter()
    layers: dict[str, Int8Layer] = {
        name: DynamicLayer.quantize(dispatcher, encoder.weight(name), encoder.bias(name))
        for name in encoder.linear_names
    }
    return Way("dynamic", None, judged=True, layers=layers, prepare_seconds=perf_counter() - begin)


def prepare_ways(encoder: Encoder, dispatcher: Dispatcher, ranges: ActivationRanges, found: float) -> tuple[Way, ...]:
    """Quantize the model every way that is compared: the dynamic one, then the static ones in order of alpha."""
    alphas = sorted({*COMPARED_ALPHAS, found}, key=lambda alpha: -1 if alpha is None else alpha)
    static = (static_way(encoder, dispatcher, ranges, alpha, judged=alpha == found) for alpha in alphas)
    return (dynamic_way(encoder, dispatcher), *static)


def batches(sentences: Tokens) -> list[list[int]]:
    """Return the indices of the sentences, batch by batch, the shortest first."""
    order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
    return [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
