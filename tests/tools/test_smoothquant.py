"""SmoothQuant's offline half: calibration, smoothing, int8 layers and their file."""

from __future__ import annotations

import json
import sys
from decimal import Decimal, localcontext
from pathlib import Path

import numpy as np
import pytest
from paths import TESTS
from safetensors import safe_open
from safetensors.numpy import save_file

from skuda.dispatch import Dispatcher
from skuda.registry.errors import InvalidProblem, InvalidRecord, MissingDependency
from skuda.tools.checkpoint import load_layers, save_layers
from skuda.tools.smoothquant import (
    ActivationRanges,
    DynamicLayer,
    SmoothQuantLayer,
    smoothing_factors,
)

GOLDEN = json.loads((TESTS / "data" / "seed_smoke_cases.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def dispatcher():
    return Dispatcher()


def bits(array):
    return np.asarray(array, np.float32).view(np.uint32).tolist()


def as_bits(words):
    return [int(word, 16) for word in words]


def normal(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


def with_outlier(rng, rows, channels):
    """Make an activation whose channel 1 is a hundred times larger than the others."""
    activation = normal(rng, rows, channels)
    activation[:, 1] *= 100
    return activation


def smooth_layer(dispatcher, rng, *, n=5, k=12, alpha=0.5, bias=True):
    ranges = ActivationRanges()
    ranges.observe("layer", with_outlier(rng, 20, k))
    return SmoothQuantLayer.quantize(
        dispatcher, ranges.channel_max("layer"), normal(rng, n, k), normal(rng, n) if bias else None, alpha=alpha
    )


def test_the_seeds_worked_example_bit_for_bit(dispatcher):
    case = GOLDEN["smoothquant_linear_f32_s8"]
    activation = np.array(case["activation_fp"], np.float32)
    ranges = ActivationRanges()
    ranges.observe("layer", activation)
    weight = np.array(case["weight_fp"], np.float32)
    layer = SmoothQuantLayer.quantize(dispatcher, ranges.channel_max("layer"), weight, alpha=case["alpha"])
    assert bits(layer.smooth) == bits(case["smooth"])
    assert bits([layer.act_scale]) == as_bits(case["act_scale_bits"])
    assert layer.weight_q.tolist() == case["weight_q"]
    assert bits(layer.weight_scale) == as_bits(case["weight_scale_bits"])
    act_q = layer.operands(dispatcher, activation)["act_q"]
    assert act_q.tolist() == case["act_q"]
    assert (act_q.astype(np.int64) @ layer.weight_q.T.astype(np.int64)).tolist() == case["acc"]
    y = layer.run(dispatcher, activation)
    assert bits(y.ravel()) == as_bits(case["y_bits"])
    largest = np.abs(case["fp_ref"]).max()
    assert np.abs(y - case["fp_ref"]).max() <= 0.03 * largest


def test_streaming_over_batches_of_any_shape_equals_one_pass(rng):
    rows = normal(rng, 60, 7)
    rows[rng.random(rows.shape) < 0.2] = np.nan
    ranges = ActivationRanges()
    for batch in (rows[:1, :], rows[1:25].reshape(2, 3, 4, 7), rows[25:25], rows[25:26].reshape(7), rows[26:][::-1]):
        ranges.observe("layer", batch)
    expected = [max((abs(float(x)) for x in column if x == x), default=0.0) for column in rows.T]  # noqa: PLR0124  NaN
    assert ranges.channel_max("layer").tolist() == expected
    assert ranges.channel_max("layer").dtype == np.float32


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (np.ones((2, 3)), "float64"),
        (np.ones((2, 3), np.int8), "int8"),
        (np.float32(1) * np.ones((), np.float32), r"of shape \[\]"),
        (np.ones((2, 4), np.float32), r"of shape \[\.\.\., 3\]; had float32 of shape \[2, 4\]"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(batch, message):
    ranges = ActivationRanges()
    ranges.observe("my layer", np.ones((1, 3), np.float32))
    with pytest.raises(InvalidProblem, match=message) as caught:
        ranges.observe("my layer", np.asarray(batch))
    assert "my layer" in str(caught.value)
    assert ranges.channel_max("my layer").tolist() == [1, 1, 1]


def test_smoothing_factors_against_the_formula_in_decimals(rng):
    activation, weight = np.abs(normal(rng, 50)) * 30, np.abs(normal(rng, 50))
    activation[:2], weight[1:3] = 0, 0  # floored
    alpha = float(rng.random())
    got = smoothing_factors(activation, weight, alpha)
    assert got.dtype == np.float32
    floor = Decimal(float(np.float32(1e-5)))
    with localcontext(prec=40):
        for a, w, s in zip(activation.tolist(), weight.tolist(), got.tolist(), strict=True):
            exact = max(Decimal(a), floor) ** Decimal(alpha) / max(Decimal(w), floor) ** (1 - Decimal(alpha))
            # Three f32 roundings, half an ulp (2^-24) each.
            assert abs(Decimal(s) / exact - 1) < Decimal(2) ** -22


@pytest.mark.parametrize(
    ("activation", "weight", "alpha", "field"),
    [
        ([1.0], [1.0], -0.1, "alpha"),
        ([1.0], [1.0], 1.1, "alpha"),
        ([1.0], [1.0], float("nan"), "alpha"),
        ([1.0, 2.0], [1.0], 0.5, "activation_max"),
        ([float("inf")], [1.0], 0.5, "activation_max"),
        ([1.0], [float("nan")], 0.5, "weight_max"),
    ],
)
def test_smoothing_factors_refuse(activation, weight, alpha, field):
    with pytest.raises(InvalidProblem) as caught:
        smoothing_factors(np.array(activation, np.float32), np.array(weight, np.float32), alpha)
    assert caught.value.field == field


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_is_refused_by_its_place(dispatcher, rng, bad):
    weight = normal(rng, 3, 4)
    weight[2, 1] = bad
    for refused in (
        lambda: DynamicLayer.quantize(dispatcher, weight),
        lambda: SmoothQuantLayer.quantize(dispatcher, np.ones(4, np.float32), weight, alpha=0.5),
    ):
        with pytest.raises(InvalidProblem, match=r"\[2, 1\]"):
            refused()


def test_shapes_that_do_not_fit_are_refused(dispatcher, rng):
    maxima = np.ones(4, np.float32)
    for weight in (normal(rng, 4), normal(rng, 2, 3), normal(rng, 2, 4).astype(np.float64)):
        with pytest.raises(InvalidProblem):
            SmoothQuantLayer.quantize(dispatcher, maxima, weight, alpha=0.5)
    with pytest.raises(InvalidProblem, match="bias"):
        SmoothQuantLayer.quantize(dispatcher, maxima, normal(rng, 2, 4), normal(rng, 3), alpha=0.5)
    with pytest.raises(InvalidProblem, match="weight_q"):
        DynamicLayer(weight_q=np.ones((2, 3), np.int32), weight_scale=np.ones(2, np.float32))
    with pytest.raises(InvalidProblem, match="weight_scale"):
        DynamicLayer(weight_q=np.ones((2, 3), np.int8), weight_scale=np.ones(3, np.float32))


def test_both_layers_take_any_leading_shape(dispatcher, rng):
    static = smooth_layer(dispatcher, rng)
    dynamic = DynamicLayer.quantize(dispatcher, normal(rng, 5, 12))
    x = normal(rng, 2, 3, 12)
    for layer in (static, dynamic):
        assert layer.shape == (5, 12)
        whole = layer.run(dispatcher, x)
        assert whole.shape == (2, 3, 5)
        assert bits(layer.run(dispatcher, x[1, 2])) == bits(whole[1, 2])
        assert bits(layer.run(dispatcher, x[:, ::2])) == bits(whole[:, ::2])
        assert layer.run(dispatcher, x[:0]).shape == (0, 3, 5)
        for refused in (normal(rng, 2, 13), x.astype(np.float64)):
            with pytest.raises(InvalidProblem, match=r"x must"):
                layer.run(dispatcher, refused)


def test_a_file_brings_back_every_bit(dispatcher, rng, tmp_path):
    layers = {
        "z.dense": smooth_layer(dispatcher, rng, n=3, k=5, alpha=1 / 3),
        "a.dense": smooth_layer(dispatcher, rng, n=4, k=7, alpha=None, bias=False),
    }
    path = tmp_path / "model.safetensors"
    save_layers(path, layers)
    loaded = load_layers(path)
    assert list(loaded) == list(layers)
    for name, layer in layers.items():
        back = loaded[name]
        assert (back.act_scale, back.alpha, back.shape) == (layer.act_scale, layer.alpha, layer.shape)
        assert back.tensors().keys() == layer.tensors().keys()
        for part, array in layer.tensors().items():
            assert back.tensors()[part].dtype == array.dtype
            assert back.tensors()[part].tobytes() == array.tobytes()
        x = normal(rng, 6, layer.shape[1])
        assert bits(back.run(dispatcher, x)) == bits(layer.run(dispatcher, x))
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def saved(dispatcher, rng, folder):
    """Save a layer of shape (5, 12); return path, tensors and metadata, to be tampered with."""
    path = folder / "model.safetensors"
    save_layers(path, {"dense": smooth_layer(dispatcher, rng)})
    with safe_open(path, framework="numpy") as file:
        return path, {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118


def header_with(metadata, **changes):
    layers = json.loads(metadata["layers"])
    layers["dense"].update(changes)
    return {**metadata, "layers": json.dumps(layers)}


TAMPERED = {
    "version": (lambda t, m: (t, {**m, "version": "2"}), ["version", "'2'", "'1'"]),
    "format": (lambda t, m: (t, {**m, "format": "pt"}), ["format", "'pt'", "skuda.smoothquant"]),
    "no metadata": (lambda t, _: (t, None), ["format", "None"]),
    "no header": (lambda t, m: (t, {**m, "layers": "[1"}), ["metadata", "act_scale"]),
    "missing tensor": (
        lambda t, m: ({k: v for k, v in t.items() if k != "dense.smooth"}, m),
        ["dense.smooth", "nothing", "F32 [12]"],
    ),
    "extra tensor": (
        lambda t, m: (t | {"other.smooth": np.ones(2, np.float32)}, m),
        ["other.smooth", "F32 [2]", "absent"],
    ),
    "wrong element": (
        lambda t, m: (t | {"dense.weight_q": t["dense.weight_q"].astype(np.int16)}, m),
        ["dense.weight_q", "I16 [5, 12]", "I8 [5, 12]"],
    ),
    "wrong shape": (
        lambda t, m: (t | {"dense.weight_scale": np.ones(4, np.float32)}, m),
        ["dense.weight_scale", "F32 [4]", "F32 [5]"],
    ),
    "scale not a number": (
        lambda t, m: (t, header_with(m, act_scale=float("nan"))),
        ["layer dense", "act_scale", "nan"],
    ),
    "scale not f32": (lambda t, m: (t, header_with(m, act_scale=0.1)), ["act_scale", "0.1"]),
    "scale absent": (lambda t, m: (t, {**m, "layers": m["layers"].replace("act_scale", "x")}), ["metadata", "x must"]),
    "alpha out of range": (lambda t, m: (t, header_with(m, alpha=7)), ["alpha", "7"]),
    "NaN in a tensor": (
        lambda t, m: (t | {"dense.smooth": np.full(12, np.nan, np.float32)}, m),
        ["smooth", "nan"],
    ),
    "negative smoothing": (
        lambda t, m: (t | {"dense.smooth": np.full(12, -1, np.float32)}, m),
        ["smooth", "-1.0", "positive"],
    ),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_a_file_that_is_not_what_it_says_is_refused(dispatcher, rng, tmp_path, what):
    change, message = TAMPERED[what]
    path, tensors, metadata = saved(dispatcher, rng, tmp_path)
    changed, metadata = change(tensors, metadata)
    save_file(changed, path, metadata)
    with pytest.raises(InvalidRecord) as caught:
        load_layers(path)
    for part in (*message, str(path), "save_layers"):
        assert part in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"no safetensors at all", None])
def test_a_damaged_file_is_refused(dispatcher, rng, tmp_path, content):
    path, _, _ = saved(dispatcher, rng, tmp_path)
    path.write_bytes(path.read_bytes()[:-1] if content is None else content)
    with pytest.raises(InvalidRecord, match="safetensors file"):
        load_layers(path)


def test_a_save_that_fails_leaves_the_old_file(dispatcher, rng, tmp_path, monkeypatch):
    path, _, _ = saved(dispatcher, rng, tmp_path)
    before = path.read_bytes()

    def disk_full(_tensors, where, _metadata):
        Path(where).write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr("safetensors.numpy.save_file", disk_full)
    with pytest.raises(OSError, match="no space"):
        save_layers(path, {})
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_without_safetensors_the_error_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for refused in (lambda: save_layers(tmp_path / "file", {}), lambda: load_layers(tmp_path / "file")):
        with pytest.raises(MissingDependency, match=r"pip install 'safetensors"):
            refused()
