"""Pack weight: 4-bit codes with an integer scale and offset per group, in the layout that kernels read.

Formula
-------
w[n, k] = codes[n, k] group_scale[n, g] + group_offset[n, g], exactly, is the 8-bit code that is packed; g is
k // group_size, or 0 where the whole row is one group. Kernels know levels from 0 to 15 and scales of at least 0:
w[n, k] = step[n, g] level[n, k] + least[n, g], where c is the least code that there is, and
- for group_scale >= 0: level = codes - c, step = group_scale, least = group_offset + c group_scale;
- for group_scale < 0: level = c + 15 - codes, step = -group_scale, least = group_offset + (c + 15) group_scale.
`output` holds level modulo 16, step modulo 256 and least + 128 modulo 256, as `skuda.kernels.linear.packed` lays them
out. Levels behind the last row or column are 0, and so are both bytes of groups behind them.
misfits = how many codes cannot be packed, at most 2^31 - 1: those outside of c..c + 15, those whose w is outside of
-128..127, and all of a group with step > 255 or least < -128, even if no code of it has level 0. Without misfits,
`unpack_weight` returns every w.

Elements
--------
codes s8, which holds -8 to 7 (c = -8), or u8, which holds 0 to 15 (c = 0); one code a byte. `group_scale` and
`group_offset` s32, `output` u8, `misfits` s32.

Units
-----
`group_scale` is steps of w per step of a code, and `group_offset` is steps of w.

Errors
------
`InvalidProblem` for `n` or `k` outside [0, 2^31-1]; a `group_size` other than 0, 32, 64 and 128; an argument that is
missing, unknown, of another element or shape, or that overlaps an output. Codes that cannot be packed are counted, not
refused.
`Unsupported` for an element outside the list above.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from pydantic import model_validator

from skuda.kernels.dtypes import storage_dtype
from skuda.kernels.linear.packed import GROUP_SIZES, packed, parts_of, shape_of
from skuda.kernels.offers import cuda_skus, numpy_skus
from skuda.registry.argument import ArgumentSpec, Role
from skuda.registry.descriptor import Descriptor
from skuda.registry.elements import CODES8, ElementKind
from skuda.registry.guarantee import PrecisionGuarantee
from skuda.registry.op import Case, Op, Values
from skuda.registry.value import Extent, Integer
from skuda.registry.vocabulary import MathPrecision, OpCategory

Array = npt.NDArray[Any]
INTEGERS = PrecisionGuarantee(math_precision=MathPrecision.INT8, accumulator=ElementKind.S32)
SIZES = ((17, 200), (16, 128), (0, 8), (5, 0), (1, 1), (3, 7), (33, 129), (50, 420), (9, 1000), (128, 96))
"""n, k of the cases: from less than a block to several of them, whole or not."""
_MOST = 2**31 - 1
"""The largest number of misfits."""


class PackedWeight(NamedTuple):
    """The op's result."""

    output: Any
    """The packed weight, u8 [units, blocks, bytes]."""
    misfits: Any
    """How many codes cannot be packed, s32 [1]."""


class PackWeightDescriptor(Descriptor):
    """Problem of `pack_weight`.

    Attributes
    ----------
    n, k : int
        Rows and columns of the weight.
    code_element : ElementKind
        Element of `codes`: s8, for codes from -8 to 7, or u8, for codes from 0 to 15.
    group_size : int
        Elements of a row that share a scale and an offset: 32, 64 or 128; or 0, for the whole row. The last group of a
        row may have fewer.
    """

    op: Literal["pack_weight"] = "pack_weight"
    category: ClassVar[OpCategory] = OpCategory.SHAPE_LAYOUT
    element_field: ClassVar[str] = "code_element"
    n: Extent
    k: Extent
    code_element: ElementKind
    group_size: Integer = 0
    result = PackedWeight
    signature = (
        ArgumentSpec("codes", Role.INPUT, "code_element", "n, k"),
        ArgumentSpec("group_scale", Role.INPUT, ElementKind.S32, "n, groups"),
        ArgumentSpec("group_offset", Role.INPUT, ElementKind.S32, "n, groups"),
        ArgumentSpec("output", Role.OUTPUT, ElementKind.U8, "*packed_shape"),
        ArgumentSpec("misfits", Role.OUTPUT, ElementKind.S32, "1"),
    )

    @model_validator(mode="after")
    def _rules(self) -> Self:
        if self.group_size not in (0, *GROUP_SIZES):
            self.refuse("group_size", self.group_size, "be 0, for whole rows, or one of 32, 64, 128")
        return self

    @property
    def groups(self) -> int:
        """Groups of a row."""
        return -(-self.k // self.group_size) if self.group_size else 1

    @property
    def group_width(self) -> int:
        """Elements of a row that share a scale, as a divisor of columns."""
        return self.group_size or max(self.k, 1)

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """Shape of the packed weight."""
        return shape_of(self.n, self.k, self.group_size)

    @property
    def least_code(self) -> int:
        """The code c of the formula."""
        return -8 if self.code_element is ElementKind.S8 else 0


def reference(
    problem: PackWeightDescriptor, *, codes: Any, group_scale: Any, group_offset: Any, output: Any, misfits: Any
) -> None:
    """Write `output` and `misfits` by the formula of the module."""
    count, low = 0, problem.least_code
    for index, (rows, columns) in parts_of(problem.n, problem.k):
        level = codes[rows, columns].astype(np.int64) - low
        group = np.arange(columns.start, columns.stop) // problem.group_width
        mine = rows, slice(group[0], group[-1] + 1)
        scale, offset = group_scale[mine].astype(np.int64), group_offset[mine].astype(np.int64)
        turned, step = scale < 0, np.abs(scale)
        least = offset + np.where(turned, low + 15, low) * scale
        wrong, of = (step > 255) | (least < -128), group - group[0]
        level = np.where(turned[:, of], 15 - level, level)
        w = step[:, of] * level + least[:, of]
        count += int(((level < 0) | (level > 15) | (w < -128) | (w > 127) | wrong[:, of]).sum())
        output[index] = packed(level & 15, step & 255, (least + 128 & 255) - 128, problem.group_size)
    misfits[0] = min(count, _MOST)


def draw(problem: PackWeightDescriptor, values: Values, rng: np.random.Generator) -> dict[str, Any]:
    """Draw a weight with scales of both signs; for values other than ``normal`` and ``zero``, some codes misfit."""
    level, step, least = drawn((problem.n, problem.k), problem.groups, problem.group_width, rng)
    low, turned = problem.least_code, rng.random(step.shape) < 0.5
    scale = np.where(turned, -step, step)
    offset = least - np.where(turned, low + 15, low) * scale
    of = np.arange(problem.k) // problem.group_width
    codes = low + np.where(turned[:, of], 15 - level, level)
    if values == "zero":
        codes, scale, offset = np.zeros_like(codes), np.zeros_like(scale), np.zeros_like(offset)
    elif values != "normal":
        odd = rng.integers(0, 256, codes.shape)  # modulo 256, in the element
        codes = np.where(rng.random(codes.shape) < rng.choice([0, 0.1]), odd, codes)
        beside = rng.integers(-2, 3, (2, *scale.shape)) * (rng.random(scale.shape) < 0.2)
        scale, offset = scale + beside[0], offset + beside[1]
        ends = [-(2**31), 2**31 - 1, -256, -255, 255, 256, -1, 0, 1]
        scale = np.where(rng.random(scale.shape) < 0.2, rng.choice(ends, scale.shape), scale)
        ends = [-(2**31), 2**31 - 1, -129, -128, 127, 128]
        offset = np.where(rng.random(offset.shape) < 0.2, rng.choice(ends, offset.shape), offset)
    dtype = storage_dtype(problem.code_element)
    return {
        "codes": codes.astype(dtype),
        "group_scale": scale.astype(np.int32),
        "group_offset": offset.astype(np.int32),
    }


def drawn(shape: tuple[int, int], groups: int, width: int, rng: np.random.Generator) -> tuple[Array, Array, Array]:
    """Draw levels (n, k), and step and least code of groups of `width`: all codes fit, some at the ends of s8."""
    of = np.arange(shape[1]) // width
    most = rng.choice([1, 2, 7, 15, 15, 15], (shape[0], groups))
    step = rng.integers(0, 255 // most, endpoint=True)
    room = 255 - step * most
    above = np.where(rng.random(room.shape) < 0.5, rng.integers(0, room + 1), room * rng.integers(0, 2, room.shape))
    return rng.integers(0, most[:, of], endpoint=True), step, above - 128


def _cases() -> tuple[Case, ...]:
    """Return every element with every size of groups, over weights of every remainder."""
    values: tuple[Values, ...] = ("special", "normal", "infinite", "normal", "zero")
    plan = [(size, element, group) for size in SIZES for group in (*GROUP_SIZES, 0) for element in CODES8]
    return tuple(
        Case(
            PackWeightDescriptor(n=n, k=k, code_element=element, group_size=group),
            values[number % len(values)] if number >= len(CODES8) else "normal",
        )
        for number, ((n, k), element, group) in enumerate(plan)
    )


CASES = _cases()
SKUS = (
    *cuda_skus(
        PackWeightDescriptor,
        __name__,
        CODES8,
        launch="skuda.kernels.linear.pack_launch:pack_weight",
        guarantee=lambda *_: INTEGERS,
        variant="blocks",
        summary="a block of 16 x 128 codes per warp",
    ),
    *numpy_skus(PackWeightDescriptor, __name__, CODES8, precision_guarantee=INTEGERS),
)
OP = Op(PackWeightDescriptor, reference, CASES, SKUS, source="the layout of skuda.kernels.linear.packed", draw=draw)
