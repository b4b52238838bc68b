"""Scratch memory of plans on a device. All plans that run on a stream share one block.

Work on a stream runs in order, so its plans can use the same memory. A plan for another size allocates nothing if its
scratch fits. A program with ever new sizes keeps little more memory than the largest size needs.

A captured graph may be replayed at any time on any stream, so runs inside a capture share nothing with runs outside.
If torch captures, they use memory of the graph's pool, as the tensors do that torch makes there. In any other capture
they use a block until the graph is destroyed.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from skuda.dispatch.cuda.arrays import Torch
from skuda.dispatch.cuda.driver import Capture, Driver, inherited
from skuda.dispatch.system.interrupts import held_back
from skuda.dispatch.system.locks import lock
from skuda.kernels.launch import MOST_ZEROS, ZEROS

_ALIGNMENT = 256
_SLAB = 1 << 20
"""Bytes of zeros that are allocated and cleared at once, for the captures of torch: models have thousands."""
_TORCH = Torch()


class Block:
    """Device memory of `size` bytes. It is freed when nobody holds it any more.

    The `zeros` bytes before `address` are zero whenever no run uses them. `lock` is held while the steps of a run are
    enqueued, so that those of another thread do not interleave on the stream.
    """

    __slots__ = ("__weakref__", "address", "lock", "size")

    def __init__(self, driver: Driver, context: int, size: int, zeros: int = MOST_ZEROS) -> None:
        start = ctypes.c_uint64()
        # The driver writes the address there, so that it is known whenever an interrupt arrives.
        weakref.finalize(self, _free, driver, context, start).atexit = False
        with driver.using(context):
            driver.allocate(start, zeros + size)
            driver.clear(start.value, zeros)
        self.address, self.size, self.lock = start.value + zeros, size, threading.Lock()


def _free(driver: Driver, context: int, start: ctypes.c_uint64) -> None:
    with held_back():
        if start.value and not inherited():
            with driver.using(context):
                driver.free(start.value)


class Zeros(NamedTuple):
    """The address of `MOST_ZEROS` zeros, and the lock to hold while the steps of a run that uses them are enqueued."""

    lock: threading.Lock
    address: int


class _Owned(NamedTuple):
    """What the runs inside one capture use, by stream: branches of a graph run at the same time.

    An earlier block of a stream stays when a run needs a larger one, because kernels of the graph use it.
    """

    destroyed: Callable[[], bool] | None
    zeros: dict[int, Zeros]
    blocks: dict[int, list[Block]]


class Pool:
    """The blocks of one context. It holds those that captured graphs use, until the graphs are destroyed.

    Where the driver cannot tell that a graph is destroyed, they stay as long as the process.
    """

    def __init__(self) -> None:
        self._lock = lock()
        self._bound: weakref.WeakValueDictionary[int, Block] = weakref.WeakValueDictionary()
        self._spare: weakref.WeakSet[Block] = weakref.WeakSet()
        self._reserved: Callable[[], Block | None] = lambda: None
        self._owned: dict[int, _Owned] = {}
        self._slabs: list[Block] = []
        self._zeros: list[int] = []

    def reserve(self, driver: Driver, context: int, size: int) -> Block:
        """Return a block that is large enough, whoever uses it. If there is none, make one that no stream uses yet."""
        with self._lock:
            # The latest first: with it, a plan for another size asks no other.
            found = self._reserved()
            if found is not None and found.size >= size:
                return found
            found = _fitting(itertools.chain(self._bound.values(), self._spare), size)
            if found is None:
                found = self._block(driver, context, size)
                self._spare.add(found)
            self._reserved = weakref.ref(found)
            return found

    def take(self, driver: Driver, context: int, stream: int, size: int) -> Block:
        """Return the block of a stream; a larger one if the present one is too small."""
        with self._lock:
            found = self._bound.get(stream)
            if found is None or found.size < size:
                found = _fitting(self._spare, size) or self._block(driver, context, size)
                self._spare.discard(found)
                self._bound[stream] = found
            return found

    def captured(self, driver: Driver, context: int, capture: Capture, stream: int, size: int) -> Block:
        """Return the block of a stream inside a capture; a larger one if the present one is too small."""
        with self._lock:
            mine = self._of(driver, capture).blocks.setdefault(stream, [])
            found = _fitting(mine, size)
            if found is None:
                found = self._block(driver, context, size)
                mine.append(found)
            return found

    def zeros(self, driver: Driver, context: int, capture: Capture, stream: int) -> Zeros:
        """Return the zeros of a stream inside a capture."""
        with self._lock:
            mine = self._of(driver, capture).zeros
            if stream not in mine:
                if not self._zeros:
                    self._find_zeros(driver, context)
                mine[stream] = Zeros(threading.Lock(), self._zeros.pop())
            return mine[stream]

    def _of(self, driver: Driver, capture: Capture) -> _Owned:
        found = self._owned.get(capture.number)
        if found is None:
            found = self._owned[capture.number] = _Owned(driver.watch(capture.graph), {}, {})
        return found

    def _released(self) -> list[Block]:
        """Forget the captures whose graphs are destroyed, and return their blocks."""
        gone = [number for number, each in self._owned.items() if each.destroyed is not None and each.destroyed()]
        owned = [self._owned.pop(number) for number in gone]
        return [block for each in owned for blocks in each.blocks.values() for block in blocks]

    def _block(self, driver: Driver, context: int, size: int) -> Block:
        """Return a block that nobody uses: that of a destroyed graph, or a new one. Others of such graphs are freed."""
        # Powers of two, so that growing needs allocate few blocks.
        return _fitting(self._released(), size) or Block(driver, context, 1 << (max(1, size) - 1).bit_length())

    def _find_zeros(self, driver: Driver, context: int) -> None:
        """Find zeros that no capture uses, also those that an interrupted call has lost; make more if there are none.

        Those of destroyed graphs are not cleared again: every kernel leaves its zeros as they were, and none of theirs
        is running. After a kernel that fails, nothing runs in its context any more.
        """
        self._released()
        used = {zeros.address for each in self._owned.values() for zeros in each.zeros.values()}
        self._zeros = [address for slab in self._slabs for address in _pieces(slab) if address not in used]
        if not self._zeros:
            self._slabs.append(Block(driver, context, 0, zeros=_SLAB))
            self._zeros = list(_pieces(self._slabs[-1]))


def _fitting(blocks: Iterable[Block], size: int) -> Block | None:
    return next((block for block in blocks if block.size >= size), None)


def _pieces(slab: Block) -> range:
    return range(slab.address - _SLAB, slab.address, MOST_ZEROS)


_pools: weakref.WeakKeyDictionary[Driver, dict[int, Pool]] = weakref.WeakKeyDictionary()


def _pool_of(driver: Driver, context: int) -> Pool:
    pools = _pools.get(driver)
    if pools is None:
        pools = _pools.setdefault(driver, {})
    return pools.get(context) or pools.setdefault(context, Pool())


def _of_torch(size: int, ordinal: int, stream: int) -> Any:
    """Return a tensor of `size` bytes from the pool of the graph that torch captures on this stream, or None.

    It is for the stream, which is torch's current one, and whatever torch allocates there later may use its memory once
    nobody holds it. None if torch is not imported, has another current stream, or did not begin this capture, so that
    its memory would belong to no graph.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized() or _TORCH.current_stream(ordinal)() != stream:
        return None
    with torch.cuda.device(ordinal):
        try:
            # Without this function, an older torch takes every capture of its current stream for its own.
            getattr(torch.cuda.CUDAGraph, "get_currently_capturing_graph", lambda: None)()
        except RuntimeError:
            return None
        return torch.empty(size, dtype=torch.uint8, device=f"cuda:{ordinal}")


class ScratchBuffers(NamedTuple):
    """The scratch buffers of one run."""

    lock: AbstractContextManager[Any]  # to be entered while the steps are enqueued
    addresses: tuple[int, ...]  # address of each buffer
    held: object = None
    """To be held until the steps are enqueued, and no longer: torch gives its memory to later work of the stream."""


_UNSHARED = nullcontext()


class Scratch:
    """The scratch buffers of one plan; `buffers` are their names and sizes in bytes.

    A block for the first stream is there when the plan is. A plan holds nothing of the captures that it runs in.
    """

    def __init__(self, driver: Driver, place: tuple[int, int], buffers: tuple[tuple[str, int], ...]) -> None:
        self._driver, (self._ordinal, self._context) = driver, place
        # None stands for the zeros.
        offsets: list[int | None] = []
        end = 0
        for name, size in buffers:
            if name == ZEROS:
                assert size <= MOST_ZEROS
                offsets.append(None)
            else:
                end = -(-end // _ALIGNMENT) * _ALIGNMENT
                offsets.append(end)
                end += size or 1
        self._offsets, self._size = offsets, end
        self._pool = _pool_of(driver, self._context)
        self._held = {self._pool.reserve(driver, self._context, end)}
        self._places: dict[int, ScratchBuffers] = {}

    def place(self, handle: int) -> ScratchBuffers:
        """Return the buffers for work on a stream."""
        if handle and self._driver.capture_of(handle):
            return self._captured(handle)
        return self._places.get(handle) or self._take(handle)

    def _take(self, handle: int) -> ScratchBuffers:
        block = self._pool.take(self._driver, self._context, handle, self._size)
        self._held.add(block)
        return self._places.setdefault(handle, self._in_block(block))

    def _captured(self, handle: int) -> ScratchBuffers:
        capture = self._driver.graph_of(handle)
        if capture is None:  # it is invalid, and the driver will refuse the steps
            return self._take(handle)
        where = self._driver, self._context, capture, handle
        tensor = _of_torch(self._size, self._ordinal, handle)
        if tensor is None:
            return self._in_block(self._pool.captured(*where, self._size))
        if None not in self._offsets:
            return ScratchBuffers(_UNSHARED, self._addresses(tensor.data_ptr(), 0), tensor)
        zeros = self._pool.zeros(*where)
        return ScratchBuffers(zeros.lock, self._addresses(tensor.data_ptr(), zeros.address), tensor)

    def _in_block(self, block: Block) -> ScratchBuffers:
        return ScratchBuffers(block.lock, self._addresses(block.address, block.address - MOST_ZEROS))

    def _addresses(self, start: int, zeros: int) -> tuple[int, ...]:
        return tuple(zeros if at is None else start + at for at in self._offsets)
