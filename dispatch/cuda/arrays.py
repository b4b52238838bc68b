"""Device arrays of every framework: their facts, their allocation and their current stream.

Each framework is one class. No framework is imported here, because an array of a library exists only if the caller has
imported the library.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np

from skuda.dispatch.cuda import dlpack
from skuda.dispatch.cuda.facts import (
    ELEMENTS,
    ArrayFacts,
    Framework,
    Guard,
    JointCheck,
    Refused,
    element_of,
    in_elements,
    ordinal_asked,
    ordinal_said,
)
from skuda.dispatch.host.arrays import UNWRAPPED, is_plain_tensor, plain_tensor, same_tensors
from skuda.kernels.dtypes import storage_dtype
from skuda.registry.elements import ElementKind


class Torch(Framework):
    """PyTorch: strides in elements, and a bfloat16 of its own."""

    name = "torch"

    def facts(self, value: Any) -> ArrayFacts:
        """Return a tensor's facts."""
        torch, kind = sys.modules["torch"], type(value)
        value = plain_tensor(value)
        if value is None:
            raise Refused(f"a {kind.__name__}", UNWRAPPED)
        if value.requires_grad:
            raise Refused("a tensor that requires grad", "be detached: pass x.detach()")
        if value.layout is not torch.strided or value.is_neg() or value.is_conj():
            raise Refused(f"a tensor of layout {value.layout}, or a lazily negated one", "be dense: pass x.to_dense()")
        ordinal = value.get_device() if value.is_cuda else None
        address = value.data_ptr() if ordinal is not None else 0
        element = _torch_elements().get(value.dtype)
        return ArrayFacts(address, element, str(value.dtype), tuple(value.shape), value.stride(), ordinal)

    def guard(self, value: Any, facts: ArrayFacts) -> Guard:
        """Return a check that reads six attributes."""
        if not is_plain_tensor(value):
            kind, inner = type(value), self.guard(plain_tensor(value), facts)
            return lambda other: inner(plain_tensor(other)) if type(other) is kind else None
        kind, dtype, ordinal = type(value), value.dtype, facts.ordinal
        # Comparing two torch.Size objects is fastest.
        shape, strides = value.shape, facts.strides

        def same(other: Any) -> Any:
            if (
                type(other) is kind
                and other.shape == shape
                and other.stride() == strides
                and other.dtype is dtype
                and other.get_device() == ordinal
                and not other.requires_grad
            ):
                return other.data_ptr()
            return None

        return same

    def joint_check(self, values: tuple[Any, ...]) -> JointCheck | None:
        """Return `same_tensors` as a check. It takes a third of the time of reading the tensors here."""
        same = same_tensors(values)
        return (
            None
            if same is None
            else JointCheck(same, sys.modules["torch"].is_grad_enabled, "{0}.requires_grad", "{0}.data_ptr()")
        )

    def empty(self, shape: tuple[int, ...], element: ElementKind, ordinal: int, stream: int | None) -> Any:
        """Return a new tensor, from the pool of the stream that it will be used on."""
        torch = sys.modules["torch"]
        dtype, device = _torch_dtypes()[element], f"cuda:{ordinal}"
        if stream is None or stream == self.current_stream(ordinal)():
            return torch.empty(shape, dtype=dtype, device=device)
        target = torch.cuda.ExternalStream(stream, device=ordinal) if stream else torch.cuda.default_stream(ordinal)
        with torch.cuda.stream(target):
            return torch.empty(shape, dtype=dtype, device=device)

    def maker(self, shape: tuple[int, ...], element: ElementKind, ordinal: int) -> Callable[[int | None], Any]:
        """Return a function of the stream that makes such tensors; see `_compiled_allocator`."""
        found = _compiled_allocator()
        if found is None:
            return super().maker(shape, element, ordinal)
        allocate, device = found
        dtype, strides, current = _torch_dtypes()[element], dlpack.dense_strides(shape), self.current_stream(ordinal)

        def make(stream: int | None) -> Any:
            # It allocates on the current device, for the current stream.
            if device() == ordinal and (stream is None or stream == current()):
                return allocate(shape, strides, dtype)
            return self.empty(shape, element, ordinal, stream)

        return make

    def address(self, value: Any) -> int:
        """Return a tensor's address."""
        address: int = value.data_ptr()
        return address

    def current_stream(self, ordinal: int) -> Callable[[], int]:
        """Return a getter of the current stream: the raw accessor that compiled torch code uses, if it exists."""
        torch = sys.modules["torch"]
        raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # noqa: SLF001  0.06 us against 1 us
        if raw is not None:
            return partial(raw, ordinal)
        return lambda: int(torch.cuda.current_stream(ordinal).cuda_stream)


class Cupy(Framework):
    """CuPy: NumPy dtypes, strides in bytes."""

    name = "cupy"

    def facts(self, value: Any) -> ArrayFacts:
        """Return an ndarray's facts."""
        size = value.dtype.itemsize
        strides = in_elements(value.strides, size)
        element = element_of(value.dtype)
        return ArrayFacts(value.data.ptr, element, str(value.dtype), value.shape, strides, value.data.device_id)

    def guard(self, value: Any, facts: ArrayFacts) -> Guard:
        """Return a check that reads five attributes."""
        kind, dtype, shape, strides, ordinal = type(value), value.dtype, value.shape, value.strides, facts.ordinal

        def same(other: Any) -> Any:
            if (
                type(other) is kind
                and other.shape == shape
                and other.strides == strides
                and other.dtype == dtype
                and other.data.device_id == ordinal
            ):
                return other.data.ptr
            return None

        return same

    def empty(self, shape: tuple[int, ...], element: ElementKind, ordinal: int, stream: int | None) -> Any:
        """Return a new array, from the pool of the stream that it will be used on."""
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(ordinal):
            if stream is None:
                return cupy.empty(shape, storage_dtype(element))
            with cupy.cuda.ExternalStream(stream, ordinal) if stream else cupy.cuda.Stream.null:
                return cupy.empty(shape, storage_dtype(element))

    def address(self, value: Any) -> int:
        """Return an ndarray's address."""
        return int(value.data.ptr)

    def current_stream(self, ordinal: int) -> Callable[[], int]:
        """Return a getter of a device's current stream; CuPy keeps one per device and thread."""
        current = sys.modules["cupy"].cuda.get_current_stream
        return lambda: int(current(ordinal).ptr)


class PycudaArray(Framework):
    """PyCUDA's GPUArray: NumPy dtypes, strides in bytes, the default stream."""

    name = "pycuda"

    def facts(self, value: Any) -> ArrayFacts:
        """Return a GPUArray's facts; the driver reports its device."""
        strides = in_elements(value.strides, value.dtype.itemsize)
        address = int(value.gpudata) if value.gpudata is not None else 0
        ordinal = ordinal_asked(address, value.size)
        return ArrayFacts(address, element_of(value.dtype), str(value.dtype), value.shape, strides, ordinal)

    def empty(self, shape: tuple[int, ...], element: ElementKind, ordinal: int, stream: int | None) -> Any:  # noqa: ARG002  PyCUDA's memory belongs to no stream
        """Return a new GPUArray, in the PyCUDA context that is active or the primary one."""
        import pycuda.driver
        import pycuda.gpuarray

        if pycuda.driver.Context.get_current() is not None:
            return pycuda.gpuarray.empty(shape, storage_dtype(element))
        from skuda.dispatch.cuda.pycuda_context import pushed

        with pushed(ordinal):
            return pycuda.gpuarray.empty(shape, storage_dtype(element))


class Standard(Framework):
    """Any other library: ``__cuda_array_interface__``, else DLPack. Neither standard can allocate."""

    name = "the array's library"
    borrows = True

    def facts(self, value: Any) -> ArrayFacts:
        """Return an array's facts."""
        interface = getattr(value, "__cuda_array_interface__", None)
        if interface is None:
            return self._from_dlpack(value)
        if interface.get("mask") is not None:
            raise Refused("a masked array", "have no mask")
        address, read_only = interface["data"]
        shape, kind = tuple(interface["shape"]), interface["typestr"]
        dtype = getattr(value, "dtype", None)
        element = element_of(dtype if isinstance(dtype, np.dtype) else np.dtype(kind))
        if element is None and hasattr(value, "__dlpack__"):
            # The interface has no type string for bf16.
            return self._from_dlpack(value)._replace(read_only=read_only, stream=interface.get("stream"))
        size = np.dtype(kind).itemsize
        given = interface.get("strides")
        strides = dlpack.dense_strides(shape) if given is None else in_elements(tuple(given), size)
        count = math.prod(shape)
        ordinal = ordinal_said(value) if hasattr(value, "__dlpack_device__") else ordinal_asked(address, count)
        return ArrayFacts(address, element, kind, shape, strides, ordinal, bool(read_only), interface.get("stream"))

    def _from_dlpack(self, value: Any) -> ArrayFacts:
        if not hasattr(value, "__dlpack__"):
            raise Refused(f"a {type(value).__name__}", "be an array (CUDA array interface or DLPack)")
        if ordinal_said(value) is None:
            return ArrayFacts(0, None, type(value).__name__, (), (), None)
        found = dlpack.read(value.__dlpack__())
        return ArrayFacts(found.address, found.element, found.kind, found.shape, found.strides, found.device[1])

    def empty(self, shape: tuple[int, ...], element: ElementKind, ordinal: int, stream: int | None) -> Any:
        """Return a new array of torch or CuPy, whichever the program has imported.

        Raise `Refused` if it has imported neither.
        """
        return _helper().empty(shape, element, ordinal, stream)


class Jax(Standard):
    """JAX: immutable arrays that JAX computes asynchronously; torch or CuPy allocates new ones for it."""

    name = "jax"
    waits = True

    def facts(self, value: Any) -> ArrayFacts:
        """Return an array's facts, once it is computed."""
        value.block_until_ready()
        return self._from_dlpack(value)._replace(read_only=True)

    def deliver(self, array: Any) -> Any:
        """Convert an array to a JAX array."""
        return sys.modules["jax"].dlpack.from_dlpack(array)


_TORCH, _CUPY, _PYCUDA, _JAX, _STANDARD = Torch(), Cupy(), PycudaArray(), Jax(), Standard()
_BY_MODULE: dict[str, Framework] = {"torch": _TORCH, "cupy": _CUPY, "pycuda": _PYCUDA, "jax": _JAX, "jaxlib": _JAX}


def framework_of(kind: type) -> Framework:
    """Return the framework whose arrays are of a type, or derive from it."""
    roots = (base.__module__.partition(".")[0] for base in kind.__mro__)
    return next((_BY_MODULE[root] for root in roots if root in _BY_MODULE), _STANDARD)


def _helpers() -> list[Framework]:
    """Return the imported frameworks that can allocate device memory."""
    torch = sys.modules.get("torch")
    found: list[Framework] = [_TORCH] if torch is not None and torch.version.cuda is not None else []
    return [*found, _CUPY] if "cupy" in sys.modules else found


def _helper() -> Framework:
    for framework in _helpers():
        return framework
    raise Refused("nothing", "be given: new device memory comes from torch or CuPy, and neither is imported")


def standard() -> Framework:
    """Return the framework of a call without arrays: torch or CuPy, whichever the program has imported."""
    return next(iter(_helpers()), _STANDARD)


def current_streams(ordinal: int) -> list[int]:
    """Return the current streams of the frameworks that this program uses."""
    busy = [f for f in _helpers() if f is not _TORCH or sys.modules["torch"].cuda.is_initialized()]
    return [framework.current_stream(ordinal)() for framework in busy]


@cache
def _compiled_allocator() -> tuple[Callable[..., Any], Callable[[], int]] | None:
    """Return the allocator of torch's compiled code with a getter of the current device, or None if it cannot serve.

    It takes a quarter of the time of ``torch.empty``, most of which goes into reading its arguments.
    """
    torch = sys.modules["torch"]
    try:
        allocate = importlib.import_module("torch._C._dynamo.guards")._empty_strided_cuda  # noqa: SLF001  as above
        device = torch._C._cuda_getDevice  # noqa: SLF001  as above
        made = allocate((0, 2), (2, 1), torch.float16)
        usable = made.is_cuda and made.dtype is torch.float16 and tuple(made.shape) == (0, 2)
        usable = usable and made.get_device() == device()
    except Exception:  # noqa: BLE001  private to torch and may change; `empty` remains
        return None
    return (allocate, device) if usable else None


@cache
def _torch_dtypes() -> dict[ElementKind, Any]:
    return {element: dtype for dtype, element in _torch_elements().items()}


@cache
def _torch_elements() -> dict[Any, ElementKind]:
    torch = sys.modules["torch"]
    return {getattr(torch, dtype.name): found for dtype, found in ELEMENTS.items() if hasattr(torch, dtype.name)}
