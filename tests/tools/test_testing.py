"""The conformance suite: what is right passes, and each kind of defect fails the check that is for it."""

from __future__ import annotations

import itertools
import re
import textwrap
import time
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
from toykernels import scaled

from skuda.dispatch import Dispatcher
from skuda.dispatch.backends.base import BackendStatus
from skuda.dispatch.backends.cuda_core import CudaCoreBackend
from skuda.dispatch.backends.numpy import HostRunner, NumpyBackend
from skuda.dispatch.compile import compilers as compiling
from skuda.dispatch.compile.cache import CubinCache
from skuda.registry import (
    Argument,
    BackendSpec,
    Between,
    Case,
    Descriptor,
    ElementKind,
    InvalidProblem,
    KernelSku,
    MultipleOf,
    Op,
    OpCategory,
    PrecisionGuarantee,
    Registry,
    Role,
    Unsupported,
)
from skuda.registry.device import HOST, device_named
from skuda.registry.value import Extent
from skuda.tools.verify import kit as kits
from skuda.tools.verify.conformance import Checks
from skuda.tools.verify.edges import always
from skuda.tools.verify.kit import Broken, NotRun
from skuda.tools.verify.misuse import misuses
from skuda.tools.verify.placement import HostPlacement, placement_for

pytest_plugins = ["pytester"]

F32 = ElementKind.F32
EXACT = PrecisionGuarantee(math_precision="f32", accumulator="f32")
LOOSE = EXACT.model_copy(update={"max_ulp": None})
VAGUE = LOOSE.model_copy(
    update={"deterministic": False, "bit_stable_on_same_hardware": False, "batch_invariant": False}
)


class ThirdsDescriptor(Descriptor):
    """Problem of `thirds`: y = x / 3, row by row."""

    op: Literal["thirds"] = "thirds"
    category: ClassVar[OpCategory] = OpCategory.UNARY_ELEMENTWISE
    element_field: ClassVar[str] = "element"
    n: Extent
    d: Extent
    element: ElementKind = F32

    def arguments(self) -> tuple[Argument, ...]:
        return (
            Argument("x", Role.INPUT, (self.element,), (self.n, self.d)),
            Argument("y", Role.OUTPUT, (self.element,), (self.n, self.d)),
        )


def reference(problem: Any, *, x: Any, y: Any) -> None:
    y[...] = x / np.float32(3)


# --- kernels, right and wrong ----------------------------------------------------------------------------------------


def by_reciprocal(problem: Any, *, x: Any, y: Any) -> None:
    y[...] = x * np.float32(1 / 3)


def past_the_end(problem: Any, *, x: Any, y: Any) -> None:
    reference(problem, x=x, y=y)
    if x.size:
        behind = np.lib.stride_tricks.as_strided(x, (x.shape[0], x.shape[1] + 1), x.strides)
        y[-1, -1] += behind[-1, -1] * np.float32(1e-30) / np.float32(3)


_shared = np.zeros(0, np.float32)


def through_shared_memory(problem: Any, *, x: Any, y: Any) -> None:
    global _shared  # noqa: PLW0603  the defect itself
    _shared = x / np.float32(3)
    time.sleep(0.0005)
    y[...] = _shared


_count = itertools.count()


def another_every_time(problem: Any, *, x: Any, y: Any) -> None:
    y[...] = next(_count)


def by_number_of_rows(problem: Any, *, x: Any, y: Any) -> None:
    y[...] = problem.n


def without_strides(problem: Any, *, x: Any, y: Any) -> None:
    packed = np.lib.stride_tricks.as_strided(x, x.shape, (4 * x.shape[1], 4))
    reference(problem, x=packed, y=y)


def beside(problem: Any, *, x: Any, y: Any) -> None:
    reference(problem, x=x, y=y)
    if y.size:
        np.lib.stride_tricks.as_strided(y, (y.shape[0], y.shape[1] + 1), y.strides)[-1, -1] = 0


def over_its_input(problem: Any, *, x: Any, y: Any) -> None:
    reference(problem, x=x, y=y)
    x[...] = 0


def of_even_rows(problem: Any, *, x: Any, y: Any) -> None:
    if problem.d % 2:
        raise ValueError("cannot split a row")
    reference(problem, x=x, y=y)


class Careless(HostRunner):
    """Checks nothing."""

    def check(self, arrays):
        pass

    def run(self, arrays, stream):
        y = arrays.get("y", np.empty_like(arrays["x"]))
        self._kernel(self._problem, x=arrays["x"], y=y)
        return y

    def bind(self, arrays, stream):
        return lambda: self.run(arrays, stream)


class Early(HostRunner):
    """Writes before it checks."""

    def run(self, arrays, stream):
        if isinstance(arrays.get("y"), np.ndarray) and arrays["y"].flags.writeable:
            arrays["y"][...] = 0
        return super().run(arrays, stream)


class Unmasking(HostRunner):
    """Takes what lies under a mask."""

    def check(self, arrays):
        super().check(dict(_unmasked(arrays)))

    def run(self, arrays, stream):
        return super().run(dict(_unmasked(arrays)), stream)


def _unmasked(arrays):
    return [(name, array.data if np.ma.isMaskedArray(array) else array) for name, array in arrays.items()]


class Own(HostRunner):
    """Ignores the output that is given."""

    def run(self, arrays, stream):
        super().check(arrays)
        return super().run({"x": arrays["x"]}, stream)


class Keeping(HostRunner):
    """Makes one output and hands it out again and again."""

    def run(self, arrays, stream):
        if "y" in arrays:
            return super().run(arrays, stream)
        made = self.__dict__.setdefault("made", np.empty((self._problem.n, self._problem.d), np.float32))
        return super().run({**arrays, "y": made}, stream)


class Remembering(HostRunner):
    """Serves the first inputs for ever."""

    def run(self, arrays, stream):
        super().check(arrays)
        first = self.__dict__.setdefault("first", np.array(arrays["x"]))
        result = super().run(arrays, stream)
        result[...] = first / np.float32(3)
        return result


class Stale(HostRunner):
    """What `bind` returns works only once."""

    def bind(self, arrays, stream):
        launch, turns = super().bind(arrays, stream), itertools.count()

        def once():
            if next(turns):
                arrays["y"][...] = 0
                return arrays["y"]
            return launch()

        return once


class Toy(NumpyBackend):
    spec = BackendSpec(name="toy", processor="cpu")
    runner: type[HostRunner] = HostRunner

    def prepare(self, sku, problem, device):
        return self.runner(problem, globals()[sku.entry_point])


def sku_of(entry: str, guarantee: PrecisionGuarantee = EXACT, **changes: Any) -> KernelSku:
    fields: dict[str, Any] = {
        "category": "unary_elementwise",
        "op": "thirds",
        "element": "f32",
        "arch": "cpu",
        "backend": "toy",
        "variant": entry,
        "precision_guarantee": guarantee,
        "source": __name__,
        "entry_point": entry,
        "summary": "a toy",
    }
    return KernelSku(**{**fields, **changes})


CASES = tuple(Case(ThirdsDescriptor(n=n, d=d)) for n, d in ((5, 3), (0, 3), (1, 1), (7, 8), (4, 0)))
OP = Op(ThirdsDescriptor, reference, CASES, (sku_of("reference", backend="numpy"),), source="test_testing.py")


def kit_of(sku: KernelSku, backend: Any = None, placement: Any = placement_for, more: tuple[Case, ...] = ()) -> Checks:
    backend = backend or Toy()
    registry = Registry([OP], origin="elsewhere 1.0").register(backend.spec, sku, origin="toys 1.0")
    return Checks("toys", Dispatcher(registry, backends=[backend, NumpyBackend()]), placement, 7, more)


CHECKS = [
    name.removeprefix("check_")
    for name in vars(Checks)
    if name.startswith("check_") and name not in {"check_loaded", "check_op", "check_status"}
]


def failing(kit: Checks) -> dict[str, str]:
    """Return the checks that fail, with what they say."""
    (sku,) = kit.skus
    found = {}
    for name in CHECKS:
        try:
            getattr(kit, f"check_{name}")(sku)
        except Broken as broken:
            found[name] = str(broken)
        except NotRun:
            pass
        except Exception as error:  # noqa: BLE001  as the suite itself sees it
            found[name] = f"raised {error!r}"
    return found


def with_runner(kind: type[HostRunner]) -> dict[str, str]:
    backend = Toy()
    backend.runner = kind
    return failing(kit_of(sku_of("reference"), backend))


@pytest.mark.parametrize("guarantee", [EXACT, LOOSE, VAGUE], ids=["exact", "loose", "vague"])
def test_what_is_right_passes(guarantee):
    kit = kit_of(sku_of("reference", guarantee))
    kit.check_loaded()
    for backend in kit.backends:
        kit.check_status(backend)
    assert failing(kit) == {}


@pytest.mark.parametrize(
    ("entry", "guarantee", "checks", "words"),
    [
        ("by_reciprocal", EXACT, {"meaning"}, r"promises max_ulp=0\nbits: y\[.*got .* want .* elements differ"),
        ("of_even_rows", EXACT, {"meaning"}, r"error: ValueError: cannot split a row"),
        ("past_the_end", LOOSE, {"deterministic"}, r"promises deterministic\nrepeat: y\[.*among other bytes"),
        ("through_shared_memory", EXACT, {"threads"}, r"other results than one thread alone: thread \d of 4"),
        ("by_number_of_rows", LOOSE, {"batch_invariant"}, r"promises batch_invariant\nrows: .*alone gave other bits"),
        ("without_strides", EXACT, {"meaning"}, r"bits: .*\(normal, wide\)"),
        ("beside", EXACT, {"memory"}, r"guard: .*beside the array was written"),
        ("over_its_input", EXACT, {"memory", "outputs", "reuse", "calls"}, r"input: .*of an input was written"),
    ],
)
def test_a_wrong_kernel_fails_the_check_that_is_for_it(entry, guarantee, checks, words):
    found = failing(kit_of(sku_of(entry, guarantee)))
    assert set(found) == checks, found
    assert re.search(words, found[min(checks - {"calls"})]), found


def test_a_lie_about_determinism_is_seen_wherever_runs_are_compared():
    found = failing(kit_of(sku_of("another_every_time", LOOSE)))
    assert re.search("promises deterministic\nrepeat: y", found["deterministic"])
    assert {"deterministic", "reuse", "threads", "batch_invariant"} <= set(found)
    assert failing(kit_of(sku_of("another_every_time", VAGUE))) == {}


@pytest.mark.parametrize(
    ("runner", "check", "words"),
    [
        (Careless, "refusals", r"an unknown argument: can_implement\(\) must raise InvalidProblem, and accepted it"),
        (Unmasking, "refusals", r"x with a mask: can_implement\(\) must raise InvalidProblem, and accepted it"),
        (Early, "refusals", r"run\(\) refused it and had written to y, byte \d+"),
        (Own, "outputs", r"outputs: y; it was given, and another ndarray came back"),
        (Keeping, "outputs", r"outputs: y\[.*it was left out, and a later run on other inputs wrote to it"),
        (Remembering, "reuse", r"bind: y\[.*a call after the values of its inputs changed"),
        (Stale, "reuse", r"bind: y\[.*bind\(\), second call"),
    ],
)
def test_a_wrong_runner_fails_the_check_that_is_for_it(runner, check, words):
    found = with_runner(runner)
    assert re.search(words, found[check]), found
    if runner is not Own:  # whoever ignores the output has no meaning either
        assert set(found) <= {check, "threads", "meaning", "batch_invariant", "outputs"}, found


def test_each_kind_of_wrong_argument_is_tried():
    tried = []

    class Listing(HostRunner):
        def check(self, arrays):
            raise InvalidProblem("thirds", "x", "", "be right")

        def run(self, arrays, stream):
            tried.append((arrays, stream))
            super().check(arrays)
            assert stream is None
            return super().run(arrays, stream)

    backend = Toy()
    backend.runner = Listing
    kit = kit_of(sku_of("reference"), backend)
    (sku,) = kit.skus
    with pytest.raises(Broken, match=r"a stream on a CPU: run\(\) must raise InvalidProblem; raised AssertionError"):
        kit.check_refusals(sku)
    question = kit.question(sku, 0, CASES[3])
    what = [misuse.what for misuse in misuses(CASES[3].problem, question.drawn, HostPlacement())]
    assert {"an unknown argument", "a stream on a CPU", "no x", "x with a mask", "x of float16"} <= set(what)
    assert {"x shorter: shape (7, 7), not (7, 8)", "y longer: shape (7, 9), not (7, 8)"} <= set(what)
    assert {"y of another rank: shape (1, 7, 8), not (7, 8)", "y whose rows are one", "y over x"} <= set(what)
    assert {"y that is read-only", "y with a mask"} <= set(what)
    assert len(what) == len(set(what))


# --- constraints and records -----------------------------------------------------------------------------------------


def test_problems_at_the_edge_of_a_constraint_are_run_and_those_beyond_are_refused():
    constraints = (Between(field="n", minimum=17), MultipleOf(field="d", divisor=8))
    kit = kit_of(sku_of("reference", constraints=constraints))
    (sku,) = kit.skus
    assert failing(kit) == {}
    sizes = {(case.problem.n, case.problem.d) for case in kit.cases(sku)}
    assert {(17, 8), (17, 24)} <= sizes
    assert not any(n < 17 or d % 8 for n, d in sizes)
    added = always(sku, kit.known(sku))
    assert {case.values for case in added} == {"normal", "special", "infinite", "zero", "ties"}
    assert kit.finding(sku).cases == kits.DRAWS * (len(kit.cases(sku)) - len(added)) + len(added)


def test_a_constraint_that_is_not_enough_is_found_at_its_edge():
    kit = kit_of(sku_of("of_even_rows", constraints=(Between(field="d", minimum=4),)))
    assert set(failing(kit)) >= {"meaning"}
    assert failing(kit_of(sku_of("of_even_rows", constraints=(MultipleOf(field="d", divisor=2),)))) == {}


def test_a_kernel_that_refuses_what_its_constraints_accept_fails():
    class Refusing(Toy):
        def prepare(self, sku, problem, device):
            if problem.d == 8:
                raise Unsupported(dispatcher.explain(problem))
            return super().prepare(sku, problem, device)

    kit = kit_of(sku_of("reference"), Refusing())
    dispatcher = kit.dispatcher
    assert "its constraints accept this problem; some cases are refused" in failing(kit)["meaning"]


def test_a_kernel_for_which_there_is_no_case_fails_unless_the_suite_brings_one():
    sku = sku_of("reference", element="f64")
    assert "no case of thirds is for it" in failing(kit_of(sku))["record"]
    more = (Case(ThirdsDescriptor(n=2, d=3, element="f64")),)
    found = failing(kit_of(sku.model_copy(update={"precision_guarantee": LOOSE}), more=more))
    assert found == {}


def test_a_record_without_a_summary_fails():
    assert failing(kit_of(sku_of("reference", summary=""))) == {
        "record": "it has no summary, the line that `skuda show` prints beside it"
    }


@pytest.mark.skipif(compiling.find_nvrtc() is None, reason="no nvrtc")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"flags": ("-Dfloat=nonsense",)}, "(?s)for sm_80: .*nonsense"),
        ({"launch": f"{__name__}:one_too_few"}, "for sm_80: .*parameters"),
        ({"launch": f"{__name__}:no_launch"}, "its launch rule fails: no such card"),
    ],
)
def test_source_that_does_not_compile_or_takes_other_parameters_fails_without_a_gpu(tmp_path, changes, words):
    sku = scaled.sku("scaled", "cuda_core", summary="a toy", **changes)
    registry = Registry([*scaled.ops()[1:], replace(scaled.ops()[0], skus=(sku,))], origin="toys 1.0")
    backend = CudaCoreBackend(CubinCache(tmp_path))
    kit = Checks("toys", Dispatcher(registry, backends=[backend]), placement_for, 7)
    if words:
        with pytest.raises(Broken, match=words):
            kit.check_compiles(sku)
    else:
        kit.check_compiles(sku)


def one_too_few(problem, device):
    launch = scaled.scaled(problem, device)
    step, *_ = launch.steps
    return launch._replace(steps=(step._replace(parameters=step.parameters[:-1]),))


def no_launch(problem, device):
    raise ValueError("no such card")


# --- backends and packages -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "answer", "words"),
    [
        ("status", BackendStatus(available=True, detail=""), "must say a detail"),
        ("status", BackendStatus(available=False, detail="no luck"), "where it does not work, a remedy"),
        (
            "status",
            BackendStatus(available=False, detail="no luck", remedy="try again"),
            "available=False, and devices",
        ),
        ("status", "fine", "must return a BackendStatus"),
        ("devices", (), r"available=True, and devices\(\) returns \(\)"),
        ("devices", (device_named("cpu"),), "cpu Devices with an ordinal"),
        ("devices", (HOST.model_copy(update={"processor": "cuda"}),), "cpu Devices"),
    ],
)
def test_a_backend_that_is_not_honest_about_itself_fails(method, answer, words):
    backend = Toy()
    setattr(backend, method, lambda: answer)
    kit = kit_of(sku_of("reference"), backend)
    with pytest.raises(Broken, match=words):
        kit.check_status(backend)


def test_a_backend_whose_status_raises_fails():
    class Raising(Toy):
        def status(self):
            raise OSError("no driver")

    with pytest.raises(Broken, match=r"status\(\) must not raise; raised OSError: no driver"):
        kit_of(sku_of("reference"), Raising()).check_status(Raising())


def test_kernels_that_cannot_run_here_are_not_run_and_the_reason_is_told():
    class Absent(Toy):
        def status(self):
            return BackendStatus(available=False, detail="no abacus", remedy="buy one")

        def devices(self):
            return ()

    kit = kit_of(sku_of("reference"), Absent())
    (sku,) = kit.skus
    kit.check_status(kit.backends[0])
    with pytest.raises(NotRun, match=r"backend toy: no abacus \(buy one\)"):
        kit.check_meaning(sku)


def test_a_package_that_registers_nothing_fails():
    kit = kit_of(sku_of("reference"))
    kit.package = "nobody"
    with pytest.raises(Broken, match="nothing is registered by 'nobody'"):
        kit.check_loaded()


def test_an_op_without_documentation_or_reference_fails():
    kit = kit_of(sku_of("reference"))
    with pytest.raises(Broken, match="has no Formula, Shapes, Elements, Units, Errors"):
        kit.check_op(OP)


# --- streams, on a card that does not exist --------------------------------------------------------------------------


class Deferred:
    """A stream: work that waits for its turn."""

    def __init__(self):
        self.work = []


class DeferredPlacement(HostPlacement):
    """Memory of the host for a device that runs what is enqueued when it is waited for."""

    def late(self, buffers, contents):
        stream = Deferred()
        for name, content in contents.items():
            stream.work.append(lambda to=buffers[name], content=content: np.copyto(to, content))
        return stream

    def finish(self, stream):
        for work in stream.work:
            work()


class Card(Toy):
    spec = BackendSpec(name="toy", processor="cuda")
    listens = True

    def devices(self):
        return (device_named("h200").model_copy(update={"ordinal": 0}),)

    def prepare(self, sku, problem, device):
        runner = super().prepare(sku, problem, device)
        run, listens = runner.run, self.listens

        def enqueue(arrays, stream):
            if stream is None or not listens:
                return run(arrays, None)
            stream.work.append(lambda: run(arrays, None))
            return arrays["y"]

        runner.run = enqueue
        return runner


@pytest.mark.parametrize("listens", [True, False])
def test_a_backend_that_ignores_the_stream_fails(listens):
    backend = Card()
    backend.listens = listens
    sku = sku_of("reference", arch="sm_80")
    kit = kit_of(sku, backend, placement=lambda device: DeferredPlacement())
    if listens:
        kit.check_streams(sku)
    else:
        with pytest.raises(Broken, match=r"did not wait for what stood on the stream before it: y\["):
            kit.check_streams(sku)


# --- as pytest shows it ----------------------------------------------------------------------------------------------

SUITE = """
import os
import numpy as np
from skuda.dispatch import Dispatcher
from skuda.dispatch.backends.numpy import NumpyBackend
from skuda.registry import Registry
from test_testing import CASES, LOOSE, OP, Toy, sku_of
import test_testing
from skuda.tools.testing import Conformance

def by_process(problem, *, x, y):
    y[...] = os.getpid()

test_testing.by_process = by_process

class TestToys(Conformance):
    package = "toys"
    seed = 11

    @classmethod
    def dispatcher(cls):
        skus = [sku_of("reference"), sku_of("by_reciprocal"), sku_of("by_process", LOOSE, source=__name__)]
        registry = Registry([OP], origin="elsewhere 1.0").register(Toy.spec, *skus, origin="toys 1.0")
        return Dispatcher(registry, backends=[Toy(), NumpyBackend()])
"""


PLUGIN = """
[skuda.kernels]
fine = {module}:records
"""


@pytest.mark.parametrize(
    ("code", "check", "words"),
    [
        (
            "import numba",
            "test_loading_imports_nothing_heavy",
            "loading its plug-ins imports *numba; import them where",
        ),
        ("raise RuntimeError('boom')", "test_package_is_loaded", "toy-plugin 1.0 (skuda.kernels) is set aside: *boom"),
    ],
)
def test_a_package_that_is_heavy_or_broken_fails_the_check_that_is_for_it(pytester, monkeypatch, code, check, words):
    module = f"toy_plugin_{check}"
    info = pytester.path / "toy_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(PLUGIN.format(module=module))
    pytester.makepyfile(numba="")
    rest = "from test_testing import sku_of, OP, Toy\nrecords = [Toy.spec, OP, sku_of('by_reciprocal')]"
    pytester.makepyfile(**{module: f"{code}\n{rest}"})
    pytester.makepyfile(
        test_it="""
        from skuda.tools.testing import Conformance

        class TestIt(Conformance):
            package = "Toy_Plugin"
        """
    )
    monkeypatch.syspath_prepend(str(pytester.path))
    ran = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-k", "package or heavy")
    ran.assert_outcomes(passed=1, failed=1)
    ran.stdout.fnmatch_lines_random([f"*{check}*", f"*{words}*"])


def test_every_check_of_every_kernel_is_an_item_with_a_name_and_a_readable_end(pytester):
    pytester.makepyfile(test_toys=textwrap.dedent(SUITE))
    ran = pytester.runpytest_inprocess("-rfs", "-p", "no:cacheprovider", "-p", "no:randomly")
    ran.assert_outcomes(passed=33, failed=2, skipped=11)
    wrong = "unary_elementwise.thirds.f32.plain.cpu.toy.by_reciprocal"
    moody = "unary_elementwise.thirds.f32.plain.cpu.toy.by_process"
    ran.stdout.fnmatch_lines_random(
        [
            f"FAILED *::TestToys::test_meaning[[]{wrong}[]]*",
            f"FAILED *::TestToys::test_bit_stable[[]{moody}[]]*",
            wrong,
            "promises max_ulp=0",
            "bits: y[[]*: got *, want *elements differ; case 0 (normal, contiguous)",
            "promises bit_stable_on_same_hardware",
            "another process got other bits",
            "to draw these numbers again: seed = 11",
            "SKIPPED*a CPU has no streams*",
            "SKIPPED*'toys' is not an installed package with plug-ins*",
        ]
    )
