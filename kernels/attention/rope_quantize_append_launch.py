"""The launch rule of the kernels of ``rope_quantize_append.cu``. Pure: nothing here needs a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skuda.kernels.launch import Constant, Launch, Parameter, Step, pointers, s32, s64, strided
from skuda.registry.elements import ElementKind
from skuda.registry.vocabulary import RotaryLayout

if TYPE_CHECKING:
    from skuda.kernels.attention.rope_quantize_append import RopeQuantizeAppendDescriptor
    from skuda.registry.device import Device

_OCTET = 8
_TILE = 32
"""Positions of a tile of values, and heads of a block beside them."""
_THREADS = 256
_WARP = 32
_FEW = 16
"""Below so many new tokens for each sequence, on average, most of a tile of values would be empty."""


def append(problem: RopeQuantizeAppendDescriptor, device: Device) -> Launch:
    """Launch one step: a part of a row in each block and, where sequences have many new tokens, tiles of values."""
    if not problem.tokens:
        return Launch(steps=())
    lanes = problem.head_size // _OCTET
    tiled = problem.tokens >= _FEW * problem.sequences > 0
    per_row = problem.heads + problem.kv_heads * (1 if tiled else 2)
    threads = _TILE * lanes if tiled else min(_THREADS, -(-per_row * lanes // _WARP) * _WARP)
    chunks = -(-per_row * lanes // threads)
    row_blocks = problem.tokens * chunks
    tiles = problem.tokens // _TILE + 2 * problem.sequences if tiled else 0
    step = Step(
        entry=f"rope_quantize_append_{'tiles' if tiled else 'rows'}",
        grid=(row_blocks + tiles * problem.kv_heads, 1, 1),
        block=(threads, 1, 1),
        parameters=_parameters(problem, chunks, row_blocks),
        overlaps=device.overlaps_launches,
    )
    return Launch(steps=(step,))


def _parameters(problem: RopeQuantizeAppendDescriptor, chunks: int, row_blocks: int) -> tuple[Parameter, ...]:
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
        *s32(problem.rotary_layout is RotaryLayout.INTERLEAVED, chunks, row_blocks),
    )
