"""Arrays of any layout between guard zones, on any device, with access to every byte.

An `Image` is built on the host. A `Placement` copies its bytes to a device, views them there as an array, and copies
them back. Guard zones, strides and alignment are therefore the same on every device.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any, Literal, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from skuda.kernels.draw import Drawn
from skuda.kernels.dtypes import storage_dtype
from skuda.registry.descriptor import Argument, Role, storage_shape
from skuda.registry.device import Device
from skuda.registry.errors import MissingDependency

Array = npt.NDArray[Any]
Layout = Literal["contiguous", "wide", "misaligned", "crooked"]
LAYOUTS: tuple[Layout, ...] = ("contiguous", "wide", "misaligned", "crooked")
"""Contiguous; rows of a wider array; shifted by one element; both, with a gap of an odd number of elements."""

_LATE = 100_000_000
"""GPU clock cycles, about 50 ms, by which inputs are delayed: long compared with a launch."""
GUARD = 256
"""Bytes of the guard zone before and after an array; a multiple of every alignment that matters."""

OUTSIDE = (0x55, 0x7F)
"""Bytes around an array in the first and the second run; a kernel that reads them gives different bits."""
FLOATS = frozenset(np.dtype(kind) for kind in (np.float16, np.float32, np.float64, ml_dtypes.bfloat16))
_POISON = (0xFF, 0x6B)
"""Poison of outputs in the two runs, NaN for floats in the first; an element left unwritten differs between them."""

_GAPS: dict[Layout, int] = {"wide": 8, "crooked": 3}


@dataclass(frozen=True)
class Geometry:
    """Position of an array's elements in its buffer.

    Attributes
    ----------
    shape : tuple of int
        Extents in stored elements.
    dtype : np.dtype
        Storage dtype.
    strides : tuple of int
        Strides in bytes.
    start, size : int
        Offset of the first element and size of the buffer, in bytes.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    strides: tuple[int, ...]
    start: int
    size: int

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: np.dtype[Any], layout: Layout) -> Geometry:
        """Return the geometry of an array in a layout.

        Parameters
        ----------
        shape : tuple of int
            Extents in stored elements.
        dtype : np.dtype
            Storage dtype.
        layout : str
            One of `LAYOUTS`; arrays of fewer than two axes have no gaps between rows.
        """
        gap = _GAPS.get(layout, 0) if len(shape) > 1 else 0
        strides, step = [0] * len(shape), dtype.itemsize
        for axis in range(len(shape) - 1, -1, -1):
            strides[axis] = step
            step *= max(1, shape[axis]) + (gap if axis == len(shape) - 1 else 0)
        start = GUARD + (dtype.itemsize if layout in ("misaligned", "crooked") else 0)
        size = start + step + GUARD
        return cls(shape, dtype, tuple(strides), start, size + -size % 8)

    @property
    def plain(self) -> bool:
        """Whether there are no gaps between rows."""
        return self.strides == Geometry.of(self.shape, self.dtype, "contiguous").strides

    def view(self, buffer: Array) -> Array:
        """Return the array as a view of a host buffer."""
        return np.ndarray(self.shape, self.dtype, buffer, self.start, self.strides)

    @cached_property
    def outside(self) -> Array:
        """Mask of the buffer's bytes that belong to no element."""
        mask = np.ones(self.size, bool)
        shape, strides = (*self.shape, self.dtype.itemsize), (*self.strides, 1)
        np.ndarray(shape, bool, mask, self.start, strides)[...] = False
        return mask


class Image:
    """The bytes of an array and of its guard zones, as they are before a run.

    Parameters
    ----------
    geometry : Geometry
        Position of the elements.
    content : array or int
        The elements, or the byte that poisons all of them.
    outside : int
        The byte that fills everything outside the elements.
    """

    def __init__(self, geometry: Geometry, content: Array | int, outside: int = OUTSIDE[0]) -> None:
        self.geometry, self.outside = geometry, outside
        self.before = np.full(geometry.size, outside, np.uint8)
        if isinstance(content, int):
            self.before[~geometry.outside] = content
        else:
            geometry.view(self.before)[...] = content

    def spilt(self, after: Array) -> int | None:
        """Return the offset, from the first element, of the first byte written outside the elements, or None."""
        touched = np.flatnonzero(self.geometry.outside & (after != self.outside))
        return int(touched[0]) - self.geometry.start if touched.size else None

    def changed(self, after: Array) -> int | None:
        """Return the offset, from the first element, of the first byte that changed, or None."""
        touched = np.flatnonzero(self.before != after)
        return int(touched[0]) - self.geometry.start if touched.size else None


class Placement(Protocol):
    """Moves bytes to a device and back; `name` is the library that does it."""

    name: str

    def upload(self, content: Array) -> Any:
        """Return a copy of the bytes on the device."""

    def view(self, buffer: Any, geometry: Geometry) -> Any:
        """Return the array as a view of a device buffer.

        Raises
        ------
        TypeError
            If the library has no such dtype.
        """

    def download(self, buffer: Any) -> Array:
        """Return a copy of the bytes on the host, after all enqueued work."""

    def full(self, size: int, byte: int) -> Any:
        """Return a device buffer filled with one byte; its views support slicing, assignment and comparison."""

    def release(self) -> None:
        """Free cached memory, so that the driver can allocate the kernels' scratch from it."""


class HostPlacement:
    """NumPy arrays on the host."""

    name = "numpy"

    def upload(self, content: Array) -> Any:
        """Return a copy."""
        return content.copy()

    def view(self, buffer: Any, geometry: Geometry) -> Any:
        """Return the array as a view of the bytes."""
        return geometry.view(buffer)

    def download(self, buffer: Any) -> Array:
        """Return a copy."""
        return np.array(buffer)

    def full(self, size: int, byte: int) -> Any:
        """Return a buffer filled with one byte."""
        return np.full(size, byte, np.uint8)

    def release(self) -> None:
        """Do nothing: NumPy caches no memory."""


class TorchPlacement:
    """Torch tensors.

    Parameters
    ----------
    device : str
        Torch's name of the device; ``cpu`` allows tests without a GPU.
    """

    name = "torch"

    def __init__(self, device: str) -> None:
        torch: Any = importlib.import_module("torch")
        self.torch = torch
        self.device = device
        self._dtypes = {
            np.dtype(ml_dtypes.bfloat16): torch.bfloat16,
            np.dtype(np.float16): torch.float16,
            np.dtype(np.float32): torch.float32,
            np.dtype(np.float64): torch.float64,
            np.dtype(np.int8): torch.int8,
            np.dtype(np.uint8): torch.uint8,
            np.dtype(np.int32): torch.int32,
            np.dtype(np.int64): torch.int64,
        }

    def dtype(self, dtype: np.dtype[Any]) -> Any:
        """Return torch's dtype; raise `TypeError` if there is none."""
        if dtype not in self._dtypes:
            raise TypeError(f"torch has no {dtype}")
        return self._dtypes[dtype]

    def upload(self, content: Array) -> Any:
        """Return a copy on the device."""
        return self.torch.from_numpy(content.copy()).to(self.device)

    def view(self, buffer: Any, geometry: Geometry) -> Any:
        """Return the array as a view of the bytes; torch requires a start at a whole number of elements."""
        size = geometry.dtype.itemsize
        typed = buffer[geometry.start :]
        typed = typed[: typed.numel() // size * size].view(self.dtype(geometry.dtype))
        return typed.as_strided(geometry.shape, tuple(stride // size for stride in geometry.strides))

    def download(self, buffer: Any) -> Array:
        """Return a copy on the host."""
        return np.array(buffer.cpu().numpy())

    def full(self, size: int, byte: int) -> Any:
        """Return a device buffer filled with one byte."""
        return self.torch.full((size,), byte, dtype=self.torch.uint8, device=self.device)

    def release(self) -> None:
        """Empty torch's cache of GPU memory."""
        self.torch.cuda.empty_cache()

    def late(self, buffers: Mapping[str, Any], contents: Mapping[str, Array]) -> Any:
        """Return a stream that fills buffers after a delay; work that does not wait for it reads the old bytes."""
        ready = {name: self.upload(content) for name, content in contents.items()}
        stream = self.torch.cuda.Stream(self.device)
        self.torch.cuda.synchronize(self.device)
        with self.torch.cuda.stream(stream):
            self.torch.cuda._sleep(_LATE)  # noqa: SLF001  torch has no public delay
            for name, content in ready.items():
                buffers[name].copy_(content)
        return stream

    @staticmethod
    def finish(stream: Any) -> None:
        """Wait for all work on a stream."""
        stream.synchronize()


class CupyPlacement:
    """CuPy arrays on the device with an ordinal."""

    name = "cupy"

    def __init__(self, ordinal: int) -> None:
        self._cupy: Any = importlib.import_module("cupy")
        self._device = self._cupy.cuda.Device(ordinal)

    def upload(self, content: Array) -> Any:
        """Return a copy on the device."""
        with self._device:
            return self._cupy.asarray(content)

    def view(self, buffer: Any, geometry: Geometry) -> Any:
        """Return the array as a view of the bytes."""
        if geometry.dtype == ml_dtypes.bfloat16:
            raise TypeError("CuPy has no bfloat16")
        data = buffer.data + geometry.start
        return self._cupy.ndarray(geometry.shape, geometry.dtype, memptr=data, strides=geometry.strides)

    def download(self, buffer: Any) -> Array:
        """Return a copy on the host."""
        with self._device:
            return np.asarray(self._cupy.asnumpy(buffer))

    def full(self, size: int, byte: int) -> Any:
        """Return a device buffer filled with one byte."""
        with self._device:
            return self._cupy.full(size, byte, self._cupy.uint8)

    def release(self) -> None:
        """Free the blocks in CuPy's memory pool."""
        self._cupy.get_default_memory_pool().free_all_blocks()


def placed(placement: Placement, images: Mapping[str, Image]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the device buffers of images and the arrays in them, both by name."""
    buffers = {name: placement.upload(image.before) for name, image in images.items()}
    return buffers, {name: placement.view(buffers[name], image.geometry) for name, image in images.items()}


def images_of(
    arguments: tuple[Argument, ...], drawn: Drawn, layout: Layout, turn: int
) -> tuple[dict[str, Image], dict[str, Any]]:
    """Return an image of every array, with poisoned outputs, and the scalars; both by name.

    Parameters
    ----------
    arguments : tuple of Argument
        The problem's arguments.
    drawn : Drawn
        Its inputs.
    layout : str
        Memory layout of the arrays.
    turn : int
        Number of the run, 0 or 1; selects the poison and the bytes around the arrays.
    """
    images: dict[str, Image] = {}
    numbers: dict[str, Any] = {}
    for argument in arguments:
        name = argument.name
        value = drawn.inputs.get(name)
        if argument.role in (Role.OUTPUT, Role.SCRATCH):
            # In half of the layouts the plan must allocate optional scratch itself.
            if argument.required or argument.role is Role.OUTPUT or layout in ("contiguous", "crooked"):
                element = argument.elements[0]
                shape, dtype = storage_shape(drawn.shapes[name], element), storage_dtype(element)
                poison = _POISON[turn] if is_float(dtype) or turn else 0xA6
                images[name] = Image(Geometry.of(shape, dtype, layout), poison, OUTSIDE[turn])
        elif isinstance(value, np.ndarray):
            images[name] = Image(Geometry.of(value.shape, value.dtype, layout), value, OUTSIDE[turn])
        elif value is not None:
            numbers[name] = value
    return images, numbers


def placement_for(device: Device) -> Placement:
    """Return the placement for a device: NumPy for the CPU, torch for a GPU, or CuPy if torch is not installed.

    Raises
    ------
    MissingDependency
        If neither torch nor CuPy is installed.
    """
    if device.processor == "cpu":
        return HostPlacement()
    if find_spec("torch") is not None:
        return TorchPlacement(f"cuda:{device.ordinal or 0}")
    if find_spec("cupy") is not None:
        return CupyPlacement(device.ordinal or 0)
    raise MissingDependency("torch (or CuPy), which puts arrays on a GPU,", "pip install torch")


def is_float(dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype is a floating one, bfloat16 included."""
    return dtype in FLOATS


def stored_bytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """Return the size of a contiguous array in bytes."""
    return math.prod(shape) * dtype.itemsize
