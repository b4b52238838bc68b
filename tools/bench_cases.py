"""What ``skuda bench`` measures: problems by op, shape and element, and the work that each of them is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skuda.kernels.dtypes import storage_dtype
from skuda.kernels.quantize import _problems
from skuda.kernels.quantize._linear import LinearProblem
from skuda.kernels.quantize.dynamic_range import DynamicRangeQuantizeDescriptor
from skuda.registry.descriptor import Descriptor, Role, storage_shape
from skuda.registry.elements import FLOATS, ElementKind
from skuda.registry.errors import InvalidProblem
from skuda.registry.op import Op
from skuda.registry.registry import Registry
from skuda.tools.model_shapes import Shape
from skuda.tools.output import refuse, words

_F16, _BF16, _F32, _F64 = ElementKind.F16, ElementKind.BF16, ElementKind.F32, ElementKind.F64

GROUP_SIZE = 128
"""Elements that share a scale in the per-group cases."""

_TOKENS: tuple[Shape, ...] = (
    (1, 4096),
    (16, 4096),
    (256, 4096),
    (4096, 4096),
    (4096, 14336),
    (16384, 8192),
    (65536, 8192),
)
_PRODUCTS: tuple[Shape, ...] = (
    (1, 4096, 4096),
    (16, 4096, 4096),
    (64, 4096, 4096),
    (128, 4096, 4096),
    (256, 4096, 4096),
    (512, 4096, 4096),
    (1024, 4096, 4096),
    (4096, 4096, 4096),
    (4096, 6144, 4096),
    (4096, 14336, 4096),
    (4096, 4096, 14336),
    (8192, 8192, 8192),
    (1, 28672, 8192),
    (16, 28672, 8192),
    (64, 28672, 8192),
    (128, 28672, 8192),
    (2048, 28672, 8192),
    (2048, 8192, 28672),
    (384, 384, 384),
    (4096, 384, 1536),
)
_Rows = tuple[tuple[tuple[Shape, ...], tuple[ElementKind, ...]], ...]
"""Shapes, each of them in each of some elements."""

_WIDE: _Rows = ((((16384, 8192),), (_BF16, _F32)), (((8192, 8192),), (_F64,)))
_DEFAULTS: dict[str, _Rows] = {
    "dynamic_range": ((_TOKENS, (_BF16, _F16)),),
    "fake_quantize": ((((1024, 1024), (4096, 4096)), (_F32,)), *_WIDE),
    "quantized_linear": ((_PRODUCTS, (_BF16,)),),
    "smoothquant_linear": ((_PRODUCTS, (_BF16,)),),
}
"""By op; `_WIDE` for all others."""


@dataclass(frozen=True)
class BenchCase:
    """One problem to measure.

    Attributes
    ----------
    problem : Descriptor
        The problem.
    shape : tuple of int
        Rows and columns of the data, or M, N and K of a product.
    element : ElementKind
        Element of the data, or of a product's real side.
    """

    problem: Descriptor
    shape: Shape
    element: ElementKind

    @property
    def op(self) -> str:
        """Name of the op."""
        return self.problem.op_name()

    @property
    def label(self) -> str:
        """What it is in a few words."""
        return f"{self.op} {'x'.join(map(str, self.shape))} {self.element}"


@dataclass(frozen=True)
class Work:
    """What a problem costs at the least.

    Attributes
    ----------
    read, written : int
        Bytes of the arguments that have to be read and written, each once.
    operations : int
        Multiplications and additions of a product; 0 for everything else, which is bound by memory.
    """

    read: int
    written: int
    operations: int

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return self.read + self.written


def groups(registry: Registry) -> dict[str, tuple[str, ...]]:
    """Return the names that stand for several ops: ``quantize``, ``linear`` and ``all``.

    Parameters
    ----------
    registry : Registry
        Whose ops.
    """
    kinds = ((_problems.AffineProblem, "quantize"), (LinearProblem, "linear"))
    found = {
        name: tuple(sorted(op.name for op in registry.ops.values() if issubclass(op.descriptor, kind)))
        for kind, name in kinds
    }
    return {**found, "all": (*found["quantize"], *found["linear"])}


def select_cases(
    registry: Registry,
    names: Sequence[str] = (),
    shapes: Sequence[Shape] = (),
    elements: Sequence[str] = (),
    *,
    command: str = "bench",
) -> tuple[BenchCase, ...]:
    """Return what to measure.

    Parameters
    ----------
    registry : Registry
        Whose ops.
    names : sequence of str
        Ops and groups of them; empty for all.
    shapes : sequence of tuple of int
        Instead of the op's own; an op takes those with as many sizes as its problem has.
    elements : sequence of str
        Instead of the op's own.
    command : str
        Who asks, for errors.

    Raises
    ------
    InvalidProblem
        For a word that nobody knows, or a shape that fits none of the ops.
    """
    chosen = select_ops(registry, names, command=command)
    for name in elements:
        if name not in FLOATS:
            refuse(command, "--element", name, FLOATS)
    ranks = {rank_of(registry.ops[op]) for op in chosen}
    for shape in shapes:
        if len(shape) not in ranks:
            forms = words(_form(rank) for rank in sorted(ranks))
            raise InvalidProblem(command, "--shapes", "x".join(map(str, shape)), f"be {forms} for {words(chosen)}")
    kinds = tuple(ElementKind(name) for name in elements)
    return tuple(case for op in chosen for case in _cases(registry.ops[op], shapes, kinds))


def select_ops(registry: Registry, names: Sequence[str] = (), *, command: str = "bench") -> tuple[str, ...]:
    """Return the ops that names stand for, each once.

    Parameters
    ----------
    registry : Registry
        Whose ops.
    names : sequence of str
        Ops and groups of them; empty for all.
    command : str
        Who asks, for errors.

    Raises
    ------
    InvalidProblem
        For a word that nobody knows.
    """
    known = groups(registry)
    for name in names:
        if name not in known and name not in known["all"]:
            refuse(command, "OPS", name, (*known, *known["all"]), kind="an op of the quantization family or a group")
    return tuple(dict.fromkeys(op for name in (names or ("all",)) for op in known.get(name, (name,))))


def rank_of(op: Op) -> int:
    """Return how many sizes an op's shapes have here: 3 for a product, else 2."""
    return 3 if issubclass(op.descriptor, LinearProblem) else 2


def _form(rank: int) -> str:
    return "MxNxK (rows, output channels, inner size)" if rank == 3 else "ROWSxCOLUMNS"


def _cases(op: Op, shapes: Sequence[Shape], elements: Sequence[ElementKind]) -> tuple[BenchCase, ...]:
    rows = _DEFAULTS.get(op.name, _WIDE)
    fitting = [shape for shape in shapes if len(shape) == rank_of(op)]
    if shapes:
        own = dict.fromkeys(kind for _, kinds in rows for kind in kinds)
        pairs = [(shape, kind) for kind in (elements or own) for shape in fitting]
    else:
        pairs = []
        for kind in elements or dict.fromkeys(kind for _, kinds in rows for kind in kinds):
            # An element that the defaults do not have is measured at every default shape.
            mine = [each for each, kinds in rows if kind in kinds] or [each for each, _ in rows]
            pairs += [(shape, kind) for each in mine for shape in each]
    return tuple(BenchCase(problem_of(op.descriptor, shape, kind), shape, kind) for shape, kind in dict.fromkeys(pairs))


def problem_of(descriptor: type[Descriptor], shape: Shape, element: ElementKind) -> Descriptor:
    """Return an op's problem of a shape: codes s8, symmetric where the op has a choice.

    Per channel the channels are the columns, per group `GROUP_SIZE` elements share a scale, and a dynamic range is
    taken per token.

    Parameters
    ----------
    descriptor : type of Descriptor
        The op's.
    shape : tuple of int
        Rows and columns, or M, N and K.
    element : ElementKind
        Element of the data, or of a product's real side.

    Raises
    ------
    InvalidProblem
        For a shape that the op refuses, such as columns that are no whole groups.
    """
    fields: dict[str, Any] = {descriptor.element_field: element}
    if descriptor.aux_field:
        fields[descriptor.aux_field] = ElementKind.S8
    symmetric = issubclass(descriptor, (LinearProblem, DynamicRangeQuantizeDescriptor))
    fields |= {"q_min": -127 if symmetric else -128, "q_max": 127}
    fields |= _sizes(descriptor, shape) | {"act_scale": 0.0131}
    return descriptor(**{name: value for name, value in fields.items() if name in descriptor.model_fields})


def _sizes(descriptor: type[Descriptor], shape: Shape) -> dict[str, Any]:
    if issubclass(descriptor, LinearProblem):
        m, n, k = shape
        return {"m": m, "c_out" if "c_out" in descriptor.model_fields else "n": n, "k": k}
    rows, columns = shape
    if issubclass(descriptor, _problems.PerTensor):
        return {"numel": rows * columns}
    if issubclass(descriptor, _problems.PerChannel):
        return {"shape": shape, "axis": 1}
    if issubclass(descriptor, _problems.PerGroup):
        return {"outer_size": rows, "axis_size": columns, "group_size": GROUP_SIZE}
    return {"n": rows, "d": columns}


def product_sizes(problem: LinearProblem) -> Shape:
    """Return M, N and K of a product."""
    sizes: Any = problem
    return (sizes.m, sizes.c_out if hasattr(sizes, "c_out") else sizes.n, sizes.k)


def work_of(problem: Descriptor) -> Work:
    """Count what a problem costs at the least: every required array read or written once.

    Parameters
    ----------
    problem : Descriptor
        The problem; numbers passed by value cost nothing.
    """
    moved = {Role.INPUT: 0, Role.OUTPUT: 0}
    for argument in problem.arguments():
        if argument.role in moved:
            element = argument.elements[0]
            moved[argument.role] += math.prod(storage_shape(argument.shape, element)) * storage_dtype(element).itemsize
    operations = 2 * math.prod(product_sizes(problem)) if isinstance(problem, LinearProblem) else 0
    return Work(moved[Role.INPUT], moved[Role.OUTPUT], operations)
