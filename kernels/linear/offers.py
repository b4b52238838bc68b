"""The kernels of a linear op, best first: those on tensor cores, the plain kernel, the reference."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

from skuda.kernels.linear import expanded, mma, packed_launch, packed_streamed_launch, plain, streamed, warpgroup
from skuda.kernels.linear.problem import LinearProblem, code_of
from skuda.kernels.offers import cuda_skus, numpy_skus
from skuda.registry.arch import ArchSku
from skuda.registry.constraints import Constraint, OneOf
from skuda.registry.elements import CODES8, ElementKind
from skuda.registry.guarantee import PrecisionGuarantee
from skuda.registry.sku import KernelSku, WorkspaceTerm
from skuda.registry.vocabulary import EpilogueKind, MathPrecision


class _Kernel(NamedTuple):
    """A kernel that every linear op has. Its ``.cuh`` is named after its variant; `rules` has its launch rule."""

    variant: str
    arch: ArchSku
    rules: ModuleType
    summary: str
    workspace: tuple[WorkspaceTerm, ...] = ()
    weights: tuple[ElementKind, ...] = (*CODES8, ElementKind.S4)
    """Elements of the weights that it is offered for."""

    def unpacks(self, weight: ElementKind) -> bool:
        """Whether a weight is unpacked in front of it: it is, unless the kernel reads nothing but packed weights."""
        return weight is ElementKind.S4 and self.weights != (ElementKind.S4,)


_TENSOR_CORE_KERNELS = (
    _Kernel(
        "packed_streamed",
        ArchSku.SM_90A,
        packed_streamed_launch,
        "packed 4-bit weights through a ring, mma.sync or wgmma by tokens",
        weights=(ElementKind.S4,),
    ),
    _Kernel(
        "packed",
        ArchSku.SM_80,
        packed_launch,
        "few tokens: packed 4-bit weights go straight to registers",
        weights=(ElementKind.S4,),
    ),
    _Kernel(
        "streamed",
        ArchSku.SM_90A,
        streamed,
        "few tokens: wgmma at the speed at which the weights arrive",
        weights=CODES8,
    ),
    _Kernel(
        "warpgroup",
        ArchSku.SM_90A,
        warpgroup,
        "wgmma, TMA loads, tiles by predicted time",
        warpgroup.WORKSPACE,
    ),
    _Kernel(
        "mma",
        ArchSku.SM_80,
        mma,
        "tensor cores of any card since Ampere; every alignment and zero point",
    ),
)
_PLAIN = _Kernel("plain", ArchSku.SM_80, plain, "64 x 64 tiles, dp4a; any shape")


def skus(
    descriptor: type[LinearProblem],
    module: str,
    elements: Iterable[ElementKind],
    *constraints: Constraint,
    epilogues: Iterable[EpilogueKind] = EpilogueKind,
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
    workspace : tuple of WorkspaceTerm
        Workspace of all CUDA SKUs.
    **fields
        Further fields of the CUDA SKUs; see `cuda_skus`.
    """
    elements, epilogues = tuple(elements), tuple(epilogues)
    narrow = tuple(element for element in elements if element is not ElementKind.F64)
    in_f32 = OneOf(field="compute", allowed=(ElementKind.F32,))
    cores = tuple(
        sku
        for kernel in _TENSOR_CORE_KERNELS
        for weight in kernel.weights
        for sku in cuda_skus(
            descriptor,
            module,
            narrow,
            (weight,),
            epilogues,
            suffix=f"_{kernel.variant}",
            arch=kernel.arch,
            flags=partial(_flags, descriptor, unpacks=kernel.unpacks(weight)),
            guarantee=partial(_guarantee, ElementKind.S32),
            constraints=(*constraints, in_f32, *kernel.rules.constraints(code_of(weight))),
            **_reading(kernel, workspace, unpacks=kernel.unpacks(weight)),
            **fields,
        )
    )
    any_shape = tuple(
        sku
        for weights in (CODES8, (ElementKind.S4,))
        for sku in cuda_skus(
            descriptor,
            module,
            elements,
            weights,
            epilogues,
            flags=partial(_plain_flags, descriptor, unpacks=weights != CODES8),
            guarantee=partial(_guarantee, ElementKind.S64),
            constraints=(*constraints, *plain.CONSTRAINTS),
            entry_point="quantized_linear_codes" if descriptor.dynamic else descriptor.op_name(),
            **_reading(_PLAIN, workspace, unpacks=weights != CODES8),
            **fields,
        )
    )
    reference = numpy_skus(
        descriptor,
        module,
        elements,
        (*CODES8, ElementKind.S4),
        epilogues,
        # NumPy adds exactly at any K, which is what an s64 accumulator does.
        precision_guarantee=PrecisionGuarantee(math_precision=MathPrecision.INT8, accumulator=ElementKind.S64),
        constraints=constraints,
        summary="exact integer product through BLAS",
    )
    return (*cores, *any_shape, *reference)


def _reading(kernel: _Kernel, workspace: tuple[WorkspaceTerm, ...], *, unpacks: bool) -> dict[str, Any]:
    """Return the fields of a SKU that depend on whether its kernel reads the weight, or the codes unpacked from it."""
    variant, summary, workspace = kernel.variant, kernel.summary, (*workspace, *kernel.workspace)
    if not unpacks:
        launch = f"{kernel.rules.__name__}:launch"
        return {"variant": variant, "summary": summary, "workspace": workspace, "launch": launch}
    return {
        "variant": f"expanded_{variant}",
        "summary": f"the weight unpacked in front, then: {summary}",
        "workspace": (*workspace, *expanded.WORKSPACE),
        "launch": f"{expanded.__name__}:{variant}",
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
    own = (f"-DSKUDA_DATA={element}", "-DSKUDA_CODE=s8") if descriptor.dynamic else (f"-DSKUDA_REAL={element.compute}",)
    return ("-fmad=false", *own, *_weight_flags(weight, unpacks=unpacks))
