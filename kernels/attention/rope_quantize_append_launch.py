"""The launch rule of the kernels of ``rope_quantize_append.cu``. Pure: nothing here needs a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skuda.kernels.launch import ANY_ROWS, Constant, Launch, Parameter, Step, pointers, s32, s64, strided
from skuda.registry.elements import ElementKind
from skuda.registry.vocabulary import RotaryLayout

if TYPE_CHECKING:
    from skuda.kernels.attention.rope_quantize_append import RopeQuantizeAppendDescriptor
    from skuda.registry.device import Device

_OCTET = 8
_TILE = 64
"""Positions of a tile of values, of which a thread takes 4."""
_THREADS = 256
_WARP = 32
_MOST_TURNS = 4
"""How often at most a warp takes as many heads of a token as it has threads for, beside tiles; elsewhere once."""
_RESIDENT = 32
"""Warps of a multiprocessor. As long as there are fewer, none takes heads more than once."""
_FEW = 16
"""Below so many new tokens for each sequence, on average, most of a tile of values would be empty."""


def append(problem: RopeQuantizeAppendDescriptor, device: Device) -> Launch:
    """Launch one step: a part of a row for each warp and, where sequences have many new tokens, tiles of values."""
    if not problem.tokens:
        return Launch(steps=())
    lanes = problem.head_size // _OCTET
    tiled = problem.tokens >= _FEW * problem.sequences > 0
    queries, keys = (-(-heads * lanes // _WARP) for heads in (problem.heads, problem.kv_heads))
    full = problem.tokens * (queries + keys) // (_RESIDENT * max(1, device.sm_count))
    turns = max(1, min(full, _MOST_TURNS)) if tiled else 1
    q_parts, kv_parts = -(-queries // turns), -(-keys // turns)
    parts = q_parts + kv_parts * (1 if tiled else 2)
    warps = _TILE // 4 * lanes // _WARP if tiled else min(_THREADS // _WARP, parts)
    row_blocks = -(-problem.tokens * parts // warps)
    tiles = problem.tokens // _TILE + 2 * problem.sequences if tiled else 0
    value_blocks = tiles * problem.kv_heads
    step = Step(
        entry=f"rope_quantize_append_{'tiles' if tiled else 'rows'}",
        grid=(value_blocks + row_blocks, 1, 1),
        block=(_WARP * warps, 1, 1),
        parameters=_parameters(problem, q_parts, kv_parts, turns, value_blocks),
        overlaps=device.overlaps_launches,
    )
    return Launch(steps=(step,), alike=ANY_ROWS)


def _parameters(problem: RopeQuantizeAppendDescriptor, *blocks: int) -> tuple[Parameter, ...]:
    """Return the parameters that the PARAMETERS macro of ``rope_quantize_append.cu`` declares."""
    given = {argument.name for argument in problem.arguments()}
    optional = [pointers(name) if name in given else s64(0) for name in ("q_norm", "k_norm", "k_offset")]
    sizes = (problem.heads, problem.kv_heads, problem.head_size, problem.sequences, problem.pages)
    return (
        *strided("q", "k", "v"),
        *optional[0],
        *optional[1],
        *pointers("cos_sin"),
        *optional[2],
        *pointers("block_table", "lengths", "starts", "k_codes", "k_scale", "v_codes", "v_scale", "q_codes", "q_scale"),
        Constant(ElementKind.F32, problem.eps),
        *s64(problem.tokens),
        *s32(*sizes, problem.most_blocks, problem.most_positions, problem.rotated),
        *s32(problem.rotary_layout is RotaryLayout.INTERLEAVED, *blocks),
    )
