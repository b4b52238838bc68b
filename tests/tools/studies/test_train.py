"""`skuda train-check`: the text, the model, the schedule, a run of seconds, its record, and one that diverges."""

from __future__ import annotations

import shlex

import numpy as np
import pytest
from support import fresh

from skuda.registry.errors import InvalidProblem, MissingDependency
from skuda.tools.cli import main
from skuda.tools.studies import commands, corpus
from skuda.tools.studies.commands import TRAIN, run_train
from skuda.tools.studies.train import ModelShape, TrainedResult, TrainRecord, sections

torch = pytest.importorskip("torch")

from skuda.tools.studies import training as training_module  # noqa: E402  torch may be absent
from skuda.tools.studies.training import ByteLlama, Training, bits_per_byte, dynamic, static  # noqa: E402
from skuda.torch import DynamicLinear, StaticLinear  # noqa: E402

SMALL = {"width": 16, "layers": 1, "length": 16}
SHAPE = ModelShape(width=16, layers=1, heads=1, hidden=44, length=16)
RUN = {**SMALL, "steps": 30, "batch": 4, "device": "cpu", "seed": 7, "tolerance": 50.0}
TEXT = np.frombuffer(b"def f(x):\n    return x + 1\n\n" * 200, np.uint8)
FACTS = {"python": "3", "sha256": "", "files": 1, "bytes": 5600, "held_out_files": 1, "held_out_bytes": 3000}
READ = corpus.load.__wrapped__


@pytest.fixture(scope="module", autouse=True)
def small_text():
    """A text that is read in no time, and few windows of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "load", lambda: corpus.Corpus(TEXT, TEXT[:3000], FACTS))
        patch.setattr(training_module, "WINDOWS", 6)
        yield


@pytest.fixture(scope="module")
def record(small_text):
    return TRAIN.made(**RUN)


@pytest.fixture
def training():
    return Training(SHAPE, corpus.load(), torch.device("cpu"), seed=7, steps=500, batch=4, every=1)


# --- the text --------------------------------------------------------------------------------------------------------


def test_files_are_held_out_by_the_hash_of_their_name(tmp_path, monkeypatch, small_text):
    rng = fresh()
    contents = {f"package{i % 7}/module{i}.py": rng.bytes(int(rng.integers(0, 50))) for i in range(300)}
    foreign = {"site-packages/other.py": b"other", "package0/notes.txt": b"notes"}
    for name, content in {**contents, **foreign}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda _: str(tmp_path))
    found = READ()
    held_out = [name for name in sorted(contents) if corpus.is_held_out(name)]
    rest = [name for name in sorted(contents) if not corpus.is_held_out(name)]
    assert found.held_out.tobytes() == b"".join(contents[name] for name in held_out)
    assert found.trained.tobytes() == b"".join(contents[name] for name in rest)
    facts = found.facts
    assert (facts["files"], facts["held_out_files"]) == (len(rest), len(held_out))
    assert (facts["bytes"], facts["held_out_bytes"]) == (found.trained.size, found.held_out.size)
    assert 0 < len(held_out) < 60  # of 300, one in 16
    (tmp_path / rest[0]).write_bytes(b"another content")
    assert READ().facts["sha256"] != facts["sha256"]


# --- the model and the schedule --------------------------------------------------------------------------------------


def test_every_way_begins_with_the_same_model_and_sees_the_same_batches(training):
    first, second = training.initial().state_dict(), training.initial().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    for one, other, _ in zip(training.batches(), training.batches(), range(3), strict=False):
        assert torch.equal(one, other)
        assert one.shape == (4, 17)
        assert all(bytes(row.tolist()) in TEXT.tobytes() for row in one)


def test_the_learning_rate_rises_and_falls(training):
    rates = [training.rate(step) for step in range(training.steps)]
    top = rates.index(max(rates))
    assert max(rates) == 1
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert 0.1 <= rates[-1] < 0.101


def test_held_out_windows_do_not_overlap_and_cover_the_text(training):
    windows = torch.cat(list(training.held_out()))
    assert windows.shape == (6, 17)
    for i, row in enumerate(windows):
        assert row.tolist() == TEXT[i * 500 : i * 500 + 17].tolist()


def test_int8_copies_leave_the_model_as_it_was(training):
    model = training.initial()
    for made, kind in ((dynamic(model), DynamicLinear), (static(model, training), StaticLinear)):
        assert sum(isinstance(layer, kind) for layer in made.modules()) == 7
        assert isinstance(made.head, torch.nn.Linear)
        assert bits_per_byte(made, training) == pytest.approx(bits_per_byte(model, training), rel=0.01)
    assert {type(layer) for layer in model.modules()}.isdisjoint({DynamicLinear, StaticLinear})


# --- the run ---------------------------------------------------------------------------------------------------------


def test_every_way_learns(record):
    assert [result.way for result in record.ways] == ["bf16", "fake", "mixed"]
    for result in record.ways:
        assert len(result.losses) == 30
        assert result.final_loss == pytest.approx(sum(result.losses[-3:]) / 3, rel=1e-5)  # of rounded figures
        assert result.final_loss < result.losses[0]
        assert set(result.held_out) == {"trained", "dynamic", "static"}
        assert all(bits < 8 for bits in result.held_out.values())  # as many as a byte has
    assert len({result.losses for result in record.ways}) == 3
    assert record.parameters == sum(parameter.numel() for parameter in ByteLlama(SHAPE).parameters())


def test_the_command_of_a_record_repeats_the_run(record, capsys, tmp_path):
    again = shlex.split(record.command)
    assert again[:2] == ["skuda", "train-check"]
    path = tmp_path / "record.json"
    assert main([*again[1:], "--output", str(path), "--json"]) == 0
    repeated = TrainRecord.load(path)
    assert capsys.readouterr().out == path.read_text()
    for one, other in zip(repeated.ways, record.ways, strict=True):
        assert one.losses == other.losses
        assert one.held_out == other.held_out
    assert set(shlex.split(repeated.command)) == set(again)


def test_losses_are_means_of_intervals():
    many = TRAIN.made(**{**RUN, "steps": 250, "way": ("bf16",), "batch": 1})
    assert many.every == 2
    assert len(many.ways[0].losses) == 125


def test_a_training_that_diverges_fails(monkeypatch, capsys):
    """`fake` gets a learning rate at which nothing is learned."""
    right = training_module._trained

    def trained(model, training, report):
        if any("FakeQuantLinear" in type(layer).__name__ for layer in model.modules()):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(training_module, "LEARNING_RATE", 15.0)
                return right(model, training, report)
        return right(model, training, report)

    monkeypatch.setattr(training_module, "_trained", trained)
    assert run_train(**{**RUN, "way": ("bf16", "fake"), "tolerance": 1.0}) == 1
    assert "skuda: fake: loss is " in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses what torch deprecates
def test_a_compiled_model_trains():
    made = TRAIN.made(**{**RUN, "compile": True, "steps": 3, "way": ("mixed",)})
    assert made.compiled
    assert "--compile" in made.command
    assert len(made.ways[0].losses) == 3


# --- a record --------------------------------------------------------------------------------------------------------


def way(name, loss=1.0, **held_out):
    bits = {"trained": 2.0, "dynamic": 2.0, "static": 2.0, **held_out}
    return TrainedResult(way=name, losses=(loss,), final_loss=loss, milliseconds=1.0, held_out=bits)


def test_what_is_worse_by_more_than_the_tolerance_fails(record, tmp_path, capsys):
    ways = (way("bf16", dynamic=2.01), way("fake", 1.02, static=2.03), way("mixed", 0.5, trained=1.0))
    worse = record.model_copy(update={"ways": ways, "tolerance": 1.0})
    assert worse.wrong == (
        "fake: loss is 2.00 % above bf16, allowed are 1 %",
        "fake: static is 1.50 % above bf16, allowed are 1 %",
    )
    worse.save(tmp_path / "record.json")
    assert main(["train-check", "--show", str(tmp_path / "record.json")]) == 1
    out, err = capsys.readouterr()
    assert "| fake | final loss, nats per byte | 1.0200 | +2.00 % |" in out.splitlines()
    assert "skuda: fake: static is 1.50 % above bf16" in err
    assert record.model_copy(update={"ways": ways[1:]}).wrong == (), "without bf16 nothing is compared"
    broken = worse.model_copy(update={"ways": (ways[0], way("fake", 1e30))})
    assert broken.wrong


def test_every_figure_is_shown(record):
    table = sections(record)["ways"][0]
    for result in record.ways:
        shown = {row[2] for row in table.rows if row[0] == result.way}
        figures = (result.final_loss, result.milliseconds, *result.held_out.values())
        assert shown == {f"{value:.4f}" for value in figures}


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"width": 130}, "--width must be even, and from 128 on a multiple of 64"),
        ({"width": 5}, "--width must be even"),
        ({"way": ("int4",)}, "--way must be one of bf16, fake, mixed"),
        ({"length": 3000}, "--length must be below 3000, the bytes"),
        ({"device": "tpu"}, "--device must be one of auto, cpu"),
    ],
)
def test_options_that_cannot_be_served_are_refused(options, rule):
    with pytest.raises(InvalidProblem, match=f"train-check: {rule}"):
        run_train(**{**RUN, **options})


def test_without_torch_it_says_what_to_do(monkeypatch):
    monkeypatch.setattr(commands, "find_spec", lambda _: None)
    with pytest.raises(MissingDependency, match="pip install torch"):
        run_train(**RUN)
