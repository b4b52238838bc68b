"""Inputs for any problem, arrays of any layout between guard zones, and comparison bit for bit."""

from __future__ import annotations

import math
import os
import sys
import zlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from skuda.dispatch import Dispatcher
from skuda.kernels.catalog import built_in_ops, built_in_registry
from skuda.kernels.dtypes import storage_dtype
from skuda.registry.descriptor import Argument, Descriptor, Role, storage_shape
from skuda.registry.elements import ElementKind
from skuda.registry.op import Case, Op, Values

SEED = int(os.environ.get("SKUDA_TEST_SEED") or int.from_bytes(os.urandom(4), "little"))
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT_DTYPES = (*map(np.dtype, (np.float16, np.float32, np.float64)), BFLOAT16)
LAYOUTS = ("contiguous", "strided", "transposed", "reversed", "misaligned")
_GUARD, _OUTSIDE = 96, 0x55


def fresh(*key: object) -> np.random.Generator:
    """Return a generator that depends on this run's seed and `key`; pytest shows the seed where a test fails."""
    sys.stdout.write(f"to draw these numbers again: SKUDA_TEST_SEED={SEED}\n")
    return np.random.default_rng([SEED, zlib.crc32(repr(key).encode())])


@cache
def dispatcher() -> Dispatcher:
    """Return one dispatcher over the built-in ops alone."""
    return Dispatcher(built_in_registry())


def every_case() -> list[tuple[str, Op, Case]]:
    """Return every case of every op with an id."""
    return [(f"{op.name}-{i}", op, case) for op in built_in_ops() for i, case in enumerate(op.cases)]


def arguments_of(problem: Descriptor, *roles: Role) -> tuple[Argument, ...]:
    """Return the arguments that have one of `roles`, or all."""
    return tuple(a for a in problem.arguments() if not roles or a.role in roles)


def run(problem: Descriptor, arrays: dict[str, Any], **more: Any) -> dict[str, np.ndarray]:
    """Run and return the outputs by name."""
    result = dispatcher().run(problem, **arrays, **more)
    names = [argument.name for argument in arguments_of(problem, Role.OUTPUT)]
    return dict(zip(names, result if isinstance(result, tuple) else (result,), strict=True))


# --- drawing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """What `draw` returns.

    Attributes
    ----------
    inputs : dict
        Arrays and numbers by argument name.
    shapes : dict
        Shape in elements of every array argument, outputs and scratch too.
    """

    inputs: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]


def draw(op: Op, case: Case, rng: np.random.Generator) -> Drawn:
    """Draw inputs for a case from what its problem says about its arguments."""
    problem, arguments = case.problem, case.problem.arguments()
    flat = _flat_shape(arguments, rng)
    shapes = {a.name: flat if a.flat else a.shape for a in arguments if not a.is_scalar}
    if op.draw is not None:
        return Drawn(dict(op.draw(problem, case.values, rng)), shapes)
    inputs: dict[str, Any] = {}
    # Scales first: data is drawn in steps of its scale.
    for argument in sorted(arguments, key=lambda a: a.name != "scale"):
        if argument.role in (Role.OUTPUT, Role.SCRATCH):
            continue
        shape = shapes.get(argument.name, ())
        inputs[argument.name] = _one(problem, argument, shape, inputs.get("scale"), case.values, rng)
    return Drawn(inputs, shapes)


def _flat_shape(arguments: tuple[Argument, ...], rng: np.random.Generator) -> tuple[int, ...]:
    """Shape for per-tensor data: 1-D, or of more axes where the last one packs evenly."""
    flat = [a for a in arguments if a.flat]
    if not flat:
        return ()
    (count,) = flat[0].shape
    if not any(a.role is Role.INPUT for a in flat):
        return (count,)
    packed = any(a.elements[0].is_packed for a in flat)
    choices = [(count,)]
    if not (packed and count % 2):
        choices += [(1, count), (1, 1, count)]
    if count % 20 == 0:
        choices += [(count // 20, 5, 4), (5, count // 5 // 2, 2)]
    if not packed:
        choices += [(count, 1)] + [()] * (count == 1)
    return choices[rng.integers(len(choices))]


def _one(
    problem: Descriptor, argument: Argument, shape: tuple[int, ...], scale: Any, values: Values, rng: Any
) -> np.ndarray | float | int:
    element = argument.elements[rng.integers(len(argument.elements))]
    match argument.role:
        case Role.SCALE:
            return _as_scalar(_scales((), element, values, rng), argument, rng)
        case Role.ZERO_POINT:
            return _as_scalar(zero_points((), problem, values, rng), argument, rng)
        case Role.VALUE:
            if element.integer_range is not None:
                return int(rng.integers(*element.integer_range, endpoint=True))
            return _beside_a_tie(
                float(_rounded(_special(floats((), element, rng), element, 0.3, rng), element)), element
            )
        case _:
            pass
    if element is ElementKind.S32:
        return zero_points(shape, problem, values, rng)
    if element.integer_range is not None:
        low, high = (0, 255) if element.is_packed else element.integer_range
        return rng.integers(low, high, storage_shape(shape, element), storage_dtype(element), endpoint=True)
    if "scale" in argument.name:
        return _scales(shape, element, values, rng)
    if argument.name == "input" and scale is not None:
        data = _in_steps(problem, np.asarray(scale, np.float64), shape, values, rng)
    else:
        data = floats(shape, element, rng)
    return _rounded(_special(data, element, 0.15, rng) if values == "special" else data, element)


def floats(shape: tuple[int, ...], element: ElementKind, rng: np.random.Generator) -> np.ndarray:
    """Draw finite numbers over many binades, most of them near each other."""
    reach = {ElementKind.F16: 8, ElementKind.F64: 60}.get(element, 24)
    exponent = np.where(rng.random(shape) < 0.2, rng.uniform(-reach, reach, shape), rng.uniform(-3, 3, shape))
    return rng.standard_normal(shape) * np.exp2(exponent)


def _in_steps(problem: Descriptor, scale: np.ndarray, shape: Any, values: Values, rng: Any) -> np.ndarray:
    """Draw data so that most of it falls within the range of the codes, or a little outside."""
    low, high = getattr(problem, "q_min", -128), getattr(problem, "q_max", 127)
    if values == "ties":
        steps = rng.integers(low - high - 3, high - low + 3, shape, endpoint=True) + rng.choice([0.5, 0.5, 0.0], shape)
    else:
        steps = rng.uniform(-1.3, 1.3, shape) * (high - low + 1)
        wide = rng.random(shape) < 0.1
        steps = np.where(wide, steps * np.exp2(rng.uniform(-30, 30, shape)), steps)
    with np.errstate(all="ignore"):
        return steps * _spread(problem, scale, shape)


def _spread(problem: Any, scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if hasattr(problem, "group_size"):
        return np.repeat(scale, problem.group_size, axis=1)
    if hasattr(problem, "axis"):
        return scale.reshape([-1 if axis == problem.axis else 1 for axis in range(len(shape))])
    return scale.reshape(-1, 1) if hasattr(problem, "d") else scale.reshape(())


def _scales(shape: tuple[int, ...], element: ElementKind, values: Values, rng: np.random.Generator) -> np.ndarray:
    if values == "ties":
        return _rounded(np.exp2(rng.integers(-6, 4, shape).astype(np.float64)), element)
    reach = {ElementKind.F16: 8, ElementKind.F64: 200}.get(element, 30)
    found = np.exp2(np.where(rng.random(shape) < 0.3, rng.uniform(-reach, reach, shape), rng.uniform(-8, 2, shape)))
    if values == "special":
        found = _special(found * rng.choice([1, 1, 1, -1], shape), element, 0.25, rng)
    return _rounded(found, element)


def zero_points(
    shape: tuple[int, ...], problem: Descriptor, values: Values = "normal", rng: Any = None
) -> np.ndarray | np.int32:
    """Draw zero points within the codes' range; in ``special`` also the extremes of s32."""
    low, high = getattr(problem, "q_min", -8), getattr(problem, "q_max", 7)
    found = rng.integers(low, high, shape, np.int32, endpoint=True)
    if values == "special":
        extreme = rng.choice(np.array([-(2**31), 2**31 - 1, -1000, 70_000], np.int32), shape)
        found = np.where(rng.random(shape) < 0.25, extreme, found)
    return found


def specials(element: ElementKind) -> np.ndarray:
    """Return the numbers at the edges of a floating element, as f64."""
    info = ml_dtypes.finfo(storage_dtype(element))
    tiny, least, most = (float(v) for v in (info.smallest_normal, info.smallest_subnormal, info.max))
    edges = [0.0, math.inf, least, 3 * least, tiny - least, tiny, most, 1.0]
    return np.array([math.nan, *edges, *(-edge for edge in edges)])


def _special(values: np.ndarray, element: ElementKind, share: float, rng: np.random.Generator) -> np.ndarray:
    values, edges = np.asarray(values), specials(element)
    # Some rows stay free of them, and some arrays of infinities: one infinity hides all else in a dynamic range.
    some = rng.random((*values.shape[:1], *(1,) * (values.ndim - 1))) < 0.6
    edges = edges[~np.isinf(edges)] if rng.random() < 0.4 else edges
    return np.where(some & (rng.random(values.shape) < share), rng.choice(edges, values.shape), values)


def _beside_a_tie(value: float, element: ElementKind) -> float:
    """Return a little more than the middle between a number and its neighbour: rounding in two steps shows there."""
    if not math.isfinite(value) or element is ElementKind.F64:
        return value
    unit = math.ldexp(float(ml_dtypes.finfo(storage_dtype(element)).eps), math.frexp(value)[1] - 1)
    return value - math.copysign(unit / 2 * (1 - 2**-30), value)


def _rounded(values: np.ndarray, element: ElementKind) -> np.ndarray:
    """Round to the element, keeping finite numbers finite."""
    most = float(ml_dtypes.finfo(storage_dtype(element)).max)
    with np.errstate(all="ignore"):
        return np.asarray(np.where(np.isinf(values), values, np.clip(values, -most, most))).astype(
            storage_dtype(element)
        )


def _as_scalar(value: Any, argument: Argument, rng: np.random.Generator) -> Any:
    """Pass a number as a number or as an array of one element of any rank."""
    array = np.asarray(value)
    with np.errstate(all="ignore"):
        plain = float(array.astype(storage_dtype(argument.elements[0])))
    usable = argument.role is not Role.SCALE or (math.isfinite(plain) and plain != 0)
    kind = rng.integers(5)
    if usable and kind < 2:
        return plain if argument.role is Role.SCALE else int(plain)
    return array.reshape([(1,), (1, 1), (), (1,), (1, 1, 1)][kind])


# --- arrays between guard zones --------------------------------------------------------------------------------------


class Guarded:
    """An array inside a larger buffer: it notices every byte written beside its elements.

    Attributes
    ----------
    array : np.ndarray
        Poisoned: NaN where floating, a pattern otherwise.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any, layout: str = "contiguous") -> None:
        dtype = np.dtype(dtype)
        strides, start, span = _geometry(shape, dtype.itemsize, layout)
        start += _GUARD + (layout == "misaligned")
        self._bytes = np.full(span + 2 * _GUARD + 1, _OUTSIDE, np.uint8)
        self._outside = np.ones(self._bytes.shape, bool)
        inside = (*shape, dtype.itemsize), (*strides, 1)
        np.ndarray(inside[0], bool, self._outside, start, inside[1])[...] = False
        self._bytes[~self._outside] = 0xFF if dtype in FLOAT_DTYPES else 0xA6
        self.array = np.ndarray(shape, dtype, self._bytes, start, strides)
        self._before = self._bytes.copy()

    @classmethod
    def of(cls, values: np.ndarray, layout: str) -> Guarded:
        """Return a copy of `values` in another layout, for `assert_unchanged`."""
        made = cls(values.shape, values.dtype, layout)
        made.array[...] = values
        made._before = made._bytes.copy()
        return made

    def assert_only_elements_written(self) -> None:
        """Check the guard zones and the gaps between elements."""
        touched = np.flatnonzero(self._outside & (self._bytes != _OUTSIDE))
        assert touched.size == 0, f"{touched.size} bytes beside the array were written, the first at {touched[0]}"

    def assert_unchanged(self) -> None:
        """Check that nothing at all was written."""
        assert np.array_equal(self._bytes, self._before), "an input was written to"


def _geometry(shape: tuple[int, ...], itemsize: int, layout: str) -> tuple[list[int], int, int]:
    """Return strides, first byte and span of a layout."""
    axes = range(len(shape)) if layout == "transposed" else range(len(shape) - 1, -1, -1)
    gap = itemsize if layout == "strided" else 0
    strides, span = [0] * len(shape), itemsize + gap
    for axis in axes:
        strides[axis] = span
        span = span * max(shape[axis], 1) + gap
    if layout != "reversed":
        return strides, 0, span
    first = sum((max(n, 1) - 1) * stride for n, stride in zip(shape, strides, strict=True))
    return [-stride for stride in strides], first, span


def guarded_outputs(problem: Descriptor, shapes: dict[str, tuple[int, ...]], layout: str) -> dict[str, Guarded]:
    """Return poisoned outputs and scratch arrays for a problem."""
    return {
        a.name: Guarded(storage_shape(shapes[a.name], a.elements[0]), storage_dtype(a.elements[0]), layout)
        for a in arguments_of(problem, Role.OUTPUT, Role.SCRATCH)
    }


# --- comparison ------------------------------------------------------------------------------------------------------


def assert_same_bits(got: Any, want: Any, what: str = "result") -> None:
    """Compare bit for bit; NaN equals NaN whatever its payload."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, wanted {want.dtype}"
    assert got.shape == want.shape, f"{what}: shape {got.shape}, wanted {want.shape}"
    unsigned = f"u{got.dtype.itemsize}"
    bits = [np.ascontiguousarray(array).view(unsigned).reshape(got.shape) for array in (got, want)]
    different = bits[0] != bits[1]
    if got.dtype in FLOAT_DTYPES:
        with np.errstate(invalid="ignore"):  # a signalling NaN warns
            different &= ~(np.isnan(got) & np.isnan(want))
    if different.any():
        first = tuple(int(i[0]) for i in np.nonzero(np.atleast_1d(different)))[: got.ndim]
        width = 2 * got.dtype.itemsize
        told = [f"{array[first]} (0x{int(b[first]):0{width}x})" for array, b in zip((got, want), bits, strict=True)]
        count = int(different.sum())
        raise AssertionError(
            f"{what}: {count} of {got.size} elements differ, first at {first}: got {told[0]}, want {told[1]}"
        )


def coordinates(shape: tuple[int, ...], rng: np.random.Generator, most: int = 40) -> list[tuple[int, ...]]:
    """Return all coordinates of a small array, or a sample with both ends of a large one."""
    count = math.prod(shape)
    if count <= most:
        return list(np.ndindex(*shape))
    picked = {0, count - 1, *(int(i) for i in rng.integers(0, count, most - 2))}
    return [tuple(int(i) for i in np.unravel_index(index, shape)) for index in sorted(picked)]
