"""The ``cuda_core`` backend: NVRTC from wheels, modules through cuda-bindings, launches on any stream.

cuda.core's own objects stand on the same cuda-bindings; its `launch` packs and converts per call what is packed once
here, so that only the driver's function is called.
"""

from __future__ import annotations

import ctypes
import importlib.util
from typing import Any

from skuda.dispatch.backends.base import BackendStatus
from skuda.dispatch.backends.cuda import CudaBackend, must_opt_in
from skuda.dispatch.compiling import Nvrtc, find_nvrtc, nvrtc_trouble
from skuda.dispatch.driver import driver, failure
from skuda.dispatch.gpu_call import packer
from skuda.dispatch.gpu_run import Bound, Send
from skuda.kernels.launch import Launch, Step
from skuda.registry.backend import BUILT_IN
from skuda.registry.errors import DriverError

_REMEDY = "pip install 'skuda[cuda13]'"
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_POINTER, _SIZE = 1, 2  # CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE


def bindings_trouble() -> str | None:
    """Say why cuda-bindings cannot be used, or None. Imports nothing heavy."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "cuda-bindings is not installed"
    return None


def bindings_version() -> str:
    """Name cuda-bindings with its version."""
    import cuda.bindings

    return f"cuda-bindings {cuda.bindings.__version__}"


class CudaCoreBackend(CudaBackend[Any]):
    """CUDA source through NVRTC and cuda-bindings."""

    spec = next(spec for spec in BUILT_IN if spec.name == "cuda_core")
    compilers = f"install NVRTC: {_REMEDY}"

    def trouble(self) -> BackendStatus | None:
        """Say what is missing, or None."""
        found = bindings_trouble()
        return BackendStatus(available=False, detail=found, remedy=_REMEDY) if found else None

    def compiler(self) -> Nvrtc | None:
        """Return NVRTC, or None where it is not installed."""
        return find_nvrtc()

    def versions(self) -> str:
        """Name cuda-bindings and NVRTC."""
        nvrtc = find_nvrtc()
        told = nvrtc_trouble() if nvrtc is None else f"NVRTC {nvrtc.version[0]}.{nvrtc.version[1]}"
        return f"{bindings_version()}, {told}"

    def load(self, cubin: bytes, ordinal: int) -> Any:  # noqa: ARG002  the context is current
        """Load a cubin; returns a CUmodule."""
        return load_module(cubin)

    def engine(self, module: Any, launch: Launch, op: str, ordinal: int) -> BindingsEngine:  # noqa: ARG002  the context is current
        """Return the steps of a launch."""
        return BindingsEngine(module, launch, op)


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
    """One launch where the driver can read it: geometry, stream and packed parameters."""

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


class BindingsEngine:
    """Launches through ``cuLaunchKernelEx``, on any stream.

    Parameters
    ----------
    module : CUmodule
        The loaded cubin.
    launch : Launch
        What to launch.
    op : str
        For errors.
    """

    def __init__(self, module: Any, launch: Launch, op: str) -> None:
        from cuda.bindings import driver as api

        # Four arguments, made before: a third of what cuda-bindings need to convert the eleven of `cuLaunchKernel`.
        self._start = driver().function("cuLaunchKernelEx")
        self._steps, self._op = launch.steps, op
        self._functions = [self._function(api, module, step) for step in launch.steps]
        self.sends = [self._send(step, function) for step, function in zip(self._steps, self._functions, strict=True)]

    @staticmethod
    def _function(api: Any, module: Any, step: Step) -> ctypes.c_void_p:
        function = succeed("cuModuleGetFunction", *api.cuModuleGetFunction(module, step.entry.encode()))
        attribute = api.CUfunction_attribute(_MAX_DYNAMIC_SHARED)
        if must_opt_in(step):
            succeed("cuFuncSetAttribute", *api.cuFuncSetAttribute(function, attribute, step.shared))
        return ctypes.c_void_p(int(function))

    def _send(self, step: Step, function: ctypes.c_void_p) -> Send:
        packed = packer(step, self._op)
        pack, start = packed.pack, self._start
        spare: list[_Buffer] = []
        take, give = spare.pop, spare.append

        def send(parameters: tuple[Any, ...], handle: int, stream: object) -> None:  # noqa: ARG001  the handle says all
            try:
                # A buffer belongs to one launch at a time, whatever threads do: taking one out is atomic.
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
        """Return what enqueues one step with these parameters."""
        packed, function, start = packer(self._steps[step], self._op), self._functions[step], self._start

        def made() -> _Buffer:
            buffer = _Buffer(self._steps[step], packed.size)
            buffer.content.raw = packed.pack(*parameters)
            return buffer

        # One for every stream, so that threads on different ones do not change each other's.
        buffers: dict[int, _Buffer] = {}

        def send(handle: int, stream: object) -> None:  # noqa: ARG001  the handle says all
            buffer = buffers.get(handle)
            if buffer is None:
                buffer = made()
                buffer.config.stream = handle
                buffers[handle] = buffer
            code = start(buffer.where, function, None, buffer.with_what)
            if code:
                raise failure("cuLaunchKernelEx", code)

        return send


def load_module(cubin: bytes) -> Any:
    """Load a cubin into the current context through cuda-bindings."""
    from cuda.bindings import driver as api

    return succeed("cuModuleLoadData", *api.cuModuleLoadData(cubin))


def succeed(action: str, code: Any, *found: Any) -> Any:
    """Return what a cuda-bindings call found.

    Raises
    ------
    DriverError
        Where its code is not success.
    """
    if int(code):
        raise DriverError(action, f"{code.name} ({int(code)})", int(code))
    return found[0] if found else None
