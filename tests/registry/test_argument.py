"""How a descriptor class declares its arguments, and what follows from that."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
import pytest
from support import fresh

from skuda.dispatch import Dispatcher
from skuda.dispatch.backends.numpy import NumpyBackend
from skuda.dispatch.select.fields import Fields
from skuda.functional import call
from skuda.registry import (
    Argument,
    ArgumentSpec,
    Case,
    Descriptor,
    ElementKind,
    InvalidProblem,
    InvalidRecord,
    KernelSku,
    Op,
    OpCategory,
    PrecisionGuarantee,
    Registry,
    Role,
    Scaling,
)
from skuda.registry.value import Extent
from skuda.tools.parse.arguments import argument_rows

F32 = ElementKind.F32


class WideDescriptor(Descriptor):
    """The fields of the problems of these tests."""

    category: ClassVar[OpCategory] = OpCategory.REDUCTION
    element_field: ClassVar[str] = "element"
    n: Extent
    d: Extent
    shape: tuple[Extent, ...] = ()
    element: ElementKind
    wider: ElementKind | None = None
    scaling: Scaling = Scaling.DYNAMIC
    has_bias: bool = False
    label: str = ""

    @property
    def doubled(self) -> int:
        """Twice the columns."""
        return 2 * self.d


def declaring(*arguments: Any) -> type[WideDescriptor]:
    """Return a class with a signature."""

    class PairsDescriptor(WideDescriptor):
        op: Literal["pairs"] = "pairs"
        signature = arguments

    return PairsDescriptor


def array(name: str, axes: str, element: Any = "element", **more: Any) -> ArgumentSpec:
    return ArgumentSpec(name, Role.INPUT, element, axes, **more)


def fields_of(*arguments: ArgumentSpec) -> Fields:
    return Fields(Op(declaring(*arguments), lambda: None, (), (), source="a test"))


@pytest.mark.parametrize("axes", ["n, 2 * d", "n, d * 2", "n,2*d", " n , d*2 "])
def test_a_multiple_of_a_field_gives_the_field_however_it_is_written(axes):
    fields, (n, d) = fields_of(array("x", axes)), fresh(axes).integers(1, 100, 2).tolist()
    problem, _ = fields.split({"x": np.zeros((n, 2 * d), np.float32)})
    assert (problem.n, problem.d, problem.element) == (n, d, F32)
    assert problem.arguments() == (Argument("x", Role.INPUT, (F32,), (n, 2 * d)),)
    assert fields.sources("d") == ("x",)


def test_a_shape_is_made_of_fields_numbers_properties_and_whole_shapes():
    signature = (
        array("a", "3, doubled", F32),
        array("b", "*shape", (F32, ElementKind.F16)),
        array("c", "n", flat=True, required=False),
        array("d", "", "wider or element"),
        ArgumentSpec("e", Role.SCALE, F32),
    )
    made = declaring(*signature)(n=4, d=5, shape=(2, 0, 7), element="f64")
    assert made.arguments() == (
        Argument("a", Role.INPUT, (F32,), (3, 10)),
        Argument("b", Role.INPUT, (F32, ElementKind.F16), (2, 0, 7)),
        Argument("c", Role.INPUT, (ElementKind.F64,), (4,), flat=True, required=False),
        Argument("d", Role.INPUT, (ElementKind.F64,), ()),
        Argument("e", Role.SCALE, (F32,), (1,)),
    )
    fields = fields_of(*signature)
    given = {"a": np.zeros((3, 10)), "b": np.zeros((2, 0, 7)), "c": np.zeros((2, 3), np.float32), "d": 5}
    with pytest.raises(InvalidProblem, match="d must be given: it does not follow from the arguments"):
        fields.split({name: value for name, value in given.items() if name != "d"})
    assert fields.sources("element") == ("c",)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (array("x", "n, d +"), r"PairsDescriptor: an axis of x must be a name, .* such as 2 \* d.*; had 'd \+'"),
        (array("x", "n,"), "an axis of x must be a name.*; had ''"),
        (array("x", "2 * d * 2"), r"an axis of x must be a name.*; had '2 \* d \* 2'"),
        (array("x", "0 * d"), r"an axis of x must be a name.*; had '0 \* d'"),
        (array("x", "*shape, d"), r"an axis of x must be a name.*; had '\*shape'"),
        (array("x", "n, width"), "PairsDescriptor: an axis of x must be a number, or a field .* n, d, .*; had 'width'"),
        (array("x", "n, op"), "an axis of x must be a number, or a field"),
        (array("x", "n, label"), "an axis of x must be an integer; had 'label'"),
        (array("x", "n, has_bias"), "an axis of x must be an integer; had 'has_bias'"),
        (array("x", "shape"), r"an axis of x must be an integer; .* as in \*shape; had 'shape'"),
        (array("x", "*n"), r"an axis of x must be an integer; .* as in \*shape; had 'n'"),
        (ArgumentSpec("x", Role.SCALE, F32, "n"), "the axes of x must be left out: a scale is one number; had 'n'"),
        (array("x", 5), "the axes of x must be text such as 'n, 2 . d'; had 5"),
        (
            array("x", "n", "kind"),
            "PairsDescriptor: the element of x must be an ElementKind, or a field .*; had 'kind'",
        ),
        (array("x", "n", "n"), "the element of x must be an ElementKind, or a field that holds one; had 'n'"),
        (array("x", "n", ()), r"the element of x must be an ElementKind, a tuple of those.*; had \(\)"),
        (array("", "n"), "the name of must be the keyword"),
        (ArgumentSpec("x", "input", F32, "n"), "the role of x must be one of .*; had 'input'"),
        (array("x", "n", when={"bias": (True,)}), "a condition of x must be on a field: n, d, .*; had 'bias'"),
        (array("x", "n", when={"has_bias": True}), "the condition on has_bias of x must be a tuple of False, True"),
        (array("x", "n", when={"scaling": ("sometimes",)}), "scaling of x must be a tuple of dynamic, static; had"),
        (array("x", "n", when=["has_bias"]), "the condition of x must be a mapping of fields to tuples"),
        ("x", "signature must hold an ArgumentSpec for each argument; had 'x'"),
    ],
)
def test_what_cannot_be_is_refused_when_the_class_is_made(declared, message):
    with pytest.raises(InvalidRecord, match=message):
        declaring(declared)


def test_a_class_declares_its_arguments_or_computes_them():
    with pytest.raises(InvalidRecord, match="signature must be the arguments of the op; had nothing"):
        declaring()

    class Computing(WideDescriptor):
        op: Literal["pairs"] = "pairs"

        def arguments(self):
            return (Argument("x", Role.INPUT, (self.element,), (self.n, self.d)),)

    with pytest.raises(InvalidRecord, match="signature must be left out by a class that defines `arguments`"):

        class Both(Computing):
            signature = (array("x", "n, d"),)

    fields = Fields(Op(Computing, lambda: None, (), (), source="a test"))
    x = np.zeros((2, 3), np.float32)
    problem, arrays = fields.split({"x": x, "n": 2, "d": 3, "element": "f32"})
    assert problem.arguments()[0].shape == (2, 3)
    assert arrays == {"x": x}
    assert fields.sources("n") == ()
    with pytest.raises(InvalidProblem, match="n must be given"):  # nothing follows from its arrays
        fields.split({"x": x, "d": 3, "element": "f32"})


def test_the_first_declaration_that_holds_counts_and_an_argument_decides_its_switch():
    static = {"scaling": (Scaling.STATIC,)}
    signature = (
        array("x", "n, d"),
        array("scale", "n", F32, when={**static, "label": ("rows",)}),
        array("scale", "1", F32, when=static),
        array("bias", "d", F32, when={"has_bias": (True,)}),
    )
    made, fields = declaring(*signature), fields_of(*signature)
    for label, shape in (("rows", (4,)), ("", (1,))):
        problem = made(n=4, d=5, element="f32", scaling="static", label=label)
        assert [(a.name, a.shape) for a in problem.arguments()] == [("x", (4, 5)), ("scale", shape)]
    x, one = np.zeros((4, 5), np.float32), np.zeros(1, np.float32)
    for given, scaling, has_bias in (("", "dynamic", False), ("scale", "static", False), ("bias", "dynamic", True)):
        problem, _ = fields.split({"x": x} | ({given: one} if given else {}))
        assert (problem.scaling, problem.has_bias) == (scaling, has_bias)
    problem, _ = fields.split({"x": x, "scale": one, "scaling": "dynamic"})  # what is given is kept, and refused later
    assert problem.scaling is Scaling.DYNAMIC


def write_pairs(problem: Any, *, x: Any, factors: Any, y: Any) -> None:
    """Write the sum of both halves of every row, times a factor."""
    y[...] = (x[:, : problem.d] + x[:, problem.d :]) * factors


def test_an_array_of_other_sizes_is_refused_by_name():
    descriptor = declaring(
        array("x", "n, d * 2"), array("factors", "d"), ArgumentSpec("y", Role.OUTPUT, "element", "n, d")
    )
    sku = KernelSku(
        category="reduction",
        op="pairs",
        element="f32",
        arch="cpu",
        backend="numpy",
        variant="reference",
        precision_guarantee=PrecisionGuarantee(math_precision="f32", accumulator="f32"),
        source=__name__,
        entry_point="write_pairs",
    )
    case = Case(descriptor(n=1, d=1, element="f32"))
    op = Op(descriptor, write_pairs, (case,), (sku,), source="a test")
    one = Dispatcher(Registry([op]), backends=[NumpyBackend()], tuning="")

    def run(width: int, factors: int, rows: int = 3) -> Any:
        given = {"x": np.ones((3, width), np.float32), "factors": np.full(factors, 2, np.float32)}
        return call("pairs", {**given, "y": np.empty((rows, width // 2), np.float32), "dispatcher": one})

    assert run(8, 4).tolist() == [[4.0] * 4] * 3
    with pytest.raises(InvalidProblem, match=r"pairs: x must be an array of shape \(3, 8\) .*; had shape \(3, 9\)"):
        run(9, 4)
    with pytest.raises(InvalidProblem, match=r"pairs: factors must be an array of shape \(4,\) .*; had shape \(5,\)"):
        run(8, 5)
    with pytest.raises(InvalidProblem, match=r"pairs: x must have the axes \(n, d \* 2\); had shape \(3,\)"):
        call("pairs", {"x": np.ones(3, np.float32), "factors": np.ones(3, np.float32), "dispatcher": one})
    with pytest.raises(InvalidProblem, match=r"pairs: y must be an array of shape \(3, 4\) .*; had shape \(2, 4\)"):
        run(8, 4, rows=2)


def test_a_signature_in_words():
    rows = argument_rows(
        declaring(
            array("x", "n, d * 2"),
            array("bias", "doubled", F32, when={"has_bias": (True,), "scaling": (Scaling.STATIC,)}),
            array("bias", "*shape", "wider or element", flat=True),
            ArgumentSpec("scale", Role.SCALE, (F32, ElementKind.F16)),
            array("rest", "1", F32, required=False, when={"wider": tuple(k for k in ElementKind if k is not F32)}),
            array("codes", "1", F32, when={"has_bias": (False,), "wider": (F32, ElementKind.F16)}),
        )
    )
    assert rows == [
        ("x", "input", "element", "n, d * 2", ""),
        ("bias", "input", "f32", "doubled (doubled: twice the columns)", "has_bias and scaling is static"),
        ("bias", "input", "wider or element", "shape in all, any shape", "otherwise"),
        ("scale", "scale", "f32 or f16", "a number, or an array of one element", ""),
        ("rest", "input, optional", "f32", "1", "wider is not f32"),
        ("codes", "input", "f32", "1", "not has_bias and wider is f32 or f16"),
    ]
