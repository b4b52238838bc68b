"""Whether packages are installed, as the standard library says, without its lock."""

from __future__ import annotations

import _imp
import importlib.util
import sys
import types
from typing import ClassVar

import pytest

from skuda.dispatch.system.packages import installed


@pytest.mark.parametrize(
    "name", ["json", "json.decoder", "sys", "numpy", "numpy.linalg", "skuda.dispatch", "no_such", "json.no_such"]
)
def test_the_answer_is_that_of_importlib(name):
    assert installed(name) is (importlib.util.find_spec(name) is not None)


@pytest.mark.parametrize("name", ["no_such.child", "math.child", "json.decoder.child"])
def test_what_lies_in_nothing_is_not_installed(name):
    assert not installed(name)


def test_a_package_is_not_imported_for_its_child(tmp_path, monkeypatch):
    (tmp_path / "outer_package" / "inner").mkdir(parents=True)
    (tmp_path / "outer_package" / "__init__.py").write_text("raise RuntimeError")
    (tmp_path / "outer_package" / "inner" / "__init__.py").touch()
    (tmp_path / "space" / "inner").mkdir(parents=True)
    (tmp_path / "space" / "inner" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert installed("outer_package.inner")
    assert installed("space.inner")
    assert not installed("space.no_such")
    assert not {"outer_package", "space"} & set(sys.modules)


@pytest.mark.parametrize("hidden", [None, types.ModuleType("json")], ids=["none", "no package"])
def test_what_the_program_put_in_its_place_counts(monkeypatch, hidden):
    monkeypatch.setitem(sys.modules, "json", hidden)
    monkeypatch.delitem(sys.modules, "json.decoder", raising=False)
    assert installed("json") is (hidden is not None)
    assert not installed("json.decoder")


def test_nobody_else_waits(monkeypatch):
    class Finder:
        locked: ClassVar[list[bool]] = []

        @classmethod
        def find_spec(cls, *_):
            cls.locked.append(_imp.lock_held())

    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    assert not installed("no_such")
    importlib.util.find_spec("no_such")
    assert Finder.locked == [False, True]
