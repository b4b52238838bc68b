"""Launch rule of the products for few tokens (``streamed.cuh`` and ``direct.cuh``). Pure: nothing here needs a GPU."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from skuda.kernels import nonfinite
from skuda.kernels.launch import Choice, Launch, Parameter, Step, TensorMap, pointers, s32, strided
from skuda.kernels.linear import hopper, parameters
from skuda.kernels.linear.direct import Direct, configurations
from skuda.kernels.linear.problem import LinearProblem
from skuda.kernels.linear.streamed_cost import costs, predicted
from skuda.kernels.linear.streamed_tile import MAX_ROWS, Streamed, tilings
from skuda.registry.constraints import Between, Constraint
from skuda.registry.elements import ElementKind

if TYPE_CHECKING:
    from skuda.registry.device import Device

_MOST_QUANTIZED, _LONGEST_QUANTIZED = 2, 16_384
"""Most tokens that every block quantizes itself, and most elements of them: it ends before the first weights arrive."""


def constraints(weight: ElementKind) -> tuple[Constraint, ...]:
    """Return what the kernel requires: operands that TMA can read, and so few tokens that all tiles run at once.

    `weight` is s8 or u8; the activation may be either.
    """
    return (
        Between(field="m", maximum=MAX_ROWS),
        Between(field="tiles_beyond_few_rows", maximum=hopper.H200),
        *hopper.constraints(weight),
    )


def quantized_tokens(m: int, k: int) -> int:
    """Return QUANTIZED_TOKENS if the kernel quantizes the activation itself, or 0 if a separate kernel is faster."""
    return 0 if m > _MOST_QUANTIZED or m * k > _LONGEST_QUANTIZED else 1 << (m - 1).bit_length()


def tiles(
    sizes: tuple[int, int, int],
    sm_count: int,
    output_bytes: int,
    *,
    quantizes: bool = False,
    zero_points: tuple[bool, bool] = (False, False),
) -> tuple[Streamed | Direct, ...]:
    """Return all configurations for a product; the arguments are those of `tilings`."""
    through_shared = tilings(sizes, sm_count, output_bytes, quantizes=quantizes, zero_points=zero_points)
    return (*through_shared, *(() if quantizes else configurations(sizes[0])))


@lru_cache(maxsize=4096)
def _ranked(
    sizes: tuple[int, int, int],
    card: tuple[int, float],
    output_bytes: int,
    quantizes: bool,  # noqa: FBT001  private
    zero_points: tuple[bool, bool],
) -> tuple[tuple[Streamed | Direct, ...], tuple[Choice, ...]]:
    found = tiles(sizes, card[0], output_bytes, quantizes=quantizes, zero_points=zero_points)
    times = ((predicted(tile, costs(), sizes, card, quantizes=quantizes), tile) for tile in found)
    ranked = sorted(times, key=lambda pair: pair[0])
    return tuple(tile for _, tile in ranked), tuple(Choice(str(tile), us) for us, tile in ranked)


def launch(problem: LinearProblem, device: Device, choice: str = "") -> Launch:
    """Launch the product; a dynamic activation is quantized before it or within it, whichever is faster."""
    m, n, k = problem.sizes
    zero_points = problem.shifts_activation, problem.has_weight_zero_point
    card, width = (device.sm_count or hopper.H200, hopper.bandwidth(device)), problem.output.bits // 8
    quantized = quantized_tokens(m, k) if problem.dynamic and m and n else 0
    tile, chosen = parameters.choose(*_ranked((m, n, k), card, width, quantized > 0, zero_points), choice)
    flags = (*tile.flags, *parameters.epilogue_flags(problem))
    if isinstance(tile, Direct):
        product = _direct_product(problem, tile, zero_points)
        aligned = ("act_q_scratch" if problem.dynamic else "act_q", "weight_q")
        return parameters.launch_product(
            problem, product, aligned=aligned, flags=flags, notes=(hopper.ALIGNED,), **chosen
        )
    weight = TensorMap("weight_q", n, k, tile.rows, promotion=tile.promotion)
    if quantized:
        product = _product(problem, tile, (weight, *_activation(problem)))
        notes = ("every block quantizes the activation itself: one launch", *_notes(tile))
        flags = (*flags, f"-DQUANTIZED_TOKENS={quantized}", *nonfinite.flags(problem))
        return Launch(steps=(product,), aligned=("activation", "act_q_scratch"), flags=flags, notes=notes, **chosen)
    name, otherwise = ("act_q_scratch", "codes") if problem.dynamic else ("act_q", "")
    codes = TensorMap(name, m, k, tile.tokens, otherwise=otherwise)
    scales = parameters.SCALES if problem.dynamic else parameters.given_scales(problem)
    product = _product(problem, tile, (codes, weight, *scales))
    return parameters.launch_product(problem, product, flags=flags, notes=_notes(tile), **chosen)


def _product(problem: LinearProblem, tile: Streamed, operands: tuple[Parameter, ...]) -> Step:
    return Step(
        entry=f"{problem.op_name()}_streamed",
        grid=tile.grid,
        block=tile.block,
        parameters=(*operands, *parameters.epilogue_parameters(problem), *s32(tile.atoms, tile.stages)),
        shared=tile.shared,
        overlaps=True,
    )


def _direct_product(problem: LinearProblem, tile: Direct, zero_points: tuple[bool, bool]) -> Step:
    m, n, _ = problem.sizes
    codes = parameters.activation_parameters(problem)
    return Step(
        entry=f"{problem.op_name()}_streamed",
        grid=tile.grid(m, n),
        block=tile.block,
        parameters=(*codes, *strided("weight_q"), *parameters.epilogue_parameters(problem)),
        shared=tile.shared(zero_points),
        overlaps=True,
    )


def _activation(problem: Any) -> tuple[Parameter, ...]:
    """Return the activation parameters of a kernel that quantizes the activation itself."""
    scratch = pointers("act_q_scratch", "act_scale_scratch")
    return (*strided("activation"), *scratch, *s32(problem.q_min, problem.q_max))


def _notes(tile: Streamed) -> tuple[str, ...]:
    split = f", split-K by {tile.split_k}" if tile.split_k > 1 else ""
    rows = f"{tile.rows} rows of the weight by {tile.tokens} tokens"
    return (f"a block streams {rows}, {tile.stages} stages of {128 * tile.k_blocks} bytes of k{split}", hopper.ALIGNED)
