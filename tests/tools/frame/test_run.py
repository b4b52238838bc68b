"""The course of every study: options, seed, the record's file, what is shown of it, and what is refused."""

from __future__ import annotations

from typing import Literal

import pytest

from skuda.dispatch.select.tuning import Timing
from skuda.registry.device import HOST
from skuda.registry.errors import InvalidProblem, InvalidRecord
from skuda.tools.frame.record import Record
from skuda.tools.frame.run import NoDevice, Study
from skuda.tools.frame.view import Table


class ToyRecord(Record):
    """A record of one time."""

    kind: Literal["skuda toy"] = "skuda toy"
    schema_version: Literal[1] = 1
    timing: Timing
    ops: tuple[str, ...] = ()

    @property
    def wrong(self):
        return ("it took long",) if self.timing.median > 5 else ()


def measure(watch, *, ops=(), rows=(), us=1.5, cpu=False, seed=0):
    watch(0, 1, "toy")
    if us < 0:
        raise NoDevice("no toy is here: buy one")
    SEEDS.append(seed)
    return HOST.model_copy(update={"ordinal": 3}), {"timing": Timing.of([us / 3, us]), "ops": ops}


SEEDS: list[int] = []
STUDY = Study(
    ToyRecord,
    measure,
    lambda record: {"times": (Table(("us",), [(record.timing.median,)]),), "facts": (record.facts(),), "more": ("m",)},
    lambda _: ["more"],
)


def test_a_run_is_recorded_as_it_is_shown_again(tmp_path, capsys):
    path = tmp_path / "r.json"
    assert STUDY.run(output=path, ops=("a", "b"), rows=("1,2", "3"), us=3.0, cpu=True, seed=7) == 0
    out, err = capsys.readouterr()
    assert out.startswith("| us |\n| --- |\n| 2.0 |\n\n- command: `skuda toy a b")
    assert err == ""
    record = ToyRecord.load(path)
    assert record.command == "skuda toy a b --rows 1,2,3 --us 3.0 --cpu --seed 7"
    assert (record.seed, SEEDS[-1], record.device, record.driver) == (
        7,
        7,
        HOST.model_copy(update={"ordinal": None}),
        "",
    )
    assert record.outdated == ""
    assert STUDY.run(show=path) == 0
    assert capsys.readouterr().out == out
    assert STUDY.run(show=path, as_json=True) == 0
    assert capsys.readouterr().out == path.read_text()
    assert STUDY.run(show=path, markdown="times") == 0
    assert capsys.readouterr().out == "| us |\n| --- |\n| 2.0 |\n"


def test_a_run_without_a_seed_draws_one_and_names_it():
    first, second = (STUDY.made(us=1.0) for _ in range(2))
    assert first.seed != second.seed
    assert first.command == f"skuda toy --us 1.0 --seed {first.seed}"
    assert STUDY.made(seed=0).command == "skuda toy --seed 0"


def test_a_terminal_shows_what_is_not_apart_and_whether_it_is_recorded(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert STUDY.run(seed=1) == 0
    out = capsys.readouterr().out
    assert "not recorded: --output FILE does that" in out
    assert "skuda toy --seed 1" in out
    assert STUDY.run(seed=1, output=tmp_path / "r.json") == 0
    assert f"recorded in {tmp_path / 'r.json'}" in capsys.readouterr().out.replace("\n", "")
    assert STUDY.run(show=tmp_path / "r.json") == 0
    assert "recorded" not in capsys.readouterr().out
    monkeypatch.delenv("FORCE_COLOR")
    assert STUDY.run(show=tmp_path / "r.json", markdown="all") == 0
    assert "- date: " in (text := capsys.readouterr().out)
    assert "| us |" in text
    assert not text.endswith("m\n"), "`all` has no part twice"


def test_something_wrong_is_said_recorded_and_the_exit_status_is_1(tmp_path, capsys):
    path = tmp_path / "r.json"
    for run in (lambda: STUDY.run(us=9.0, output=path), lambda: STUDY.run(show=path)):
        assert run() == 1
        assert capsys.readouterr().err == "skuda: it took long\n"


def test_without_a_device_it_says_what_to_do(tmp_path, capsys):
    assert STUDY.run(us=-1.0, output=tmp_path / "r.json") == 1
    out, err = capsys.readouterr()
    assert (out, err) == ("", "skuda: no toy is here: buy one\n")
    assert not (tmp_path / "r.json").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ops": ("a",)}, "OPS must be left out: --show measures nothing"),
        ({"rows": ("1",)}, "--rows must be left out"),
        ({"cpu": True}, "--cpu must be left out"),
        ({"seed": 0}, "--seed must be left out"),
        ({"output": "x.json"}, "--output must be left out"),
    ],
)
def test_what_would_measure_is_refused_beside_show(options, says):
    with pytest.raises(InvalidProblem, match=says):
        STUDY.run(show="r.json", **options)


def test_defaults_are_no_options(tmp_path):
    path = tmp_path / "r.json"
    STUDY.run(output=path, seed=1)
    assert STUDY.run(show=path, ops=None, rows=(), us=1.5, cpu=False, seed=None) == 0


def test_another_section_and_another_file_are_refused(tmp_path):
    path = tmp_path / "r.json"
    STUDY.run(output=path, seed=1)
    with pytest.raises(InvalidProblem, match=r"--markdown must be one of all, times, facts, more; had 'x'"):
        STUDY.run(show=path, markdown="x")
    path.write_text('{"kind": "skuda bench", "schema_version": 1}')
    with pytest.raises(
        InvalidRecord, match="be a record of kind 'skuda toy', schema 1: `skuda toy --output FILE` makes"
    ):
        STUDY.run(show=path)


def test_a_stale_record_says_so(tmp_path, capsys):
    path = tmp_path / "r.json"
    STUDY.run(output=path, seed=1)
    capsys.readouterr()
    ToyRecord.load(path).model_copy(update={"method": 0}).save(path)
    STUDY.run(show=path, markdown="facts")
    assert "- stale: measured by method 0, today's is 1\n" in capsys.readouterr().out
