"""Declaration of kernels: one call returns an op's SKUs, one for every combination of elements that it supports."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from skuda.registry.arch import ArchSku
from skuda.registry.descriptor import Descriptor
from skuda.registry.elements import ElementKind
from skuda.registry.guarantee import PrecisionGuarantee
from skuda.registry.sku import KernelSku
from skuda.registry.vocabulary import BackendKind, EpilogueKind, MathPrecision


def elementwise_guarantee(data: ElementKind) -> PrecisionGuarantee:
    """Return the guarantee of a kernel that follows the arithmetic contract literally, for data of element `data`."""
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
    """Return the SKUs of an op's reference on the ``numpy`` backend, one per combination.

    Parameters
    ----------
    descriptor : type of Descriptor
        The op's descriptor.
    module : str
        Dotted name of the module that defines ``reference``.
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


def cuda_skus(
    descriptor: type[Descriptor],
    module: str,
    elements: Iterable[ElementKind],
    aux: Iterable[ElementKind | None] = (None,),
    epilogues: Iterable[EpilogueKind | None] = (None,),
    *,
    launch: str,
    suffix: str = "",
    arch: ArchSku = ArchSku.SM_80,
    flags: Callable[[ElementKind, ElementKind | None], tuple[str, ...]] | None = None,
    guarantee: Callable[[ElementKind, EpilogueKind | None], PrecisionGuarantee] | None = None,
    **fields: Any,
) -> tuple[KernelSku, ...]:
    """Return the SKUs of an op's ``.cu`` kernel for both CUDA backends, one per combination and backend.

    Parameters
    ----------
    descriptor : type of Descriptor
        The op's descriptor.
    module : str
        Dotted name of the op's module; the source is in the same folder, named by the same stem and `suffix`.
    elements, aux, epilogues : iterable
        The combinations; the elements select what the source is compiled for.
    launch : str
        ``module:function`` of the launch rule.
    suffix : str
        Suffix of the source's and the entry's names, for an additional kernel of the op.
    arch : ArchSku
        The architecture that the source requires.
    flags : callable or None
        Returns the compiler flags of a pair of elements; None for `element_flags`.
    guarantee : callable or None
        Returns the guarantee for an element and an epilogue; None for bit-exact in the compute type.
    **fields
        Further fields of `KernelSku`.
    """
    package, _, stem = module.rpartition(".")
    aux, epilogues = tuple(aux), tuple(epilogues)
    flags = flags or element_flags
    guarantee = guarantee or _bit_exact
    offered = [
        KernelSku(
            category=descriptor.category,
            op=descriptor.op_name(),
            element=element,
            aux_element=second,
            layout=descriptor.layout,
            epilogue=epilogue,
            arch=arch,
            backend=BackendKind.PYCUDA,
            source=f"{package}:{stem}{suffix}.cu",
            launch=launch,
            flags=flags(element, second),
            **{
                "variant": "chunked",
                "entry_point": descriptor.op_name() + suffix,
                "precision_guarantee": guarantee(element, epilogue),
                "summary": "16-byte chunks",
                **fields,
            },
        )
        for element in elements
        for second in aux
        for epilogue in epilogues
    ]
    return tuple(sku.on(backend) for sku in offered for backend in (BackendKind.PYCUDA, BackendKind.CUDA_CORE))


def _bit_exact(data: ElementKind, epilogue: EpilogueKind | None) -> PrecisionGuarantee:  # noqa: ARG001  a rule's signature
    return elementwise_guarantee(data)


def element_flags(data: ElementKind, code: ElementKind | None) -> tuple[str, ...]:
    """Return the compiler flags that select a source's elements and forbid contraction to fused multiply-adds."""
    return ("-fmad=false", f"-DSKUDA_DATA={data}", *((f"-DSKUDA_CODE={code}",) if code is not None else ()))
