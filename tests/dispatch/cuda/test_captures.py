"""Scratch memory of runs inside captures of CUDA graphs: whose it is, how long, how much, and how many driver calls."""

from __future__ import annotations

import contextlib
import gc
import itertools
import shutil
import sys
import textwrap
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
from fakes import CONTEXT, DEVICE, FakeArray, FakeDriver, FakeEngine, FakeTorch
from stub_driver.build import build, run_over_stub
from support import fresh
from toykernels.scaled import SummedDescriptor, summed

from skuda.dispatch.cuda.runner import CudaRunner
from skuda.dispatch.cuda.scratch import Scratch
from skuda.kernels.launch import MOST_ZEROS, ZEROS, Pointer
from skuda.registry import DriverError

PIECES = 51 * 33
"""Captures of one model: each piece of it at each size."""
SIZE = 8 << 20
SLAB = 1 << 20
STREAM, SIDE = 0x51, 0x52
CALL = {"x": FakeArray((32,), address=0x10000), "y": FakeArray((1,), address=0x20000)}


@pytest.fixture
def torch(monkeypatch):
    made = FakeTorch(STREAM)
    monkeypatch.setitem(sys.modules, "torch", made)
    return made


@pytest.fixture
def driver():
    made = FakeDriver()
    made.stack.append(CONTEXT)
    return made


def scratch(driver, size=SIZE, *, zeros=True):
    buffers = (("partial", size),) if size else ()
    return Scratch(driver, (0, CONTEXT), (*buffers, (ZEROS, 8)) if zeros else buffers)


def captured(driver, plan, number, stream=STREAM):
    """Return the addresses of a plan for a run inside a capture, which then ends."""
    driver.capturing = {stream: number}
    found = plan.place(stream).addresses
    driver.capturing = {}
    return found


def apart(ranges):
    """Whether no two of these (start, size) overlap."""
    ordered = sorted(ranges)
    return all(start + size <= after for (start, size), (after, _) in itertools.pairwise(ordered))


def test_captures_of_torch_allocate_no_block_and_few_slabs_of_zeros(driver, torch):
    plans = [scratch(driver), scratch(driver, 1000, zeros=False), scratch(driver, 0)]
    planned = dict(driver.allocated)
    used = []
    for number in range(1, PIECES + 1):
        (start, zeros), (other,), (same,) = (captured(driver, plan, number) for plan in plans)
        assert same == zeros, "one for each capture and stream"
        assert {start, other} <= set(torch.sizes)
        used.append((zeros, MOST_ZEROS))
    slabs = {address: size for address, size in driver.allocated.items() if address not in planned}
    assert list(slabs.values()) == [SLAB] * -(-PIECES * MOST_ZEROS // SLAB)
    assert set(slabs) <= set(driver.cleared)
    assert apart(used)
    assert all(any(slab <= at < slab + SLAB for slab in slabs) for at, _ in used)
    assert torch.sizes == {1 << 40: SIZE}, "one run gives its memory to the next"
    assert driver.watched == list(range(1, PIECES + 1)), "one question to the driver for each capture"


def test_a_capture_of_torch_without_zeros_asks_the_driver_for_nothing(driver, torch):
    plan = scratch(driver, zeros=False)
    planned = dict(driver.allocated)
    assert captured(driver, plan, 7) == (1 << 40,)
    assert driver.allocated == planned
    assert driver.watched == []


def test_only_zeros_of_destroyed_graphs_are_used_again(driver, torch):
    rng, plan = fresh(), scratch(driver)
    planned, live = len(driver.allocated), {}
    for number in range(1, 3001):
        live[number] = captured(driver, plan, number)[1]
        assert apart((at, MOST_ZEROS) for at in live.values())
        for gone in rng.choice(list(live), size=len(live) - 300, replace=False) if len(live) > 400 else ():
            driver.destroyed.add(int(gone))
            del live[int(gone)]
    assert len(driver.allocated) - planned == 2
    assert driver.freed == []
    assert len(plan._pool._owned) < 700


@pytest.mark.parametrize("destroyed", [True, False])
@pytest.mark.parametrize("watches", [True, False])
def test_other_captures_have_a_block_until_their_graph_is_destroyed(driver, watches, destroyed):
    driver.watches = watches
    rng, plans = fresh(), [scratch(driver, size) for size in (SIZE, SIZE // 4, SIZE // 2)]
    planned, used = len(driver.kept), {}
    for number in range(1, 501):
        plan = plans[rng.integers(len(plans))]
        start, zeros = captured(driver, plan, number)
        assert zeros == start - MOST_ZEROS
        assert zeros in driver.cleared
        assert driver.kept[zeros] >= MOST_ZEROS + plan._size
        if destroyed:
            driver.destroyed.add(number)
        used[zeros] = driver.kept[zeros]
    assert len(driver.kept) - planned <= 1 if watches and destroyed else len(used) == len(driver.kept) - planned == 500
    for plan in plans:
        assert len(plan._held) == 1
        assert plan._places == {}, "a plan grows with no capture"


def test_a_block_of_a_live_capture_is_given_to_nobody(driver):
    rng, plan, larger = fresh(), scratch(driver, 1000), scratch(driver, 5000)
    live = {}
    for number in range(1, 400):
        one = (plan, larger)[rng.integers(2)]
        _, zeros = captured(driver, one, number)
        live[number] = zeros, MOST_ZEROS + one._size
        outside = [(each.place(0).addresses[1], MOST_ZEROS + each._size) for each in (plan, larger)]
        assert zeros not in {at for at, _ in outside}
        assert apart(live.values())
        assert {at for at, _ in live.values()} <= set(driver.kept)
        if rng.random() < 0.5:
            gone = int(rng.choice(list(live)))
            driver.destroyed.add(gone)
            del live[gone]
    # What still is in no graph was kept for the next capture at most.
    assert len(driver.kept) <= len(live) + 4


@pytest.mark.parametrize("of_torch", [True, False])
def test_streams_of_one_capture_share_nothing_and_runs_of_one_stream_do(driver, torch, of_torch):
    torch.captures = of_torch
    plan, other = scratch(driver), scratch(driver, 100)
    driver.capturing = {STREAM: 3, SIDE: 3}
    places = {}
    for stream in (STREAM, SIDE, STREAM, SIDE):
        torch.current = stream
        for one in (plan, other):
            place = one.place(stream)
            assert places.setdefault(stream, (place.lock, place.addresses[1])) == (place.lock, place.addresses[1])
            assert place.lock.acquire(blocking=False)
            place.lock.release()
    (lock, zeros), (side_lock, side_zeros) = places.values()
    assert lock is not side_lock
    assert apart([(zeros, MOST_ZEROS), (side_zeros, MOST_ZEROS)])
    assert driver.watched == [3]


def test_a_larger_block_leaves_the_earlier_one_to_its_graph(driver):
    small, large = scratch(driver, 1000), scratch(driver, SIZE)
    driver.capturing = {STREAM: 9}
    blocks = [plan.place(STREAM).addresses[1] for plan in (small, large, small, large)]
    assert len(set(blocks)) == 2
    assert blocks[1] == blocks[3]
    assert set(blocks) <= set(driver.kept)
    driver.destroyed.add(9)
    assert captured(driver, large, 10) == (blocks[1] + MOST_ZEROS, blocks[1])
    assert blocks[0] in driver.freed


@pytest.mark.parametrize(
    ("change", "torchs"),
    [
        ({}, True),
        ({"captures": False}, False),
        ({"current": SIDE}, False),
        ({"started": False}, False),
        ({"cuda": SimpleNamespace(is_initialized=lambda: True, device=contextlib.nullcontext, CUDAGraph=None)}, True),
    ],
    ids=["its own", "of another library", "of another stream", "before it uses CUDA", "an older torch"],
)
def test_memory_is_torchs_if_torch_captures_this_stream(driver, torch, change, torchs):
    for name, value in change.items():
        setattr(torch, name, value)
    plan = scratch(driver)
    start, _ = captured(driver, plan, 1)
    assert (start in torch.sizes) is torchs
    assert torch.sizes or driver.kept[start - MOST_ZEROS] == MOST_ZEROS + SIZE


def test_a_block_of_a_destroyed_graph_serves_runs_outside_of_captures(driver):
    plan = scratch(driver)
    zeros = [captured(driver, plan, number)[1] for number in (1, 2)]
    plan.place(0)
    driver.destroyed |= {1, 2}
    assert plan.place(STREAM).addresses[1] == zeros[0]
    assert zeros[1] in driver.freed
    assert len(driver.allocated) == 3


def test_runs_outside_of_captures_do_not_ask_torch(driver, torch):
    plan = scratch(driver)
    torch.cuda = torch._C = None
    for _ in range(3):
        assert plan.place(STREAM) is plan.place(STREAM)
        assert plan.place(STREAM).held is None
    assert len(driver.allocated) == 1


def test_a_capture_that_has_become_invalid_takes_nothing(driver):
    plan = scratch(driver)
    driver.graph_of = lambda stream: None
    assert captured(driver, plan, 4) == plan.place(STREAM).addresses
    assert driver.watched == []


class Seeing(FakeEngine):
    """Writes down how many tensors of torch are alive at each launch."""

    def __init__(self, launch, driver, torch):
        super().__init__(launch, driver)
        self.torch, self.alive = torch, []

    def launch(self, step, parameters, handle, stream):
        self.alive.append({each.address for each in self.torch.alive})
        super().launch(step, parameters, handle, stream)


def counted(problem, device):
    """`summed` with zeros."""
    launch = summed(problem, device)
    first, *rest = launch.steps
    steps = (first._replace(parameters=(*first.parameters, Pointer(ZEROS))), *rest)
    return launch._replace(steps=steps, scratch=(*launch.scratch, (ZEROS, 8)))


def first(runner, recognized):
    return lambda: runner.run(CALL, STREAM)


def again(runner, recognized):
    return partial(recognized, CALL, STREAM)


def fixed(runner, recognized):
    return runner.bind(CALL, STREAM)


@pytest.mark.parametrize("rule", [summed, counted])
@pytest.mark.parametrize("way", [first, again, fixed])
def test_a_tensor_of_torch_lives_while_steps_are_enqueued(driver, torch, way, rule):
    problem = SummedDescriptor(n=32)
    launch = rule(problem, DEVICE)
    engine = Seeing(launch, driver, torch)
    runner = CudaRunner(problem, launch, engine, driver, (0, CONTEXT))
    failed = []
    run = way(runner, runner.first_run(CALL, STREAM, failed.append, None).launch)
    del engine.launches[:], engine.alive[:]
    driver.capturing = {STREAM: 1}
    gc.disable()  # reference counts alone must give the memory back
    try:
        for _ in range(3):
            run()
            assert not torch.alive
        assert engine.alive == [{1 << 40}] * 6
        assert {parameters[1] for entry, parameters, _ in engine.launches if entry == "partial_sums"} == {1 << 40}
        engine.trouble = RuntimeError("refused")
        with pytest.raises(DriverError, match="refused") as caught:
            run()
        assert engine.alive[6:] == [{1 << 40}]
        assert caught.value.__traceback__ is not None
        assert not torch.alive, "an error that is kept keeps no memory"
        engine.trouble = None
        run()
    finally:
        gc.enable()
    assert len(failed) == (way is again)
    assert torch.sizes == {1 << 40: 32}


@pytest.mark.parametrize("of_torch", [True, False])
def test_threads_that_capture_at_once_share_nothing(driver, torch, of_torch):
    torch.captures = of_torch
    plan, threads = scratch(driver), 8
    driver.capturing = {stream: 1000 + stream for stream in range(1, 401)}

    def run(stream):
        driver.stack.append(CONTEXT)
        return plan.place(stream).addresses[1]

    torch._C._cuda_getCurrentRawStream = lambda _: STREAM
    with ThreadPoolExecutor(threads) as pool:
        zeros = list(pool.map(run, driver.capturing))
    assert apart((at, MOST_ZEROS) for at in zeros)
    assert sorted(driver.watched) == sorted(driver.capturing.values())


STUB = """
import ctypes
from skuda.dispatch.cuda.driver import driver
from skuda.dispatch.cuda.scratch import Scratch
from skuda.kernels.launch import MOST_ZEROS, ZEROS

# PyDLL keeps the interpreter's lock while a graph is destroyed: a destructor in Python would wait for ever.
stub = ctypes.PyDLL("libcuda.so.1")
context = driver().primary_context(0)


def scratch(size=8 << 20):
    return Scratch(driver(), (0, context), (("partial", size), (ZEROS, 8)))


def capture(stream, number, status=1):
    stub.stub_capture(ctypes.c_void_p(stream), ctypes.c_uint64(number), status)


def captured(plan, number, stream=0x51):
    capture(stream, number)
    found = plan.place(stream).addresses
    capture(stream, 0)
    return found


def destroy(number):
    stub.stub_destroy(ctypes.c_uint64(number))


def live():
    size = ctypes.c_size_t()
    return stub.stub_live(ctypes.byref(size)), size.value


"""


@pytest.fixture(scope="module")
def stub(tmp_path_factory):
    if shutil.which("cc") is None or shutil.which("nm") is None:
        pytest.skip("no C compiler to build the stub driver with")
    return build(tmp_path_factory.mktemp("stub"))


@pytest.fixture
def run(stub, tmp_path):
    """Return a function that runs code in a process over the stub driver, and returns what it has reported."""

    def start(code, **environment):
        found = run_over_stub(STUB + textwrap.dedent(code), stub, tmp_path, **environment)
        assert not found.error, found.error
        return found

    return start


USER_OBJECTS = ("cuUserObjectCreate", "cuGraphRetainUserObject", "cuUserObjectRelease")


def test_captures_of_torch_over_the_driver(run):
    report = run(
        f"""
        from fakes import FakeTorch

        sys.modules["torch"] = FakeTorch(0x51)
        plan = scratch()
        planned = live()
        driver().synchronize(1)
        zeros = [captured(plan, number)[1] for number in range(1, {PIECES} + 1)]
        driver().synchronize(2)
        report["apart"] = len(set(zeros)) == len(zeros)
        report["cleared"] = not any(any(ctypes.string_at(at, MOST_ZEROS)) for at in zeros)
        report["more"] = [after - before for before, after in zip(planned, live())]
        for number in range(1, {PIECES} + 1):
            destroy(number)
        for number in range(5000, 5300):
            captured(plan, number)
        report["end"] = [after - before for before, after in zip(planned, live())]
        """
    )
    slabs = -(-PIECES * MOST_ZEROS // SLAB)
    more = [slabs, slabs * SLAB]
    assert report.values == {"apart": True, "cleared": True, "more": more, "end": more}
    names = [name for _, name, _ in report.calls]
    at = [
        i
        for i, call in enumerate(report.calls)
        if call[1:] in (("cuStreamSynchronize", "1"), ("cuStreamSynchronize", "2"))
    ]
    calls = Counter(names[at[0] + 1 : at[-1]])
    assert calls["cuMemAlloc_v2"] == calls["cuMemsetD8Async"] == slabs
    assert calls["cuStreamGetCaptureInfo_v2"] == 2 * PIECES
    assert [calls[name] for name in USER_OBJECTS] == [PIECES, PIECES, 0]
    assert calls.total() < 4 * PIECES + 20 * slabs


@pytest.mark.parametrize("failing", ["cuUserObjectCreate:801", "cuGraphRetainUserObject:1"])
def test_without_user_objects_a_block_stays_as_long_as_the_process(run, failing):
    report = run(
        """
        from skuda.dispatch.system import flag

        raised, starts = [], set()
        flag._free = lambda *of: raised.append(flag._raised(*of))
        plan = scratch()
        planned = live()[0]
        for number in range(1, 101):
            starts.add(captured(plan, number)[0])
            destroy(number)
        report["kept"] = [len(starts), live()[0] - planned, sum(raised)]
        """,
        SKUDA_STUB_FAIL=failing,
    )
    assert report.values == {"kept": [100, 100, 100]}, "no memory of a flag stays"
    names = Counter(name for _, name, _ in report.calls)
    assert names["cuUserObjectRelease"] == (100 if failing.startswith("cuGraph") else 0)


@pytest.mark.parametrize("of_torch", [True, False])
def test_an_interrupt_loses_no_memory_and_frees_none_twice(run, of_torch):
    """Ctrl-C before one of the bytecodes of a first run inside a capture."""
    parts = fresh(of_torch).random(60).tolist()
    report = run(
        f"""
        from fakes import FakeTorch
        from functools import partial
        from interrupts import bytecodes, interrupted

        sys.modules["torch"] = FakeTorch(0x51) if {of_torch} else None
        within = ("/scratch.py", "/driver.py", "/flag.py")
        plan = scratch()
        planned, run = live()[0], partial(plan.place, 0x51)
        capture(0x51, 1)
        points = bytecodes(run, *within)
        report.update(points=points, raised=0)
        for number, part in enumerate({parts}, 1):
            for kept in (plan._pool._owned, plan._pool._slabs, plan._pool._zeros):
                kept.clear()  # so that each begins with an allocation
            assert live()[0] == planned
            capture(0x51, 2 * number)
            report["raised"] += interrupted(run, 1 + int(part * points), *within)
            if number % 2:  # the program goes on with its capture
                found = run().addresses
                assert live()[0] == planned + 1
                assert run().addresses[1] == found[1]
            destroy(2 * number)
            captured(plan, 2 * number + 1)
            assert live()[0] == planned + 1
            destroy(2 * number + 1)
        """
    )
    assert report.values["points"] > 200
    assert report.values["raised"] > len(parts) // 2
