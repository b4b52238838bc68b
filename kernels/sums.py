"""Inputs of linear layers that show how sums of products are held, and what an epilogue makes of -0 and NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from skuda.kernels.values import rounded
from skuda.registry.descriptor import Descriptor
from skuda.registry.elements import ElementKind

Array = npt.NDArray[Any]
_NEAR = 8
"""How many codes at an end of their range count as near it."""


def at_ends(problem: Descriptor, inputs: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Return replacements for activation and weight, by name, that make sums of products as large as they get.

    A row of codes is the least code throughout, or random codes near an end of the range. Sums of the former overflow
    32 bits first. The sum of the second rows is odd, so that an accumulator of 24 bits rounds or saturates it.

    Parameters
    ----------
    problem : Descriptor
        The problem; one without a weight keeps its inputs.
    inputs : dict
        The inputs drawn so far.
    rng : Generator
        Source of the random numbers.
    """
    if "weight_q" not in inputs:
        return {}
    found: dict[str, Any] = {name: _codes(inputs[name], rng) for name in ("act_q", "weight_q") if name in inputs}
    if all(len(found.get(name, ())) > 1 for name in ("act_q", "weight_q")) and found["act_q"].shape[1]:
        act, weight = (found[name][1][-found["weight_q"].shape[1] :] for name in ("act_q", "weight_q"))
        act[0] = np.iinfo(act.dtype).max  # it is odd
        weight[0] ^= 1 - np.count_nonzero(act & weight & 1) % 2
    if "activation" in inputs:
        shape = inputs["activation"].shape
        signs = rng.choice([-1, 1], (shape[0], 1))
        element: ElementKind = getattr(problem, problem.element_field)
        found["activation"] = rounded(signs * rng.uniform(1 - _NEAR / 128, 1, shape), element)
    return found


def _codes(codes: Array, rng: np.random.Generator) -> Array:
    """Return rows of codes at the ends of the range of their dtype.

    The first row is at the low end, the second near either end, and the others are one or the other.
    """
    low, high = np.iinfo(codes.dtype).min, np.iinfo(codes.dtype).max
    least = np.full(codes.shape, low or high, codes.dtype)
    near = rng.integers(high - _NEAR, high, codes.shape, codes.dtype, endpoint=True)
    if low:
        near = np.where(rng.random((len(codes), 1)) < 0.5, near, -near)
    first = rng.random((len(codes), 1)) < 0.5
    first[:2, 0] = (True, False)[: len(codes)]
    return np.asarray(np.where(first, least, near), codes.dtype)


def with_zeros(inputs: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Return replacements for the inputs of a weight, by name: one output channel is -0, and the bias of one is NaN.

    Parameters
    ----------
    inputs : dict
        The inputs drawn so far; those of a problem without a weight's scale are kept.
    rng : Generator
        Source of the random numbers.
    """
    if "weight_scale" not in inputs or len(inputs["weight_scale"]) < 2:
        return {}
    zero, other = rng.permutation(len(inputs["weight_scale"]))[:2]
    planted = {"weight_q": 0, "weight_zero_point": 0, "weight_scale": -1, "bias": -0.0}
    found = {name: np.array(inputs[name]) for name in planted if name in inputs}
    for name, array in found.items():
        array[zero] = planted[name]
    if "bias" in found:
        found["bias"][other] = np.nan
    return found
