"""Finds the device of arrays of any framework, and views host arrays as NumPy arrays without a copy.

No framework is imported here. An array reports its own device (``__dlpack_device__``, ``__cuda_array_interface__``),
and a torch tensor exists only if the caller has imported torch.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown

if TYPE_CHECKING:
    import numpy.typing as npt

DevicePlace = tuple[str, int | None]
"""Kind of processor and ordinal, for example ``("cuda", 0)``. The ordinal is None if only the driver knows it."""

HOST_PLACE: DevicePlace = ("cpu", 0)

UNWRAPPED = "be an ordinary tensor: pass one of those that it wraps"
"""The rule for a torch tensor for which `plain_tensor` returns None."""

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_NAMES = ("bool", *_INTEGERS, "float16", "bfloat16", "float32", "float64")
_DTYPES: dict[Any, np.dtype[Any]] = {}
"""The dtypes of NumPy by those of torch, once torch is imported."""

PASSIVE: set[type] = set()
"""Subclasses of torch's Parameter whose ``__torch_function__`` changes nothing, so that calls may pass it by."""

# Device types of the DLPack standard.
_DLPACK = {1: "cpu", 2: "cuda", 3: "cpu", 13: "cuda"}


def place_of(op: str, name: str, value: Any) -> DevicePlace | None:
    """Return the device of an argument, or None for a number.

    Raise `InvalidProblem` if the value is neither an array nor a number, or is on a device of an unknown kind.
    """
    if isinstance(value, np.ndarray):
        return HOST_PLACE
    if isinstance(value, (bool, int, float, np.generic)):
        return None
    if _is_torch(value):
        tensor = value if is_plain_tensor(value) else bare(op, name, value)
        # __dlpack_device__ is slow, and raises for a tensor that requires grad, which deserves a clearer error.
        if tensor.is_cuda:
            return ("cuda", tensor.get_device())
        if tensor.device.type == "cpu":
            return HOST_PLACE
    if hasattr(value, "__dlpack_device__"):
        try:
            kind, ordinal = value.__dlpack_device__()
        except (AttributeError, BufferError, LookupError, RuntimeError, TypeError, ValueError) as error:
            must = f"be in the memory of a CPU or a CUDA device ({error})"
            raise InvalidProblem(op, name, f"a {type(value).__name__}", must) from error
        processor = _DLPACK.get(int(kind))
        if processor is None:
            raise InvalidProblem(
                op, name, f"an array on DLPack device type {int(kind)}", "be on a CPU or a CUDA device"
            )
        return HOST_PLACE if processor == "cpu" else (processor, int(ordinal))
    if hasattr(value, "__cuda_array_interface__"):
        device = getattr(value, "device", None)
        ordinal = getattr(device, "id", device)
        return ("cuda", ordinal if isinstance(ordinal, int) else None)
    raise InvalidProblem(op, name, f"a {type(value).__name__}", "be an array (NumPy, DLPack, CUDA array interface)")


def _is_torch(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_plain_tensor(value: Any) -> bool:
    """Whether the type of a torch tensor runs no code of its own."""
    kind, torch = type(value), sys.modules["torch"]
    return kind is torch.Tensor or kind is torch.nn.Parameter or kind in PASSIVE


def plain_tensor(value: Any) -> Any:
    """Return a torch tensor as a plain tensor that shares its memory. No code of a subclass runs.

    Return None for a subclass without memory of its own that wraps other tensors.
    """
    if is_plain_tensor(value):
        return value
    torch = sys.modules["torch"]
    if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return None
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  torch documents it for this use
        return value.as_subclass(torch.Tensor)


def same_tensors(tensors: tuple[Any, ...]) -> Callable[..., bool] | None:
    """Return the check that torch's compiled code applies to its inputs, or None if it cannot serve.

    It takes as many tensors. It compares types, dispatch keys (so layout, negation, conjugation and modes of torch),
    dtypes, devices, sizes and strides of all of them in one call. Some versions ignore `requires_grad` under
    ``no_grad``. A tensor that is given twice is refused.
    """
    if not all(map(is_plain_tensor, tensors)):
        return None  # reading an address would run the subclass
    torch = sys.modules["torch"]
    # Where `requires_grad` is ignored, one that requires none stands for a parameter.
    others = [
        each if type(each) is torch.Tensor else torch.Tensor._make_subclass(type(each), each.detach())  # noqa: SLF001
        for each in tensors
    ]
    for alike in (tensors, others):
        try:
            guards = importlib.import_module("torch._C._dynamo.guards")
            same: Callable[..., bool] = guards.TensorGuards(
                *alike, dynamic_dims_sizes=None, dynamic_dims_strides=None
            ).check
            if same(*tensors) is True:
                return same
        except Exception:  # noqa: BLE001  private to torch and may change; every array can be read by itself
            return None
    return None


def bare(op: str, name: str, value: Any) -> Any:
    """Return an array of NumPy or torch as a plain one that shares its memory. Return any other value unchanged.

    Raises
    ------
    InvalidProblem
        For a subclass whose memory does not hold its values: a masked array, or a tensor that wraps others.
    """
    if type(value) is np.ndarray:
        return value
    if isinstance(value, np.ndarray):
        if isinstance(value, np.ma.MaskedArray):
            rule = "have no mask: pass x.filled(value), or x.data if masked elements count, too"
            raise InvalidProblem(op, name, "a masked array", rule)
        return np.ndarray.view(value, np.ndarray)
    if not _is_torch(value):
        return value
    tensor = plain_tensor(value)
    if tensor is None:
        raise InvalidProblem(op, name, f"a {type(value).__name__}", UNWRAPPED)
    return tensor


def host_view(op: str, name: str, value: Any) -> npt.NDArray[Any]:
    """Return a host array as a plain ndarray that shares its memory. No code of a subclass runs, here or later.

    Raise `InvalidProblem` if it is not an array, has a mask, is on another device, or cannot be viewed without a copy.
    """
    if type(value) is np.ndarray:
        return value
    place = place_of(op, name, value)
    if place is None:
        raise InvalidProblem(op, name, shown(value), "be an array")
    if place != HOST_PLACE:
        where = place[0] if place[1] is None else f"{place[0]}:{place[1]}"
        raise InvalidProblem(op, name, f"an array on {where}", "be on the CPU, where this plan runs")
    array = bare(op, name, value)
    if isinstance(array, np.ndarray):
        return array
    try:
        if _is_torch(array):
            if array.requires_grad:
                raise InvalidProblem(op, name, "a tensor that requires grad", "be detached: pass x.detach()")
            return tensor_view(array)
        return np.from_dlpack(array)
    except (AttributeError, BufferError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidProblem(op, name, f"a {type(value).__name__}", f"be readable without a copy ({error})") from error


# Of any size: the array that views it has bounds. One type, because each takes long to make.
_Bytes: Any = ctypes.c_byte * (1 << 62)


class _Memory(_Bytes):  # type: ignore[misc]
    """Memory of a tensor, which it keeps alive."""

    __slots__ = ("tensor",)


def tensor_view(tensor: Any) -> npt.NDArray[Any]:
    """Return a plain torch tensor on the CPU as an array that shares its memory and keeps it alive.

    Torch never resizes memory again that ``tensor.numpy()`` has exported, which `fully_shard` must do.
    """
    torch = sys.modules["torch"]
    if not _DTYPES:
        _DTYPES.update({getattr(torch, name): np.dtype(name) for name in _NAMES})
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None or tensor.layout is not torch.strided or tensor.is_neg():
        found: npt.NDArray[Any] = tensor.detach().numpy()  # which says why not
        return found
    address = tensor.data_ptr()
    if not address and tensor.numel():
        raise RuntimeError("it has no memory")  # `fully_shard` has freed it, or torch only promises zeros
    memory = _Memory.from_address(address)
    memory.tensor = tensor
    if tensor.is_contiguous():
        return np.ndarray(tensor.shape, dtype, memory)
    return np.ndarray(tensor.shape, dtype, memory, 0, [stride * dtype.itemsize for stride in tensor.stride()])


def same_framework(values: Mapping[str, object]) -> Callable[[npt.NDArray[Any]], object]:
    """Return a function that converts a new NumPy array to the framework of the first array in `values`.

    For torch it returns tensors that share the memory; for any other framework it returns NumPy arrays.
    """
    first = next((value for value in values.values() if hasattr(value, "__dlpack_device__")), None)
    if first is None or not _is_torch(first):
        return lambda array: array
    torch = sys.modules["torch"]

    def wrap(array: npt.NDArray[Any]) -> object:
        if array.dtype == _BFLOAT16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    return wrap
