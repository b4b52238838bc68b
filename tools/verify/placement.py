"""Arrays of any layout between guard zones, on any device, with access to every byte.

Each array of a call lies in a buffer of its own, so a sanitizer sees accesses beside it. The buffer is built on the
host, copied to a device, viewed there as an array, and copied back: the layout is the same on every device.
"""

from __future__ import annotations

import importlib
from collections.abc import Container, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from skuda.dispatch.host.rules import WRITTEN
from skuda.kernels.draw import Drawn
from skuda.kernels.dtypes import storage_dtype
from skuda.registry.descriptor import Descriptor, Role, storage_shape
from skuda.registry.device import Device
from skuda.registry.errors import MissingDependency

Array = npt.NDArray[Any]
Layout = Literal["contiguous", "wide", "misaligned", "crooked", "transposed", "strided", "reversed"]
LAYOUTS: tuple[Layout, ...] = ("contiguous", "wide", "misaligned", "crooked", "transposed", "strided", "reversed")
"""Contiguous; rows of a wider array, at multiples of 16 elements; shifted by one element; both, with an odd gap; the
first axis dense; ``x[..., ::2]`` of a larger array; ``x[..., ::-1]``."""

GUARD = 256
"""Bytes of the guard zone before and after an array; a multiple of every alignment that matters."""
OUTSIDE = (0x55, 0x7F)
"""Bytes around arrays in the first and the second run; a kernel that reads them gives different bits."""
FLOATS = frozenset(np.dtype(kind) for kind in (np.float16, np.float32, np.float64, ml_dtypes.bfloat16))

_LATE = 100_000_000
"""GPU clock cycles, about 50 ms, by which inputs are delayed: long compared with a launch."""
_POISON = (0xFF, 0x6B)
"""Poison of outputs in the two runs, NaN for floats in the first; an element left unwritten differs between them."""
_SCRATCH_GIVEN = ("contiguous", "crooked", "strided")
"""Layouts in which optional scratch is passed; in the others the plan must allocate it."""


@dataclass(frozen=True)
class Geometry:
    """Position of an array in a buffer: shape in stored elements, strides, first element and buffer size in bytes."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    strides: tuple[int, ...]
    start: int
    size: int

    @classmethod
    def of(
        cls, shape: tuple[int, ...], dtype: np.dtype[Any], layout: Layout = "contiguous", number: int = 0
    ) -> Geometry:
        """Return the geometry of an array in a layout; arrays with other numbers have other gaps between rows."""
        last, size = len(shape) - 1, dtype.itemsize
        strides, step = [0] * len(shape), 2 * size if layout == "strided" else size
        for axis in range(len(shape)) if layout == "transposed" else range(last, -1, -1):
            strides[axis] = step
            extent = max(1, shape[axis])
            if axis == last > 0 and layout == "wide":
                extent += -extent % 16 + 16 * (number + 1)
            elif axis == last > 0 and layout == "crooked":
                extent += 3 + 2 * number
            step *= extent
        start = GUARD + (size if layout in ("misaligned", "crooked") else 0)
        end = start + step + GUARD
        if layout == "reversed" and shape:
            start += (max(1, shape[last]) - 1) * size
            strides[last] = -size
        return cls(shape, dtype, tuple(strides), start, end + -end % GUARD)

    @property
    def dense(self) -> bool:
        """Whether the elements follow each other without gaps, in the order of their indices."""
        return self.strides == Geometry.of(self.shape, self.dtype).strides

    def view(self, buffer: Array) -> Array:
        """Return the array as a view of a host buffer."""
        return np.ndarray(self.shape, self.dtype, buffer, self.start, self.strides)

    def bytes_of(self, buffer: Array) -> Array:
        """Return a view of a host buffer, or of a mask of its bytes, with one more axis: the bytes of an element."""
        shape, strides = (*self.shape, self.dtype.itemsize), (*self.strides, 1)
        return np.ndarray(shape, buffer.dtype, buffer, self.start, strides)


class HostPlacement:
    """Moves bytes to a device and back; this one stays on the host, with NumPy's arrays.

    `name` is the library that does it, and `layouts` are those that it can view.
    """

    name = "numpy"
    layouts: tuple[Layout, ...] = LAYOUTS

    def upload(self, content: Array) -> Any:
        """Return a copy of the bytes on the device."""
        return content.copy()

    def view(self, buffer: Any, geometry: Geometry) -> Any:
        """Return the array as a view of a device buffer; raise `TypeError` if the library has no such dtype."""
        return geometry.view(buffer)

    def download(self, buffer: Any) -> Array:
        """Return a copy of the bytes on the host, after all enqueued work."""
        return np.array(buffer)

    def full(self, size: int, byte: int) -> Any:
        """Return a device buffer filled with one byte; its views support slicing, assignment and comparison."""
        return np.full(size, byte, np.uint8)

    def release(self) -> None:
        """Free cached memory, so that the driver can allocate the kernels' scratch from it."""


Placement = HostPlacement
"""What every placement derives from."""


class TorchPlacement(HostPlacement):
    """Torch tensors on the device with torch's name; ``cpu`` allows tests without a GPU."""

    name = "torch"
    layouts = LAYOUTS[:-1]  # torch has no negative strides

    def __init__(self, device: str) -> None:
        torch: Any = importlib.import_module("torch")
        self.torch, self.device = torch, device
        names = ("float16", "float32", "float64", "int8", "uint8", "int32", "int64")
        self._dtypes = {np.dtype(name): getattr(torch, name) for name in names}
        self._dtypes[np.dtype(ml_dtypes.bfloat16)] = torch.bfloat16

    def upload(self, content: Array) -> Any:
        """Return a copy on the device."""
        return self.torch.from_numpy(content.copy()).to(self.device)

    def view(self, buffer: Any, geometry: Geometry) -> Any:
        """Return the array as a view of the bytes."""
        if geometry.dtype not in self._dtypes:
            raise TypeError(f"torch has no {geometry.dtype}")
        size = geometry.dtype.itemsize
        strides = tuple(stride // size for stride in geometry.strides)
        return buffer.view(self._dtypes[geometry.dtype]).as_strided(geometry.shape, strides, geometry.start // size)

    def download(self, buffer: Any) -> Array:
        """Return a copy on the host."""
        return np.array(buffer.cpu().numpy())

    def full(self, size: int, byte: int) -> Any:
        """Return a device buffer filled with one byte."""
        return self.torch.full((size,), byte, dtype=self.torch.uint8, device=self.device)

    def release(self) -> None:
        """Empty torch's cache of GPU memory."""
        self.torch.cuda.empty_cache()

    def late(self, call: PlacedArguments) -> Any:
        """Return a stream that fills a call's buffers after a delay; work that does not wait reads the old bytes."""
        ready, stream = {k: self.upload(v) for k, v in call.before.items()}, self.torch.cuda.Stream(self.device)
        self.torch.cuda.synchronize(self.device)
        with self.torch.cuda.stream(stream):
            self.torch.cuda._sleep(_LATE)  # noqa: SLF001  torch has no public delay
            for name, content in ready.items():
                call.buffers[name].copy_(content)
        return stream

    def finish(self, stream: Any) -> None:
        """Wait for all work on a stream."""
        stream.synchronize()


def placement_for(device: Device) -> Placement:
    """Return the placement for a device: NumPy for the CPU, torch for a GPU.

    Raises
    ------
    MissingDependency
        If torch is needed and not installed.
    """
    if device.processor == "cpu":
        return HostPlacement()
    if find_spec("torch") is None:
        raise MissingDependency("torch, which puts arrays on a GPU,", "pip install torch")
    return TorchPlacement(f"cuda:{device.ordinal or 0}")


class PlacedArray(NamedTuple):
    """An array of a call: its role, its geometry, and its elements or the byte that poisons them."""

    role: Role
    geometry: Geometry
    content: Array | int


class PlacedArguments:
    """The arguments of one call on a device: arrays, each between guard zones in its own buffer, and numbers.

    The bytes outside of the arrays' elements are `outside`. By name of the array, `before` has the bytes that were
    uploaded, `buffers` those on the device, and `arrays` the views that the kernel takes.
    """

    def __init__(
        self,
        placement: Placement,
        parts: Mapping[str, PlacedArray],
        numbers: Mapping[str, Any],
        outside: int = OUTSIDE[0],
    ) -> None:
        self.placement, self.parts, self.numbers = placement, dict(parts), dict(numbers)
        self.before = {name: np.full(part.geometry.size, outside, np.uint8) for name, part in parts.items()}
        for name, part in parts.items():
            self._write(name, part.content)
        self.buffers = {name: placement.upload(content) for name, content in self.before.items()}
        self.arrays = {name: placement.view(self.buffers[name], part.geometry) for name, part in parts.items()}

    @classmethod
    def of(
        cls,
        placement: Placement,
        problem: Descriptor,
        drawn: Drawn,
        layout: Layout = "contiguous",
        turn: int = 0,
        dense: Container[str] = (),
    ) -> PlacedArguments:
        """Lay out drawn inputs and poisoned outputs of a problem.

        `turn`, 0 or 1, selects the poison and the bytes around the arrays. The arrays in `dense` have no gaps.
        """
        parts: dict[str, PlacedArray] = {}
        numbers: dict[str, Any] = {}
        for number, argument in enumerate(problem.arguments()):
            name, role, value = argument.name, argument.role, drawn.inputs.get(argument.name)
            how: Layout = layout if name not in dense else "misaligned" if layout == "crooked" else "contiguous"
            if role is Role.OUTPUT or (role is Role.SCRATCH and (argument.required or layout in _SCRATCH_GIVEN)):
                element = argument.elements[0]
                shape, dtype = storage_shape(drawn.shapes[name], element), storage_dtype(element)
                poison = _POISON[turn] if is_float(dtype) or turn else 0xA6
                parts[name] = PlacedArray(role, Geometry.of(shape, dtype, how, number), poison)
            elif isinstance(value, np.ndarray):
                parts[name] = PlacedArray(role, Geometry.of(value.shape, value.dtype, how, number), value)
            elif value is not None:
                numbers[name] = value
        return cls(placement, parts, numbers, OUTSIDE[turn])

    @property
    def outputs(self) -> dict[str, Any]:
        """The outputs, by name."""
        return {name: self.arrays[name] for name, part in self.parts.items() if part.role is Role.OUTPUT}

    @property
    def written(self) -> dict[str, Any]:
        """The outputs and what is written in place, by name."""
        return {name: self.arrays[name] for name, part in self.parts.items() if part.role in (Role.OUTPUT, Role.STATE)}

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments, by name."""
        return {**self.arrays, **self.numbers}

    @property
    def inputs(self) -> dict[str, Any]:
        """All arguments but the outputs, by name."""
        return {name: value for name, value in self.arguments.items() if name not in self.outputs}

    def _write(self, name: str, content: Array | int) -> None:
        geometry, buffer = self.parts[name].geometry, self.before[name]
        if isinstance(content, int):
            geometry.bytes_of(buffer)[...] = content
        else:
            geometry.view(buffer)[...] = content

    def rewrite(self, **contents: Array) -> None:
        """Replace the elements of some arrays on the device, and poison the outputs again."""
        for name, content in contents.items():
            self._write(name, content)
        for name, buffer in self.buffers.items():
            buffer[...] = self.placement.upload(self.before[name])

    def contents(self, *names: str) -> dict[str, Array]:
        """Return the present elements of some arrays; by default of the outputs and of what is written in place."""
        wanted = names or self.written
        return {n: np.array(self.parts[n].geometry.view(self.placement.download(self.buffers[n]))) for n in wanted}

    def spoilt(self, *, allow_outputs: bool = True) -> tuple[str, int] | None:
        """Return where a byte has changed: the array, and the offset from its first element; None if none has.

        With `allow_outputs`, elements of outputs, of scratch and of what is written in place may change.
        """
        for name, (role, geometry, _) in self.parts.items():
            changed = self.placement.download(self.buffers[name]) != self.before[name]
            if allow_outputs and role in WRITTEN:
                geometry.bytes_of(changed)[...] = False
            if changed.any():
                return name, int(np.argmax(changed)) - geometry.start
        return None


def is_float(dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype is a floating one, bfloat16 included."""
    return dtype in FLOATS
