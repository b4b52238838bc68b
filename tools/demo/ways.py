"""The int8 ways to run the encoder's linear layers, and the search for the best alpha."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from skuda.dispatch import Dispatcher
from skuda.tools.demo.encoder import F32, Encoder, Layers, Linear
from skuda.tools.demo.metrics import cosine
from skuda.tools.demo.result import AlphaScore
from skuda.tools.smoothquant import ActivationRanges

Tokens = Sequence[Sequence[int]]
Advance = Callable[[], None]

BATCH = 16
"""Sentences embedded in one batch; batches are in order of length, so that attention pads little."""
COARSE_ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
FINE_STEP = 0.05
COMPARED_ALPHAS = (None, 0.5, 0.8)
"""Alphas of the static ways that are compared with the one found; None is without smoothing."""


@dataclass(frozen=True, eq=False)
class Part:
    """A part of the calibration sentences: token ids, f32 embeddings, activation ranges."""

    sentences: Tokens
    embeddings: F32
    ranges: ActivationRanges


@dataclass(frozen=True, eq=False)
class Way:
    """The whole model quantized in one way: one int8 layer for every linear layer of the encoder."""

    name: str
    alpha: float | None
    judged: bool
    layers: Layers
    prepare_seconds: float

    def linear(self, dispatcher: Dispatcher) -> Linear:
        """Return the function to inject into the encoder, which runs the layers."""
        return self.layers.linear(dispatcher)


def embed(encoder: Encoder, sentences: Tokens, linear: Linear, advance: Advance = lambda: None) -> F32:
    """Embed sentences in batches, shape (len(sentences), hidden_size); `advance` is called after each batch."""
    embeddings = np.empty((len(sentences), encoder.config.hidden_size), np.float32)
    for batch in batches(sentences):
        embeddings[batch] = encoder.embed([sentences[i] for i in batch], linear)
        advance()
    return embeddings


def batches(sentences: Tokens) -> list[list[int]]:
    """Return the indices of the sentences in batches, the shortest sentences first."""
    order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
    return [order[start : start + BATCH] for start in range(0, len(order), BATCH)]


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
    """Return the joint ranges of all parts; the maxima of a part are observed as a batch of one row."""
    together = ActivationRanges()
    for part in parts:
        for layer in part.layers:
            together.observe(layer, part.channel_max(layer))
    return together


def search_alpha(
    encoder: Encoder, dispatcher: Dispatcher, parts: tuple[Part, Part], advance: Advance
) -> tuple[AlphaScore, ...]:
    """Score alphas on a coarse grid, then on both sides of the best; return the scores in order of alpha.

    Each part is embedded in static int8 with the ranges of the other one. The best mean cosine wins, because the worst
    cosine depends on a single sentence.
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
    """Quantize the whole model for static W8A8; alpha None means no smoothing."""
    title = "static, unsmoothed" if alpha is None else f"static, alpha {alpha:g}"
    maxima = {name: ranges.channel_max(name) for name in encoder.linear_names}
    return _way(encoder, dispatcher, title, maxima, alpha, judged=judged)


def _way(
    encoder: Encoder,
    dispatcher: Dispatcher,
    name: str,
    maxima: Mapping[str, F32] | None,
    alpha: float | None,
    *,
    judged: bool,
) -> Way:
    begin = perf_counter()
    return Way(name, alpha, judged, encoder.int8(dispatcher, maxima, alpha), perf_counter() - begin)


def prepare_ways(encoder: Encoder, dispatcher: Dispatcher, ranges: ActivationRanges, found: float) -> tuple[Way, ...]:
    """Quantize the model in every compared way: dynamic W8A8 first, then the static ones in order of alpha."""
    alphas = sorted({*COMPARED_ALPHAS, found}, key=lambda alpha: -1 if alpha is None else alpha)
    static = (static_way(encoder, dispatcher, ranges, alpha, judged=alpha == found) for alpha in alphas)
    return (_way(encoder, dispatcher, "dynamic", None, None, judged=True), *static)
