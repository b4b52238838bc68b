"""Placements: the same bytes, strides and guard zones in NumPy and torch, without a GPU."""

from __future__ import annotations

import contextlib
import types

import ml_dtypes
import numpy as np
import pytest

from skuda.kernels.catalog import built_in_ops
from skuda.kernels.draw import draw
from skuda.registry import Case, MissingDependency, Role
from skuda.registry.device import HOST, device_named
from skuda.tools.verify import placement as placing
from skuda.tools.verify.placement import (
    GUARD,
    LAYOUTS,
    Geometry,
    HostPlacement,
    PlacedArguments,
    PlacedArray,
    TorchPlacement,
)

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = (*map(np.dtype, (np.float16, np.float32, np.float64, np.int8, np.uint8, np.int32)), BFLOAT16)
OP = next(op for op in built_in_ops() if op.name == "quantize_per_token")
CASE = next(case for case in OP.cases if case.problem.n > 2)


@pytest.fixture(params=["numpy", "torch"])
def placement(request):
    if request.param == "numpy":
        return HostPlacement()
    pytest.importorskip("torch")
    return TorchPlacement("cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 5), (0, 3), (3, 0)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_byte_beside_an_array_is_watched_and_its_elements_may_change(placement, dtype, shape, layout):
    if layout not in placement.layouts:
        return
    geometry = Geometry.of(shape, dtype, layout)
    content = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    call = PlacedArguments(placement, {"y": PlacedArray(Role.OUTPUT, geometry, content)}, {})
    assert call.spoilt() is None
    np.testing.assert_array_equal(call.contents()["y"].astype(float), content.astype(float))
    call.arrays["y"][...] = 2
    assert call.spoilt() is None
    assert (call.contents()["y"].astype(float) == 2).all()
    changed = call.spoilt(allow_outputs=False)
    assert (changed is None) is (0 in shape or bool((content.astype(float) == 2).all()))
    inside = np.zeros(geometry.size, bool)
    geometry.bytes_of(inside)[...] = True
    assert inside.sum() == content.nbytes
    assert not inside[:GUARD].any()
    for at in np.flatnonzero(~inside)[:: max(1, geometry.size // 20)]:
        call.rewrite()
        call.buffers["y"][int(at)] = 0
        assert call.spoilt() == ("y", at - geometry.start)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_arrays_lie_in_their_layout_and_are_rewritten_in_place(placement, layout):
    if layout not in placement.layouts:
        return
    drawn = draw(OP, Case(CASE.problem), np.random.default_rng(1))
    call = PlacedArguments.of(placement, CASE.problem, drawn, layout)
    dense = {name: part.geometry.dense for name, part in call.parts.items()}
    assert dense["input"] is (layout in ("contiguous", "misaligned"))
    assert PlacedArguments.of(placement, CASE.problem, drawn, layout, dense=("input",)).parts["input"].geometry.dense
    strides = [
        part.geometry.strides[0] // part.geometry.dtype.itemsize
        for n, part in call.parts.items()
        if n in "input output"
    ]
    assert (len(set(strides)) == len(strides)) is (layout in ("wide", "crooked")), "each argument has gaps of its own"
    call.rewrite(input=np.zeros_like(drawn.inputs["input"]))
    after = call.contents("input", "scale")
    assert not after["input"].any()
    np.testing.assert_array_equal(after["scale"], drawn.inputs["scale"])
    assert call.spoilt(allow_outputs=False) is None


def test_two_runs_have_other_bytes_around_arrays_and_other_poison():
    drawn = draw(OP, CASE, np.random.default_rng(1))
    first, second = (PlacedArguments.of(HostPlacement(), CASE.problem, drawn, turn=turn) for turn in (0, 1))
    assert (first.contents()["output"] != second.contents()["output"]).all()
    assert first.before["input"][0] != second.before["input"][0]


def test_what_torch_lacks_is_refused():
    pytest.importorskip("torch")
    with pytest.raises(TypeError, match="torch has no uint32"):
        PlacedArguments(
            TorchPlacement("cpu"), {"x": PlacedArray(Role.INPUT, Geometry.of((2,), np.dtype(np.uint32)), 0)}, {}
        )


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
    call = PlacedArguments(placement, {"x": PlacedArray(Role.INPUT, Geometry.of((8,), content.dtype), content)}, {})
    call.buffers["x"][...] = 0
    fake = types.SimpleNamespace(
        Stream=Stream,
        stream=on,
        synchronize=lambda device: done.append("before"),
        _sleep=lambda _: done.append("sleep"),
    )
    placement.torch = types.SimpleNamespace(cuda=fake, from_numpy=torch.from_numpy)
    stream = placement.late(call)
    placement.finish(stream)
    assert done == ["before", "cpu", "sleep", "finish"]
    np.testing.assert_array_equal(call.contents("x")["x"], content)


@pytest.mark.parametrize("present", [True, False])
def test_the_placement_for_a_card_is_that_of_torch(monkeypatch, present):
    monkeypatch.setattr(placing, "TorchPlacement", lambda where: where)
    monkeypatch.setattr(placing, "find_spec", lambda name: name if present else None)
    card = device_named("h200").model_copy(update={"ordinal": 1})
    assert type(placing.placement_for(HOST)) is HostPlacement
    if present:
        assert placing.placement_for(card) == "cuda:1"
    else:
        with pytest.raises(MissingDependency, match="pip install torch"):
            placing.placement_for(card)
