"""Scratch memory of plans on a device. All plans that run on a stream share one block.

Work on a stream runs in order, so its plans can use the same memory. A plan for another size allocates nothing if its
scratch fits. A program with ever new sizes keeps little more memory than the largest size needs.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple

from skuda.dispatch.cuda.driver import Driver, inherited
from skuda.dispatch.system.locks import lock
from skuda.kernels.launch import MOST_ZEROS, ZEROS

_ALIGNMENT = 256


class Block:
    """Device memory of `size` bytes. It is freed when nobody holds it any more.

    Attributes
    ----------
    address, size : int
        Address and size in bytes. The `MOST_ZEROS` bytes before it are zero whenever no run uses them.
    lock : Lock
        Held while the steps of a run are enqueued, so that those of another thread do not interleave on the stream.
    """

    __slots__ = ("__weakref__", "address", "lock", "size")

    def __init__(self, driver: Driver, context: int, size: int) -> None:
        with driver.using(context):
            start = driver.allocate(MOST_ZEROS + size)
            weakref.finalize(self, _free, driver, context, start).atexit = False
            driver.clear(start, MOST_ZEROS)
        self.address, self.size, self.lock = start + MOST_ZEROS, size, threading.Lock()


def _free(driver: Driver, context: int, address: int) -> None:
    if inherited():
        return
    with driver.using(context):
        driver.free(address)


class Pool:
    """The blocks of one context. It holds none of them, except those that a captured graph may use at any time."""

    def __init__(self) -> None:
        self._lock = lock()
        self._bound: weakref.WeakValueDictionary[tuple[int, int], Block] = weakref.WeakValueDictionary()
        self._spare: weakref.WeakSet[Block] = weakref.WeakSet()
        self._captured: list[Block] = []
        self._reserved: Callable[[], Block | None] = lambda: None

    def reserve(self, driver: Driver, context: int, size: int) -> Block:
        """Return a block that is large enough, whoever uses it. If there is none, make one that no stream uses yet."""
        with self._lock:
            # The latest first: with it, a plan for another size asks no other.
            found = self._reserved()
            if found is not None and self._serves(found, size):
                return found
            mine = itertools.chain(self._bound.values(), self._spare)
            found = next((block for block in mine if self._serves(block, size)), None)
            if found is None:
                found = Block(driver, context, _rounded(size))
                self._spare.add(found)
            self._reserved = weakref.ref(found)
            return found

    def _serves(self, block: Block, size: int) -> bool:
        return block.size >= size and block not in self._captured

    def take(self, driver: Driver, context: int, key: tuple[int, int], size: int) -> Block:
        """Return the block of a stream and a capture (0: none); a larger one if the present one is too small."""
        with self._lock:
            found = self._bound.get(key)
            if found is None or found.size < size:
                found = next((block for block in self._spare if block.size >= size), None)
                if found is None:
                    found = Block(driver, context, _rounded(size))
                self._spare.discard(found)
                self._bound[key] = found
                if key[1]:
                    self._captured.append(found)
            return found


def _rounded(size: int) -> int:
    """Return the next power of two, so that growing needs allocate few blocks."""
    return 1 << (max(1, size) - 1).bit_length()


_pools: weakref.WeakKeyDictionary[Driver, dict[int, Pool]] = weakref.WeakKeyDictionary()


def _pool_of(driver: Driver, context: int) -> Pool:
    pools = _pools.get(driver)
    if pools is None:
        pools = _pools.setdefault(driver, {})
    return pools.get(context) or pools.setdefault(context, Pool())


class ScratchBuffers(NamedTuple):
    """The scratch buffers of one run: the lock to hold while its steps are enqueued, and their addresses."""

    lock: threading.Lock
    addresses: tuple[int, ...]


class Scratch:
    """The scratch buffers of one plan; `buffers` are their names and sizes in bytes.

    A block for the first stream is there when the plan is. A run inside a graph capture gets a block of its own that
    lives as long as the process, because a graph may be replayed at any time on any stream.
    """

    def __init__(self, driver: Driver, context: int, buffers: tuple[tuple[str, int], ...]) -> None:
        self._driver, self._context = driver, context
        offsets, end = [], 0
        for name, size in buffers:
            if name == ZEROS:
                assert size <= MOST_ZEROS
                offsets.append(-MOST_ZEROS)
            else:
                end = -(-end // _ALIGNMENT) * _ALIGNMENT
                offsets.append(end)
                end += size or 1
        self._offsets, self._size = offsets, end
        self._pool = _pool_of(driver, context)
        self._held = {self._pool.reserve(driver, context, end)}
        self._places: dict[tuple[int, int], ScratchBuffers] = {}

    def place(self, handle: int) -> ScratchBuffers:
        """Return the buffers for work on a stream."""
        key = (handle, self._driver.capture_of(handle) if handle else 0)
        return self._places.get(key) or self._take(key)

    def _take(self, key: tuple[int, int]) -> ScratchBuffers:
        block = self._pool.take(self._driver, self._context, key, self._size)
        self._held.add(block)
        return self._places.setdefault(
            key, ScratchBuffers(block.lock, tuple(block.address + at for at in self._offsets))
        )
