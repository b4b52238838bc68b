"""``skuda lock`` and ``skuda diff``: a change of selection is seen in review."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from paths import ROOT

from skuda.dispatch import KNOWN_DEVICES, Dispatcher
from skuda.dispatch.backends.cuda import CudaBackend
from skuda.kernels.catalog import built_in_registry
from skuda.registry import Registry
from skuda.tools.parse.problem import read_problems
from skuda.tools.ship import lock as lock_command
from skuda.tools.ship.diff import KINDS, compare, summary
from skuda.tools.ship.lock import DEVICES, default_problems, make_lock, read_lock, write_lock

LOCK = ROOT / "docs" / "selection.lock.json"
CARDS = {name: KNOWN_DEVICES[name] for name in ("cpu", "a100", "h200")}
LINEAR = {"op": "quantized_linear", "q_min": -127, "q_max": 127, "activation_element": "bf16"}
PROBLEMS = [
    {"op": "fill", "numel": 8, "output_element": "f32"},
    {**LINEAR, "m": 8, "c_out": 4096, "k": 4096},
    {**LINEAR, "m": 4096, "c_out": 4096, "k": 4096, "output_element": "bf16"},
]


@pytest.fixture
def problems(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(problem) + "\n" for problem in PROBLEMS))
    return path


def changed(change, ops=("fill", "quantized_linear")):
    """Return a dispatcher over the built-in kernels of some ops, each changed, left out, or replaced by several."""
    registry = built_in_registry()
    found = [replace(registry.ops[op], skus=tuple(n for s in registry.skus_of(op) for n in change(s))) for op in ops]
    return Dispatcher(Registry(found, origin="a test"))


def lock_of(dispatcher, path):
    return make_lock(dispatcher, read_problems("lock", dispatcher.registry, path), CARDS)


def kinds(old, new):
    return {difference.kind for difference in compare(old, new)}


def test_the_lock_in_the_repository_is_that_of_today():
    registry = built_in_registry()
    now = make_lock(Dispatcher(registry), default_problems(registry), DEVICES)
    found = compare(read_lock("OLD", LOCK), now)
    changes = "\n".join(summary(found, 3))
    assert not found, f"{LOCK.name} is of another selection; if this one is meant, run `make lock`:\n{changes}"
    assert LOCK.stat().st_size < 1_000_000


def test_a_lock_is_the_same_in_every_process_and_whatever_works_there(problems, tmp_path):
    texts = []
    for seed, path in (("1", os.environ["PATH"]), ("2", "/nonexistent")):
        settings = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "PATH": path,
            "SKUDA_PLUGINS": "0",
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = [sys.executable, "-m", "skuda.tools.cli", "lock", "--descriptors", str(problems), "--output", "-"]
        texts.append(subprocess.run(command, env=settings, check=True, capture_output=True, text=True).stdout)
    assert texts[0] == texts[1]
    rows = [line for line in texts[0].splitlines() if line.startswith('   {"problem"')]
    assert len(rows) == len(PROBLEMS), "one line for every problem"
    for line in rows:
        answers = json.loads(line.rstrip(","))["on"]
        assert sorted(name for names in answers for name in names.split(", ")) == sorted(DEVICES)
        assert len({json.dumps(answer) for answer in answers.values()}) == len(answers), "equal ones are together"


def test_a_lock_says_what_explain_says(skuda, problems, tmp_path):
    asked = ("--descriptors", problems, "--device", "cpu,A100", "--device", "NVIDIA H200")
    status, out, err = skuda("lock", *asked, "--output", "-")
    assert (status, err) == (0, "")
    (tmp_path / "lock").write_text(out)
    found = read_lock("NEW", tmp_path / "lock")
    assert write_lock(found) == out
    dispatcher = Dispatcher(built_in_registry())
    answers = [answer for _, answer in found.answers()]
    assert len(answers) == len(PROBLEMS) * len(CARDS)
    asked = [
        (problem, device)
        for problem in read_problems("lock", dispatcher.registry, problems)
        for device in CARDS.values()
    ]
    for (problem, device), answer in zip(sorted(asked, key=lambda a: a[0].op_name()), answers, strict=True):
        explained = dispatcher.explain(problem, device=device)
        assert answer.kernel == explained.chosen
        sku = dispatcher.registry.sku(answer.kernel)
        assert found.promised[answer.kernel] == sku.precision_guarantee
        choices = dispatcher.backends[sku.backend].choices(sku, problem, device)
        assert answer.us == (pytest.approx(choices[0].microseconds, rel=0.005) if choices else None)
    assert {answer.us is None for answer in answers} == {True, False}
    assert {sku for skus in found.skus.values() for sku in skus} == {sku.id for sku in dispatcher.registry}


def test_a_place_in_the_ranking_counts_what_the_device_could_run(problems):
    dispatcher = Dispatcher(built_in_registry())
    found = {place[1:]: answer for place, answer in lock_of(dispatcher, problems).answers()}
    (wide,) = ({device: answer for (what, device), answer in found.items() if "m=4096" in what},)
    assert ".warpgroup" in wide["h200"].kernel
    assert wide["h200"].rank == 2, "`streamed` of both backends stands before it"
    assert ".mma" in wide["a100"].kernel
    assert wide["a100"].rank == 0, "what stands before it needs another card"


def test_nothing_differs_where_nothing_changed(skuda, problems, tmp_path):
    for name in ("old", "new"):
        status, out, err = skuda("lock", "--descriptors", problems, "--output", tmp_path / name)
        assert (status, out) == (0, "")
        assert "3 problems on 6 devices" in err
    assert skuda("diff", tmp_path / "old", tmp_path / "new") == (0, "", "skuda: no difference\n")
    assert skuda("diff", tmp_path / "old", tmp_path / "new", "--json") == (0, "[]\n", "skuda: no difference\n")


def test_a_lock_is_written_where_it_is_named(skuda, problems, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = skuda("lock", "--descriptors", problems, "--device", "l4")
    assert (status, out) == (0, "")
    assert err.startswith("skuda: wrote skuda.lock.json: ")
    assert [device for (_, _, device), _ in read_lock("NEW", tmp_path / "skuda.lock.json").answers()] == ["l4"] * 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["problems.jsonl", "skuda.lock.json"]
    (tmp_path / "skuda.lock.json").unlink()
    (tmp_path / "skuda.lock.json").mkdir()
    monkeypatch.setattr(lock_command, "make_lock", lambda *_: pytest.fail("it works"))
    assert skuda("lock", "--descriptors", problems)[0] == 2


def test_every_change_is_reported(problems, monkeypatch):
    old = lock_of(changed(lambda sku: [sku]), problems)

    def now(change):
        return lock_of(changed(change), problems)

    def promising(**guarantee):
        return now(
            lambda sku: [
                sku.model_copy(update={"precision_guarantee": sku.precision_guarantee.model_copy(update=guarantee)})
                if sku.variant == "warpgroup"
                else sku
            ]
        )

    assert kinds(old, now(lambda sku: [sku])) == set()
    without = now(lambda sku: [] if sku.variant == "warpgroup" else [sku])
    assert {"kernel", "slower", "SKU removed"} <= kinds(old, without)
    assert {"kernel", "faster", "SKU added"} <= kinds(without, old)
    none = now(lambda sku: [sku] if sku.op == "fill" or sku.backend == "numpy" else [])
    assert kinds(old, none) == {"unsupported", "SKU removed"}
    assert kinds(none, old) == {"supported", "SKU added"}
    (lost, *_) = [d for d in compare(old, none) if d.kind == "unsupported"]
    assert lost.new.startswith("none (device: wanted a CPU")
    weak = promising(deterministic=False)
    assert kinds(old, weak) == {"weaker", "SKU weaker"}
    assert kinds(weak, old) == {"stronger", "SKU stronger"}
    assert kinds(old, promising(accumulator="s64")) == {"otherwise", "SKU otherwise"}
    # More of one and less of another is less: somebody relied on it.
    assert kinds(promising(max_ulp=2), weak) == {"weaker", "SKU weaker"}
    behind = now(lambda sku: [] if sku.variant == "streamed" else [sku])
    assert "ranking" in kinds(old, behind)


@pytest.mark.parametrize(("factor", "expected"), [(1.2, set()), (1.3, {"slower"}), (0.85, set()), (0.7, {"faster"})])
def test_a_small_refit_is_no_change(problems, monkeypatch, factor, expected):
    old = lock_of(changed(lambda sku: [sku]), problems)
    choices = CudaBackend.choices

    def refitted(self, *asked):
        return tuple(choice._replace(microseconds=choice.microseconds * factor) for choice in choices(self, *asked))

    monkeypatch.setattr(CudaBackend, "choices", refitted)
    assert kinds(old, lock_of(changed(lambda sku: [sku]), problems)) == expected


def test_a_launch_rule_that_fails_is_written_down(problems, monkeypatch):
    old = lock_of(changed(lambda sku: [sku]), problems)

    def fails(*_):
        raise RuntimeError("no rule\nfor this")

    monkeypatch.setattr(CudaBackend, "choices", fails)
    new = lock_of(changed(lambda sku: [sku]), problems)
    assert kinds(old, new) == {"trouble"}
    assert "its launch rule fails: no rule for this" in compare(old, new)[0].new


def test_other_problems_and_devices_are_reported(skuda, problems, tmp_path):
    skuda("lock", "--descriptors", problems, "--device", "cpu,h200", "--output", tmp_path / "old")
    problems.write_text(problems.read_text().partition("\n")[2])
    skuda("lock", "--descriptors", problems, "--device", "cpu,a100", "--output", tmp_path / "new")
    status, out, _ = skuda("diff", tmp_path / "old", tmp_path / "new", "--json")
    assert status == 1
    assert sorted({(row["kind"], row["op"], row["what"].rpartition(" on ")[2]) for row in json.loads(out)}) == [
        ("row added", "quantized_linear", "a100"),
        ("row removed", "fill", "cpu"),
        ("row removed", "fill", "h200"),
        ("row removed", "quantized_linear", "h200"),
    ]


def test_a_person_gets_counts_and_the_first_ones(skuda, problems, tmp_path, monkeypatch):
    skuda("lock", "--output", tmp_path / "old", "--device", "h200")
    registry = changed(lambda sku: [] if sku.variant == "warpgroup" else [sku]).registry
    monkeypatch.setattr(lock_command, "Dispatcher", lambda: Dispatcher(registry))
    skuda("lock", "--output", tmp_path / "new", "--device", "h200")
    monkeypatch.setenv("FORCE_COLOR", "1")
    _, short, _ = skuda("diff", tmp_path / "old", tmp_path / "new")
    _, full, _ = skuda("diff", tmp_path / "old", tmp_path / "new", "--all")
    assert KINDS["kernel"] in short
    assert "more" in short
    assert " more" not in full.replace("more than", "").replace("any more", "").replace("no more", "")
    assert len(short.splitlines()) < len(full.splitlines()) / 3
    status, out, _ = skuda("diff", tmp_path / "old", tmp_path / "new", "--json")
    found = json.loads(out)
    assert status == 1
    assert f"{KINDS['kernel']}: {sum(one['kind'] == 'kernel' for one in found)}" in short


def test_a_list_of_problems_may_be_a_json_array(problems, tmp_path):
    array = tmp_path / "array.json"
    array.write_text(json.dumps(PROBLEMS, indent=1))
    dispatcher = Dispatcher(built_in_registry())
    assert read_problems("lock", dispatcher.registry, array) == read_problems("lock", dispatcher.registry, problems)


BAD = {
    "no file": ("lock", None, "be a file that can be read"),
    "no JSON": ("lock", "{", "one JSON object a line"),
    "no object": ("lock", "[1]", "entry 1 is not one"),
    "no op": ("lock", '{"numel": 3}', 'objects with "op"'),
    "an op that is a list": ("lock", '{"op": ["fill"]}', "entry 1 is not"),
    "a field called self": ("lock", '{"op": "fill", "self": 1}', "self must be one of"),
    "unknown op": ("lock", '{"op": "fil"}', "a registered one"),
    "bad field": ("lock", '[{"op": "fill", "numel": -1, "output_element": "f32"}]', "numel"),
    "no lock": ("diff", "[]", "made by `skuda lock`"),
    "not JSON": ("diff", "old", "made by `skuda lock`"),
    "absent": ("diff", None, "No such file"),
    "of another form": ("diff", '{"version": 1}', "made by `skuda lock`"),
    "of another version": (
        "diff",
        '{"version": 9, "guarantees": {}, "skus": {}, "selection": {}}',
        "it has version 9, not 1",
    ),
    "dangling": (
        "diff",
        '{"version":1,"guarantees":{},"skus":{},"selection":{"fill":[{"problem":{},"on":{"cpu":{"kernel":"x"}}}]}}',
        "does not list it",
    ),
    "dangling guarantee": (
        "diff",
        '{"version": 1, "guarantees": {}, "skus": {"x": ["a.b.c.d.e.f.g"]}, "selection": {}}',
        "names 'x' and does not list it",
    ),
    "no id": ("diff", '{"version": 1, "guarantees": {}, "skus": {"x": ["a"]}, "selection": {}}', "must match"),
}


@pytest.mark.parametrize(("command", "content", "says"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_reported_in_one_line(skuda, tmp_path, command, content, says):
    path = tmp_path / "file"
    if content is not None:
        path.write_text(content)
    status, out, err = skuda(*(["lock", "--descriptors", path] if command == "lock" else ["diff", path, path]))
    assert (status, out) == (2, "")
    assert err.startswith(f"skuda: {command}: ")
    assert err.count("\n") == 1
    assert says in err
