"""Random inputs, arrays of any layout between guard zones, samples of tests, and comparison bit for bit."""

from __future__ import annotations

import math
import os
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from _pytest.mark import ParameterSet

from skuda.dispatch import Dispatcher
from skuda.kernels.catalog import built_in_ops, built_in_registry
from skuda.kernels.draw import draw, zero_points
from skuda.kernels.dtypes import storage_dtype
from skuda.kernels.values import rounded, specials, spread
from skuda.registry.descriptor import Argument, Descriptor, Role, storage_shape
from skuda.registry.op import Case, Op

__all__ = [
    "Guarded",
    "arguments_of",
    "assert_same_bits",
    "coordinates",
    "dispatcher",
    "draw",
    "every_case",
    "fresh",
    "guarded_outputs",
    "parts_of",
    "rounded",
    "run",
    "sampled",
    "specials",
    "spread",
    "zero_points",
]

SEED = int(os.environ.get("SKUDA_TEST_SEED") or int.from_bytes(os.urandom(4), "little"))
os.environ["SKUDA_TEST_SEED"] = str(SEED)  # every worker of pytest-xdist must draw the same sample
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT_DTYPES = (*map(np.dtype, (np.float16, np.float32, np.float64)), BFLOAT16)
LAYOUTS = ("contiguous", "strided", "transposed", "reversed", "misaligned")
_GUARD, _ALIGNMENT, _OUTSIDE = 96, 256, 0x55


def fresh(*key: object) -> np.random.Generator:
    """Return a generator that depends on this run's seed and `key`; pytest shows the seed where a test fails."""
    sys.stdout.write(f"to draw these numbers again: SKUDA_TEST_SEED={SEED}\n")
    return np.random.default_rng([SEED, zlib.crc32(repr(key).encode())])


def sampled(
    params: Iterable[Any], most: int = 1, *, each: Callable[..., Hashable] = lambda *_: None, key: object = ""
) -> list[ParameterSet]:
    """Mark all but a sample of a test's parameters as ``full``, so that they run where everything runs.

    Parameters
    ----------
    params : iterable
        What ``parametrize`` takes: values, or ``pytest.param``.
    most : int
        How many of each group are drawn, afresh each run.
    each : callable
        Returns the group of a parameter from its values; without it, all are one group.
    key : object
        Tells samples of equal parameters apart.
    """
    every = [p if isinstance(p, ParameterSet) else pytest.param(p) for p in params]
    rng = np.random.default_rng([SEED, len(every), zlib.crc32(repr(key).encode())])
    drawn: Counter[Hashable] = Counter()
    for i in rng.permutation(len(every)):
        group = each(*every[i].values)
        drawn[group] += 1
        if drawn[group] > most:
            every[i] = pytest.param(*every[i].values, id=every[i].id, marks=(*every[i].marks, pytest.mark.full))
    return every


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


def run(
    problem: Descriptor, arrays: dict[str, Any], *, copies_state: bool = True, **more: Any
) -> dict[str, np.ndarray]:
    """Run and return by name the outputs and what the op writes in place, by default copies of the given arrays."""
    names = [argument.name for argument in arguments_of(problem, Role.STATE)]
    state = {name: arrays[name] for name in names if isinstance(arrays.get(name), np.ndarray)}
    if copies_state:
        state = {name: array.copy() for name, array in state.items()}
    result = dispatcher().run(problem, **arrays | state, **more)
    names = [argument.name for argument in arguments_of(problem, Role.OUTPUT)]
    return dict(zip(names, parts_of(result), strict=True)) | state


def parts_of(result: Any) -> tuple[Any, ...]:
    """Return the arrays of an op's result; what a problem does not write is None in it."""
    return tuple(part for part in result if part is not None) if isinstance(result, tuple) else (result,)


class Guarded:
    """An array inside a larger buffer: it notices every byte written beside its elements.

    Attributes
    ----------
    array : np.ndarray
        Poisoned: NaN where floating, a pattern otherwise. Its first byte is `offset` bytes after a 256-byte boundary.
    bytes : np.ndarray
        The buffer.
    outside : np.ndarray
        Whether a byte of the buffer belongs to no element.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: Any, strides: Iterable[int] | None = None, offset: int = 0
    ) -> None:
        dtype = np.dtype(dtype)
        strides = tuple(_strides(shape, dtype.itemsize, "contiguous") if strides is None else strides)
        ends = [(max(n, 1) - 1) * stride for n, stride in zip(shape, strides, strict=True)]
        before = _GUARD + offset - sum(end for end in ends if end < 0)
        self.bytes = np.full(before + sum(map(abs, ends)) + dtype.itemsize + _GUARD + _ALIGNMENT, _OUTSIDE, np.uint8)
        start = before + -(self.bytes.ctypes.data + before - offset) % _ALIGNMENT
        self.outside = np.ones(self.bytes.shape, bool)
        np.ndarray((*shape, dtype.itemsize), bool, self.outside, start, (*strides, 1))[...] = False
        self.bytes[~self.outside] = 0xFF if dtype in FLOAT_DTYPES else 0xA6
        self.array = np.ndarray(shape, dtype, self.bytes, start, strides)
        self._before = self.bytes.copy()

    @classmethod
    def laid_out(cls, shape: tuple[int, ...], dtype: Any, layout: str) -> Guarded:
        """Return an array in one of `LAYOUTS`."""
        return cls(shape, dtype, _strides(shape, np.dtype(dtype).itemsize, layout), layout == "misaligned")

    def fill(self, values: np.ndarray) -> Guarded:
        """Copy `values` in, for `assert_unchanged`."""
        self.array[...] = values
        self._before = self.bytes.copy()
        return self

    def assert_only_elements_written(self) -> None:
        """Check the guard zones and the gaps between elements."""
        touched = np.flatnonzero(self.outside & (self.bytes != _OUTSIDE))
        assert touched.size == 0, f"{touched.size} bytes beside the array were written, the first at {touched[0]}"

    def assert_unchanged(self) -> None:
        """Check that nothing at all was written."""
        assert np.array_equal(self.bytes, self._before), "an input was written to"


def _strides(shape: tuple[int, ...], itemsize: int, layout: str) -> list[int]:
    axes = range(len(shape)) if layout == "transposed" else reversed(range(len(shape)))
    gap = itemsize if layout == "strided" else 0
    strides, span = [0] * len(shape), itemsize + gap
    for axis in axes:
        strides[axis] = span
        span = span * max(shape[axis], 1) + gap
    return [-stride for stride in strides] if layout == "reversed" else strides


def guarded_outputs(problem: Descriptor, shapes: dict[str, tuple[int, ...]], layout: str) -> dict[str, Guarded]:
    """Return poisoned outputs and scratch arrays for a problem."""
    return {
        a.name: Guarded.laid_out(storage_shape(shapes[a.name], a.elements[0]), storage_dtype(a.elements[0]), layout)
        for a in arguments_of(problem, Role.OUTPUT, Role.SCRATCH)
    }


def in_range(problem: Any, rows: np.ndarray) -> np.ndarray:
    """Return rows as their ranges count them: with infinities in place of NaN, if the problem propagates."""
    return np.where(np.isnan(rows), rows.dtype.type(np.inf), rows) if problem.nonfinite == "propagate" else rows


def quantizes_apart(problem: Any) -> bool:
    """Return whether another op makes the same codes of data: none makes those of 16 bits with a given scale."""
    return not (problem.output_element.is_split and problem.scaling == "static")


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
        elements = [f"{array[first]} (0x{int(b[first]):0{width}x})" for array, b in zip((got, want), bits, strict=True)]
        count = int(different.sum())
        raise AssertionError(
            f"{what}: {count} of {got.size} elements differ, first at {first}: got {elements[0]}, want {elements[1]}"
        )


def coordinates(shape: tuple[int, ...], rng: np.random.Generator, most: int = 40) -> list[tuple[int, ...]]:
    """Return all coordinates of a small array, or a sample with both ends of a large one."""
    count = math.prod(shape)
    if count <= most:
        return list(np.ndindex(*shape))
    picked = {0, count - 1, *(int(i) for i in rng.integers(0, count, most - 2))}
    return [tuple(int(i) for i in np.unravel_index(index, shape)) for index in sorted(picked)]
