"""The shipped costs choose well at shapes that they were not fitted to, and `refit` finds the costs behind times."""

from __future__ import annotations

import json

import numpy as np
import pytest
import refit
from paths import ROOT
from products import static
from support import fresh
from tile_times import sets_of

from skuda.kernels.linear import streamed, warpgroup
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


def test_costs_that_choose_badly_have_a_large_loss():
    held = [times for card, times in SETS if (card, times["kernel"], times["held"]) == ("h100", "warpgroup", True)]
    costs = shipped("warpgroup.h100")
    wrong = costs | {"64 x 64, ping-pong, 12 stages": {**next(iter(costs.values())), "mma": 1e-6, "load": 1e-6}}
    assert np.exp(np.log(refit.losses("warpgroup", held, wrong)).mean()) > 1.025
