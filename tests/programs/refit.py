"""Fit the costs of a kernel's configurations to measured times, and print how well the fitted costs choose.

    python tests/programs/refit.py warpgroup docs/evidence/h200-tiles.json --output kernels/linear/warpgroup.h200.json
    python tests/programs/refit.py warpgroup tuned.json --record docs/evidence/h200-tiles.json

A FILE is an output of `skuda tune`, or a record that ``--record`` made of several. Held-out times are not fitted. The
loss of a shape says how much longer the configuration with the shortest predicted time takes than the fastest one.

Times are fitted, not choices: several configurations are often equally fast, and which of them is the fastest is noise.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))
from tile_times import Times, laid_out, sets_of, write

from skuda.kernels.linear import hopper, streamed, warpgroup
from skuda.kernels.linear.warpgroup import TILES, WarpgroupTile
from skuda.registry.device import Device
from skuda.registry.elements import ElementKind

WARPGROUP = {"launch": 7.0, "mma": 0.2, "load": 0.15, "half_lines": 0.04, "half_sectors": 0.15, "throttled": 0.2}
STREAMED = {"launch": 2.0, "token": 0.015, "box": 0.09, "half_lines": 4e-4, "half_sectors": 1e-3, "split_k": 0.6}
STREAMED |= {"second_warpgroup": 0.3, "odd_rows": 0.1, "memory": 0.85, "direct_launch": 2.0, "direct_eight": 0.5}
STREAMED |= {"direct_round": 0.6, "direct_l2": 0.6}
PULL = 0.02
"""Weight of the distance of a cost from its start. A cost that no shape shows stays there."""
Costs = Mapping[str, float]


class Measured(NamedTuple):
    """A time in us, the number and the shortest time of its shape, and the prediction as a function of costs."""

    shape: int
    shortest: float
    us: float
    predicted: Callable[[Costs], float]


Predictions = Iterator[tuple[str, str, Callable[[Costs], float]]]
"""Of each configuration: its name, the name of its costs, and its predicted time as a function of these."""


def of_warpgroup(times: Times, sizes: tuple[int, int, int]) -> Predictions:
    """Yield the predictions of all tiles. Each tile has costs of its own."""
    device = times["device"]
    card = warpgroup.CardCosts(device["l2_cache"], device["memory_bandwidth"] / 1e6, {}, ())

    def predicted(tile: WarpgroupTile, costs: Costs) -> float:
        return warpgroup.predicted(tile, warpgroup.TileCost(**costs), card, sizes, device["sm_count"])

    yield from ((str(tile), str(tile), partial(predicted, tile)) for tile in TILES)


def of_streamed(times: Times, sizes: tuple[int, int, int]) -> Predictions:
    """Yield the predictions of all tilings. They share their costs."""
    device, output = Device.model_validate(times["device"]), ElementKind(times["problem"]["output_element"])
    quantizes = times["problem"]["op"] == "quantized_linear" and streamed.quantized_tokens(sizes[0], sizes[2]) > 0
    card = device.sm_count, hopper.bandwidth(device)

    def predicted(tile: Any, costs: Costs) -> float:
        return streamed.predicted(tile, streamed.FewTokensCost(**costs), sizes, card, quantizes=quantizes)

    tiles = streamed.tiles(sizes, device.sm_count, output.bits // 8, quantizes=quantizes)
    yield from ((str(tile), "costs", partial(predicted, tile)) for tile in tiles)


KERNELS = {"warpgroup": of_warpgroup, "streamed": of_streamed}
START = {"warpgroup": WARPGROUP, "streamed": STREAMED}


def measured(kernel: str, sets: Sequence[Times]) -> dict[str, list[Measured]]:
    """Return the measured times of a kernel by the name of their costs."""
    found: dict[str, list[Measured]] = defaultdict(list)
    shapes = [(times, row) for times in sets if times["kernel"] == kernel for row in times["shapes"]]
    for number, (times, (m, n, k, *pairs)) in enumerate(shapes):
        us = {times["configurations"][i]: time for i, time in zip(pairs[::2], pairs[1::2], strict=True)}
        for name, costs, predicted in KERNELS[kernel](times, (m, n, k)):
            if name in us:
                found[costs].append(Measured(number, min(us.values()), us[name], predicted))
    return found


def fitted(kernel: str, sets: Sequence[Times]) -> dict[str, dict[str, float]]:
    """Return the costs that fit best: least squares of the logarithms of times, weighted by shortest time / time."""
    tiles, costs = {str(tile): tile for tile in TILES}, {}
    for name, times in measured(kernel, sets).items():
        more = {"epilogue": tiles[name].cooperative, "fixup": tiles[name].stream_k} if name in tiles else {}
        start = START[kernel] | {cost: 1.0 for cost, has in more.items() if has}
        begin, weights = np.log(list(start.values())), np.array([each.shortest / each.us for each in times])

        best = np.exp(least_squares(_errors, begin, method="lm", args=(tuple(start), times, weights, begin)).x)
        costs[name] = {cost: float(f"{value:.3g}") for cost, value in zip(start, best, strict=True)}
    return costs


def _errors(logs: Any, names: Sequence[str], times: Sequence[Measured], weights: Any, start: Any) -> Any:
    costs = dict(zip(names, np.exp(logs), strict=True))
    off = np.log([each.predicted(costs) / each.us for each in times])
    return np.concatenate([weights * off, PULL * (logs - start)])


def losses(kernel: str, sets: Sequence[Times], costs: Mapping[str, Costs]) -> np.ndarray:
    """Return 1 + the loss of every shape."""
    best: dict[int, tuple[float, Measured]] = {}
    for name, times in measured(kernel, sets).items():
        for each in times:
            us = each.predicted(costs[name])
            if each.shape not in best or us < best[each.shape][0]:  # the first of equal ones, as in the launch rule
                best[each.shape] = us, each
    return np.array([each.us / each.shortest for _, each in best.values()])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(prog="refit", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("kernel", choices=KERNELS)
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path)
    parser.add_argument("--held", metavar="FILE", action="append", default=[], type=Path, help="times to hold out")
    parser.add_argument("--output", metavar="FILE", type=Path, help="an existing file of costs to update")
    parser.add_argument("--record", metavar="FILE", type=Path, help="write all times here")
    given = parser.parse_args(arguments)
    sets = [times for path in given.files for times in sets_of(path, given.kernel)]
    sets += [times for path in given.held for times in sets_of(path, given.kernel, held=True)]
    if given.record:
        write(given.record, sets)
    costs = fitted(given.kernel, [times for times in sets if not times["held"]])
    for kind, held in (("fitted", False), ("held out", True)):
        ratios = losses(given.kernel, [times for times in sets if times["held"] is held], costs)
        mean, most = (np.exp(np.log(ratios).mean()), ratios.max()) if ratios.size else (1.0, 1.0)
        sys.stdout.write(f"{ratios.size} shapes {kind}: loss {mean - 1:.2%}, at most {most - 1:.1%}\n")
    if given.output:
        new = {"tiles": costs} if given.kernel == "warpgroup" else costs
        given.output.write_text(laid_out({**json.loads(given.output.read_text()), **new}) + "\n")


if __name__ == "__main__":
    main()
