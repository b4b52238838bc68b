"""The launch binder and the runner with fake arrays and a fake driver: no GPU and no CUDA package is needed."""

from __future__ import annotations

import gc
import math
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from fakes import CONTEXT, FakeArray, Rig
from hypothesis import given, settings
from hypothesis import strategies as st
from toykernels.scaled import ScaledDescriptor, SummedDescriptor, scaled, summed

from skuda.dispatch.cuda import arrays as cuda_arrays
from skuda.dispatch.cuda import dlpack
from skuda.dispatch.cuda.arrays import Torch
from skuda.dispatch.cuda.facts import ArrayFacts
from skuda.dispatch.cuda.runner import CudaRunner
from skuda.dispatch.cuda.scratch import Scratch
from skuda.dispatch.cuda.streams import stream_handle
from skuda.dispatch.cuda.views import ViewedArray, common_view
from skuda.kernels.elementwise import FillDescriptor
from skuda.kernels.elementwise.fill_launch import fill
from skuda.kernels.launch import MOST_ZEROS, ZEROS, Pointer
from skuda.registry import DriverError, ElementKind, InvalidProblem

X, Y, S = 0x10000, 0x20000, 0x30000
PROBLEM = ScaledDescriptor(numel=32)
SUM = {"x": FakeArray((32,), address=X), "y": FakeArray((1,), address=Y)}


@pytest.fixture
def rig():
    return Rig(PROBLEM, scaled)


def arrays(**changes):
    found = {"x": FakeArray((4, 8), address=X), "scale": 0.5, "y": FakeArray((4, 8), address=Y)}
    return {name: value for name, value in (found | changes).items() if value is not ...}


def test_addresses_strides_and_numbers_reach_the_kernel(rig):
    call = arrays()
    assert rig.run(**call) is call["y"]
    #                   x  leading  scale  which number y leading rows columns
    assert rig.last == (X, 32, 0, 0, 0.5, Y, 32, 1, 32)
    rig.run(**arrays(x=FakeArray((4, 8), address=X, strides=(10, 1)), scale=FakeArray((1,), address=S)))
    assert rig.last == (X, 10, S, 0, 0, Y, 8, 4, 8)
    rig.run(**arrays(scale=FakeArray((), np.float16, address=S)))
    assert rig.last == (X, 32, S, 1, 0, Y, 32, 1, 32)


@pytest.mark.parametrize(
    ("value", "packed"),
    [
        (3, 3.0),
        (0.1, 0.1),
        (np.float32(0.1), np.float32(0.1)),
        (np.int64(2), 2.0),
        (2.0**-149, 2.0**-149),
        (-0.5, -0.5),
        (float(np.finfo(np.float32).max), float(np.finfo(np.float32).max)),
        (ml_dtypes.bfloat16(1.5), 1.5),
    ],
)
def test_numbers_of_every_kind_are_taken_now_and_again(rig, value, packed):
    for other in (value, 0.25, value):
        rig.run(**arrays(scale=other))
    assert np.float32(rig.last[4]) == np.float32(packed)
    assert isinstance(rig.last[4], (int, float))


def test_a_new_array_is_not_mistaken_for_the_old_one(rig):
    rig.run(**arrays())
    for x, leading in ((FakeArray((4, 8), address=X + 64), 32), (FakeArray((4, 8), address=X, strides=(9, 1)), 9)):
        rig.run(**arrays(x=x))
        assert rig.last[:2] == (x.__cuda_array_interface__["data"][0], leading)


def test_names_are_checked_through_the_remembered_call(rig):
    rig.run(**arrays())
    with pytest.raises(InvalidProblem, match="an unknown argument"):
        rig.run(**arrays(y=...), z=FakeArray((4, 8), address=Y))
    with pytest.raises(InvalidProblem, match="scale must be given"):
        rig.run(**arrays(scale=...))
    with pytest.raises(InvalidProblem, match="unknown"):
        rig.run(**arrays(), z=1)


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"x": FakeArray((4, 8), np.float64)}, "x", "an array of <f8"),
        ({"x": FakeArray((31,))}, "x", "32 elements"),
        ({"y": FakeArray((32,), address=Y)}, "y", r"be an array of shape \(4, 8\)"),
        ({"x": FakeArray((4, 8), ordinal=1)}, "x", "on cuda:1"),
        ({"x": FakeArray((4, 8), ordinal=None)}, "x", "on the host"),
        ({"x": np.zeros((4, 8), np.float32)}, "x", "on the host"),
        ({"x": [1.0]}, "x", "a list"),
        ({"x": FakeArray((4, 8), address=X + 2)}, "x", "multiple of 4"),
        ({"x": FakeArray((4, 8), strides=(8, 2))}, "x", "contiguous"),
        ({"y": FakeArray((4, 8), address=Y, strides=(0, 1))}, "y", "one place in memory"),
        ({"y": FakeArray((4, 8), address=Y, strides=(7, 1))}, "y", "one place in memory"),
        ({"y": FakeArray((4, 8), address=Y, read_only=True)}, "y", "read-only"),
        ({"y": FakeArray((4, 8), address=X + 4)}, "y", "overlaps x"),
        ({"scale": FakeArray((1,), address=Y + 12)}, "y", "overlaps scale"),
        ({"scale": 0.0}, "scale", "not zero"),
        ({"scale": math.nan}, "scale", "finite"),
        ({"scale": 1e39}, "scale", "finite"),
        ({"scale": True}, "scale", "be a number"),
        ({"scale": FakeArray((2,), address=S)}, "scale", "one element"),
        ({"scale": FakeArray((1,), np.float64, address=S)}, "scale", "<f8"),
        ({"x": ...}, "x", "be given"),
    ],
)
def test_unsuitable_arguments_are_refused_by_name(rig, change, field, words):
    for warm in (False, True):
        if warm:
            rig.run(**arrays())
        with pytest.raises(InvalidProblem, match=words) as caught:
            rig.run(**arrays(**change))
        assert caught.value.field == field
        with pytest.raises(InvalidProblem, match=words):
            rig.runner.check(arrays(**change))
        with pytest.raises(InvalidProblem, match=words):
            rig.runner.bind(arrays(**change), None)
    assert len(rig.engine.launches) == 1


def test_in_place_means_exactly_the_same_array(rig):
    def gapped(address):
        return FakeArray((4, 8), address=address, strides=(16, 1))

    rig.run(**arrays(y=FakeArray((4, 8), address=X)))
    assert rig.last[0] == rig.last[5] == X
    with pytest.raises(InvalidProblem, match="exactly the same array"):
        rig.run(**arrays(y=gapped(X)))
    for x in (X, Y):
        rig.run(**arrays(x=gapped(x), y=gapped(x + 32)))
    assert rig.last[5] == Y + 32, "two halves of one buffer reach into each other's gaps, not into each other"
    with pytest.raises(InvalidProblem, match="overlaps"):
        rig.run(**arrays(x=gapped(Y), y=gapped(Y + 28)))


def test_overlap_is_seen_at_every_distance_now_and_again():
    for offset in range(-160, 161, 4):
        rig = Rig(PROBLEM, scaled)
        rig.run(**arrays())
        call = arrays(y=FakeArray((4, 8), address=X + offset))
        overlaps = 0 < abs(offset) < 128
        for _ in range(2):
            if overlaps:
                with pytest.raises(InvalidProblem, match="overlaps"):
                    rig.run(**call)
            else:
                rig.run(**call)
        assert len(rig.engine.launches) == (1 if overlaps else 3), offset


def test_a_problem_of_no_elements_takes_arrays_without_memory():
    rig = Rig(ScaledDescriptor(numel=0), lambda problem, device: scaled(problem, device).__class__((), ("x", "y")))
    empty = FakeArray((0, 8), address=0)
    assert rig.run(x=empty, scale=1.0, y=empty) is empty
    assert rig.engine.launches == []


def test_packed_rows_start_at_a_byte():
    problem = ScaledDescriptor(numel=15, code="s4")
    rig = Rig(problem, scaled)
    rig.run(x=FakeArray((3, 5), address=X), scale=1.0, y=FakeArray((3, 3), np.uint8, address=Y))
    assert rig.last[1:2] + rig.last[6:] == (5, 3, 3, 5)
    rig.run(x=FakeArray((15,), address=X), scale=1.0, y=FakeArray((8,), np.uint8, address=Y))
    assert rig.last[1:2] + rig.last[6:] == (15, 8, 1, 15)
    even = Rig(ScaledDescriptor(numel=12, code="s4"), scaled)
    even.run(x=FakeArray((3, 4), address=X), scale=1.0, y=FakeArray((3, 2), np.uint8, address=Y))
    assert even.last[1:2] + even.last[6:] == (12, 6, 1, 12)
    even.run(x=FakeArray((3, 4), address=X), scale=1.0, y=FakeArray((3, 2), np.uint8, address=Y, strides=(5, 1)))
    assert even.last[1:2] + even.last[6:] == (4, 5, 3, 4)
    with pytest.raises(InvalidProblem, match="shape"):
        rig.run(x=FakeArray((3, 5), address=X), scale=1.0, y=FakeArray((3, 2), np.uint8, address=Y))
    # A contiguous packed array has fewer cuts than one with gaps; the error names the one that a copy helps.
    with pytest.raises(InvalidProblem, match=r"x must be cut into rows where y can be; copy it first"):
        rig.run(x=FakeArray((15,), address=X, strides=(2,)), scale=1.0, y=FakeArray((8,), np.uint8, address=Y))


@st.composite
def strided(draw):
    """A shape, and for two arrays strides that come from slicing and permuting larger ones."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=0, max_size=4)))
    found = []
    for _ in range(2):
        order = draw(st.permutations(range(len(shape)))) if draw(st.booleans()) else list(range(len(shape)))
        strides, size = [0] * len(shape), 1
        for axis in reversed(order):
            strides[axis] = size
            size *= shape[axis] + draw(st.sampled_from([0, 0, 0, 1, 3]))
        found.append(tuple(strides))
    return shape, found


def addresses(shape, strides):
    """Return the offset of every element in row-major order."""
    return [sum(i * s for i, s in zip(at, strides, strict=True)) for at in np.ndindex(*shape)]


def cuts(shape, strides):
    """Return the (rows, columns) under which every element is where a kernel would look for it."""
    offsets, found = addresses(shape, strides), set()
    for columns in {math.prod(shape[split:]) for split in range(len(shape) + 1)}:
        rows = len(offsets) // columns
        leading = offsets[columns] - offsets[0] if rows > 1 else 0
        if offsets == [row * leading + column for row in range(rows) for column in range(columns)]:
            found.add((rows, columns))
    return found


@given(strided())
@settings(max_examples=400, deadline=None)
def test_a_view_is_found_and_has_the_longest_rows(drawn):
    shape, (one, two) = drawn
    possible = cuts(shape, one) & cuts(shape, two)
    layouts = {"x": ViewedArray(one, packed=False), "y": ViewedArray(two, packed=False)}
    if not possible:
        with pytest.raises(InvalidProblem, match="copy it first"):
            common_view("op", shape, layouts)
        return
    rows, columns, leading = common_view("op", shape, layouts)
    assert (rows, columns) == min(possible)
    for name, strides in (("x", one), ("y", two)):
        assert addresses(shape, strides) == [r * leading[name] + c for r in range(rows) for c in range(columns)]


@pytest.fixture
def maker(monkeypatch):
    """Let the standard framework make fake arrays, and return what it was asked."""
    asked = []

    def empty(self, shape, element, ordinal, stream):
        asked.append((shape, element, ordinal, stream))
        return FakeArray(shape, np.uint8 if element == "u8" else np.float32, address=0x50000 + 0x1000 * len(asked))

    monkeypatch.setattr(cuda_arrays.Standard, "empty", empty)
    return asked


def test_an_output_left_out_is_made_and_returned(rig, maker):
    for turn in (1, 2):
        y = rig.run(**arrays(y=...))
        assert isinstance(y, FakeArray)
        assert rig.last[5] == 0x50000 + 0x1000 * turn
    rig.run(**arrays(y=None))
    rig.run(**arrays())
    assert rig.last[5] == Y, "an output given after a call with output=None is used"
    rig.run(stream=5, **arrays(y=...))
    assert maker == [((4, 8), ElementKind.F32, 0, 0)] * 3 + [((4, 8), ElementKind.F32, 0, 5)]
    Rig(ScaledDescriptor(numel=15, code="s4"), scaled).run(x=FakeArray((3, 5), address=X), scale=1.0)
    assert maker[-1] == ((3, 3), ElementKind.U8, 0, 0), "two codes to a byte"


def test_without_torch_and_cupy_there_is_nobody_to_ask_for_memory(rig, monkeypatch):
    monkeypatch.setattr(cuda_arrays, "_helpers", list)
    with pytest.raises(InvalidProblem, match="torch or CuPy"):
        rig.run(**arrays(y=...))


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (0, 0),
        (1, 0),
        (7, 7),
        (SimpleNamespace(cuda_stream=9, device_index=0), 9),
        (SimpleNamespace(cuda_stream=0), 0),
        (SimpleNamespace(ptr=10, device_id=0), 10),
        (SimpleNamespace(ptr=10, device_id=-1), 10),
        (SimpleNamespace(handle=11), 11),
        (SimpleNamespace(__cuda_stream__=lambda: (0, 41)), 41),
        (SimpleNamespace(__cuda_stream__=(0, 42)), 42),
    ],
)
def test_streams_of_every_library_become_handles(rig, stream, handle):
    rig.run(stream=stream, **arrays())
    assert rig.engine.launches[-1][2] == handle


@pytest.mark.parametrize(
    "stream",
    [True, -1, 1 << 64, "0", SimpleNamespace(cuda_stream=9, device_index=1), SimpleNamespace(ptr=1, device_id=2)],
)
def test_what_is_no_stream_of_this_device_is_refused(rig, stream):
    with pytest.raises(InvalidProblem) as caught:
        rig.run(stream=stream, **arrays())
    assert caught.value.field == "stream"
    assert rig.engine.launches == []


def test_an_array_may_name_its_stream(rig):
    rig.run(**arrays(x=FakeArray((4, 8), address=X, stream=77), y=FakeArray((4, 8), address=Y, stream=77)))
    assert rig.engine.launches[-1][2] == 77
    with pytest.raises(InvalidProblem, match="different streams"):
        rig.run(**arrays(x=FakeArray((4, 8), address=X, stream=77), y=FakeArray((4, 8), address=Y, stream=78)))
    assert stream_handle("op", 77, 0) == 77


def test_a_thread_has_the_context_during_the_launch_only():
    for devices in (1, 2):
        rig = Rig(PROBLEM, scaled, devices=devices, in_context=False)
        rig.driver.stack.append(0xBAD)
        bound = rig.runner.bind(arrays(), None)
        rig.run(**arrays())
        bound()
        assert len(rig.engine.launches) == 2
        assert rig.driver.stack == [0xBAD]


def test_a_launch_that_fails_for_another_reason_is_reported_and_not_repeated(rig):
    rig.engine.trouble = RuntimeError("illegal address")
    with pytest.raises(DriverError, match="illegal address"):
        rig.run(**arrays())
    with pytest.raises(DriverError, match="illegal address"):
        rig.runner.bind(arrays(), None)()
    rig.engine.trouble = InvalidProblem("scaled", "stream", "a", "b")
    with pytest.raises(InvalidProblem):
        rig.run(**arrays())


def test_scratch_is_allocated_when_planning_once_per_stream_and_freed(maker):
    rig = Rig(SummedDescriptor(n=32), summed)
    planned = dict(rig.driver.allocated)
    assert list(planned.values()) == [MOST_ZEROS + 32]
    assert rig.driver.cleared == list(planned), "kernels count on zeros in front"
    rig.run(**SUM)
    rig.run(**SUM)
    assert rig.driver.allocated == planned
    first = {launch[1][1] for launch in rig.engine.launches if launch[0] == "partial_sums"}
    assert first == {address + MOST_ZEROS for address in planned}
    rig.run(stream=5, **SUM)
    assert rig.last[0] not in first
    assert len(rig.driver.allocated) == 2
    rig.run(stream=5, **SUM)
    assert len(rig.driver.allocated) == 2
    driver = rig.driver
    del rig
    gc.collect()
    assert sorted(driver.freed) == sorted(driver.allocated)


def test_zeros_lie_in_front_of_other_scratch():
    def zeroed(problem, device):
        launch = summed(problem, device)
        (name, size), *others = launch.scratch
        first, *rest = launch.steps
        counted = first._replace(parameters=(*first.parameters, Pointer(ZEROS)))
        return launch._replace(steps=(counted, *rest), scratch=((name, size), *others, (ZEROS, 8)))

    rig = Rig(SummedDescriptor(n=32), zeroed)
    rig.run(**SUM)
    (start,) = rig.driver.cleared
    assert rig.engine.launches[0][1][-1] == start
    assert rig.driver.allocated == {start: MOST_ZEROS + 32}


def test_plans_of_one_card_share_scratch_and_many_sizes_allocate_little():
    first = Rig(SummedDescriptor(n=32), summed)
    driver = first.driver
    sizes = [8 * n for n in range(1, 400)]
    launch = summed(SummedDescriptor(n=32), None)
    plans = []
    for size in sizes:
        needs = launch._replace(scratch=(("partial", size),))
        plans.append(CudaRunner(SummedDescriptor(n=32), needs, first.engine, driver, (0, CONTEXT)))
        plans[-1].run(SUM, None)
        assert driver.allocated[first.last[0] - MOST_ZEROS] >= MOST_ZEROS + size
    assert len(driver.allocated) == 1 + len({1 << (size - 1).bit_length() for size in sizes if size > 32})
    assert sum(driver.allocated.values()) <= 4 * max(sizes) + MOST_ZEROS * len(driver.allocated)
    used = first.last[0]
    for plan in (plans[0], plans[-1]):
        plan.run(SUM, None)
    assert first.last[0] == used
    assert driver.freed == []
    del first, plans, plan
    gc.collect()
    assert sorted(driver.freed) == sorted(driver.allocated)


def test_buffers_of_one_plan_lie_apart_and_aligned():
    rig = Rig(SummedDescriptor(n=32), summed)
    place = Scratch(rig.driver, (0, CONTEXT), (("a", 100), ("b", 0), ("c", 1000))).place(0)
    first, second, third = place.addresses
    assert (second - first, third - second) == (256, 256)
    assert rig.driver.allocated[first - MOST_ZEROS] >= MOST_ZEROS + 512 + 1000


def test_a_call_with_arrays_says_where_it_runs(rig, maker):
    rig.plan.first_run("a key", arrays(), None)
    (launch,) = rig.launches.of["a key"]
    call = arrays()
    assert launch(call, None) is call["y"]
    assert launch(arrays(x=FakeArray((4, 8), address=X, strides=(10, 1))), None) is None
    assert len(rig.engine.launches) == 2


def test_a_call_without_arrays_does_not_say_where_it_runs(maker):
    rig = Rig(FillDescriptor(numel=4, output_element="f32"), fill)
    rig.plan.first_run("a key", {"value": 1.0}, None)
    assert "a key" not in rig.launches.of
    rig.plan.first_run("a key", {"value": 1.0, "output": FakeArray((4,), address=Y)}, None)
    assert "a key" in rig.launches.of


@pytest.mark.parametrize(
    "interface",
    [3, {}, {"data": None}, {"data": (X, False), "shape": 3, "typestr": "<f4"}, {"data": (X, False), "shape": (4, 8)}],
)
def test_an_interface_that_is_none_is_refused(rig, interface):
    with pytest.raises(InvalidProblem, match="x must be readable without a copy"):
        rig.run(x=SimpleNamespace(__cuda_array_interface__=interface), scale=1.0, y=FakeArray((4, 8), address=Y))


class FakeTensor:
    """What `Torch` reads of a tensor."""

    __module__ = "torch.fake"
    layout, requires_grad, is_cuda = "strided", False, True

    def __init__(self, shape=(4, 8), dtype="float32", address=X):
        self.shape, self.dtype = shape, dtype
        self.stride, self.data_ptr, self.get_device = lambda: (8, 1), lambda: address, lambda: 0
        self.is_neg = self.is_conj = lambda: False


@pytest.fixture
def torch(monkeypatch):
    names = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64")
    fake = SimpleNamespace(
        **{name: name for name in names},
        strided="strided",
        Tensor=FakeTensor,
        nn=SimpleNamespace(Parameter=FakeTensor),
        version=SimpleNamespace(cuda="13.0"),
        _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda ordinal: 70 + ordinal),
    )
    monkeypatch.setitem(sys.modules, "torch", fake)
    cuda_arrays._torch_elements.cache_clear()
    cuda_arrays._torch_dtypes.cache_clear()
    yield fake
    cuda_arrays._torch_elements.cache_clear()
    cuda_arrays._torch_dtypes.cache_clear()


def test_tensors_are_taken_on_their_current_stream(rig, torch):
    rig.run(x=FakeTensor(), scale=1.0, y=FakeTensor(address=Y))
    assert rig.engine.launches[-1][1:] == ((X, 32, 0, 0, 1.0, Y, 32, 1, 32), 70)
    facts = Torch().facts(FakeTensor(dtype="bfloat16"))
    assert facts == ArrayFacts(X, ElementKind.BF16, "bfloat16", (4, 8), (8, 1), 0)


class FakeCupyArray:
    """What `Cupy` reads of an ndarray."""

    __module__ = "cupy.fake"

    def __init__(self, address=X, shape=(4, 8), dtype=np.float32, strides=(32, 4), ordinal=0):
        self.shape, self.dtype, self.strides = shape, np.dtype(dtype), strides
        self.data = SimpleNamespace(ptr=address, device_id=ordinal)


@pytest.fixture
def cupy(monkeypatch):
    fake = SimpleNamespace(
        cuda=SimpleNamespace(get_current_stream=lambda device: SimpleNamespace(ptr=80 + device)),
    )
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return fake


def test_arrays_of_cupy_are_taken_on_their_current_stream(rig, cupy):
    y = FakeCupyArray(Y)
    for _ in range(2):
        assert rig.run(x=FakeCupyArray(), scale=1.0, y=y) is y
        assert rig.engine.launches[-1][1:] == ((X, 32, 0, 0, 1.0, Y, 32, 1, 32), 80)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": np.int32}, "an array of int32"),
        ({"shape": (8, 4)}, "shape"),
        ({"strides": (4, 16)}, "contiguous"),
        ({"strides": (34, 4)}, "whole elements"),
        ({"ordinal": 1}, "cuda:1"),
    ],
)
def test_an_array_of_cupy_that_changed_is_noticed(rig, cupy, change, words):
    rig.run(x=FakeCupyArray(), scale=1.0, y=FakeCupyArray(Y))
    with pytest.raises(InvalidProblem, match=words):
        rig.run(x=FakeCupyArray(**change), scale=1.0, y=FakeCupyArray(Y))
    assert len(rig.engine.launches) == 1


class FakeJaxArray:
    """What `Jax` reads of an array."""

    __module__ = "jaxlib.fake"

    def __init__(self, log):
        self.log, self.array = log, np.zeros((4, 8), np.float32)

    def block_until_ready(self):
        self.log.append("ready")

    def __dlpack__(self):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return (2, 0)


def test_jax_waits_before_and_after_and_gets_outputs_of_its_own(rig, torch, monkeypatch):
    log, streams = [], []
    torch.empty = lambda shape, dtype, device: FakeTensor(shape=shape, dtype=dtype, address=Y)
    torch.cuda = SimpleNamespace(
        stream=lambda stream: streams.append(stream) or nullcontext(), default_stream=lambda ordinal: "default"
    )
    handed = SimpleNamespace(dlpack=SimpleNamespace(from_dlpack=lambda array: ("jax", array.data_ptr())))
    monkeypatch.setitem(sys.modules, "jax", handed)
    real = dlpack.read
    monkeypatch.setattr(dlpack, "read", lambda capsule: real(capsule)._replace(device=(2, 0)))
    x = FakeJaxArray(log)
    for turn in (1, 2):
        assert rig.run(x=x, scale=1.0) == ("jax", Y)
        assert rig.last == (x.array.ctypes.data, 32, 0, 0, 1.0, Y, 32, 1, 32)
        assert rig.driver.synchronized == [0] * turn
        assert log
        log.clear()
    assert streams == ["default"] * 2, "torch made the outputs for the stream that they are used on, not for its own"
    with pytest.raises(InvalidProblem, match="read-only"):
        rig.run(x=x, scale=1.0, y=FakeJaxArray(log))
    with pytest.raises(InvalidProblem, match="must never change"):
        rig.runner.bind({"x": x, "scale": 1.0}, None)


def test_a_capsule_is_read_without_being_consumed():
    array = np.arange(24, dtype=np.int32).reshape(2, 3, 4)[:, ::2]
    capsule = array.__dlpack__()
    for _ in range(2):
        found = dlpack.read(capsule)
        assert found.address == array.ctypes.data
        assert (found.element, found.shape, found.strides) == (ElementKind.S32, (2, 2, 4), (12, 8, 1))
        assert found.device == (1, 0)
    with pytest.raises(ValueError, match="PyCapsule"):
        dlpack.read(object())


class Half:
    """bf16 as exporters have it: the array interface has no word for it, DLPack has."""

    def __init__(self):
        self.array = np.zeros((4, 8), np.int16)
        self.__cuda_array_interface__ = {
            "shape": (4, 8), "typestr": "<V2", "data": (self.array.ctypes.data, False), "version": 3, "stream": 6,
        }  # fmt: skip

    def __dlpack__(self):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return (2, 0)


def test_bf16_is_known_by_its_dtype_or_by_dlpack(monkeypatch):
    said = cuda_arrays.Standard().facts(FakeArray((4, 8), ml_dtypes.bfloat16, ordinal=0))
    assert said.element is ElementKind.BF16
    real = dlpack.read
    monkeypatch.setattr(dlpack, "read", lambda capsule: real(capsule)._replace(element=ElementKind.BF16, device=(2, 0)))
    facts = cuda_arrays.Standard().facts(Half())
    assert (facts.element, facts.ordinal, facts.stream) == (ElementKind.BF16, 0, 6)
