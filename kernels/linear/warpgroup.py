"""Launch rule of the wgmma product (``warpgroup.cuh``). Pure: nothing here needs a GPU."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from skuda.kernels.launch import (
    ZEROS,
    Choice,
    Launch,
    Leading,
    Parameter,
    Pointer,
    Step,
    TensorMap,
    pointers,
    s32,
    s64,
    strided,
)
from skuda.kernels.linear import hopper, parameters
from skuda.kernels.linear.problem import LinearProblem
from skuda.kernels.linear.warpgroup_cost import costs_for, predicted
from skuda.kernels.linear.warpgroup_tile import WarpgroupTile
from skuda.registry.constraints import Between, Constraint
from skuda.registry.elements import ElementKind
from skuda.registry.sku import WorkspaceTerm

if TYPE_CHECKING:
    from skuda.registry.device import Device

_THREADS, _SUMS_THREADS = 384, 256

_ALIKE, _MANY_ALIKE, _MANY = 16, 64, 4096
"""So many numbers of rows share a ranking, because programs meet ever new ones: the second for at least the third."""

_SMALL = 64_000_000
"""Bytes of operands and results up to which a launch without clusters may start before the previous kernel ends.

Its blocks then begin as multiprocessors come free, so neighbouring tiles no longer share a pair of multiprocessors,
which fetches from L2 once what both read. Clusters always share one.
"""

WORKSPACE = (WorkspaceTerm(factors=("num_code_sums",), bytes_each=4),)
"""What the kernel needs beside the op's workspace and that of a configuration."""

_MIN_ROWS_PER_SUM = 128
"""Fewest rows of an activation with zero points. For fewer, the sums of the weight's codes cost more than wgmma saves.

Measured on an H200 for weights of 1024 x 1024 to 28672 x 8192.
"""


def constraints(weight: ElementKind) -> tuple[Constraint, ...]:
    """Return what the kernel requires: operands that TMA can read, and enough rows for each sum of a weight's codes.

    `weight` is s8 or u8; the activation may be either.
    """
    return (*hopper.constraints(weight), Between(field="rows_per_weight_sum", minimum=_MIN_ROWS_PER_SUM))


@lru_cache(maxsize=4096)
def ranking(
    m: int, n: int, k: int, sm_count: int, l2_cache: int = 0, activation: tuple[str, bool] | None = None
) -> tuple[tuple[float, WarpgroupTile], ...]:
    """Return (predicted us, tile) of every configuration, fastest first.

    Parameters
    ----------
    m, n, k : int
        The problem.
    sm_count, l2_cache : int
        Multiprocessors and bytes of L2 of the card; see `costs_for`.
    activation : (str, bool) or None
        Name of an activation that takes time, and whether the output is f32.
    """
    card = costs_for(l2_cache)
    name, wide = activation or ("", False)
    each = card.activations.get(name, (0.0, 0.0))[wide]
    times = ((predicted(tile, cost, card, (m, n, k), sm_count, each), tile) for tile, cost in card.tiles)
    return tuple(sorted(times, key=lambda pair: pair[0]))


@lru_cache(maxsize=4096)
def _ranked(
    m: int, n: int, k: int, card: tuple[int, int], activation: tuple[str, bool] | None, zero_points: tuple[bool, bool]
) -> tuple[tuple[tuple[WarpgroupTile, tuple[str, ...], int], ...], tuple[Choice, ...]]:
    """Return the tiles that fit, each with its flags and shared memory, and what they are called."""
    fitting = [(us, tile, tile.shared(zero_points)) for us, tile in ranking(m, n, k, *card, activation)]
    fitting = [each for each in fitting if each[2] <= hopper.MAX_SHARED]
    choices = tuple(
        Choice(str(tile), us, tile.partial_sums(tile.schedule(m, n, k, card[0]))) for us, tile, _ in fitting
    )
    return tuple((tile, tile.flags, shared) for _, tile, shared in fitting), choices


def _code_sums(problem: LinearProblem, sm_count: int, zero_points: tuple[bool, bool]) -> Step:
    """Return the step that adds up codes; see ``code_sums.cuh``."""
    (m, n, k), (activation, weight) = problem.sizes, zero_points
    codes: tuple[Parameter, ...] = (*parameters.CODES, *s64(k))
    if not problem.dynamic:
        codes = (Pointer("act_q"), *s64(0), Leading("act_q"))
    blocks = -(-problem.num_code_sums // (_SUMS_THREADS // 32))
    return Step(
        entry="code_sums",
        grid=(min(blocks, 4 * sm_count) if m and n else 0, 1, 1),
        block=(_SUMS_THREADS, 1, 1),
        parameters=(
            *strided("weight_q"),
            *s64(n * activation),
            *codes,
            *s64(m * weight),
            *pointers("code_sums"),
            *s64(k),
        ),
        overlaps=True,
    )


def launch(problem: LinearProblem, device: Device, choice: str = "") -> Launch:
    """Launch the product, after the quantization of a dynamic activation."""
    m, n, k = problem.sizes
    sm_count, kind = device.sm_count or hopper.H200, problem.epilogue.activation
    activation = None if kind is None else (kind.value, problem.output is ElementKind.F32)
    zero_points = problem.shifts_activation, problem.has_weight_zero_point
    step = _MANY_ALIKE if m >= _MANY else _ALIKE
    alike = -(-max(1, m) // step) * step
    ranked = _ranked(alike, max(1, n), k, (sm_count, device.l2_cache), activation, zero_points)
    (tile, tile_flags, shared), chosen = parameters.choose(*ranked, choice)
    schedule = tile.schedule(m, n, k, sm_count)
    name, otherwise = ("act_q_scratch", "codes") if problem.dynamic else ("act_q", "")
    size = (m + n) * k + m * n * problem.output.bits // 8
    # Pairs of lines; rows that do not begin at a pair would fetch bytes of the next box.
    promotion = 256 if k % 256 == 0 else 128
    product = Step(
        entry=f"{problem.op_name()}_warpgroup",
        grid=(schedule.clusters * tile.blocks, 1, 1),
        block=(_THREADS, 1, 1),
        parameters=(
            TensorMap(name, m, k, tile.m // tile.cluster[1], otherwise=otherwise, promotion=promotion),
            TensorMap("weight_q", n, k, tile.n // tile.cluster[0], promotion=promotion),
            *(parameters.SCALES if problem.dynamic else parameters.given_scales(problem)),
            *parameters.epilogue_parameters(problem),
            *s32(schedule.band, schedule.stream_k_tiles, schedule.groups),
            *pointers("partial_sums", ZEROS, "code_sums"),
        ),
        shared=shared,
        overlaps=tile.blocks > 1 or size <= _SMALL,
    )
    steps: tuple[Step, ...] = (product,)
    notes: tuple[str, ...] = (hopper.ALIGNED,)
    scratch: tuple[tuple[str, int], ...] = ()
    if sums := tile.partial_sums(schedule):
        scratch = (("partial_sums", sums), (ZEROS, 8 * schedule.clusters * tile.blocks))
    if any(zero_points):
        steps = (_code_sums(problem, sm_count, zero_points), product)
        scratch = (*scratch, ("code_sums", 4 * problem.num_code_sums))
        notes = ("zero points: a launch in front adds up codes", *notes)
    flags = (*tile_flags, *parameters.epilogue_flags(problem))
    return parameters.launch_product(problem, *steps, scratch=scratch, flags=flags, notes=notes, alike=alike, **chosen)
