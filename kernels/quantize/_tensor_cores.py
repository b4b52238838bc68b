"""The linear kernels on tensor cores, best first, and how an op offers them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from skuda.kernels.offers import cuda_skus
from skuda.kernels.quantize import _cuda_linear, _linear, _mma, _streamed, _warpgroup
from skuda.registry.arch import ArchSku
from skuda.registry.constraints import Constraint, OneOf
from skuda.registry.descriptor import Descriptor
from skuda.registry.elements import ElementKind
from skuda.registry.guarantee import PrecisionGuarantee
from skuda.registry.sku import KernelSku
from skuda.registry.vocabulary import EpilogueKind


class Way(NamedTuple):
    """One kernel that several ops have.

    Attributes
    ----------
    variant : str
        Its name; the sources and the module of its launch rules are called after it.
    arch : ArchSku
        What it needs.
    constraints : callable
        From the weight's element to what it requires, whatever the op.
    summary : str
        One line for people.
    """

    variant: str
    arch: ArchSku
    constraints: Callable[[ElementKind], tuple[Constraint, ...]]
    summary: str


WAYS = (
    Way(
        "streamed",
        ArchSku.SM_90A,
        _streamed.constraints,
        "few tokens: Hopper's products as fast as the weights arrive",
    ),
    Way(
        "warpgroup",
        ArchSku.SM_90A,
        _warpgroup.constraints,
        "Hopper's warpgroup products, tiles by predicted time, loads by the copy engine",
    ),
    Way(
        "mma",
        ArchSku.SM_80,
        _mma.constraints,
        "tensor cores of any card since Ampere; every alignment and zero point",
    ),
)


def guarantee(element: ElementKind, epilogue: EpilogueKind | None) -> PrecisionGuarantee:
    """Return what the plain kernel promises, with sums in s32."""
    return _cuda_linear.guarantee(element, epilogue).model_copy(update={"accumulator": ElementKind.S32})


def flags(element: ElementKind, weight: ElementKind | None) -> tuple[str, ...]:  # noqa: ARG001  a rule's signature
    """Return the compiler flags that do not depend on the configuration."""
    return ("-fmad=false", f"-DSKUDA_WEIGHT={weight}")


def quantizing_flags(activation: ElementKind, weight: ElementKind | None) -> tuple[str, ...]:
    """Return the same for sources that also quantize the activation."""
    return (*flags(activation, weight), f"-DSKUDA_DATA={activation}")


def skus(
    descriptor: type[Descriptor],
    module: str,
    elements: Iterable[ElementKind],
    rule: str,
    *constraints: Constraint,
    **fields: Any,
) -> tuple[KernelSku, ...]:
    """Offer an op's kernels on tensor cores.

    Parameters
    ----------
    descriptor : type of Descriptor
        The op's descriptor.
    module : str
        Dotted name of the op's module, beside the sources.
    elements : iterable of ElementKind
        Of the SKUs; f64 is left to the plain kernel.
    rule : str
        The launch rule's name in every kernel's module.
    *constraints : Constraint
        What the op adds to the kernels' own.
    **fields
        See `cuda_skus`.
    """
    kept = tuple(element for element in elements if element is not ElementKind.F64)
    return tuple(
        sku
        for way in WAYS
        for weight in _linear.CODES8
        for sku in cuda_skus(
            descriptor,
            module,
            kept,
            (weight,),
            EpilogueKind,
            launch=f"skuda.kernels.quantize._{way.variant}:{rule}",
            suffix=f"_{way.variant}",
            arch=way.arch,
            guarantee=guarantee,
            constraints=(
                *constraints,
                OneOf(field="compute", allowed=(ElementKind.F32,)),
                *way.constraints(weight),
                *(_unshifted(descriptor) if way.arch.is_specific else ()),
            ),
            variant=way.variant,
            summary=way.summary,
            **fields,
        )
    )


def _unshifted(descriptor: type[Descriptor]) -> tuple[Constraint, ...]:
    """Return what kernels ask that multiply the codes themselves."""
    weight = OneOf(field="has_weight_zero_point", allowed=(False,))
    own = "act_zero_point" in descriptor.model_fields
    return (weight, OneOf(field="act_zero_point", allowed=(0,))) if own else (weight,)
