"""Launch rules of the kernels of attention. Pure: nothing here needs a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skuda.kernels.attention.cache import PAGE
from skuda.kernels.launch import Constant, Launch, Parameter, Step, TensorMap, pointers, s32, s64
from skuda.registry.elements import ElementKind

if TYPE_CHECKING:
    from skuda.kernels.attention.attention import AttentionDescriptor
    from skuda.registry.device import Device

_WARP, _WARPS = 32, 2
_ROWS = 16
"""Rows of a warp."""
_MOST_BLOCKS = 2**31 - 1
_WARPGROUP_THREADS, _WARPGROUP_ROWS = 384, 128
_WARPGROUP_SHARED = 218_176
"""SHARED of ``attention_warpgroup.cu``."""
_CHUNKS = 8
"""Chunks of 16 bytes that a thread of ``quantized_rows`` holds."""
_THREADS, _MOST_THREADS = 256, 512
"""Threads of its blocks: where several tokens share one, and at most where a token has one of its own."""


def attention(problem: AttentionDescriptor, device: Device) -> Launch:
    """Launch a warp for every 16 rows of a sequence and head of keys."""
    if not problem.tokens:
        return Launch(steps=())
    step = Step(
        entry=f"attention_{problem.head_size}",
        grid=(min(-(-_tiles(problem, _ROWS) * problem.kv_heads // _WARPS), _MOST_BLOCKS), 1, 1),
        block=(_WARP * _WARPS, 1, 1),
        parameters=parameters(problem),
    )
    return quantized(problem, device, Launch(steps=(step,)))


def warpgroup(problem: AttentionDescriptor, device: Device) -> Launch:
    """Launch a block of threads for every 128 rows of a sequence and head of keys (``attention_warpgroup.cu``)."""
    if not problem.tokens:
        return Launch(steps=())
    tiles, rows = _tiles(problem, _WARPGROUP_ROWS), problem.pages * problem.kv_heads * PAGE
    step = Step(
        entry="attention_warpgroup",
        grid=(tiles * problem.kv_heads, 1, 1),
        block=(_WARPGROUP_THREADS, 1, 1),
        parameters=(
            TensorMap("k_codes", rows, PAGE, PAGE),
            TensorMap("v_codes", rows, PAGE, PAGE),
            *parameters(problem),
            *s32(tiles),
        ),
        shared=_WARPGROUP_SHARED,
        overlaps=device.overlaps_launches,
    )
    launch = Launch(steps=(step,), aligned=("q_codes", "k_scale", "v_scale", "output"))
    return quantized(problem, device, launch)


def _tiles(problem: AttentionDescriptor, rows: int) -> int:
    """Return how many tiles of so many rows there are; see ``attention.cuh``."""
    return problem.tokens * problem.group // rows + problem.sequences + 1


def parameters(problem: AttentionDescriptor) -> tuple[Parameter, ...]:
    """Return what the ATTENTION_PARAMETERS macro of ``attention.cuh`` declares."""
    return (
        *pointers("q_codes", "q_scale", "k_codes", "k_scale", "v_codes", "v_scale"),
        *pointers("block_table", "lengths", "starts", "output"),
        Constant(ElementKind.F32, problem.exponent),
        *s32(problem.tokens, problem.group, problem.kv_heads, problem.sequences, problem.pages),
        *s32(problem.most_blocks, problem.causal, problem.window or 0),
    )


def quantized(problem: AttentionDescriptor, device: Device, launch: Launch) -> Launch:
    """Return a launch that writes `output`, with the step of ``quantized_rows.cuh`` if the problem wants codes of it.

    `output` is scratch then. The source of the launch includes that header.
    """
    if not problem.quantized:
        return launch
    columns, bits = problem.heads * problem.head_size, problem.output_element.bits
    threads = -(-columns * bits // (128 * _CHUNKS))
    lanes = min(_MOST_THREADS, 1 << (threads - 1).bit_length())
    block = lanes if lanes > _WARP else _THREADS
    step = Step(
        entry="quantized_rows",
        grid=(-(-problem.tokens * lanes // block), 1, 1),
        block=(block, 1, 1),
        parameters=(
            *pointers("output", "output_codes", "output_scale"),
            *s64(problem.tokens, columns),
            *s32(lanes),
        ),
        overlaps=device.overlaps_launches,
    )
    scratch = ("output", problem.tokens * columns * bits // 8)
    return launch._replace(steps=(*launch.steps, step), scratch=(*launch.scratch, scratch))
