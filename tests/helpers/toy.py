"""A toy op and kernels for it, for tests of registration and selection."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from skuda.registry import (
    ArgumentSpec,
    Case,
    Descriptor,
    ElementKind,
    EpilogueKind,
    KernelSku,
    LayoutSku,
    Op,
    OpCategory,
    PrecisionGuarantee,
    Role,
)
from skuda.registry.value import Extent

EXACT = PrecisionGuarantee(math_precision="int8", accumulator="s32")


class ToyDescriptor(Descriptor):
    """Problem of `toy`: y = x + x."""

    op: Literal["toy"] = "toy"
    category: ClassVar[OpCategory] = OpCategory.GEMM
    layout: ClassVar[LayoutSku | None] = LayoutSku.RCR
    element_field: ClassVar[str] = "element"
    aux_field: ClassVar[str | None] = "weight_element"
    m: Extent = 1
    n: Extent = 1
    k: Extent = 1
    element: ElementKind = ElementKind.F32
    weight_element: ElementKind = ElementKind.S8
    epilogue: EpilogueKind = EpilogueKind.IDENTITY
    signature = (ArgumentSpec("x", Role.INPUT, "element", "m"), ArgumentSpec("y", Role.OUTPUT, "element", "m"))


def reference(problem: ToyDescriptor, *, x: Any, y: Any) -> None:
    """Write `y`."""
    y[...] = x + x


def launch(problem: ToyDescriptor, device: Any) -> tuple[int, int]:
    """Return grid and block."""
    return (problem.m, 1)


def toy_sku(**changes: Any) -> KernelSku:
    fields: dict[str, Any] = {
        "category": "gemm",
        "op": "toy",
        "element": "f32",
        "aux_element": "s8",
        "layout": "rcr",
        "epilogue": "identity",
        "arch": "cpu",
        "backend": "numpy",
        "variant": "reference",
        "precision_guarantee": EXACT,
        "source": "toy",
        "entry_point": "reference",
    }
    return KernelSku(**{**fields, **changes})


def toy_op(*skus: KernelSku) -> Op:
    return Op(ToyDescriptor, reference, (Case(ToyDescriptor()),), skus or (toy_sku(),), source="tests/helpers/toy.py")


def cuda_sku(arch: str, variant: str, **changes: Any) -> KernelSku:
    return toy_sku(**{"arch": arch, "backend": "pycuda", "variant": variant, "launch": "toy:launch", **changes})
