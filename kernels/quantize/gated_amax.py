"""Gated activation and amax: y = act(gate) * up and the largest magnitude of every row of y, in one pass.

Formula
-------
product = y of `skuda.kernels.quantize.gated`, by silu for silu_mul_amax and by gelu for gelu_mul_amax.
amax[n] = max |C(y[n, :])|, as in op `amax`: NaN is skipped, or with `nonfinite` propagate counts as an infinity; a row
without numbers, or an empty row, gives +0. The maximum over the parts of a row is that of the row. `amax_quantize` of
the product with that maximum gives the codes and scales of silu_mul_quantize and gelu_mul_quantize over the row, with
the same `nonfinite`, bit for bit.

`gate_up` has the gates of a row before its ups. Rows may be slices of wider arrays.

Elements
--------
Gates, ups and `product` f16, bf16, f32, f64; `amax` has the compute type C (f64 for f64 data, f32 otherwise).

Units
-----
`product` and `amax` are in the units of `up` times those of the gate.

Errors
------
`InvalidProblem` for `n` or `d` outside [0, 2^31-1]; an argument that is missing, unknown, of another element or shape,
or that overlaps an output.
`Unsupported` for an element outside the list above.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from skuda.kernels import nonfinite
from skuda.kernels.blocks import blocks
from skuda.kernels.offers import cuda_skus, element_flags, numpy_skus
from skuda.kernels.quantize import amax as largest
from skuda.kernels.quantize import gated
from skuda.kernels.quantize.granularity import PerToken
from skuda.registry.argument import ArgumentSpec, Role
from skuda.registry.constraints import OneOf
from skuda.registry.elements import FLOATS, ElementKind
from skuda.registry.op import Case, Op, Values
from skuda.registry.sku import KernelSku
from skuda.registry.vocabulary import GeluForm, Nonfinite


class GatedAmax(NamedTuple):
    """The ops' result."""

    product: Any
    """Products of activated gates with ups, [n, d]."""
    amax: Any
    """Largest magnitude of every row of them, in the compute type, [n]."""


class GatedAmaxProblem(PerToken):
    """The base of the descriptors.

    Attributes
    ----------
    n, d : int
        Rows and columns of the product.
    fused : bool
        Whether gates and ups are given as one array, `gate_up`.
    input_element : ElementKind
        Element of the data.
    nonfinite : Nonfinite
        ``ignore`` (the range of a row skips a NaN) or ``propagate`` (a NaN counts as an infinity).
    """

    kernel: ClassVar[str] = "gated_amax"
    fused: bool = True
    input_element: ElementKind
    nonfinite: Nonfinite = Nonfinite.IGNORE
    element_field: ClassVar[str] = "input_element"
    result = GatedAmax

    signature = (
        *gated.SIDES,
        ArgumentSpec("product", Role.OUTPUT, "input_element", "n, d"),
        ArgumentSpec("amax", Role.OUTPUT, "compute", "n"),
    )

    @property
    def quantized(self) -> gated.GatedProblem:
        """The problem of the op that also quantizes, for whole rows."""
        raise NotImplementedError

    def _shared(self) -> dict[str, Any]:
        shared = {name: getattr(self, name) for name in ("n", "d", "fused", "input_element", "nonfinite")}
        return {**shared, "q_min": -127, "q_max": 127, "output_element": ElementKind.S8}


class SiluMulAmaxDescriptor(GatedAmaxProblem):
    """Problem of `silu_mul_amax`; for the fields see `GatedAmaxProblem`."""

    op: Literal["silu_mul_amax"] = "silu_mul_amax"

    @property
    def quantized(self) -> gated.GatedProblem:
        """The problem of the op that also quantizes, for whole rows."""
        return gated.SiluMulQuantizeDescriptor(**self._shared())


class GeluMulAmaxDescriptor(GatedAmaxProblem):
    """Problem of `gelu_mul_amax`; for the other fields see `GatedAmaxProblem`.

    Attributes
    ----------
    approximation : GeluForm
        ``erf`` or ``tanh``.
    """

    op: Literal["gelu_mul_amax"] = "gelu_mul_amax"
    approximation: GeluForm = GeluForm.ERF

    @property
    def quantized(self) -> gated.GatedProblem:
        """The problem of the op that also quantizes, for whole rows."""
        return gated.GeluMulQuantizeDescriptor(approximation=self.approximation, **self._shared())


def reference(problem: GatedAmaxProblem, *, product: Any, amax: Any, **arrays: Any) -> None:
    """Write `product` and `amax` by the formula of the module."""
    gate, up = gated.split(arrays, problem.d)
    quantized = problem.quantized
    for index in blocks(product.shape):
        product[index] = gated.products(quantized, gate[index], up[index])
    shared = {name: getattr(problem, name) for name in ("n", "d", "input_element", "nonfinite")}
    rows = largest.AmaxDescriptor(**shared)
    largest.reference(rows, input=product, output=amax)


def _draw(problem: GatedAmaxProblem, values: Values, rng: np.random.Generator) -> dict[str, Any]:
    """Draw as for the op that also quantizes."""
    draw = gated.OPS[0].draw
    assert draw is not None
    return dict(draw(problem.quantized, values, rng))


def _cases(descriptor: type[GatedAmaxProblem]) -> tuple[Case, ...]:
    """Return every element and layout, sizes for every path, and all 16-bit gates."""
    sizes = (*largest.SIZES, (2, 8200), (1, 520))
    values: tuple[Values, ...] = ("normal", "special", "infinite", "normal", "zero")
    plan = [(data, size) for size in sizes for data in FLOATS] + [(data, (16, 4096)) for data in FLOATS]
    made = []
    for number, (data, (n, d)) in enumerate(plan):
        every = (n, d) == (16, 4096)
        fields: dict[str, Any] = {"n": n, "d": d, "fused": number % 3 != 1, "input_element": data}
        forms: list[dict[str, Any]] = [{}]
        if "approximation" in descriptor.model_fields:
            forms = [{"approximation": form} for form in (GeluForm if every else [list(GeluForm)[number // 4 % 2]])]
        drawn: Values = "normal" if every else values[number % len(values)]
        made += [Case(descriptor(**fields, **form), drawn) for form in forms if not every or data.bits == 16]
    return (*made, *nonfinite.propagating(made[::3]))


def _kernels(descriptor: type[GatedAmaxProblem], curve: str, **fields: Any) -> tuple[KernelSku, ...]:
    def flags(data: ElementKind, _: ElementKind | None) -> tuple[str, ...]:
        return (*element_flags(data, ElementKind.S8), f"-DSKUDA_CURVE={curve.upper()}")

    return cuda_skus(
        descriptor,
        __name__,
        FLOATS,
        launch="skuda.kernels.quantize.gated_amax_launch:gated_amax",
        entry_point="gated_amax_2",
        flags=flags,
        summary=f"{curve}, one read; blocks share long rows if there are few",
        **fields,
    )


def _op(descriptor: type[GatedAmaxProblem], *kernels: KernelSku) -> Op:
    skus = (*kernels, *numpy_skus(descriptor, __name__, FLOATS))
    source = "the first half of a gated activation and quantize, for a part of each row"
    return Op(descriptor, reference, _cases(descriptor), skus, source, draw=_draw)


_only = partial(OneOf, field="approximation")
OPS = (
    _op(SiluMulAmaxDescriptor, *_kernels(SiluMulAmaxDescriptor, "silu")),
    _op(
        GeluMulAmaxDescriptor,
        *_kernels(GeluMulAmaxDescriptor, "gelu", variant="erf", constraints=(_only(allowed=(GeluForm.ERF,)),)),
        *_kernels(GeluMulAmaxDescriptor, "gelu_tanh", variant="tanh", constraints=(_only(allowed=(GeluForm.TANH,)),)),
    ),
)
