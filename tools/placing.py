"""Arrays of any layout between guard zones, on any device, seen byte for byte.

An `Image` is built on the host; a `Placement` takes its bytes to a device, views them there as an array, and brings
them back. So guard zones, strides and alignment are the same everywhere, and stated once.
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

from skuda.dispatch.device import Device
from skuda.registry.errors import MissingDependency

Array = npt.NDArray[Any]
Layout = Literal["contiguous", "wide", "misaligned", "crooked"]
LAYOUTS: tuple[Layout, ...] = ("contiguous", "wide", "misaligned", "crooked")
"""As they come; rows sliced out of a wider array; one element off; both, by an odd number of elements."""

_LATE = 100_000_000
"""Cycles of a GPU's clock, some 50 ms, for which inputs are held back: long beside a launch."""
GUARD = 256
"""Bytes before and behind an array; what is aligned at the buffer's start is aligned behind them."""

OUTSIDE = (0x55, 0x7F)
"""What lies around an array, in the first run and in the second: who reads it gets other bits."""
FLOATS = frozenset(np.dtype(kind) for kind in (np.float16, np.float32, np.float64, ml_dtypes.bfloat16))
_GAPS: dict[Layout, int] = {"wide": 8, "crooked": 3}


@dataclass(frozen=True)
class Geometry:
    """Where an array's elements lie in its buffer.

    Attributes
    ----------
    shape : tuple of int
        In stored elements.
    dtype : np.dtype
        As stored.
    strides : tuple of int
        In bytes.
    start, size : int
        First byte of the first element; bytes of the buffer.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    strides: tuple[int, ...]
    start: int
    size: int

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: np.dtype[Any], layout: Layout) -> Geometry:
        """Lay an array out.

        Parameters
        ----------
        shape : tuple of int
            In stored elements.
        dtype : np.dtype
            As stored.
        layout : str
            One of `LAYOUTS`; only arrays of two axes or more have rows to widen.
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
        """View a host buffer as the array."""
        return np.ndarray(self.shape, self.dtype, buffer, self.start, self.strides)

    @cached_property
    def outside(self) -> Array:
        """Which bytes of the buffer belong to no element."""
        mask = np.ones(self.size, bool)
        shape, strides = (*self.shape, self.dtype.itemsize), (*self.strides, 1)
        np.ndarray(shape, bool, mask, self.start, strides)[...] = False
        return mask


class Image:
    """An array between guard zones: what it was on the host, and where it is now.

    Parameters
    ----------
    geometry : Geometry
        Where the elements lie.
    content : array or int
        The elements, or the byte that each of their bytes is poisoned with.
    outside : int
        The byte that everything beside the elements is filled with.
    """

    def __init__(self, geometry: Geometry, content: Array | int, outside: int = OUTSIDE[0]) -> None:
        self.geometry, self.outside = geometry, outside
        self.before = np.full(geometry.size, outside, np.uint8)
        if isinstance(content, int):
            self.before[~geometry.outside] = content
        else:
            geometry.view(self.before)[...] = content

    def spilt(self, after: Array) -> int | None:
        """Return the first byte beside the elements that was written, relative to the first element; None if none."""
        touched = np.flatnonzero(self.geometry.outside & (after != self.outside))
        return int(touched[0]) - self.geometry.start if touched.size else None

    def changed(self, after: Array) -> int | None:
        """Return the first byte at all that was written, relative to the first element; None if none."""
        touched = np.flatnonzero(self.before != after)
        return int(touched[0]) - self.geometry.start if touched.size else None


class Placement(Protocol):
    """How bytes get to a device and back.

    Attributes
    ----------
    name : str
        The library that does it.
    """

    name: str

    def upload(self, content: Array) -> Any:
        """Return a copy of the bytes on the device."""

    def view(self, buffer: Any, geometry: Geometry) -> Any:
        """View a device buffer as an array.

        Raises
        ------
        TypeError
            For an element that the library does not have.
        """

    def download(self, buffer: Any) -> Array:
        """Return a copy of the bytes on the host, once everything enqueued is done."""


class HostPlacement:
    """NumPy arrays."""

    name = "numpy"

    def upload(self, content: Array) -> Any:
        """Return a copy."""
        return content.copy()

    def view(self, buffer: Any, geometry: Geometry) -> Any:
        """View the bytes."""
        return geometry.view(buffer)

    def download(self, buffer: Any) -> Array:
        """Return a copy."""
        return np.array(buffer)


class TorchPlacement:
    """Torch tensors.

    Parameters
    ----------
    device : str
        As torch names it; ``cpu`` too, for trying this without a GPU.
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
        """Return torch's name for a dtype.

        Raises
        ------
        TypeError
            Where it has none.
        """
        if dtype not in self._dtypes:
            raise TypeError(f"torch has no {dtype}")
        return self._dtypes[dtype]

    def upload(self, content: Array) -> Any:
        """Return a copy on the device."""
        return self.torch.from_numpy(content.copy()).to(self.device)

    def view(self, buffer: Any, geometry: Geometry) -> Any:
        """View the bytes; the start is a whole number of elements into the buffer, which torch asks for."""
        size = geometry.dtype.itemsize
        typed = buffer[geometry.start :]
        typed = typed[: typed.numel() // size * size].view(self.dtype(geometry.dtype))
        return typed.as_strided(geometry.shape, tuple(stride // size for stride in geometry.strides))

    def download(self, buffer: Any) -> Array:
        """Return a copy on the host."""
        return np.array(buffer.cpu().numpy())

    def late(self, buffers: Mapping[str, Any], contents: Mapping[str, Array]) -> Any:
        """Return a stream on which buffers get their contents after a while: who does not wait for it reads others."""
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
        """Wait for everything on a stream."""
        stream.synchronize()


class CupyPlacement:
    """CuPy arrays.

    Parameters
    ----------
    ordinal : int
        The device.
    """

    name = "cupy"

    def __init__(self, ordinal: int) -> None:
        self._cupy: Any = importlib.import_module("cupy")
        self._device = self._cupy.cuda.Device(ordinal)

    def upload(self, content: Array) -> Any:
        """Return a copy on the device."""
        with self._device:
            return self._cupy.asarray(content)

    def view(self, buffer: Any, geometry: Geometry) -> Any:
        """View the bytes."""
        if geometry.dtype == ml_dtypes.bfloat16:
            raise TypeError("CuPy has no bfloat16")
        data = buffer.data + geometry.start
        return self._cupy.ndarray(geometry.shape, geometry.dtype, memptr=data, strides=geometry.strides)

    def download(self, buffer: Any) -> Array:
        """Return a copy on the host."""
        with self._device:
            return np.asarray(self._cupy.asnumpy(buffer))


def placed(placement: Placement, images: Mapping[str, Image]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return device buffers that hold images, and the arrays in them, both by name."""
    buffers = {name: placement.upload(image.before) for name, image in images.items()}
    return buffers, {name: placement.view(buffers[name], image.geometry) for name, image in images.items()}


def placement_for(device: Device) -> Placement:
    """Return how arrays get to a device: through torch, through CuPy where torch is absent; NumPy for the CPU.

    Parameters
    ----------
    device : Device
        The device.

    Raises
    ------
    MissingDependency
        Where neither is installed.
    """
    if device.processor == "cpu":
        return HostPlacement()
    if find_spec("torch") is not None:
        return TorchPlacement(f"cuda:{device.ordinal or 0}")
    if find_spec("cupy") is not None:
        return CupyPlacement(device.ordinal or 0)
    raise MissingDependency("torch (or CuPy), which puts arrays on a GPU,", "pip install torch")


def bits_of(array: Array) -> Array:
    """Return an array's elements as unsigned integers."""
    return np.asarray(np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}").reshape(array.shape))


def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is one of the floating ones, bfloat16 included."""
    return dtype in FLOATS


def differing(got: Array, want: Array, ulps: int = 0) -> Array:
    """Return where two arrays differ by more than a number of representable values; NaN equals NaN.

    Parameters
    ----------
    got, want : array
        Of the same shape and dtype.
    ulps : int
        How far apart they may be; also for integers, where it counts codes.
    """
    a, b = bits_of(got), bits_of(want)
    apart = np.asarray(a != b)
    if is_float(got.dtype):
        with np.errstate(invalid="ignore"):  # a signalling NaN warns
            nan_got, nan_want = np.isnan(got), np.isnan(want)
        apart &= ~(nan_got & nan_want)
        if ulps:
            near = _distance(_ordered(a), _ordered(b)) <= ulps
            apart &= ~near | nan_got | nan_want
    elif ulps:
        apart &= _distance(got.astype(np.int64), want.astype(np.int64)) > ulps
    return apart


def _ordered(bits: Array) -> Array:
    """Map the bits of floats to integers in the floats' order; both zeros are 0."""
    top = 1 << (8 * bits.dtype.itemsize - 1)
    magnitude = (bits & bits.dtype.type(top - 1)).astype(np.int64)
    return np.asarray(np.where(bits & bits.dtype.type(top), -magnitude, magnitude))


def _distance(a: Array, b: Array) -> Array:
    """How far apart two s64 arrays are, or some large number where that would not fit."""
    most = 1 << 61
    across = np.minimum(np.abs(a), most) + np.minimum(np.abs(b), most)
    return np.asarray(np.where((a < 0) == (b < 0), np.abs(a - b), across))


def first_of(mask: Array) -> tuple[int, ...]:
    """Return the first coordinate at which a mask is set."""
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(mask)), mask.shape)) if mask.ndim else ()


def told(array: Array, at: tuple[int, ...]) -> str:
    """Return an element with its bits."""
    width = 2 * array.dtype.itemsize
    return f"{array[at]} (0x{int(bits_of(array)[at]):0{width}x})"


def stored_bytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """Return how many bytes an array takes."""
    return math.prod(shape) * dtype.itemsize
