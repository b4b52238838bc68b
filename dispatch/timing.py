"""`Timing`: how long one thing took."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from skuda.registry.value import Real, Size, Value


class Timing(Value):
    """How long one thing took, in microseconds.

    Attributes
    ----------
    median, p10, p90, best : float
        Median, 10th and 90th percentile, minimum.
    rounds : int
        How often it was timed; fewer than asked for where the time budget ended it.
    """

    median: Real
    p10: Real
    p90: Real
    best: Real
    rounds: Size

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Sum up samples in microseconds; at least one."""
        p10, p90 = np.percentile(samples, (10, 90))
        return cls(
            median=statistics.median(samples), p10=float(p10), p90=float(p90), best=min(samples), rounds=len(samples)
        )
