"""Calls that every kernel must refuse: exactly one argument is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from skuda.kernels.draw import Drawn
from skuda.kernels.dtypes import storage_dtype
from skuda.registry.descriptor import Argument, Descriptor, Role
from skuda.registry.errors import InvalidProblem
from skuda.tools.verify.compare import Broken
from skuda.tools.verify.placement import Geometry, PlacedArguments, Placement
from skuda.tools.verify.trial import Trial

_DTYPES = tuple(np.dtype(name) for name in ("f4", "f2", "i1", "u1", "i4", "f8"))
_NUMBERS = {
    Role.SCALE: {"of 0": 0.0, "of NaN": float("nan")},
    Role.ZERO_POINT: {"that is not whole": 0.5},
    Role.VALUE: {},
}
"""Numbers that a scalar of a role must not be."""
_WRITTEN = (Role.OUTPUT, Role.STATE)


class Misuse(NamedTuple):
    """One wrong call: what is wrong with it, the arguments to pass, and the call whose memory must not change."""

    what: str
    arguments: dict[str, Any]
    call: PlacedArguments


def check_refusals(trial: Trial) -> None:
    """Check that wrong arguments raise `InvalidProblem`, and nothing is written."""
    example = trial.telling
    plan = trial.plan(example.case.problem)
    ways: dict[str, Callable[..., Any]] = {"can_implement": plan.can_implement, "bind": plan.bind, "run": plan.run}
    for what, arguments, call in misuses(example.case.problem, example.drawn, trial.placement):
        for name, function in ways.items():
            if name == "can_implement" and "stream" in arguments:
                continue
            try:
                function(**arguments)
            except InvalidProblem as error:
                if not str(error):
                    raise Broken(f"{what}: {name}() refuses it without a message") from error
            except Exception as error:
                had = f"{type(error).__name__}: {error}"
                raise Broken(f"{what}: {name}() must raise InvalidProblem; it raised {had}") from error
            else:
                raise Broken(f"{what}: {name}() must raise InvalidProblem, and accepted it")
            if changed := call.spoilt(allow_outputs=False):
                raise Broken(f"{what}: {name}() refused it and had written to {changed[0]}, byte {changed[1]}")


def misuses(problem: Descriptor, drawn: Drawn, placement: Placement) -> Iterator[Misuse]:
    """Yield wrong calls of a problem with valid inputs; empty arrays allow fewer of them."""
    right = PlacedArguments.of(placement, problem, drawn)
    on_host = type(placement).upload is Placement.upload
    given = right.arguments
    yield Misuse("an unknown argument", {**given, "no_such_argument": 1}, right)
    if on_host:
        yield Misuse("a stream on a CPU", {**given, "stream": object()}, right)
    for argument in problem.arguments():
        name = argument.name
        if argument.required and argument.role is not Role.OUTPUT:
            yield Misuse(f"no {name}", {n: value for n, value in given.items() if n != name}, right)
        for how, value in _values(argument, right, on_host=on_host):
            yield Misuse(f"{name} {how}", {**given, name: value}, right)
        if name not in right.parts or argument.is_scalar:
            continue
        for how, geometry in _geometries(argument, right):
            call = _placed(right, name, geometry)
            yield Misuse(f"{name} {how}", call.arguments, call)
        had = right.parts[name].geometry
        for other, (role, source, content) in right.parts.items() if argument.role in _WRITTEN else ():
            several = int(np.prod(source.shape)) * source.dtype.itemsize > had.dtype.itemsize
            if several and other != name and role is not Role.OUTPUT and 0 not in had.shape:
                # The output begins at the other's second element, in a buffer that is long enough for both.
                call = _placed(right, other, replace(source, size=source.size + had.size), content)
                over = placement.view(call.buffers[other], replace(had, start=source.start + had.dtype.itemsize))
                yield Misuse(f"{name} over {other}", {**call.arguments, name: over}, call)


def _values(argument: Argument, right: PlacedArguments, *, on_host: bool) -> Iterator[tuple[str, Any]]:
    """Yield wrong values: no array or number, one that the role forbids, or an output that cannot be written."""
    name = argument.name
    if argument.is_scalar:
        yield "that is no number", "text"
        yield from _NUMBERS[argument.role].items()
    elif name in right.arrays:
        yield "that is no array", "text"
        if on_host:
            yield "with a mask", np.ma.masked_array(right.arrays[name])
        if on_host and argument.role in _WRITTEN:
            locked = right.arrays[name].view()
            locked.flags.writeable = False
            yield "that is read-only", locked


def _placed(right: PlacedArguments, name: str, geometry: Geometry, content: Any = 0) -> PlacedArguments:
    """Lay out the arguments of a call with another geometry of one of them."""
    part = right.parts[name]._replace(geometry=geometry, content=content)
    return PlacedArguments(right.placement, {**right.parts, name: part}, right.numbers)


def _geometries(argument: Argument, right: PlacedArguments) -> Iterator[tuple[str, Geometry]]:
    """Yield geometries of another dtype or shape, and one whose rows are the same memory."""
    had, accepted = right.parts[argument.name].geometry, {storage_dtype(element) for element in argument.elements}
    other = next(dtype for dtype in _DTYPES if dtype not in accepted)
    yield f"of {other}", Geometry.of(had.shape, other)
    changed = {}
    if had.shape:
        changed["longer"] = (*had.shape[:-1], had.shape[-1] + 1)
        if 0 not in had.shape:
            changed["shorter"] = (*had.shape[:-1], had.shape[-1] - 1)
    if not argument.flat:
        changed["of another rank"] = (1, *had.shape)
    for how, shape in changed.items():
        yield f"{how}: shape {shape}, not {had.shape}", Geometry.of(shape, had.dtype)
    if argument.role in _WRITTEN and 0 not in had.shape and had.shape[:1] > (1,):
        yield "whose rows are one", replace(had, strides=(0, *had.strides[1:]))
