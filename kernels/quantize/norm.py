"""The base of the normalizing ops: their problem, the order of their sums, and their reference.

The order of a sum, `fold`, is part of the ops' meaning: every kernel gives the same bits, and a row's result depends
only on the row. Every addition rounds to nearest in the compute type C.

1. The row is cut into octets: element j of octet o is element 8 o + j of the row, and +0 beyond its end. An octet is
   folded, upper half onto lower half: e[i] + e[i + 4] for i < 4; of these, e[i] + e[i + 2] for i < 2; then e[0] + e[1].
2. Octet o belongs to lane o mod 1024. A lane starts from +0 and adds the sums of its octets in ascending order.
3. The 1024 lanes are folded in the same way: l[i] + l[i + 512] for i < 512, and so on down to l[0] + l[1].

A lane without octets is +0. Adding +0 changes only -0, and no lane is -0, because lanes start from +0. So a short row
needs few lanes. With t threads, a thread owns lanes i, i + t, i + 2 t, ... and adds most of them by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Annotated, Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from skuda.kernels import nonfinite
from skuda.kernels.blocks import BLOCK
from skuda.kernels.dtypes import compute_dtype, storage_dtype
from skuda.kernels.quantize import affine
from skuda.kernels.quantize.granularity import (
    STATIC_SCALE,
    AffineProblem,
    Granularity,
    bounds_of_case,
    per_tensor,
    per_token,
)
from skuda.registry.argument import ArgumentSpec, Role
from skuda.registry.elements import CODES8, FLOATS, ElementKind
from skuda.registry.op import Case
from skuda.registry.value import Extent, Int32, Real
from skuda.registry.vocabulary import Nonfinite, Scaling

Array = npt.NDArray[Any]
OCTET = 8
"""Elements that are folded first."""
LANES = 1024
"""Partial sums of a row."""


class NormQuantized(NamedTuple):
    """The result of a normalizing op; outputs that the problem does not have are None."""

    output: Any
    """Codes, [n, d]."""
    scale_out: Any = None
    """Scale of every row, in the compute type, where the scaling is dynamic."""
    residual_out: Any = None
    """Sum of input and residual, [n, d], where there is a residual."""
    normalized_out: Any = None
    """The normalized rows, [n, d], if `has_normalized`."""


class NormProblem(AffineProblem):
    """The base of the normalizing descriptors.

    Attributes
    ----------
    n, d : int
        Rows and columns; each row is normalized by itself.
    eps : float
        Added to the mean square, in the compute type; finite and not negative.
    q_min, q_max : int
        Bounds of the codes, inclusive, within the range of `output_element`.
    scaling : Scaling
        ``dynamic`` (a scale per row from its own range, symmetric) or ``static`` (one given scale and zero point).
    has_residual : bool
        Whether `residual` is added to `input` first, and the sum is written to `residual_out`.
    has_weight : bool
        Whether the normalized row is multiplied by `weight`.
    has_normalized : bool
        Whether the normalized rows are also written, to `normalized_out`.
    input_element, output_element : ElementKind
        Elements of data and codes.
    nonfinite : Nonfinite
        ``ignore`` (the range of a row skips a NaN) or ``propagate`` (a NaN counts as an infinity).
    """

    centred: ClassVar[bool]
    """Whether the mean is subtracted first."""
    n: Extent
    d: Extent
    eps: Annotated[Real, Field(ge=0)]
    q_min: Int32
    q_max: Int32
    scaling: Scaling = Scaling.DYNAMIC
    has_residual: bool = False
    has_weight: bool = False
    has_normalized: bool = False
    input_element: ElementKind
    output_element: ElementKind
    nonfinite: Nonfinite = Nonfinite.IGNORE
    element_field: ClassVar[str] = "input_element"
    aux_field: ClassVar[str | None] = "output_element"
    result = NormQuantized

    @model_validator(mode="after")
    def _rules(self) -> Self:
        self.check_bounds(self.q_min, self.q_max, self.output_element)
        if self.is_dynamic and self.q_max <= 0:
            self.refuse("q_max", self.q_max, "be greater than 0: it divides the largest magnitude")
        if not self.is_dynamic and self.nonfinite is Nonfinite.PROPAGATE:
            self.refuse(
                "nonfinite", self.nonfinite, "be 'ignore' unless scaling is dynamic: a given scale has no range"
            )
        with np.errstate(over="ignore"):
            rounded = compute_dtype(self.input_element).type(self.eps)
        if not np.isfinite(rounded):
            self.refuse("eps", self.eps, f"be finite in {self.input_element.compute}")
        return self

    @property
    def is_dynamic(self) -> bool:
        """Whether each row has its own scale."""
        return self.scaling is Scaling.DYNAMIC

    @property
    def granularity(self) -> Granularity:
        """One segment per row, or one for everything."""
        shape = (self.n, self.d)
        if self.is_dynamic:
            return Granularity(shape, (self.n,), per_token, (self.d, self.n))
        return Granularity(shape, (), per_tensor)

    @property
    def builder(self) -> Callable[..., Any]:
        """Builds a `NormQuantized` from the outputs that this problem has."""
        names = [argument.name for argument in self.arguments() if argument.role is Role.OUTPUT]
        return lambda *outputs: NormQuantized(**dict(zip(names, outputs, strict=True)))

    def vectors(self) -> tuple[str, ...]:
        """Return the names of the arguments of one value per column."""
        return tuple(name for name in ("weight", "bias") if getattr(self, f"has_{name}", False))


def signature(*vectors: str) -> tuple[ArgumentSpec, ...]:
    """Return the arguments of an op whose optional arguments of one value per column have the given names."""
    return (
        ArgumentSpec("input", Role.INPUT, "input_element", "n, d"),
        ArgumentSpec("residual", Role.INPUT, "input_element", "n, d", when={"has_residual": (True,)}),
        *(ArgumentSpec(name, Role.INPUT, "input_element", "d", when={f"has_{name}": (True,)}) for name in vectors),
        *STATIC_SCALE,
        ArgumentSpec("output", Role.OUTPUT, "output_element", "n, d"),
        ArgumentSpec("scale_out", Role.OUTPUT, "compute", "n", when={"scaling": (Scaling.DYNAMIC,)}),
        ArgumentSpec("residual_out", Role.OUTPUT, "input_element", "n, d", when={"has_residual": (True,)}),
        ArgumentSpec("normalized_out", Role.OUTPUT, "input_element", "n, d", when={"has_normalized": (True,)}),
    )


def fold(values: Callable[[slice], Array], rows: int, columns: int, compute: np.dtype[Any]) -> Array:
    """Return the sum of every row, in the order of the module.

    Parameters
    ----------
    values : callable
        Returns the columns in a slice as an array [rows, columns of the slice] of the compute type.
    rows, columns : int
        Shape of the whole.
    compute : dtype
        The compute type, in which every sum is rounded.
    """
    octets = min(LANES, -(-columns // OCTET))
    lanes = np.zeros((rows, 1 << max(0, octets - 1).bit_length()), compute)
    for piece in _pieces(columns):
        count = -(-(piece.stop - piece.start) // OCTET)
        padded = np.zeros((rows, count * OCTET), compute)
        padded[:, : piece.stop - piece.start] = values(piece)
        lanes[:, :count] += _halved(padded.reshape(rows, count, OCTET))
    return _halved(lanes)


def _halved(values: Array) -> Array:
    """Add the upper half of the last axis to the lower half until one value is left."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0]


def _pieces(columns: int) -> Iterator[slice]:
    """Yield slices that give every lane one octet."""
    step = LANES * OCTET
    return (slice(start, min(start + step, columns)) for start in range(0, columns, step))


@np.errstate(all="ignore")  # infinities and NaN are valid results here
def write(problem: NormProblem, arrays: Mapping[str, Any]) -> None:
    """Write the outputs among `arrays`, the op's arguments by name, by the formula of the op."""
    step = max(1, BLOCK // max(1, problem.d))
    for start in range(0, problem.n, step):
        rows = slice(start, min(start + step, problem.n))
        y = _normalized(problem, rows, arrays)
        elements, bounds = (problem.input_element, problem.output_element), (problem.q_min, problem.q_max)
        output = arrays["output"][rows]
        if problem.is_dynamic:
            nan = nonfinite.in_range(problem)
            affine.quantize_rows(elements, bounds, y, arrays["scale_out"][rows], output, nan=nan)
        else:
            given = (y, arrays["scale"], arrays["zero_point"], output)
            affine.quantize(problem.granularity.spread, elements, bounds, given)


def _normalized(problem: NormProblem, rows: slice, arrays: Mapping[str, Any]) -> Array:
    """Return some rows, normalized and rounded to the data's element; write their residual and normalized outputs."""
    compute, storage = compute_dtype(problem.input_element), storage_dtype(problem.input_element)
    count, d = rows.stop - rows.start, problem.d

    def data(columns: slice) -> Array:
        x = arrays["input"][rows, columns].astype(compute)
        if not problem.has_residual:
            return np.asarray(x)
        total = (x + arrays["residual"][rows, columns].astype(compute)).astype(storage)
        arrays["residual_out"][rows, columns] = total
        return np.asarray(total.astype(compute))

    def centred(columns: slice) -> Array:
        return data(columns) - mean[:, None] if problem.centred else data(columns)

    def squared(columns: slice) -> Array:
        return np.square(centred(columns))

    total = partial(fold, rows=count, columns=d, compute=compute)
    mean = total(data) / compute.type(d) if problem.centred else np.zeros(count, compute)
    variance = total(squared) / compute.type(d)
    factor = compute.type(1) / np.sqrt(variance + compute.type(problem.eps))
    y = np.empty((count, d), storage)
    for columns in _pieces(d):
        values = centred(columns) * factor[:, None]
        if "weight" in problem.vectors():
            values = values * arrays["weight"][columns].astype(compute)
        if "bias" in problem.vectors():
            values = values + arrays["bias"][columns].astype(compute)
        y[:, columns] = values.astype(storage)
    if problem.has_normalized:
        arrays["normalized_out"][rows] = y
    return y


_SIZES = ((5, 64), (3, 7), (2, 8), (1, 1), (3, 0), (0, 8), (9, 33), (40, 16), (2, 4096), (7, 1304), (7, 2056))
_LONG = ((1, 8200), (1, 16400))


def cases(descriptor: type[NormProblem]) -> tuple[Case, ...]:
    """Return the cases of an op: every pair of elements, every switch both ways, and rows of every length."""
    known = descriptor.model_fields
    switches = ("has_residual", "has_weight", "has_bias", "has_normalized")
    plan: list[tuple[Any, ...]] = list(product((*_SIZES, *_LONG), FLOATS, CODES8))
    plan += [((1, 70_008), data, ElementKind.S8) for data in (ElementKind.BF16, ElementKind.F32)]
    plan += [((7, 8200), data, ElementKind.S8) for data in (ElementKind.BF16, ElementKind.F16)]
    for i, size in enumerate((*_SIZES, *_LONG)):
        plan += [(size, data, ElementKind.S16) for data in FLOATS[i % 2 :: 2]]
    made = []
    for number, ((n, d), data, code) in enumerate(plan):
        # Every 8 cases have the same size; neither sizes nor elements decide the switches.
        turns = number * 11 + number // 8 * 5
        fields: dict[str, Any] = {name: bool(turns >> bit & 1) for bit, name in enumerate(switches, 1) if name in known}
        raised = code is ElementKind.S8 and number // 4 % 2 == 1
        fields |= dict(zip(("q_min", "q_max"), bounds_of_case(code, number, raised=raised), strict=True))
        fields |= {"scaling": tuple(Scaling)[turns & 1], "eps": (1e-6, 1e-5, 0.0, 0.37)[number // 2 % 4]}
        problem = descriptor(n=n, d=d, input_element=data, output_element=code, **fields)
        made.append(Case(problem, "special" if number % 5 == 0 else "normal"))
    return (*made, *nonfinite.propagating(made[::3]))
