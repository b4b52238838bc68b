"""Random inputs for any problem, from what its arguments say: what tests and ``skuda verify`` run kernels on.

Data is drawn in steps of its own scale, so that most of it falls within the codes' range and some of it does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from skuda.kernels.dtypes import storage_dtype
from skuda.registry.descriptor import Argument, Descriptor, Role, storage_shape
from skuda.registry.elements import ElementKind
from skuda.registry.op import Case, Op, Values

Array = npt.NDArray[Any]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Drawn:
    """What `draw` returns.

    Attributes
    ----------
    inputs : dict
        Arrays and numbers by argument name; neither outputs nor scratch.
    shapes : dict
        Shape in elements of every array argument, outputs and scratch too.
    """

    inputs: dict[str, Any]
    shapes: dict[str, Shape]


def draw(op: Op, case: Case, rng: np.random.Generator) -> Drawn:
    """Draw inputs for a case.

    Parameters
    ----------
    op : Op
        Whose case it is; its own `draw`, where it has one, takes precedence over the general rule.
    case : Case
        The problem and how its floating inputs are drawn.
    rng : Generator
        Where the numbers come from.
    """
    problem, arguments = case.problem, case.problem.arguments()
    flat = _flat_shape(arguments, rng)
    shapes = {a.name: flat if a.flat else a.shape for a in arguments if not a.is_scalar}
    if op.draw is not None:
        return Drawn(dict(op.draw(problem, case.values, rng)), shapes)
    inputs: dict[str, Any] = {}
    # Scales first: data is drawn in steps of its scale.
    for argument in sorted(arguments, key=lambda a: a.name != "scale"):
        if argument.role not in (Role.OUTPUT, Role.SCRATCH):
            shape = shapes.get(argument.name, ())
            inputs[argument.name] = _one(problem, argument, shape, inputs.get("scale"), case.values, rng)
    return Drawn(inputs, shapes)


def _flat_shape(arguments: tuple[Argument, ...], rng: np.random.Generator) -> Shape:
    """Return a shape for per-tensor data: 1-D, or of more axes where the last one packs evenly."""
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
    if not packed:
        choices += [(count, 1)] + [()] * (count == 1)
    return choices[rng.integers(len(choices))]


def _one(
    problem: Descriptor, argument: Argument, shape: Shape, scale: Any, values: Values, rng: np.random.Generator
) -> Any:
    """Draw one argument: an array, or a number where one will do."""
    element = argument.elements[rng.integers(len(argument.elements))]
    limits = element.integer_range
    match argument.role:
        case Role.SCALE:
            return _as_scalar(scales((), element, values, rng), argument, rng)
        case Role.ZERO_POINT:
            return _as_scalar(zero_points((), problem, values, rng), argument, rng)
        case Role.VALUE if limits is not None:
            return int(rng.integers(*limits, endpoint=True))
        case Role.VALUE:
            number = rounded(_special(floats((), element, rng), element, 0.3, rng), element)
            return _beside_a_tie(float(number), element)
        case _:
            pass
    if element is ElementKind.S32:
        return zero_points(shape, problem, values, rng)
    if limits is not None:
        low, high = (0, 255) if element.is_packed else limits
        return rng.integers(low, high, storage_shape(shape, element), storage_dtype(element), endpoint=True)
    if "scale" in argument.name:
        return scales(shape, element, values, rng)
    if argument.name == "input" and scale is not None:
        data = _in_steps(problem, np.asarray(scale, np.float64), shape, values, rng)
    else:
        data = floats(shape, element, rng)
    return rounded(_special(data, element, 0.15, rng) if values == "special" else data, element)


def floats(shape: Shape, element: ElementKind, rng: np.random.Generator) -> Array:
    """Draw finite numbers over many binades, most of them near each other, as f64.

    Parameters
    ----------
    shape : tuple of int
        Shape.
    element : ElementKind
        What they will be rounded to; it bounds the exponents.
    rng : Generator
        Where the numbers come from.
    """
    reach = {ElementKind.F16: 8, ElementKind.F64: 60}.get(element, 24)
    exponent = np.where(rng.random(shape) < 0.2, rng.uniform(-reach, reach, shape), rng.uniform(-3, 3, shape))
    return np.asarray(rng.standard_normal(shape) * np.exp2(exponent))


def scales(shape: Shape, element: ElementKind, values: Values, rng: np.random.Generator) -> Array:
    """Draw scales: powers of two in ``ties``, so that half a step is exact; in ``special`` also unusable ones.

    Parameters
    ----------
    shape : tuple of int
        Shape.
    element : ElementKind
        Element of the result.
    values : str
        As in `Case`.
    rng : Generator
        Where the numbers come from.
    """
    if values == "ties":
        return rounded(np.exp2(rng.integers(-6, 4, shape).astype(np.float64)), element)
    reach = {ElementKind.F16: 8, ElementKind.F64: 200}.get(element, 30)
    found = np.exp2(np.where(rng.random(shape) < 0.3, rng.uniform(-reach, reach, shape), rng.uniform(-8, 2, shape)))
    if values == "special":
        found = _special(found * rng.choice([1, 1, 1, -1], shape), element, 0.25, rng)
    return rounded(found, element)


def zero_points(shape: Shape, problem: Descriptor, values: Values, rng: np.random.Generator) -> Any:
    """Draw zero points within the codes' range, s32; in ``special`` also the extremes of s32.

    Parameters
    ----------
    shape : tuple of int
        Shape.
    problem : Descriptor
        Whose ``q_min`` and ``q_max`` bound them.
    values : str
        As in `Case`.
    rng : Generator
        Where the numbers come from.
    """
    low, high = getattr(problem, "q_min", -8), getattr(problem, "q_max", 7)
    found: Any = rng.integers(low, high, shape, np.int32, endpoint=True)
    if values == "special":
        extreme = rng.choice(np.array([-(2**31), 2**31 - 1, -1000, 70_000], np.int32), shape)
        found = np.where(rng.random(shape) < 0.25, extreme, found)
    return found


def specials(element: ElementKind) -> Array:
    """Return the numbers at the edges of a floating element, as f64.

    Parameters
    ----------
    element : ElementKind
        The element.
    """
    info = _limits(element)
    tiny, least, most = (float(v) for v in (info.smallest_normal, info.smallest_subnormal, info.max))
    edges = [0.0, math.inf, least, 3 * least, tiny - least, tiny, most, 1.0]
    return np.array([math.nan, *edges, *(-edge for edge in edges)])


def _in_steps(problem: Descriptor, scale: Array, shape: Shape, values: Values, rng: np.random.Generator) -> Array:
    """Draw data so that most of it falls within the range of the codes, or a little outside."""
    low, high = getattr(problem, "q_min", -128), getattr(problem, "q_max", 127)
    steps: Any
    if values == "ties":
        steps = rng.integers(low - high - 3, high - low + 3, shape, endpoint=True) + rng.choice([0.5, 0.5, 0.0], shape)
    else:
        steps = rng.uniform(-1.3, 1.3, shape) * (high - low + 1)
        wide = rng.random(shape) < 0.1
        steps = np.where(wide, steps * np.exp2(rng.uniform(-30, 30, shape)), steps)
    with np.errstate(all="ignore"):
        return np.asarray(steps * spread(problem, scale, shape))


def spread(problem: Any, scale: Array, shape: Shape) -> Array:
    """Return scales so that they broadcast against the data."""
    if getattr(problem, "group_size", None) is not None:
        return np.repeat(scale, problem.group_size, axis=1)
    if getattr(problem, "axis", None) is not None:
        return scale.reshape([-1 if axis == problem.axis else 1 for axis in range(len(shape))])
    return scale.reshape(-1, 1) if hasattr(problem, "d") else scale.reshape(())


def _special(values: Array, element: ElementKind, share: float, rng: np.random.Generator) -> Array:
    values, edges = np.asarray(values), specials(element)
    # Some rows stay free of them, and some arrays of infinities: one infinity hides all else in a dynamic range.
    some = rng.random((*values.shape[:1], *(1,) * (values.ndim - 1))) < 0.6
    edges = edges[~np.isinf(edges)] if rng.random() < 0.4 else edges
    return np.where(some & (rng.random(values.shape) < share), rng.choice(edges, values.shape), values)


def _beside_a_tie(value: float, element: ElementKind) -> float:
    """Return a little more than the middle between a number and its neighbour: rounding in two steps shows there."""
    if not math.isfinite(value) or element is ElementKind.F64:
        return value
    unit = math.ldexp(float(_limits(element).eps), math.frexp(value)[1] - 1)
    return value - math.copysign(unit / 2 * (1 - 2**-30), value)


def rounded(values: Array, element: ElementKind) -> Array:
    """Round to the element, keeping finite numbers finite."""
    most = float(_limits(element).max)
    with np.errstate(all="ignore"):
        kept = np.asarray(np.where(np.isinf(values), values, np.clip(values, -most, most)))
        return np.asarray(kept.astype(storage_dtype(element)))


def _as_scalar(value: Any, argument: Argument, rng: np.random.Generator) -> Any:
    """Pass a number as a number or as an array of one element of any rank."""
    array = np.asarray(value)
    with np.errstate(all="ignore"):
        plain = float(array.astype(storage_dtype(argument.elements[0])))
    usable = argument.role is not Role.SCALE or (math.isfinite(plain) and plain != 0)
    kind = int(rng.integers(5))
    if usable and kind < 2:
        return plain if argument.role is Role.SCALE else int(plain)
    shapes: list[Shape] = [(1,), (1, 1), (), (1,), (1, 1, 1)]
    return array.reshape(shapes[kind])


def _limits(element: ElementKind) -> Any:
    finfo: Any = ml_dtypes.finfo  # without annotations of its own
    return finfo(storage_dtype(element))
