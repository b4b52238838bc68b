"""A product whose threads walk K backwards (``backwards.cuh``): tiles, costs, launch. Pure: needs no GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from skuda.kernels.launch import Launch, Step
from skuda.kernels.linear import parameters
from skuda.kernels.linear.expanded import behind_unpacking
from skuda.kernels.linear.problem import LinearProblem, longest_k
from skuda.kernels.linear.strategies import Strategy
from skuda.registry.arch import ArchSku
from skuda.registry.constraints import Between, Constraint
from skuda.registry.elements import ElementKind

if TYPE_CHECKING:
    from skuda.registry.device import Device

_LAUNCH, _TURN, _PRODUCT = 3.0, 0.5, 1e-5
"""Microseconds of a launch, of a turn of blocks, and of a product and result of a block."""


class Tile(NamedTuple):
    """One configuration: so many results of a block, one for each thread."""

    results: int

    def blocks(self, m: int, n: int) -> int:
        """Return the blocks that compute m x n results."""
        return -(-m * n // self.results)

    def __str__(self) -> str:
        return f"{self.results} results backwards"


TILES = (Tile(64), Tile(256))


def constraints(weight: ElementKind) -> tuple[Constraint, ...]:
    """Return what the kernel requires: sums that fit in 32 bits; `weight` is s8 or u8, the activation either."""
    return (Between(field="m", maximum=64), Between(field="k", minimum=1, maximum=longest_k(ElementKind.U8, weight)))


STRATEGY = Strategy("backwards", __name__, ArchSku.SM_80, constraints, "few tokens: a thread for each result")


def predicted(tile: Tile, sizes: tuple[int, int, int], sm_count: int) -> float:
    """Return the predicted time in us: blocks take turns on the multiprocessors."""
    m, n, k = sizes
    return _LAUNCH + -(-tile.blocks(m, n) // sm_count) * (_TURN + _PRODUCT * tile.results * k)


def launch(problem: LinearProblem, device: Device, choice: str = "") -> Launch:
    """Launch the product, after the quantization of a dynamic activation."""
    m, n, _ = problem.sizes
    times = ((predicted(tile, problem.sizes, max(1, device.sm_count)), tile) for tile in TILES)
    tile, chosen = parameters.choose(*parameters.ranked(times), choice)
    product = Step(
        entry=f"{problem.op_name()}_backwards",
        grid=(tile.blocks(m, n), 1, 1),
        block=(tile.results, 1, 1),
        parameters=(*parameters.activation_parameters(problem), *parameters.layer_parameters(problem)),
    )
    flags = (f"-DRESULTS={tile.results}", f"-DSKUDA_CODE={problem.code_element}", f"-DSKUDA_OUT={problem.output}")
    return parameters.launch_product(problem, product, flags=flags, **chosen)


expanded = behind_unpacking(launch)
