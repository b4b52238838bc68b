"""The paged int8 cache: where keys and values of a position lie, and what tables and lengths may hold.

A sequence has positions 0, 1, 2, ...; block b holds positions 128 b to 128 b + 127, in page `block_table[s, b]`. So a
position is a token's place in its own sequence, and pages may lie in any order and belong to several sequences.

Keys lie as [pages, kv_heads, 128, head_size]. Values are transposed, [pages, kv_heads, head_size, 128], because int8
operands of tensor cores lie along the axis that is summed; `column_of` gives their order. Each key and value of a head
has one scale. Slots that no position of a sequence names may hold anything, also NaN as a scale.

New tokens of all sequences are rows one after another: row `starts[s] + i` is token i of sequence s and has position
`lengths[s] - (starts[s + 1] - starts[s]) + i`; `lengths` counts the new tokens, too. A row with a negative position is
padding: it has no slot, and sees nothing. Rows from `starts[sequences]` on belong to no sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
from pydantic import model_validator

from skuda.registry.argument import ArgumentSpec, Role
from skuda.registry.descriptor import Descriptor
from skuda.registry.elements import ElementKind
from skuda.registry.errors import InvalidProblem
from skuda.registry.value import Extent
from skuda.registry.vocabulary import OpCategory

Array = npt.NDArray[Any]
PAGE = 128
"""Positions of a page."""
CODE_BOUNDS = (-127, 127)
"""Bounds of all codes, inclusive."""
CHUNK = 4
"""Blocks of a chunk, which are added before chunks are."""
HEAD_SIZES = (32, 64, 128)
"""Elements of a head that kernels exist for."""
TABLES = (
    ArgumentSpec("block_table", Role.INPUT, ElementKind.S32, "sequences, most_blocks"),
    ArgumentSpec("lengths", Role.INPUT, ElementKind.S32, "sequences"),
    ArgumentSpec("starts", Role.INPUT, ElementKind.S32, "boundaries"),
)
"""The pages of each sequence, its number of positions, and the first row of each sequence and the end of the last."""


def cache_arguments(role: Role) -> tuple[ArgumentSpec, ...]:
    """Return the codes and scales of keys and values as arguments of a role."""
    scales = "pages, kv_heads, 128"
    return (
        ArgumentSpec("k_codes", role, ElementKind.S8, "pages, kv_heads, 128, head_size"),
        ArgumentSpec("k_scale", role, ElementKind.F32, scales),
        ArgumentSpec("v_codes", role, ElementKind.S8, "pages, kv_heads, head_size, 128"),
        ArgumentSpec("v_scale", role, ElementKind.F32, scales),
    )


class CacheProblem(Descriptor):
    """The base of descriptors of ops on a paged cache.

    Attributes
    ----------
    tokens : int
        New tokens of all sequences, one row each.
    kv_heads : int
        Heads of keys and values.
    head_size : int
        Elements of a head: 32, 64 or 128.
    sequences : int
        Sequences.
    pages : int
        Pages of the cache, of 128 positions each.
    most_blocks : int
        Columns of `block_table`: the most pages that a sequence has.
    """

    category: ClassVar[OpCategory] = OpCategory.ATTENTION
    tokens: Extent
    kv_heads: Extent
    head_size: Extent
    sequences: Extent
    pages: Extent
    most_blocks: Extent

    @model_validator(mode="after")
    def _sizes(self) -> Self:
        if self.head_size not in HEAD_SIZES:
            self.refuse("head_size", self.head_size, f"be one of {', '.join(map(str, HEAD_SIZES))}")
        if self.kv_heads < 1:
            self.refuse("kv_heads", self.kv_heads, "be at least 1")
        if self.most_blocks * PAGE >= 2**31:
            self.refuse("most_blocks", self.most_blocks, f"be less than {2**31 // PAGE}, so that positions fit s32")
        return self

    @property
    def boundaries(self) -> int:
        """Elements of `starts`."""
        return self.sequences + 1


def column_of(position: Any) -> Any:
    """Return the column of `v_codes` that holds a position of a page.

    Inside 16 positions, column 4 c + 2 h + b holds position 8 h + 2 c + b: then the sums of the first product are, as a
    thread of a tensor core has them, the operand of the second.
    """
    return (position & ~15) | (position & 6) << 1 | (position & 8) >> 2 | (position & 1)


def check_tables(problem: CacheProblem, block_table: Array, lengths: Array, starts: Array) -> None:
    """Check what tables hold: kernels trust it, and stay inside of the arrays whatever it is.

    Raises
    ------
    InvalidProblem
        For `starts` that do not begin at 0, decrease, or end beyond the rows; `lengths` below 0 or beyond the table;
        entries of `block_table`, among those that a length needs, outside of the pages.
    """
    subject = type(problem).__name__
    new, counts = np.diff(starts.astype(np.int64)), lengths.astype(np.int64)
    blocks = -(-counts // PAGE)
    needed = np.arange(problem.most_blocks) < blocks[:, None]

    def each(name: str, values: Array, good: Array, must: Callable[[int], str]) -> None:
        if not good.all():
            at = tuple(map(int, np.argwhere(~good)[0]))
            raise InvalidProblem(subject, f"{name}{list(at)}", str(int(values[at])), must(at[0]))

    rising = np.concatenate(([starts[0] == 0], new >= 0))
    each("starts", starts, rising, lambda s: f"be at least {starts[s - 1]}, the start before it" if s else "be 0")
    each("starts", starts, starts <= problem.tokens, lambda _: f"be at most tokens = {problem.tokens}")
    each("lengths", lengths, counts >= 0, lambda _: "be at least 0")
    most = problem.most_blocks * PAGE
    each("lengths", lengths, counts <= most, lambda _: f"be at most {most}, the positions of most_blocks pages")
    inside = (block_table >= 0) & (block_table < problem.pages)
    each("block_table", block_table, inside | ~needed, lambda _: f"be a page, in [0, {problem.pages - 1}]")
