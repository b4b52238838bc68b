"""A cost model of the products for few tokens (``streamed.cuh``, ``direct.cuh``): the launch rule takes the fastest.

``streamed.h100.json`` has the costs, which ``tests/programs/refit.py`` fits to times of layers of models. In a model
layers run one after another, and most of a launch is hidden behind the end of the previous layer. Behind a pause, the
costs of a launch would differ more. The time in us is, with the bandwidth of the card's memory as it reports it:

through shared memory
    launch, tokens, split-K and a second warpgroup; then the longer of copy and memory. copy: the TMA unit of a
    multiprocessor takes so long for the boxes of a k-block, longer for each token whose row does not begin at a line of
    the cache (128 bytes), and still longer if not at a sector (32 bytes). memory: codes and weights, the latter in part
    again for each further strip of tokens. The shorter of both hides almost completely.
through registers
    launch; a latency for each round of loads; what a multiprocessor reads from L2; and the memory.
"""

from __future__ import annotations

import importlib.resources
import json
from functools import cache
from math import hypot, sqrt
from typing import NamedTuple

from skuda.kernels.linear.direct import Direct
from skuda.kernels.linear.streamed_tile import BLOCK_K, Streamed

_WARPS = 16
"""Warps of blocks through registers that share a multiprocessor."""
_WGMMA_M = 64
_READ_AGAIN = 0.5
"""Part of the weights that each further strip of tokens reads from memory again."""


class FewTokensCost(NamedTuple):
    """The costs, in us unless they say otherwise.

    Attributes
    ----------
    launch : float
        A launch through shared memory, as one of many layers.
    token : float
        Finishing a token of a tile.
    box : float
        Loading the boxes of a k-block.
    half_lines, half_sectors : float
        What each token adds to that if rows begin within lines, or within sectors.
    split_k : float
        Exchanging sums within a cluster.
    second_warpgroup : float
        Tiles of more than 64 rows.
    odd_rows : float
        Tiles whose rows are not those of whole wgmma.
    memory : float
        Part of the card's memory bandwidth that is reached.
    direct_launch : float
        A launch through registers.
    direct_eight : float
        Blocks of only 8 rows.
    direct_round : float
        A round of loads.
    direct_l2 : float
        Bandwidth from L2 of a multiprocessor, in TB/s.
    """

    launch: float
    token: float
    box: float
    half_lines: float
    half_sectors: float
    split_k: float
    second_warpgroup: float
    odd_rows: float
    memory: float
    direct_launch: float
    direct_eight: float
    direct_round: float
    direct_l2: float


@cache
def costs() -> FewTokensCost:
    """Return the costs in ``streamed.h100.json``, which serve every card with sm_90a."""
    file = importlib.resources.files("skuda.kernels.linear") / "streamed.h100.json"
    return FewTokensCost(**json.loads(file.read_text())["costs"])


def predicted(
    tile: Streamed | Direct,
    cost: FewTokensCost,
    sizes: tuple[int, int, int],
    card: tuple[int, float],
    *,
    quantizes: bool = False,
) -> float:
    """Return the predicted time in us.

    Parameters
    ----------
    tile : Streamed or Direct
        The tiling.
    cost : FewTokensCost
        The costs.
    sizes : (int, int, int)
        m, n and k.
    card : (int, float)
        Multiprocessors, and memory bandwidth in TB/s.
    quantizes : bool
        Whether the kernel makes the codes itself, so that it loads none.
    """
    (m, n, k), (sm_count, bandwidth) = sizes, card
    reached = cost.memory * bandwidth * 1e6
    if isinstance(tile, Direct):
        (blocks, _, _), slots = tile.grid(m, n), sm_count * _WARPS // tile.warps
        rounds = -(-blocks // slots) * -(-k // (tile.unit * tile.warps * tile.ahead))
        read = -(-blocks // sm_count) * (tile.rows + tile.tokens) * k
        launch = cost.direct_launch + (cost.direct_eight if tile.mmas_n == 1 else 0.0)
        return launch + rounds * cost.direct_round + read / (cost.direct_l2 * 1e6) + (m + n) * k / reached
    tiles, width = -(-n // tile.rows), max(1, tile.grid[0] // tile.split_k)
    turns = -(-tiles // width)
    late = 0.0 if quantizes or k % BLOCK_K == 0 else cost.half_sectors if k % 32 else cost.half_lines
    copy = turns * -(-k // BLOCK_K) / tile.split_k * (cost.box + tile.tokens * late)
    strips = 1 + _READ_AGAIN * (-(-m // tile.tokens) - 1)
    memory = (m + strips * n) * k / reached
    return (
        cost.launch
        + cost.token * tile.tokens
        + (cost.split_k if tile.split_k > 1 else 0.0)
        + (cost.second_warpgroup if tile.warpgroups > 1 else 0.0)
        + (cost.odd_rows if tile.rows % _WGMMA_M else 0.0)
        + sqrt(hypot(copy**2, memory**2))
    )
