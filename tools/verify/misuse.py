"""Calls that every kernel must refuse: exactly one argument is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from skuda.kernels.draw import Drawn
from skuda.kernels.dtypes import storage_dtype
from skuda.registry.descriptor import Argument, Descriptor, Role
from skuda.tools.verify.placement import Geometry, HostPlacement, Image, Placement, images_of, placed

_DTYPES = tuple(np.dtype(name) for name in ("f4", "f2", "i1", "u1", "i4", "f8"))


@dataclass(frozen=True)
class Misuse:
    """One wrong call.

    Attributes
    ----------
    what : str
        What is wrong with the call.
    arguments : dict
        The arguments to pass.
    memory : dict
        Buffer and image of every array, by name: none may change.
    """

    what: str
    arguments: dict[str, Any]
    memory: dict[str, tuple[Any, Image]]


def misuses(problem: Descriptor, drawn: Drawn, placement: Placement) -> Iterator[Misuse]:
    """Yield wrong calls of a problem.

    Parameters
    ----------
    problem : Descriptor
        The problem; empty arrays allow fewer wrong calls.
    drawn : Drawn
        Valid inputs.
    placement : Placement
        Moves arrays to the device and back.
    """
    arguments = problem.arguments()
    images, numbers = images_of(arguments, drawn, "contiguous", 0)
    buffers, views = placed(placement, images)
    right = {**views, **numbers}

    def wrong(
        what: str,
        values: Mapping[str, Any] | None = None,
        *,
        without: str = "",
        changed: Mapping[str, Image] | None = None,
    ) -> Misuse:
        fresh_buffers, fresh = placed(placement, changed or {})
        passed = {name: value for name, value in {**right, **fresh, **(values or {})}.items() if name != without}
        memory = {name: (buffers[name], image) for name, image in images.items()}
        memory |= {name: (fresh_buffers[name], image) for name, image in (changed or {}).items()}
        return Misuse(what, passed, memory)

    yield wrong("an unknown argument", {"no_such_argument": 1})
    if isinstance(placement, HostPlacement):
        yield wrong("a stream on a CPU", {"stream": object()})
    for argument in arguments:
        name = argument.name
        if argument.required and argument.role is not Role.OUTPUT:
            yield wrong(f"no {name}", without=name)
        if argument.is_scalar:
            yield from _numbers(argument, wrong)
        elif name in images:
            yield wrong(f"{name} that is no array", {name: "text"})
            if isinstance(placement, HostPlacement):
                yield wrong(f"{name} with a mask", {name: np.ma.masked_array(views[name])})
            yield from _geometries(argument, images[name].geometry, wrong)
    for argument in arguments:
        if argument.name in images and argument.role is Role.OUTPUT:
            yield from _written(argument, arguments, images, views, placement, wrong)


def _numbers(argument: Argument, wrong: Any) -> Iterator[Misuse]:
    """Yield calls with an invalid scalar: not a number, or a value that the argument's role forbids."""
    name = argument.name
    yield wrong(f"{name} that is no number", {name: "text"})
    if argument.role is Role.SCALE:
        yield wrong(f"{name} of 0", {name: 0.0})
        yield wrong(f"{name} of NaN", {name: float("nan")})
    if argument.role is Role.ZERO_POINT:
        yield wrong(f"{name} that is not whole", {name: 0.5})


def _geometries(argument: Argument, right: Geometry, wrong: Any) -> Iterator[Misuse]:
    """Yield calls with an array of zeros that has another dtype or shape."""
    name, shape = argument.name, right.shape
    accepted = {storage_dtype(element) for element in argument.elements}
    other = next(dtype for dtype in _DTYPES if dtype not in accepted)
    yield wrong(f"{name} of {other}", changed={name: Image(Geometry.of(shape, other, "contiguous"), 0)})
    changed = {"longer": (*shape[:-1], shape[-1] + 1)} if shape else {}
    if 0 not in shape and shape:
        changed["shorter"] = (*shape[:-1], shape[-1] - 1)
    if not argument.flat:
        changed["of another rank"] = (1, *shape)
    for how, bad in changed.items():
        image = Image(Geometry.of(bad, right.dtype, "contiguous"), 0)
        yield wrong(f"{name} {how}: shape {bad}, not {shape}", changed={name: image})


def _written(
    argument: Argument,
    arguments: tuple[Argument, ...],
    images: Mapping[str, Image],
    views: Mapping[str, Any],
    placement: Placement,
    wrong: Any,
) -> Iterator[Misuse]:
    """Yield calls with an output that cannot be written: read-only, overlapping itself, or overlapping an input."""
    name, right = argument.name, images[argument.name].geometry
    if isinstance(placement, HostPlacement):
        locked = views[name].view()
        locked.flags.writeable = False
        yield wrong(f"{name} that is read-only", {name: locked})
    if 0 not in right.shape and right.shape[:1] > (1,):
        folded = Geometry(right.shape, right.dtype, (0, *right.strides[1:]), right.start, right.size)
        yield wrong(f"{name} whose rows are one", changed={name: Image(folded, 0)})
    for other in arguments:
        if other.role is Role.INPUT and other.name in images:
            yield from _over(name, right, other.name, images[other.name], placement, wrong)


def _over(name: str, right: Geometry, other: str, image: Image, placement: Placement, wrong: Any) -> Iterator[Misuse]:
    """Yield a call whose output overlaps an input from the output's second element on."""
    source = image.geometry
    start = source.start + right.dtype.itemsize
    last = sum((n - 1) * stride for n, stride in zip(source.shape, source.strides, strict=True)) + source.dtype.itemsize
    if 0 in right.shape or 0 in source.shape or start >= source.start + last:
        return
    size = max(source.size, start + right.size)
    roomy = Geometry(source.shape, source.dtype, source.strides, source.start, size + -size % 8)
    both = Image(roomy, source.view(image.before))
    misuse = wrong(f"{name} over {other}", changed={other: both})
    inside = Geometry(right.shape, right.dtype, right.strides, start, roomy.size)
    misuse.arguments[name] = placement.view(misuse.memory[other][0], inside)
    yield misuse
