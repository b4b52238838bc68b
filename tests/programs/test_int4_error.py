"""The program that measures the errors of 4-bit weights: its definition of an error, on a tiny encoder."""

from __future__ import annotations

import json
import math

import pytest
from encoders import VOCABULARY, tiny_encoder
from paths import ROOT
from support import fresh


def test_a_tiny_encoder_has_the_errors_of_every_way_of_the_record():
    pytest.importorskip("torch")
    import int4_error

    rng = fresh()
    calibration, held_out = ([rng.integers(VOCABULARY, size=n).tolist() for n in (9, 4, 7)] for _ in range(2))
    found = int4_error.errors(tiny_encoder(rng), calibration, held_out)
    record = json.loads((ROOT / "docs" / "evidence" / "int4-error.json").read_text())
    assert list(found) == list(record["errors"])
    for errors in (*found.values(), *record["errors"].values()):
        assert list(errors) == ["plain", "smoothed"]
        for figures in errors.values():
            # Embeddings have the length 1, and all figures are rounded to 4 places.
            about = math.sqrt(2 - 2 * figures["mean cosine"])
            assert figures["error"] == pytest.approx(about, abs=1.1e-4 / figures["error"] + 1e-4)
            assert figures["worst cosine"] <= figures["mean cosine"] <= 1
    eight, *four = found.values()
    assert all(eight[kind]["error"] < each[kind]["error"] for each in four for kind in eight)


def test_codes_of_a_channel_are_the_nearest():
    torch = pytest.importorskip("torch")
    import int4_error

    import skuda.torch as st

    rng = fresh()
    layer = torch.nn.Linear(40, 20)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(rng.standard_normal((20, 40))))
    model = torch.nn.Sequential(layer)
    with st.calibrate(model) as calibration:
        model(torch.ones(1, 40))
    st.quantize_(model, int4_error.PerChannel(calibration, None))
    codes, scale = model[0].weight_q, model[0].weight_scale
    assert (int(codes.min()), int(codes.max())) == (-8, 7)
    assert ((codes * scale - layer.weight).abs() <= scale * (0.5 + 1e-5)).all()
