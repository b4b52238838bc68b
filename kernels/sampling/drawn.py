"""Random logits and temperatures, for tests and ``skuda verify``."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from skuda.kernels.sampling.weights import PART, LogitsProblem
from skuda.kernels.values import floats, rounded, specials
from skuda.registry.op import Values

Array = npt.NDArray[Any]
SIZES = ((4, 50), (5, 1), (0, 8), (3, 0), (1, 2 * PART + 77), (37, 130), (9, 7), (2, PART), (3, PART + 1))
"""n, v of the cases: from one token to several parts of a row."""


def data(problem: LogitsProblem, values: Values, rng: np.random.Generator) -> Array:
    """Return logits [n, v]; some rows have equal ones, and some values far below the largest.

    For ``special`` and ``infinite`` some rows have numbers that are not finite, or no distribution at all.
    """
    shape, element = (problem.n, problem.v), problem.input_element
    found = rng.standard_normal(shape) * rng.choice([0.01, 1, 5, 30], (problem.n, 1))
    found = np.where(rng.random((problem.n, 1)) < 0.3, np.rint(found), found)
    if values == "zero":
        found = rng.choice([0.0, -0.0], shape)
    elif values != "normal":
        share = rng.choice([0, 0, 0.01, 0.3, 1], (problem.n, 1))
        chosen = np.where(rng.random((problem.n, 1)) < 0.5, -np.inf, rng.choice(specials(element), shape))
        found = np.where(rng.random(shape) < share, chosen, found)
        wide = rng.random((problem.n, 1)) < 0.2
        found = np.where(wide & np.isfinite(found), floats(shape, element, rng), found)
    return rounded(found, element)


def temperatures(count: int, values: Values, rng: np.random.Generator) -> Array:
    """Return f32 temperatures around 1; for values other than ``normal``, some are extreme or no temperature."""
    found = rng.choice([1, 1, 0.7, 0.3, 2.5, 1e-3], count) * rng.choice([1, 1 + rng.random()], count)
    if values != "normal":
        odd = np.array([0, -0.0, -1, np.nan, np.inf, -np.inf, 1e-45, 3e38, 1e-30])
        found = np.where(rng.random(count) < 0.3, rng.choice(odd, count), found)
    return np.asarray(found.astype(np.float32))
