"""Problems that every kernel of the affine family is run over."""

from __future__ import annotations

from itertools import cycle
from typing import Any

from skuda.kernels.quantize import _problems
from skuda.registry.elements import CODES, FLOATS, ElementKind
from skuda.registry.op import Case, Values

_SIZES: dict[type[_problems.AffineProblem], tuple[dict[str, Any], ...]] = {
    _problems.PerTensor: tuple({"numel": n} for n in (1000, 0, 1, 2, 7, 65537, 4096)),
    _problems.PerChannel: tuple(
        {"shape": shape, "axis": axis}
        for shape, axis in (
            ((2, 3, 4), 1),
            ((33, 65), 0),
            ((33, 65), -1),
            ((0, 3), 1),
            ((3, 0), 0),
            ((1,), 0),
            ((2, 3, 1, 5, 2), 3),
            ((7, 1000), 1),
        )
    ),
    _problems.PerToken: tuple({"n": n, "d": d} for n, d in ((17, 33), (0, 5), (5, 0), (1, 1), (3, 70001), (257, 8))),
    _problems.PerGroup: tuple(
        {"outer_size": o, "axis_size": a, "group_size": g}
        for o, a, g in ((3, 32, 8), (0, 8, 4), (4, 0, 4), (1, 1, 1), (5, 15, 5), (2, 9, 3), (9, 256, 128), (2, 7, 7))
    ),
}

_VALUES: tuple[Values, ...] = ("normal", "special", "ties")


def _bounds(code: ElementKind | None, turn: int) -> dict[str, int]:
    low, high = (code or ElementKind.S8).integer_range or (0, 0)
    return {"q_min": low, "q_max": high} if turn % 2 == 0 else {"q_min": low + 1, "q_max": high - 2}


def cases(descriptor: type[_problems.AffineProblem]) -> tuple[Case, ...]:
    """Return cases for a descriptor class: every size with f32 and s8, and every pair of elements over all sizes."""
    sizes = next(found for kind, found in _SIZES.items() if issubclass(descriptor, kind))
    fields = descriptor.model_fields
    data_field = (
        "output_element"
        if issubclass(descriptor, (_problems.Dequantize, _problems.DequantizeBackward))
        else "input_element"
    )
    code_field = {"input_element": "output_element", "output_element": "input_element"}[data_field]
    codes: tuple[ElementKind | None, ...] = CODES if descriptor.aux_field else (None,)
    pairs = [(data, code) for data in FLOATS for code in codes]
    plan = [(FLOATS[0], codes[0], size) for size in sizes]
    plan += [(*pair, size) for pair, size in zip(pairs, cycle(sizes), strict=False)]
    plan += [(*pair, sizes[0]) for pair in pairs]
    made = []
    for turn, (data, code, size) in enumerate(plan):
        given: dict[str, Any] = {**size, data_field: data}
        if code is not None:
            given[code_field] = code
        if "q_min" in fields:
            given |= _bounds(code, turn)
        made.append(Case(descriptor(**given), _VALUES[turn % len(_VALUES)]))
    return tuple(dict.fromkeys(made))
