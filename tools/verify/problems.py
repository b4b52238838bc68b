"""The problems that a kernel is run on: the cases of its op, and others derived from them and from its constraints."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

from skuda.registry.constraints import Between, Constraint, MultipleOf, OneOf
from skuda.registry.descriptor import Argument, Descriptor, FunctionalKey, Role
from skuda.registry.errors import SkudaError
from skuda.registry.op import Case, Op, Values
from skuda.registry.sku import KernelSku

SHORTEST, LONGEST, LONGEST_SUM, MOST = 5, 16, 17, 20
"""Powers of two between which extents are drawn; the longest of a sum such as K, and of data without axes."""

_MEDIUM = 1 << 10
"""Approximate element count of the largest array in the problem that every kind of values is drawn for."""
_NEAR = 2
"""Allowed deviation from `_MEDIUM`, as a power of two."""
_THIN = (3, 2, 4, 8, 16, 32, 64, 128)
"""Candidates for the other extents of a long problem; the first that is accepted is used."""
_LARGEST = 1 << 23
"""Elements of an array from which a derived problem is too slow to compare."""
_FORMS = 6
"""Most combinations of flags that are run with long extents in addition to the first."""
_LONG_SUMS = 10
"""Power of two from which a long extent is run with large sums."""

Constraints = tuple[Constraint, ...]
Place = tuple[str, int | None]
"""A field that determines an array's extent, and an index into it if it is a tuple."""
_VALUES: tuple[Values, ...] = ("normal", "ties", "special", "infinite", "zero", "extreme", "small_data", "small_scales")


class Numbered(NamedTuple):
    """A case of a kernel. Its number selects it on the command line; `own` cases are those that an op declares."""

    number: int
    case: Case
    own: bool


def accepts(constraints: Constraints, problem: Descriptor) -> bool:
    """Return whether all constraints accept a problem."""
    return not any(constraint.check(problem) for constraint in constraints)


def cases_of(sku: KernelSku, op: Op, more: tuple[Case, ...] = ()) -> tuple[Numbered, ...]:
    """Return the cases that a kernel accepts: its op's and `more`, then those that are derived from them."""
    own = [Numbered(i, c, own=True) for i, c in enumerate((*op.cases, *more)) if c.problem.key() == sku.key]
    found = {each.case: each for each in own if accepts(sku.constraints, each.case.problem)}
    derived = _derived(sku.key, sku.constraints, tuple(each.case for each in own))
    added = enumerate((case for case in derived if case not in found), len(op.cases) + len(more))
    return (*found.values(), *(Numbered(number, case, own=False) for number, case in added))


def refused_by(sku: KernelSku, op: Op, more: tuple[Case, ...] = ()) -> list[Descriptor]:
    """Return problems that a kernel's constraints refuse: cases of its op, and problems just beyond an edge."""
    known = [case.problem for case in (*op.cases, *more) if case.problem.key() == sku.key]
    every = dict.fromkeys((*known, *_edges(sku.key, sku.constraints, known)))
    return [problem for problem in every if not accepts(sku.constraints, problem)]


@lru_cache(maxsize=4096)
def _derived(key: FunctionalKey, constraints: Constraints, known: tuple[Case, ...]) -> tuple[Case, ...]:
    """Return cases beside the known ones, all of which the constraints accept.

    One problem is drawn with every kind of values, others have an extent of 0 or 1 or lie at the edge of a constraint.
    The rest have one long extent: for each power of two, one between it and the next. Code branches at powers of two.
    """
    problems = [case.problem for case in known]
    bases = _bases(constraints, problems)
    if not bases:
        return ()
    base = _medium(constraints, min(bases, key=_distance))
    places, forms = axes_of(base), _forms(key, base, bases)
    found = [Case(base, values) for values in _VALUES]
    found += [Case(problem) for problem in _edges(key, constraints, problems)]
    for place in places:
        found += [Case(problem) for problem in _variants(base, {place: 0})]
        found += [Case(problem, "special") for problem in _variants(base, {place: 1})]
    found += [Case(problem) for problem in _variants(base, dict.fromkeys(places, 1))]
    for place in places:
        long = list(_long(constraints, base, place, _powers(base, place)))
        found += long
        if long and long[-1].values == "extreme":
            found.append(Case(long[-1].problem, "tail"))
    found += [Case(other, "special") for other in forms]
    for other in forms[:_FORMS]:
        for place in axes_of(other):
            found += islice(_long(constraints, other, place, reversed(_powers(other, place))), 1)
    return tuple(c for c in dict.fromkeys(found) if _fits(constraints, c.problem) and c.problem.key() == key)


def _powers(problem: Descriptor, place: Place) -> range:
    written = {argument.name for argument in problem.arguments() if argument.role is Role.OUTPUT}
    axes = axes_of(problem)
    longest = LONGEST if any(name in written for name, _ in axes[place]) else LONGEST_SUM
    return range(SHORTEST, (longest if len(axes) > 1 else MOST) + 1)


def _long(constraints: Constraints, base: Descriptor, place: Place, powers: Iterable[int]) -> Iterator[Case]:
    """Yield problems that are long in one place and thin in the others, at most one for each power of two.

    Extents are odd for an even power and aligned for an odd one, where that is accepted.
    """
    for other in axes_of(base):
        if other != place:
            base = _fitted(constraints, base, other, (n for n in _THIN if n < _extent(base, other))) or base
    for power in powers:
        least = 1 << power
        odd, aligned = (least + 3, least + 16, least + 128), (3 * least // 2,)
        longer = _fitted(constraints, base, place, (*aligned, *odd) if power % 2 else (*odd, *aligned))
        if longer is not None:
            yield Case(longer, ("extreme" if _has_codes(longer) else "tail") if power >= _LONG_SUMS else "normal")


def _has_codes(problem: Descriptor) -> bool:
    """Return whether a problem has inputs of codes, whose sums become large."""
    return any(a.role is Role.INPUT and not a.elements[0].is_float and not a.is_scalar for a in _arrays(problem))


def _forms(key: FunctionalKey, base: Descriptor, problems: Iterable[Descriptor]) -> list[Descriptor]:
    """Return problems with other flags or modes than `base`, for example with zero points, one for each combination."""

    def form(problem: Descriptor) -> tuple[tuple[str, Any], ...]:
        return tuple((name, value) for name, value in problem if isinstance(value, (bool, str)) and value not in key)

    found = {form(problem): problem for problem in reversed(list(problems)) if not _distance(problem)[0]}
    return [problem for combination, problem in found.items() if combination != form(base)]


def _edges(key: FunctionalKey, constraints: Constraints, problems: Iterable[Descriptor]) -> Iterator[Descriptor]:
    """Yield problems on both sides of the edges of constraints; those of a long extent are thin otherwise."""
    for base in _bases(constraints, problems)[:2]:
        for constraint in constraints:
            for field, value in _around(constraint):
                near = base
                if isinstance(value, int) and value > _MEDIUM:
                    for other in (place for place in axes_of(base) if place[0] != field):
                        near = _fitted(constraints, near, other, _THIN) or near
                yield from (p for p in _variants(near, {(field, None): value}) if p.key() == key)


def _bases(constraints: Constraints, problems: Iterable[Descriptor]) -> list[Descriptor]:
    """Return the problems that the constraints accept; if there are none, one that was changed so that they do."""
    known = list(problems)
    moved = (_repaired(constraints, problem) for problem in known)
    return [p for p in known if accepts(constraints, p)] or [p for p in moved if accepts(constraints, p)][:1]


def _repaired(constraints: Constraints, problem: Descriptor) -> Descriptor:
    """Return a problem whose fields are changed, where possible, to values that the constraints accept."""
    for constraint in constraints:
        if constraint.check(problem) is not None:
            values: list[dict[Place, Any]] = [{(field, None): value} for field, value in _around(constraint)]
            moved = _variants(problem, *values)
            problem = next((p for p in moved if constraint.check(p) is None), problem)
    return problem


def _around(constraint: Constraint) -> list[tuple[str, Any]]:
    """Return a field with values at the edge of its constraint: accepted ones and the nearest refused ones."""
    match constraint:
        case OneOf(field=field, allowed=values):
            return [(field, value) for value in values]
        case MultipleOf(field=field, divisor=divisor):
            return [(field, value) for value in (divisor, divisor + 1, 3 * divisor)]
        case Between(field=field, minimum=low, maximum=high):
            ends = ((low, -1), (high, 1))
            return [(field, end + by) for end, step in ends if end is not None for by in (0, step, -step)]
        case _:
            return []


def _medium(constraints: Constraints, base: Descriptor) -> Descriptor:
    """Return a problem of a medium size; one that is far from it has its extents changed."""
    if _distance(base) > (False, _NEAR):
        rank = max((len(argument.shape) for argument in _arrays(base)), default=1)
        side = round(_MEDIUM ** (1 / max(rank, 1)))
        for place in axes_of(base):
            base = _fitted(constraints, base, place, (side, 2 * side, 4 * side)) or base
    return base


def _distance(problem: Descriptor) -> tuple[bool, float]:
    """Return a sort key for the distance from a medium size; problems with an empty array or a zero scale sort last."""
    sizes = [math.prod(argument.shape) for argument in _arrays(problem)]
    hidden = 0 in sizes or any(isinstance(value, float) and value == 0 for _, value in problem)
    return hidden, abs(math.log2(max(sizes, default=0) + 1) - math.log2(_MEDIUM))


def _arrays(problem: Descriptor) -> list[Argument]:
    return [argument for argument in problem.arguments() if not argument.is_scalar]


# --- fields and extents ----------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def axes_of(problem: Descriptor) -> dict[Place, frozenset[tuple[str, int]]]:
    """Return, for every place that determines a shape, the axes it determines: names of arguments with an index."""
    found = {}
    for name in type(problem).model_fields:
        value = getattr(problem, name)
        places: list[Place] = [(name, i) for i in range(len(value))] if isinstance(value, tuple) else [(name, None)]
        for place in places:
            extent = _extent(problem, place)
            if isinstance(extent, int) and not isinstance(extent, bool):
                for more in _variants(problem, {place: 2 * extent or 1}):
                    if axes := frozenset(_differing(problem, more)):
                        found[place] = axes
    return found


def _differing(problem: Descriptor, other: Descriptor) -> Iterator[tuple[str, int]]:
    for one, two in zip(_arrays(problem), _arrays(other), strict=True):
        for axis, (had, has) in enumerate(zip(one.shape, two.shape, strict=True)):
            if had != has:
                yield one.name, axis


def row_field(problem: Descriptor) -> str | None:
    """Return the field that counts a problem's independent rows; None if its rows depend on each other."""
    fields = type(problem).model_fields
    for name in ("m", "outer_size"):
        if name in fields:
            return name
    independent = getattr(problem, "scope", "token") in ("token", "group")
    return "n" if "n" in fields and not fields.keys().isdisjoint({"d", "v"}) and independent else None


def fewer_rows(problem: Descriptor) -> Descriptor | None:
    """Return a problem with a third of the rows; None if rows depend on each other or there are fewer than two.

    The number of rows is fixed, not random, so that its cubins can be compiled ahead.
    """
    name = row_field(problem)
    count = getattr(problem, name) if name else 0
    return problem.model_copy(update={name: -(-count // 3)}) if name and count > 1 else None


def row_arguments(problem: Descriptor) -> frozenset[str]:
    """Return the names of the arguments that have one row for each of the problem's rows."""
    axes = axes_of(problem).get((row_field(problem) or "", None), frozenset())
    return frozenset(name for name, axis in axes if axis == 0)


def _extent(problem: Descriptor, place: Place) -> Any:
    name, index = place
    value = getattr(problem, name)
    return value if index is None else value[index]


def _variants(problem: Descriptor, *changes: Mapping[Place, Any]) -> Iterator[Descriptor]:
    """Yield a problem with other values at some places; a change that makes no valid problem is left out."""
    for change in changes:
        update: dict[str, Any] = {}
        for (name, index), value in change.items():
            old = update.get(name, getattr(problem, name))
            update[name] = value if index is None else (*old[:index], value, *old[index + 1 :])
        if update.keys() <= type(problem).model_fields.keys():
            with suppress(SkudaError):
                yield problem.model_copy(update=update)


def _fits(constraints: Constraints, problem: Descriptor) -> bool:
    """Return whether the constraints accept a problem, and its arrays are small enough to be compared."""
    return accepts(constraints, problem) and all(math.prod(a.shape) < _LARGEST for a in _arrays(problem))


def _fitted(constraints: Constraints, problem: Descriptor, place: Place, extents: Iterable[int]) -> Descriptor | None:
    """Return a problem with the first of the extents that the constraints accept, or None if they accept none."""
    resized = (variant for extent in extents for variant in _variants(problem, {place: extent}))
    return next((variant for variant in resized if _fits(constraints, variant)), None)
