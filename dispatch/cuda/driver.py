"""The CUDA driver through ctypes: functions that no Python package wraps or that must not depend on one.

Loading it creates no context. It uses a card's primary context, as torch, CuPy and JAX do, and never replaces the
current context of a thread.

A process that was forked after the driver was loaded cannot use CUDA: the driver refuses, or fails in worse ways. There
the driver is never called.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

from skuda.dispatch.system.flag import Flag
from skuda.dispatch.system.forks import in_child
from skuda.dispatch.system.transient import is_transient
from skuda.registry.cached import cached_property
from skuda.registry.device import Device
from skuda.registry.errors import DriverError

FORKED = "CUDA was used before this process was forked, and works only in the process that used it first"
FORK_REMEDY = "start processes by multiprocessing's spawn method, or fork before skuda or torch first uses CUDA"
NOT_INITIALIZED = 3
"""The driver's result in a forked process."""

_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"

# CUdevice_attribute
_SM_COUNT, _CLOCK_KHZ, _BUS_BITS, _L2, _MAJOR, _MINOR, _SHARED = 16, 36, 37, 38, 75, 76, 97
_POINTER_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_CAPTURE_IMPLICIT = 906  # the default stream was queried while a stream that waits for it is captured
_ACTIVE = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_NO_SYNC, _MOVE = 1, 1  # CU_USER_OBJECT_NO_DESTRUCTOR_SYNC, CU_GRAPH_USER_OBJECT_MOVE

_CODES = {
    1: "invalid value",
    2: "out of memory",
    3: "not initialized",
    35: "the driver is older than the CUDA version that the program was built with",
    100: "no CUDA device",
    101: "invalid device",
    200: "invalid image",
    201: "invalid context",
    209: "no binary for this GPU",
    400: "invalid handle",
    500: "not found",
    700: "illegal address",
    719: "launch failed",
    802: "the system is not ready yet",
    803: "the driver is older than its kernel module, or the other way round",
    804: "forward compatibility is not supported on this card",
}


def failure(name: str, code: int) -> DriverError:
    """Return the error for the result of a driver function."""
    return DriverError(name, f"{_CODES.get(code, 'see CUresult in cuda.h')} ({code})", code)


def forked() -> DriverError:
    """Return the error for a process that inherited the driver from the one that forked it."""
    return DriverError("using it", f"{FORKED}; {FORK_REMEDY}", NOT_INITIALIZED)


def inherited() -> bool:
    """Whether this process was forked from one that had loaded the driver."""
    return _inherited


class Capture(NamedTuple):
    """A graph capture: its id, which no other capture of the process has, and the handle of the graph that it makes."""

    number: int
    graph: int


class Driver:
    """The initialized driver library. Raise `DriverError` if there is no driver, or it does not start."""

    def __init__(self) -> None:
        if inherited():
            raise forked()
        try:
            # PyDLL keeps the interpreter lock: this function is called on every run and returns immediately.
            self._library, self._quick = ctypes.CDLL(_LIBRARY), ctypes.PyDLL(_LIBRARY)
        except OSError as error:
            if is_transient(error):
                raise
            raise DriverError("loading it", str(error)) from error
        code = self._code("cuInit", 0)
        if code:
            # Another library may have used CUDA before the fork.
            raise forked() if code == NOT_INITIALIZED else failure("cuInit", code)
        self._get_current = self._quick.cuCtxGetCurrent
        self._slots = _Slots()
        self._contexts: dict[int, int] = {}
        self._retaining = threading.Lock()

    def call(self, name: str, *arguments: Any) -> None:
        """Call a driver function. Raise `DriverError` unless it exists and returns success."""
        code = self._code(name, *arguments)
        if code:
            raise failure(name, code)

    def function(self, name: str) -> Callable[..., int]:
        """Return a driver function; it returns a CUresult. Raise `DriverError` if it does not exist in this driver."""
        try:
            found: Callable[..., int] = getattr(self._library, name)  # which keeps it
        except AttributeError:
            raise DriverError(name, "this driver does not have it") from None
        return found

    def _code(self, name: str, *arguments: Any) -> int:
        return self.function(name)(*arguments)

    @property
    def version(self) -> str:
        """CUDA version that the driver supports, for example ``13.0``."""
        value = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(value))
        return f"{value.value // 1000}.{value.value % 1000 // 10}"

    @cached_property
    def device_count(self) -> int:
        """Number of CUDA devices that this process sees."""
        value = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(value))
        return value.value

    def device(self, ordinal: int) -> Device:
        """Return the facts about a device, without creating a context on it."""
        handle, name, memory = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
        self.call("cuDeviceGet", ctypes.byref(handle), ordinal)
        self.call("cuDeviceGetName", name, len(name), handle)
        self.call("cuDeviceTotalMem_v2", ctypes.byref(memory), handle)

        def attribute(kind: int) -> int:
            value = ctypes.c_int()
            return value.value if not self._code("cuDeviceGetAttribute", ctypes.byref(value), kind, handle) else 0

        return Device(
            name=name.value.decode(errors="replace"),
            processor="cuda",
            ordinal=ordinal,
            compute_capability=(attribute(_MAJOR), attribute(_MINOR)),
            sm_count=attribute(_SM_COUNT),
            shared_memory=attribute(_SHARED),
            l2_cache=attribute(_L2),
            memory=memory.value,
            # Two transfers per clock; 0 where the driver does not report it.
            memory_bandwidth=2 * 1000 * attribute(_CLOCK_KHZ) * attribute(_BUS_BITS) // 8,
        )

    def devices(self) -> tuple[Device, ...]:
        """Return the facts about every device."""
        return tuple(self.device(ordinal) for ordinal in range(self.device_count))

    def primary_context(self, ordinal: int) -> int:
        """Return the handle of a device's primary context, which stays alive until the process ends."""
        with self._retaining:
            if ordinal not in self._contexts:
                context = ctypes.c_void_p()
                self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
                self._contexts[ordinal] = context.value or 0
            return self._contexts[ordinal]

    def current(self) -> int | None:
        """Return the handle of this thread's current context, or None."""
        slot = self._slots
        self._get_current(slot.reference)
        return slot.value.value

    def using(self, context: int) -> AbstractContextManager[None]:
        """Make a context current inside a ``with`` block.

        With a single card, a thread that had no context keeps this one. With several it must not, because torch and
        CuPy derive the current device from the current context.
        """
        current = self.current()
        return _AS_IT_IS if current == context else self._switched(current, context)

    @contextmanager
    def _switched(self, current: int | None, context: int) -> Iterator[None]:
        if current is None and self.device_count == 1:
            self.call("cuCtxSetCurrent", ctypes.c_void_p(context))
            yield
        else:
            push, pop = self.function("cuCtxPushCurrent_v2"), self.function("cuCtxPopCurrent_v2")
            pushed: list[int] = []
            try:
                # One call into C pushes and remembers it, so that no interrupt arrives in between.
                pushed.extend(map(push, (ctypes.c_void_p(context),)))
                if pushed[0]:
                    raise failure("cuCtxPushCurrent_v2", pushed[0])
                yield
            finally:
                if pushed and not pushed[0]:
                    pop(self._slots.reference)

    def ordinal_of(self, address: int) -> int | None:
        """Return the ordinal of the device that an address belongs to, or None if the driver does not know it."""
        value = ctypes.c_int(-1)
        code = self._code("cuPointerGetAttribute", ctypes.byref(value), _POINTER_ORDINAL, ctypes.c_uint64(address))
        return value.value if not code and value.value >= 0 else None

    def capture_of(self, stream: int) -> int:
        """Return the id of the graph capture that a stream takes part in, or 0.

        For the default stream, -1 means that some stream of the current context is being captured.
        """
        slots = self._slots
        where = ctypes.c_void_p(stream)
        code = self._get_capture(where, slots.status_reference, slots.number_reference, None, None, None)
        if code == _CAPTURE_IMPLICIT:
            return -1
        return slots.number.value if not code and slots.status.value else 0

    def graph_of(self, stream: int) -> Capture | None:
        """Return the graph capture that a stream takes part in, or None if there is none, or it has become invalid."""
        status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
        results = map(ctypes.byref, (status, number, graph))
        code = self._get_capture(ctypes.c_void_p(stream), *results, None, None)
        # Otherwise the driver writes nothing else.
        return Capture(number.value, graph.value or 0) if not code and status.value == _ACTIVE else None

    def watch(self, graph: int) -> Callable[[], bool] | None:
        """Return a function that tells whether a graph is destroyed, and all that was made of it, and nothing runs.

        The graph is being captured. None if this driver or this system cannot tell.
        """
        names = ("cuUserObjectCreate", "cuGraphRetainUserObject", "cuUserObjectRelease")
        try:
            create, retain, release = map(self.function, names)
            flag = Flag()
        except (DriverError, OSError):
            return None
        user_object = ctypes.c_void_p()
        made: list[int] = []
        given: list[int] = []
        try:
            # As in `using`. The driver may call the destructor in a thread that holds the interpreter's lock.
            made.extend(map(create, (ctypes.byref(user_object),), (flag.address,), (flag.raiser,), (1,), (_NO_SYNC,)))
            if made == [0]:
                given.extend(map(retain, (ctypes.c_void_p(graph),), (user_object,), (1,), (_MOVE,)))
        finally:
            if made == [0] and given != [0]:
                release(user_object, 1)
        if made != [0]:
            flag.up()  # nobody else will
        return flag if given == [0] else None

    @cached_property
    def _get_capture(self) -> Callable[..., int]:
        return self.function("cuStreamGetCaptureInfo_v2")

    def allocate(self, address: ctypes.c_uint64, size: int) -> None:
        """Write the address of new device memory in the current context; allowed while a stream is captured."""
        with self._beside_captures():
            self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(1, size)))

    def clear(self, address: int, size: int) -> None:
        """Fill memory of the current context with zeros, and wait for it; allowed while a stream is captured."""
        stream = ctypes.c_void_p()
        with self._beside_captures():
            try:
                self.call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
                where = ctypes.c_uint64(address), ctypes.c_ubyte(0), ctypes.c_size_t(size)
                self.call("cuMemsetD8Async", *where, stream)
                self.call("cuStreamSynchronize", stream)
            finally:
                if stream.value:
                    self.call("cuStreamDestroy_v2", stream)

    @contextmanager
    def _beside_captures(self) -> Iterator[None]:
        """Allow what a capture of another stream would refuse."""
        mode = ctypes.c_int(_RELAXED)
        exchange = self.function("cuThreadExchangeStreamCaptureMode")
        done: list[int] = []
        try:
            done.extend(map(exchange, (ctypes.byref(mode),)))  # as in `using`
            yield
        finally:
            if done and not done[0]:
                exchange(ctypes.byref(mode))

    def free(self, address: int) -> None:
        """Free memory from `allocate`, which no work may use; allowed while a stream is captured."""
        with self._beside_captures():
            self.call("cuMemFree_v2", ctypes.c_uint64(address))

    def synchronize(self, stream: int) -> None:
        """Wait for a stream of the current context."""
        self.call("cuStreamSynchronize", ctypes.c_void_p(stream))


_AS_IT_IS = nullcontext()


class _Slots(threading.local):
    """The variables that receive the results of `Driver.current` and `Driver.capture_of`, one each per thread."""

    def __init__(self) -> None:
        self.value = ctypes.c_void_p()
        self.reference = ctypes.byref(self.value)
        self.status, self.number = ctypes.c_int(), ctypes.c_uint64()
        self.status_reference, self.number_reference = ctypes.byref(self.status), ctypes.byref(self.number)


@cache
def driver() -> Driver:
    """Return the driver of this process. A failure is not cached.

    Raise `DriverError` if there is no driver, or it does not start.
    """
    return Driver()


_inherited = False


def _inherit() -> None:
    global _inherited  # noqa: PLW0603  the state of this process
    _inherited = _inherited or driver.cache_info().currsize > 0
    driver.cache_clear()


in_child(_inherit)
