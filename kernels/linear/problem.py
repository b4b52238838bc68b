"""The problem that the linear ops share: y = x W^T with int8 codes, W stored as [N, K], and an epilogue."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import count, product
from typing import Any, ClassVar, Self

from pydantic import model_validator

from skuda.kernels.linear import packed
from skuda.registry.argument import ArgumentSpec, Role
from skuda.registry.descriptor import Descriptor
from skuda.registry.elements import CODES8, FLOATS, WHOLE_CODES, ElementKind
from skuda.registry.value import Extent, Integer
from skuda.registry.vocabulary import DynamicRangeScope, EpilogueKind, LayoutSku, OpCategory

Sizes = tuple[int, int, int]
OUTPUTS = (*FLOATS, *CODES8)
SUMS = (ElementKind.S32, ElementKind.S64)
"""The outputs that are exact sums: s64 for those of 16-bit codes."""
SCALE_SCOPES = (DynamicRangeScope.TOKEN, DynamicRangeScope.TENSOR)
"""Whether an activation has a scale for each row, or one for all."""
FEW_ROWS = 32
"""Rows of an activation that one block of a kernel for few tokens computes."""

MAX_SIZE = 2**31 - 1
"""The largest size of a problem."""
SIZES = ((17, 33, 65), (2, 3, 8), (0, 3, 4), (3, 0, 4), (3, 4, 0), (1, 1, 1), (5, 7, 1100), (130, 70, 40))
"""m, n, k of the ops' cases."""
ALIGNED_SIZES = ((31, 40, 64), (30, 264, 144), (3, 17, 1040), (20, 136, 400), (1, 8, 16))
"""m, n, k with K a multiple of 16, as TMA loads need."""
WIDE_SIZES = ((30, 40, 128), (3, 72, 384), (17, 136, 256))
"""m, n, k with K a multiple of 128, as kernels of sm_90a need where both operands have 16 bits."""
WEIGHTS_OF_S16 = (ElementKind.S8, ElementKind.S4, ElementKind.S16)
"""The weights beside an activation of 16-bit codes."""
SHIFTED = tuple(
    (sizes, *shifted)
    for shifted in ((True, False), (False, True), (True, True))
    for sizes in ((29, 40, 336), (580, 24, 48))
)
"""m, n, k with K a multiple of 16, and whether activation and weight have zero points.

The larger m is enough for a separate launch to add up the weight's codes.
"""


class LinearProblem(Descriptor):
    """The base of the linear descriptors.

    Attributes
    ----------
    dynamic : bool
        Whether the activation is floating and the op quantizes it; else it is given as codes.
    channels : str
        The field that counts output channels.
    """

    category: ClassVar[OpCategory] = OpCategory.QUANTIZATION
    layout: ClassVar[LayoutSku | None] = LayoutSku.RCR
    aux_field: ClassVar[str | None] = "weight_element"
    dynamic: ClassVar[bool]
    channels: ClassVar[str] = "n"
    weight_element: ElementKind = ElementKind.S8
    epilogue: EpilogueKind = EpilogueKind.IDENTITY
    has_weight_zero_point: bool = False
    group_size: Integer = 0

    @model_validator(mode="after")
    def _rules_of_weight(self) -> Self:
        sizes = ", ".join(map(str, packed.GROUP_SIZES))
        if self.weight_element is not ElementKind.S4:
            if self.group_size != 0:
                rule = f"be 0: a weight_element of {self.weight_element} has no groups, only s4 has"
                self.refuse("group_size", self.group_size, rule)
        elif self.group_size not in packed.GROUP_SIZES:
            self.refuse("group_size", self.group_size, f"be one of {sizes} for a weight_element of s4")
        elif self.has_weight_zero_point:
            rule = "be False for a weight_element of s4, whose groups have offsets instead"
            self.refuse("has_weight_zero_point", self.has_weight_zero_point, rule)
        if self.code_element.is_split and self.weight_element is ElementKind.U8:
            self.refuse("weight_element", self.weight_element, "be s8, s4 or s16 beside codes of 16 bits")
        if self.weight_element.is_split and not self.code_element.is_split:
            rule = f"be at most 8 bits beside an activation of {self.code_element} codes: 16 bits multiply 16 bits"
            self.refuse("weight_element", self.weight_element, rule)
        if self.code_element.is_split and self.has_weight_zero_point:
            rule = "be False beside codes of 16 bits, which are symmetric"
            self.refuse("has_weight_zero_point", self.has_weight_zero_point, rule)
        return self

    @classmethod
    def implied(cls, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Any]:
        """Return what the three axes of a packed weight say. Its rows are known only up to a multiple of 16."""
        shape = shapes.get("weight_q", ())
        if len(shape) != 3:
            return {}
        size = next((size for size in packed.GROUP_SIZES if packed.block_bytes(size) == shape[2]), None)
        if size is None:
            wanted = ", ".join(f"{packed.block_bytes(size)} for groups of {size}" for size in packed.GROUP_SIZES)
            cls.refuse("weight_q", f"shape {shape}", f"have as its last axis the bytes of a packed block: {wanted}")
        return {"weight_element": ElementKind.S4, "group_size": size, cls.channels: packed.ROWS * shape[0]}

    @property
    def weight_code(self) -> ElementKind:
        """Element of the codes that are multiplied: s8 for a packed weight."""
        return code_of(self.weight_element)

    @property
    def packed_shape(self) -> tuple[int, int, int]:
        """Shape of a packed weight."""
        _, n, k = self.sizes
        return packed.shape_of(n, k, self.group_size)

    @property
    def unpacked_pitch(self) -> int:
        """Bytes from row to row of the codes that a kernel unpacks: K, rounded up to a multiple of 16."""
        return -(-self.sizes[2] // 16) * 16

    @property
    def unpacked_bytes(self) -> int:
        """Bytes of the codes that a kernel unpacks."""
        return self.sizes[1] * self.unpacked_pitch

    @property
    def on_codes(self) -> Self:
        """The same problem on the s8 codes of its packed weight."""
        return self.model_copy(update={"weight_element": self.weight_code, "group_size": 0})

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, N and K: rows of the activation, output channels, inner size."""
        raise NotImplementedError

    @property
    def compute(self) -> ElementKind:
        """The type C that scales and epilogue are computed in."""
        raise NotImplementedError

    @property
    def output(self) -> ElementKind:
        """Element of the output."""
        raise NotImplementedError

    @property
    def code_element(self) -> ElementKind:
        """Element of the activation's codes."""
        raise NotImplementedError

    @property
    def sums_element(self) -> ElementKind:
        """Element of exact sums of its codes."""
        return sums_of(self.code_element)

    @property
    def k_of_halves(self) -> int:
        """K if the activation has codes of 16 bits, else 0, which is a multiple of everything."""
        return self.sizes[2] if self.code_element.is_split else 0

    @property
    def k_between_halves(self) -> int:
        """K if a box that reaches from high halves into low ones must not be multiplied, else 0."""
        return 0 if self.weight_element is ElementKind.S8 else self.k_of_halves

    @property
    def code_bytes(self) -> int:
        """Bytes of a row of the activation's codes."""
        return self.sizes[2] * self.code_element.halves

    @property
    def static_scale(self) -> tuple[float, int] | None:
        """Scale and zero point of the whole activation where they are part of the problem."""
        return None

    @property
    def scales_tokens(self) -> bool:
        """Whether each row of the activation has its own scale."""
        return self.dynamic

    @property
    def shifts_activation(self) -> bool:
        """Whether the activation has zero points other than 0; the kernel then adds up the weight's codes."""
        return False

    @property
    def has_zero_points(self) -> bool:
        """Whether the sums of products need to be corrected for zero points."""
        return self.has_weight_zero_point or self.shifts_activation

    @property
    def num_code_sums(self) -> int:
        """Sums of codes that zero points need: one a weight row for the activation's, one a token for the weight's."""
        m, n, _ = self.sizes
        return n * self.shifts_activation + m * self.has_weight_zero_point

    @property
    def rows_per_weight_sum(self) -> int:
        """Rows of the activation that use the sum of a weight row; `MAX_SIZE` if no such sum is needed."""
        return self.sizes[0] if self.shifts_activation else MAX_SIZE

    @property
    def tiles_beyond_few_rows(self) -> int:
        """Tiles of 16 activation rows by 64 weight rows; 0 if the activation has at most `FEW_ROWS`."""
        m, n, _ = self.sizes
        return 0 if m <= FEW_ROWS else -(-m // 16) * -(-n // 64)

    @property
    def reals(self) -> tuple[ElementKind, ...]:
        """The compute type C, or a narrower float."""
        return floats_up_to(self.compute)


def code_of(weight: ElementKind) -> ElementKind:
    """Return the element of a weight's codes: s8 for the packed one, s4."""
    return ElementKind.S8 if weight is ElementKind.S4 else weight


def half_of(code: ElementKind) -> ElementKind:
    """Return the element that kernels multiply: s8 for the halves of s16."""
    return ElementKind.S8 if code.is_split else code


def packed_cases(elements: Iterable[ElementKind]) -> Iterator[tuple[int, Sizes, bool, dict[str, Any]]]:
    """Yield number, m, n and k, whether the activation has zero points, and fields of cases with a packed weight.

    The fields are an element as ``element``, an epilogue, and those of the weight. Every element meets every epilogue.
    """
    numbers = count()
    for at, (element, epilogue) in enumerate(product(elements, EpilogueKind)):
        found = [(ALIGNED_SIZES[(at + at // 5) % len(ALIGNED_SIZES)], False)]
        if at % 2 == 0:
            found.append((SIZES[at // 2 % len(SIZES)], at % 4 == 0))
        if at % 3 == 0:
            found.append((SHIFTED[at // 3 % 2][0], True))
        for sizes, shifts in found:
            number = next(numbers)
            fields = {"element": element, "epilogue": epilogue, "weight_element": ElementKind.S4}
            yield number, sizes, shifts, fields | {"group_size": packed.GROUP_SIZES[number % 3]}


def wide_cases(elements: Iterable[ElementKind]) -> Iterator[tuple[int, Sizes, dict[str, Any]]]:
    """Yield number, m, n and k, and fields of cases with an activation of 16-bit codes, as `packed_cases` does."""
    numbers, others = count(), (*ALIGNED_SIZES, *SIZES)
    for at, (element, epilogue, weight) in enumerate(product(elements, EpilogueKind, WEIGHTS_OF_S16)):
        found = [WIDE_SIZES[at % len(WIDE_SIZES)]] if weight is not ElementKind.S8 else []
        if not found or at % 4 == 0:
            found.append(others[(at + at // 3) % len(others)])
        for sizes in found:
            number = next(numbers)
            group_size = packed.GROUP_SIZES[number % 3] if weight is ElementKind.S4 else 0
            fields = {"element": element, "epilogue": epilogue, "weight_element": weight, "group_size": group_size}
            yield number, sizes, fields


@cache
def floats_up_to(compute: ElementKind) -> tuple[ElementKind, ...]:
    """Return the elements of scales and bias: C and every narrower float."""
    return (compute, *(e for e in FLOATS if e.bits < compute.bits))


BIASED = tuple(kind for kind in EpilogueKind if kind.requires_bias)
"""The epilogues that take a bias."""


def weight_and_output(
    channels: str = "n", output: str = "output_element", scaled: Mapping[str, tuple[Any, ...]] | None = None
) -> tuple[ArgumentSpec, ...]:
    """Return the weight, its scale and zero point, bias, scale and zero point of output codes, and output.

    Parameters
    ----------
    channels : str
        The field that counts output channels.
    output : str
        The output's element.
    scaled : mapping of str to tuple, optional
        When the weight's scale is passed. By default always.
    """
    codes = {output: CODES8}
    of_s4 = {"weight_element": (ElementKind.S4,)}
    return (
        ArgumentSpec("weight_q", Role.INPUT, ElementKind.U8, "*packed_shape", when=of_s4),
        ArgumentSpec("weight_q", Role.INPUT, "weight_element", f"{channels}, k"),
        ArgumentSpec("weight_scale", Role.INPUT, "reals", channels, when=scaled or {}),
        ArgumentSpec(
            "weight_zero_point", Role.INPUT, ElementKind.S32, channels, when={"has_weight_zero_point": (True,)}
        ),
        ArgumentSpec("bias", Role.INPUT, "reals", channels, when={"epilogue": BIASED}),
        ArgumentSpec("output_scale", Role.SCALE, "compute", when=codes),
        ArgumentSpec("output_zero_point", Role.ZERO_POINT, ElementKind.S32, when=codes),
        ArgumentSpec("output", Role.OUTPUT, output, f"m, {channels}"),
    )


def scale_of_rows(
    name: str, element: str | ElementKind, when: Mapping[str, tuple[Any, ...]] | None = None
) -> tuple[ArgumentSpec, ...]:
    """Return an argument of one value per row of the activation, or of one for all, as `act_scale_scope` says."""
    when = when or {}
    return (
        ArgumentSpec(name, Role.INPUT, element, "m", when={**when, "act_scale_scope": (DynamicRangeScope.TOKEN,)}),
        ArgumentSpec(name, Role.INPUT, element, "1", when=when),
    )


class CodedProblem(LinearProblem):
    """The base of the linear descriptors whose activation is given as codes.

    Attributes
    ----------
    m, n, k : int
        Rows of the activation, output channels, inner size.
    activation_element : ElementKind
        Element of the activation's codes: s8, u8 or s16.
    weight_element : ElementKind
        Element of the weight's codes: s8 or u8; s16 if the activation has it; or s4 for a packed weight of 4-bit
        levels.
    output_element : ElementKind
        Element of the output.
    epilogue : EpilogueKind
        Steps fused with the product; all but ``identity`` take `bias`.
    has_weight_zero_point : bool
        Whether `weight_zero_point` is passed; never for s4.
    group_size : int
        Elements of a row of a packed weight that share a scale and an offset: 32, 64 or 128. 0 for others.
    """

    element_field: ClassVar[str] = "output_element"
    dynamic: ClassVar[bool] = False
    m: Extent
    n: Extent
    k: Extent
    activation_element: ElementKind = ElementKind.S8
    output_element: ElementKind

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, N and K: rows of the activation, output channels, inner size."""
        return self.m, self.n, self.k

    @property
    def output(self) -> ElementKind:
        """Element of the output."""
        return self.output_element

    @property
    def code_element(self) -> ElementKind:
        """Element of the activation's codes."""
        return self.activation_element

    @property
    def compute(self) -> ElementKind:
        """The type C that scales and epilogue are computed in."""
        return self.output_element.compute


def code_element_holding(q_min: int, q_max: int) -> ElementKind | None:
    """Return s8, u8 or s16, the first that holds [q_min, q_max], or None."""
    for element in WHOLE_CODES:
        low, high = element.integer_range or (0, 0)
        if low <= q_min and q_max <= high:
            return element
    return None


def longest_k(activation: ElementKind, weight: ElementKind, largest_sum: int = 2**31 - 1) -> int:
    """Return the largest K whose sums of magnitudes stay within a bound, by default s32's, whatever the codes are.

    Codes of 16 bits have a sum for each half. That of the low halves takes two products of 16 by 16 bits.
    """
    largest = 2 if activation.is_split and weight.is_split else 1
    for element in (activation, weight):
        low, high = half_of(element).integer_range or (0, 0)
        largest *= max(-low, high)
    return largest_sum // largest


def sums_of(activation: ElementKind) -> ElementKind:
    """Return the element of exact sums of an activation's codes."""
    return ElementKind.S64 if activation.is_split else ElementKind.S32


def longest_sum(weight: ElementKind) -> int:
    """Return the largest K whose sums stay within s32 beside the activation with the largest codes."""
    return longest_k(ElementKind.S16 if weight.is_split else ElementKind.U8, weight)
