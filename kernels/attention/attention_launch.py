"""Launch rules of the kernels of attention. Pure: nothing here needs a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skuda.kernels.attention.cache import PAGE
from skuda.kernels.launch import Constant, Launch, Parameter, Step, TensorMap, pointers, s32
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


def attention(problem: AttentionDescriptor, device: Device) -> Launch:  # noqa: ARG001  every launch rule has this signature
    """Launch a warp for every 16 rows of a sequence and head of keys."""
    if not problem.tokens:
        return Launch(steps=())
    step = Step(
        entry=f"attention_{problem.head_size}",
        grid=(min(-(-_tiles(problem, _ROWS) * problem.kv_heads // _WARPS), _MOST_BLOCKS), 1, 1),
        block=(_WARP * _WARPS, 1, 1),
        parameters=_parameters(problem),
    )
    return Launch(steps=(step,))


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
            *_parameters(problem),
            *s32(tiles),
        ),
        shared=_WARPGROUP_SHARED,
        overlaps=device.overlaps_launches,
    )
    return Launch(steps=(step,), aligned=("q_codes", "k_scale", "v_scale", "output"))


def _tiles(problem: AttentionDescriptor, rows: int) -> int:
    """Return how many tiles of so many rows there are; see ``attention.cuh``."""
    return problem.tokens * problem.group // rows + problem.sequences + 1


def _parameters(problem: AttentionDescriptor) -> tuple[Parameter, ...]:
    """Return the parameters that ATTENTION_PARAMETERS of ``attention.cuh`` declares."""
    return (
        *pointers(*(argument.name for argument in problem.arguments())),
        Constant(ElementKind.F32, problem.exponent),
        *s32(problem.tokens, problem.group, problem.kv_heads, problem.sequences, problem.pages),
        *s32(problem.most_blocks, problem.causal, problem.window or 0),
    )
