"""The shipped costs choose well at shapes that they were not fitted to, and `refit` finds the costs behind times."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import refit
from paths import ROOT
from products import static
from support import fresh
from tile_times import laid_out, sets_of, write

from skuda.dispatch.select.environment import Environment
from skuda.dispatch.select.tuning import Candidate, Timing, Tuning, TuningEntry
from skuda.kernels.catalog import built_in_registry
from skuda.kernels.linear import streamed, warpgroup
from skuda.kernels.linear.warpgroup_tile import TILES
from skuda.registry.device import KNOWN_DEVICES

EVIDENCE = {card: ROOT / f"docs/evidence/{card}-tiles.json" for card in ("h200", "h100")}
SETS = [(card, times) for card, path in EVIDENCE.items() for times in sets_of(path, "")]
HELD = [("warpgroup", "h200", 140), ("warpgroup", "h100", 60), ("streamed", "h200", 100), ("streamed", "h100", 80)]


def shipped(name):
    content = json.loads((ROOT / f"kernels/linear/{name}.json").read_text())
    return content.get("tiles", content)


@pytest.mark.parametrize(("kernel", "card", "shapes"), HELD)
def test_the_loss_at_held_out_shapes_is_small(kernel, card, shapes):
    held = [times for name, times in SETS if (name, times["kernel"], times["held"]) == (card, kernel, True)]
    costs = shipped("streamed.h100" if kernel == "streamed" else f"warpgroup.{card}")
    losses = refit.losses(kernel, held, costs)
    assert len(losses) >= shapes
    loss, most = 100 * (np.exp(np.log(losses).mean()) - 1), 100 * (losses.max() - 1)
    assert loss < 2.5
    assert most < 20
    row = f"| `{kernel}`, {card.upper()} | {len(losses)} | {loss:.1f} % | {most:.1f} % |"
    assert row in (ROOT / "docs/linear.md").read_text(), f"docs/linear.md lacks {row}"


@pytest.mark.parametrize(("kernel", "card"), [each[:2] for each in HELD])
def test_a_launch_rule_predicts_as_refit_does(kernel, card):
    """Otherwise the losses above would be those of another rule."""
    device, module = KNOWN_DEVICES[card], {"warpgroup": warpgroup, "streamed": streamed}[kernel]
    costs = shipped("streamed.h100" if kernel == "streamed" else f"warpgroup.{card}")
    fitted = json.loads((ROOT / f"kernels/linear/warpgroup.{card}.json").read_text())
    about = device.model_dump(mode="json") | {"l2_cache": fitted["l2_cache"]}
    about |= {"memory_bandwidth": fitted["memory_bandwidth"] * 1e6} if kernel == "warpgroup" else {}
    times = {"device": about, "problem": static().model_dump(mode="json")}
    shapes = [row[:3] for name, own in SETS if (name, own["kernel"]) == (card, kernel) for row in own["shapes"]]
    for at in fresh(kernel, card).permutation(len(shapes))[:10]:
        m, n, k = shapes[at]
        m = -(-m // 64) * 64 if kernel == "warpgroup" else m  # numbers of rows that are alike share a ranking
        choices = {choice.name: choice.microseconds for choice in module.launch(static(m, n, k), device).choices}
        for name, own, predicted in refit.KERNELS[kernel](times, (m, n, k)):
            assert choices[name] == pytest.approx(predicted(costs[own])), (name, m, n, k)


@pytest.mark.parametrize("kernel", ["warpgroup", "streamed"])
def test_a_fit_finds_the_costs_that_times_come_from(kernel, tmp_path, capsys):
    times = next(times for card, times in SETS if (card, times["kernel"]) == ("h100", kernel))
    true = {
        name: dict(costs)
        for name, costs in shipped(f"{kernel}.h100").items()
        if kernel == "streamed" or "64 x 64" in name
    }
    shapes = []
    for m, n, k, *_ in times["shapes"][::2]:
        of = refit.KERNELS[kernel](times, (m, n, k))
        us = [
            (times["configurations"].index(name), predicted(true[own]))
            for name, own, predicted in of
            if own in true and name in times["configurations"]
        ]
        shapes.append([m, n, k, *(value for pair in us for value in pair)])
    record, output = tmp_path / "times.json", tmp_path / "costs.json"
    write(record, [{**times, "shapes": shapes, "held": False}])
    kept = {"note": "kept", "tiles": {}}
    output.write_text(laid_out(kept))
    refit.main([kernel, str(record), "--held", str(record), "--output", str(output)])
    said = capsys.readouterr().out
    assert re.findall(r"(\d+) shapes (fitted|held out): loss (-?\d+\.\d\d)%", said)[0][0] == str(len(shapes))
    assert all(abs(float(loss)) < 0.05 for loss in re.findall(r"loss (-?\d+\.\d\d)%", said))
    found = json.loads(output.read_text())
    assert found["note"] == "kept"
    found = found["tiles"] if kernel == "warpgroup" else found
    for name, costs in true.items():
        for cost in ("launch", "load") if kernel == "warpgroup" else ("launch", "box", "memory", "direct_round"):
            assert found[name][cost] == pytest.approx(costs[cost], rel=0.1), (name, cost)


def test_times_of_tune_are_read_and_recorded(tmp_path):
    sku = next(sku for sku in built_in_registry().skus_of("smoothquant_linear") if sku.variant == "warpgroup")
    timings = [Timing(median=us, p10=us, p90=us, best=us, rounds=20) for us in (12.344, 9.5)]
    candidates = [
        Candidate(sku=sku.id, choice=str(tile), source_hash="0" * 64, timing=timing)
        for tile, timing in zip(TILES, timings, strict=False)
    ]
    problem = static(256, 512, 1024)
    entry = TuningEntry(
        problem=problem.model_dump(mode="json"), date="2026-01-02", seed=1, candidates=tuple(candidates)
    )
    environment = Environment(device=KNOWN_DEVICES["h200"], driver="580.65 (CUDA 13.0)", skuda="0.1.0")
    tuned, record = tmp_path / "tuned.json", tmp_path / "record.json"
    Tuning(environment=environment, entries=(entry,)).save(tuned)
    (times,) = sets_of(tuned, "warpgroup", held=True)
    assert times["shapes"] == [[256, 512, 1024, 0, 12.34, 1, 9.5]]
    assert times["configurations"] == [str(tile) for tile in TILES[:2]]
    assert sets_of(tuned, "streamed") == []
    write(record, [times])
    assert sets_of(record, "warpgroup") == [times]
    other = {**times, "kernel": "streamed"}
    write(record, [other])
    assert sets_of(record, "") == [other, times], "the sets of another kernel stay"
    losses = refit.losses("warpgroup", [times], shipped("warpgroup.h200"))
    assert losses.tolist() in ([1.0], [12.34 / 9.5])


def test_costs_that_choose_badly_have_a_large_loss():
    held = [times for card, times in SETS if (card, times["kernel"], times["held"]) == ("h100", "warpgroup", True)]
    costs = shipped("warpgroup.h100")
    wrong = costs | {"64 x 64, ping-pong, 12 stages": {**next(iter(costs.values())), "mma": 1e-6, "load": 1e-6}}
    assert np.exp(np.log(refit.losses("warpgroup", held, wrong)).mean()) > 1.025
