"""Inputs whose quotient by a scale is on a rounding boundary, or one representable number away from it.

Only ``RN((k + 1/2) s)`` and its neighbours reliably distinguish a true division from a product with a reciprocal.
Several scales are drawn for each place, and the one whose reciprocal has the largest rounding error is used. 16-bit
data reaches a boundary only if ``(k + 1/2) s`` is representable, so its scales have few significant bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from skuda.kernels.dtypes import compute_dtype, storage_dtype
from skuda.kernels.values import rounded, spread
from skuda.registry.descriptor import Descriptor
from skuda.registry.elements import ElementKind

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
_CANDIDATES = 8
"""Scales drawn for each one that is used."""


def tie_scales(shape: Shape, element: ElementKind, rng: np.random.Generator) -> Array:
    """Draw scales whose reciprocals have large rounding errors, as f64 numbers representable in the element.

    Parameters
    ----------
    shape : tuple of int
        Shape of the result.
    element : ElementKind
        Element of the data and of the scales.
    rng : Generator
        Source of the random numbers.
    """
    drawn = _candidates(shape, element, rng)
    return np.asarray(_least_exact(drawn, element, drawn)[0])


def at_ties(problem: Descriptor, inputs: dict[str, Any], segments: Shape, rng: np.random.Generator) -> dict[str, Any]:
    """Return inputs, by name, that put quotients on rounding boundaries or next to them; they replace those drawn.

    Parameters
    ----------
    problem : Descriptor
        The problem. If it divides neither by ``scale`` nor by a range of its data, nothing is returned.
    inputs : dict
        The inputs drawn so far, with scales from `tie_scales`.
    segments : tuple of int
        Shape of the scales that the problem writes; empty if it writes none.
    rng : Generator
        Source of the random numbers.
    """
    if "weight_q" in inputs:
        return _linear(problem, inputs, rng)
    data = inputs.get("input")
    element: ElementKind = getattr(problem, problem.element_field)
    if data is None or not hasattr(problem, "q_min") or not element.is_float or not ("scale" in inputs or segments):
        return {}
    if "scale" not in inputs:
        ids = spread(problem, np.arange(int(np.prod(segments))).reshape(segments), data.shape)
        return {"input": _ranged(problem, element, np.broadcast_to(ids, data.shape), rng)[0]}
    scale, zero_point = (
        spread(problem, np.asarray(inputs[name], np.float64), data.shape) if name in inputs else np.zeros(())
        for name in ("scale", "zero_point")
    )
    bounds: Any = problem
    ends = 0.75 if "d_output" in inputs else 0.0  # a gradient shows only the ends of the range
    low, high = bounds.q_min - zero_point, bounds.q_max - zero_point
    return {"input": _near_ties(low, high, scale, data.shape, element, rng, ends)}


def _candidates(shape: Shape, element: ElementKind, rng: np.random.Generator) -> Array:
    """Return several scales for each place: with few significant bits for 16-bit data, with any for other data."""
    exponent = rng.integers(-6, 3, (_CANDIDATES, *shape))
    if element.bits > 16:
        return rounded(np.ldexp(rng.uniform(1, 2, exponent.shape), exponent), element).astype(np.float64)
    return np.asarray(np.ldexp(rng.choice([7.0, 13.0, 15.0], exponent.shape), exponent - 3))


def _least_exact(scales: Array, element: ElementKind, *others: Array) -> list[Array]:
    """Return the entries of several arrays that belong to the scale with the least exact reciprocal."""
    compute = compute_dtype(element)
    with np.errstate(all="ignore"):
        reciprocal = (1 / scales.astype(compute)).astype(np.longdouble)
        error = np.abs(reciprocal * scales.astype(np.longdouble) - 1)
    best = np.argmax(error, axis=0)[None]
    return [np.take_along_axis(each, best, axis=0)[0] for each in others]


def _near_ties(
    low: Any, high: Any, scale: Array, shape: Shape, element: ElementKind, rng: np.random.Generator, share: float = 0.0
) -> Array:
    """Return numbers whose quotients are near ties in [low, high]: a share at its ends, others near 0 or anywhere."""
    reach = np.broadcast_to(np.asarray(high - low, np.float64), shape)
    anywhere = low + np.floor(rng.random(shape) * (reach + 1))
    small = rng.choice([-1, 1], shape) * np.floor(np.exp2(rng.random(shape) * 5))
    steps = np.where(rng.random(shape) < 0.3, np.clip(small, low, high), anywhere)
    ends = np.where(rng.random(shape) < 0.5, low - 1, high)
    steps = np.where(rng.random(shape) < share, ends, steps)
    steps = steps + np.where(rng.random(shape) < 0.9, 0.5, 0.0)
    near = rounded(steps * scale, element)
    bits = near.view(f"i{near.dtype.itemsize}")
    # One number away from 0 or towards it; 0 itself stays.
    moved = np.asarray(bits + rng.integers(-1, 2, shape).astype(bits.dtype)).view(near.dtype)
    return np.where(near == 0, near, moved)


def _ranged(
    problem: Any, element: ElementKind, ids: Array, rng: np.random.Generator, *, shared: bool = False
) -> tuple[Array, Array]:
    """Return data whose range determines its scales, and those scales by segment.

    Parameters
    ----------
    problem : Descriptor
        Has ``q_min``, ``q_max`` and, if the range may be asymmetric, ``mode``.
    element : ElementKind
        Element of the data.
    ids : array of int
        Segment number of every element.
    rng : Generator
        Source of the random numbers.
    shared : bool
        Whether all segments have the same range.
    """
    asymmetric = getattr(problem, "mode", "symmetric") == "asymmetric"
    compute, count = compute_dtype(element), int(ids.max(initial=-1)) + 1
    levels = problem.q_max - problem.q_min if asymmetric else problem.q_max
    scale = _candidates((1 if shared else count,), element, rng)
    below = rng.integers(0, levels, scale.shape, endpoint=True) if asymmetric else np.full(scale.shape, levels)
    above = levels - below if asymmetric else below
    ends = [rounded(scale * side, element).astype(compute) for side in (-below, above)]
    scale = (ends[1] - ends[0] if asymmetric else ends[1]) / compute.type(levels)
    entries = _least_exact(scale, element, scale.astype(np.float64), below, above, *ends)
    scale, below, above, least, most = (np.broadcast_to(each, (count,)) for each in entries)
    low = -below if asymmetric else np.maximum(-below, problem.q_min - 1)
    data = _near_ties(low[ids], above[ids] - 1, scale[ids], ids.shape, element, rng)
    data = np.clip(data.astype(compute), least[ids], most[ids]).astype(storage_dtype(element))
    # The first and the last element of a segment are the ends of its range.
    flat, order = data.reshape(-1), ids.reshape(-1)
    places = [np.unique(order, return_index=True)[1], order.size - 1 - np.unique(order[::-1], return_index=True)[1]]
    for place, end in zip(places, (least, most), strict=True):
        flat[place] = end.astype(data.dtype)
    return data, scale


def _linear(problem: Any, inputs: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Return inputs of a linear layer whose quantized activation and output have quotients on rounding boundaries.

    Every row of the weight has one code that differs from its zero point by 1, so each dot product is one code of the
    activation, and the scales make it a multiple of half an output step.
    """
    found: dict[str, Any] = {}
    compute: ElementKind = problem.compute
    act_scale = getattr(problem, "act_scale", 1.0)
    if "activation" in inputs:
        rows, columns = inputs["activation"].shape
        ids = np.broadcast_to(np.arange(rows)[:, None], (rows, columns))
        found["activation"], scale = _ranged(problem, problem.activation_element, ids, rng, shared=True)
        act_scale = float(scale[0]) if scale.size else 1.0
    weight = inputs["weight_q"]
    rows, columns = weight.shape
    zero_point = np.zeros(rows, np.int32)
    if "weight_zero_point" in inputs:
        zero_point = found["weight_zero_point"] = rng.integers(1, 100, rows, np.int32)
    codes = np.repeat(zero_point[:, None], columns, axis=1)
    if columns:
        codes[np.arange(rows), rng.integers(columns, size=rows)] += 1
    found["weight_q"] = codes.astype(weight.dtype)
    if "output_scale" not in inputs or act_scale == 0:
        return found
    step = float(tie_scales((), compute, rng))
    found["output_scale"] = step
    factors = rng.choice([1.0, -1.0, 3.0], rows) * step / 2 / act_scale
    found["weight_scale"] = rounded(factors, compute)
    if "bias" in inputs:
        found["bias"] = rounded(rng.integers(-9, 10, rows) * step, compute)
    return found
