"""Fits the times of `skuda.kernels.linear.warpgroup.TILES` to measured ones: ``python -m skuda.tools.bench.fit FILES``.

On the card that the tiles are for, `skuda tune` measures all of them at shapes that it draws:

    skuda tune smoothquant_linear --element bf16 --random 400 --variant warpgroup --backend cuda_core --repeats 7
        --output times.json

A FILE is what this writes, or a record of times that ``--record`` made of several. The fit uses all files but those
behind ``--held``, which only the loss is computed of: how much longer the tile with the smallest predicted time took
than the fastest one. Without ``--held``, the tiles are fitted twice: for the loss to one half of the shapes, which are
then held against the other half, and for the printed result to all of them.

Times are fitted, not choices. Times that are changed until they choose best at some shapes choose worse at others: what
they then follow is the noise that made one of several equal tiles the fastest.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from skuda.dispatch.select.tuning import Tuning
from skuda.kernels.linear.hopper import H200
from skuda.kernels.linear.warpgroup import TILES, Tile
from skuda.tools.files import read_json, read_text, write_whole

Array = np.ndarray[Any, Any]
Shape = tuple[int, int, int]
Times = dict[Shape, dict[str, float]]
"""Median microseconds by shape and by the key of a tile."""

_KIND = "skuda tiles"
_FITTED = tuple(field.name for field in fields(Tile) if field.type == "float")
_FEWEST = 33
"""Rows from which a tile is worth choosing well: `streamed` serves fewer."""
_STEPS = 60
_PULL = 0.05
"""Residual of a time that is changed by a factor of e: what no shape tells stays as it is."""


class Loss(NamedTuple):
    """How much longer the chosen tiles took than the fastest ones: geometric mean, largest ratio, and its shape."""

    mean: float
    worst: float
    where: Shape


def key(tile: Tile) -> str:
    """Return a tile's name in a record: its shape, stages, cluster and schedule as numbers."""
    values = (getattr(tile, field.name) for field in fields(tile) if field.name not in _FITTED)
    return "_".join(str(int(part)) for value in values for part in (value if isinstance(value, tuple) else (value,)))


def sets_of(path: Path) -> list[dict[str, Any]]:
    """Read a file of `skuda tune`, or a record of times, as the sets of a record; tiles that are gone are left out."""
    found = read_json(read_text(path))
    if isinstance(found, dict) and found.get("kind") == _KIND:
        return list(found["sets"])
    tuning = Tuning.load(path)
    keys = {str(tile): key(tile) for tile in TILES}
    shapes = []
    for entry in tuning.entries:
        us = {
            keys[one.choice]: round(one.timing.median, 2)
            for one in entry.candidates
            if one.timing is not None and one.choice in keys and ".warpgroup" in one.sku
        }
        m, n, k = (entry.problem[name] for name in ("m", "c_out" if "c_out" in entry.problem else "n", "k"))
        if us:
            shapes.append({"m,n,k": [m, n, k], "us": us})
    return [{"seed": tuning.entries[0].seed if tuning.entries else 0, "flush": "clean", "shapes": shapes}]


def times_of(sets: Sequence[Mapping[str, Any]]) -> Times:
    """Return the times of the present tiles, at shapes of enough rows where at least two were measured."""
    known = set(map(key, TILES))
    found: Times = {}
    for shape in (shape for each in sets for shape in each["shapes"]):
        us = {name: float(value) for name, value in shape["us"].items() if name in known}
        m, n, k = shape["m,n,k"]
        if len(us) > 1 and m >= _FEWEST:
            found[m, n, k] = us
    return found


def fit(tile: Tile, times: Times, sm_count: int = H200) -> Tile:
    """Return a tile with the times that fit best: least squares of the logarithms, by Levenberg and Marquardt's method.

    A shape counts for as much as the tile comes near the fastest one there, because only those decide a choice. A tile
    with fewer shapes than times to fit is returned as it is.
    """
    name = key(tile)
    shapes = [shape for shape, us in times.items() if name in us]
    if len(shapes) <= len(_FITTED):
        return tile
    start = np.log([getattr(tile, name) for name in _FITTED])
    measured = np.log([times[shape][name] for shape in shapes])
    weight = (np.array([min(times[shape].values()) for shape in shapes]) / np.exp(measured)) ** 2

    def residuals(logs: Array) -> Array:
        one = _with(tile, logs)
        missed = weight * (np.log([one.predicted(*shape, sm_count) for shape in shapes]) - measured)
        return np.concatenate([missed, _PULL * (logs - start)])

    return _with(tile, _least_squares(residuals, start))


def _with(tile: Tile, logs: Array) -> Tile:
    times: dict[str, Any] = {name: float(np.exp(value)) for name, value in zip(_FITTED, logs, strict=True)}
    return replace(tile, **times)


def _least_squares(residuals: Callable[[Array], Array], start: Array) -> Array:
    """Minimize the sum of squares from a start; the derivatives are differences."""
    at, damping, step = start, 1e-2, 1e-4
    now = residuals(at)
    for _ in range(_STEPS):
        slopes = np.stack([(residuals(at + step * unit) - now) / step for unit in np.eye(len(at))], axis=1)
        square = slopes.T @ slopes
        change = np.linalg.solve(square + damping * np.diag(np.diag(square) + 1e-9), -slopes.T @ now)
        tried = at + np.clip(change, -0.5, 0.5)
        then = residuals(tried)
        if then @ then < now @ now:
            at, now, damping = tried, then, damping / 3
        else:
            damping *= 4
    return at


def loss(tiles: Sequence[Tile], times: Times, sm_count: int = H200) -> Loss:
    """Return the loss of choosing by predicted time among the tiles that were measured at each shape."""
    ratios: dict[Shape, float] = {}
    for shape, us in times.items():
        able = [tile for tile in tiles if key(tile) in us]
        chosen = min(able, key=lambda tile: tile.predicted(*shape, sm_count))
        ratios[shape] = us[key(chosen)] / min(us.values())
    worst = max(ratios, key=lambda shape: ratios[shape])
    return Loss(float(np.exp(np.log(list(ratios.values())).mean())), ratios[worst], worst)


def fitted_to(times: Times, tiles: Sequence[Tile] = TILES) -> tuple[Tile, ...]:
    """Return tiles with the times that fit best."""
    return tuple(fit(tile, times) for tile in tiles)


def line(tile: Tile) -> str:
    """Return a tile as a line of `TILES`, with four digits of its times."""
    facts = {field.name: repr(getattr(tile, field.name)) for field in fields(tile) if field.name not in _FITTED}
    facts["cooperative"] = "_COOPERATIVE" if tile.cooperative else "_PING_PONG"
    facts["divides"] = "_DIVIDED" if tile.divides else "_WHOLE"
    told = facts.values()
    return f"    Tile({', '.join((*told, *(f'{getattr(tile, name):.4g}' for name in _FITTED)))}),"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the fitted tiles and their losses, and write a record of the times where one is named."""
    parser = argparse.ArgumentParser(prog="python -m skuda.tools.bench.fit", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "files", metavar="FILE", nargs="+", type=Path, help="times of `skuda tune`, or a record of them"
    )
    parser.add_argument("--held", metavar="FILE", action="append", default=[], type=Path, help="times to test the fit")
    parser.add_argument("--record", metavar="FILE", type=Path, help="write all times here, compactly")
    asked = parser.parse_args(arguments)
    sets = [one for path in asked.files for one in sets_of(path)]
    held_sets = [one for path in asked.held for one in sets_of(path)]
    times, held = times_of(sets), times_of(held_sets)
    if not times:
        parser.error(f"no tile of {', '.join(map(str, asked.files))} is in TILES: measure again")
    fitted = fitted_to(times)
    tested = fitted
    if not held:
        held = dict(list(times.items())[1::2])
        half = {shape: us for shape, us in times.items() if shape not in held}
        tested = fitted_to(half)
    sys.stdout.write("\n".join(map(line, fitted)) + "\n")
    told = (("TILES, fitted shapes", TILES, times), ("TILES, held", TILES, held))
    for what, tiles, at in (*told, ("fit, fitted shapes", fitted, times), ("fit, held", tested, held)):
        found = loss(tiles, at)
        size = "x".join(map(str, found.where))
        sys.stdout.write(
            f"{what}: {found.mean - 1:.2%} by geometric mean of {len(at)}, {found.worst - 1:.1%} at {size}\n"
        )
    if asked.record is not None:
        made = [{**one, "fitted": one in sets} for one in (*sets, *held_sets)]
        text = json.dumps({"kind": _KIND, "schema_version": 1, "sets": made}, separators=(",", ":"))
        write_whole(asked.record, text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
