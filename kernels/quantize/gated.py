"""Gated activation and quantize: act(gate) * up as codes, in one pass, with dynamic or given scales.

Formula
-------
y = RN_T(RN_C(C(a) * C(up))) with a = RN_T(E(gate)); then the codes of y. E is `skuda.kernels.quantize.curves.silu` for
silu_mul_quantize; for gelu_mul_quantize it is `gelu` of the same module for approximation erf and `gelu_tanh` for tanh.
E is a fixed algorithm in f64 with a relative error of at most 2^-49. So a is the correctly rounded value of the curve
for all f16, and for all bf16 except the odd multiples of 2^-133 below 2^-125, whose halves are ties.

- Scaling dynamic: `scale_out` and `output` are those of dynamic_range over y, symmetric, per token: m = max |y| over
  the row, s = RN_C(m / q_max), and if that is 0, s = 1; output = clamp(rne(RN_C(y / s)), q_min, q_max).
- Scaling static: output = clamp(rne(RN_C(y / scale)) + zero_point, q_min, q_max), as in quantize_per_tensor.

So the result is that of the separate ops in sequence, bit for bit. At -inf the curves take their limit: act(-inf) = -0.
The range skips a NaN in y, unless `nonfinite` is propagate: then it counts as an infinity, so the scale is infinite and
all codes are 0. A NaN quantizes to the zero point.

`gate_up` has the gates of a row before its ups. Rows may be slices of wider arrays.

Elements
--------
Gates, ups and `product` f16, bf16, f32, f64; `output` s8, u8, s16 (stored as [n, 2 d] s8: the high halves of a row,
then its low ones); `scale_out` has the compute type C (f64 for f64 data, f32 otherwise); `scale` has C or the data's
own element, which is widened; `zero_point` is s32.

Units
-----
`scale` and `scale_out` are real units per code step; `product` is y, in the units of `up` times those of the gate.

Errors
------
`InvalidProblem` for `n` or `d` outside [0, 2^31-1]; `q_max` below `q_min` or bounds outside the range of
`output_element`; `q_max` below 1 for scaling dynamic; an argument that is missing, unknown, of another element or
shape, or that overlaps an output; a scalar scale that is 0 or not finite.
`Unsupported` for an element outside the lists above.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from pydantic import model_validator

from skuda.kernels import nonfinite
from skuda.kernels.blocks import BLOCK, blocks
from skuda.kernels.draw import zero_points
from skuda.kernels.dtypes import compute_dtype, rounded_to, storage_dtype
from skuda.kernels.offers import cuda_skus, element_flags, numpy_skus
from skuda.kernels.quantize import affine, curves
from skuda.kernels.quantize.granularity import (
    STATIC_SCALE,
    AffineProblem,
    Granularity,
    bounds_of_case,
    per_tensor,
    per_token,
)
from skuda.kernels.values import floats, rounded, specials
from skuda.registry.argument import ArgumentSpec, Role
from skuda.registry.constraints import OneOf
from skuda.registry.elements import CODES8, FLOATS, WHOLE_CODES, ElementKind
from skuda.registry.op import Case, Op, Values
from skuda.registry.sku import KernelSku
from skuda.registry.value import Extent, Int32
from skuda.registry.vocabulary import GeluForm, Nonfinite, Scaling

Array = npt.NDArray[Any]


class GatedQuantized(NamedTuple):
    """The ops' result; outputs that a problem does not have are None."""

    output: Any
    """Codes, [n, d]."""
    scale_out: Any = None
    """Scale of every row in the compute type, [n]; for scaling dynamic."""
    product: Any = None
    """The products before quantization, [n, d]; if `has_product`."""


SIDES = (
    ArgumentSpec("gate", Role.INPUT, "input_element", "n, d", when={"fused": (False,)}),
    ArgumentSpec("up", Role.INPUT, "input_element", "n, d", when={"fused": (False,)}),
    ArgumentSpec("gate_up", Role.INPUT, "input_element", "n, 2 * d", when={"fused": (True,)}),
)
"""Gates and ups: two arrays, or one with the gates of a row before its ups."""


def split(arrays: Mapping[str, Any], d: int) -> tuple[Any, Any]:
    """Return gates and ups, [n, d] each, of the arguments by name."""
    if "gate_up" in arrays:
        return arrays["gate_up"][:, :d], arrays["gate_up"][:, d:]
    return arrays["gate"], arrays["up"]


class GatedProblem(AffineProblem):
    """The base of the gated descriptors.

    Attributes
    ----------
    n, d : int
        Rows and columns of the output.
    q_min, q_max : int
        Bounds of the codes, inclusive, within the range of `output_element`.
    scaling : Scaling
        ``dynamic`` (a scale per row from its own range) or ``static`` (one given scale and zero point).
    fused : bool
        Whether gates and ups are given as one array, `gate_up`.
    has_product : bool
        Whether the products are an output, too.
    input_element, output_element : ElementKind
        Elements of data and codes.
    nonfinite : Nonfinite
        ``ignore`` (the range of a row skips a NaN) or ``propagate`` (a NaN counts as an infinity).
    """

    kernel: ClassVar[str] = "gated"
    n: Extent
    d: Extent
    q_min: Int32
    q_max: Int32
    scaling: Scaling = Scaling.DYNAMIC
    fused: bool = True
    has_product: bool = False
    input_element: ElementKind
    output_element: ElementKind
    nonfinite: Nonfinite = Nonfinite.IGNORE
    element_field: ClassVar[str] = "input_element"
    aux_field: ClassVar[str | None] = "output_element"
    result = GatedQuantized
    signature = (
        *SIDES,
        *STATIC_SCALE,
        ArgumentSpec("output", Role.OUTPUT, "output_element", "n, d"),
        ArgumentSpec("scale_out", Role.OUTPUT, "compute", "n", when={"scaling": (Scaling.DYNAMIC,)}),
        ArgumentSpec("product", Role.OUTPUT, "input_element", "n, d", when={"has_product": (True,)}),
    )

    @model_validator(mode="after")
    def _rules(self) -> Self:
        self.check_bounds(self.q_min, self.q_max, self.output_element)
        if self.scaling is Scaling.DYNAMIC and self.q_max <= 0:
            self.refuse("q_max", self.q_max, "be greater than 0: it divides the largest magnitude")
        if self.scaling is Scaling.STATIC and self.nonfinite is Nonfinite.PROPAGATE:
            self.refuse(
                "nonfinite", self.nonfinite, "be 'ignore' unless scaling is dynamic: a given scale has no range"
            )
        return self

    @property
    def curve(self) -> str:
        """Name of the activation's algorithm in `curves`."""
        raise NotImplementedError

    @property
    def granularity(self) -> Granularity:
        """One segment per row for scaling dynamic, else one for all."""
        shape = (self.n, self.d)
        if self.scaling is Scaling.DYNAMIC:
            return Granularity(shape, (self.n,), per_token)
        return Granularity(shape, (), per_tensor)

    @property
    def builder(self) -> Callable[..., GatedQuantized]:
        """Builds the result from this problem's outputs, in their order."""
        names = [argument.name for argument in self.arguments() if argument.role is Role.OUTPUT]
        return lambda *outputs: GatedQuantized(**dict(zip(names, outputs, strict=True)))


class SiluMulQuantizeDescriptor(GatedProblem):
    """Problem of `silu_mul_quantize`; for the fields see `GatedProblem`."""

    op: Literal["silu_mul_quantize"] = "silu_mul_quantize"

    @property
    def curve(self) -> str:
        """Name of the activation's algorithm in `curves`."""
        return "silu"


class GeluMulQuantizeDescriptor(GatedProblem):
    """Problem of `gelu_mul_quantize`; for the other fields see `GatedProblem`.

    Attributes
    ----------
    approximation : GeluForm
        ``erf`` or ``tanh``.
    """

    op: Literal["gelu_mul_quantize"] = "gelu_mul_quantize"
    approximation: GeluForm = GeluForm.ERF

    @property
    def curve(self) -> str:
        """Name of the activation's algorithm in `curves`."""
        return "gelu_tanh" if self.approximation is GeluForm.TANH else "gelu"


def products(problem: GatedProblem, gate: Array, up: Array) -> Array:
    """Return y of gates and ups of any shape, in T."""
    stored, compute = storage_dtype(problem.input_element), compute_dtype(problem.input_element)
    with np.errstate(all="ignore"):  # infinities, NaN and a signalling NaN are valid here
        curve = getattr(curves, problem.curve)(gate.astype(np.float64))
        activated = rounded_to(curve, stored)
        return rounded_to(np.multiply(activated.astype(compute), up.astype(compute)), stored)


@np.errstate(all="ignore")  # infinities and NaN are valid results here
def reference(problem: GatedProblem, *, output: Any, **arrays: Any) -> None:
    """Write `output`, and `scale_out` and `product` where the problem has them, by the formula of the module."""
    gate, up = split(arrays, problem.d)
    data, bounds = problem.input_element, (problem.q_min, problem.q_max)
    elements = (data, problem.output_element)
    dynamic = problem.scaling is Scaling.DYNAMIC
    at_once = max(1, BLOCK // max(1, problem.d))
    for first in range(0, problem.n, at_once):
        rows = slice(first, min(first + at_once, problem.n))
        shape = (rows.stop - first, problem.d)
        y = arrays["product"][rows] if problem.has_product else np.empty(shape, storage_dtype(data))
        for index in blocks(shape):
            y[index] = products(problem, gate[rows][index], up[rows][index])
        if dynamic:
            scales, nan = arrays["scale_out"][rows], nonfinite.in_range(problem)
            affine.quantize_rows(elements, bounds, y, scales, output[rows], nan=nan)
        else:
            given = (y, arrays["scale"], arrays["zero_point"], output[rows])
            affine.quantize(problem.granularity.spread, elements, bounds, given)


def _draw(problem: GatedProblem, values: Values, rng: np.random.Generator) -> dict[str, Any]:
    """Draw gates where the curves bend, saturate and vanish, and any ups. Large 16-bit problems have every gate."""
    data, shape = problem.input_element, problem.data_shape
    gate = _gates(data, shape, rng)
    up = floats(shape, data, rng)
    if _has_every_gate(problem):
        up = rng.uniform(0.25, 1.0, shape) * rng.choice([-1, 1], shape)  # no product overflows
    if values in ("special", "infinite"):
        edges = specials(data)
        some = rng.random((problem.n, 1)) < 0.5  # one NaN or infinity decides the path of its row
        edges = edges if values == "infinite" or rng.random() < 0.5 else edges[np.isfinite(edges)]
        gate, up = (np.where(some & (rng.random(shape) < 0.1), rng.choice(edges, shape), side) for side in (gate, up))
    if values == "zero":
        up = np.zeros(shape)
    pair = [rounded(side, data) for side in (gate, up)]
    drawn: dict[str, Any] = dict(zip(("gate", "up"), pair, strict=True))
    if problem.fused:
        drawn = {"gate_up": np.concatenate(pair, axis=1)}
    if problem.scaling is Scaling.STATIC:
        drawn["scale"] = float(rounded(np.exp2(rng.uniform(-9, 2, ())), data))
        drawn["zero_point"] = int(zero_points((), problem, "normal", rng))
        if rng.random() < 0.5:
            stored = storage_dtype(data if rng.random() < 0.5 else data.compute)
            drawn |= {
                "scale": np.full(1, drawn["scale"], stored),
                "zero_point": np.full(1, drawn["zero_point"], np.int32),
            }
    return drawn


_EVERY = 1 << 16
"""Number of values of a 16-bit element."""


def _has_every_gate(problem: GatedProblem) -> bool:
    return problem.input_element.bits == 16 and problem.n * problem.d >= _EVERY


def _gates(data: ElementKind, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    if data.bits == 16 and math.prod(shape) >= _EVERY:
        gates = rng.permutation(np.resize(np.arange(_EVERY, dtype=np.uint16), math.prod(shape)))
        found = gates.view(storage_dtype(data)).reshape(shape)
        # Rows with a NaN or an infinity take another path, which `special` and `infinite` values test.
        with np.errstate(invalid="ignore"):  # a signalling NaN warns
            return np.where(np.isfinite(found), found, storage_dtype(data).type(0)).astype(np.float64)
    deep = {ElementKind.F16: -18.0, ElementKind.F64: -700.0}.get(data, -100.0)
    drawn = (
        rng.normal(0, 2, shape),
        rng.uniform(-15, 15, shape),
        rng.uniform(deep, 0, shape),
        floats(shape, data, rng),
    )
    return np.asarray(np.choose(rng.choice(4, shape, p=[0.4, 0.3, 0.2, 0.1]), drawn))


def _cases(descriptor: type[GatedProblem]) -> tuple[Case, ...]:
    """Return every element with every code, scaling and layout, sizes for every path, and all 16-bit gates."""
    gelu = "approximation" in descriptor.model_fields
    sizes: list[tuple[int, int]] = [(5, 64), (17, 8), (3, 7), (2, 4096), (4, 1), (0, 8), (3, 0), (9, 256), (1, 520)]
    sizes += [(33, 24), (6, 384), (2, 2056), (5, 160), (1, 600), (7, 120)]
    plan: list[tuple[ElementKind, tuple[int, int]]] = [(data, size) for size in sizes for data in FLOATS]
    plan += [(data, sizes[number % 2]) for data in FLOATS for number in range(4)]
    plan += [(FLOATS[number % 4], (1, 70008)) for number in range(4)]
    plan += [(data, (16, 4096)) for data in FLOATS if data.bits == 16 for _ in range(4)]
    of_bytes = len(plan)
    plan += [(data, size) for i, size in enumerate((*sizes, (1, 70008))) for data in FLOATS[i % 2 :: 2]]
    values: tuple[Values, ...] = ("normal", "special", "infinite", "normal", "zero")
    made = []
    for number, (data, (n, d)) in enumerate(plan):
        every = data.bits == 16 and n * d >= _EVERY
        code = CODES8[number // 2 % 2] if number < of_bytes else ElementKind.S16
        low, high = bounds_of_case(code, number, raised=number % 3 > 0)
        scaling = (Scaling.DYNAMIC, Scaling.STATIC)[number // 4 % 2 if not every else number % 2]
        given: dict[str, Any] = {
            "n": n,
            "d": d,
            "q_min": low,
            "q_max": high,
            "scaling": scaling,
            "fused": number % 3 != 1,
            "has_product": number % 4 in (1, 2) or every,
            "input_element": data,
            "output_element": code,
        }
        forms: tuple[dict[str, Any], ...] = ({},)
        if gelu:
            turn = number if number < of_bytes else number // 8
            forms = tuple({"approximation": form} for form in (GeluForm if every else [list(GeluForm)[turn % 2]]))
        drawn: Values = "normal" if every else values[number % len(values)]
        made += [Case(descriptor(**given, **form), drawn) for form in forms]
    return tuple(dict.fromkeys((*made, *nonfinite.propagating(made[::3]))))


def _kernels(descriptor: type[GatedProblem], curve: str, **fields: Any) -> tuple[KernelSku, ...]:
    def flags(data: ElementKind, code: ElementKind | None) -> tuple[str, ...]:
        return (*element_flags(data, code), f"-DSKUDA_CURVE={curve.upper()}")

    return cuda_skus(
        descriptor,
        __name__,
        FLOATS,
        WHOLE_CODES,
        launch="skuda.kernels.quantize.gated_launch:gated",
        entry_point="gated_2",
        flags=flags,
        summary=f"{curve}, one read per row",
        **fields,
    )


def _op(descriptor: type[GatedProblem], *kernels: KernelSku) -> Op:
    skus = (*kernels, *numpy_skus(descriptor, __name__, FLOATS, WHOLE_CODES))
    source = "vLLM, TensorRT-LLM: act_and_mul, then a dynamic or static int8 quantization"
    return Op(descriptor, reference, _cases(descriptor), skus, source, draw=_draw)


_only = partial(OneOf, field="approximation")
OPS = (
    _op(SiluMulQuantizeDescriptor, *_kernels(SiluMulQuantizeDescriptor, "silu")),
    _op(
        GeluMulQuantizeDescriptor,
        *_kernels(GeluMulQuantizeDescriptor, "gelu", variant="erf", constraints=(_only(allowed=(GeluForm.ERF,)),)),
        *_kernels(
            GeluMulQuantizeDescriptor, "gelu_tanh", variant="tanh", constraints=(_only(allowed=(GeluForm.TANH,)),)
        ),
    ),
)
