"""`Peers`: copies large arrays straight into the memory of other GPUs of a host, beside computing kernels.

Copy engines do the copying, so it occupies no multiprocessor. The memory is torch's symmetric memory, which all ranks
of a group allocate in the same way. Multicast is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from skuda.dispatch import settings
from skuda.dispatch.shard.shards import span

SPARE_MULTIPROCESSORS = 4
"""Multiprocessors that a product leaves free beside an exchange: barriers are kernels, and clusters take pairs."""

_LEAST_ROOM = 1 << 24
"""Bytes of the smallest room."""
_MOST_ROOM = 1 << 31
"""Bytes of all rooms together."""
_ALIGNMENT = 256
"""Bytes to which the parts of a room are aligned."""


SUMS, ROWS = 0, 1
"""The lanes of exchanges. Exchanges in a lane run in order; the two lanes run at the same time."""


class Memory(Protocol):
    """Memory that every rank of a group can write into."""

    def rooms(self, size: int) -> Sequence[Tensor]:
        """Return a new buffer of `size` bytes in the memory of each rank, as this rank sees it. Every rank calls this.

        Raises
        ------
        RuntimeError
            If there is not enough memory.
        """

    def barrier(self, lane: int) -> None:
        """Make later work of a lane wait until all ranks are here and their earlier copies have arrived."""

    def beside(self, lane: int) -> AbstractContextManager[object]:
        """Queue the work in the block in a lane: after earlier, and beside later work of the current stream."""

    def mark(self, lane: int) -> Callable[[], object]:
        """Return a function that makes the current stream wait for all work of a lane so far."""


class SymmetricMemory:
    """`Memory` of GPUs of one host.

    Parameters
    ----------
    group : ProcessGroup
        The ranks.
    device : torch.device
        This rank's GPU.
    timeout : timedelta
        Time after which a rank that waits for others fails.
    """

    def __init__(self, group: ProcessGroup, device: torch.device, timeout: timedelta) -> None:
        self._group, self._device = group, device
        # High priority: barriers are small, other ranks wait for them, and large kernels must not delay them.
        self._lanes = tuple(torch.cuda.Stream(device, priority=-1) for _ in (SUMS, ROWS))
        self._timeout = int(timeout.total_seconds() * 1000)
        self._held: list[tuple[Tensor, Any]] = []

    def rooms(self, size: int) -> Sequence[Tensor]:
        """Return a new buffer of `size` bytes in the memory of each rank; see `Memory`."""
        from torch.distributed import _symmetric_memory as symmetric

        settings.refuse_multicast()
        own = symmetric.empty(size, dtype=torch.uint8, device=self._device)
        handle = symmetric.rendezvous(own, self._group)
        self._held.append((own, handle))
        count = distributed.get_world_size(self._group)
        return [handle.get_buffer(rank, (size,), torch.uint8) for rank in range(count)]

    def barrier(self, lane: int) -> None:
        """Make later work wait for all ranks; see `Memory`."""
        self._held[0][1].barrier(channel=lane, timeout_ms=self._timeout)

    def beside(self, lane: int) -> AbstractContextManager[object]:
        """Queue the work in the block on a separate stream; see `Memory`."""
        self._lanes[lane].wait_stream(torch.cuda.current_stream(self._device))
        beside: AbstractContextManager[object] = torch.cuda.stream(self._lanes[lane])
        return beside

    def mark(self, lane: int) -> Callable[[], object]:
        """Return a function that makes the current stream wait; see `Memory`."""
        event = self._lanes[lane].record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(event)


class Peers:
    """Exchanges between ranks that write into each other's memory.

    An exchange runs beside the current stream: a barrier, copies into a room (a buffer) of every other rank, and a
    second barrier. A room is free again when the current stream has read the received data. The next exchange that
    uses the room starts after that, and its first barrier waits until all ranks have come so far. So received data are
    never overwritten before they are read, neither in calls nor in captured graphs, whatever runs between them.

    Parameters
    ----------
    memory : Memory
        The ranks' memory.
    rank, count : int
        This rank, and the number of ranks.
    exchange : callable
        Returns the texts of all ranks.
    captures : callable
        Whether the current stream is being captured, when no memory can be allocated.
    """

    def __init__(
        self,
        memory: Memory,
        rank: int,
        count: int,
        exchange: Callable[[str], tuple[str, ...]],
        captures: Callable[[], bool],
    ) -> None:
        self._memory, self._rank, self._count = memory, rank, count
        self._exchange, self._captures = exchange, captures
        self._free: list[Sequence[Tensor]] = []
        self._left = _MOST_ROOM

    def start_sum_rows(self, tensor: Tensor, sizes: tuple[int, ...]) -> Callable[[], Tensor] | None:
        """Start `sum_rows` of `skuda.dispatch.shard.Group`. Return None, on all ranks, if there is no room."""
        parts = tensor.split(sizes)
        mine = parts[self._rank]
        wait = self._started(SUMS, parts, max(sizes))
        if wait is None:
            return None

        def finish() -> Tensor:
            total = mine
            for came in wait([mine.shape] * self._count):
                total = torch.add(total, came, out=None if total is mine else total)
            return total

        return finish

    def start_gather(
        self, tensor: Tensor, sizes: tuple[int, ...], into: Tensor | None = None
    ) -> Callable[[], Tensor] | None:
        """Start `gather` of rows of `skuda.dispatch.shard.Group`. Return None, on all ranks, if there is no room."""
        wait = self._started(ROWS, [tensor] * self._count, max(sizes))
        if wait is None:
            return None
        whole = tensor.new_empty(sum(sizes), *tensor.shape[1:]) if into is None else into
        whole[span(sizes, self._rank)].copy_(tensor)
        others = [rank for rank in range(self._count) if rank != self._rank]

        def finish() -> Tensor:
            came = wait([torch.Size((rows, *tensor.shape[1:])) for rows in sizes])
            for rank, part in zip(others, came, strict=True):
                whole[span(sizes, rank)].copy_(part)
            return whole

        return finish

    def _started(
        self, lane: int, parts: Sequence[Tensor], most_rows: int
    ) -> Callable[[Sequence[torch.Size]], list[Tensor]] | None:
        """Start to send every rank its part. Return a function of all shapes that waits for the received parts."""
        like = parts[self._rank]
        row = like.shape[1:].numel() * like.dtype.itemsize
        slot = -(-most_rows * row // _ALIGNMENT) * _ALIGNMENT
        room = self._room(self._count * slot)
        if room is None:
            return None
        with self._memory.beside(lane):
            self._memory.barrier(lane)
            for step in range(1, self._count):
                rank = (self._rank + step) % self._count
                _place(room[rank], self._rank * slot, parts[rank].shape, like.dtype).copy_(parts[rank])
            self._memory.barrier(lane)
        arrived = self._memory.mark(lane)

        def wait(shapes: Sequence[torch.Size]) -> list[Tensor]:
            arrived()
            self._free.append(room)
            own = room[self._rank]
            return [
                _place(own, rank * slot, shape, like.dtype) for rank, shape in enumerate(shapes) if rank != self._rank
            ]

        return wait

    def _room(self, size: int) -> Sequence[Tensor] | None:
        """Return a room of at least `size` bytes. All ranks ask in the same order, so all get the same room."""
        fitting = [room for room in self._free if room[0].numel() >= size]
        if fitting:
            found = min(fitting, key=lambda room: room[0].numel())
            self._free = [room for room in self._free if room is not found]
            return found
        size = max(_LEAST_ROOM, 1 << (size - 1).bit_length())
        if size > self._left or self._captures():
            return None
        trouble = ""
        try:
            made = self._memory.rooms(size)
        except RuntimeError as error:
            trouble = str(error) or type(error).__name__
        if any(self._exchange(trouble)):
            self._left = 0  # it would fail again
            return None
        self._left -= size
        return made


def _place(room: Tensor, start: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return the part of a room that begins at a byte."""
    return room[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
