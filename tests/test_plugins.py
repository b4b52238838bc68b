"""Plug-ins: found through entry points of installed distributions, taken whole or set aside with a reason."""

from __future__ import annotations

import sys
import textwrap

import numpy as np
import pytest

from skuda.dispatch import Dispatcher
from skuda.dispatch.plugins import load_backends, load_kernels
from skuda.kernels.catalog import built_in_registry


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that puts a distribution with one module and entry points on the path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made = []

    def make(name, code, **points):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(code))
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [f"[skuda.{group}]\n{name} = {name}:{target}\n" for group, target in points.items()]
        (info / "entry_points.txt").write_text("\n".join(lines))
        made.append(name)

    yield make
    for name in made:
        sys.modules.pop(name, None)


GOOD = """
    from typing import Any, ClassVar, Literal
    from skuda.registry import *

    class TwiceDescriptor(Descriptor):
        "Problem of `twice`."
        op: Literal["twice"] = "twice"
        category: ClassVar = OpCategory.UNARY_ELEMENTWISE
        element_field: ClassVar = "element"
        n: int
        element: ElementKind = ElementKind.F32

        def arguments(self):
            return (Argument("x", Role.INPUT, (self.element,), (self.n,)),
                    Argument("y", Role.OUTPUT, (self.element,), (self.n,)))

    def reference(problem, *, x: Any, y: Any) -> None:
        y[...] = 2 * x

    def records():
        sku = KernelSku(category="unary_elementwise", op="twice", element="f32", arch="cpu", backend="numpy",
                        variant="reference", source=__name__, entry_point="reference",
                        precision_guarantee={"math_precision": "f32", "accumulator": "f32"})
        return [Op(TwiceDescriptor, reference, (Case(TwiceDescriptor(n=3)),), (sku,), source="here")]

    RECORDS = records()
"""


@pytest.mark.parametrize("target", ["records", "RECORDS"])
def test_an_op_of_another_package_is_dispatched_like_our_own(install, target):
    install("good_plugin", GOOD, kernels=target)
    dispatcher = Dispatcher()
    assert dispatcher.quarantined == ()
    problem = dispatcher.describe("twice", n=3)
    np.testing.assert_array_equal(dispatcher.run(problem, x=np.arange(3, dtype=np.float32)), [0, 2, 4])
    assert dispatcher.registry.origin("twice") == "good_plugin 1.0"
    assert dispatcher.registry.origin(dispatcher.select(problem).sku.id) == "good_plugin 1.0"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise RuntimeError('boom')", "RuntimeError: boom"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("import no_such_package", "ModuleNotFoundError"),
        ("", "AttributeError"),
        ("records = 3", "TypeError"),
        ("records = ['a string']", "must be an Op"),
        ("def records(): raise ValueError('late')", "ValueError: late"),
        ("from skuda.kernels.elementwise.fill import OP\nrecords = [OP]", "(?s)fill.*registered already.*skuda"),
    ],
)
def test_a_broken_kernel_plugin_is_set_aside_and_the_rest_goes_on(install, code, words):
    install("bad_plugin", code, kernels="records")
    install("good_plugin", GOOD, kernels="records")
    registry, aside = load_kernels(built_in_registry())
    assert [plugin.origin for plugin in aside] == ["bad_plugin 1.0"]
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(aside[0].reason)
    assert "twice" in registry.ops
    assert len(registry) == len(built_in_registry()) + 1


def test_a_plugin_is_taken_whole_or_not_at_all(install):
    install("half_plugin", GOOD + "\n    RECORDS.append('not a record')\n", kernels="RECORDS")
    registry, aside = load_kernels(built_in_registry())
    assert len(aside) == 1
    assert "twice" not in registry.ops


def test_what_was_set_aside_shows_in_every_explanation(install):
    install("bad_plugin", "raise RuntimeError('boom')", kernels="records")
    dispatcher = Dispatcher()
    notes = dispatcher.explain(dispatcher.describe("fill", numel=1, output_element="f32")).notes
    assert any("bad_plugin 1.0" in note and "boom" in note for note in notes)


BACKEND = """
    from skuda.dispatch import Backend, BackendStatus
    from skuda.dispatch.device import HOST
    from skuda.registry import BackendSpec

    class Odd(Backend):
        spec = BackendSpec(name="{name}", processor="cpu")
        def status(self):
            return BackendStatus(available=True, detail="odd 1.0")
        def devices(self):
            return (HOST,)
        def prepare(self, sku, problem, device):
            raise NotImplementedError
"""


def test_a_backend_of_another_package_is_found_and_registered(install):
    install("odd_backend", BACKEND.format(name="odd"), backends="Odd")
    dispatcher = Dispatcher()
    assert dispatcher.status["odd"].detail == "odd 1.0"
    assert "odd" in dispatcher.registry.backends


@pytest.mark.parametrize(
    ("code", "target", "words"),
    [
        (BACKEND.format(name="numpy"), "Odd", "exists already"),
        ("class Odd: pass", "Odd", "must construct"),
        ("def Odd(): raise OSError('no driver')", "Odd", "no driver"),
    ],
)
def test_a_broken_backend_is_set_aside(install, code, target, words):
    install("odd_backend", code, backends=target)
    found, aside = load_backends(["numpy"])
    assert found == ()
    assert words in aside[0].reason


def test_plugins_can_be_turned_off(install, monkeypatch):
    install("good_plugin", GOOD, kernels="records")
    monkeypatch.setenv("SKUDA_PLUGINS", "0")
    assert "twice" not in Dispatcher().registry.ops


def test_importing_loads_no_plugin(install):
    install("loud_plugin", "raise RuntimeError('imported')", kernels="records")
    __import__("skuda.dispatch")
    assert "loud_plugin" not in sys.modules
