"""Arrays as rows of contiguous columns: the two-dimensional view, if any, that several arrays have in common."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import NamedTuple

from skuda.dispatch.cuda.dlpack import dense_strides
from skuda.dispatch.cuda.facts import ArrayFacts
from skuda.registry.errors import InvalidProblem

Shape = tuple[int, ...]


class ViewedArray(NamedTuple):
    """One array of a view."""

    strides: Shape  # of the array, in stored elements
    packed: bool  # whether two elements share a byte along the last axis
    split: bool = False  # whether the last axis has the high halves of all elements, then the low ones


class View(NamedTuple):
    """The two-dimensional shape that a kernel receives, in elements."""

    rows: int
    columns: int
    leading: dict[str, int]  # distance between rows by argument, in stored elements


def common_view(op: str, shape: Shape, layouts: Mapping[str, ViewedArray]) -> View:
    """Return the view with the longest rows that all arrays of one shape have.

    `shape` is in elements and the same for all arrays in `layouts`; errors name `op`. Raise `InvalidProblem` if there
    is none; it names an array to change.
    """
    splits = {name: _splits(shape, layout) for name, layout in layouts.items()}
    for name, own in splits.items():
        if not own:
            _refuse(op, name, layouts[name], "be rows of contiguous columns with one distance between rows")
    common = set.intersection(*splits.values())
    if not common:
        # The error names the array with the fewest splits of those that a copy would help: contiguous ones have all
        # that their element allows.
        gaps = [name for name, layout in layouts.items() if layout.strides != dense_strides(_stored(shape, layout))]
        name = min(gaps or splits, key=lambda each: len(splits[each]))
        others = " and ".join(other for other in layouts if other != name)
        _refuse(op, name, layouts[name], f"be cut into rows where {others} can be")
    return _cut(shape, layouts, min(common))


def matrix_view(op: str, shape: Shape, name: str, layout: ViewedArray) -> View:
    """Return the view of one array as a matrix whose rows are its last axis. Raise `InvalidProblem` if it has none."""
    split = max(0, len(shape) - 1)
    if split not in _splits(shape, layout):
        _refuse(op, name, layout, "have contiguous rows with one distance between them")
    return _cut(shape, {name: layout}, split)


def is_contiguous(facts: ArrayFacts) -> bool:
    """Whether an array has no gaps, in row-major order; an axis of one element may have any stride."""
    dense = dense_strides(facts.shape)
    return (
        facts.strides == dense
        or all(
            extent == 1 or stride == wanted
            for extent, stride, wanted in zip(facts.shape, facts.strides, dense, strict=True)
        )
        or 0 in facts.shape
    )


def _refuse(op: str, name: str, layout: ViewedArray, must: str) -> None:
    advice = "copy it first: x.contiguous(), or ascontiguousarray(x)"
    raise InvalidProblem(op, name, f"strides {layout.strides}", f"{must}; {advice}")


def _splits(shape: Shape, layout: ViewedArray) -> set[int]:
    """Return the numbers of leading axes that can be rows, so that the other axes are contiguous columns."""
    rank = len(shape)
    if 0 in shape:
        return set(range(rank + 1))
    strides, stored = layout.strides, _stored(shape, layout)
    if not (layout.packed or layout.split) and strides == dense_strides(shape):
        return set(range(rank + 1))
    # Rows of a packed array start at a byte, so a last axis that fills its bytes can be joined to the previous axis.
    whole = not layout.packed or shape[-1] % 2 == 0
    found = set()
    for split in range(rank + 1):
        columns = [(n, s) for n, s in zip(stored[split:], strides[split:], strict=True) if n > 1]
        rows = [(n, s) for n, s in zip(stored[:split], strides[:split], strict=True) if n > 1]
        if layout.packed and (split == rank or (not whole and math.prod(shape[split:-1]) > 1)):
            continue
        if layout.split and (split == rank or math.prod(shape[split:-1]) > 1):
            continue  # the halves of a row lie together
        if (not columns or columns[-1][1] == 1) and _chained(columns) and _chained(rows):
            found.add(split)
    return found


def _stored(shape: Shape, layout: ViewedArray) -> Shape:
    """Return a shape in stored elements."""
    if layout.split:
        return (*shape[:-1], 2 * shape[-1])
    return (*shape[:-1], -(-shape[-1] // 2)) if layout.packed else shape


def _chained(axes: list[tuple[int, int]]) -> bool:
    """Whether axes can be traversed as one: the stride of each is the whole extent of the next."""
    return all(outer[1] == inner[0] * inner[1] for outer, inner in itertools.pairwise(axes))


def _cut(shape: Shape, layouts: Mapping[str, ViewedArray], split: int) -> View:
    rows, columns = math.prod(shape[:split]), math.prod(shape[split:])
    leading = {}
    for name, layout in layouts.items():
        steps = [s for n, s in zip(shape[:split], layout.strides[:split], strict=True) if n > 1]
        # A single row has no next one; it gets the stride of a contiguous array.
        leading[name] = steps[-1] if steps else _stored((columns,), layout)[0]
    return View(rows, columns, leading)
