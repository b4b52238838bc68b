"""What a NaN does to the range of its row, as references, kernels and cases have it: the field `nonfinite` of an op."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from skuda.registry.op import Case
from skuda.registry.vocabulary import Nonfinite


def in_range(problem: Any) -> float:
    """Return what a NaN counts as in a range of magnitudes: 0, which changes none, or an infinity."""
    return math.inf if problem.nonfinite is Nonfinite.PROPAGATE else 0.0


def flags(problem: Any) -> tuple[str, ...]:
    """Return the compiler flags of ``nonfinite.cuh``."""
    return ("-DSKUDA_PROPAGATE",) if problem.nonfinite is Nonfinite.PROPAGATE else ()


def propagating(cases: Sequence[Case]) -> tuple[Case, ...]:
    """Return cases of the same problems that propagate, with some NaN."""
    return tuple(
        Case(case.problem.model_copy(update={"nonfinite": Nonfinite.PROPAGATE}), "special")
        for case in cases
        if getattr(case.problem, "scaling", "dynamic") == "dynamic"
    )
