"""Real PyCUDA and real cuda-bindings over a stub driver: contexts, threads, devices, streams, exit, what is launched.

Every test is a process of its own, since what happens at exit is part of it. The stub writes down every driver call.
"""

from __future__ import annotations

import importlib.util
import shutil
import struct
import textwrap
from typing import NamedTuple

import pytest
from stub_driver.build import Told, build, run_over_stub
from support import sampled
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
import ctypes, threading
import numpy as np
from toykernels.scaled import *
from skuda.dispatch.cuda.driver import driver

d = Dispatcher(Registry(ops(), origin="toy"))
prefer = PlanPreference(backend={backend!r})
ONE = 0x1000000000000000                         # to be added to an address for device 1


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

    @classmethod
    def of(cls, thread, detail):
        entry, device, grid, block, shared, stream, parameters = detail.split()
        return cls(thread, entry, int(device), grid, block, int(shared), int(stream), bytes.fromhex(parameters))


class Process(Told):
    """What a process said, and what the stub wrote down."""

    @property
    def launches(self):
        return [Launched.of(thread, detail) for thread, name, detail in self.calls if name == "cuLaunchKernel"]

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
    return build(tmp_path_factory.mktemp("stub"))


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

    def start(code, backend="pycuda", **environment):
        script = PREAMBLE.format(backend=backend) + textwrap.dedent(code)
        report = Process(*run_over_stub(script, stub, tmp_path, **{"SKUDA_CACHE_DIR": str(cache)} | environment))
        assert not report.error, report.error
        return report

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
report["child"] = os.waitpid(child, 0)[1]
mark("back")
p.run(**given)
bound()
"""


@every_backend
def test_a_forked_child_is_refused_without_asking_the_driver(run, backend):
    report = run(FORKED, backend)
    assert report.values["child"] == 0
    assert report.between("forked", "back") == []
    assert len(report.launches) == 3


@needs_bindings
def test_an_interrupt_leaves_no_context_pushed(run):
    report = run(
        """
        from interrupts import bytecodes, interrupted

        first, second = driver().primary_context(0), driver().primary_context(1)
        driver().call("cuCtxSetCurrent", ctypes.c_void_p(first))


        def work():
            with driver().using(second):
                assert driver().current() == second


        ours = ("/cuda/driver.py", "/contextlib.py")
        report["points"] = bytecodes(work, *ours)
        report["wrong"] = []
        for at in range(1, report["points"] + 1):
            interrupted(work, at, *ours)
            if driver().current() != first:
                report["wrong"].append(at)
                driver().call("cuCtxSetCurrent", ctypes.c_void_p(first))
        """,
        "cuda_core",
        SKUDA_STUB_DEVICES="2",
    )
    assert report.values["points"] > 100
    assert report.values["wrong"] == []


@every_backend
def test_what_reaches_the_driver(run, backend):
    """PyCUDA aborts a process that leaves a context pushed; the stub counts."""
    report = run(
        """
        p, given = plan(), arrays()
        report["same"] = p.run(**given) is given["y"]
        mark("ran")
        p.run(**given)
        mark("again")
        bound = p.bind(**given)
        mark("bound")
        bound()
        mark("called")
        strided = arrays() | {"x": FakeArray((4, 8), address=X, strides=(12, 1)), "scale": 0.25}
        p.run(**strided, stream=0)
        p.bind(**strided)()
        for numel in (8, 16, MUCH):
            last = plan(problem=ScaledDescriptor(numel=numel))
        last.run(**arrays(shape=(MUCH,)))
        report["current"] = driver().current() is not None
        mark("end")
        """,
        backend,
    )
    assert report.values == {"same": True, "current": True}, "with one card a thread keeps its context"
    assert report.between("ran", "again") == report.between("bound", "called") == ["cuLaunchKernel"]
    *launches, much = report.launches
    strided = expected(0.25, rows=4, columns=8, leading=(12, 8))
    assert [launch.parameters for launch in launches] == [expected()] * 3 + [strided] * 2
    for launch in launches:
        assert launch[1:7] == ("scaled", 0, "32,1,1", "256,1,1", 0, 0)
    assert much.shared == 100_000
    # 8: CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert ("cuFuncSetAttribute", "scaled 8 100000") in {call[1:] for call in report.calls}
    loads = 2 if backend == "pycuda" and BINDINGS else 1  # a second one serves foreign streams
    assert report.count("cuModuleLoadData") == loads, "all plans of one kernel share one module"
    assert report.count("cuModuleUnload") == 0
    assert report.count("cuCtxPushCurrent") == report.count("cuCtxPopCurrent")
    assert report.count("cuCtxSetCurrent") == 1
    assert report.calls[-1][1] == "cuStreamSynchronize", "nothing is asked of a driver that may be gone"


@pytest.mark.skipif(not BACKENDS, reason="neither PyCUDA nor cuda-bindings is installed")
def test_looking_around_makes_no_context(run):
    report = run(
        """
        report["status"] = {name: status.model_dump() for name, status in d.status.items()}
        report["devices"] = [device.model_dump(mode="json") for device in d.devices]
        d.explain(ScaledDescriptor(numel=32))
        """
    )
    for name in BACKENDS:
        assert report.values["status"][name]["available"], report.values["status"]
        assert "driver for CUDA 13.0" in report.values["status"][name]["detail"]
        assert ("only kernels from the cache" in report.values["status"]["pycuda"]["detail"]) or not PYCUDA
    gpu = report.values["devices"][0]
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
    assert not [name for _, name, _ in report.calls if name.startswith(("cuDevicePrimaryCtxRetain", "cuCtx"))]


@every_backend
def test_threads_come_and_go_and_their_plans_serve_others_and_exit(run, backend):
    report = run(
        """
        def one(number, made=None):
            for _ in range(2):
                (made or plan()).run(**arrays() | {"scale": 1.0 + number})

        def started(number, *made):
            thread = threading.Thread(target=one, args=(number, *made), daemon=number % 2 == 0)
            thread.start()
            return thread

        started(0).join()
        for thread in [started(number, plan()) for number in range(1, 11)]:
            thread.join()
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        made = []
        thread = threading.Thread(target=lambda: made.append(plan()))
        thread.start()
        thread.join()
        one(11, *made)
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
    assert sorted(launch.parameters for launch in report.launches) == sorted(
        expected(1.0 + number) for number in range(12) for _ in range(2)
    )
    assert len({launch.thread for launch in report.launches}) >= 2
    assert report.calls[-1][1] == "cuStreamSynchronize", "nothing is asked of a driver that may be gone"


@every_backend
@pytest.mark.parametrize("lenient", sampled(["0", "1"]))
def test_two_cards_in_one_thread_and_its_current_one_stays(run, backend, lenient):
    report = run(
        """
        first, second = plan(0), plan(1)
        report["none"] = driver().current()
        first.run(**arrays(0))
        second.run(**arrays(1))
        report["still none"] = driver().current()
        other = driver().primary_context(1)
        driver().call("cuCtxSetCurrent", ctypes.c_void_p(other))
        for _ in range(2):
            first.run(**arrays(0))
            second.run(**arrays(1))
            bound = first.bind(**arrays(0))
            bound()
        report["kept"] = driver().current() == other
        try:
            first.run(**arrays(1))
        except InvalidProblem as error:
            report["error"] = error.field + ": " + error.had
        """,
        backend,
        SKUDA_STUB_DEVICES="2",
        SKUDA_STUB_LENIENT=lenient,
    )
    assert (report.values["none"], report.values["still none"], report.values["kept"]) == (None, None, True)
    assert [launch.device for launch in report.launches] == [0, 1] + [0, 1, 0] * 2
    for launch in report.launches:
        assert launch.parameters == expected(device=launch.device)
    assert report.values["error"] == "x: an array on cuda:1"


@needs_pycuda
def test_beside_a_context_of_the_users_own(run):
    """As `pycuda.autoinit` makes it: ours must neither take its place nor be taken for it."""
    report = run(
        """
        import pycuda.autoinit
        import pycuda.driver
        own = driver().current()
        p = plan()
        p.run(**arrays())
        p.run(**arrays())
        report["kept"] = driver().current() == own and pycuda.driver.Context.get_current() == pycuda.autoinit.context
        pycuda.driver.mem_alloc(64).free()
        """
    )
    assert report.values["kept"]
    assert len(report.launches) == 2


@needs_pycuda
@pytest.mark.parametrize("pushed", [False, True])
def test_arrays_of_pycuda_in_and_out(run, pushed):
    report = run(
        f"""
        import pycuda.driver, pycuda.gpuarray
        context = pycuda.driver.Device(0).retain_primary_context() if pycuda.driver.init() is None else None
        context.push()
        x = pycuda.gpuarray.to_gpu(np.arange(32, dtype=np.float32).reshape(4, 8))
        {"pass" if pushed else "context.pop()"}
        y = plan().run(x=x, scale=0.5)
        again = plan().run(x=x, scale=0.5)
        report["kind"] = [type(y).__name__, list(y.shape), str(y.dtype), *(int(a.gpudata) for a in (x, y, again))]
        summed = d.select(SummedDescriptor(n=32), prefer).run(x=x.reshape(32))
        report["summed"] = list(summed.shape)
        {"" if pushed else "context.push()"}
        del x, y, again, summed
        context.pop()
        """
    )
    kind, shape, dtype, x, y, again = report.values["kind"]
    assert (kind, shape, dtype) == ("GPUArray", [4, 8], "float32")
    assert report.values["summed"] == [1]
    for launch, address in zip(report.launches, (y, again), strict=False):
        assert struct.unpack_from("@QqQifQ", launch.parameters)[::5] == (x, address)


@needs_pycuda
def test_streams_of_pycuda_are_launched_on_by_pycuda(run):
    report = run(
        """
        import pycuda.driver
        p = plan()
        context = pycuda.driver.Device(0).retain_primary_context()
        context.push()
        stream = pycuda.driver.Stream()
        report["handle"] = stream.handle
        p.run(**arrays(), stream=stream)
        p.bind(**arrays(), stream=stream)()
        del stream
        context.pop()
        """
    )
    assert [launch.stream for launch in report.launches] == [report.values["handle"]] * 2


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
    report = run(
        FOREIGN
        + """
        p = plan()
        for stream in streams:
            for _ in range(2):
                p.run(**owned if stream is None else given, stream=stream)
        p.bind(**given, stream=78)()
        report["notes"] = [p.notes, d.explain(ScaledDescriptor(numel=32), prefer).notes]
        """
    )
    handles = [71, 71, 72, 72, 73, 73, 74, 74, 75, 75, 78]
    assert [(launch.stream, launch.parameters) for launch in report.launches] == [(h, expected()) for h in handles]
    for notes in report.values["notes"]:
        assert any("cuda_core" in note and "streams of other libraries" in note for note in notes)


@every_backend
@pytest.mark.parametrize("bindings", [True, False])
def test_steps_share_scratch_and_overlap_where_the_driver_allows_it(run, backend, bindings):
    if not bindings and backend != "pycuda":
        pytest.skip("there is no such backend without cuda-bindings")
    report = run(
        f"""
        if not {bindings}:
            sys.modules["cuda"] = None
        p = plan(problem=SummedDescriptor(n=32))
        given = {{"x": FakeArray((32,), address=X), "y": FakeArray((1,), address=Y)}}
        mark("planned")
        for _ in range(2):
            p.run(**given)
        mark("done")
        p.bind(**given)()
        """,
        backend,
    )
    assert [launch.entry for launch in report.launches] == ["partial_sums", "total"] * 3
    (scratch,) = {launch.parameters[8:16] for launch in report.launches[::2]}
    assert {launch.parameters[:8] for launch in report.launches[1::2]} == {scratch}
    assert "cuMemAlloc_v2" not in report.between("planned", "done")
    assert report.count("cuStreamSynchronize") == 3, "only the marks, and the zeros in front of the scratch"
    assert report.count("cuLaunchKernelEx") == (3 if bindings and BINDINGS else 0)


@needs_pycuda
def test_foreign_streams_are_refused_where_cuda_core_is_absent(run):
    report = run(
        FOREIGN
        + """
        sys.modules["cuda"] = None
        p = plan()
        p.run(**given)
        p.run(**given)
        report["notes"] = p.notes
        for stream in streams:
            mine = owned if stream is None else given
            for call in (lambda: p.run(**mine, stream=stream), p.bind(**mine, stream=stream)):
                try:
                    call()
                except InvalidProblem as error:
                    report.setdefault("errors", []).append(str(error))
        """
    )
    assert len(report.launches) == 2
    errors = report.values["errors"]
    assert len(errors) == 10
    for error, handle in zip(errors, (h for h in range(71, 76) for _ in range(2)), strict=True):
        assert "scaled: stream" in error
        assert f"a stream of another library ({handle:#x})" in error
        assert "pip install 'skuda[cuda13]'" in error
    assert "streams of other libraries are refused: cuda-bindings is not installed" in report.values["notes"]


@every_backend
@pytest.mark.parametrize(
    ("fail", "problem", "words"),
    sampled(
        [
            pytest.param("cuModuleLoadDataEx:209", "ScaledDescriptor(numel=32)", "loading unary_elementwise.scaled"),
            pytest.param("cuModuleGetFunction:500", "ScaledDescriptor(numel=32)", "cuModuleGetFunction|stub error 500"),
            pytest.param("cuLaunchKernel:700", "ScaledDescriptor(numel=32)", "launching scaled"),
            pytest.param("cuMemAlloc_v2:2", "SummedDescriptor(n=32)", "out of memory"),
            pytest.param("cuStreamCreate:2", "SummedDescriptor(n=32)", "cuStreamCreate.*out of memory"),
            pytest.param("cuDevicePrimaryCtxRetain:101", "ScaledDescriptor(numel=32)", "invalid device"),
        ]
    ),
)
def test_what_the_driver_refuses_is_reported_as_an_error_of_ours(run, backend, fail, problem, words):
    report = run(
        f"""
        try:
            plan(problem={problem}).run(**arrays())
        except DriverError as error:
            report["error"] = str(error)
        """,
        backend,
        SKUDA_STUB_FAIL=fail,
    )
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(report.values["error"])


@pytest.mark.skipif(not BACKENDS, reason="neither PyCUDA nor cuda-bindings is installed")
@pytest.mark.parametrize(
    ("environment", "detail"),
    sampled(
        [
            pytest.param({"SKUDA_STUB_FAIL": "cuInit:100"}, "no CUDA device"),
            pytest.param({"SKUDA_STUB_FAIL": "cuInit:803"}, "older than its kernel module"),
            pytest.param({"SKUDA_STUB_DEVICES": "0"}, "sees no GPU"),
            pytest.param({"LD_LIBRARY_PATH": ""}, "libcuda.so.1"),
            pytest.param({"SKUDA_CACHE_DIR": "/nonexistent"}, "no compiler"),
        ],
        2,
    ),
)
def test_a_status_says_what_is_missing_and_what_to_do(run, environment, detail):
    report = run(
        """
        sys.modules["cuda.bindings.nvrtc"] = None
        report["status"] = {name: status.model_dump() for name, status in d.status.items()}
        report["devices"] = [device.name for device in d.devices]
        """,
        **environment,
    )
    for name in BACKENDS:
        status = report.values["status"][name]
        assert not status["available"]
        assert detail in status["detail"]
        assert status["remedy"]
    assert report.values["devices"] == ["CPU"]
    assert report.values["status"]["numpy"]["available"]


@every_backend
def test_nothing_is_prepared_while_a_stream_is_captured(run, backend):
    report = run(
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
            report["error"] = str(error)
        mark("refused")
        current[0] = 0
        plan().run(**arrays(), stream=0)
        """,
        backend,
        SKUDA_STUB_CAPTURING="5",
    )
    assert "captured" in report.values["error"]
    before = [name for _, name, _ in report.calls[: [c[1] for c in report.calls].index("cuStreamSynchronize")]]
    assert not [name for name in before if name.startswith(("cuModule", "cuMem"))]
    assert len(report.launches) == 1


@every_backend
def test_memory_may_be_freed_while_a_stream_is_captured(run, backend):
    """The last plan that uses a block may be collected at any time."""
    report = run(
        """
        plan().run(**arrays())
        from skuda.dispatch.cuda.driver import driver as its_driver
        found, address = its_driver(), ctypes.c_uint64()
        with found.using(found.primary_context(0)):
            found.allocate(address, 8)
            mark("allocated")
            found.free(address.value)
            mark("freed")
        """,
        backend,
    )
    calls = [name for name in report.between("allocated", "freed") if name.startswith(("cuThread", "cuMem"))]
    assert calls == ["cuThreadExchangeStreamCaptureMode", "cuMemFree_v2", "cuThreadExchangeStreamCaptureMode"]


@every_backend
def test_another_size_of_a_loaded_kernel_reads_nothing(run, backend):
    report = run(
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
    assert set(report.between("loaded", "planned")) == {"cuCtxGetCurrent"}
    assert len(report.launches) == 2


@needs_bindings
def test_the_shared_memory_of_a_function_only_rises(run):
    report = run(
        """
        from skuda.kernels.launch import Step

        plan()
        (kernel,) = d.backends["cuda_core"]._kernels.values()
        for shared in (1 << 16, 1 << 17, 1 << 16, 1 << 17, 1 << 10):
            kernel.module.function(Step("scaled", (1, 1, 1), (1, 1, 1), (), shared=shared))
        """,
        "cuda_core",
    )
    set_to = [int(detail.split()[-1]) for _, name, detail in report.calls if name == "cuFuncSetAttribute"]
    assert set_to == [1 << 16, 1 << 17]
