"""The records: which ops torch serves here, for which problems, and what it promises about the bits."""

from __future__ import annotations

from itertools import product
from typing import Any

from skuda.registry import (
    ArchSku,
    Between,
    ElementKind,
    EpilogueKind,
    KernelSku,
    LayoutSku,
    MultipleOf,
    OneOf,
    PrecisionGuarantee,
)

F32, F64, S8, U8 = ElementKind.F32, ElementKind.F64, ElementKind.S8, ElementKind.U8
NARROW = (F32, ElementKind.F16, ElementKind.BF16)
LAYERS = (F32, ElementKind.BF16)
EXACT_EPILOGUES = (EpilogueKind.IDENTITY, EpilogueKind.BIAS, EpilogueKind.BIAS_RELU)

# An int8 product is at most 2^14, so an s32 holds the sum of this many of them, whatever the codes are. And at least 2:
# for k = 1, torch 2.13 reads beside its operands on the CPU, as the conformance suite found out.
EXACT_SUM = Between(field="k", minimum=2, maximum=(1 << 17) - 1)
INTEGER = {"math_precision": "int8", "accumulator": "s32"}


def linear_guarantee(epilogue: EpilogueKind) -> PrecisionGuarantee:
    """Sum, scaling, bias and relu are exact or rounded once each, as in the reference; erfc and exp are torch's own."""
    if epilogue in EXACT_EPILOGUES:
        return PrecisionGuarantee(**INTEGER)
    # Vector and scalar code may differ in the last bit, and which of them runs depends on shape and threads.
    return PrecisionGuarantee(**INTEGER, max_ulp=2, batch_invariant=False, bit_stable_on_same_hardware=False)


def linear(op: str, columns: str, own: tuple[OneOf, ...], **fields: Any) -> list[KernelSku]:
    """Offer a linear op through `torch._int_mm`; on a card that takes more than 16 rows and multiples of 8 only."""
    on_card = (Between(field="m", minimum=17), *(MultipleOf(field=name, divisor=8) for name in ("k", columns)))
    plain = (OneOf(field="has_weight_zero_point", allowed=(False,)), EXACT_SUM, *own)
    return [
        KernelSku(
            category="quantization",
            op=op,
            element=element,
            aux_element=S8,
            layout=LayoutSku.RCR,
            epilogue=epilogue,
            arch=arch,
            backend=backend,
            variant="int_mm",
            precision_guarantee=linear_guarantee(epilogue),
            constraints=(*plain, *more),
            source="skuda_torch.functions",
            entry_point=op,
            summary="torch._int_mm, epilogue in separate operations",
        )
        for backend, arch, more in (("torch", ArchSku.CPU, ()), ("torch_cuda", ArchSku.SM_80, on_card))
        for element, epilogue in product(LAYERS, EpilogueKind)
    ]


def elementwise(op: str, elements: tuple[ElementKind, ...], codes: tuple[ElementKind | None, ...]) -> list[KernelSku]:
    """Offer an elementwise op as torch operations, each of which is one operation of the reference."""
    return [
        KernelSku(
            category="quantization",
            op=op,
            element=element,
            aux_element=code,
            arch=arch,
            backend=backend,
            variant="eager",
            precision_guarantee=PrecisionGuarantee(math_precision=element.compute, accumulator=element.compute),
            source="skuda_torch.functions",
            entry_point=op,
            summary="torch operations, one after the other",
        )
        for backend, arch in (("torch", ArchSku.CPU), ("torch_cuda", ArchSku.SM_80))
        for element, code in product(elements, codes)
    ]


SKUS = (
    *linear(
        "quantized_linear",
        "c_out",
        (
            OneOf(field="code_element", allowed=(S8,)),
            OneOf(field="output_element", allowed=NARROW),
            OneOf(field="nonfinite", allowed=("ignore",)),
        ),
    ),
    *linear(
        "smoothquant_linear",
        "n",
        (OneOf(field="activation_element", allowed=(S8,)), OneOf(field="act_zero_point", allowed=(0,))),
    ),
    *elementwise("quantize_per_tensor", (*NARROW, F64), (S8, U8)),
    *elementwise("fake_quantize", (*NARROW, F64), (None,)),
)
