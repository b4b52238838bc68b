"""Launch rule of the product of packed weights on wgmma (``packed_warpgroup.cuh``). Pure: nothing here needs a GPU."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from skuda.kernels.launch import Choice, Launch, Step, TensorMap, pointers, s32
from skuda.kernels.linear import hopper, parameters
from skuda.kernels.linear.packed import BLOCK, ROWS, block_bytes
from skuda.kernels.linear.problem import LinearProblem
from skuda.registry.constraints import Constraint
from skuda.registry.elements import ElementKind

if TYPE_CHECKING:
    from skuda.registry.device import Device

_TOKENS = (32, 64, 128)
_WARPGROUPS, _K_BLOCKS = 2, 2
_MOST_UNITS, _FEWEST_UNITS = 8, 4
_MIN_STAGES, _MAX_STAGES = 2, 12
_ATOM = 1024
_LAUNCH, _MEMORY, _PRODUCTS, _PASS = 3.5, 0.85, 3.4e6, 1.0
"""Microseconds of a launch; the part of the memory's bandwidth that is reached; products of a multiprocessor in a
microsecond; and microseconds to begin and end a tile."""


class PackedWarpgroupTile(NamedTuple):
    """One configuration.

    Attributes
    ----------
    tokens : int
        Compile-time flag TOKENS.
    units : int
        Units of 16 rows of the weight in a tile.
    """

    tokens: int
    units: int

    @property
    def flags(self) -> tuple[str, ...]:
        """The compiler flags."""
        named = {"TOKENS": self.tokens, "WARPGROUPS": _WARPGROUPS, "K_BLOCKS": _K_BLOCKS, "SPLIT_K": 1}
        return tuple(f"-D{name}={value}" for name, value in named.items())

    def tiles(self, n: int) -> int:
        """Return the tiles of n rows of the weight."""
        units = -(-n // ROWS)
        return -(-units // self.units)

    def ring(self, k: int, group_size: int, output_bytes: int, *, zero_points: bool) -> tuple[int, int]:
        """Return stages, and bytes of shared memory of a block."""
        unit = _K_BLOCKS * block_bytes(group_size)
        stage = _K_BLOCKS * self.tokens * BLOCK + self.units * unit + 16  # a stage has two mbarriers
        slab = 8 if output_bytes == 4 else 16
        staging = 4 * _WARPGROUPS * slab * (16 * output_bytes + 16)
        behind = (4 * _WARPGROUPS - self.units) * unit
        fixed = 1024 + 3 * _ATOM * zero_points + behind + staging + 4 * self.tokens * (1 + zero_points)
        stages = min((hopper.MAX_SHARED - fixed) // stage, _MAX_STAGES, max(_MIN_STAGES, -(-k // (BLOCK * _K_BLOCKS))))
        return stages, fixed + stages * stage

    def __str__(self) -> str:
        return f"{ROWS * self.units} x {self.tokens}, levels to codes in registers"


def constraints(weight: ElementKind) -> tuple[Constraint, ...]:
    """Return what the kernel requires: codes that TMA can read, and sums that fit in 32 bits.

    `weight` is the element of the codes that are made, s8.
    """
    return hopper.constraints(weight)


def _predicted(tile: PackedWarpgroupTile, m: int, n: int, k: int, group_size: int, card: tuple[int, float]) -> float:
    """Return the predicted time in us: the multiprocessor with the most tiles, by its products or by its bytes."""
    sm_count, bandwidth = card
    strips, tiles = -(-m // tile.tokens), tile.tiles(n)
    rounds = -(-tiles * strips // sm_count)
    blocks = -(-k // BLOCK)
    products = rounds * 64 * _WARPGROUPS * tile.tokens * blocks * BLOCK / _PRODUCTS
    of_tile = blocks * (tile.units * block_bytes(group_size) + tile.tokens * BLOCK)
    memory = rounds * min(tiles * strips, sm_count) * of_tile / (_MEMORY * bandwidth * 1e6)
    return _LAUNCH + _PASS * rounds + max(products, memory)


@lru_cache(maxsize=4096)
def _ranked(
    m: int, n: int, k: int, group_size: int, card: tuple[int, float]
) -> tuple[tuple[PackedWarpgroupTile, ...], tuple[Choice, ...]]:
    fitting = [tokens for tokens in _TOKENS if tokens < 2 * m] or [_TOKENS[0]]
    tiles = [PackedWarpgroupTile(t, u) for t in fitting for u in range(_MOST_UNITS, _FEWEST_UNITS - 1, -1)]
    ranked = sorted(((_predicted(tile, m, n, k, group_size, card), tile) for tile in tiles), key=lambda pair: pair[0])
    return tuple(tile for _, tile in ranked), tuple(Choice(str(tile), us) for us, tile in ranked)


def launch(problem: LinearProblem, device: Device, choice: str = "") -> Launch:
    """Launch the product, after the quantization of a dynamic activation."""
    m, n, k = problem.sizes
    sm_count = device.sm_count or hopper.H200
    card = sm_count, hopper.bandwidth(device)
    tile, chosen = parameters.choose(*_ranked(max(1, m), max(1, n), k, problem.group_size, card), choice)
    zero_points = problem.shifts_activation
    stages, shared = tile.ring(k, problem.group_size, problem.output.bits // 8, zero_points=zero_points)
    name, otherwise = ("act_q_scratch", "codes") if problem.dynamic else ("act_q", "")
    tiles = tile.tiles(n) if m else 0
    product = Step(
        entry=f"{problem.op_name()}_packed_warpgroup",
        grid=(min(tiles, sm_count), -(-m // tile.tokens), 1),
        block=(128 * _WARPGROUPS + 64, 1, 1),
        parameters=(
            TensorMap(name, m, k, tile.tokens, otherwise=otherwise),
            *(parameters.SCALES if problem.dynamic else parameters.given_scales(problem)),
            *pointers("weight_q"),
            *parameters.epilogue_parameters(problem),
            *s32(tile.units, stages),
        ),
        shared=shared,
        overlaps=True,
    )
    flags = (*tile.flags, f"-DGROUPS={BLOCK // problem.group_size}", *parameters.epilogue_flags(problem))
    return parameters.launch_product(
        problem, product, aligned=("weight_q",), flags=flags, notes=(hopper.ALIGNED,), **chosen
    )
