"""`skuda train-check`: the text, the model, the schedule, a run of seconds, its record and what it is judged by."""

import json
import shlex
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from matplotlib.figure import Figure  # noqa: E402
from support import fresh  # noqa: E402

from skuda.registry.errors import InvalidProblem, InvalidRecord, MissingDependency  # noqa: E402
from skuda.tools.cli import main  # noqa: E402
from skuda.tools.train import command, corpus  # noqa: E402
from skuda.tools.train.command import Request, run, train_check  # noqa: E402
from skuda.tools.train.judged import judged  # noqa: E402
from skuda.tools.train.markdown import train_markdown  # noqa: E402
from skuda.tools.train.model import ByteLlama, rotated  # noqa: E402
from skuda.tools.train.plot import plots  # noqa: E402
from skuda.tools.train.record import Shape, TrainRecord, WayResult  # noqa: E402
from skuda.tools.train.training import Plan, bits_per_byte, dynamic, static  # noqa: E402
from skuda.torch import DynamicLinear, StaticLinear  # noqa: E402

SMALL = {"width": 16, "layers": 1, "heads": 2, "hidden": 24, "length": 16}
REQUEST = Request(**SMALL, steps=30, batch=4, windows=6, device="cpu", seed=7, tolerance=50.0)
TEXT = np.frombuffer(b"def f(x):\n    return x + 1\n\n" * 200, np.uint8)
FACTS = corpus.CorpusFacts(python="3", files=1, bytes=5600, held_out_files=1, held_out_bytes=3000, sha256="")


@pytest.fixture(scope="module", autouse=True)
def small_text():
    """A text that is read in no time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command.corpus, "load", lambda: corpus.Corpus(TEXT, TEXT[:3000], FACTS))
        yield


@pytest.fixture(scope="module")
def record(small_text):
    return train_check(REQUEST)


@pytest.fixture
def plan():
    return Plan(
        shape=Shape(**SMALL),
        corpus=corpus.load(),
        device=torch.device("cpu"),
        seed=7,
        steps=500,
        batch=4,
        every=1,
        windows=6,
        learning_rate=1e-3,
    )


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
    assert (facts.files, facts.held_out_files) == (len(rest), len(held_out))
    assert (facts.bytes, facts.held_out_bytes) == (found.trained.size, found.held_out.size)
    assert 0 < len(held_out) < 60  # of 300, one in 16
    (tmp_path / rest[0]).write_bytes(b"another content")
    assert READ().facts.sha256 != facts.sha256


READ = corpus.load.__wrapped__


# --- the model -------------------------------------------------------------------------------------------------------


def test_the_model_is_causal():
    rng = fresh()
    model = ByteLlama(Shape(**SMALL))
    tokens = torch.from_numpy(rng.integers(0, 256, (2, 16)))
    at = int(rng.integers(1, 16))
    changed = tokens.clone()
    changed[:, at] = (changed[:, at] + 1) % 256
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :at], after[:, :at])
    assert (before[:, at:] != after[:, at:]).any(-1).all()


def test_rotary_positions_are_relative():
    """A product of two rotated vectors depends on the distance of their positions."""
    rng = fresh()
    q, k = (torch.from_numpy(rng.normal(size=(1, 1, 1, 8))).expand(1, 1, 12, 8) for _ in range(2))
    angles = torch.arange(12)[:, None] * torch.from_numpy(rng.uniform(0, 1, 4))
    scores = rotated(q, angles.cos(), angles.sin())[0, 0] @ rotated(k, angles.cos(), angles.sin())[0, 0].t()
    for distance in range(-11, 12):
        along = scores.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along))


def test_every_way_begins_with_the_same_model_and_sees_the_same_batches(plan):
    first, second = plan.initial().state_dict(), plan.initial().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    for one, other, _ in zip(plan.batches(), plan.batches(), range(3), strict=False):
        assert torch.equal(one, other)
        assert one.shape == (4, 17)
        assert all(bytes(row.tolist()) in TEXT.tobytes() for row in one)


def test_the_learning_rate_rises_and_falls(plan):
    rates = [plan.rate(step) for step in range(plan.steps)]
    top = rates.index(max(rates))
    assert max(rates) == 1
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert 0.1 <= rates[-1] < 0.101


def test_held_out_windows_do_not_overlap_and_cover_the_text(plan):
    windows = torch.cat(list(plan.held_out()))
    assert windows.shape == (6, 17)
    for i, row in enumerate(windows):
        assert row.tolist() == TEXT[i * 500 : i * 500 + 17].tolist()


def test_int8_copies_leave_the_model_as_it_was(plan):
    model = plan.initial()
    for made, kind in ((dynamic(model), DynamicLinear), (static(model, plan), StaticLinear)):
        assert sum(isinstance(layer, kind) for layer in made.modules()) == 7
        assert isinstance(made.head, torch.nn.Linear)
        assert bits_per_byte(made, plan) == pytest.approx(bits_per_byte(model, plan), rel=0.01)
    assert {type(layer) for layer in model.modules()}.isdisjoint({DynamicLinear, StaticLinear})


# --- the run ---------------------------------------------------------------------------------------------------------


def test_every_way_learns(record):
    assert [result.way for result in record.ways] == ["bf16", "fake", "mixed"]
    for result in record.ways:
        assert len(result.losses) == 30
        assert result.final_loss == pytest.approx(sum(result.losses[-3:]) / 3)
        assert result.final_loss < result.losses[0]
        assert set(result.held_out) == {"trained", "dynamic", "static"}
        assert all(bits < 8 for bits in result.held_out.values())  # as many as a byte has
    assert len({result.losses for result in record.ways}) == 3
    assert record.parameters == sum(parameter.numel() for parameter in ByteLlama(Shape(**SMALL)).parameters())


def test_the_command_of_a_record_repeats_the_run(record, capsys, tmp_path):
    again = shlex.split(record.command)
    assert again[:2] == ["skuda", "train-check"]
    assert main([*again[1:], "--output", str(tmp_path / "record.json"), "--json"]) == 0
    repeated = TrainRecord.load(tmp_path / "record.json")
    assert json.loads(capsys.readouterr().out) == json.loads(repeated.model_dump_json())
    for one, other in zip(repeated.ways, record.ways, strict=True):
        assert one.losses == other.losses
        assert one.held_out == other.held_out
    assert repeated.command == record.command


def test_losses_are_means_of_intervals():
    many = train_check(replace(REQUEST, steps=250, ways=("bf16",), windows=1, batch=1))
    assert many.every == 2
    assert len(many.ways[0].losses) == 125


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses what torch deprecates
def test_a_compiled_model_trains():
    made = train_check(replace(REQUEST, compiled=True, steps=3, ways=("mixed",)))
    assert made.compiled
    assert "--compile" in made.command
    assert len(made.ways[0].losses) == 3


def test_a_terminal_shows_every_figure(record, capsys, monkeypatch, tmp_path):
    record.save(tmp_path / "record.json")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    assert run(Request(), show=tmp_path / "record.json") == 0
    shown = capsys.readouterr().out
    for result in record.ways:
        for value in (result.final_loss, result.milliseconds, *result.held_out.values()):
            assert f"{value:.4f}" in shown
    assert "30 steps of 4 sequences on cpu" in shown


# --- what it is judged by --------------------------------------------------------------------------------------------


def way(name, loss=1.0, **held_out):
    bits = {"trained": 2.0, "dynamic": 2.0, "static": 2.0, **held_out}
    return WayResult(way=name, losses=(loss,), final_loss=loss, milliseconds=1.0, held_out=bits)


def test_what_is_worse_by_more_than_the_tolerance_fails(record, tmp_path, capsys):
    ways = (way("bf16", dynamic=2.01), way("fake", 1.02, static=2.03), way("mixed", 0.5, trained=1.0))
    judged = record.model_copy(update={"ways": ways, "tolerance": 1.0})
    assert judged.misses == (
        "fake: loss is 2.00 % above bf16, allowed are 1 %",
        "fake: static is 1.50 % above bf16, allowed are 1 %",
    )
    judged.save(tmp_path / "record.json")
    assert main(["train-check", "--show", str(tmp_path / "record.json")]) == 1
    out, err = capsys.readouterr()
    assert ["fake", "loss", "1.02", str(100 * (1.02 - 1))] in [line.split("\t") for line in out.splitlines()]
    assert "skuda: fake: static is 1.50 % above bf16" in err
    assert record.model_copy(update={"ways": ways[1:]}).misses == ()


def test_requests_that_cannot_be_served(monkeypatch, tmp_path):
    refused = {
        r"--width must be a multiple of 2 \* heads = 16": {"width": 24, "heads": 8},
        "--way must be one of bf16, fake, mixed": {"ways": ("int4",)},
        "--length must be below 3000, the bytes": {"length": 3000},
        "--device must be one of auto, cpu": {"device": "tpu"},
    }
    for rule, request in refused.items():
        with pytest.raises(InvalidProblem, match=f"train-check: {rule}"):
            run(Request(**{**SMALL, **request}))
    with pytest.raises(InvalidProblem, match="--output must be left out"):
        run(Request(), show=tmp_path / "a", output=tmp_path / "b")
    monkeypatch.setattr(command, "find_spec", lambda _: None)
    with pytest.raises(MissingDependency, match="pip install torch"):
        run(Request())


def test_files_that_are_no_records(record, tmp_path):
    path = tmp_path / "record.json"
    for content, rule in (
        ("{", "be readable JSON"),
        ("[]", "be a record of kind 'skuda train-check', schema 1"),
        (record.model_dump_json().replace('"steps":30', '"steps":0'), "steps must"),
    ):
        path.write_text(content)
        with pytest.raises(InvalidRecord, match=rule):
            TrainRecord.load(path)


# --- how it is shown -------------------------------------------------------------------------------------------------


def drawn(plot):
    figure = Figure()
    plot.draw(figure)
    (axes,) = figure.axes
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}


def test_plots_have_every_loss_and_every_held_out_figure(record):
    loss, held_out = map(drawn, plots(record))
    bits = drawn(plots(record)[1])
    for result in record.ways:
        assert loss[result.way] == (list(range(1, 31)), list(result.losses))
        assert bits[result.way] == (list(result.held_out.values()), [2, 1, 0])
    assert held_out["bf16 + 50 %"][0] == [1.5 * record.ways[0].held_out["trained"]] * 2
    longer = record.model_copy(update={"steps": 250, "every": 9, "ways": (record.ways[0],)})
    assert drawn(plots(longer)[0])["bf16"][0] == [min(250, 9 * at) for at in range(1, 31)]
    assert plots(record.model_copy(update={"ways": ()})) == ()


def test_a_record_is_drawn_and_put_on_the_page(record, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SKUDA_PLUGINS", "0")
    path, page, folder = (tmp_path / name for name in ("record.json", "page.html", "plots"))
    record.save(path)
    assert main(["train-check", "--show", str(path), "--plot", str(folder), "--html", str(page)]) == 0
    assert sorted(file.name for file in folder.iterdir()) == ["held-out.svg", "loss.svg"]
    assert capsys.readouterr().err.splitlines()[-1] == f"wrote {page}"
    text = page.read_text()
    assert record.command in text
    assert "trained by other code" not in text
    for result in record.ways:
        for value in (result.final_loss, result.milliseconds, *result.held_out.values()):
            assert f">{value:.4f}<" in text


def test_a_stale_record_looks_stale(record, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SKUDA_PLUGINS", "0")
    assert record.outdated == ""
    path, page = tmp_path / "record.json", tmp_path / "page.html"
    record.model_copy(update={"measurer_hash": ""}).save(path)
    assert main(["train-check", "--show", str(path), "--markdown", "facts", "--html", str(page)]) == 0
    assert "- stale: trained by other code\n" in capsys.readouterr().out
    assert "trained by other code" in page.read_text()
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert run(Request(), show=path) == 0
    assert "stale: trained by other code" in capsys.readouterr().out


def test_another_file_is_not_drawn(tmp_path, capsys):
    (tmp_path / "other.json").write_text('{"kind": "skuda bench-model", "schema_version": 1}')
    assert main(["train-check", "--show", str(tmp_path / "other.json"), "--plot", str(tmp_path / "plots")]) == 2
    assert "must be a record of kind 'skuda train-check'" in capsys.readouterr().err
    assert not (tmp_path / "plots").exists()


def test_markdown_has_the_sections(record):
    whole = train_markdown(record)
    assert all(train_markdown(record, section) in whole for section in ("facts", "ways", "requirements"))
    assert len(train_markdown(record, "ways").splitlines()) == 2 + 3 * 5
    with pytest.raises(InvalidProblem, match="--markdown must be one of all, facts, ways, requirements"):
        train_markdown(record, "nonsense")


def test_requirements_are_judged_for_an_h200_and_enough_steps(record):
    ways = (way("bf16", static=2.03), way("fake", 1.02), way("mixed", 1.009))
    there = record.model_copy(update={"ways": ways, "device": "NVIDIA H200", "steps": 1000, "tolerance": 50.0})
    found = judged(there)
    assert [one.what for one in found.requirements if one.met is False] == [
        "fake: final loss, nats per byte",
        "bf16: held-out bits per byte, int8 static",
    ]
    assert not [one for one in found.requirements if one.met is None]
    for changes in ({"device": "cpu"}, {"steps": 999}):
        elsewhere = judged(there.model_copy(update=changes))
        assert elsewhere.note
        assert [one.met for one in elsewhere.requirements] == [None] * 8 + [True]
    alone = judged(there.model_copy(update={"ways": ways[1:2]}))
    assert {one.verdict for one in alone.requirements} == {"not judged"}
