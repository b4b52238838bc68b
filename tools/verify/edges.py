"""Problems beside an op's cases, derived from those cases and from a kernel's constraints."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from skuda.registry.constraints import Between, MultipleOf, OneOf, ProductAtMost
from skuda.registry.descriptor import Argument, Descriptor
from skuda.registry.errors import SkudaError
from skuda.registry.op import Case
from skuda.registry.sku import KernelSku

LARGE = 70_016
"""The large extent: more than the 65,535 blocks of a grid's second axis, and a multiple of 128."""

_SMALL = 1 << 12
"""Constraint limits from here on are not run."""
_MEDIUM = 1 << 10
"""Approximate element count of the largest array in the problem that every kind of values is drawn for."""
_NEAR = 2
"""Allowed deviation from `_MEDIUM`, as a power of two."""
_THIN = (2, 3, 4, 8, 16, 32, 64, 128)
"""Candidates for the other extents of a large problem; the first that is accepted is used."""

Place = tuple[str, int | None]
"""A field that determines an array's extent, and an index into it if it is a tuple."""


def accepts(sku: KernelSku, problem: Descriptor) -> bool:
    """Return whether a kernel's constraints accept a problem."""
    return not any(constraint.check(problem) for constraint in sku.constraints)


def always(sku: KernelSku, cases: Iterable[Case]) -> tuple[Case, ...]:
    """Return the cases that a kernel is run over regardless of its op's cases.

    One problem is drawn with ties, with NaN and subnormals, with infinities and with zeros. The others have an extent
    of 0 or 1, or one large extent. Only problems that the kernel's constraints accept are returned.

    Parameters
    ----------
    sku : KernelSku
        The kernel.
    cases : iterable of Case
        Cases of its op, from which the problems are derived; none of them is returned.
    """
    known = list(cases)
    bases = _bases(sku, (case.problem for case in known if case.problem.key() == sku.key))
    if not bases:
        return ()
    base = min(bases, key=_distance)
    places = _places(base)
    if _distance(base) > (False, _NEAR):
        rank = max((len(argument.shape) for argument in _arrays(base)), default=1)
        side = round(_MEDIUM ** (1 / max(rank, 1)))
        for place in places:
            base = _fitted(sku, base, place, (side, 2 * side, 4 * side)) or base
    found = [Case(base, values) for values in ("ties", "special", "infinite", "zero")]
    for place in places:
        found += [Case(p) for p in (_resized(base, {place: 0}),) if p is not None]
        found += [Case(p, "special") for p in (_resized(base, {place: 1}),) if p is not None]
    ones = _resized(base, dict.fromkeys(places, 1))
    found += [Case(p) for p in (ones, _large(sku, base, places)) if p is not None]
    added = dict.fromkeys(found).keys() - set(known)
    return tuple(case for case in dict.fromkeys(found) if case in added and accepts(sku, case.problem))


def edges(sku: KernelSku, cases: Iterable[Case]) -> Iterator[Descriptor]:
    """Yield problems on both sides of the edges of a kernel's constraints.

    Parameters
    ----------
    sku : KernelSku
        The kernel.
    cases : iterable of Case
        Cases from which the problems are derived. If the kernel accepts none, one is changed until it does.
    """
    for base in _bases(sku, (case.problem for case in cases))[:2]:
        for constraint in sku.constraints:
            if not isinstance(constraint, ProductAtMost):
                for value in _around(constraint):
                    changed = _changed(base, {constraint.field: value})
                    if changed is not None and changed.key() == sku.key:
                        yield changed


def _bases(sku: KernelSku, problems: Iterable[Descriptor]) -> list[Descriptor]:
    """Return the problems that a kernel accepts; if there are none, one that was changed so that it does."""
    known = list(problems)
    moved = (_repaired(sku, problem) for problem in known)
    return [p for p in known if accepts(sku, p)] or [p for p in moved if accepts(sku, p)][:1]


def _repaired(sku: KernelSku, problem: Descriptor) -> Descriptor:
    """Return a problem whose fields are changed, where possible, to values that the constraints accept."""
    for constraint in sku.constraints:
        if isinstance(constraint, ProductAtMost) or constraint.check(problem) is None:
            continue
        moved = (_changed(problem, {constraint.field: value}) for value in _around(constraint))
        problem = next((p for p in moved if p is not None and constraint.check(p) is None), problem)
    return problem


def _around(constraint: OneOf | Between | MultipleOf) -> tuple[Any, ...]:
    """Return values at the edge of a constraint: accepted ones and the nearest refused ones."""
    if isinstance(constraint, OneOf):
        return constraint.allowed
    if isinstance(constraint, MultipleOf):
        return (constraint.divisor, constraint.divisor + 1, 3 * constraint.divisor)
    ends = [(constraint.minimum, -1), (constraint.maximum, 1)]
    return tuple(
        value for end, step in ends if end is not None and end < _SMALL for value in (end, end + step, end - step)
    )


def _changed(problem: Descriptor, update: dict[str, Any]) -> Descriptor | None:
    """Return a problem with other fields, or None if those fields make no valid problem."""
    if not update.keys() <= type(problem).model_fields.keys():
        return None
    try:
        return problem.model_copy(update=update)
    except SkudaError:
        return None


def _arrays(problem: Descriptor) -> list[Argument]:
    return [argument for argument in problem.arguments() if not argument.is_scalar]


def _distance(problem: Descriptor) -> tuple[bool, float]:
    """Return a sort key for the distance from a medium size; problems with an empty array or a zero scale sort last."""
    sizes = [math.prod(argument.shape) for argument in _arrays(problem)]
    hidden = 0 in sizes or any(isinstance(value, float) and value == 0 for _, value in problem)
    return hidden, abs(math.log2(max(sizes, default=0) + 1) - math.log2(_MEDIUM))


def _places(problem: Descriptor) -> list[Place]:
    """Return the places that the shape of an argument depends on."""
    shapes = [argument.shape for argument in _arrays(problem)]
    found: list[Place] = []
    for name in type(problem).model_fields:
        value = getattr(problem, name)
        candidates: list[Place] = [(name, i) for i in range(len(value))] if isinstance(value, tuple) else [(name, None)]
        for place in candidates:
            extent = _extent(problem, place)
            if isinstance(extent, int) and not isinstance(extent, bool):
                more = _resized(problem, {place: 2 * extent or 1})
                if more is not None and [argument.shape for argument in _arrays(more)] != shapes:
                    found.append(place)
    return found


def _extent(problem: Descriptor, place: Place) -> Any:
    name, index = place
    value = getattr(problem, name)
    return value if index is None else value[index]


def _resized(problem: Descriptor, extents: dict[Place, int]) -> Descriptor | None:
    """Return a problem with other extents, or None if those extents make no valid problem."""
    update: dict[str, Any] = {}
    for (name, index), extent in extents.items():
        old = update.get(name, getattr(problem, name))
        update[name] = extent if index is None else (*old[:index], extent, *old[index + 1 :])
    return _changed(problem, update)


def _fitted(sku: KernelSku, problem: Descriptor, place: Place, extents: Iterable[int]) -> Descriptor | None:
    """Return a problem with the first of the extents that a kernel accepts, or None if it accepts none."""
    resized = (_resized(problem, {place: extent}) for extent in extents)
    return next((p for p in resized if p is not None and accepts(sku, p)), None)


def _large(sku: KernelSku, base: Descriptor, places: list[Place]) -> Descriptor | None:
    """Return a problem with a large extent along the last axis of the first array, and small ones elsewhere."""

    def last(problem: Descriptor | None) -> int:
        return next((a.shape[-1] for a in _arrays(problem) if a.shape), 0) if problem is not None else 0

    doubled = {place: _resized(base, {place: 2 * _extent(base, place) or 1}) for place in places}
    inner = next((place for place, more in doubled.items() if last(more) > last(base)), None)
    if inner is None:
        return None
    for place in places:
        if place != inner:
            extent = _extent(base, place)
            base = _fitted(sku, base, place, (thin for thin in _THIN if thin < extent)) or base
    return _fitted(sku, base, inner, (LARGE >> shift for shift in range(6)))
