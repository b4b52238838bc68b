"""The product for few tokens with packed weights (``packed.cuh``): tiles, costs, launch. Pure: needs no GPU.

The layout of such weights, which is not this kernel's alone, is in `skuda.kernels.linear.packed`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from skuda.kernels.launch import Choice, Launch, Step, pointers
from skuda.kernels.linear import hopper, parameters
from skuda.kernels.linear.packed import BLOCK, ROWS, block_bytes
from skuda.kernels.linear.problem import LinearProblem, longest_k
from skuda.kernels.linear.strategies import Strategy
from skuda.registry.arch import ArchSku
from skuda.registry.constraints import Between, Constraint, MultipleOf
from skuda.registry.elements import ElementKind

if TYPE_CHECKING:
    from skuda.registry.device import Device

MOST_TOKENS = 32
_TOKENS = (8, 16, 32)
_SHAPES = {
    8: ((8, 8, 1), (6, 8, 1), (4, 16, 1), (3, 16, 1), (2, 16, 1), (4, 8, 2), (2, 8, 2)),
    16: ((6, 8, 1), (4, 8, 1), (3, 16, 1), (2, 16, 1), (2, 8, 2)),
    32: ((4, 8, 1), (2, 8, 1), (1, 8, 1)),
}
"""By tokens: units that a warp multiplies at once, warps of a block, blocks of a multiprocessor."""
_LAUNCH, _PASS, _MEMORY = 6.9, 0.57, 0.81
"""Microseconds before the first and after the last product, those of a pass over K, and the part of the memory's
bandwidth that is reached; measured on an H200."""
_TURN, _STAGED, _UNIT, _EIGHT = 0.48, 0.033, 0.01, 0.077
"""Microseconds of a warp for a block of K; and with 8 warps, what every eight tokens add, every unit, and every eight
tokens of a unit."""


class PackedTile(NamedTuple):
    """One configuration.

    Attributes
    ----------
    tokens, units, warps, resident : int
        Compile-time flags of the same names: tokens of a block; units of 16 rows that a warp multiplies at once; warps
        of a block, which divide K; blocks of a multiprocessor.
    """

    tokens: int
    units: int
    warps: int
    resident: int

    @property
    def flags(self) -> tuple[str, ...]:
        """The compiler flags."""
        return tuple(f"-D{name.upper()}={value}" for name, value in self._asdict().items())

    def grid(self, m: int, n: int, sm_count: int) -> tuple[int, int, int]:
        """Return the blocks that compute m x n results."""
        units = -(-n // ROWS)
        return min(units, sm_count * self.resident), -(-m // self.tokens), 1

    def shared(self, *, zero_points: bool) -> int:
        """Return the bytes of shared memory of a block: sums, and codes that its warps stage."""
        return 4 * 3 * self.units * (self.tokens // 8 + zero_points) * 128 + self.warps * self.tokens * BLOCK

    def __str__(self) -> str:
        return f"{ROWS * self.units} x {self.tokens} from registers, {self.warps} warps, {self.resident} resident"


def constraints(weight: ElementKind) -> tuple[Constraint, ...]:
    """Return what the kernel requires: whole units of codes, few tokens, and sums that fit in 32 bits.

    `weight` is the element of the codes that are made, s8.
    """
    return (
        Between(field="m", maximum=MOST_TOKENS),
        MultipleOf(field="k", divisor=16),
        Between(field="k", minimum=16, maximum=longest_k(ElementKind.U8, weight)),
    )


STRATEGY = Strategy(
    "packed",
    __name__,
    ArchSku.SM_80,
    constraints,
    "few tokens: packed 4-bit weights go straight to registers",
    weights=(ElementKind.S4,),
)


@lru_cache(maxsize=4096)
def _ranked(
    m: int, n: int, k: int, group_size: int, card: tuple[int, float]
) -> tuple[tuple[PackedTile, ...], tuple[Choice, ...]]:
    tokens = next(each for each in _TOKENS if each >= min(m, MOST_TOKENS))
    tiles = (PackedTile(tokens, *shape) for shape in _SHAPES[tokens])
    return parameters.ranked((_predicted(tile, n, k, group_size, card), tile) for tile in tiles)


def _predicted(tile: PackedTile, n: int, k: int, group_size: int, card: tuple[int, float]) -> float:
    """Return the predicted time in us: the multiprocessor with the most units, by its passes and by its bytes."""
    (sm_count, bandwidth), blocks, all_units = card, -(-k // BLOCK), -(-n // ROWS)
    width, _, _ = tile.grid(1, n, sm_count)
    units, eights = -(-all_units // width), tile.tokens / 8
    passes, turns = -(-units // tile.units), -(-blocks // tile.warps)
    turn = _TURN + tile.warps * tile.resident / 8 * (_STAGED * eights + tile.units * (_UNIT + _EIGHT * eights))
    memory = units * width * blocks * block_bytes(group_size) / (_MEMORY * bandwidth * 1e6)
    return _LAUNCH + _PASS * passes + float(((passes * turns * turn) ** 4 + memory**4) ** 0.25)


def launch(problem: LinearProblem, device: Device, choice: str = "") -> Launch:
    """Launch the product, after the quantization of a dynamic activation."""
    m, n, k = problem.sizes
    card = hopper.card_of(device)
    tile, chosen = parameters.choose(*_ranked(max(1, m), max(1, n), k, problem.group_size, card), choice)
    product = Step(
        entry=f"{problem.op_name()}_packed",
        grid=tile.grid(m, n, card[0]),
        block=(32 * tile.warps, 1, 1),
        parameters=(
            *parameters.activation_parameters(problem),
            *pointers("weight_q"),
            *parameters.epilogue_parameters(problem),
        ),
        shared=tile.shared(zero_points=problem.shifts_activation),
        overlaps=device.overlaps_launches,
    )
    aligned = ("act_q_scratch" if problem.dynamic else "act_q", "weight_q")
    flags = (*tile.flags, f"-DGROUPS={BLOCK // problem.group_size}", *parameters.epilogue_flags(problem))
    return parameters.launch_product(
        problem, product, aligned=aligned, flags=flags, notes=(hopper.ALIGNED,), alike=tile.tokens, **chosen
    )
