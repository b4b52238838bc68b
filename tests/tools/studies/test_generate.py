"""Generation in `skuda bench-model`: every form and cache on the CPU, and what becomes of a form that fails."""

from __future__ import annotations

import copy

import pytest
from support import fresh

from skuda.registry.device import HOST
from skuda.tools.cli import main
from skuda.tools.frame.view import markdown
from skuda.tools.studies.model import CACHES, ModelRecord, sections

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from skuda.tools.bench.lab import LabSizes, TorchLab  # noqa: E402  torch may be absent
from skuda.tools.studies import generate  # noqa: E402
from skuda.tools.studies.llama import LlamaSizes  # noqa: E402

TINY = LlamaSizes(hidden=32, intermediate=48, heads=4, kv_heads=2, layers=1)


@pytest.fixture(autouse=True)
def few(monkeypatch):
    sizes = {"_MOST_LAYERS": 1, "_VOCABULARY": 64, "_PROMPT": 5, "SEQUENCES": (2,)}
    for name, value in {"ROUNDS": 1, "_WARM_UP": 1, **sizes}.items():
        monkeypatch.setattr(generate, name, value)


def measured(seed="generate"):
    lab = TorchLab(HOST, LabSizes(flushed=1 << 12))
    with torch.no_grad():
        return generate.generated(lab, TINY, int(fresh(seed).integers(1 << 30)))


def by_form(found):
    return {(each.cache, each.rows, one.name): one for each in found for one in each.ways}


def test_every_form_generates_with_every_cache(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(generate, "SEQUENCES", (1, 2))
    path = tmp_path / "r.json"
    sizes = ["--hidden", "32", "--intermediate", "48", "--heads", "4", "--kv-heads", "2", "--layers", "2"]
    assert main(["bench-model", *sizes, "--cpu", "--only", "generate", "--output", str(path)]) == 0
    record = ModelRecord.load(path)
    assert record.generation == {"layers": 1, "vocabulary": 64, "prompt": 5, "tokens": 4}
    found = by_form(record.generated)
    assert list(found) == [(cache, rows, name) for cache in CACHES for rows in (1, 2) for name in ("bf16", "skuda")]
    assert {one.refused for one in found.values()} == {""}
    assert {one.timing.rounds for one in found.values()} == {1}
    assert "| continuous batching | 2 | " in capsys.readouterr().out


def test_forms_run_in_turn_and_the_first_calls_do_not_count(monkeypatch):
    monkeypatch.setattr(generate, "ROUNDS", 2)
    order = []

    def of(name, times):
        def call():
            order.append(name)
            return times[order.count(name) - 1]

        return call

    ways = generate._timed({"a": of("a", [99.0, 1.0, 3.0]), "b": of("b", [99.0, 4.0, 6.0])}, {"a": "", "b": ""})
    assert [(one.name, one.timing.median) for one in ways] == [("a", 2.0), ("b", 5.0)]
    assert "".join(order) == "baabba"


def short(model):
    """Return a model that generates a token less than it was asked for."""
    made, whole, batched = copy.deepcopy(model), model.generate, model.generate_batch
    made.generate = lambda *given, **asked: whole(*given, **asked)[:, :-1]

    def few(*given, max_new_tokens, **asked):
        return batched(*given, max_new_tokens=max_new_tokens - 1, **asked)

    made.generate_batch = few
    return made


def failing(model):
    made = copy.deepcopy(model)

    def fail(*_, **__):
        raise ValueError("no such cache")

    made.generate = made.generate_batch = fail
    return made


def unable(_model):
    raise MemoryError("too large")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (short, "WrongResult: {} sequences got [3] tokens, not 4 each"),
        (failing, "ValueError: no such cache"),
        (unable, "MemoryError: too large"),
    ],
)
def test_what_fails_or_gives_another_number_of_tokens_is_refused_and_said(make, why, monkeypatch):
    monkeypatch.setitem(generate.FORMS, "skuda", make)
    fields = measured()
    for (_, rows, name), one in by_form(fields["generated"]).items():
        assert one.refused == ("" if name == "bf16" else why.format(rows))
        assert (one.timing is None) is bool(one.refused)
    record = record_of(fields["generated"])
    assert record.wrong[0] == f"dynamic cache, 2 sequences: skuda: {why.format(2)}"
    assert len(record.wrong) == len(CACHES)
    assert f"skuda refuses static cache, 2 sequences: {why.format(2)}" in markdown(sections(record)["generate"])


def test_a_version_without_continuous_batching_is_named(monkeypatch):
    from transformers import LlamaForCausalLM

    def absent(*_):
        raise AttributeError("no generate_batch")

    monkeypatch.setattr(LlamaForCausalLM, "generate_batch", property(absent))
    fields = measured()
    for (cache, _, _), one in by_form(fields["generated"]).items():
        assert bool(one.refused) is (cache == "continuous batching")
    assert record_of(fields["generated"]).wrong == (), "bf16 cannot do it, either"


def test_without_transformers_it_says_so(monkeypatch):
    monkeypatch.setattr(generate, "absence", lambda rival: f"{rival.needs} is not installed")
    fields = measured()
    assert {one.refused for one in by_form(fields["generated"]).values()} == {"transformers is not installed"}


def record_of(generated):
    about = {"device": "CPU", "date": "2026-02-03T04:05:06+00:00", "skuda": "0", "command": "c", "repeats": 1}
    return ModelRecord(**about, sizes={"hidden": 32, "layers": 1}, graph=False, generated=generated)
