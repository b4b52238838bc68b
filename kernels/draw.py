"""Random inputs for any problem, drawn by its arguments. Tests and ``skuda verify`` run kernels on them.

Data is drawn in multiples of its scale: most of it quantizes within the range of the codes, some saturates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from skuda.kernels.dtypes import storage_dtype
from skuda.kernels.sums import at_ends, with_zeros
from skuda.kernels.ties import at_ties, tie_scales
from skuda.kernels.values import finfo_of, floats, rounded, specials, spread
from skuda.registry.argument import Argument, Role, storage_shape
from skuda.registry.descriptor import Descriptor
from skuda.registry.elements import ElementKind
from skuda.registry.op import Case, Op, Values

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
_finfo: Any = ml_dtypes.finfo  # it has no annotations
BYTES = {ElementKind.S4: (0, 255), ElementKind.U4: (0, 255), ElementKind.S16: (-128, 127)}
"""The bytes that store codes which are not bytes themselves."""
_MIN_EXTENT = 5
"""Smallest extent of an axis on which one slice is set to zeros and one to subnormals."""


@dataclass(frozen=True)
class Drawn:
    """The inputs of a problem.

    Attributes
    ----------
    inputs : dict
        Arrays and numbers by argument name, without outputs and scratch.
    shapes : dict
        Shape in elements of every array argument, including outputs and scratch.
    """

    inputs: dict[str, Any]
    shapes: dict[str, Shape]


def draw(op: Op, case: Case, rng: np.random.Generator) -> Drawn:
    """Draw inputs for a case.

    Parameters
    ----------
    op : Op
        The op of the case; its own `draw`, if any, replaces the general rule.
    case : Case
        The problem and how its floating inputs are drawn.
    rng : Generator
        Source of the random numbers.
    """
    problem, arguments = case.problem, case.problem.arguments()
    flat = _flat_shape(arguments, rng)
    shapes = {a.name: flat if a.flat else a.shape for a in arguments if not a.is_scalar}
    drawn = op.draw(problem, case.values, rng) if op.draw is not None else by_role(problem, shapes, case.values, rng)
    return Drawn(dict(drawn) | _moved(problem, drawn, case.values, own=op.draw is not None), shapes)


def _moved(problem: Descriptor, drawn: Mapping[str, Any], values: Values, *, own: bool) -> dict[str, Any]:
    """Return the data that ``tail`` and the small values change; of an op's `own` draw, also the last scale."""
    arrays = {a.name: a for a in problem.arguments() if a.role is Role.INPUT and a.elements[0].is_float and a.shape}
    present = [name for name in arrays if isinstance(drawn.get(name), np.ndarray) and drawn[name].size]
    data = [name for name in present if "scale" not in name]
    if values == "tail":
        return {name: _with_tail(drawn[name]) for name in data}
    if values == "small_data":
        return {name: _small(drawn[name], _least_normal(drawn[name].dtype)) for name in data[:1]}
    scales = [name for name in present if name not in data and not name.startswith("output")]
    if values == "small_scales" and own and scales:
        return {scales[-1]: _small(drawn[scales[-1]], _small_scale(problem, drawn[scales[-1]].dtype))}
    return {}


def _with_tail(data: Array) -> Array:
    """Return data with one large element in each row, beyond the largest power of two: the last, or one before it."""
    extent = data.shape[-1]
    rows: Array = data.reshape(-1, extent).astype(np.float64)
    number = np.arange(len(rows))
    at = extent - 1 - number % max(1, min(3, extent - (1 << max(extent - 1, 1).bit_length() - 1)))
    most = np.nan_to_num(np.abs(rows)).max(axis=1)
    rows /= 256
    rows[number, at] = np.where(most > 0, most, 1) * np.where(number % 2, -1, 1)
    with np.errstate(all="ignore"):
        return rows.astype(data.dtype).reshape(data.shape)


def _small(numbers: Array, most: float) -> Array:
    """Return numbers in proportion, the largest of which is `most`."""
    wide = np.nan_to_num(numbers.astype(np.float64), posinf=0, neginf=0)
    with np.errstate(all="ignore"):
        return np.asarray((wide / (np.abs(wide).max() or 1) * most).astype(numbers.dtype))


def _least_normal(dtype: Any) -> float:
    return float(_finfo(dtype).smallest_normal)


def _small_scale(problem: Descriptor, dtype: Any) -> float:
    """Return a scale, in a dtype, whose products with codes are subnormal in the problem's floating element."""
    kinds = [getattr(problem, name, None) for name in (problem.element_field, "output_element", "input_element")]
    element = next((kind for kind in kinds if isinstance(kind, ElementKind) and kind.is_float), ElementKind.F32)
    least = float(_finfo(dtype).smallest_subnormal)
    return max(_least_normal(storage_dtype(element)) / 256, 3 * least)


def by_role(
    problem: Descriptor, shapes: Mapping[str, Shape], values: Values, rng: np.random.Generator
) -> dict[str, Any]:
    """Draw the inputs of a problem by the general rule.

    Parameters
    ----------
    problem : Descriptor
        The problem.
    shapes : mapping of str to tuple of int
        Shape in elements of every array argument.
    values, rng
        As for `draw`.
    """
    inputs: dict[str, Any] = {}
    # Scales come first, because data is drawn in multiples of its scale.
    for argument in sorted(problem.arguments(), key=lambda a: a.name != "scale"):
        if argument.role not in (Role.OUTPUT, Role.SCRATCH):
            shape = shapes.get(argument.name, ())
            inputs[argument.name] = _draw_argument(problem, argument, shape, inputs.get("scale"), values, rng)
    if values == "ties":
        inputs |= at_ties(problem, inputs, shapes.get("scale_out", ()), rng)
    elif values == "extreme":
        inputs |= at_ends(problem, inputs, rng)
    elif values == "special":
        inputs |= with_zeros(inputs, rng)
    return inputs


def _flat_shape(arguments: tuple[Argument, ...], rng: np.random.Generator) -> Shape:
    """Return a shape for per-tensor data: one axis, or several if the last one packs evenly."""
    flat = [a for a in arguments if a.flat]
    if not flat:
        return ()
    (count,) = flat[0].shape
    if not any(a.role is Role.INPUT for a in flat):
        return (count,)
    packed = any(a.elements[0].is_packed for a in flat)
    choices: list[Shape] = [(count,)]
    if not (packed and count % 2):
        choices += [(1, count), (1, 1, count)]
    if count % 20 == 0:
        choices += [(count // 20, 5, 4), (5, count // 5 // 2, 2)]
    factor = next((n for n in (6, 4, 2, *((7, 5, 3) if not packed else ())) if count % n == 0 < count), None)
    if factor is not None:
        choices += [(count // factor, factor)] * 2
    if not packed:
        choices += [(count, 1)] + [()] * (count == 1)
    return choices[rng.integers(len(choices))]


def _draw_argument(
    problem: Descriptor, argument: Argument, shape: Shape, scale: Any, values: Values, rng: np.random.Generator
) -> Any:
    """Draw one argument: an array, or a number if the argument is a scalar."""
    element = argument.elements[rng.integers(len(argument.elements))]
    limits = element.integer_range
    match argument.role:
        case Role.SCALE:
            kind = _scale_values(argument, values)
            return _as_scalar(_scales((), problem, element, kind, rng), argument, rng)
        case Role.ZERO_POINT:
            return _as_scalar(zero_points((), problem, values, rng), argument, rng)
        case Role.VALUE if limits is not None:
            return int(rng.integers(*limits, endpoint=True))
        case Role.VALUE:
            number = rounded(_special(floats((), element, rng), element, 0.3, rng), element)
            return _near_tie(float(number), element)
        case _:
            pass
    if argument.name.endswith("zero_point"):
        return zero_points(shape, problem, values, rng)
    if element is ElementKind.S32:
        return _sums(shape, rng)
    if limits is not None:
        low, high = BYTES.get(element, limits)
        return rng.integers(low, high, storage_shape(shape, element), storage_dtype(element), endpoint=True)
    if "scale" in argument.name:
        return _scales(shape, problem, element, _scale_values(argument, values), rng)
    return _data(problem, argument.name, element, shape, scale, values, rng)


def _scale_values(argument: Argument, values: Values) -> Values:
    """Return how a scale is drawn: only one factor of a product is small, and none that divides it."""
    return "normal" if values == "small_scales" and argument.name not in ("scale", "weight_scale") else values


def _sums(shape: Shape, rng: np.random.Generator) -> Array:
    """Draw s32 numbers of every magnitude, with both ends of the range among them."""
    numbers = rng.integers(-(2**31), 2**31 - 1, shape, np.int32, endpoint=True) >> rng.integers(0, 32, shape, np.int32)
    ends = rng.choice(np.array([-(2**31), 2**31 - 1], np.int32), shape)
    return np.asarray(np.where(rng.random(shape) < 0.05, ends, numbers))


def _data(
    problem: Descriptor,
    name: str,
    element: ElementKind,
    shape: Shape,
    scale: Any,
    values: Values,
    rng: np.random.Generator,
) -> Array:
    """Draw floating data."""
    if values == "zero":
        return np.zeros(shape, storage_dtype(element))
    if name == "input" and scale is not None:
        data = _in_steps(problem, np.asarray(scale, np.float64), shape, rng)
    else:
        data = floats(shape, element, rng)
    if values in ("special", "infinite"):
        data = _with_specials(_special(data, element, 0.15, rng), element, rng, infinite=values == "infinite")
    return rounded(data, element)


def _scales(shape: Shape, problem: Descriptor, element: ElementKind, values: Values, rng: np.random.Generator) -> Array:
    """Draw scales: with `tie_scales` for ``ties``; also zero, NaN, infinite and negative ones for ``special``."""
    if values == "small_scales":
        least = _small_scale(problem, storage_dtype(element))
        return rounded(least * np.exp2(rng.uniform(0, 1, shape)), element)
    if values == "small_data":
        return rounded(np.exp2(rng.uniform(0, 8, shape)), element)
    if values == "ties":
        data: ElementKind = getattr(problem, problem.element_field)
        return rounded(tie_scales(shape, data if data.is_float else element, rng), element)
    reach = {ElementKind.F16: 8, ElementKind.F64: 200}.get(element, 30)
    found = np.exp2(np.where(rng.random(shape) < 0.3, rng.uniform(-reach, reach, shape), rng.uniform(-8, 2, shape)))
    if values == "special":
        found = _special(found * rng.choice([1, 1, 1, -1], shape), element, 0.25, rng)
    return rounded(found, element)


def zero_points(shape: Shape, problem: Descriptor, values: Values, rng: np.random.Generator) -> Any:
    """Draw s32 zero points within the range of the codes; ``special`` also gives the extremes of s32.

    Parameters
    ----------
    shape : tuple of int
        Shape of the result.
    problem : Descriptor
        Its ``q_min`` and ``q_max`` bound the zero points.
    values : str
        As in `Case`.
    rng : Generator
        Source of the random numbers.
    """
    low, high = getattr(problem, "q_min", -8), getattr(problem, "q_max", 7)
    found: Any = rng.integers(low, high, shape, np.int32, endpoint=True)
    if values == "special":
        extreme = rng.choice(np.array([-(2**31), 2**31 - 1, -1000, 70_000], np.int32), shape)
        found = np.where(rng.random(shape) < 0.25, extreme, found)
    return found


def _in_steps(problem: Descriptor, scale: Array, shape: Shape, rng: np.random.Generator) -> Array:
    """Draw data that mostly quantizes within the range of the codes; some saturates, by little or by much."""
    low, high = getattr(problem, "q_min", -128), getattr(problem, "q_max", 127)
    steps: Any = rng.uniform(-1.3, 1.3, shape) * (high - low + 1)
    wide = rng.random(shape) < 0.1
    steps = np.where(wide, steps * np.exp2(rng.uniform(-30, 30, shape)), steps)
    with np.errstate(all="ignore"):
        return np.asarray(steps * spread(problem, scale, shape))


def _special(values: Array, element: ElementKind, share: float, rng: np.random.Generator) -> Array:
    values, edges = np.asarray(values), specials(element)
    # Some rows stay free of special numbers and some arrays of infinities: one infinity dominates a dynamic range.
    some = rng.random((*values.shape[:1], *(1,) * (values.ndim - 1))) < 0.6
    edges = edges[~np.isinf(edges)] if rng.random() < 0.4 else edges
    return np.where(some & (rng.random(values.shape) < share), rng.choice(edges, values.shape), values)


def _with_specials(data: Array, element: ElementKind, rng: np.random.Generator, *, infinite: bool) -> Array:
    """Place every special number, and on each axis a slice of zeros and one of subnormals.

    Infinities are placed only if `infinite`. A dynamic range of zeros or subnormals needs a whole segment of them, and
    segments may run along any axis.
    """
    data, free = np.array(data), np.ones(np.shape(data), bool)
    least = float(finfo_of(element).smallest_subnormal)
    wide_axes = [axis for axis, extent in enumerate(data.shape) if data.ndim > 1 and extent >= _MIN_EXTENT]
    # Zeros are written last, so the subnormals of another axis do not overwrite them.
    for share in (least, 0.0):
        for axis in wide_axes:
            at = rng.integers(data.shape[axis])
            chosen = np.moveaxis(data, axis, 0)[at]
            chosen[...] = share * rng.integers(-3, 4, chosen.shape)
            np.moveaxis(free, axis, 0)[at] = False
    edges = specials(element)
    places = rng.permutation(np.flatnonzero(free))[: len(edges)]
    usable = edges if infinite else edges[~np.isinf(edges)]
    data.reshape(-1)[places[: len(usable)]] = usable[: len(places)]
    return data


def _near_tie(value: float, element: ElementKind) -> float:
    """Return a number next to the midpoint of two neighbours, where rounding twice differs from rounding once."""
    if not math.isfinite(value) or element is ElementKind.F64:
        return value
    unit = math.ldexp(float(finfo_of(element).eps), math.frexp(value)[1] - 1)
    return value - math.copysign(unit / 2 * (1 - 2**-30), value)


def _as_scalar(value: Any, argument: Argument, rng: np.random.Generator) -> Any:
    """Return a scalar as a number or as an array of one element of any rank."""
    array = np.asarray(value)
    with np.errstate(all="ignore"):
        plain = float(array.astype(storage_dtype(argument.elements[0])))
    usable = argument.role is not Role.SCALE or (math.isfinite(plain) and plain != 0)
    kind = int(rng.integers(5))
    if usable and kind < 2:
        return plain if argument.role is Role.SCALE else int(plain)
    shapes: list[Shape] = [(1,), (1, 1), (), (1,), (1, 1, 1)]
    return array.reshape(shapes[kind])
