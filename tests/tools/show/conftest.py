"""Registries for planning on paper: NumPy kernels alone, with CUDA kernels for some, and with the op of a plug-in."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import ClassVar, Literal

import pytest

from skuda.dispatch import Dispatcher
from skuda.kernels.catalog import built_in_ops
from skuda.registry import (
    ArchSku,
    ArgumentSpec,
    Descriptor,
    ElementKind,
    KernelSku,
    MultipleOf,
    Op,
    OpCategory,
    PrecisionGuarantee,
    Registry,
    Role,
)
from skuda.tools.show import explain, show
from skuda.tools.show import list as listing


@cache
def host_registry():
    host = (replace(op, skus=tuple(sku for sku in op.skus if sku.backend == "numpy")) for op in built_in_ops())
    return Registry(host, origin="skuda")


@pytest.fixture
def use(monkeypatch):
    """Return a function that lets the commands see a registry and no other."""

    def see(registry):
        for module in (explain, listing, show):
            monkeypatch.setattr(module, "Dispatcher", lambda **more: Dispatcher(registry, **more))
        return registry

    return see


@pytest.fixture
def host(use):
    return use(host_registry())


@pytest.fixture
def with_cuda(use):
    """Kernels of the linear op, once plain and once for one chip, under both backends."""
    made = []
    for sku in (sku for sku in host_registry().skus_of("quantized_linear") if sku.aux_element == "s8"):
        for backend in ("pycuda", "cuda_core"):
            wgmma = {"variant": "wgmma_128x128", "constraints": (MultipleOf(field="k", divisor=16),)}
            made.append(KernelSku(**{**dict(sku.on(backend, arch=ArchSku.SM_90A)), **wgmma}))
            loose = {
                "variant": "mma_64x64",
                "precision_guarantee": PrecisionGuarantee(
                    math_precision="int8", accumulator="s32", max_ulp=2, deterministic=False
                ),
                "workspace": ({"factors": ("m",), "bytes_each": 4},),
                "flags": ("--fmad=false",),
            }
            made.append(KernelSku(**{**dict(sku.on(backend, arch=ArchSku.SM_80)), **loose}))
    return use(host_registry().register(*made, origin="a test"))


class OddDescriptor(Descriptor):
    """Fields of every kind that a plug-in may have."""

    op: Literal["odd"] = "odd"
    category: ClassVar[OpCategory] = OpCategory.REDUCTION
    element_field: ClassVar[str] = "kind"
    kind: ElementKind
    out_scale: float
    window: tuple[int, int]
    mode: Literal["same", "valid"] = "same"
    keep: bool = False
    label: str | None = "x"
    signature = (ArgumentSpec("input", Role.INPUT, "kind", "*window"),)


def odd_reference(problem, *, input):
    """Do nothing."""


@pytest.fixture
def with_odd(use):
    """The op of a plug-in, of a category of its own, whose only element is bf16."""
    sku = KernelSku(
        category="reduction",
        op="odd",
        element="bf16",
        arch="cpu",
        backend="numpy",
        variant="only",
        precision_guarantee=PrecisionGuarantee(math_precision="f32", accumulator="f32", max_ulp=None),
        source="math",
        entry_point="sqrt",
    )
    op = Op(OddDescriptor, odd_reference, (), (sku,), source="a test")
    return use(host_registry().register(op, origin="odd-package 1.0"))
