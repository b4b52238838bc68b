"""A CUDA SKU run on NumPy arrays: arrays of every layout that it serves, and its launch rule evaluated for them."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from harness import emulator
from harness.emulator import SANITIZED, Library, Value
from support import Guarded, arguments_of

from skuda.dispatch.host.rules import number
from skuda.kernels.dtypes import storage_dtype
from skuda.kernels.launch import (
    ZEROS,
    Columns,
    Constant,
    Launch,
    Leading,
    Number,
    Parameter,
    Pointer,
    Rows,
    TensorMap,
    Which,
)
from skuda.registry.descriptor import Argument, Descriptor, Role, storage_shape
from skuda.registry.device import Device
from skuda.registry.elements import ElementKind
from skuda.registry.sku import KernelSku
from skuda.registry.source import resolve

Shape = tuple[int, ...]
_LETTER = {ElementKind.S32: "i", ElementKind.S64: "l", ElementKind.F32: "f", ElementKind.F64: "d"}


# --- arrays ----------------------------------------------------------------------------------------------------------


def forbid(made: Guarded, *, forbidden: bool = True) -> None:
    """Tell AddressSanitizer whether the bytes beside the elements may be touched."""
    poison, allow = _poisoning()
    allow(made.bytes.ctypes.data, made.bytes.size)
    edges = np.flatnonzero(np.diff(made.outside, prepend=False, append=False))
    for start, end in edges.reshape(-1, 2) if forbidden else ():
        poison(made.bytes.ctypes.data + int(start), int(end - start))


@cache
def _poisoning():
    symbols = ctypes.CDLL(None)
    functions = symbols.__asan_poison_memory_region, symbols.__asan_unpoison_memory_region
    for function in functions:
        function.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        function.restype = None
    return functions


def _contiguous(shape: Shape, itemsize: int, axis: int = 0, pad: int = 0) -> Shape:
    """Return byte strides with `pad` bytes after each run of the axes from `axis` on."""
    strides, span = [0] * len(shape), itemsize
    for i in reversed(range(len(shape))):
        span += pad if i == axis - 1 else 0
        strides[i] = span
        span *= max(shape[i], 1)
    return tuple(strides)


def place(
    problem: Descriptor, launch: Launch, shapes: Mapping[str, Shape], values: Mapping[str, Any], rng: Any
) -> dict[str, Any]:
    """Return arguments by name: arrays in any layout that the launch serves, numbers as they are.

    Inputs are copied; outputs and scratch arrays are poisoned.
    """
    parameters = [p for step in launch.steps for p in step.parameters]
    # What a map may read instead of a scratch buffer is contiguous, as that is.
    asked = {p.name for p in parameters if isinstance(p, Leading) or (isinstance(p, TensorMap) and not p.otherwise)}
    aligned = {*launch.aligned, *(p.name for p in parameters if isinstance(p, TensorMap))}
    axis = _shared_axis([a for a in problem.arguments() if a.name in launch.view], shapes, rng)
    placed: dict[str, Any] = {}
    for argument in problem.arguments():
        name, value = argument.name, values.get(argument.name)
        written = argument.role in (Role.OUTPUT, Role.SCRATCH)
        if not written and not isinstance(value, np.ndarray):
            placed[name] = value
            continue
        dtype = storage_dtype(argument.elements[0]) if written else value.dtype
        shape = storage_shape(shapes[name], argument.elements[0]) if written else value.shape
        rows = axis if name in launch.view else len(shape) - 1
        pad = _pad(shape, dtype.itemsize, rows, rng) if name in asked and rows > 0 else 0
        offset = int(rng.integers(1, 17)) * dtype.itemsize if rng.random() < 0.3 else 0
        if name in aligned:
            pad, offset = -(-pad // 16) * 16, offset // dtype.itemsize * 16
        array = Guarded(shape, dtype, _contiguous(shape, dtype.itemsize, rows, pad), offset)
        placed[name] = array if written else array.fill(value)
    return placed


def _shared_axis(view: list[Argument], shapes: Mapping[str, Shape], rng: Any) -> int:
    """Pick the axis before which arrays of one view may have gaps; elsewhere they would have no leading stride."""
    shape = shapes[view[0].name] if view else ()
    if not any(argument.elements[0].is_packed for argument in view):
        return int(rng.integers(0, len(shape), endpoint=True))
    # Packed rows start at a byte.
    return len(shape) - 1 if shape[-1] % 2 else int(rng.integers(0, max(len(shape), 1)))


def _pad(shape: Shape, itemsize: int, axis: int, rng: Any) -> int:
    """Return bytes between rows: none, a few elements, or as many as make rows start at 16-byte boundaries."""
    row = itemsize * math.prod(shape[axis:])
    return int(rng.choice([0, itemsize * rng.integers(1, 4), -row % 16, -row % 16 + 16]))


# --- launch rules ----------------------------------------------------------------------------------------------------


def run_steps(
    library: Library,
    launch: Launch,
    problem: Descriptor,
    placed: Mapping[str, Any],
    shapes: Mapping[str, Shape],
) -> None:
    """Run everything that a launch rule says, in order."""
    arguments = {argument.name: argument for argument in problem.arguments()}
    arrays = {name: value.array if isinstance(value, Guarded) else value for name, value in placed.items()}
    scratch = {name: Guarded((size,), np.uint8) for name, size in launch.scratch}
    if ZEROS in scratch:
        scratch[ZEROS].fill(0)
    arrays |= {name: made.array for name, made in scratch.items()}
    view = _view(launch, arguments, arrays, shapes)
    memory = [value for value in (*placed.values(), *scratch.values()) if isinstance(value, Guarded)]
    for made in memory if SANITIZED else ():
        forbid(made)
    for step in launch.steps:
        if 0 in step.grid:
            continue
        values = [_value(parameter, problem, arguments, arrays, view) for parameter in step.parameters]
        library.launch(step.entry, step.grid, step.block, step.shared, values, overlaps=step.overlaps)
    for made in memory if SANITIZED else ():
        forbid(made, forbidden=False)
    for made in scratch.values():
        made.assert_only_elements_written()
    assert ZEROS not in scratch or not scratch[ZEROS].array.any()


def ran(
    sku: KernelSku, problem: Descriptor, inputs: Mapping[str, Any], device: Device, rng: Any, *choice: str
) -> dict[str, Any]:
    """Run a kernel on inputs laid out in any way that it serves, and return what was placed, by name.

    Nothing but the elements of what it writes may change.
    """
    launch = launch_of(sku, problem, device, *choice)
    shapes = {argument.name: argument.shape for argument in problem.arguments()}
    placed = place(problem, launch, shapes, inputs, rng)
    run_steps(emulator.load(emulator.Unit.of(sku).configured(launch.flags)), launch, problem, placed, shapes)
    assert_nothing_else_written(problem, placed)
    return placed


def assert_nothing_else_written(problem: Descriptor, placed: Mapping[str, Any]) -> None:
    """Check that inputs are as before, and the bytes beside all elements. An input may be an output, too."""
    written = {id(placed[a.name]) for a in arguments_of(problem, Role.OUTPUT, Role.SCRATCH, Role.STATE)}
    for array in (value for value in placed.values() if isinstance(value, Guarded)):
        array.assert_only_elements_written()
        if id(array) not in written:
            array.assert_unchanged()


def _value(
    parameter: Parameter,
    problem: Descriptor,
    arguments: Mapping[str, Argument],
    arrays: Mapping[str, Any],
    view: Mapping[str, int],
) -> Value:
    match parameter:
        case Rows():
            return "l", view["rows"]
        case Columns():
            return "l", view["columns"]
        case Constant(element, value):
            return _LETTER[element], value
        case Pointer(name):
            return "p", arrays[name].ctypes.data if isinstance(arrays.get(name), np.ndarray) else 0
        case TensorMap():
            return "m", _map(parameter, arrays)
        case Leading(name):
            return "l", view[name] if name in view else _leading(arrays[name])
        case Which(name):
            return "i", _which(arguments[name], arrays[name])
        case Number(name, element):
            value = arrays[name]
            if value is None or isinstance(value, np.ndarray):
                return _LETTER[element], 0
            rounded = number(problem.op_name(), arguments[name], value)
            return _LETTER[element], int(rounded) if element in (ElementKind.S32, ElementKind.S64) else float(rounded)
    raise AssertionError(parameter)


def _which(argument: Argument, value: Any) -> int:
    elements = [storage_dtype(element) for element in argument.elements]
    return elements.index(value.dtype) if isinstance(value, np.ndarray) else 0


def _map(wanted: TensorMap, arrays: Mapping[str, Any]) -> tuple[int, ...]:
    """Return what hopper.h takes for a tensor map."""
    given = arrays[wanted.name]
    matrix = given if isinstance(given, np.ndarray) else arrays[wanted.otherwise]
    leading = wanted.columns if matrix.ndim == 1 else _leading(matrix)  # a scratch buffer is bytes
    return matrix.ctypes.data, leading, wanted.rows, wanted.columns, wanted.box_rows


def _leading(matrix: np.ndarray) -> int:
    return (matrix.strides[-2] if matrix.ndim > 1 and matrix.shape[-2] > 1 else matrix.nbytes) // matrix.itemsize


def _view(
    launch: Launch, arguments: Mapping[str, Argument], arrays: Mapping[str, Any], shapes: Mapping[str, Shape]
) -> dict[str, int]:
    """See all arrays of the view as the fewest rows of contiguous columns."""
    if not launch.view:
        return {}
    shape = shapes[launch.view[0]]
    for axis in range(len(shape) + 1):
        leading = {
            name: _leading_at(arrays[name], shape, axis, packed=arguments[name].elements[0].is_packed)
            for name in launch.view
        }
        if None not in leading.values():
            return {"rows": math.prod(shape[:axis]), "columns": math.prod(shape[axis:]), **leading}
    raise AssertionError(f"no common view of {', '.join(launch.view)}")


def _leading_at(array: np.ndarray, shape: Shape, axis: int, *, packed: bool) -> int | None:
    """Return the distance of rows, in stored elements, where the axes from `axis` on are one row; else None."""
    if packed and shape and (axis == len(shape) or (shape[-1] % 2 and math.prod(shape[axis:-1]) > 1)):
        return None
    span = array.itemsize
    for i in reversed(range(axis, len(shape))):
        if array.shape[i] > 1 and array.strides[i] != span:
            return None
        span *= array.shape[i]
    leading = None
    for i in reversed(range(axis)):
        if array.shape[i] <= 1:
            continue
        if leading is not None and array.strides[i] != span:
            return None
        leading = array.strides[i] if leading is None else leading
        span = array.strides[i] * array.shape[i]
    return (span if leading is None else leading) // array.itemsize


def launch_of(sku: KernelSku, problem: Descriptor, device: Device, *choice: str) -> Launch:
    """Evaluate the SKU's launch rule, for a configuration if one is named."""
    module, _, name = sku.launch.partition(":")
    return resolve(module, name)(problem, device, *choice)
