"""Launch rule of ``attention.cu``. Pure: nothing here needs a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skuda.kernels.launch import Constant, Launch, Step, pointers, s32
from skuda.registry.elements import ElementKind

if TYPE_CHECKING:
    from skuda.kernels.attention.attention import AttentionDescriptor
    from skuda.registry.device import Device

_WARP, _WARPS = 32, 2
_ROWS = 16
"""Rows of a warp."""
_MOST_BLOCKS = 2**31 - 1


def attention(problem: AttentionDescriptor, device: Device) -> Launch:  # noqa: ARG001  every launch rule has this signature
    """Launch a warp for every 16 rows of a sequence and head of keys."""
    if not problem.tokens:
        return Launch(steps=())
    # Tiles of a sequence begin anew; the last ones belong to the rows of no sequence.
    tiles = problem.tokens * problem.group // _ROWS + problem.sequences + 1
    step = Step(
        entry=f"attention_{problem.head_size}",
        grid=(min(-(-tiles * problem.kv_heads // _WARPS), _MOST_BLOCKS), 1, 1),
        block=(_WARP * _WARPS, 1, 1),
        parameters=(
            *pointers(*(argument.name for argument in problem.arguments())),
            Constant(ElementKind.F32, problem.exponent),
            *s32(problem.tokens, problem.group, problem.kv_heads, problem.sequences, problem.pages),
            *s32(problem.most_blocks, problem.causal, problem.window or 0),
        ),
    )
    return Launch(steps=(step,))
