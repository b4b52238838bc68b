"""A linear layer on the ranks of a group: the steps of each rank, and the exchanges between them.

A step is a function of arrays: a prepared plan, or an op of torch. The ranks exchange codes, scales, maxima and sums of
integers. All of these are exact, so the number of ranks does not change the bits of the result:

- The scale of a row follows from the maximum of its magnitudes, which is the largest of the ranks' maxima.
- The sum over K is the sum of the ranks' sums, in s32 or s64, and in any order.
- The epilogue is applied to the whole sum of each element.

With several chunks of rows, the ranks exchange one chunk while they compute the product of the next. Every row is
computed by itself, so the chunks do not change the bits either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from skuda.dispatch.shard.cost import Traffic
from skuda.dispatch.shard.group import Group
from skuda.dispatch.shard.shards import Shards, own, span


class LayerInput(NamedTuple):
    """The part of a layer's input that a rank has."""

    data: Any  # real numbers, or codes, of shape (m, k); or a rank's rows or columns of it
    scale: Any = None  # scales of codes, of shape (m,) or (1,); None for real numbers
    zero_point: Any = None  # zero points of codes, s32, of shape (m,) or (1,); None for 0


class Sums(NamedTuple):
    """Sums over the inner size: of products s32, or s64 for codes of 16 bits; the others s32."""

    products: Any  # of codes times weights, of shape (m, n)
    of_rows: Any = None  # of codes, of shape (m,), where the weight has zero points
    of_channels: Any = None  # of weights, of shape (n,), where the activation has zero points


def _unused(*_: Any) -> Any:
    raise AssertionError("the layer has no such step")


@dataclass(frozen=True)
class RankWork:
    """The local work of a rank. `row_sums` and `channel_sums` are None if no zero points need them."""

    amax: Callable[[Any], Any] = _unused  # data -> the largest magnitude of each row; NaN is skipped
    quantize: Callable[[Any, Any], tuple[Any, Any]] = _unused  # data, maxima of whole rows -> codes and scales
    quantize_rows: Callable[[Any], tuple[Any, Any]] = _unused  # whole rows -> codes and scales
    sums: Callable[[Any], Any] = _unused  # codes -> `Sums.products` over the rank's part of the inner size
    row_sums: Callable[[Any], Any] | None = None  # codes -> `Sums.of_rows`
    channel_sums: Callable[[], Any] | None = None  # nothing -> `Sums.of_channels`
    rescale: Callable[[Sums, LayerInput], Any] = _unused  # whole `Sums`, `LayerInput` without data -> the output
    layer: Callable[[LayerInput], Any] = _unused
    """`LayerInput` that is whole along the inner size -> the output of the rank's part of the weight."""


@dataclass(frozen=True)
class ShardSchedule:
    """How a layer runs on a group, the same on every rank."""

    shards: Shards  # how the layer is split
    rows: tuple[int, ...]  # rows of the activation that each rank owns
    parts: tuple[int, ...]  # the length of each rank's part of the split axis
    columns: tuple[int, ...]  # columns of the activation that each rank has, if the input is ``columns``
    per_row: bool  # whether each row has a scale of its own
    scattered: bool
    """Whether each rank finishes its own rows of the sums. If not, every rank finishes all rows."""
    chunks: tuple[int, ...]
    """Rows of each chunk. With several chunks, each rank finishes its own rows of each; see `Shards.rows`."""

    @classmethod
    def of(cls, shards: Shards, traffic: Traffic, *, whole: bool = False) -> ShardSchedule:
        """Return the schedule of a layer. `whole` means one chunk."""
        m, n, k = traffic.m, traffic.n, traffic.k
        return cls(
            shards,
            rows=shards.rows(m),
            parts=shards.parts(n, k),
            columns=shards.columns(k) if shards.input == "columns" else (),
            per_row=bool(traffic.scale_bytes),
            scattered=traffic.scatters(shards),
            chunks=(m,) if whole else traffic.chunks(shards),
        )

    @property
    def spans(self) -> tuple[slice, ...]:
        """The rows of each chunk, as slices."""
        return tuple(span(self.chunks, number) for number in range(len(self.chunks)))


def run(schedule: ShardSchedule, steps: RankWork, group: Group, activation: LayerInput) -> Any:
    """Return the rank's part of the output (`Shards.output`) for its part of the activation (`Shards.input`)."""
    return (_column if schedule.shards.axis == "n" else _row)(schedule, steps, group, activation)


def _column(schedule: ShardSchedule, steps: RankWork, group: Group, activation: LayerInput) -> Any:
    given = schedule.shards.input
    if given != "whole":
        activation = _coded(schedule, steps, group, activation)
    if len(schedule.chunks) > 1:
        return _column_in_chunks(schedule, steps, group, activation)
    if given == "columns":
        activation = activation._replace(data=group.gather(activation.data, 1, schedule.columns))
    elif given == "rows":
        data, *scales = activation
        data = group.gather(data, 0, schedule.rows)
        if schedule.per_row:
            scales = [None if rows is None else group.gather(rows, 0, schedule.rows) for rows in scales]
        activation = LayerInput(data, *scales)
    output = steps.layer(activation)
    return group.gather(output, 1, schedule.parts) if schedule.shards.output == "whole" else output


def _column_in_chunks(schedule: ShardSchedule, steps: RankWork, group: Group, activation: LayerInput) -> Any:
    """Gather the codes of each chunk before its product, and its output during the product of the next."""
    arriving: list[Callable[[], Any]] = []
    if schedule.shards.input == "columns":
        arriving = [group.start_gather(activation.data[at], 1, schedule.columns) for at in schedule.spans]
    output, leaving = None, []
    for number, at in enumerate(schedule.spans):
        part = _chunk(schedule, activation, at)
        made = steps.layer(part._replace(data=arriving[number]()) if arriving else part)
        if output is None:
            output = _room(made, sum(schedule.chunks), sum(schedule.parts))
        leaving.append(group.start_gather(made, 1, schedule.parts, output[at]))
    for arrived in leaving:
        arrived()
    return output


def _row(schedule: ShardSchedule, steps: RankWork, group: Group, activation: LayerInput) -> Any:
    codes = _coded(schedule, steps, group, activation)
    of_rows = None if steps.row_sums is None else group.sum(steps.row_sums(codes.data))
    of_channels = None if steps.channel_sums is None else group.sum(steps.channel_sums())
    if len(schedule.chunks) > 1:
        return _row_in_chunks(schedule, steps, group, codes, of_rows, of_channels)
    products = steps.sums(codes.data)
    if not schedule.scattered:
        return steps.rescale(Sums(group.sum(products), of_rows, of_channels), codes._replace(data=None))
    sums = Sums(group.sum_rows(products, schedule.rows), of_rows, of_channels)
    output = steps.rescale(*_owned(schedule, group, schedule.rows, sums, codes))
    return group.gather(output, 0, schedule.rows) if schedule.shards.output == "whole" else output


def _row_in_chunks(
    schedule: ShardSchedule, steps: RankWork, group: Group, codes: LayerInput, of_rows: Any, of_channels: Any
) -> Any:
    """Exchange each chunk while the next is computed.

    The device and the group have a queue each, and work through it in order:

        device   product 0   product 1   rescale 0   product 2   rescale 1               rescale 2
        group                sums 0      sums 1      gather 0    sums 2      gather 1                gather 2

    A chunk is rescaled after the product of the next chunk, so the device need not wait for its sums. The sums of the
    next chunk are queued before this chunk's output. At the end only the last chunk is exposed: its rescaling waits for
    its sums, while the output of the chunk before is gathered.
    """
    output, before, leaving = None, None, []
    for at in (*schedule.spans, None):
        started = None
        if at is not None:
            owned = schedule.shards.rows(at.stop - at.start)
            started = at, owned, group.start_sum_rows(steps.sums(codes.data[at]), owned)
        if before is not None:
            done, owned, summed = before
            sums = Sums(summed(), None if of_rows is None else of_rows[done], of_channels)
            made = steps.rescale(*_owned(schedule, group, owned, sums, _chunk(schedule, codes, done)))
            if output is None:
                output = _room(made, sum(schedule.chunks), made.shape[1])
            leaving.append(group.start_gather(made, 0, owned, output[done]))
        before = started
    for arrived in leaving:
        arrived()
    return output


def _coded(schedule: ShardSchedule, steps: RankWork, group: Group, activation: LayerInput) -> LayerInput:
    """Return the codes of the rank's part, with the scales of whole rows."""
    if activation.scale is not None:
        return activation
    if schedule.shards.input == "rows":
        return LayerInput(*steps.quantize_rows(activation.data))
    return LayerInput(*steps.quantize(activation.data, group.max(steps.amax(activation.data))))


def _chunk(schedule: ShardSchedule, activation: LayerInput, at: slice) -> LayerInput:
    """Return some rows of an activation."""
    data, scale, zero_point = activation
    if schedule.per_row:
        scale, zero_point = (None if part is None else part[at] for part in (scale, zero_point))
    return LayerInput(data[at], scale, zero_point)


def _owned(
    schedule: ShardSchedule, group: Group, sizes: tuple[int, ...], sums: Sums, codes: LayerInput
) -> tuple[Sums, LayerInput]:
    """Return the rank's rows of the corrections, scales and zero points."""

    def mine(rows: Any) -> Any:
        return None if rows is None else own(rows, 0, sizes, group.rank)

    about = map(mine, codes[1:]) if schedule.per_row else codes[1:]
    return sums._replace(of_rows=mine(sums.of_rows)), LayerInput(None, *about)


def _room(like: Any, rows: int, columns: int) -> Any:
    """Return a new array for an output that contains `like`."""
    shape = rows, columns
    return np.empty(shape, like.dtype) if isinstance(like, np.ndarray) else like.new_empty(shape)
