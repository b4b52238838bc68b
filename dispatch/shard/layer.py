"""A linear layer on the ranks of a group: which steps each rank takes, and what is exchanged between them.

The steps are functions of arrays: prepared plans, or ops of torch. What is exchanged are codes, scales, maxima and sums
of integers, all exact, so the result has the same bits whatever the number of ranks:

- The scale of a row follows from the maximum of its magnitudes, which is the largest of the ranks' maxima.
- The sum over K is the sum of the ranks' sums, in s32 and in any order.
- The epilogue is applied to the whole sum of each element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from skuda.dispatch.shard.group import Group
from skuda.dispatch.shard.shards import Shards, own


class Activation(NamedTuple):
    """What a layer takes, as far as a rank has it.

    Attributes
    ----------
    data : array of shape (m, k), or a rank's rows or columns of it
        Real numbers, or codes.
    scale : array of shape (m,) or (1,), or None
        Scales of codes; None for real numbers.
    zero_point : array of shape (m,) or (1,), s32, or None
        Zero points of codes; None for 0.
    """

    data: Any
    scale: Any = None
    zero_point: Any = None


class Sums(NamedTuple):
    """Sums over the inner size.

    Attributes
    ----------
    products : array of shape (m, n), s32
        Of codes times weights.
    of_rows : array of shape (m,), s32, or None
        Of codes, where the weight has zero points.
    of_channels : array of shape (n,), s32, or None
        Of weights, where the activation has zero points.
    """

    products: Any
    of_rows: Any = None
    of_channels: Any = None


@dataclass(frozen=True)
class Steps:
    """The local work of a rank; what a layer does not need is None.

    Attributes
    ----------
    amax : callable
        Of data: the largest magnitude of each row, NaN skipped.
    quantize : callable
        Of data and these maxima of whole rows: codes and scales.
    quantize_rows : callable
        Of whole rows: codes and scales.
    sums : callable
        Of codes: `Sums` over the rank's part of the inner size.
    rescale : callable
        Of whole `Sums` and an `Activation` without data: the output.
    layer : callable
        Of an `Activation` that is whole along the inner size: the output, for the rank's part of the weight.
    """

    amax: Callable[[Any], Any] | None = None
    quantize: Callable[[Any, Any], tuple[Any, Any]] | None = None
    quantize_rows: Callable[[Any], tuple[Any, Any]] | None = None
    sums: Callable[[Any], Sums] | None = None
    rescale: Callable[[Sums, Activation], Any] | None = None
    layer: Callable[[Activation], Any] | None = None


@dataclass(frozen=True)
class Course:
    """How a layer runs on a group, the same on every rank.

    Attributes
    ----------
    shards : Shards
        What is split, given and wanted.
    rows : tuple of int
        Rows of the activation that each rank owns.
    parts : tuple of int
        How much of the split axis each rank has.
    columns : tuple of int
        Columns of the activation that each rank has, where it has its columns.
    per_row : bool
        Whether each row has a scale of its own.
    scattered : bool
        Whether each rank finishes its own rows of the sums; else every rank finishes all.
    """

    shards: Shards
    rows: tuple[int, ...]
    parts: tuple[int, ...]
    columns: tuple[int, ...]
    per_row: bool
    scattered: bool


def run(course: Course, steps: Steps, group: Group, activation: Activation) -> Any:
    """Return what a rank gets of the output: all of it, its rows, or its columns.

    Parameters
    ----------
    course : Course
        How the layer runs.
    steps : Steps
        The rank's work.
    group : Group
        The ranks.
    activation : Activation
        What the rank has of the activation, as ``course.shards.input`` says.
    """
    if course.shards.axis == "n":
        return _column(course, steps, group, activation)
    return _row(course, steps, group, activation)


def _column(course: Course, steps: Steps, group: Group, activation: Activation) -> Any:
    assert steps.layer is not None
    if course.shards.input != "whole":
        codes = _coded(course, steps, group, activation)
        if course.shards.input == "columns":
            activation = codes._replace(data=group.gather(codes.data, 1, course.columns))
        else:
            scales = codes[1:] if not course.per_row else (_gathered(course, group, part) for part in codes[1:])
            activation = Activation(group.gather(codes.data, 0, course.rows), *scales)
    output = steps.layer(activation)
    return group.gather(output, 1, course.parts) if course.shards.output == "whole" else output


def _row(course: Course, steps: Steps, group: Group, activation: Activation) -> Any:
    assert steps.sums is not None
    assert steps.rescale is not None
    codes = _coded(course, steps, group, activation)
    local, about = steps.sums(codes.data), codes._replace(data=None)
    of_rows, of_channels = (None if part is None else group.sum(part) for part in local[1:])
    if not course.scattered:
        return steps.rescale(Sums(group.sum(local.products), of_rows, of_channels), about)
    mine = Sums(group.sum_rows(local.products, course.rows), _owned(course, group, of_rows), of_channels)
    if course.per_row:
        about = Activation(None, *(_owned(course, group, part) for part in about[1:]))
    output = steps.rescale(mine, about)
    return group.gather(output, 0, course.rows) if course.shards.output == "whole" else output


def _coded(course: Course, steps: Steps, group: Group, activation: Activation) -> Activation:
    """Return the codes of what a rank has, with the scales of whole rows."""
    if activation.scale is not None:
        return activation
    if course.shards.input == "rows":
        assert steps.quantize_rows is not None
        return Activation(*steps.quantize_rows(activation.data))
    assert steps.amax is not None
    assert steps.quantize is not None
    return Activation(*steps.quantize(activation.data, group.max(steps.amax(activation.data))))


def _gathered(course: Course, group: Group, rows: Any) -> Any:
    return None if rows is None else group.gather(rows, 0, course.rows)


def _owned(course: Course, group: Group, rows: Any) -> Any:
    return None if rows is None else own(rows, 0, course.rows, group.rank)
