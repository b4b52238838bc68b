"""Arrays of any framework: where they live, and how host arrays are seen as NumPy without a copy.

No framework is imported here: an array reports its own device (``__dlpack_device__``, ``__cuda_array_interface__``),
and a torch tensor exists only if the caller has imported torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from skuda.registry.errors import InvalidProblem

Place = tuple[str, int | None]
"""Kind of processor and ordinal, for example ``("cuda", 0)``; the ordinal is None where only the driver knows it."""

HOST_PLACE: Place = ("cpu", 0)

# Device types of the DLPack standard.
_DLPACK = {1: "cpu", 2: "cuda", 3: "cpu", 13: "cuda"}


def place_of(op: str, name: str, value: Any) -> Place | None:
    """Return the device of an argument; None for a number.

    Raises
    ------
    InvalidProblem
        If the value is neither an array nor a number, or lives on a device of an unknown kind.
    """
    if isinstance(value, (np.ndarray, np.memmap)):
        return HOST_PLACE
    if isinstance(value, (bool, int, float, np.generic)):
        return None
    if _is_torch(value) and value.device.type in {"cpu", "cuda"}:
        # __dlpack_device__ is slow, and raises for a tensor that requires grad, which deserves a clearer error.
        return HOST_PLACE if value.device.type == "cpu" else ("cuda", value.get_device())
    if hasattr(value, "__dlpack_device__"):
        try:
            kind, ordinal = value.__dlpack_device__()
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
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


def host_view(op: str, name: str, value: Any) -> npt.NDArray[Any]:
    """Return a NumPy view of a host array, sharing its memory.

    Raises
    ------
    InvalidProblem
        If the array cannot be viewed without a copy.
    """
    if isinstance(value, np.ndarray):
        return value
    try:
        if _is_torch(value):
            if value.requires_grad:
                raise InvalidProblem(op, name, "a tensor that requires grad", "be detached: pass x.detach()")
            if value.dtype == sys.modules["torch"].bfloat16:
                return np.asarray(value.view(sys.modules["torch"].int16).numpy()).view(ml_dtypes.bfloat16)
            return np.asarray(value.numpy())
        return np.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidProblem(op, name, f"a {type(value).__name__}", f"be readable without a copy ({error})") from error


def same_framework(values: Mapping[str, object]) -> Callable[[npt.NDArray[Any]], object]:
    """Return a function that converts a new NumPy array to the framework of the first array in `values`.

    For torch it returns tensors that share the memory; for any other framework it returns NumPy arrays.
    """
    first = next((value for value in values.values() if hasattr(value, "__dlpack_device__")), None)
    if first is None or not _is_torch(first):
        return lambda array: array
    torch = sys.modules["torch"]

    def wrap(array: npt.NDArray[Any]) -> object:
        if array.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    return wrap
