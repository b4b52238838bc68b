"""Declaring kernels: one call gives an op's SKUs for every combination of elements that its code serves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from skuda.registry.arch import ArchSku
from skuda.registry.descriptor import Descriptor
from skuda.registry.elements import ElementKind
from skuda.registry.guarantee import PrecisionGuarantee
from skuda.registry.sku import KernelSku
from skuda.registry.vocabulary import BackendKind, EpilogueKind, MathPrecision


def elementwise_guarantee(data: ElementKind) -> PrecisionGuarantee:
    """Return what a kernel that keeps the arithmetic contract literally promises for data of element `data`."""
    compute = data.compute
    math = MathPrecision.F64 if compute is ElementKind.F64 else MathPrecision.F32
    return PrecisionGuarantee(math_precision=math, accumulator=compute)


def numpy_skus(
    descriptor: type[Descriptor],
    module: str,
    elements: Iterable[ElementKind],
    aux: Iterable[ElementKind | None] = (None,),
    epilogues: Iterable[EpilogueKind | None] = (None,),
    **fields: Any,
) -> tuple[KernelSku, ...]:
    """Offer the reference of an op on the ``numpy`` backend, one SKU per combination.

    Parameters
    ----------
    descriptor : type of Descriptor
        The op's descriptor.
    module : str
        Dotted name of the module whose ``reference`` is offered.
    elements, aux, epilogues : iterable
        The combinations.
    **fields
        Further fields of `KernelSku`; ``precision_guarantee`` defaults to bit-exact in the compute type.
    """
    epilogues = tuple(epilogues)
    aux = tuple(aux)
    return tuple(
        KernelSku(
            category=descriptor.category,
            op=descriptor.op_name(),
            element=element,
            aux_element=second,
            layout=descriptor.layout,
            epilogue=epilogue,
            arch=ArchSku.CPU,
            backend=BackendKind.NUMPY,
            variant="reference",
            source=module,
            entry_point="reference",
            **{
                "precision_guarantee": elementwise_guarantee(element),
                "summary": "the op's meaning, in blocks",
                **fields,
            },
        )
        for element in elements
        for second in aux
        for epilogue in epilogues
    )
