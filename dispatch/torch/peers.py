"""`Peers`: large arrays copied straight into the memory of other GPUs of a host, beside kernels that compute.

Copy engines do it, so that it takes no multiprocessor. The memory is torch's symmetric memory, which every rank of a
group allocates alike. Multicast is not used.
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
"""Those of a GPU that a product beside an exchange leaves free: barriers are kernels, and clusters take pairs."""

_LEAST_ROOM = 1 << 24
"""Bytes of the smallest room."""
_MOST_ROOM = 1 << 31
"""Bytes of all rooms together."""
_ALIGNMENT = 256
"""Bytes to which the parts of a room are aligned."""


SUMS, ROWS = 0, 1
"""The lanes of exchanges: in one they run one after the other, in both at once."""


class Memory(Protocol):
    """Memory that every rank of a group can write into."""

    def rooms(self, size: int) -> Sequence[Tensor]:
        """Return a new room of `size` bytes in the memory of each rank, as this rank sees it; every rank calls this.

        Raises
        ------
        RuntimeError
            If there is none.
        """

    def barrier(self, lane: int) -> None:
        """Let what is queued behind in a lane wait until all ranks are here and their copies in front have arrived."""

    def beside(self, lane: int) -> AbstractContextManager[object]:
        """Queue what follows in a lane: beside what the current stream does next, but behind what it did."""

    def mark(self, lane: int) -> Callable[[], object]:
        """Return what makes the current stream wait for all that was queued in a lane so far."""


class SymmetricMemory:
    """`Memory` of GPUs of one host.

    Parameters
    ----------
    group : ProcessGroup
        The ranks.
    device : torch.device
        This rank's GPU.
    timeout : timedelta
        After this time, a rank that waits for others fails.
    """

    def __init__(self, group: ProcessGroup, device: torch.device, timeout: timedelta) -> None:
        self._group, self._device = group, device
        # Barriers are small, and other ranks wait for them: they come before the blocks of large kernels.
        self._lanes = tuple(torch.cuda.Stream(device, priority=-1) for _ in (SUMS, ROWS))
        self._timeout = int(timeout.total_seconds() * 1000)
        self._held: list[tuple[Tensor, Any]] = []

    def rooms(self, size: int) -> Sequence[Tensor]:
        """Return a new room of `size` bytes in the memory of each rank; see `Memory`."""
        from torch.distributed import _symmetric_memory as symmetric

        settings.refuse_multicast()
        own = symmetric.empty(size, dtype=torch.uint8, device=self._device)
        handle = symmetric.rendezvous(own, self._group)
        self._held.append((own, handle))
        count = distributed.get_world_size(self._group)
        return [handle.get_buffer(rank, (size,), torch.uint8) for rank in range(count)]

    def barrier(self, lane: int) -> None:
        """Let what is queued behind wait for all ranks; see `Memory`."""
        self._held[0][1].barrier(channel=lane, timeout_ms=self._timeout)

    def beside(self, lane: int) -> AbstractContextManager[object]:
        """Queue what follows on a stream of its own; see `Memory`."""
        self._lanes[lane].wait_stream(torch.cuda.current_stream(self._device))
        beside: AbstractContextManager[object] = torch.cuda.stream(self._lanes[lane])
        return beside

    def mark(self, lane: int) -> Callable[[], object]:
        """Return what makes the current stream wait; see `Memory`."""
        event = self._lanes[lane].record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(event)


class Peers:
    """Exchanges between ranks that write into each other's memory.

    An exchange runs beside the current stream: all ranks come to it, each copies what is for another one into a room
    there, and all have done so. The room is free again once what came is read, in the order of the current stream. The
    exchange that takes it next begins behind that, and its first barrier lets all ranks come so far. So nothing that
    came is overwritten before it is read, neither when called nor in captured graphs, whatever runs between them.

    Parameters
    ----------
    memory : Memory
        The ranks' memory.
    rank, count : int
        This rank, and how many there are.
    exchange : callable
        Returns the texts of all ranks.
    captures : callable
        Whether the current stream is being captured: then no memory can be allocated.
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
        """Start to add up rows, as `skuda.dispatch.shard.Group` says; None, on all ranks, where there is no room."""
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
        """Start to gather rows, as `skuda.dispatch.shard.Group` says; None, on all ranks, where there is no room."""
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
        """Start to give every rank its part; return what waits for those of the other ranks, given all shapes."""
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
        """Return room of at least `size` bytes; all ranks ask for it in the same order, so that all get the same."""
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
