"""Real PyCUDA and real cuda-bindings over a stub driver: contexts, threads, devices, streams, exit, what is launched.

Every test is a process of its own, since what happens at exit is part of it. The stub writes down every driver call.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import struct
import subprocess
import sys
import textwrap
from typing import NamedTuple

import pytest
from paths import HELPERS
from stub_driver.build import build
from toykernels import scaled as toy

from skuda.dispatch import device_named
from skuda.dispatch.backends.cuda_core import CudaCoreBackend
from skuda.dispatch.backends.pycuda import PycudaBackend
from skuda.dispatch.compile.cache import CubinCache
from skuda.dispatch.compile.compilers import find_nvcc, find_nvrtc

PYCUDA = importlib.util.find_spec("pycuda") is not None
BINDINGS = importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.bindings") is not None
BACKENDS = [name for name, here in (("pycuda", PYCUDA), ("cuda_core", BINDINGS)) if here]

pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the stub driver with"),
    pytest.mark.skipif(shutil.which("nm") is None, reason="no nm to ask PyCUDA what it imports"),
]
needs_pycuda = pytest.mark.skipif(not PYCUDA, reason="PyCUDA is not installed (an sdist that needs cuda.h)")
needs_bindings = pytest.mark.skipif(not BINDINGS, reason="cuda-bindings are not installed")
every_backend = pytest.mark.parametrize(
    "backend",
    [pytest.param("pycuda", marks=needs_pycuda), pytest.param("cuda_core", marks=needs_bindings)],
)

PREAMBLE = """
import ctypes, json, sys, threading
sys.path.insert(0, {here!r})
import numpy as np
from fakes import FakeArray
from toykernels.scaled import *
from skuda.dispatch import Dispatcher, PlanPreference
from skuda.dispatch.cuda.driver import driver
from skuda.registry import *

told = {{}}
d = Dispatcher(Registry(ops(), origin="toy"))
prefer = PlanPreference(backend={backend!r})
X, Y = 0x1000000000010000, 0x1000000000020000    # what the stub takes for addresses on device 0
ONE = 0x1000000000000000                         # to be added for device 1


def arrays(device=0, shape=(4, 8)):
    x, y = (FakeArray(shape, address=a + device * ONE, ordinal=device) for a in (X, Y))
    return {{"x": x, "scale": 0.5, "y": y}}


def plan(device=0, problem=ScaledDescriptor(numel=32)):
    return d.select(problem, prefer, d.devices[device])


def mark(name):
    driver().synchronize(sum(map(ord, name)))
"""


class Launched(NamedTuple):
    thread: int
    entry: str
    device: int
    grid: str
    block: str
    shared: int
    stream: int
    parameters: bytes


class Told(NamedTuple):
    """What a process said, and what the stub wrote down."""

    values: dict
    calls: list
    error: str

    @property
    def launches(self):
        found = []
        for thread, name, detail in self.calls:
            if name == "cuLaunchKernel":
                entry, device, grid, block, shared, stream, parameters = detail.split()
                found.append(
                    Launched(
                        thread, entry, int(device), grid, block, int(shared), int(stream), bytes.fromhex(parameters)
                    )
                )
        return found

    def count(self, name):
        return sum(call[1].startswith(name) for call in self.calls)

    def between(self, first, last):
        """Return the names of the calls between two marks."""
        at = [
            next(i for i, c in enumerate(self.calls) if c[1:] == ("cuStreamSynchronize", str(sum(map(ord, m)))))
            for m in (first, last)
        ]
        return [name for _, name, _ in self.calls[at[0] + 1 : at[1]]]


@pytest.fixture(scope="session")
def stub(tmp_path_factory):
    return build(tmp_path_factory.mktemp("stub")).parent


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """A cubin cache as it is shipped to machines without a compiler."""
    folder = tmp_path_factory.mktemp("cubins")
    compiler = find_nvrtc() or find_nvcc()
    if compiler is None:
        pytest.skip("neither NVRTC nor nvcc is here to compile the toy kernels with")
    for kind in (PycudaBackend, CudaCoreBackend):
        backend = kind(CubinCache(folder))
        backend.compiler = lambda: compiler
        for problem in (toy.ScaledDescriptor(numel=32), toy.SummedDescriptor(n=32)):
            sku = toy.sku(problem.op, kind.spec.name)
            device = device_named("h200")
            backend.cubin(sku, backend.launch_of(sku, problem, device), device)
    return folder


@pytest.fixture
def run(stub, cache, tmp_path):
    """Return a function that runs code in a process over the stub, and demands exit code 0 and silence."""

    def start(code, backend="pycuda", *, quiet=True, **environment):
        log = tmp_path / "log"
        log.unlink(missing_ok=True)
        fixed = {
            "LD_LIBRARY_PATH": str(stub),
            "SKUDA_CACHE_DIR": str(cache),
            "SKUDA_STUB_LOG": str(log),
            "SKUDA_PLUGINS": "0",
            "PATH": "/nonexistent",  # no compiler, unless a test says otherwise
            "PYTHONWARNINGS": "error",
        }
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SKUDA_", "CUDA_", "PYTHONWARN"))}
        script = PREAMBLE.format(here=str(HELPERS), backend=backend) + textwrap.dedent(code)
        script += "\nprint(json.dumps(told))\n"
        command, settings = [sys.executable, "-c", script], clean | fixed | environment
        done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert not quiet or not done.stderr, done.stderr
        calls = [tuple(line.split(" ", 2)) for line in log.read_text().splitlines()] if log.exists() else []
        values = json.loads(done.stdout.splitlines()[-1])
        return Told(values, [(int(thread), name, detail.strip()) for thread, name, detail in calls], done.stderr)

    return start


def expected(scale=0.5, device=0, rows=1, columns=32, leading=(32, 32)):
    one = 0x1000000000000000 * (1 + device)
    head = struct.pack("@QqQifQq", one + 0x10000, leading[0], 0, 0, scale, one + 0x20000, leading[1])
    return head + struct.pack("@qq", rows, columns)


FORKED = """
import os

p, given = plan(), arrays()
bound = p.bind(**given)
p.run(**given)


def refused(call):
    try:
        call()
    except SkudaError as error:
        return "before this process was forked" in str(error)
    return False


mark("forked")
child = os.fork()
if child == 0:
    asked = (lambda: p.run(**given), bound, lambda: plan(problem=SummedDescriptor(n=32)), driver)
    right = all(map(refused, asked)) and not Dispatcher(d.registry).status[prefer.backend].available
    os._exit(0 if right else 1)
told["child"] = os.waitpid(child, 0)[1]
mark("back")
p.run(**given)
bound()
"""


@every_backend
def test_a_forked_child_is_refused_without_asking_the_driver(run, backend):
    told = run(FORKED, backend)
    assert told.values["child"] == 0
    assert told.between("forked", "back") == []
    assert len(told.launches) == 3


@needs_bindings
def test_an_interrupt_leaves_no_context_pushed(run):
    told = run(
        """
        from interrupts import bytecodes, interrupted

        first, second = driver().primary_context(0), driver().primary_context(1)
        driver().call("cuCtxSetCurrent", ctypes.c_void_p(first))


        def work():
            with driver().using(second):
                assert driver().current() == second


        ours = ("/cuda/driver.py", "/contextlib.py")
        told["points"] = bytecodes(work, *ours)
        told["wrong"] = []
        for at in range(1, told["points"] + 1):
            interrupted(work, at, *ours)
            if driver().current() != first:
                told["wrong"].append(at)
                driver().call("cuCtxSetCurrent", ctypes.c_void_p(first))
        """,
        "cuda_core",
        SKUDA_STUB_DEVICES="2",
    )
    assert told.values["points"] > 100
    assert told.values["wrong"] == []


# --- what is launched ------------------------------------------------------------------------------------------------


@every_backend
def test_the_bytes_that_reach_the_driver(run, backend):
    told = run(
        """
        p = plan()
        p.run(**arrays())
        given = arrays() | {"x": FakeArray((4, 8), address=X, strides=(12, 1)), "scale": 0.25}
        p.run(**given, stream=0)
        told["same"] = p.run(**given) is given["y"]
        bound = p.bind(**given)
        bound()
        """,
        backend,
    )
    assert told.values["same"]
    strided = expected(0.25, rows=4, columns=8, leading=(12, 8))
    assert [launch.parameters for launch in told.launches] == [expected(), strided, strided, strided]
    for launch in told.launches:
        assert launch[1:7] == ("scaled", 0, "32,1,1", "256,1,1", 0, 0)


@every_backend
def test_a_warm_run_calls_the_driver_once(run, backend):
    told = run(
        """
        p, given = plan(), arrays()
        bound = p.bind(**given)
        p.run(**given)
        mark("first")
        p.run(**given)
        mark("second")
        bound()
        mark("third")
        """,
        backend,
    )
    assert told.between("first", "second") == ["cuLaunchKernel"]
    assert told.between("second", "third") == ["cuLaunchKernel"]


@every_backend
def test_steps_share_scratch_and_follow_each_other(run, backend):
    told = run(
        """
        p = plan(problem=SummedDescriptor(n=32))
        given = {"x": FakeArray((32,), address=X), "y": FakeArray((1,), address=Y)}
        mark("planned")
        p.run(**given)
        p.run(**given)
        mark("done")
        """,
        backend,
    )
    assert [launch.entry for launch in told.launches] == ["partial_sums", "total"] * 2
    (scratch,) = {launch.parameters[8:16] for launch in told.launches[::2]}
    assert {launch.parameters[:8] for launch in told.launches[1::2]} == {scratch}
    assert "cuMemAlloc_v2" not in told.between("planned", "done")
    assert told.count("cuStreamSynchronize") == 3, "only the marks, and the zeros in front of the scratch"


@every_backend
def test_much_shared_memory_is_asked_for(run, backend):
    told = run("plan(problem=ScaledDescriptor(numel=MUCH)).run(**arrays(shape=(MUCH,)))", backend)
    assert told.launches[0].shared == 100_000
    # 8: CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert ("cuFuncSetAttribute", "scaled 8 100000") in {call[1:] for call in told.calls}


@every_backend
def test_plans_of_one_kernel_share_one_module(run, backend):
    told = run(
        """
        for numel in (8, 16, 32):
            plan(problem=ScaledDescriptor(numel=numel)).run(**arrays(shape=(numel,)))
        """,
        backend,
    )
    loads = 2 if backend == "pycuda" and BINDINGS else 1  # a second one serves foreign streams
    assert told.count("cuModuleLoadData") == loads
    assert told.count("cuModuleUnload") == 0


# --- contexts --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not BACKENDS, reason="neither PyCUDA nor cuda-bindings is installed")
def test_looking_around_makes_no_context(run):
    told = run(
        """
        told["status"] = {name: status.model_dump() for name, status in d.status.items()}
        told["devices"] = [device.model_dump(mode="json") for device in d.devices]
        d.explain(ScaledDescriptor(numel=32))
        """
    )
    for name in BACKENDS:
        assert told.values["status"][name]["available"], told.values["status"]
        assert "driver for CUDA 13.0" in told.values["status"][name]["detail"]
        assert ("only kernels from the cache" in told.values["status"]["pycuda"]["detail"]) or not PYCUDA
    gpu = told.values["devices"][0]
    assert gpu == {
        "name": "Stub 0",
        "processor": "cuda",
        "ordinal": 0,
        "compute_capability": [9, 0],
        "sm_count": 132,
        "shared_memory": 227 << 10,
        "l2_cache": 60 << 20,
        "memory": 141 << 30,
        "memory_bandwidth": 2 * 3_201_000_000 * 6144 // 8,
    }
    assert not [name for _, name, _ in told.calls if name.startswith(("cuDevicePrimaryCtxRetain", "cuCtx"))]


@every_backend
def test_no_context_is_left_pushed(run, backend):
    """PyCUDA aborts the process for one; the stub counts."""
    told = run(
        """
        plan().run(**arrays())
        told["current"] = driver().current() is not None
        mark("end")
        """,
        backend,
    )
    assert told.calls[-1][1] == "cuStreamSynchronize", "nothing is asked of a driver that may be gone"
    assert told.values["current"], "with one card a thread keeps the context that it had none before"
    assert told.count("cuCtxPushCurrent") == told.count("cuCtxPopCurrent")
    assert told.count("cuCtxSetCurrent") == 1


@every_backend
@pytest.mark.parametrize("daemon", [False, True])
def test_threads_that_come_and_go(run, backend, daemon):
    told = run(
        f"""
        def one(number, made):
            made.run(**arrays() | {{"scale": 1.0 + number}})
            made.run(**arrays() | {{"scale": 1.0 + number}})

        def maker():
            one(0, plan())

        for number in range(3):
            target, args = (one, (number, plan())) if number else (maker, ())
            thread = threading.Thread(target=target, args=args)
            thread.start()
            thread.join()
        together = [threading.Thread(target=one, args=(number, plan()), daemon={daemon}) for number in range(3, 11)]
        for thread in together:
            thread.start()
        for thread in together:
            thread.join()
        late = threading.Thread(target=threading.Event().wait, daemon=True)
        if {daemon}:
            late.start()
        """,
        backend,
    )
    assert sorted(launch.parameters for launch in told.launches) == sorted(
        expected(1.0 + number) for number in range(11) for _ in range(2)
    )
    assert len({launch.thread for launch in told.launches}) >= 2


@every_backend
def test_a_plan_made_in_a_thread_that_ended_serves_others_and_exit(run, backend):
    told = run(
        """
        made = []
        thread = threading.Thread(target=lambda: made.append(plan()))
        thread.start()
        thread.join()
        made[0].run(**arrays())
        mark("end")
        # As the end of the interpreter may do it, in whatever order.
        import gc
        from skuda.dispatch.backends import cuda
        from skuda.dispatch.cuda import pycuda_context
        del d
        made.clear()
        cuda._modules.clear()
        pycuda_context._contexts.clear()
        gc.collect()
        """,
        backend,
    )
    assert len(told.launches) == 1
    assert told.calls[-1][1] == "cuStreamSynchronize", "nothing is asked of a driver that may be gone"


@every_backend
def test_an_exception_on_the_way_out_is_the_only_trouble(run, backend):
    told = run(
        """
        import atexit
        atexit.register(lambda: plan().run(**arrays()))
        try:
            plan().run(**arrays() | {"scale": 0.0})
        except InvalidProblem as error:
            told["error"] = str(error)
        """,
        backend,
    )
    assert "not zero" in told.values["error"]
    assert len(told.launches) == 1


@every_backend
@pytest.mark.parametrize("lenient", ["0", "1"])
def test_two_cards_in_one_thread_and_its_current_one_stays(run, backend, lenient):
    told = run(
        """
        first, second = plan(0), plan(1)
        told["none"] = driver().current()
        first.run(**arrays(0))
        second.run(**arrays(1))
        told["still none"] = driver().current()
        other = driver().primary_context(1)
        driver().call("cuCtxSetCurrent", ctypes.c_void_p(other))
        for _ in range(2):
            first.run(**arrays(0))
            second.run(**arrays(1))
            bound = first.bind(**arrays(0))
            bound()
        told["kept"] = driver().current() == other
        try:
            first.run(**arrays(1))
        except InvalidProblem as error:
            told["error"] = error.field + ": " + error.had
        """,
        backend,
        SKUDA_STUB_DEVICES="2",
        SKUDA_STUB_LENIENT=lenient,
    )
    assert (told.values["none"], told.values["still none"], told.values["kept"]) == (None, None, True)
    assert [launch.device for launch in told.launches] == [0, 1] + [0, 1, 0] * 2
    for launch in told.launches:
        assert launch.parameters == expected(device=launch.device)
    assert told.values["error"] == "x: an array on cuda:1"


@every_backend
def test_arrays_say_on_which_card_a_run_is(run, backend):
    told = run(
        """
        for device in (1, 0, 1):
            d.run(ScaledDescriptor(numel=32), preference=prefer, **arrays(device))
        """,
        backend,
        SKUDA_STUB_DEVICES="2",
    )
    assert [launch.device for launch in told.launches] == [1, 0, 1]


@needs_pycuda
def test_beside_a_context_of_the_users_own(run):
    """As `pycuda.autoinit` makes it: ours must neither take its place nor be taken for it."""
    told = run(
        """
        import pycuda.autoinit
        import pycuda.driver
        own = driver().current()
        p = plan()
        p.run(**arrays())
        p.run(**arrays())
        told["kept"] = driver().current() == own and pycuda.driver.Context.get_current() == pycuda.autoinit.context
        pycuda.driver.mem_alloc(64).free()
        """
    )
    assert told.values["kept"]
    assert len(told.launches) == 2


# --- arrays and streams of PyCUDA ------------------------------------------------------------------------------------


@needs_pycuda
@pytest.mark.parametrize("pushed", [False, True])
def test_arrays_of_pycuda_in_and_out(run, pushed):
    told = run(
        f"""
        import pycuda.driver, pycuda.gpuarray
        context = pycuda.driver.Device(0).retain_primary_context() if pycuda.driver.init() is None else None
        context.push()
        x = pycuda.gpuarray.to_gpu(np.arange(32, dtype=np.float32).reshape(4, 8))
        {"pass" if pushed else "context.pop()"}
        y = plan().run(x=x, scale=0.5)
        again = plan().run(x=x, scale=0.5)
        told["kind"] = [type(y).__name__, list(y.shape), str(y.dtype), *(int(a.gpudata) for a in (x, y, again))]
        summed = d.select(SummedDescriptor(n=32), prefer).run(x=x.reshape(32))
        told["summed"] = list(summed.shape)
        {"" if pushed else "context.push()"}
        del x, y, again, summed
        context.pop()
        """
    )
    kind, shape, dtype, x, y, again = told.values["kind"]
    assert (kind, shape, dtype) == ("GPUArray", [4, 8], "float32")
    assert told.values["summed"] == [1]
    for launch, address in zip(told.launches, (y, again), strict=False):
        assert struct.unpack_from("@QqQifQ", launch.parameters)[::5] == (x, address)


@needs_pycuda
def test_streams_of_pycuda_are_launched_on_by_pycuda(run):
    told = run(
        """
        import pycuda.driver
        p = plan()
        context = pycuda.driver.Device(0).retain_primary_context()
        context.push()
        stream = pycuda.driver.Stream()
        told["handle"] = stream.handle
        p.run(**arrays(), stream=stream)
        p.bind(**arrays(), stream=stream)()
        del stream
        context.pop()
        """
    )
    assert [launch.stream for launch in told.launches] == [told.values["handle"]] * 2


FOREIGN = """
        from types import SimpleNamespace
        # As torch, CuPy and others give them; for the last one the arrays themselves say where they are worked on.
        streams = [
            SimpleNamespace(cuda_stream=71, device_index=0),
            SimpleNamespace(ptr=72, device_id=0),
            SimpleNamespace(__cuda_stream__=lambda: (0, 73)),
            74,
            None,
        ]
        given = arrays()
        owned = {name: FakeArray((4, 8), address=at, stream=75) for name, at in (("x", X), ("y", Y))} | {"scale": 0.5}
"""


@needs_pycuda
@needs_bindings
def test_foreign_streams_are_served_by_cuda_core_visibly(run):
    told = run(
        FOREIGN
        + """
        p = plan()
        for stream in streams:
            for _ in range(2):
                p.run(**owned if stream is None else given, stream=stream)
        p.bind(**given, stream=78)()
        told["notes"] = p.notes
        told["explained"] = d.explain(ScaledDescriptor(numel=32), prefer).notes
        told["printed"] = str(d.explain(ScaledDescriptor(numel=32), prefer))
        """
    )
    handles = [71, 71, 72, 72, 73, 73, 74, 74, 75, 75, 78]
    assert [(launch.stream, launch.parameters) for launch in told.launches] == [(h, expected()) for h in handles]
    for notes in (told.values["notes"], told.values["explained"], [told.values["printed"]]):
        assert any("cuda_core" in note and "streams of other libraries" in note for note in notes)


@every_backend
@pytest.mark.parametrize("bindings", [True, False])
def test_a_step_that_may_overlap_does_so_where_the_driver_can_be_told(run, backend, bindings):
    if not bindings and backend != "pycuda":
        pytest.skip("there is no such backend without cuda-bindings")
    told = run(
        f"""
        if not {bindings}:
            sys.modules["cuda"] = None
        p = plan(problem=SummedDescriptor(n=32))
        given = {{"x": FakeArray((32,), address=X), "y": FakeArray((1,), address=Y)}}
        for _ in range(2):
            p.run(**given)
        p.bind(**given)()
        """,
        backend,
    )
    assert [launch.entry for launch in told.launches] == ["partial_sums", "total"] * 3
    assert told.count("cuLaunchKernelEx") == (3 if bindings and BINDINGS else 0)


@needs_pycuda
def test_foreign_streams_are_refused_where_cuda_core_is_absent(run):
    told = run(
        FOREIGN
        + """
        sys.modules["cuda"] = None
        p = plan()
        p.run(**given)
        p.run(**given)
        told["notes"] = p.notes
        told["explained"] = d.explain(ScaledDescriptor(numel=32), prefer).notes
        for stream in streams:
            mine = owned if stream is None else given
            for call in (lambda: p.run(**mine, stream=stream), p.bind(**mine, stream=stream)):
                try:
                    call()
                except InvalidProblem as error:
                    told.setdefault("errors", []).append(str(error))
        told["status"] = d.status["cuda_core"].model_dump()
        """
    )
    assert len(told.launches) == 2
    errors = told.values["errors"]
    assert len(errors) == 10
    for error, handle in zip(errors, (h for h in range(71, 76) for _ in range(2)), strict=True):
        assert "scaled: stream" in error
        assert f"a stream of another library ({handle:#x})" in error
        assert "pip install 'skuda[cuda13]'" in error
    for notes in (told.values["notes"], told.values["explained"]):
        assert "streams of other libraries are refused: cuda-bindings is not installed" in notes
    assert told.values["status"] == {
        "available": False,
        "detail": "cuda-bindings is not installed",
        "remedy": "pip install 'skuda[cuda13]'",
    }


# --- what may go wrong -----------------------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize(
    ("fail", "problem", "words"),
    [
        ("cuModuleLoadDataEx:209", "ScaledDescriptor(numel=32)", "loading unary_elementwise.scaled"),
        ("cuModuleGetFunction:500", "ScaledDescriptor(numel=32)", "cuModuleGetFunction|stub error 500"),
        ("cuLaunchKernel:700", "ScaledDescriptor(numel=32)", "launching scaled"),
        ("cuMemAlloc_v2:2", "SummedDescriptor(n=32)", "out of memory"),
        ("cuDevicePrimaryCtxRetain:101", "ScaledDescriptor(numel=32)", "invalid device"),
    ],
)
def test_what_the_driver_refuses_is_told_as_an_error_of_ours(run, backend, fail, problem, words):
    told = run(
        f"""
        try:
            plan(problem={problem}).run(**arrays())
        except DriverError as error:
            told["error"] = str(error)
        """,
        backend,
        SKUDA_STUB_FAIL=fail,
    )
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(told.values["error"])


@pytest.mark.skipif(not BACKENDS, reason="neither PyCUDA nor cuda-bindings is installed")
@pytest.mark.parametrize(
    ("environment", "detail"),
    [
        ({"SKUDA_STUB_FAIL": "cuInit:100"}, "no CUDA device"),
        ({"SKUDA_STUB_FAIL": "cuInit:803"}, "older than its kernel module"),
        ({"SKUDA_STUB_DEVICES": "0"}, "sees no GPU"),
        ({"LD_LIBRARY_PATH": ""}, "libcuda.so.1"),
        ({"SKUDA_CACHE_DIR": "/nonexistent"}, "no compiler"),
    ],
)
def test_a_status_says_what_is_missing_and_what_to_do(run, environment, detail):
    told = run(
        """
        sys.modules["cuda.bindings.nvrtc"] = None
        told["status"] = {name: status.model_dump() for name, status in d.status.items()}
        told["devices"] = [device.name for device in d.devices]
        """,
        **environment,
    )
    for name in BACKENDS:
        status = told.values["status"][name]
        assert not status["available"]
        assert detail in status["detail"]
        assert status["remedy"]
    assert told.values["devices"] == ["CPU"]
    assert told.values["status"]["numpy"]["available"]


@every_backend
def test_nothing_is_prepared_while_a_stream_is_captured(run, backend):
    told = run(
        """
        from types import SimpleNamespace
        current = [77]
        fake = SimpleNamespace(
            version=SimpleNamespace(cuda="13.0"),
            cuda=SimpleNamespace(is_initialized=lambda: True),
            _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda ordinal: current[0]),
            Tensor=type("Tensor", (), {}),
        )
        sys.modules["torch"] = fake
        try:
            plan()
        except NotPrepared as error:
            told["error"] = str(error)
        mark("refused")
        current[0] = 0
        plan().run(**arrays(), stream=0)
        """,
        backend,
        SKUDA_STUB_CAPTURING="5",
    )
    assert "captured" in told.values["error"]
    before = [name for _, name, _ in told.calls[: [c[1] for c in told.calls].index("cuStreamSynchronize")]]
    assert not [name for name in before if name.startswith(("cuModule", "cuMem"))]
    assert len(told.launches) == 1


@every_backend
def test_memory_may_be_freed_while_a_stream_is_captured(run, backend):
    """The last plan that uses a block may be collected at any time."""
    told = run(
        """
        plan().run(**arrays())
        from skuda.dispatch.cuda.driver import driver as its_driver
        found = its_driver()
        with found.using(found.primary_context(0)):
            address = found.allocate(8)
            mark("allocated")
            found.free(address)
            mark("freed")
        """,
        backend,
    )
    calls = [name for name in told.between("allocated", "freed") if name.startswith(("cuThread", "cuMem"))]
    assert calls == ["cuThreadExchangeStreamCaptureMode", "cuMemFree_v2", "cuThreadExchangeStreamCaptureMode"]


@needs_pycuda
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH")
def test_nvcc_on_the_path_compiles_what_is_not_cached(run, tmp_path):
    told = run(
        """
        told["status"] = d.status["pycuda"].detail
        plan().run(**arrays())
        """,
        PATH=os.environ["PATH"],
        SKUDA_CACHE_DIR=str(tmp_path / "fresh"),
    )
    assert f"nvcc {find_nvcc().version}" in told.values["status"]
    (entry,) = CubinCache(tmp_path / "fresh").survey()
    assert (entry.facts.backend, entry.facts.arch) == ("pycuda", "sm_90")
    assert len(told.launches) == 1


# --- another size of a loaded kernel ---------------------------------------------------------------------------------


@every_backend
def test_another_size_of_a_loaded_kernel_reads_nothing_and_asks_the_driver_for_nothing(run, backend):
    told = run(
        """
        from skuda.dispatch.backends import cuda
        from skuda.dispatch.compile import provider

        plan().run(**arrays())
        # Calling one would raise.
        provider.read_source = cuda.read_kernels = cuda.agreeing = cuda.packing = None
        d.backends[prefer.backend].cache.get = None
        mark("loaded")
        for rows in range(5, 105):
            other = plan(problem=ScaledDescriptor(numel=8 * rows))
        mark("planned")
        other.run(**arrays(shape=(rows, 8)))
        """,
        backend,
    )
    assert set(told.between("loaded", "planned")) == {"cuCtxGetCurrent"}
    assert len(told.launches) == 2


@every_backend
def test_ever_new_sizes_keep_a_bounded_number_of_objects(run, backend):
    told = run(
        """
        import gc
        from skuda.dispatch import dispatcher
        from skuda.dispatch.cuda.runner import CudaRunner
        from skuda.dispatch.cuda.scratch import Block

        dispatcher._MOST_PLANS = 32

        def kept(sizes):
            for n in sizes:
                x, y = (FakeArray(shape, address=a) for shape, a in (((n,), X), ((1,), Y)))
                plan(problem=SummedDescriptor(n=n)).run(x=x, y=y)
            gc.collect()
            found = gc.get_objects()
            return len(found), [sum(type(each) is kind for each in found) for kind in (CudaRunner, Block)]

        told["few"], _ = kept(range(1, 500))
        told["many"], (told["runners"], told["blocks"]) = kept(range(500, 2000))
        told["kernels"] = [len(kernel.packings) for kernel in d.backends[prefer.backend]._kernels.values()]
        """,
        backend,
    )
    assert told.values["runners"] == 32
    assert told.values["blocks"] == 1
    assert told.values["kernels"] == [2], "one for each of its steps, whatever the size"
    assert told.values["many"] - told.values["few"] < 500, "not one object for each of 1,500 sizes"


@needs_bindings
def test_the_shared_memory_of_a_function_only_rises(run):
    told = run(
        """
        from skuda.kernels.launch import Step

        plan()
        (kernel,) = d.backends["cuda_core"]._kernels.values()
        for shared in (1 << 16, 1 << 17, 1 << 16, 1 << 17, 1 << 10):
            kernel.module.function(Step("scaled", (1, 1, 1), (1, 1, 1), (), shared=shared))
        """,
        "cuda_core",
    )
    set_to = [int(detail.split()[-1]) for _, name, detail in told.calls if name == "cuFuncSetAttribute"]
    assert set_to == [1 << 16, 1 << 17]
