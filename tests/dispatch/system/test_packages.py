"""`installed` agrees with importlib, and imports nothing."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from skuda.dispatch.system.packages import installed


@pytest.mark.parametrize(
    "name", ["json", "json.decoder", "sys", "numpy", "numpy.linalg", "skuda.dispatch", "no_such", "json.no_such"]
)
def test_the_answer_is_that_of_importlib(name):
    assert installed(name) is (importlib.util.find_spec(name) is not None)


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
