"""Element kinds: what one number in an array is."""

from __future__ import annotations

from enum import StrEnum


class ElementKind(StrEnum):
    """The type of one element. The value is the short name used in descriptors, ids and reports.

    ``s4`` and ``u4`` are stored two to a byte, low nibble first; every row (run along the last axis) starts at a byte.
    ``s16`` is stored in s8: a row has the high halves of all its elements, then the low ones. An element is 256 high +
    low, with high = (element + 128) >> 8; products of halves are products of s8.
    """

    __hash__ = str.__hash__  # an enumeration's own is a slower Python function

    F16 = "f16"
    BF16 = "bf16"
    F32 = "f32"
    F32_STRICT = "f32_strict"
    F64 = "f64"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"
    S4 = "s4"
    U4 = "u4"
    S8 = "s8"
    U8 = "u8"
    S16 = "s16"
    S32 = "s32"
    U32 = "u32"
    S64 = "s64"
    BOOL = "bool"
    BIN = "bin"
    COMPLEX32 = "complex32"
    COMPLEX64 = "complex64"

    @property
    def bits(self) -> int:
        """Bits of storage per element."""
        return _BITS[self]

    @property
    def is_float(self) -> bool:
        """Whether this is one of the floating elements of the quantization family."""
        return self in FLOATS

    @property
    def is_packed(self) -> bool:
        """Whether two elements share a byte."""
        return self in (ElementKind.S4, ElementKind.U4)

    @property
    def is_split(self) -> bool:
        """Whether an element has two halves, which are stored apart."""
        return self is ElementKind.S16

    @property
    def halves(self) -> int:
        """Bytes in which an array has an element, each at its own place: 2 for s16, else 1."""
        return 2 if self is ElementKind.S16 else 1

    @property
    def integer_range(self) -> tuple[int, int] | None:
        """Smallest and largest value of an integer element, else None."""
        return _RANGES.get(self)

    @property
    def compute(self) -> ElementKind:
        """The compute type C of arithmetic on this element: f64 for f64, else f32."""
        return _COMPUTE[self]


_BITS = {
    ElementKind.F16: 16,
    ElementKind.BF16: 16,
    ElementKind.F32: 32,
    ElementKind.F32_STRICT: 32,
    ElementKind.F64: 64,
    ElementKind.FP8_E4M3: 8,
    ElementKind.FP8_E5M2: 8,
    ElementKind.S4: 4,
    ElementKind.U4: 4,
    ElementKind.S8: 8,
    ElementKind.U8: 8,
    ElementKind.S16: 16,
    ElementKind.S32: 32,
    ElementKind.U32: 32,
    ElementKind.S64: 64,
    ElementKind.BOOL: 8,
    ElementKind.BIN: 1,
    ElementKind.COMPLEX32: 64,
    ElementKind.COMPLEX64: 128,
}

_COMPUTE = dict.fromkeys(ElementKind, ElementKind.F32) | {ElementKind.F64: ElementKind.F64}

_RANGES = {
    ElementKind.S4: (-8, 7),
    ElementKind.U4: (0, 15),
    ElementKind.S8: (-128, 127),
    ElementKind.U8: (0, 255),
    ElementKind.S16: (-32_639, 32_639),  # whose high halves are within -127..127
    ElementKind.S32: (-(2**31), 2**31 - 1),
    ElementKind.U32: (0, 2**32 - 1),
    ElementKind.S64: (-(2**63), 2**63 - 1),
}

FLOATS = (ElementKind.F32, ElementKind.F64, ElementKind.F16, ElementKind.BF16)
"""The floating elements of the quantization family."""

CODES = (ElementKind.S8, ElementKind.U8, ElementKind.S4, ElementKind.U4)
"""The integer elements that quantized values are stored in."""

CODES8 = (ElementKind.S8, ElementKind.U8)
"""The codes of one byte."""

WHOLE_CODES = (*CODES8, ElementKind.S16)
"""The codes of whole bytes."""
