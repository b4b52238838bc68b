"""Amax quantize: a scale from each row's given largest magnitude, and the codes of the row or of a part of it.

Formula
-------
s = RN_C(amax / q_max), and if that is 0, s = 1; output = clamp(rne(RN_C(input / s)), q_min, q_max); scale_out = s.
With the maxima of `amax` over the same rows, this is `dynamic_range`, symmetric, per token, bit for bit. `input` may be
a part of longer rows: with the maxima of those rows, this gives that part of their codes. NaN quantizes to 0, clamped.
Any `amax` follows the formula: a negative one turns the signs, an infinite one or a NaN makes every code 0, clamped.

Elements
--------
input f16, bf16, f32, f64; output s8, u8, s16 (stored as [n, 2 d] s8: the high halves of a row, then its low ones);
`amax` and `scale_out` have the compute type C (f64 for f64 data, f32 otherwise).

Units
-----
`amax` is in the units of `input`; `scale_out` is real units per code step.

Errors
------
`InvalidProblem` for `n` or `d` outside [0, 2^31-1]; `q_max` below 1 or below `q_min`, or bounds outside the range of
`output_element`; an argument that is missing, unknown, of another element or shape, or that overlaps an output.
`Unsupported` for an element outside the lists above.
"""

from __future__ import annotations

from itertools import product
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from pydantic import model_validator

from skuda.kernels.dtypes import compute_dtype
from skuda.kernels.offers import cuda_skus, numpy_skus
from skuda.kernels.quantize import affine, amax
from skuda.kernels.quantize.granularity import PerToken, bounds_of_case, per_token
from skuda.kernels.ties import at_ties
from skuda.kernels.values import floats, rounded, specials
from skuda.registry.argument import ArgumentSpec, Role
from skuda.registry.elements import CODES8, FLOATS, WHOLE_CODES, ElementKind
from skuda.registry.op import Case, Op, Values
from skuda.registry.value import Int32


class AmaxQuantized(NamedTuple):
    """The op's result."""

    output: Any
    """Codes, [n, d]."""
    scale_out: Any
    """Scale of every row, in the compute type."""


class AmaxQuantizeDescriptor(PerToken):
    """Problem of `amax_quantize`.

    Attributes
    ----------
    n, d : int
        Rows and columns.
    q_min, q_max : int
        Bounds of the codes, inclusive, within the range of `output_element`.
    input_element, output_element : ElementKind
        Elements of data and codes.
    """

    kernel: ClassVar[str] = "amax_quantize"
    op: Literal["amax_quantize"] = "amax_quantize"
    q_min: Int32
    q_max: Int32
    input_element: ElementKind
    output_element: ElementKind
    element_field: ClassVar[str] = "input_element"
    aux_field: ClassVar[str | None] = "output_element"
    result = AmaxQuantized

    signature = (
        ArgumentSpec("input", Role.INPUT, "input_element", "n, d"),
        ArgumentSpec("amax", Role.INPUT, "compute", "n"),
        ArgumentSpec("output", Role.OUTPUT, "output_element", "n, d"),
        ArgumentSpec("scale_out", Role.OUTPUT, "compute", "n"),
    )

    @model_validator(mode="after")
    def _rules(self) -> Self:
        self.check_bounds(self.q_min, self.q_max, self.output_element)
        if self.q_max <= 0:
            self.refuse("q_max", self.q_max, "be greater than 0: it divides the largest magnitude")
        return self


@np.errstate(all="ignore")  # infinities and NaN are valid results here
def reference(problem: AmaxQuantizeDescriptor, *, input: Any, amax: Any, output: Any, scale_out: Any) -> None:
    """Write `output` and `scale_out` by the formula of the module."""
    np.divide(amax, compute_dtype(problem.input_element).type(problem.q_max), out=scale_out)
    scale_out[scale_out == 0] = 1
    elements, bounds = (problem.input_element, problem.output_element), (problem.q_min, problem.q_max)
    zero_point = np.broadcast_to(np.int32(0), scale_out.shape)
    affine.quantize(per_token, elements, bounds, (input, scale_out, zero_point, output))


def _draw(problem: AmaxQuantizeDescriptor, values: Values, rng: np.random.Generator) -> dict[str, Any]:
    """Draw rows, and for each its own maximum, that of a longer row, or, for ``special``, any number."""
    data, shape = problem.input_element, problem.data_shape
    found = floats(shape, data, rng) * (values != "zero")
    if values in ("special", "infinite"):
        edges = specials(data)
        edges = edges if values == "infinite" else edges[~np.isinf(edges)]
        some = rng.random((problem.n, 1)) < 0.5  # one NaN decides the path of a chunk of its row
        found = np.where(some & (rng.random(shape) < 0.1), rng.choice(edges, shape), found)
    x = rounded(found, data)
    if values == "ties":
        x = at_ties(problem, {"input": x}, (problem.n,), rng)["input"]
    own = np.empty(problem.n, compute_dtype(data))
    amax.reference(amax.AmaxDescriptor(n=problem.n, d=problem.d, input_element=data), input=x, output=own)
    if values == "ties":
        return {"input": x, "amax": own}
    with np.errstate(over="ignore"):
        longer = own * np.where(rng.random(own.shape) < 0.5, 1, np.exp2(rng.uniform(-1, 5, own.shape)))
    if values == "special":
        odd = rng.choice([*specials(data.compute), *(-own)], own.shape)
        longer = np.where(rng.random(own.shape) < 0.3, odd, longer)
    return {"input": x, "amax": rounded(longer, data.compute)}


def _cases() -> tuple[Case, ...]:
    """Return every pair of elements, rows of every length and every kind of values."""
    values: tuple[Values, ...] = ("normal", "special", "infinite", "normal", "zero", "ties", "special")
    pairs = [(size, data, CODES8[(i + j) % 2]) for i, size in enumerate(amax.SIZES) for j, data in enumerate(FLOATS)]
    pairs += [(amax.SIZES[0], data, code) for data, code in product(FLOATS, CODES8)]
    pairs += [(size, data, ElementKind.S16) for i, size in enumerate(amax.SIZES) for data in FLOATS[i % 2 :: 2]]
    made = []
    for number, ((n, d), data, code) in enumerate(pairs):
        low, high = bounds_of_case(code, number, raised=number % 3 == 1)
        problem = AmaxQuantizeDescriptor(n=n, d=d, q_min=low, q_max=high, input_element=data, output_element=code)
        made.append(Case(problem, values[number % len(values)]))
    return tuple(made)


CASES = _cases()
SKUS = (
    *cuda_skus(
        AmaxQuantizeDescriptor,
        __name__,
        FLOATS,
        WHOLE_CODES,
        launch="skuda.kernels.quantize.amax_launch:amax_quantize",
        entry_point="amax_quantize_block",
        summary="one read of every row, which several blocks may share",
    ),
    *numpy_skus(AmaxQuantizeDescriptor, __name__, FLOATS, WHOLE_CODES),
)
OP = Op(AmaxQuantizeDescriptor, reference, CASES, SKUS, "dynamic_range with a given range", draw=_draw)
