"""Modules and launches through cuda-bindings: ``cuLaunchKernelEx``, on any stream.

cuda.core uses the same cuda-bindings, but its `launch` converts and packs all arguments on every call. Here they are
packed once, and a call consists of the driver's function only.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

from skuda.dispatch.cuda.driver import driver, failure
from skuda.dispatch.cuda.launcher import Bound, Send
from skuda.dispatch.cuda.packing import Packed, Packer
from skuda.dispatch.cuda.runner import must_opt_in
from skuda.dispatch.system.packages import installed
from skuda.kernels.launch import Step
from skuda.registry.cached import cached_property
from skuda.registry.errors import DriverError

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_POINTER, _SIZE = 1, 2  # CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE


def bindings_trouble() -> str | None:
    """Return why cuda-bindings cannot be used, or None; imports no large package."""
    return None if installed("cuda.bindings") else "cuda-bindings is not installed"


def bindings_version() -> str:
    """Return the name and version of cuda-bindings."""
    import cuda.bindings

    return f"cuda-bindings {cuda.bindings.__version__}"


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


class _Overlap(ctypes.Structure):
    """CUlaunchAttribute: the kernel may start before the one ahead of it in the stream is done."""

    _fields_ = (("which", ctypes.c_uint), ("allowed", ctypes.c_int * 17))


_OVERLAP = _Overlap(6, (ctypes.c_int * 17)(0, 1))  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Buffer:
    """One launch in memory that the driver reads: geometry, stream and packed parameters."""

    __slots__ = ("_extra", "_size", "config", "content", "where", "with_what")

    def __init__(self, step: Step, size: int) -> None:
        self.config = _Config(step.grid, step.block, step.shared)
        if step.overlaps:
            self.config.attributes, self.config.count = ctypes.addressof(_OVERLAP), 1
        self.content = ctypes.create_string_buffer(max(1, size))
        self._size = ctypes.c_size_t(size)
        entries = (_POINTER, ctypes.addressof(self.content), _SIZE, ctypes.addressof(self._size), None)
        self._extra = (ctypes.c_void_p * 5)(*entries)
        self.where, self.with_what = ctypes.byref(self.config), ctypes.byref(self._extra)


class BindingsModule:
    """A loaded cubin; `handle` is the CUmodule. It keeps its functions, which plans of other sizes use as well."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._functions: dict[str, ctypes.c_void_p] = {}
        self._opted_in: dict[str, int] = {}
        self._lock = threading.Lock()

    def function(self, step: Step) -> ctypes.c_void_p:
        """Return the function of a step; its blocks may have the shared memory that the step needs."""
        with self._lock:
            found = self._functions.get(step.entry)
            if found is None:
                from cuda.bindings import driver as api

                made = succeed("cuModuleGetFunction", *api.cuModuleGetFunction(self._handle, step.entry.encode()))
                found = self._functions[step.entry] = ctypes.c_void_p(int(made))
            # All launches of a function share the limit, so it only rises.
            if must_opt_in(step) and step.shared > self._opted_in.get(step.entry, 0):
                driver().call("cuFuncSetAttribute", found, _MAX_DYNAMIC_SHARED, step.shared)
                self._opted_in[step.entry] = step.shared
            return found


class BindingsEngine:
    """Launches through ``cuLaunchKernelEx``, on any stream."""

    def __init__(self, module: BindingsModule, packed: Packed) -> None:
        self._packed = packed
        self._functions = [module.function(step) for step in packed.steps]

    @cached_property
    def sends(self) -> list[Send]:
        """The function that enqueues each step; the first run makes them."""
        return list(map(self._send, self._packed.steps, self._functions, self._packed.packers))

    def _send(self, step: Step, function: ctypes.c_void_p, packed: Packer) -> Send:
        pack, start = packed.pack, _start()
        spare: list[_Buffer] = []
        take, give = spare.pop, spare.append

        def send(parameters: tuple[Any, ...], handle: int, stream: object) -> None:  # noqa: ARG001  the handle is enough
            try:
                # Only one launch in all threads uses a buffer at a time: taking one out is atomic.
                buffer = take()
            except IndexError:
                buffer = _Buffer(step, packed.size)
            buffer.content.raw = pack(*parameters)
            buffer.config.stream = handle
            code = start(buffer.where, function, None, buffer.with_what)
            give(buffer)
            if code:
                raise failure("cuLaunchKernelEx", code)

        return send

    def bound(self, step: int, parameters: tuple[Any, ...]) -> Bound:
        """Return a function that enqueues one step with these parameters."""
        packed, function, start = self._packed.packers[step], self._functions[step], _start()

        def made() -> _Buffer:
            buffer = _Buffer(self._packed.steps[step], packed.size)
            buffer.content.raw = packed.pack(*parameters)
            return buffer

        # One buffer per stream, so that threads on different streams do not share one.
        buffers: dict[int, _Buffer] = {}

        def send(handle: int, stream: object) -> None:  # noqa: ARG001  the handle is enough
            buffer = buffers.get(handle)
            if buffer is None:
                buffer = made()
                buffer.config.stream = handle
                buffers[handle] = buffer
            code = start(buffer.where, function, None, buffer.with_what)
            if code:
                raise failure("cuLaunchKernelEx", code)

        return send


def _start() -> Callable[..., int]:
    # Its four arguments are built before the call, in a third of the time that cuda-bindings takes to convert the
    # eleven of `cuLaunchKernel`.
    return driver().function("cuLaunchKernelEx")


def load_module(cubin: bytes) -> BindingsModule:
    """Load a cubin into the current context through cuda-bindings."""
    from cuda.bindings import driver as api

    return BindingsModule(succeed("cuModuleLoadData", *api.cuModuleLoadData(cubin)))


def succeed(action: str, code: Any, *found: Any) -> Any:
    """Return the results of a cuda-bindings call. Raise `DriverError` if its code is not success."""
    if int(code):
        raise DriverError(action, f"{code.name} ({int(code)})", int(code))
    return found[0] if found else None
