"""Everything that the demo measures, as frozen records that `--json` prints."""

from __future__ import annotations

from pydantic import computed_field

from skuda.registry.value import Value

REQUIRED_COSINE = 0.99
"""Least cosine to the f32 embedding that every held-out sentence must keep, both ways."""


class AlphaScore(Value):
    """One step of the search for alpha, measured on the calibration half alone.

    Attributes
    ----------
    alpha : float
    worst_cosine, mean_cosine : float
        Over the calibration sentences, each scored with ranges to which it did not contribute.
    """

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
        Whether the way must reach `REQUIRED_COSINE`; the others are there for comparison.
    worst_cosine, mean_cosine : float
        To the f32 embedding of the same sentence.
    worst_rank_correlation, mean_rank_correlation : float
        Spearman, of each sentence's ranking of all the others.
    same_nearest : float
        Share of sentences whose nearest other sentence is the same, 0..1.
    prepare_seconds, run_seconds : float
        Quantizing the model; embedding the held-out half once.
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
    """One linear layer.

    Attributes
    ----------
    name, label : str
        In the checkpoint; in a table.
    n, k : int
        Output and input channels.
    skus : dict of str to tuple of str
        Ids of the kernels chosen for the product, by way; several where the number of rows decides.
    sqnr_db : dict of str to float
        Signal to quantization noise ratio of the layer's output over the held-out half, by way. Each layer gets its
        f32 input, so the figure is the layer's own error and not that of the layers before.
    """

    name: str
    label: str
    n: int
    k: int
    skus: dict[str, tuple[str, ...]]
    sqnr_db: dict[str, float]


class DemoResult(Value):
    """The whole run.

    Attributes
    ----------
    model, model_version, device : str
    split : str
        How the sentences were divided.
    calibration_sentences, calibration_tokens, held_out_sentences, held_out_tokens : int
    alpha : float
        The one found by `search`.
    search : tuple of AlphaScore
        In order of alpha.
    ways : tuple of WayResult
    layers : tuple of LayerResult
        In the order in which they run.
    f32_seconds, calibration_seconds, search_seconds, total_seconds : float
        Embedding the held-out half in f32; observing the calibration half; the search; everything, plot aside.
    plot : str
        Path of the PNG.
    """

    model: str
    model_version: str
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
        """Whether every judged way keeps every held-out sentence at `required_cosine` or above; a NaN fails."""
        return not self.below

    @property
    def below(self) -> tuple[WayResult, ...]:
        """The judged ways that do not reach the required cosine."""
        return tuple(way for way in self.judged if not way.worst_cosine >= self.required_cosine)

    @property
    def judged(self) -> tuple[WayResult, ...]:
        """The two ways that must reach the required cosine, dynamic first."""
        return tuple(way for way in self.ways if way.judged)
