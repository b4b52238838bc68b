"""Functions that recognize calls of a Python kernel like a checked one, and run it without the checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from skuda.dispatch.host import rules
from skuda.dispatch.host.arrays import same_framework, same_tensors, tensor_view
from skuda.dispatch.host.binding import new_array
from skuda.dispatch.host.floating import require_exact_mode
from skuda.dispatch.launches import Launch, Positions
from skuda.kernels.dtypes import storage_dtype
from skuda.registry.descriptor import Descriptor, Role, storage_shape

Kernel = Callable[..., None]
"""``kernel(problem, **arrays)`` writes the outputs. An absent argument is None."""

Failed = Callable[[BaseException], None]
"""Called with an error of the kernel, before it is raised."""


class _Outputs:
    """Makes the outputs of a call, runs the kernel, and returns them in the op's order."""

    def __init__(
        self, problem: Descriptor, kernel: Kernel, failed: Failed, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        """`shapes` has the stored shapes of the given arrays."""
        arguments = problem.arguments()
        flat = rules.flat_shape(problem.op_name(), arguments, shapes)
        self._problem, self._kernel, self._failed, self._op = problem, kernel, failed, problem.op_name()
        self._new = []
        for each in arguments:
            if each.role is Role.OUTPUT:
                shape, element = flat if each.flat and flat is not None else each.shape, each.elements[0]
                self._new.append((each.name, storage_shape(shape, element), storage_dtype(element)))
        self._absent = dict.fromkeys(each.name for each in arguments if each.role is not Role.OUTPUT)

    def of(self, values: Mapping[str, Any]) -> dict[str, Any]:
        made = {name: new_array(self._op, name, shape, dtype) for name, shape, dtype in self._new}
        try:
            self._kernel(self._problem, **{**self._absent, **values, **made})
        except BaseException as error:
            self._failed(error)
            raise
        return made


def host_launch(problem: Descriptor, kernel: Kernel, arrays: Mapping[str, Any], failed: Failed) -> Launch | None:
    """Return a launch for NumPy arrays by name. Return None if an output is given, or an array of another library."""
    op, arguments = problem.op_name(), {each.name: each for each in problem.arguments()}
    kinds: dict[str, tuple[Any, Any] | None] = {}
    for name, value in arrays.items():
        if type(value) is np.ndarray and arguments[name].role not in rules.WRITTEN:
            kinds[name] = (value.shape, value.dtype)
        elif arguments[name].is_scalar and type(value) in (int, float):
            kinds[name] = None
        else:
            return None
    outputs = _Outputs(problem, kernel, failed, {name: kind[0] for name, kind in kinds.items() if kind is not None})
    builder = problem.builder

    def recognized(name: str, kind: tuple[Any, Any] | None, value: Any) -> Any:
        if kind is None:
            return rules.number(op, arguments[name], value) if type(value) in (int, float) else None
        if type(value) is not np.ndarray or value.shape != kind[0] or value.dtype != kind[1]:
            return None
        return value.reshape(()) if arguments[name].is_scalar else value

    def launch(given: Mapping[str, Any], stream: object) -> Any:
        if stream is not None or given.keys() != kinds.keys():
            return None
        require_exact_mode()  # before numbers are rounded
        values = {name: recognized(name, kind, given[name]) for name, kind in kinds.items()}
        if any(value is None for value in values.values()):
            return None
        made = outputs.of(values).values()
        return next(iter(made)) if builder is None else builder(*made)

    return launch


def host_launch_at_positions(
    positions: Positions, problem: Descriptor, kernel: Kernel, arrays: Mapping[str, Any], failed: Failed
) -> Launch | None:
    """Return a launch for torch tensors by position. Return None if nothing recognizes the tensors."""
    op, arguments = problem.op_name(), {each.name: each for each in problem.arguments()}
    members = [at for at, name in enumerate(positions.names) if name in positions.arrays]
    numbers = [at for at, name in enumerate(positions.names) if name is not None and name not in positions.arrays]
    absent = [at for at, name in enumerate(positions.names) if name is None]
    names = [name or "" for name in positions.names]
    same = same_tensors(tuple(positions.arrays[names[at]] for at in members))
    if same is None:
        return None
    shapes = {name: () if arguments[name].is_scalar else tuple(arrays[name].shape) for name in positions.arrays}
    outputs = _Outputs(problem, kernel, failed, {name: tuple(arrays[name].shape) for name in positions.arrays})
    wrap, refused = same_framework(arrays), eval(f"lambda: {positions.unless}", dict(positions.known))  # noqa: S307  our text

    # The launch must not keep the arrays of this call.
    results, new_shapes, several = positions.results, positions.shapes, positions.several

    def launch(*given: Any) -> Any:
        if refused() or not same(*[given[at] for at in members]):
            return None
        if any(given[at] is not None for at in absent) or any(type(given[at]) not in (int, float) for at in numbers):
            return None
        require_exact_mode()
        values = {names[at]: tensor_view(given[at]).reshape(shapes[names[at]]) for at in members}
        values |= {names[at]: rules.number(op, arguments[names[at]], given[at]) for at in numbers}
        made = outputs.of(values)
        found = [wrap(made[name].reshape(new_shapes[name])) for name in results]
        return several(found) if several is not None else found[0]

    return launch
