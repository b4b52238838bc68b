"""Functions that recognize calls of a Python kernel like a checked one, and run it without the checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any

import numpy as np

from skuda.dispatch.host import rules
from skuda.dispatch.host.arrays import same_framework, same_tensors, tensor_view
from skuda.dispatch.host.binding import new_outputs
from skuda.dispatch.host.floating import require_exact_mode
from skuda.dispatch.launch_cache import CachedLaunch, PositionalCall
from skuda.registry.descriptor import Descriptor

Kernel = Callable[..., None]
"""``kernel(problem, **arrays)`` writes the outputs. An absent argument is None."""

Failed = Callable[[BaseException], None]
"""Called with an error of the kernel, before it is raised."""


def _run(
    problem: Descriptor, kernel: Kernel, failed: Failed, shapes: Mapping[str, tuple[int, ...]]
) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return a function that makes the outputs of a call, runs the kernel, and returns them by name in the op's order.

    `shapes` has the stored shapes of the given arrays.
    """
    op, arguments = problem.op_name(), problem.arguments()
    new = tuple(new_outputs(op, arguments, rules.shapes(op, arguments, shapes)).items())
    absent = dict.fromkeys(each.name for each in arguments)

    def run(values: Mapping[str, Any]) -> dict[str, Any]:
        made = {name: make() for name, make in new}
        try:
            kernel(problem, **{**absent, **values, **made})
        except BaseException as error:
            failed(error)
            raise
        return made

    return run


def host_launch(problem: Descriptor, kernel: Kernel, arrays: Mapping[str, Any], failed: Failed) -> CachedLaunch | None:
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
    run = _run(problem, kernel, failed, {name: kind[0] for name, kind in kinds.items() if kind is not None})
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
        made = run(values).values()
        return next(iter(made)) if builder is None else builder(*made)

    return launch


def host_launch_at_positions(
    positions: PositionalCall, problem: Descriptor, kernel: Kernel, arrays: Mapping[str, Any], failed: Failed
) -> CachedLaunch | None:
    """Return a launch for torch tensors by position. Return None if nothing recognizes the tensors."""
    op, arguments = problem.op_name(), {each.name: each for each in problem.arguments()}
    at_names = [(at, name) for at, name in enumerate(positions.names) if name is not None]
    views = [(at, name) for at, name in at_names if name in positions.arrays]
    members = [at for at, _ in views]
    numbers = [(at, arguments[name]) for at, name in at_names if name not in positions.arrays]
    others: list[tuple[int, tuple[type, ...]]] = [(at, (int, float)) for at, _ in numbers]
    others += [(at, (NoneType,)) for at, name in enumerate(positions.names) if name is None]
    same = same_tensors(tuple(positions.arrays[name] for _, name in views))
    if same is None:
        return None
    stored = {name: tuple(arrays[name].shape) for name in positions.arrays}
    shapes = {name: () if arguments[name].is_scalar else shape for name, shape in stored.items()}
    # A reshape takes as long as a small step of a kernel.
    changed = [(name, shape) for name, shape in shapes.items() if shape != positions.arrays[name].shape]
    run = _run(problem, kernel, failed, stored)
    wrap, refused = same_framework(arrays), eval(f"lambda: {positions.unless}", dict(positions.known))  # noqa: S307  our text

    # The launch must not keep the arrays of this call.
    results, several = [(name, positions.shapes[name]) for name in positions.results], positions.several

    def launch(*given: Any) -> Any:
        if refused() or not same(*[given[at] for at in members]):
            return None
        for at, kinds in others:
            if type(given[at]) not in kinds:
                return None
        require_exact_mode()  # before numbers are rounded
        values = {name: tensor_view(given[at]) for at, name in views}
        for name, shape in changed:
            values[name] = values[name].reshape(shape)
        for at, argument in numbers:
            values[argument.name] = rules.number(op, argument, given[at])
        made = run(values)
        found = [
            wrap(made[name] if made[name].shape == shape else made[name].reshape(shape)) for name, shape in results
        ]
        return several(found) if several is not None else found[0]

    return launch
