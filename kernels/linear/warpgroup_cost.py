"""A cost model of the wgmma product: how long a tile takes for a problem. The launch rule takes the fastest tile.

``warpgroup.CARD.json`` has the costs of each tile on a card. ``tests/programs/refit.py`` fits them to measured times.
The time in us is ``launch + hypot(compute, memory)``, and more for long products, at which the card lowers its clock:

mainloop
    waves x k-blocks x ``hypot(mma, load)``: wgmma and loads mostly overlap. Loads from L2 take longer the more of the
    card is busy, and if rows do not begin at lines of the cache (128 bytes), or not even at sectors (32 bytes).
epilogue
    Both warpgroups of a cooperative tile wait for it. In ping-pong the mainloop of the other warpgroup hides it; the
    last one counts as part of the launch. GELU and SiLU are never hidden.
fixup
    The first part of a stream-K tile adds the partial sums of the other parts.
memory
    Operands and results, once. Half of L2 counts, because it keeps two copies of a line. What it cannot keep is read
    again: half of what clusters share that do not run at the same time, or read different k-blocks.
"""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Mapping
from functools import cache
from math import hypot
from typing import Any, NamedTuple

from skuda.kernels.linear.warpgroup_tile import BLOCK_K, TILES, Schedule, WarpgroupTile

CARDS = ("h200", "h100")
"""Cards that have a file; the first is for cards that do not report the size of their L2."""

_SECTOR = 32
_READ_AGAIN = 0.5
_RESULT_BYTES = 2
_LONG = 600.0
"""Time in us at which half of `TileCost.throttled` shows."""


class TileCost(NamedTuple):
    """The costs of a tile on a card, in us.

    Attributes
    ----------
    launch : float
        A launch without k-blocks.
    mma, load : float
        wgmma of a k-block, and its load from L2 if all multiprocessors load.
    half_lines, half_sectors : float
        How much longer a load takes if rows begin within lines, or within sectors.
    throttled : float
        Part by which the longest products take longer.
    epilogue, fixup : float
        The epilogue of a cooperative tile, and adding the partial sums of a part.
    """

    launch: float
    mma: float
    load: float
    half_lines: float
    half_sectors: float
    throttled: float
    epilogue: float = 0.0
    fixup: float = 0.0


class CardCosts(NamedTuple):
    """The costs of all tiles on a card.

    Attributes
    ----------
    l2_cache, memory_bandwidth : int, float
        Bytes of its L2, and the peak of its memory in bytes per us.
    activations : dict
        Time in us of an activation for a result, on a multiprocessor: for outputs of at most 16 bits, and for f32.
    tiles : tuple of (WarpgroupTile, TileCost)
        The costs of each tile.
    """

    l2_cache: int
    memory_bandwidth: float
    activations: Mapping[str, tuple[float, float]]
    tiles: tuple[tuple[WarpgroupTile, TileCost], ...]


def card_costs(content: Mapping[str, Any]) -> CardCosts:
    """Return the costs in the content of a card's file."""
    tiles = tuple((tile, TileCost(**content["tiles"][str(tile)])) for tile in TILES)
    return CardCosts(content["l2_cache"], content["memory_bandwidth"], content["activations"], tiles)


@cache
def costs_for(l2_cache: int) -> CardCosts:
    """Return the costs of the card whose L2 is nearest in size to `l2_cache` bytes; of an H200 for 0.

    L2 has a part for each stack of memory, so its size says which card has similar costs.
    """
    folder = importlib.resources.files("skuda.kernels.linear")
    known = [card_costs(json.loads((folder / f"warpgroup.{card}.json").read_text())) for card in CARDS]
    return min(known, key=lambda costs: abs(costs.l2_cache - l2_cache)) if l2_cache else known[0]


def predicted(
    tile: WarpgroupTile, cost: TileCost, card: CardCosts, sizes: tuple[int, int, int], sm_count: int, each: float = 0.0
) -> float:
    """Return the predicted time in us of a product of `sizes` (m, n, k); `each`: us of the activation for a result."""
    rows, columns = tile.grid(*sizes[:2])
    tiles, k_blocks, slots = rows * columns, -(-sizes[2] // BLOCK_K), max(1, sm_count // tile.blocks)
    schedule = tile.schedule(*sizes, sm_count)
    clusters, divided = schedule.clusters, schedule.stream_k_tiles
    if divided:
        parts = (tiles - divided) // slots + 1  # of a cluster
        waves, busy = parts - 1 + divided / clusters, clusters / slots
    else:
        parts = -(-tiles // slots)
        waves, busy = float(parts), min(1.0, tiles / slots)
    late = 0.0 if sizes[2] % BLOCK_K == 0 else cost.half_sectors if sizes[2] % _SECTOR else cost.half_lines
    compute = waves * k_blocks * hypot(cost.mma, cost.load * busy + late)
    compute += parts * (cost.epilogue + each * tile.m * tile.n)
    if divided:
        compute += cost.fixup * max(1.0, clusters / divided)
    us = cost.launch + hypot(compute, _bytes(tile, schedule, card, sizes, slots) / card.memory_bandwidth)
    return us * (1 + cost.throttled * us**2 / (us**2 + _LONG**2))


def _bytes(tile: WarpgroupTile, schedule: Schedule, card: CardCosts, sizes: tuple[int, int, int], slots: int) -> float:
    """Return the bytes that memory moves."""
    m, n, k = sizes
    once, results = (m + n) * k, _RESULT_BYTES * m * n
    missing = once - card.l2_cache / 2
    if missing <= 0:
        return once + results
    rows, columns = tile.grid(m, n)
    _, divided, groups, band = schedule
    if groups > 1:  # each row, or column, of tiles reads the other operand
        again: float = (rows - 1) * n * k if columns <= rows else (columns - 1) * m * k
    else:
        height = min(rows, band)
        width = min(columns, max(1, slots // height))
        waves = (rows * columns - divided) / (height * width)
        read = waves * (height * tile.cluster_m + width * tile.cluster_n) + divided * (tile.cluster_m + tile.cluster_n)
        again = max(0.0, read * k - once)
    return once + results + _READ_AGAIN * missing / once * again
