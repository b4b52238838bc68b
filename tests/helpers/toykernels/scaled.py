"""Two toy ops over one source: `scaled`, one launch over a view; `summed`, two launches and scratch between them."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from skuda.kernels.launch import Columns, Constant, Launch, Leading, Number, Pointer, Rows, Step, Which
from skuda.registry import (
    ArgumentSpec,
    Case,
    Descriptor,
    ElementKind,
    KernelSku,
    Op,
    OpCategory,
    PrecisionGuarantee,
    Role,
)
from skuda.registry.value import Size

MUCH = 12_345
"""The size for which `scaled` asks for more shared memory than a block gets unasked."""

F32, F16, S32, S64 = ElementKind.F32, ElementKind.F16, ElementKind.S32, ElementKind.S64


class ScaledDescriptor(Descriptor):
    """Problem of `scaled`: y = x * scale."""

    op: Literal["scaled"] = "scaled"
    category: ClassVar[OpCategory] = OpCategory.UNARY_ELEMENTWISE
    element_field: ClassVar[str] = "element"
    in_place: ClassVar[bool] = True
    numel: Size
    element: ElementKind = F32
    code: ElementKind | None = None
    signature = (
        ArgumentSpec("x", Role.INPUT, "element", "numel", flat=True),
        ArgumentSpec("scale", Role.SCALE, (F32, F16)),
        ArgumentSpec("y", Role.OUTPUT, "code or element", "numel", flat=True),
    )


class SummedDescriptor(Descriptor):
    """Problem of `summed`: y = sum of x."""

    op: Literal["summed"] = "summed"
    category: ClassVar[OpCategory] = OpCategory.REDUCTION
    element_field: ClassVar[str] = "element"
    n: Size
    element: ElementKind = F32
    signature = (ArgumentSpec("x", Role.INPUT, F32, "n"), ArgumentSpec("y", Role.OUTPUT, F32, "1"))


def reference(problem: Any, *, x: Any, y: Any, scale: Any = 1) -> None:
    y[...] = x * scale if isinstance(problem, ScaledDescriptor) else x.sum()


def scaled(problem: ScaledDescriptor, device: Any) -> Launch:
    parameters = (
        Pointer("x"),
        Leading("x"),
        Pointer("scale"),
        Which("scale"),
        Number("scale", F32),
        Pointer("y"),
        Leading("y"),
        Rows(),
        Columns(),
    )
    grid = (min(problem.numel, device.sm_count), 1, 1)
    shared = 100_000 if problem.numel == MUCH else 0
    return Launch((Step("scaled", grid, (256, 1, 1), parameters, shared),), ("x", "y"))


def summed(problem: SummedDescriptor, device: Any) -> Launch:
    first = (Pointer("x"), Pointer("partial"), Constant(S64, problem.n), Constant(S32, 4))
    second = (Pointer("partial"), Pointer("y"), Constant(S32, 4))
    total = Step("total", (1, 1, 1), (1, 1, 1), second, overlaps=True)
    return Launch((Step("partial_sums", (4, 1, 1), (256, 1, 1), first), total), scratch=(("partial", 32),))


def sku(op: str, backend: str, **changes: Any) -> KernelSku:
    fields: dict[str, Any] = {
        "category": "unary_elementwise" if op == "scaled" else "reduction",
        "op": op,
        "element": "f32",
        "arch": "sm_80",
        "backend": backend,
        "variant": "toy",
        "precision_guarantee": PrecisionGuarantee(math_precision="f32", accumulator="f32"),
        "source": "toykernels:scaled.cu",
        "entry_point": op if op == "scaled" else "total",
        "launch": f"toykernels.scaled:{op}",
        "flags": ("-fmad=false",),
    }
    return KernelSku(**{**fields, **changes})


def ops() -> list[Op]:
    return [
        Op(
            descriptor,
            reference,
            (Case(problem),),
            tuple(sku(name, backend) for backend in ("pycuda", "cuda_core")),
            source="tests/helpers/toykernels",
        )
        for name, descriptor, problem in (
            ("scaled", ScaledDescriptor, ScaledDescriptor(numel=8)),
            ("summed", SummedDescriptor, SummedDescriptor(n=8)),
        )
    ]
