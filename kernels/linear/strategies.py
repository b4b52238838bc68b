"""The strategies of linear ops, ways to multiply on a card: best first, and the kernels that they give an op.

To add one, write its module and sources, and put the name of the module into `STRATEGIES`; see docs/card.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from skuda.kernels.linear import expanded
from skuda.kernels.linear.problem import LinearProblem, code_of
from skuda.kernels.offers import cuda_skus, numpy_skus
from skuda.registry.arch import ArchSku
from skuda.registry.constraints import Constraint, OneOf
from skuda.registry.elements import CODES8, WHOLE_CODES, ElementKind
from skuda.registry.guarantee import PrecisionGuarantee
from skuda.registry.sku import KernelSku, WorkspaceTerm
from skuda.registry.vocabulary import EpilogueKind, MathPrecision

STRATEGIES = (
    "packed_streamed",
    "packed_direct",
    "streamed",
    "warpgroup",
    "mma",
)
"""Modules of this folder, best first; `plain`, which takes any shape, follows. Each has `STRATEGY` and `launch`."""


class Strategy(NamedTuple):
    """A way to multiply on a card, which every linear op has.

    Its module has the launch rule ``launch`` and, if weights of s4 are unpacked in front, ``expanded``, which
    `expanded.behind_unpacking` returns.

    Attributes
    ----------
    name : str
        Variant of its kernels. Op and name together name their sources, ``OP_NAME.cu`` in this folder, and entries.
    module : str
        Dotted name of its module.
    arch : ArchSku
        The architecture that the sources require.
    constraints : callable
        Returns what a problem must have, by the element of the codes that the kernel reads.
    summary : str
        A few words, which ``skuda show`` prints.
    workspace : tuple of WorkspaceTerm
        What it needs beside the op's workspace and that of a configuration.
    weights : tuple of ElementKind
        Elements of the weights that it is for: s4 alone if it reads packed weights. Beside others, s4 is unpacked.
    wide : bool
        Whether it also multiplies codes of 16 bits.
    """

    name: str
    module: str
    arch: ArchSku
    constraints: Callable[[ElementKind], tuple[Constraint, ...]]
    summary: str
    workspace: tuple[WorkspaceTerm, ...] = ()
    weights: tuple[ElementKind, ...] = (*CODES8, ElementKind.S4)
    wide: bool = False

    @property
    def multiplies_wide(self) -> bool:
        """Whether weights may have codes of 16 bits."""
        return self.wide and self.weights != (ElementKind.S4,)

    def unpacks(self, weight: ElementKind) -> bool:
        """Return whether a weight is unpacked in front of the kernel."""
        return weight is ElementKind.S4 and self.weights != (ElementKind.S4,)


_NARROW = OneOf(field="code_element", allowed=CODES8)
"""What a kernel requires that multiplies codes of 8 bits alone."""


def _strategy(module: str) -> Strategy:
    # Not imported above: the modules import this one.
    found: Strategy = import_module(f"{__package__}.{module}").STRATEGY
    return found


def skus(
    descriptor: type[LinearProblem],
    module: str,
    elements: Iterable[ElementKind],
    *constraints: Constraint,
    epilogues: Iterable[EpilogueKind] = EpilogueKind,
    activations: tuple[ElementKind, ...] = WHOLE_CODES,
    workspace: tuple[WorkspaceTerm, ...] = (),
    **fields: Any,
) -> tuple[KernelSku, ...]:
    """Return an op's kernels, best first.

    Parameters
    ----------
    descriptor : type of LinearProblem
        The op's descriptor.
    module : str
        Dotted name of the op's module; the sources are in the same folder.
    elements : iterable of ElementKind
        Elements of the SKUs; only the plain kernel and the reference take f64.
    *constraints : Constraint
        Constraints of the op, in addition to the kernels' own.
    epilogues : iterable of EpilogueKind
        Epilogues of the SKUs.
    activations : tuple of ElementKind
        Elements of the activation's codes. Beside s16 weights are s8, s4 or s16.
    workspace : tuple of WorkspaceTerm
        Workspace of all CUDA SKUs.
    **fields
        Further fields of the CUDA SKUs; see `cuda_skus`.
    """
    elements, epilogues = tuple(elements), tuple(epilogues)
    narrow = tuple(element for element in elements if element is not ElementKind.F64)
    known = tuple(each for each in (*WHOLE_CODES, ElementKind.S4) if _meets(each, activations))
    in_f32, plain = OneOf(field="compute", allowed=(ElementKind.F32,)), _strategy("plain")
    cores = tuple(
        sku
        for strategy in map(_strategy, STRATEGIES)
        if strategy.wide or activations != (ElementKind.S16,)
        for weight in (*strategy.weights, *((ElementKind.S16,) if strategy.multiplies_wide else ()))
        if weight in known
        for sku in cuda_skus(
            descriptor,
            module,
            narrow,
            (weight,),
            epilogues,
            suffix=f"_{strategy.name}",
            arch=strategy.arch,
            flags=partial(_flags, descriptor, unpacks=strategy.unpacks(weight)),
            guarantee=partial(_guarantee, ElementKind.S32),
            constraints=(
                *constraints,
                in_f32,
                *(() if strategy.wide or ElementKind.S16 not in activations else (_NARROW,)),
                *strategy.constraints(code_of(weight)),
            ),
            **_reading(strategy, workspace, unpacks=strategy.unpacks(weight)),
            **fields,
        )
    )
    any_shape = tuple(
        sku
        for weights in (known[:-1], (ElementKind.S4,))
        for sku in cuda_skus(
            descriptor,
            module,
            elements,
            weights,
            epilogues,
            flags=partial(_plain_flags, descriptor, unpacks=ElementKind.S4 in weights),
            guarantee=partial(_guarantee, ElementKind.S64),
            constraints=(*constraints, *plain.constraints(ElementKind.S8)),
            entry_point="quantized_linear_codes" if descriptor.dynamic else descriptor.op_name(),
            **_reading(plain, workspace, unpacks=ElementKind.S4 in weights),
            **fields,
        )
    )
    reference = numpy_skus(
        descriptor,
        module,
        elements,
        known,
        epilogues,
        # NumPy adds exactly at any K, which is what an s64 accumulator does.
        precision_guarantee=PrecisionGuarantee(math_precision=MathPrecision.INT8, accumulator=ElementKind.S64),
        constraints=constraints,
        summary="exact integer product through BLAS",
    )
    return (*cores, *any_shape, *reference)


def _meets(weight: ElementKind, activations: tuple[ElementKind, ...]) -> bool:
    """Return whether a weight is multiplied by one of some codes."""
    if weight is ElementKind.S16:
        return ElementKind.S16 in activations
    return weight is not ElementKind.U8 or activations != (ElementKind.S16,)


def _reading(strategy: Strategy, workspace: tuple[WorkspaceTerm, ...], *, unpacks: bool) -> dict[str, Any]:
    """Return the fields of a SKU that depend on whether its kernel reads the weight, or the codes unpacked from it."""
    variant, summary, workspace = strategy.name, strategy.summary, (*workspace, *strategy.workspace)
    if not unpacks:
        launch = f"{strategy.module}:launch"
        return {"variant": variant, "summary": summary, "workspace": workspace, "launch": launch}
    return {
        "variant": f"expanded_{variant}",
        "summary": f"the weight unpacked in front, then: {summary}",
        "workspace": (*workspace, *expanded.WORKSPACE),
        "launch": f"{strategy.module}:expanded",
    }


def _weight_flags(weight: ElementKind | None, *, unpacks: bool) -> tuple[str, ...]:
    code = f"-DSKUDA_WEIGHT={weight if weight is None else code_of(weight)}"
    return (code, "-DSKUDA_UNPACKS") if unpacks else (code,)


def _guarantee(accumulator: ElementKind, *_: object) -> PrecisionGuarantee:
    """Promise the reference's bits for every element and epilogue."""
    return PrecisionGuarantee(math_precision=MathPrecision.INT8, accumulator=accumulator)


def _flags(
    descriptor: type[LinearProblem], element: ElementKind, weight: ElementKind | None, *, unpacks: bool
) -> tuple[str, ...]:
    """Return the compiler flags that do not depend on the configuration."""
    quantizing = (f"-DSKUDA_DATA={element}",) if descriptor.dynamic else ()
    code, *more = _weight_flags(weight, unpacks=unpacks)
    return ("-fmad=false", code, *quantizing, *more)


def _plain_flags(
    descriptor: type[LinearProblem], element: ElementKind, weight: ElementKind | None, *, unpacks: bool
) -> tuple[str, ...]:
    own = f"-DSKUDA_DATA={element}" if descriptor.dynamic else f"-DSKUDA_REAL={element.compute}"
    return ("-fmad=false", own, *_weight_flags(weight, unpacks=unpacks))
