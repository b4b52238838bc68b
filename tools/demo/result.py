"""The demo's measurements, as frozen records that `--json` prints."""

from __future__ import annotations

from pydantic import computed_field

from skuda.registry.value import Value

REQUIRED_COSINE = 0.99
"""Least cosine to the f32 embedding for every held-out sentence, in both judged ways."""


class AlphaScore(Value):
    """One step of the search for alpha: cosines of calibration sentences that did not set the ranges used for them."""

    alpha: float
    worst_cosine: float
    mean_cosine: float


class WayResult(Value):
    """One way to run the 36 linear layers, measured on the held-out half.

    Attributes
    ----------
    name : str
    alpha : float or None
        Smoothing strength of a static way.
    judged : bool
        Whether the way must reach `REQUIRED_COSINE`; the other ways are shown for comparison.
    worst_cosine, mean_cosine : float
        Cosine to the f32 embedding of the same sentence.
    worst_rank_correlation, mean_rank_correlation, same_nearest : float
        See `skuda.tools.demo.metrics.Ranking`.
    prepare_seconds, run_seconds : float
        Time to quantize the model, and to embed the held-out half once.
    """

    name: str
    alpha: float | None
    judged: bool
    worst_cosine: float
    mean_cosine: float
    worst_rank_correlation: float
    mean_rank_correlation: float
    same_nearest: float
    prepare_seconds: float
    run_seconds: float


class LayerResult(Value):
    """One linear layer: its name in the checkpoint and in a table, and its output and input channels.

    `skus` are the ids of the kernels chosen for the product, by way; there are several if the choice depends on the
    number of rows. `sqnr_db` is the signal to quantization noise ratio of the layer's output over the held-out half, by
    way. Each layer gets its f32 input, so the ratio does not include the error of earlier layers.
    """

    name: str
    label: str
    n: int
    k: int
    skus: dict[str, tuple[str, ...]]
    sqnr_db: dict[str, float]


class DemoResult(Value):
    """The whole run.

    `framework` ran the model. `split` describes the division of the sentences, `alpha` is the best of `search`, which
    is in order of alpha, and `layers` are in the order in which they run. `total_seconds` includes everything but the
    plot, whose path is `plot`.
    """

    model: str
    model_version: str
    framework: str
    device: str
    split: str
    calibration_sentences: int
    calibration_tokens: int
    held_out_sentences: int
    held_out_tokens: int
    alpha: float
    search: tuple[AlphaScore, ...]
    ways: tuple[WayResult, ...]
    layers: tuple[LayerResult, ...]
    f32_seconds: float
    calibration_seconds: float
    search_seconds: float
    total_seconds: float
    plot: str
    required_cosine: float = REQUIRED_COSINE

    @computed_field  # type: ignore[prop-decorator]
    @property
    def passed(self) -> bool:
        """Whether every judged way keeps every held-out sentence at `required_cosine` or above; NaN fails."""
        return not self.below

    @property
    def below(self) -> tuple[WayResult, ...]:
        """The judged ways that do not reach the required cosine."""
        return tuple(way for way in self.judged if not way.worst_cosine >= self.required_cosine)

    @property
    def judged(self) -> tuple[WayResult, ...]:
        """The two ways that must reach the required cosine, dynamic first."""
        return tuple(way for way in self.ways if way.judged)
