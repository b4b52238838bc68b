"""Fits the times of `skuda.kernels.linear.warpgroup.TILES` to measured ones: ``python -m skuda.tools.bench.fit FILES``.

It begins with the times of the card that is most like the measured one; see `tiles_like`. `skuda tune` measures all
tiles at shapes that it draws:

    skuda tune smoothquant_linear --element bf16 --random 400 --variant warpgroup --backend cuda_core --repeats 7
        --output times.json

A FILE is what this writes, or a record of times that ``--record`` made of several. The fit uses all files but those
behind ``--held``, which only the loss is computed of: how much longer the tile with the smallest predicted time took
than the fastest one. Without ``--held``, the tiles are fitted twice: for the loss to one half of the shapes, which are
then held against the other half, and for the printed result to all of them. With ``--held`` alone nothing is fitted.

Fitted are tenths, the times below which a tenth of the rounds stayed, since a card that lowers its clock to keep its
power hides in the medians of long products which tile is the faster one. The losses are those of medians.

A record keeps the conditions of every file and both times of all kernels in it, so it serves tests of the others, too.

A fit needs scipy.

Times are fitted, not choices. Times that are changed until they choose best at some shapes choose worse at others: what
they then follow is the noise that made one of several equal tiles the fastest.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from skuda.dispatch.select.tuning import Tuning
from skuda.kernels.linear.hopper import H200
from skuda.kernels.linear.warpgroup import TILES, Tile, tiles_like
from skuda.registry.errors import InvalidRecord, MissingDependency
from skuda.registry.sku import SkuIdentity
from skuda.tools.files import read_json, read_text, write_whole

Array = np.ndarray[Any, Any]
Shape = tuple[int, int, int]
Times = dict[Shape, dict[str, float]]
"""Microseconds by shape and by the name of a configuration."""

_KIND = "skuda times"
_FITTED = tuple(field.name for field in fields(Tile) if field.type == "float")
_FEWEST = 33
"""Rows from which a tile is worth choosing well: `streamed` serves fewer."""
_EVALUATIONS = 30
_PULL = 0.05
"""Residual of a time that is changed by a factor of e: what no shape tells stays as it is."""
_NEARNESS = 2.0
"""Power of the ratio of the fastest time to another one: the weight of the latter."""
_COMMON = 0.8
"""Share of the squared error of a predicted time that all tiles of a shape have in common."""


class Loss(NamedTuple):
    """How much longer the chosen tiles took than the fastest ones: geometric mean, largest ratio, and its shape."""

    mean: float
    worst: float
    where: Shape


def sets_of(path: Path) -> list[dict[str, Any]]:
    """Read a file of `skuda tune`, or a record of times, as the sets of a record; `timed` reads a set.

    Raises
    ------
    InvalidRecord
        If a configuration in a file of `skuda tune` was refused, or if the file has problems that differ in more than
        their sizes, or several kernels of one variant.
    """
    found = read_json(read_text(path))
    if isinstance(found, dict) and found.get("kind") == _KIND:
        return list(found["sets"])
    tuning = Tuning.load(path)
    return [_set_of(tuning, f"tuning {path}")] if tuning.entries else []


def _set_of(tuning: Tuning, subject: str) -> dict[str, Any]:
    first = tuning.entries[0]
    alike, _ = _split(first.problem)
    kernels: dict[str, dict[str, Any]] = {}
    shapes = []
    for entry in tuning.entries:
        problem, shape = _split(entry.problem)
        if problem != alike:
            raise InvalidRecord(subject, f"the problem at {shape}", str(problem), f"be like the first, {alike}")
        if entry.layers != first.layers:
            had, must = str(entry.layers), f"be {first.layers}, as for the first"
            raise InvalidRecord(subject, f"the layers at {shape}", had, must)
        us: dict[str, list[list[float]]] = {}
        for one in entry.candidates:
            if one.timing is None:
                raise InvalidRecord(subject, f"{one.label} at {shape}", one.refused, "have been timed")
            variant, source = SkuIdentity.parse(one.sku).variant, {"sku": one.sku, "source_hash": one.source_hash}
            kernel = kernels.setdefault(variant, {**source, "configurations": []})
            if not source.items() <= kernel.items():
                raise InvalidRecord(subject, f"{variant} at {shape}", str(source), "be the same kernel throughout")
            names = kernel["configurations"]
            if one.choice not in names:
                names.append(one.choice)
            times = round(one.timing.median, 2), round(one.timing.p10, 2)
            us.setdefault(variant, []).append([names.index(one.choice), *times])
        shapes.append({"m,n,k": shape, "us": us})
    return {
        "seed": first.seed,
        "flush": "clean",
        "layers": first.layers,
        "date": first.date,
        "environment": tuning.environment.model_dump(mode="json"),
        "problem": alike,
        "kernels": kernels,
        "shapes": shapes,
    }


def _split(problem: Mapping[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """Return the fields of a problem but for its sizes, and these."""
    sizes = ("m", "c_out" if "c_out" in problem else "n", "k")
    return {name: value for name, value in problem.items() if name not in sizes}, [problem[name] for name in sizes]


def timed(one: Mapping[str, Any], variant: str, *, tenth: bool = False) -> Iterator[tuple[Shape, dict[str, float]]]:
    """Yield the shapes of a set at which a kernel was measured, and its times, the first of its ranking first.

    The times are medians, or with `tenth` tenths, where a record has them.
    """
    for shape in one["shapes"]:
        if variant in shape["us"]:
            names = one["kernels"][variant]["configurations"]
            m, n, k = shape["m,n,k"]
            every = shape["us"][variant]
            yield (m, n, k), {names[number]: float(us[-1 if tenth else 0]) for number, *us in every}


def times_of(sets: Sequence[Mapping[str, Any]], *, tenth: bool = False) -> Times:
    """Return the times of the present tiles, at shapes of enough rows where at least two were measured; see `timed`."""
    known = set(map(str, TILES))
    found: Times = {}
    for shape, us in (pair for each in sets for pair in timed(each, "warpgroup", tenth=tenth)):
        present = {name: value for name, value in us.items() if name in known}
        if len(present) > 1 and shape[0] >= _FEWEST:
            found[shape] = present
    return found


def begun_with(sets: Sequence[Mapping[str, Any]]) -> tuple[Tile, ...]:
    """Return the tiles with the present times of the card of all sets.

    Raises
    ------
    InvalidRecord
        If the sets are of cards with different times.
    """
    names = {str(each["environment"]["device"]["name"]): each["environment"]["device"]["l2_cache"] for each in sets}
    tables = set(map(tiles_like, names.values()))
    if len(tables) > 1:
        raise InvalidRecord("fit", "FILE", ", ".join(names), "be of cards that have the same times")
    return tables.pop() if tables else TILES


def fitted_to(times: Times, tiles: Sequence[Tile] = TILES, sm_count: int = H200) -> tuple[Tile, ...]:
    """Return tiles with the times that fit best: least squares of the logarithms.

    A time counts for as much as its tile comes near the fastest one of the shape, because only those decide a choice.
    What all tiles of a shape are off together, such as for a slower clock, changes no choice and counts little; see
    `independent`. A tile with fewer shapes than times to fit is returned as it is.

    Raises
    ------
    MissingDependency
        If scipy is not installed.
    """
    able = [tile for tile in tiles if sum(str(tile) in us for us in times.values()) > len(_FITTED)]
    shapes = [shape for shape, us in times.items() if any(str(tile) in us for tile in able)]
    if not shapes:
        return tuple(tiles)
    measured: Array = np.array([[times[shape].get(str(tile), np.inf) for shape in shapes] for tile in able])
    weights = (measured.min(axis=0) / measured) ** _NEARNESS
    wanted = np.log(np.where(np.isfinite(measured), measured, 1.0))
    start: Array = np.log([[getattr(tile, name) for name in _FITTED] for tile in able])

    def logs(number: int, values: Array) -> Array:
        one = _with(able[number], values)
        found: Array = np.log([one.predicted(*shape, sm_count) for shape in shapes])
        return found

    def residuals(flat: Array) -> Array:
        errors = np.stack([logs(*each) for each in enumerate(flat.reshape(start.shape))]) - wanted
        return np.concatenate([independent(errors, weights).ravel(), _PULL * (flat - start.ravel())])

    def slopes(flat: Array) -> Array:
        every = np.zeros((*wanted.shape, *start.shape))
        for number, values in enumerate(flat.reshape(start.shape)):
            every[number, :, number] = _slopes(logs, number, values)
        return np.vstack([independent(every, weights).reshape(-1, start.size), _PULL * np.eye(start.size)])

    best = _least_squares(residuals, start.ravel(), slopes).reshape(start.shape)
    found = {str(tile): _with(tile, values) for tile, values in zip(able, best, strict=True)}
    return tuple(found.get(str(tile), tile) for tile in tiles)


def independent(errors: Array, weights: Array) -> Array:
    """Return errors of one variance that have nothing in common, from weighted ones that partly do.

    The errors of the tiles at a shape have a part in common, which is a share `_COMMON` of the variance of an error of
    weight 1, and a part of their own, whose variance is the rest over the squared weight. The squares of what is
    returned add up to what generalized least squares minimizes, times the share that is not in common.

    Parameters
    ----------
    errors : array, tiles x shapes x anything
        For each of the last dimensions its own errors; the result is linear in them.
    weights : array, tiles x shapes
        From 0, which leaves an error out; at every shape one tile has more.

    Returns
    -------
    array
        Of the shape of the errors.
    """
    squared, own = (weights**2).sum(axis=0), (1 - _COMMON) / _COMMON
    common = np.einsum("ts,ts...->s...", weights**2, errors)
    # The symmetric root of I - u u' / (u'u + own), where u are the weights of a shape.
    share = (1 - np.sqrt(own / (squared + own))) / squared
    found: Array = np.einsum("ts,ts...->ts...", weights, errors)
    found -= np.einsum("ts,s...->ts...", weights * share, common)
    return found


def _least_squares(residuals: Callable[[Array], Array], start: Array, slopes: Callable[[Array], Array]) -> Array:
    try:
        from scipy.optimize import least_squares  # optional: only a fit needs it
    except ImportError as error:
        raise MissingDependency("scipy", "pip install 'scipy>=1.11'") from error
    found: Array = least_squares(residuals, start, slopes, method="lm", max_nfev=_EVALUATIONS).x
    return found


def _slopes(logs: Callable[[int, Array], Array], number: int, at: Array) -> Array:
    """Return how a tile's logarithms, the rows, change with each of those of its times, as differences."""
    here, step = logs(number, at), 1e-4
    return np.stack([(logs(number, at + step * unit) - here) / step for unit in np.eye(len(at))], axis=-1)


def _with(tile: Tile, logs: Array) -> Tile:
    times: dict[str, Any] = {name: float(np.exp(value)) for name, value in zip(_FITTED, logs, strict=True)}
    return replace(tile, **times)


def loss(tiles: Sequence[Tile], times: Times, sm_count: int = H200) -> Loss:
    """Return the loss of choosing by predicted time among the tiles that were measured at each shape."""
    ratios: dict[Shape, float] = {}
    for shape, us in times.items():
        able = [tile for tile in tiles if str(tile) in us]
        chosen = min(able, key=lambda tile: tile.predicted(*shape, sm_count))
        ratios[shape] = us[str(chosen)] / min(us.values())
    worst = max(ratios, key=lambda shape: ratios[shape])
    return Loss(float(np.exp(np.log(list(ratios.values())).mean())), ratios[worst], worst)


def line(tile: Tile) -> str:
    """Return a tile's times as a line of `TILES`, with three digits, and four decimals at most."""
    times = (f"{max(1e-4, round(getattr(tile, name), 4)):.3g}" for name in _FITTED)
    return f"    ({', '.join(times)}),  # {tile}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the fitted tiles and their losses, and write a record of the times where one is named."""
    parser = argparse.ArgumentParser(prog="python -m skuda.tools.bench.fit", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "files", metavar="FILE", nargs="*", type=Path, help="times of `skuda tune`, or a record of them"
    )
    parser.add_argument("--held", metavar="FILE", action="append", default=[], type=Path, help="times to test the fit")
    parser.add_argument("--record", metavar="FILE", type=Path, help="write all times here, compactly")
    asked = parser.parse_args(arguments)
    sets = [one for path in asked.files for one in sets_of(path)]
    held_sets = [one for path in asked.held for one in sets_of(path)]
    times, held, tiles = times_of(sets), times_of(held_sets), begun_with((*sets, *held_sets))
    if not (asked.files or asked.held):
        parser.error("name a FILE, or one with --held")
    if asked.files and not times:
        parser.error(f"no tile of {', '.join(map(str, asked.files))} is in TILES: measure again")
    told: list[tuple[str, Sequence[Tile], Times]] = [("TILES, held", tiles, held)]
    if times:
        tenths = times_of(sets, tenth=True)
        fitted = tested = fitted_to(tenths, tiles)
        if not held:
            held = dict(list(times.items())[1::2])
            tested = fitted_to({shape: us for shape, us in tenths.items() if shape not in held}, tiles)
        sys.stdout.write("\n".join(map(line, fitted)) + "\n")
        told = [("TILES, fitted shapes", tiles, times), ("TILES, held", tiles, held)]
        told += [("fit, fitted shapes", fitted, times), ("fit, held", tested, held)]
    for what, those, at in told if held else ():
        found = loss(those, at)
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
