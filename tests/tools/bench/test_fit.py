"""Fitting the times of the tiles: what generated the measurements is found again, and what does not fit is seen."""

from __future__ import annotations

import json
import re
import sys
from ast import literal_eval
from dataclasses import replace

import numpy as np
import pytest
from paths import ROOT
from support import fresh

from skuda.dispatch import Tuning, device_named
from skuda.dispatch.select.environment import Environment
from skuda.dispatch.select.tuning import Candidate, Entry, Timing
from skuda.kernels.catalog import built_in_registry
from skuda.kernels.linear.warpgroup import H100_TILES, TILES, tiles_like
from skuda.registry import InvalidRecord, MissingDependency
from skuda.tools.bench import fit
from skuda.tools.words.shapes import random_products

RECORD = ROOT / "docs" / "evidence" / "h200-tiles.json"
DRAWN = random_products(120, int(fresh("shapes to fit").integers(2**31)))
SHAPES = tuple(shape for shape in DRAWN if shape[0] >= 48)


def made(tiles, shapes=SHAPES):
    return {shape: {str(tile): tile.predicted(*shape, 132) for tile in tiles} for shape in shapes}


def test_a_name_is_what_the_flags_say_and_no_two_are_equal():
    assert str(TILES[0]) == "128 x 256, cooperative, 4 stages"
    assert len(set(map(str, TILES))) == len(TILES)
    assert str(replace(TILES[0], launch_time=9.0)) == str(TILES[0])


def distance(one, other):
    """Return by how much the predictions of two tiles differ on average, as a logarithm."""
    return np.mean([abs(np.log(one.predicted(*shape, 132) / other.predicted(*shape, 132))) for shape in SHAPES])


def test_times_that_a_tile_predicts_give_that_tile_back(monkeypatch):
    # The pull draws times back to where they began. With hardly any, 94 of 100 drawn sets of shapes gave the tile back
    # to a thousandth; at the others the fit stopped with up to a twentieth of the way left.
    monkeypatch.setattr(fit, "_PULL", 1e-3)
    start = TILES[5]
    true = replace(start, launch_time=7.0, multiply_time=start.multiply_time * 1.3, epilogue_time=2.9, bandwidth=3.5)
    times = made((true, *TILES[:2]))
    found, *others = fit.fitted_to(times, (start, *TILES[:2]))
    assert distance(start, true) > 0.05
    assert distance(found, true) < 0.1 * distance(start, true)
    assert all(distance(one, tile) < 0.004 for one, tile in zip(others, TILES[:2], strict=True))
    elsewhere = {(99, 64, number): {str(TILES[8]): 5.0, str(TILES[9]): 6.0} for number in (128, 256)}
    assert fit.fitted_to(times | elsewhere, (start, *TILES[1:10])) == fit.fitted_to(times, (start, *TILES[1:10]))
    few = dict(list(times.items())[:3])
    assert fit.fitted_to(few, TILES[3:6]) == TILES[3:6], "three shapes do not determine eight times"


def test_independent_errors_are_those_of_generalized_least_squares():
    rng = fresh("correlated")
    weights = rng.uniform(0.05, 1, (6, 3))
    weights[2, 1] = 0.0
    unit = np.broadcast_to(np.eye(6)[:, None], (6, 3, 6))
    found = fit.independent(unit, weights)
    for shape in range(3):
        there = weights[:, shape] > 0
        common = fit._COMMON
        covariance = common + np.diag((1 - common) / weights[there, shape] ** 2)
        root = found[:, shape][:, there]
        np.testing.assert_allclose(root.T @ root, (1 - common) * np.linalg.inv(covariance), rtol=1e-9, atol=1e-12)
        assert not found[:, shape, ~there].any()
    errors = rng.normal(size=(6, 3))
    want = np.einsum("tsu,us->ts", found, errors)
    np.testing.assert_allclose(fit.independent(errors, weights), want, rtol=1e-9, atol=1e-12)


def test_a_fit_without_scipy_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(MissingDependency, match=r"scipy.*pip install"):
        fit.fitted_to(made(TILES[:2]), TILES[:2])


def test_what_all_tiles_of_a_shape_are_off_together_hardly_counts(monkeypatch):
    off = fresh("a clock").normal(0, 0.2, len(SHAPES))
    times = {
        shape: {name: us * np.exp(factor) for name, us in found.items()}
        for (shape, found), factor in zip(made(TILES).items(), off, strict=True)
    }

    def lost():
        return fit.loss(fit.fitted_to(times), times).mean - 1

    correlated = lost()
    monkeypatch.setattr(fit, "_COMMON", 1e-9)
    assert correlated < 0.7 * lost()


def test_the_loss_is_what_the_wrong_choice_costs():
    times = made(TILES)
    assert fit.loss(TILES, times)[:2] == (1.0, 1.0)
    shape = SHAPES[7]
    chosen = min(times[shape], key=times[shape].get)
    times[shape][chosen] *= 3
    second = min(times[shape].values())
    found = fit.loss(TILES, times)
    assert found.where == shape
    assert found.worst == pytest.approx(times[shape][chosen] / second)
    assert found.mean == pytest.approx(found.worst ** (1 / len(SHAPES)))


def test_fitting_undoes_what_makes_a_tile_look_too_fast():
    times = made(TILES)
    spoilt = (replace(TILES[0], load_time=TILES[0].load_time / 3), *TILES[1:])
    before = fit.loss(spoilt, times).mean
    fitted = fit.fitted_to(times, spoilt)
    assert before > 1.02
    assert fit.loss(fitted, times).mean - 1 < 0.5 * (before - 1)


def test_a_line_is_the_times_of_its_tile():
    for tile in TILES:
        (times,) = literal_eval(fit.line(tile).strip())
        assert replace(tile, **dict(zip(fit._FITTED, times, strict=True))) == tile
        assert fit.line(tile).endswith(f"# {tile}")


def tuning(tmp_path, shapes=SHAPES[:8], change=lambda entry: {}, *, card="h200", name="times.json"):
    """Write a file of `skuda tune` with a time for every tile, and one of another kernel; `change` the last entry."""
    skus = [sku for sku in built_in_registry().skus_of("smoothquant_linear") if sku.backend == "cuda_core"]
    own, other = (next(sku.id for sku in skus if sku.variant == variant) for variant in ("warpgroup", "mma"))

    def candidate(sku, choice, us):
        return Candidate(sku=sku, choice=choice, source_hash="0" * 64, timing=Timing.of([us]))

    entries, cache = [], device_named(card).l2_cache
    for shape in shapes:
        m, n, k = shape
        problem = {"op": "smoothquant_linear", "m": m, "n": n, "k": k, "act_scale": 0.01, "output_element": "bf16"}
        tiles = (candidate(own, str(tile), round(tile.predicted(*shape, 132), 2)) for tile in tiles_like(cache))
        candidates = (*tiles, candidate(other, "", 0.5))
        entries.append(Entry(problem=problem, date="2026-01-01", seed=9, candidates=candidates))
    entries[-1] = entries[-1].model_copy(update=change(entries[-1]))
    where = Environment(device=device_named(card), driver="1", versions={}, skuda="1")
    path = tmp_path / name
    Tuning(environment=where, margin=3, entries=tuple(entries)).save(path)
    return path


def test_a_file_of_tune_is_read_and_kept_as_a_record(tmp_path, capsys):
    path, record = tuning(tmp_path), tmp_path / "record.json"
    (one,) = fit.sets_of(path)
    assert (one["seed"], one["date"], len(one["shapes"])) == (9, "2026-01-01", 8)
    assert one["environment"]["device"]["name"] == device_named("h200").name
    assert one["problem"] == {"op": "smoothquant_linear", "act_scale": 0.01, "output_element": "bf16"}
    assert {kernel["source_hash"] for kernel in one["kernels"].values()} == {"0" * 64}
    assert [kernel["sku"].rpartition(".")[2] for kernel in one["kernels"].values()] == ["warpgroup", "mma"]
    assert [shape for shape, _ in fit.timed(one, "warpgroup")] == list(SHAPES[:8])
    assert dict(fit.timed(one, "mma")) == {shape: {"": 0.5} for shape in SHAPES[:8]}
    assert not list(fit.timed(one, "streamed"))
    times = made(TILES, SHAPES[:8])
    assert fit.times_of([one]) == {shape: {name: round(us[name], 2) for name in us} for shape, us in times.items()}
    assert fit.main([str(path), "--record", str(record)]) == 0
    out = capsys.readouterr().out
    assert "TILES, fitted shapes: 0.00% by geometric mean of 8" in out
    assert "fit, held: " in out
    assert fit.sets_of(record) == [{**one, "fitted": True}]
    assert fit.main([str(record), "--held", str(path), "--record", str(record)]) == 0
    assert "TILES, held: 0.00% by geometric mean of 8" in capsys.readouterr().out
    assert [each["fitted"] for each in fit.sets_of(record)] == [True, False]


def test_a_fit_begins_with_the_times_of_the_card(tmp_path, capsys):
    ours, other = (tuning(tmp_path, card=card, name=f"{card}.json") for card in ("h100", "h200"))
    assert fit.begun_with(fit.sets_of(ours)) == H100_TILES
    assert fit.begun_with([]) == fit.begun_with(fit.sets_of(other)) == TILES
    assert fit.main([str(ours)]) == 0
    out = capsys.readouterr().out
    assert "TILES, fitted shapes: 0.00% by geometric mean of 8" in out
    with pytest.raises(InvalidRecord, match=r"H100.*, NVIDIA H200|H200, NVIDIA H100.*"):
        fit.main([str(ours), "--held", str(other)])


def test_what_is_held_is_recorded_where_nothing_is_fitted(tmp_path, capsys):
    record = tmp_path / "record.json"
    for shapes, told in ((SHAPES[:2], "TILES, held: 0.00% by geometric mean of 2"), ([(9, 64, 64)], "")):
        path = tuning(tmp_path, shapes)
        assert fit.main(["--held", str(path), "--record", str(record)]) == 0
        out = capsys.readouterr().out
        assert out.startswith(told)
        assert bool(out) is bool(told)
        assert fit.sets_of(record) == [{**one, "fitted": False} for one in fit.sets_of(path)]
    with pytest.raises(SystemExit):
        fit.main([])
    assert "name a FILE" in capsys.readouterr().err


def changed(**fields):
    """Return a change of an entry's first kernel."""
    return lambda entry: {"candidates": (entry.candidates[0].model_copy(update=fields), *entry.candidates[1:])}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (changed(timing=None, refused="other bits"), "must have been timed; had other bits"),
        (changed(source_hash="1" * 64), "warpgroup at .* must be the same kernel throughout"),
        (lambda entry: {"problem": {**entry.problem, "output_element": "f16"}}, "must be like the first"),
        (lambda _: {"layers": 16}, "the layers at .* must be 1, as for the first; had 16"),
    ],
)
def test_times_that_do_not_stand_beside_each_other_are_refused(tmp_path, change, says):
    with pytest.raises(InvalidRecord, match=says):
        fit.sets_of(tuning(tmp_path, change=change))


def test_the_record_in_the_docs_is_read_and_its_tiles_are_printed(capsys, monkeypatch):
    monkeypatch.setattr(fit, "_EVALUATIONS", 5)
    sets = fit.sets_of(RECORD)
    few = {
        "kernels": sets[0]["kernels"],
        "shapes": [{"m,n,k": [32, 64, 64], "us": {"warpgroup": [[0, 1.0], [1, 1.0]]}}],
    }
    assert fit.times_of([few]) == {}
    few["shapes"][0]["m,n,k"][0] = 33
    assert len(fit.times_of([few])[33, 64, 64]) == 2
    assert all(set(us) <= set(map(str, TILES)) for us in fit.times_of(sets).values())
    assert fit.main([str(RECORD)]) == 0
    out = capsys.readouterr().out.splitlines()
    printed = [text.partition("# ") for text in out if "# " in text]
    assert [name for _, _, name in printed] == list(map(str, TILES))
    assert all(min(literal_eval(times.strip())[0]) > 0 for times, _, _ in printed)
    assert all(re.search(r"\d%.* at \d+x\d+x\d+", text) for text in out[len(TILES) :])


def test_what_has_no_times_of_these_tiles_is_refused(tmp_path, capsys):
    path = tmp_path / "x.json"
    names = {"warpgroup": {"configurations": ["1 x 1", "2 x 2"]}}
    shapes = [{"m,n,k": [99, 2, 3], "us": {"warpgroup": [[0, 2.0], [1, 2.0]]}}]
    one = {"environment": {"device": {"name": "x", "l2_cache": 0}}, "kernels": names, "shapes": shapes}
    path.write_text(json.dumps({"kind": "skuda times", "sets": [one]}))
    with pytest.raises(SystemExit):
        fit.main([str(path)])
    assert "no tile of" in capsys.readouterr().err
    path.write_text("{}")
    with pytest.raises(InvalidRecord):
        fit.main([str(path)])
