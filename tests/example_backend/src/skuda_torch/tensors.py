"""From an op's arguments to tensors: every check that skuda promises, and no copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from skuda.dispatch import bare, require_exact_mode, rules
from skuda.registry import Argument, Descriptor, ElementKind, InvalidProblem, Role, Unaligned, storage_shape


def bound(problem: Descriptor, arrays: Mapping[str, Any], device: str) -> tuple[dict[str, Any], Any]:
    """Check the arguments of a run.

    Returns
    -------
    tensors : dict
        Tensor, number or None by argument name; outputs that were left out are made.
    result : object
        What the run returns.

    Raises
    ------
    InvalidProblem
        For an argument that is missing, unknown or unsuitable.
    FloatModeError
        In a thread whose arithmetic would give other bits.
    """
    require_exact_mode()
    op, arguments = problem.op_name(), problem.arguments()
    rules.refuse_unknown(op, arguments, arrays)
    given = {a.name: arrays[a.name] for a in arguments if arrays.get(a.name) is not None}
    numbers = {
        a.name for a in arguments if a.is_scalar and isinstance(given.get(a.name), (bool, int, float, np.generic))
    }
    tensors: dict[str, Any] = {
        name: _tensor(op, name, value, device) for name, value in given.items() if name not in numbers
    }
    flat = rules.flat_shape(op, arguments, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    numpy = not any(hasattr(value, "data_ptr") for value in given.values()) and device == "cpu"
    results = []
    for argument in arguments:
        name = argument.name
        shape = flat if argument.flat and flat is not None else argument.shape
        if name in tensors:
            _check(op, argument, tensors[name], shape)
        elif name in numbers:
            number = rules.number(op, argument, given[name])
            tensors[name] = number.item() if isinstance(number, np.generic) else number
        elif argument.role is Role.OUTPUT:
            tensors[name] = _empty(storage_shape(shape, argument.elements[0]), argument.elements[0], device)
        elif argument.required:
            raise InvalidProblem(op, name, "nothing", f"be given: {rules.wanted(argument, shape)}")
        if argument.role is Role.OUTPUT:
            results.append(given[name] if name in given else _array(tensors[name]) if numpy else tensors[name])
    places = {name: _place(value) for name, value in tensors.items() if name in given and name not in numbers}
    rules.refuse_overlap(op, arguments, places, in_place=problem.in_place)
    build = problem.builder
    return tensors, results[0] if build is None else build(*results)


def _dtypes() -> dict[ElementKind, Any]:
    import torch

    return {
        ElementKind.F16: torch.float16,
        ElementKind.BF16: torch.bfloat16,
        ElementKind.F32: torch.float32,
        ElementKind.F64: torch.float64,
        ElementKind.S8: torch.int8,
        ElementKind.U8: torch.uint8,
        ElementKind.S32: torch.int32,
    }


def _tensor(op: str, name: str, value: Any, device: str) -> Any:
    """See an array as a tensor, in its own memory."""
    import torch

    value = bare(op, name, value)
    if isinstance(value, np.ndarray):
        if min(value.strides, default=0) < 0 or not value.flags.writeable:
            # Another kernel can read it: skuda hands the call on.
            raise Unaligned(op, name, "a read-only or reversed array", "be one that torch can share: copy it first")
        bits = value.view(np.int16) if value.dtype == ml_dtypes.bfloat16 else value
        try:
            tensor = torch.from_numpy(bits)
        except (TypeError, ValueError) as error:
            raise InvalidProblem(
                op, name, f"an array of {value.dtype}", f"be one that torch can share ({error})"
            ) from error
        value = tensor.view(torch.bfloat16) if bits is not value else tensor
    elif not isinstance(value, torch.Tensor):
        try:
            value = torch.from_dlpack(value)
        except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
            raise InvalidProblem(op, name, f"a {type(value).__name__}", f"be an array ({error})") from error
    if value.requires_grad:
        raise InvalidProblem(op, name, "a tensor that requires grad", "be detached: pass x.detach()")
    if str(value.device) != device:
        raise InvalidProblem(op, name, f"a tensor on {value.device}", f"be on {device}, where this plan runs")
    return value


def _check(op: str, argument: Argument, tensor: Any, shape: tuple[int, ...]) -> None:
    known = _dtypes()
    element = next((e for e in argument.elements if known.get(e) is tensor.dtype), None)
    if element is None:
        raise InvalidProblem(op, argument.name, f"a tensor of {tensor.dtype}", f"be {rules.wanted(argument, shape)}")
    rules.checked_shape(op, argument, element, tuple(tensor.shape), shape)
    if argument.role in rules.WRITTEN and rules.repeats(_place(tensor)):
        rule = "have one place in memory for every element"
        raise InvalidProblem(op, argument.name, f"strides {tensor.stride()}", rule)


def _place(tensor: Any) -> rules.StridedMemory:
    size = tensor.element_size()
    return rules.StridedMemory(
        tensor.data_ptr(), tuple(tensor.shape), tuple(size * step for step in tensor.stride()), size
    )


def _empty(shape: tuple[int, ...], element: ElementKind, device: str) -> Any:
    import torch

    return torch.empty(shape, dtype=_dtypes()[element], device=device)


def _array(tensor: Any) -> Any:
    """See a tensor as an array."""
    import torch

    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
