"""The ``cuda_core`` backend: NVRTC from wheels, launches on any stream through cuda-bindings.

cuda.core's own objects stand on the same cuda-bindings; its `launch` packs and converts per call what is packed once
here, so that only the driver's function is called.
"""

from __future__ import annotations

import ctypes
import importlib.util
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from skuda.dispatch.backends.base import BackendStatus
from skuda.dispatch.backends.cuda import CudaBackend, must_opt_in
from skuda.dispatch.compiling import Nvrtc, find_nvrtc, nvrtc_trouble
from skuda.dispatch.gpu_call import packer
from skuda.dispatch.gpu_run import Send
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

    def engine(self, module: Any, launch: Launch, op: str, ordinal: int) -> BindingsEngine:  # noqa: ARG002  any stream
        """Return the steps of a launch."""
        return BindingsEngine(module, launch)


class _Step(NamedTuple):
    """What `cuLaunchKernel` takes, and spare parameter buffers."""

    head: tuple[Any, ...]
    packer: struct.Struct
    pack_into: Callable[..., None]
    spare: list[_Buffer]


class _Buffer:
    """Packed parameters where the driver can read them."""

    __slots__ = ("_extra", "_size", "address", "content")

    def __init__(self, packer: struct.Struct) -> None:
        self.content = ctypes.create_string_buffer(max(1, packer.size))
        self._size = ctypes.c_size_t(packer.size)
        entries = (_POINTER, ctypes.addressof(self.content), _SIZE, ctypes.addressof(self._size), None)
        self._extra = (ctypes.c_void_p * 5)(*entries)
        self.address = ctypes.addressof(self._extra)


class BindingsEngine:
    """Launches through ``cuLaunchKernel``, on any stream.

    Parameters
    ----------
    module : CUmodule
        The loaded cubin.
    launch : Launch
        What to launch.
    """

    def __init__(self, module: Any, launch: Launch) -> None:
        from cuda.bindings import driver as api

        self._launch_kernel = api.cuLaunchKernel
        self._steps = [self._prepared(api, module, step) for step in launch.steps]

    @staticmethod
    def _prepared(api: Any, module: Any, step: Step) -> _Step:
        function = succeed("cuModuleGetFunction", *api.cuModuleGetFunction(module, step.entry.encode()))
        attribute = api.CUfunction_attribute(_MAX_DYNAMIC_SHARED)
        if must_opt_in(step):
            succeed("cuFuncSetAttribute", *api.cuFuncSetAttribute(function, attribute, step.shared))
        packed = packer(step)
        return _Step((function, *step.grid, *step.block, step.shared), packed, packed.pack_into, [])

    def launch(self, step: int, parameters: tuple[Any, ...], handle: int, stream: object) -> None:  # noqa: ARG002  the handle says all
        """Enqueue one step."""
        head, packed, pack_into, spare = self._steps[step]
        try:
            # A buffer belongs to one launch at a time, whatever threads do: taking one out is atomic.
            buffer = spare.pop()
        except IndexError:
            buffer = _Buffer(packed)
        pack_into(buffer.content, 0, *parameters)
        (code,) = self._launch_kernel(*head, handle, 0, buffer.address)
        spare.append(buffer)
        if code:
            succeed("cuLaunchKernel", code)

    def bound(self, step: int, parameters: tuple[Any, ...]) -> Send:
        """Return what enqueues one step with these parameters."""
        head, packed, pack_into, _ = self._steps[step]
        buffer, launch_kernel = _Buffer(packed), self._launch_kernel
        pack_into(buffer.content, 0, *parameters)
        address = buffer.address

        def send(handle: int, stream: object, _kept: _Buffer = buffer) -> None:  # noqa: ARG001  the handle says all
            (code,) = launch_kernel(*head, handle, 0, address)
            if code:
                succeed("cuLaunchKernel", code)

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
