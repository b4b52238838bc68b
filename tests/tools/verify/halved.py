"""A toy op, its right kernel and one of each kind of wrong ones; all run on the CPU, over NumPy arrays or torch's."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import numpy as np

from skuda.dispatch import Dispatcher
from skuda.dispatch.backends.numpy import NumpyBackend
from skuda.registry import (
    ArgumentSpec,
    BackendSpec,
    Case,
    Descriptor,
    ElementKind,
    KernelSku,
    Op,
    OpCategory,
    PrecisionGuarantee,
    Registry,
    Role,
)
from skuda.registry.device import HOST
from skuda.registry.value import Extent
from skuda.tools.verify.placement import HostPlacement
from skuda.tools.verify.trial import Examples, Trial

F32 = ElementKind.F32
EXACT = PrecisionGuarantee(math_precision="f32", accumulator="f32")
LOOSE = PrecisionGuarantee(math_precision="f32", accumulator="f32", max_ulp=None)


class HalvedDescriptor(Descriptor):
    """Problem of `halved`: y = x / 2, row by row."""

    op: Literal["halved"] = "halved"
    category: ClassVar[OpCategory] = OpCategory.UNARY_ELEMENTWISE
    element_field: ClassVar[str] = "element"
    n: Extent
    d: Extent
    element: ElementKind = F32
    signature = (ArgumentSpec("x", Role.INPUT, "element", "n, d"), ArgumentSpec("y", Role.OUTPUT, "element", "n, d"))


def reference(problem: Any, *, x: Any, y: Any) -> None:
    y[...] = x / 2


def wrong_at_one_place(problem: Any, *, x: Any, y: Any) -> None:
    y[...] = x / 2
    if problem.n > 2:
        y[2, 1] = 1e30


def within_two(problem: Any, *, x: Any, y: Any) -> None:
    y[...] = np.nextafter(np.nextafter(x / 2, np.float32(np.inf)), np.float32(np.inf))


def by_neighbours(problem: Any, *, x: Any, y: Any) -> None:
    with np.errstate(all="ignore"):
        y[...] = np.cumsum(x, axis=0, dtype=np.float32)


def raises_beyond_five(problem: Any, *, x: Any, y: Any) -> None:
    y[...] = x / 2
    if problem.n > 5:
        raise ZeroDivisionError("odd")


def raises(problem: Any, *, x: Any, y: Any) -> None:
    raise ZeroDivisionError("odd")


FEW = 1 << 18
"""Rows above which the next four are wrong: other cases have fewer."""


def wrong_in_a_late_copy(problem: Any, *, x: Any, y: Any) -> None:
    y[...] = x / 2
    if problem.n > FEW:
        y[-1, 0] = 1e30


def beside_when_large(problem: Any, *, x: Any, y: Any) -> None:
    y[...] = x / 2
    if problem.n > FEW:
        ctypes.memset(y.__array_interface__["data"][0] + y.nbytes, 0, 1)


def over_its_input_when_large(problem: Any, *, x: Any, y: Any) -> None:
    y[...] = x / 2
    if problem.n > FEW:
        ctypes.memset(x.__array_interface__["data"][0] + x.nbytes - 1, 0x3D, 1)


def raises_when_large(problem: Any, *, x: Any, y: Any) -> None:
    y[...] = x / 2
    if problem.n > FEW:
        raise ZeroDivisionError("odd")


DEVICE = SimpleNamespace(dead=False)
"""Whether a kernel has ended all work on it."""


def kills(problem: Any, *, x: Any, y: Any) -> None:
    DEVICE.dead = True
    raise RuntimeError("an illegal memory access was encountered")


def wrong_and_then_kills(problem: Any, *, x: Any, y: Any) -> None:
    y[...] = x
    if problem.n != CASES[0].problem.n:
        kills(problem, x=x, y=y)


class ToyBackend(NumpyBackend):
    """A CPU backend that is no reference."""

    spec = BackendSpec(name="toycpu", processor="cpu")


def toy(entry: str, guarantee: PrecisionGuarantee = EXACT, **changes: Any) -> KernelSku:
    fields: dict[str, Any] = {
        "category": "unary_elementwise",
        "op": "halved",
        "element": "f32",
        "arch": "cpu",
        "backend": "toycpu",
        "variant": entry,
        "precision_guarantee": guarantee,
        "source": __name__,
        "entry_point": entry,
        "summary": "a toy",
    }
    return KernelSku(**{**fields, **changes})


CASES = tuple(Case(HalvedDescriptor(n=n, d=d)) for n, d in ((5, 3), (0, 3), (1, 1), (7, 8)))
OP = Op(HalvedDescriptor, reference, CASES, (toy("reference", backend="numpy"),), source="halved.py")


def dispatcher_of(*skus: KernelSku) -> Dispatcher:
    return Dispatcher(Registry([ToyBackend.spec, OP, *skus], origin="toy"), backends=(ToyBackend(), NumpyBackend()))


def trial_of(sku: KernelSku, **more: Any) -> Trial:
    return Trial(sku, dispatcher_of(sku), HOST, HostPlacement(), Examples(OP, 3), **more)
