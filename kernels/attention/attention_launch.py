"""Launch rules of the kernels of attention. Pure: nothing here needs a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skuda.kernels.attention.cache import CHUNK, PAGE
from skuda.kernels.launch import (
    ANY_ROWS,
    MOST_ZEROS,
    ZEROS,
    Constant,
    Launch,
    Parameter,
    Step,
    TensorMap,
    pointers,
    s32,
    s64,
)
from skuda.registry.elements import ElementKind

if TYPE_CHECKING:
    from skuda.kernels.attention.attention import AttentionDescriptor
    from skuda.registry.device import Device

_WARP, _WARPS = 32, 2
_ROWS, _FEW_ROWS = 16, 8
"""Rows of a tile."""
_TEAM = 4
"""Warps that share a block of keys in ``attention_split.cu``."""
_ALL_AT_ONCE = 3
"""Thread blocks for each multiprocessor, one for each chunk of a tile, up to which they have two teams of warps."""
_MOST_BLOCKS = 2**31 - 1
_WARPGROUP_THREADS, _WARPGROUP_ROWS = 384, 128
_WARPGROUP_SHARED = 222_864
"""SHARED of ``attention_warpgroup.cu``."""
_CHUNKS = 8
"""Chunks of 16 bytes that a thread of ``quantized_rows`` holds."""
_THREADS, _MOST_THREADS = 256, 512
"""Threads of its blocks: where several tokens share one, and at most where a token has one of its own."""
_RESIDENT = {_FEW_ROWS: 4, _ROWS: 2}
"""Blocks that a multiprocessor is given, by rows of a tile: as many as run at once."""
_MOST_PARTS = 128 << 20
"""Bytes of the sums of chunks. With more, blocks take all chunks of a tile."""


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
    return quantized(problem, device, Launch(steps=(step,), alike=ANY_ROWS))


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
    launch = Launch(steps=(step,), aligned=("q_codes", "k_scale", "v_scale", "output"), alike=ANY_ROWS)
    return quantized(problem, device, launch)


def split(problem: AttentionDescriptor, device: Device) -> Launch:
    """Launch blocks of one or two teams, several of which share the chunks of some rows of a sequence and head."""
    if not problem.tokens:
        return Launch(steps=())
    rows = _FEW_ROWS if problem.rows_per_sequence <= _FEW_ROWS else _ROWS
    jobs, sums, facts = _tiles(problem, rows) * problem.kv_heads, *_parts(problem)
    splits = _splits(problem, rows, device.sm_count) if 4 * jobs <= MOST_ZEROS and sums + facts <= _MOST_PARTS else 1
    few = jobs * -(-problem.most_blocks // CHUNK) <= _ALL_AT_ONCE * device.sm_count
    fits = _shared(problem.head_size, rows, 2) <= device.shared_memory
    teams = 2 if fits and (few or rows > _FEW_ROWS) else 1
    step = Step(
        entry=f"attention_split_{problem.head_size}_{rows}_{teams}",
        grid=(jobs, splits, 1),
        block=(_WARP * _TEAM * teams, 1, 1),
        parameters=(
            *parameters(problem),
            *(pointers("part_sums", "part_facts", ZEROS) if splits > 1 else s64(0, 0, 0)),
        ),
        shared=_shared(problem.head_size, rows, teams),
        overlaps=device.overlaps_launches,
    )
    scratch = (("part_sums", sums), ("part_facts", facts), (ZEROS, 4 * jobs)) if splits > 1 else ()
    launch = Launch(
        steps=(step,),
        scratch=scratch,
        aligned=("q_codes", "k_codes", "k_scale", "v_codes", "v_scale"),
        notes=(f"at most {splits} blocks share the keys of {rows} rows",),
        alike=ANY_ROWS,
    )
    return quantized(problem, device, launch)


def _parts(problem: AttentionDescriptor) -> tuple[int, int]:
    """Return the bytes of the sums of all chunks of all rows: S, and four words of facts."""
    chunks = problem.tokens * problem.heads * -(-problem.most_blocks // CHUNK)
    return 4 * problem.head_size * chunks, 16 * chunks


def _splits(problem: AttentionDescriptor, rows: int, sm_count: int) -> int:
    """Return how many blocks share the chunks of a tile. How long a sequence is, only the kernel knows."""
    tiles = max(1, problem.sequences) * -(-problem.rows_per_sequence // rows) * problem.kv_heads
    return max(1, min(-(-problem.most_blocks // CHUNK), _RESIDENT[rows] * sm_count // tiles))


def _shared(head_size: int, rows: int, teams: int) -> int:
    """Return the bytes of shared memory: codes and weights of a block for each team, and sums of blocks and chunks."""
    of_teams, sums = teams * (2 * PAGE * head_size + 304 * rows), 4 * rows * CHUNK * (head_size + 8)
    return of_teams + sums + rows * (12 * CHUNK + 24) + 64


def _tiles(problem: AttentionDescriptor, rows: int) -> int:
    """Return how many tiles of so many rows there are, as `Tile` of ``attention.cuh`` numbers them.

    The last ones have the rows of no sequence.
    """
    tiles = problem.tokens * problem.group // rows + problem.sequences + 1
    return min(tiles, problem.tokens) if problem.group <= rows else tiles


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
