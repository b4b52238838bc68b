"""What an earlier version promised is kept: names, and files that it wrote; docs/stability.md says what counts."""

from __future__ import annotations

import copy
import json

import pytest
from make import FACADES, HERE, KINDS, OF_TORCH, imported, lost

from skuda.tools.commands import REMOVED

FOLDERS = sorted(path.parent for path in HERE.glob("*/promised.json"))
RETIRED = json.loads((HERE / "retired.json").read_text())
"""What is gone as docs/stability.md says, by its path, with what replaces it."""
RULE = (
    "it is stable. To retire it, let it give a DeprecationWarning that names the replacement for one minor version, "
    "then an error that names it, and add its path to tests/stability/retired.json; see docs/stability.md"
)


def broken(saved, now, kind):
    """Return a line for each promise that is not kept."""
    gone = {*RETIRED, *(f"/commands/{name}" for name in REMOVED)}
    return [
        f"{path} was {was!r:.200}, is {value!r:.200}: {RULE}"
        for path, was, value in lost(saved, now, f"/{kind}")
        if not any(f"{path}/".startswith(f"{name}/") for name in gone)
    ]


def today(folder, kind, saved):
    try:
        return json.loads(json.dumps((KINDS | OF_TORCH)[kind](folder, saved)))
    except Exception as error:  # noqa: BLE001  a file that cannot be read is a promise that is broken
        return repr(error)


@pytest.mark.parametrize("kind", [*KINDS, *OF_TORCH])
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_what_a_version_promised_is_kept(folder, kind):
    if kind in OF_TORCH:
        pytest.importorskip("torch")
        pytest.importorskip("transformers")
    saved = json.loads((folder / "promised.json").read_text())[kind]
    assert saved, "nothing was promised"
    assert not (found := broken(saved, today(folder, kind, saved), kind)), "\n".join(found)


@pytest.mark.parametrize("kind", [*KINDS, *OF_TORCH])
def test_what_is_gone_or_other_is_found_and_what_is_new_is_not(kind):
    saved = json.loads((FOLDERS[0] / "promised.json").read_text())[kind]
    now = copy.deepcopy(saved) | {"new": {}}
    assert not broken(saved, now, kind)
    name = next(iter(saved))
    for value in ({}, {name: "other"}):
        planted = {key: one for key, one in now.items() if key != name} | value
        if kind == "schemas" and value:
            pytest.importorskip("torch")
            planted[name] = saved[name].replace("(Tensor ", "(Tensor first, Tensor ")
        (line,) = broken(saved, planted, kind)
        assert line.startswith(f"/{kind}/{name} was ")
        assert "retire" in line


def test_an_op_may_get_an_argument_with_a_default():
    pytest.importorskip("torch")
    saved = {"a": "skuda::a(Tensor x, *, int? n=None) -> Tensor"}
    assert not broken(saved, {"a": "skuda::a(Tensor x, *, int? n=None, int? m=None) -> Tensor"}, "schemas")


@pytest.mark.parametrize(
    ("kind", "name"), [("imports", "skuda.registry.HOST"), ("records", "skuda.dispatch.plan.Plan")]
)
def test_a_name_that_is_taken_away_is_missed(monkeypatch, kind, name):
    saved = json.loads((FOLDERS[0] / "promised.json").read_text())[kind]
    monkeypatch.delattr(name)
    assert any(name.rpartition(".")[2] in line for line in broken(saved, today(FOLDERS[0], kind, saved), kind))


def test_pages_and_examples_import_from_facades_and_no_deeper():
    modules = {module for module, _ in imported()}
    assert {"skuda.registry", "skuda.dispatch", "skuda.torch"} <= modules
    facades = {"skuda", *(f"skuda.{name}" for name in FACADES)}
    deeper = {name for name in modules - facades if not name.startswith("skuda.torch.")}
    assert not deeper, "export what they need from skuda.registry or skuda.dispatch"
