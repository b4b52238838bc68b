"""Placements: the same bytes, strides and guard zones in NumPy, torch and CuPy, without a GPU."""

from __future__ import annotations

import contextlib
import sys
import types

import ml_dtypes
import numpy as np
import pytest

from skuda.registry import MissingDependency
from skuda.registry.device import HOST, device_named
from skuda.tools.verify import placement as placing
from skuda.tools.verify.placement import LAYOUTS, CupyPlacement, Geometry, HostPlacement, Image, TorchPlacement, placed

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = (*map(np.dtype, (np.float16, np.float32, np.float64, np.int8, np.uint8, np.int32)), BFLOAT16)


class FakeArray:
    """As much of a CuPy array as placements use, in the host's memory."""

    def __init__(self, shape, dtype, memptr, strides=None):
        memory, start = memptr
        self.array = np.ndarray(shape, dtype, memory, start, strides)

    @property
    def data(self):
        return FakePointer((self.array, 0))

    def get(self):
        return self.array.copy()


class FakePointer(tuple):
    """A pointer: memory and an offset."""

    __slots__ = ()

    def __new__(cls, pair):
        return super().__new__(cls, pair)

    def __add__(self, offset):
        return FakePointer((self[0], self[1] + offset))


@pytest.fixture
def cupy(monkeypatch):
    """A module that stands in for CuPy; its `used` lists the devices that were made current."""
    used = []

    class Device:
        def __init__(self, ordinal):
            self.ordinal = ordinal

        def __enter__(self):
            used.append(self.ordinal)

        def __exit__(self, *error):
            pass

    fake = types.ModuleType("cupy")
    fake.cuda = types.SimpleNamespace(Device=Device)
    fake.asarray = lambda content: FakeArray(content.shape, content.dtype, FakePointer((content.copy(), 0)))
    fake.asnumpy = FakeArray.get
    fake.ndarray = FakeArray
    fake.used = used
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return fake


def round_trip(placement, dtype, layout, read):
    """Place an array, read it there, and bring its buffer back."""
    content = np.arange(12).reshape(3, 4).astype(dtype)
    image = Image(Geometry.of((3, 4), dtype, layout), content)
    buffers, views = placed(placement, {"x": image})
    np.testing.assert_array_equal(read(views["x"]), content.astype(np.float64))
    assert image.changed(placement.download(buffers["x"])) is None
    return buffers["x"], views["x"], image


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numpy(dtype, layout):
    placement = HostPlacement()
    buffer, view, image = round_trip(placement, dtype, layout, lambda array: array.astype(np.float64))
    view[1, 2] = 100
    assert image.changed(placement.download(buffer)) is not None
    assert image.spilt(placement.download(buffer)) is None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch(dtype, layout):
    pytest.importorskip("torch")
    placement = TorchPlacement("cpu")
    buffer, view, image = round_trip(placement, dtype, layout, lambda tensor: tensor.double().numpy())
    view[1, 2] = 100
    assert image.changed(placement.download(buffer)) is not None
    assert image.spilt(placement.download(buffer)) is None


def test_what_torch_lacks_is_refused():
    pytest.importorskip("torch")
    with pytest.raises(TypeError, match="torch has no uint32"):
        TorchPlacement("cpu").dtype(np.dtype(np.uint32))


def test_torch_holds_inputs_back_on_a_stream_of_its_own():
    """On a card that does not exist: what would be enqueued is written down."""
    torch = pytest.importorskip("torch")
    done = []

    class Stream:
        def __init__(self, device):
            self.device = device

        def synchronize(self):
            done.append("finish")

    @contextlib.contextmanager
    def on(stream):
        done.append(stream.device)
        yield

    placement = TorchPlacement("cpu")
    content = np.arange(8, dtype=np.uint8)
    buffers = {"x": torch.zeros(8, dtype=torch.uint8)}
    fake = types.SimpleNamespace(
        Stream=Stream,
        stream=on,
        synchronize=lambda device: done.append("before"),
        _sleep=lambda _: done.append("sleep"),
    )
    placement.torch = types.SimpleNamespace(cuda=fake, from_numpy=torch.from_numpy)
    stream = placement.late(buffers, {"x": content})
    placement.finish(stream)
    assert done == ["before", "cpu", "sleep", "finish"]
    np.testing.assert_array_equal(placement.download(buffers["x"]), content)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != BFLOAT16], ids=str)
def test_cupy(cupy, dtype, layout):
    placement = CupyPlacement(3)
    buffer, view, image = round_trip(placement, dtype, layout, lambda array: array.get().astype(np.float64))
    view.array[1, 2] = 100
    assert image.changed(placement.download(buffer)) is not None
    assert image.spilt(placement.download(buffer)) is None
    assert set(cupy.used) == {3}


def test_what_cupy_lacks_is_refused(cupy):
    placement = CupyPlacement(0)
    geometry = Geometry.of((2,), BFLOAT16, "contiguous")
    with pytest.raises(TypeError, match="CuPy has no bfloat16"):
        placement.view(placement.upload(np.zeros(geometry.size, np.uint8)), geometry)


@pytest.mark.parametrize(("present", "kind"), [("torch", "TorchPlacement"), ("cupy", "CupyPlacement"), ("", "")])
def test_the_placement_for_a_card_is_that_of_what_is_installed(monkeypatch, present, kind):
    made = {}
    for name in ("TorchPlacement", "CupyPlacement"):
        monkeypatch.setattr(placing, name, lambda where, name=name: made.setdefault(name, where))
    monkeypatch.setattr(placing, "find_spec", lambda name: name if name == present else None)
    card = device_named("h200").model_copy(update={"ordinal": 1})
    assert isinstance(placing.placement_for(HOST), HostPlacement)
    if kind:
        placing.placement_for(card)
        assert made == {kind: {"torch": "cuda:1", "cupy": 1}[present]}
    else:
        with pytest.raises(MissingDependency, match="pip install torch"):
            placing.placement_for(card)


def test_cupy_makes_equal_bytes_on_its_device_and_gives_kept_memory_back(cupy):
    freed = []
    cupy.uint8 = np.uint8
    cupy.full = np.full
    cupy.get_default_memory_pool = lambda: types.SimpleNamespace(free_all_blocks=lambda: freed.append(True))
    placement = CupyPlacement(3)
    assert placement.full(4, 7).tolist() == [7] * 4
    placement.release()
    assert (cupy.used, freed) == ([3], [True])
