"""Problems at the edges of a kernel's constraints, made from the cases of its op."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from skuda.registry.constraints import Between, MultipleOf, OneOf, ProductAtMost
from skuda.registry.descriptor import Descriptor
from skuda.registry.errors import SkudaError
from skuda.registry.op import Case
from skuda.registry.sku import KernelSku

_SMALL = 1 << 12
"""Sizes beyond this are not run, only to reach the edge of a constraint."""


def accepts(sku: KernelSku, problem: Descriptor) -> bool:
    """Whether a kernel's constraints accept a problem."""
    return not any(constraint.check(problem) for constraint in sku.constraints)


def edges(sku: KernelSku, cases: Iterable[Case]) -> Iterator[Descriptor]:
    """Return problems on both sides of every constraint's edge.

    Parameters
    ----------
    sku : KernelSku
        Whose constraints.
    cases : iterable of Case
        What the problems are made from; where a kernel accepts none, one is moved to where it does.
    """
    problems = [case.problem for case in cases]
    moved = (_repaired(sku, problem) for problem in problems)
    able = [p for p in problems if accepts(sku, p)][:2]
    for base in able or [p for p in moved if accepts(sku, p)][:1]:
        for constraint in sku.constraints:
            if not isinstance(constraint, ProductAtMost):
                for value in _around(constraint):
                    changed = _changed(base, constraint.field, value)
                    if changed is not None and changed.key() == sku.key:
                        yield changed


def _repaired(sku: KernelSku, problem: Descriptor) -> Descriptor:
    """Return a problem whose fields are moved to what the constraints accept, as far as that works."""
    for constraint in sku.constraints:
        if isinstance(constraint, ProductAtMost) or constraint.check(problem) is None:
            continue
        moved = (_changed(problem, constraint.field, value) for value in _around(constraint))
        problem = next((p for p in moved if p is not None and constraint.check(p) is None), problem)
    return problem


def _around(constraint: OneOf | Between | MultipleOf) -> tuple[Any, ...]:
    """Return values at the edge of a constraint: the nearest that it accepts, and the nearest that it does not."""
    if isinstance(constraint, OneOf):
        return constraint.allowed
    if isinstance(constraint, MultipleOf):
        return (constraint.divisor, constraint.divisor + 1, 3 * constraint.divisor)
    ends = [(constraint.minimum, -1), (constraint.maximum, 1)]
    return tuple(
        value for end, step in ends if end is not None and end < _SMALL for value in (end, end + step, end - step)
    )


def _changed(problem: Descriptor, name: str, value: Any) -> Descriptor | None:
    """Return a problem with another field, or None where there is no such problem."""
    if name not in type(problem).model_fields:
        return None
    try:
        return problem.model_copy(update={name: value})
    except SkudaError:
        return None
