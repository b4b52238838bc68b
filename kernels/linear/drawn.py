"""Random inputs of linear layers, for tests and ``skuda verify``. Weights of s4 are packed."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from skuda.kernels.draw import by_role
from skuda.kernels.linear import packed
from skuda.kernels.linear.problem import LinearProblem
from skuda.registry.elements import ElementKind
from skuda.registry.op import Values

Array = npt.NDArray[Any]


def draw(problem: LinearProblem, values: Values, rng: np.random.Generator) -> dict[str, Any]:
    """Draw the inputs of a linear layer."""
    coded = problem.on_codes
    shapes = {each.name: each.shape for each in coded.arguments() if not each.is_scalar}
    inputs = by_role(coded, shapes, values, rng)
    if problem.weight_element is ElementKind.S4:
        inputs["weight_q"] = packed_like(inputs["weight_q"], problem.group_size, rng)
    return inputs


def packed_like(codes: Array, size: int, rng: np.random.Generator) -> Array:
    """Return a packed weight: groups of codes that 16 levels hold as they are, any others as random ones.

    What fills up the last unit and block is random, too.
    """
    n, k = codes.shape
    units, blocks, _ = packed.shape_of(n, k, size)
    rows, columns = units * packed.ROWS, blocks * packed.BLOCK
    filled = np.pad(codes, ((0, rows - n), (0, columns - k)), mode="edge") if codes.size else np.zeros((rows, columns))
    wanted = filled.reshape(rows, columns // size, size).astype(np.int64) + 128
    low, high = wanted.min(axis=2), wanted.max(axis=2)
    close = high - low <= 15
    scale = np.where(close, high > low, rng.integers(0, 17, low.shape, endpoint=True))
    base = np.where(close, low, rng.integers(0, 255, low.shape, endpoint=True))
    base = np.minimum(base, 255 - 15 * scale)  # no byte of a word carries into the next
    levels = rng.integers(0, 15, wanted.shape, endpoint=True)
    levels = np.where((close & (high > low))[..., None], wanted - base[..., None], levels).reshape(rows, columns)
    levels[n:], levels[:, k:] = (rng.integers(0, 15, part.shape, endpoint=True) for part in (levels[n:], levels[:, k:]))
    return packed.packed(levels, scale, base - 128, size)
