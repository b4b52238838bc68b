"""Plug-ins: entry points of installed packages are loaded completely, or set aside with a reason."""

from __future__ import annotations

import builtins
import os
import re
import subprocess
import sys
import textwrap
import threading

import distributions
import numpy as np
import pytest
from support import sampled

from skuda.dispatch import Dispatcher, Plan, PlanPreference
from skuda.dispatch.backends.numpy import HostRunner
from skuda.dispatch.plan import Ready
from skuda.dispatch.plugins import loading as plugins
from skuda.dispatch.plugins.loading import load_backends, load_kernels
from skuda.kernels.catalog import built_in_registry
from skuda.registry import CompileError, InvalidProblem, KernelFailed, Registry, Unsupported
from skuda.registry.device import HOST
from skuda.tools.cli import main


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that puts a distribution with one module and entry points on the path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made = []

    def make(name, code, **points):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(code), encoding="utf-8", errors="surrogatepass")
        distributions.install(tmp_path, name, **{group: {name: f"{name}:{it}"} for group, it in points.items()})
        made.append(name)

    yield make
    for name in made:
        sys.modules.pop(name, None)


GOOD = f"""{distributions.TWICE}
    OP = Op(TwiceDescriptor, reference, (Case(TwiceDescriptor(n=3)),), (sku("numpy", "reference"),), source="here")
    RECORDS = [OP]

    def records():
        return RECORDS
"""


FILL = """
from skuda.kernels.catalog import built_in_registry
from skuda.registry import KernelSku, Op
R = built_in_registry()
OP = R.ops["fill"]
SKU = next(sku for sku in OP.skus if sku.backend == "numpy")
"""


@pytest.mark.parametrize("target", ["records", "RECORDS", "OP"])
def test_an_op_of_another_package_is_dispatched_like_our_own(install, target):
    install("good_plugin", GOOD, kernels=target)
    before = threading.enumerate()
    dispatcher = Dispatcher()
    assert threading.enumerate() == before
    assert dispatcher.quarantined == ()
    problem = dispatcher.describe("twice", n=3)
    np.testing.assert_array_equal(dispatcher.run(problem, x=np.arange(3, dtype=np.float32)), [0, 2, 4])
    assert dispatcher.registry.origin("twice") == "good_plugin 1.0"
    assert dispatcher.registry.origin(dispatcher.select(problem).sku.id) == "good_plugin 1.0"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise RuntimeError('boom')", "RuntimeError: boom"),
        ("", "AttributeError"),
        ("records = ['a string']", "must be an Op"),
        ("class Own(BaseException): pass\nraise Own('all the way down')", "Own: all the way down"),
        (
            "class Mute(Exception):\n    def __str__(self): raise ValueError\nraise Mute",
            "Mute: .a Mute that cannot be shown",
        ),
        (FILL + "records = [SKU]", "(?s)fill.*is registered already.*by skuda and by bad_plugin 1.0"),
        (
            FILL + "records = [KernelSku.model_construct(**{**vars(SKU), 'variant': 'My Own!'})]",
            "variant.*had 'My Own!'",
        ),
        (
            FILL + "class Own(KernelSku): pass\nrecords = [Own(**{**SKU.model_dump(), 'variant': 'own'})]",
            "Own must be a KernelSku itself",
        ),
        (FILL + "records = [SKU.model_copy(update={'variant': 'a', 'entry_point': 'lost'})]", "lost cannot be loaded"),
        (FILL + "records = [Op(int, print, (), (), source='')]", "must be a class derived from Descriptor"),
        (
            FILL + "class Own(OP.descriptor): op: str = 'own'\nrecords = [Op(Own, print, OP.cases, (), source='')]",
            "cases: must be Case records of Own",
        ),
    ],
)
def test_a_broken_kernel_plugin_is_set_aside_and_the_rest_goes_on(install, code, words):
    install("bad_plugin", code, kernels="records")
    install("good_plugin", GOOD, kernels="records")
    registry, found = load_kernels(built_in_registry())
    assert [(plugin.origin, bool(plugin.reason)) for plugin in found] == [
        ("bad_plugin 1.0", True),
        ("good_plugin 1.0", False),
    ]
    assert re.search(words, found[0].reason)
    assert "twice" in registry.ops
    assert len(registry) == len(built_in_registry()) + 1


def test_a_plugin_is_taken_whole_or_not_at_all(install):
    install("half_plugin", GOOD + "\n    RECORDS.append('not a record')\n", kernels="RECORDS")
    registry, (plugin,) = load_kernels(built_in_registry())
    assert "must be an Op" in plugin.reason
    assert "twice" not in registry.ops


BACKEND = """
    from skuda.dispatch import Backend, BackendStatus
    from skuda.registry.device import HOST
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


@pytest.mark.parametrize(
    ("code", "target", "words"),
    [
        (BACKEND.format(name="numpy"), "Odd", "numpy: name: is registered already .*by skuda and by odd_backend 1.0"),
        ("class Odd: pass", "Odd", "must construct"),
        (
            BACKEND.replace("BackendSpec(name", "BackendSpec.model_construct(name").format(name="Not A Name!"),
            "Odd",
            "Not A Name!",
        ),
        (BACKEND.format(name="odd") + "    Odd.spec = 'odd'", "Odd", "whose spec is a BackendSpec"),
    ],
)
def test_a_broken_backend_is_set_aside(install, code, target, words):
    install("odd_backend", code, backends=target)
    _, found, (plugin,) = load_backends(Registry())
    assert found == ()
    assert re.search(words, plugin.reason)
    dispatcher = Dispatcher()
    assert [each.origin for each in dispatcher.quarantined] == ["odd_backend 1.0"]
    assert list(dispatcher.backends) == list(Registry().backends)


@pytest.mark.parametrize(
    ("points", "words"),
    [
        (b"[skuda.kernels]\nthis is no entry point\n", "its entry points cannot be read: TypeError"),
        (b"[skuda.kernels]\nx = ...:$\n", "AttributeError|ModuleNotFoundError|ImportError|ValueError|TypeError"),
    ],
)
def test_a_package_whose_metadata_is_broken_breaks_nobody_else(install, tmp_path, points, words):
    info = tmp_path / "bad_metadata-1.0.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_bytes(points)
    install("good_plugin", GOOD, kernels="records")
    dispatcher = Dispatcher()
    assert "twice" in dispatcher.registry.ops
    aside = {plugin.origin: plugin.reason for plugin in dispatcher.quarantined}
    assert all("bad_metadata" in origin for origin in aside)
    assert re.search(words, aside[min(aside)])


KERNEL = """
    from skuda.kernels.catalog import built_in_registry
    SKU = next(sku for sku in built_in_registry().ops["fill"].skus if sku.backend == "numpy" and sku.element == "f32")
    records = [SKU.model_copy(update={"backend": "odd"})]
"""


MISBEHAVIOUR = {
    "status raises": ("status(self)", "raise RuntimeError('odd')", r"status\(\) raised RuntimeError: odd"),
    "status is junk": ("status(self)", "return 'fine'", r"status\(\) must return a BackendStatus; had 'fine'"),
    "devices raise": ("devices(self)", "raise GeneratorExit", r"devices\(\) raised GeneratorExit"),
    "devices are not its own": (
        "devices(self)",
        "return (HOST.model_copy(update={'processor': 'cuda'}),)",
        r"devices\(\) must return a tuple of cpu Devices",
    ),
    "prepare raises": ("prepare(self, *asked)", "raise ZeroDivisionError('odd')", r"prepare\(\) raised ZeroDivision"),
    "prepare is junk": ("prepare(self, *asked)", "return lambda **arrays: 3", r"prepare\(\) must return a Runner"),
}


def problem_of(dispatcher, element="f32"):
    return dispatcher.describe("fill", numel=2, output_element=element)


@pytest.fixture
def odd(install):
    """Return a function that installs a backend with a method of its own, and a kernel for it."""

    def make(head, body):
        code = BACKEND.format(name="odd") + f"        def {head}:\n            {body}\n"
        install("odd_backend", "    from skuda.registry import CompileError\n" + code, backends="Odd")
        install("odd_kernels", KERNEL, kernels="records")
        return Dispatcher()

    return make


@pytest.mark.parametrize(("head", "body", "words"), MISBEHAVIOUR.values(), ids=MISBEHAVIOUR)
def test_a_backend_that_misbehaves_is_set_aside(odd, head, body, words):
    dispatcher = odd(head, body)
    problem = problem_of(dispatcher)
    assert dispatcher.run(problem, value=3.0).tolist() == [3.0, 3.0]
    assert dispatcher.select(problem).sku.backend == "numpy"
    assert [device.name for device in dispatcher.devices] == ["CPU"]
    (plugin,) = dispatcher.quarantined
    assert (plugin.origin, plugin.group) == ("odd_backend 1.0", "skuda.backends")
    assert re.search(words, plugin.reason)
    assert not dispatcher.status["odd"].available
    found = dispatcher.explain(problem)
    assert any("odd_backend 1.0" in note and re.search(words, note) for note in found.notes)
    (refused,) = [each for each in found.refused if ".odd." in each.sku]
    assert {"code": "backend", "field": "backend"}.items() <= refused.reasons[0].model_dump().items()
    assert "SKUDA_PLUGINS=-odd_backend" in refused.reasons[0].change
    # Who insists on it is refused, not given something else.
    with pytest.raises(Unsupported, match=words):
        Dispatcher().select(problem, PlanPreference(backend="odd"))


def test_a_backend_that_refuses_a_kernel_stays(odd):
    dispatcher = odd("prepare(self, sku, problem, device)", "raise CompileError(sku.id, 'there is no abacus')")
    with pytest.raises(CompileError, match="abacus"):
        dispatcher.select(problem_of(dispatcher))
    assert dispatcher.quarantined == ()


@pytest.mark.parametrize("question", ["describe_choice", "choices"])
def test_words_and_choices_that_fail_break_nothing(odd, question):
    dispatcher = odd(f"{question}(self, *asked)", "raise SystemExit('odd')")
    problem = problem_of(dispatcher)
    found = dispatcher.explain(problem)
    assert ("backend odd: describe_choice() raised SystemExit: odd" in found.notes) is (question == "describe_choice")
    assert dispatcher.choices(dispatcher.registry.sku(found.chosen), problem, dispatcher.devices[0]) == ()


def test_a_dispatcher_can_be_made_from_the_registry_of_another_one(install):
    install("odd_backend", BACKEND.format(name="odd"), backends="Odd")
    dispatcher = Dispatcher(Dispatcher().registry)
    assert dispatcher.quarantined == ()
    assert dispatcher.status["odd"].available


def test_a_plugin_that_keeps_everybody_waiting_is_named_while_it_loads(install, monkeypatch, caplog):
    monkeypatch.setattr(plugins, "PATIENCE", 0.01)
    install("slow_plugin", "import time\ntime.sleep(0.3)\nrecords = []", kernels="records")
    (plugin,) = Dispatcher().plugins
    assert (plugin.seconds >= 0.3, plugin.reason) == (True, "")
    assert "plug-in slow_plugin of slow_plugin 1.0 (skuda.kernels) is still loading after 0.01 s" in caplog.text
    assert "SKUDA_PLUGINS=-slow_plugin leaves it out" in caplog.text


@pytest.mark.parametrize(
    ("setting", "loaded"),
    [
        ("1", {"good_plugin", "odd_backend"}),
        ("0", set()),
        ("-Good-Plugin, -other", {"odd_backend"}),
        ("odd_backend,good-plugin", {"good_plugin", "odd_backend"}),
        ("odd_backend,-odd_backend", set()),
    ],
)
def test_plugins_can_be_turned_off_by_name(install, monkeypatch, setting, loaded):
    install("good_plugin", GOOD, kernels="records")
    install("odd_backend", BACKEND.format(name="odd"), backends="Odd")
    monkeypatch.setenv("SKUDA_PLUGINS", setting)
    dispatcher = Dispatcher()
    assert {plugin.name for plugin in dispatcher.plugins} == loaded
    assert ("twice" in dispatcher.registry.ops) is ("good_plugin" in loaded)
    assert ("odd" in dispatcher.backends) is ("odd_backend" in loaded)


LOUD = """
    import os, subprocess, sys
    from skuda.dispatch import Backend, BackendStatus
    from skuda.dispatch.backends.numpy import HostRunner
    from skuda.registry.device import HOST
    from skuda.kernels.catalog import built_in_registry
    from skuda.registry import BackendSpec
    from skuda.registry.source import resolve

    def shout(what):
        print(f"loud: {what} by print")
        os.write(1, f"loud: {what} by os\\n".encode())
        subprocess.run([sys.executable, "-c", f"print('loud: {what} by a child')"])

    shout("import")
    SKU = next(sku for sku in built_in_registry().ops["fill"].skus if sku.backend == "numpy" and sku.element == "f32")

    def records():
        shout("records")
        return [SKU.model_copy(update={"backend": "loud"})]

    class Loud(Backend):
        spec = BackendSpec(name="loud", processor="cpu")
        def __init__(self):
            shout("construction")
        def status(self):
            shout("status")
            return BackendStatus(available=True, detail="loud")
        def devices(self):
            shout("devices")
            return (HOST,)
        def describe_choice(self, *asked):
            shout("describe_choice")
            return ("describe_choice",)
        def notes(self):
            shout("notes")
            return ("notes",)
        def choices(self, *asked):
            shout("choices")
            return ()
        def prepare(self, sku, problem, device):
            shout("prepare")
            return HostRunner(problem, resolve(sku.source, sku.entry_point))
"""


def child(code, tmp_path, **changes):
    """Run a program that finds what `install` installed."""
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, **changes}
    return subprocess.run([sys.executable, *code], env=env, capture_output=True, text=True, check=True)


def test_what_a_backend_prints_when_it_is_asked_goes_to_standard_error_too(install, tmp_path):
    install("loud_plugin", LOUD, kernels="records", backends="Loud")
    code = """
from skuda.dispatch import Dispatcher
d = Dispatcher()
problem = d.describe("fill", numel=2, output_element="f32")
plan = d.select(problem)
d.explain(problem), d.choices(plan.sku, problem, "cpu")
print(plan.sku.backend, plan.run(value=1.0).tolist())
"""
    ran = child(["-c", code], tmp_path)
    assert ran.stdout == "loud [1.0, 1.0]\n"
    asked = ("import", "records", "construction", "status", "devices", "describe_choice", "notes", "choices", "prepare")
    for how in ("print", "os", "a child"):
        assert {f"loud: {what} by {how}" for what in asked} <= set(ran.stderr.splitlines())


UGLY = "\x1b]0;owned\x07\x1b[31mred\r\nnext\u2028line\u202egnp\x00\x9b\ud800 the end"
LONG = "much of it " * 200_000


@pytest.mark.parametrize("text", sampled([pytest.param(UGLY, id="ugly"), pytest.param(UGLY + LONG, id="both")]))
@pytest.mark.parametrize(("where", "shown"), [("everywhere", 7), ("import", 1), ("raised", 1), ("repr", 1)])
def test_a_text_of_a_plugin_is_one_short_line_of_printable_characters(install, where, shown, text):
    code = f"""
        from skuda.dispatch import Backend, BackendStatus
        from skuda.dispatch.backends.numpy import HostRunner
        from skuda.registry.device import HOST
        from skuda.kernels.catalog import built_in_registry
        from skuda.registry import BackendSpec
        from skuda.registry.source import resolve
        WHERE = {where!r}
        class Odd(Backend):
            spec = BackendSpec(name="odd", processor="cpu")
            def status(self):
                if WHERE == "raised":
                    raise RuntimeError(TEXT)
                if WHERE == "repr":
                    return type("Junk", (), {{"__repr__": lambda self: TEXT}})()
                return BackendStatus.model_construct(available=True, detail=TEXT, remedy=TEXT)
            def devices(self):
                return (HOST.model_construct(**vars(HOST) | {{"ordinal": 1, "name": TEXT}}),)
            def describe_choice(self, *asked):
                return ("describe_choice " + TEXT,)
            def notes(self):
                return ("notes " + TEXT,)
            def prepare(self, sku, problem, device):
                runner = HostRunner(problem, resolve(sku.source, sku.entry_point))
                runner.notes = ("runner " + TEXT,)
                return runner
        FILL = [sku for sku in built_in_registry().ops["fill"].skus if sku.backend == "numpy" and sku.element == "f32"]
        def records():
            if WHERE == "import":
                raise RuntimeError(TEXT)
            return [FILL[0].model_construct(**vars(FILL[0]) | {{"backend": "odd", "summary": TEXT}})]
    """
    install("odd_plugin", code, kernels="records", backends="Odd")
    vars(builtins)["TEXT"] = text
    try:
        dispatcher = Dispatcher(backends=None)
        problem = dispatcher.describe("fill", numel=2, output_element="f32")
        plan, found = dispatcher.select(problem), dispatcher.explain(problem)
    finally:
        del builtins.TEXT
    state = dispatcher.status["odd"]
    reasons = [reason for decision in found.refused for reason in decision.reasons]
    recorded = {
        *(value for plugin in dispatcher.plugins for value in (plugin.name, plugin.origin, plugin.reason)),
        *(f"status {state.detail}", f"remedy {state.remedy}", f"summary {plan.sku.summary}", *plan.notes, *found.notes),
        *(device.name for device in dispatcher.devices),
        *(part for reason in reasons for part in (reason.wanted, reason.had)),
    }
    assert not [line for line in recorded if not line.isprintable() or len(line) > 1300]
    assert sum("owned" in line for line in recorded) >= shown


def test_names_versions_and_documentation_of_a_package_are_made_printable(install, tmp_path):
    text = "Twice.\x1b[31m\n\nFormula\u202e\n-------\n"
    install("good_plugin", f"__doc__ = {text!r}" + textwrap.dedent(GOOD), kernels="records")
    install("odd_plugin", "raise RuntimeError", kernels="records")
    metadata = f"Metadata-Version: 2.1\nName: odd_plugin\nVersion: 1.0{'9' * 5000}\x1b[31m\u202e\n"
    (tmp_path / "odd_plugin-1.0.dist-info" / "METADATA").write_text(metadata)
    dispatcher = Dispatcher()
    (plugin,) = dispatcher.quarantined
    assert plugin.origin.startswith("odd_plugin 1.0999")
    assert plugin.origin.isprintable()
    assert len(plugin.origin) < 1100
    op = dispatcher.registry.ops["twice"]
    assert op.summary == "Twice.?[31m"
    assert op.documentation.splitlines()[2:] == ["Formula?", "-------"]


ON_NUMPY = """
    from skuda.kernels.catalog import built_in_registry
    SKUS = [sku for sku in built_in_registry().ops["fill"].skus if sku.backend == "numpy"]

    def fill(problem, *, value, output):
        output.fill(value)
        {failure}

    records = [
        sku.model_copy(update={{"variant": "mine", "source": __name__, "entry_point": "fill"}}) for sku in SKUS
    ]
"""


CALLS = {
    "run": lambda plan: plan.run(value=3.0),
    "check": lambda plan: plan.can_implement(value=3.0),
    "bind": lambda plan: plan.bind(value=3.0),
    "bound": lambda plan: plan.bind(value=3.0)(),
}
FAILURES = {
    "an error": ("raise ValueError('odd')", "ValueError: odd"),
    "an own kind": ("raise type('Own', (BaseException,), {})('odd')", "Own: odd"),
    "a mute one": (
        "raise type('Mute', (Exception,), {'__str__': lambda self: 1 / 0})",
        "(a Mute that cannot be shown)",
    ),
}


@pytest.mark.parametrize("how", ["run", "bound"])
@pytest.mark.parametrize("failure", FAILURES)
def test_a_launch_that_raises_sets_its_plugin_aside(install, failure, how):
    code, words = FAILURES[failure]
    name = f"failing_{list(FAILURES).index(failure)}_{how}"  # sources are looked up once for a process
    install(name, ON_NUMPY.format(failure=code), kernels="records")
    dispatcher = Dispatcher()
    problem, other = problem_of(dispatcher), problem_of(dispatcher, "f64")
    plan, unused = dispatcher.select(problem), dispatcher.select(other)
    assert (plan.sku.variant, unused.sku.variant) == ("mine", "mine")
    with pytest.raises(KernelFailed, match=re.escape(words)) as caught:
        CALLS[how](plan)
    failed = caught.value
    assert (failed.sku, failed.origin) == (plan.sku.id, f"{name} 1.0")
    assert failed.__cause__ is not None
    assert all(word in str(failed) for word in (plan.sku.id, f"{name} 1.0"))
    # The next kernel serves, also where a plan was made before.
    for each in (problem, other):
        assert dispatcher.select(each).sku.variant == "reference"
        assert dispatcher.run(each, value=3.0).tolist() == [3.0, 3.0]
    (plugin,) = dispatcher.quarantined
    assert plugin.name == name
    assert plan.sku.id in plugin.reason
    found = dispatcher.explain(problem)
    assert any(name in note and words in note for note in found.notes)
    (refused,) = [each for each in found.refused if each.sku == plan.sku.id]
    assert f"SKUDA_PLUGINS=-{name}" in refused.reasons[0].change
    with pytest.raises(Unsupported, match=re.escape(words)):
        dispatcher.select(problem, PlanPreference(sku=plan.sku.id))
    assert Dispatcher().select(problem).sku.variant == "mine"


RUNNER = """
        def prepare(self, sku, problem, device):
            class Failing:
                notes = ()
                def check(self, arrays): {check}
                def run(self, arrays, stream): {run}
                def bind(self, arrays, stream): {bind}
            return Failing()
"""


@pytest.mark.parametrize("call", CALLS)
def test_a_backend_whose_runner_raises_is_set_aside(install, call):
    raising = "raise ZeroDivisionError('odd')"
    bodies = dict.fromkeys(("check", "run", "bind"), "return None") | {call: raising}
    if call == "bound":
        bodies["bind"] = "return lambda: 1 / 0"
    install("odd_backend", BACKEND.format(name="odd") + RUNNER.format(**bodies), backends="Odd")
    own = [sku.model_copy(update={"backend": "odd"}) for sku in built_in_registry().ops["fill"].skus]
    dispatcher = Dispatcher(Dispatcher().registry.register(*(sku for sku in own if sku.arch == "cpu")))
    problem = problem_of(dispatcher)
    with pytest.raises(KernelFailed, match=r"odd_backend 1.0 raised ZeroDivisionError"):
        CALLS[call](dispatcher.select(problem))
    assert not dispatcher.status["odd"].available
    assert [plugin.name for plugin in dispatcher.quarantined] == ["odd_backend"]
    assert dispatcher.select(problem).sku.backend == "numpy"


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        ("MemoryError", MemoryError),
        ("RecursionError", RecursionError),
        ("KeyboardInterrupt", KeyboardInterrupt),
        ("__import__('skuda.registry').registry.InvalidProblem('fill', 'value', 'odd', 'be even')", InvalidProblem),
    ],
)
def test_what_is_not_the_kernels_fault_sets_nothing_aside(install, raised, kind):
    install(f"raising_{kind.__name__}", ON_NUMPY.format(failure=f"raise {raised}"), kernels="records")
    dispatcher = Dispatcher()
    plan = dispatcher.select(problem_of(dispatcher))
    with pytest.raises(kind) as caught:
        plan.run(value=3.0)
    short = kind in {MemoryError, RecursionError}
    assert getattr(caught.value, "__notes__", []) == ([f"raised in the kernel {plan.sku.id}"] if short else [])
    assert dispatcher.quarantined == ()
    assert dispatcher.select(plan.problem) is plan


@pytest.mark.parametrize("how", ["run", "bound"])
def test_an_error_in_our_kernel_names_it_and_stays(how):
    def broken(problem, **arrays):
        raise ZeroDivisionError("ours")

    sku = built_in_registry().ops["fill"].skus[-1]
    problem = Dispatcher(built_in_registry()).describe("fill", numel=2, output_element="f32")
    ready = Ready(HostRunner(problem, broken))
    plan = Plan.prepared(ready, sku=sku, problem=problem, device=HOST, preference=PlanPreference())
    with pytest.raises(ZeroDivisionError, match="ours") as caught:
        CALLS[how](plan)
    assert caught.value.__notes__ == [f"raised in the kernel {sku.id}"]


def test_a_command_says_on_standard_error_what_is_set_aside(install, capsys):
    install("bad_plugin", "raise RuntimeError('boom')", kernels="records")
    assert main(["show", "fill", "--json"]) == 0
    captured = capsys.readouterr()
    assert "bad_plugin" not in captured.out
    assert "plug-in bad_plugin of bad_plugin 1.0 (skuda.kernels) is set aside: RuntimeError: boom" in captured.err
