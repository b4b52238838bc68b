"""Declares the elementwise ops of a direction: one reference and one ``.cu`` for its four granularities."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import cycle
from typing import Any

from skuda.kernels.offers import cuda_skus, numpy_skus
from skuda.kernels.quantize.granularity import AffineProblem, PerChannel, PerGroup, PerTensor, PerToken
from skuda.registry.constraints import OneOf
from skuda.registry.elements import CODES, FLOATS, ElementKind
from skuda.registry.op import Case, Op, Values

_SIZES: dict[type[AffineProblem], tuple[dict[str, Any], ...]] = {
    PerTensor: tuple({"numel": n} for n in (1000, 4096, 0, 1, 2, 7, 65537)),
    PerChannel: tuple(
        {"shape": shape, "axis": axis}
        for shape, axis in (
            ((2, 3, 4), 1),
            ((7, 1000), 1),
            ((33, 65), 0),
            ((33, 65), -1),
            ((0, 3), 1),
            ((3, 0), 0),
            ((1,), 0),
            ((2, 3, 1, 5, 2), 3),
        )
    ),
    PerToken: tuple({"n": n, "d": d} for n, d in ((17, 33), (3, 1024), (0, 5), (5, 0), (1, 1), (3, 70001), (257, 8))),
    PerGroup: tuple(
        {"outer_size": o, "axis_size": a, "group_size": g}
        for o, a, g in ((3, 32, 8), (9, 256, 128), (0, 8, 4), (4, 0, 4), (1, 1, 1), (5, 15, 5), (2, 9, 3), (2, 7, 7))
    ),
}
_VALUES: tuple[Values, ...] = ("normal", "special", "ties")


def elementwise_ops(reference: Callable[..., None], sources: Mapping[type[AffineProblem], str]) -> tuple[Op, ...]:
    """Declare the ops of one direction.

    Parameters
    ----------
    reference : callable
        Their reference. Its module documents the ops; their ``.cu`` is in the same folder.
    sources : mapping of type to str
        Their descriptors, with the source of each definition.
    """
    return tuple(_op(descriptor, reference, source) for descriptor, source in sources.items())


def _op(descriptor: type[AffineProblem], reference: Callable[..., None], source: str) -> Op:
    module = reference.__module__
    codes: tuple[ElementKind | None, ...] = CODES if descriptor.aux_field else (None,)
    rule = "skuda.kernels.quantize.elementwise_launch:elementwise"
    # A gradient's problem repeats the elements of the forward's codes. No kernel reads them, but they must be codes.
    repeated = [name for name in ("input_element", "output_element") if name in descriptor.model_fields]
    repeated = [name for name in repeated if name not in {descriptor.element_field, descriptor.aux_field}]
    constraints = tuple(OneOf(field=name, allowed=(*CODES, None)) for name in repeated)
    skus = (
        *cuda_skus(
            descriptor, module, FLOATS, codes, launch=rule, entry_point=descriptor.kernel, constraints=constraints
        ),
        *numpy_skus(descriptor, module, FLOATS, codes, constraints=constraints),
    )
    return Op(descriptor, reference, _cases(descriptor, codes), skus, source)


def _cases(descriptor: type[AffineProblem], codes: tuple[ElementKind | None, ...]) -> tuple[Case, ...]:
    """Return every size with f32 and s8, and every pair of elements with the first two sizes and over all of them."""
    sizes = next(found for kind, found in _SIZES.items() if issubclass(descriptor, kind))
    pairs = [(data, code) for data in FLOATS for code in codes]
    plan = [(FLOATS[0], codes[0], size) for size in sizes]
    plan += [(*pair, size) for pair, size in zip(pairs, cycle(sizes), strict=False)]
    plan += [(*pair, size) for size in sizes[:2] for pair in pairs]
    made = []
    for number, (data, code, size) in enumerate(plan):
        given: dict[str, Any] = {**size, descriptor.element_field: data}
        if descriptor.aux_field:
            given[descriptor.aux_field] = code
        if "q_min" in descriptor.model_fields:
            low, high = (code or ElementKind.S8).integer_range or (0, 0)
            given["q_min"], given["q_max"] = (low, high) if number % 2 == 0 else (low + 1, high - 2)
        made.append(Case(descriptor(**given), _VALUES[number % len(_VALUES)]))
    return tuple(dict.fromkeys(made))
