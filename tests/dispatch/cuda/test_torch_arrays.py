"""Real torch tensors on the warm path: whatever can change about one between two runs is noticed.

Tensors on the CPU pose as those on a GPU; only the engine below is a fake. Every test runs with the check that torch's
compiled code uses, and with the attributes read one by one, as where a torch has no such check.
"""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext

import pytest
from fakes import Rig
from toykernels.scaled import ScaledDescriptor, SummedDescriptor, scaled, summed

from skuda.dispatch.cuda import arrays as cuda_arrays
from skuda.dispatch.cuda.arrays import Torch
from skuda.dispatch.launch_cache import PositionalCall
from skuda.registry import DriverError, InvalidProblem

torch = pytest.importorskip("torch")


@pytest.fixture(params=["joint check", "one by one"], autouse=True)
def posing(request, monkeypatch):
    real, guard = Torch.facts, Torch.guard

    def facts(self, value):
        found = real(self, value)
        with torch._C.DisableTorchFunctionSubclass():
            return found._replace(address=value.data_ptr(), ordinal=0) if value.device.type == "cpu" else found

    monkeypatch.setattr(Torch, "facts", facts)
    monkeypatch.setattr(Torch, "guard", lambda self, x, facts: guard(self, x, facts._replace(ordinal=-1)))
    monkeypatch.setattr(Torch, "current_stream", lambda *_: int)
    cuda_arrays._torch_elements.cache_clear()
    cuda_arrays._torch_dtypes.cache_clear()
    if request.param == "one by one":
        monkeypatch.setattr(Torch, "joint_check", lambda self, values: None)
    return request.param


@pytest.fixture
def rig():
    return Rig(ScaledDescriptor(numel=32), scaled)


@pytest.fixture
def bound(rig, monkeypatch):
    """How often a call was checked in full."""
    count = []
    real = rig.runner._binder.bind
    monkeypatch.setattr(rig.runner._binder, "bind", lambda arrays: count.append(1) or real(arrays))
    return count


def tensors():
    return {"x": torch.zeros(4, 8), "scale": 0.5, "y": torch.empty(4, 8)}


def test_this_torch_has_the_check(posing):
    """Else the tests of it would show nothing, and nobody would notice that runs have become slower."""
    found = Torch().joint_check((torch.zeros(2), torch.zeros(3)))
    assert (found is not None) is (posing == "joint check")
    assert found is None or not found.same(torch.zeros(2), torch.zeros(3, device="meta")), "on another device"


def test_like_tensors_are_recognized_and_their_addresses_passed(rig, bound):
    for _ in range(3):
        call = tensors()
        assert rig.run(**call) is call["y"]
        assert rig.last == (call["x"].data_ptr(), 32, 0, 0, 0.5, call["y"].data_ptr(), 32, 1, 32)
    scale = torch.ones(1)
    for _ in range(3):
        rig.run(**tensors() | {"scale": scale})
        assert rig.last[2:5] == (scale.data_ptr(), 0, 0)
    assert len(bound) == 2


def of_another_type(x):
    x.data = torch.zeros(4, 8, dtype=torch.float64)


@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x.resize_(4, 7), "shape"),
        (lambda x: x.t_(), "shape"),
        (of_another_type, "float64"),
        (lambda x: x.requires_grad_(), r"x\.detach"),
        (lambda x: x.set_(torch.zeros(200).untyped_storage(), 0, (4, 8), (17, 2)), "contiguous"),
    ],
)
@pytest.mark.parametrize("name", ["x", "y"])
def test_a_tensor_changed_in_place_is_noticed_whatever_the_mode_of_gradients(rig, name, change, words, before, after):
    call = tensors()
    with torch.set_grad_enabled(before):
        rig.run(**call)
        rig.run(**call)
    change(call[name])
    with torch.set_grad_enabled(after), pytest.raises(InvalidProblem, match=words):
        rig.run(**call)
    assert len(rig.engine.launches) == 2


@pytest.mark.parametrize("elsewhere", [False, True])
def test_new_outputs_come_from_the_allocator_of_compiled_code(rig, monkeypatch, elsewhere):
    guards = pytest.importorskip("torch._C._dynamo.guards")
    asked = []

    def empty(self, shape, element, ordinal, stream):
        asked.append(stream)
        return torch.empty(shape)

    monkeypatch.setattr(Torch, "empty", empty)
    found = (guards._empty_strided_cpu, lambda: int(elsewhere))
    monkeypatch.setattr(cuda_arrays, "_compiled_allocator", lambda: found)
    call = tensors()
    del call["y"]
    for _ in range(2):
        y = rig.run(**call)
        assert (tuple(y.shape), y.dtype, y.is_contiguous()) == ((4, 8), torch.float32, True)
        assert rig.last[5] == y.data_ptr()
    rig.run(stream=5, **call)
    assert asked == [None, None, 5] if elsewhere else [5]


def test_new_memory_under_the_same_tensor_is_passed(rig, bound):
    call = tensors()
    rig.run(**call)
    kept, call["x"].data = call["x"].data, torch.ones(4, 8)
    rig.run(**call)
    assert rig.last[0] == call["x"].data_ptr() != kept.data_ptr()
    assert len(bound) == 1


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: torch.zeros(4, 8, dtype=torch.complex64).conj().imag, "negated"),
        (lambda: torch.zeros(4, 8).to_sparse(), "layout"),
        (lambda: torch.zeros(4, 8).numpy(), "host|CPU|readable"),
        (lambda: torch.nn.Parameter(torch.zeros(4, 8)), r"x\.detach"),
        (lambda: None, "be given"),
        (lambda: 1.0, "array"),
    ],
)
def test_another_kind_of_tensor_is_noticed(rig, other, words):
    call = tensors()
    rig.run(**call)
    with pytest.raises(InvalidProblem, match=words):
        rig.run(**call | {"x": other()})
    assert len(rig.engine.launches) == 1


def test_no_tensor_is_kept(rig):
    call = tensors()
    for _ in range(2):
        rig.run(**call)
    watched = [weakref.ref(call[name]) for name in ("x", "y")]
    rig.engine.launches.clear()
    del call
    gc.collect()
    assert [one() for one in watched] == [None, None]


def test_scratch_inside_a_capture_is_a_tensor_that_lives_for_its_run(monkeypatch):
    """Of real torch, every name that scratch asks for is there."""
    made, empty = [], torch.empty

    def on_cpu(size, *, dtype, device):
        assert device == "cuda:0"
        kept = empty(size, dtype=dtype)
        made.append((kept.data_ptr(), kept.numel() * kept.element_size(), weakref.ref(kept)))
        return kept

    rig = Rig(SummedDescriptor(n=32), summed)
    call = {"x": torch.ones(32), "y": torch.empty(1)}
    rig.run(**call, stream=7)
    monkeypatch.setattr(Torch, "current_stream", lambda *_: lambda: 7)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch, "empty", on_cpu)
    rig.driver.capturing = {7: 1}
    for _ in range(2):
        rig.run(**call, stream=7)
        address, size, kept = made[-1]
        assert rig.engine.launches[-2][1][1] == rig.last[0] == address
        assert size == 32
        assert kept() is None
    assert len(made) == 2
    assert len(rig.driver.allocated) == 1


class Loud(torch.Tensor):
    """A tensor whose every use by name of torch runs code of ours."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"code of a subclass ran: {func}")


def test_the_code_of_a_subclass_never_runs_and_a_change_is_noticed(rig, bound):
    plain = tensors()
    with torch._C.DisableTorchFunctionSubclass():
        call = plain | {name: plain[name].as_subclass(Loud) for name in ("x", "y")}
    for _ in range(3):
        assert rig.run(**call) is call["y"]
        assert rig.last == (plain["x"].data_ptr(), 32, 0, 0, 0.5, plain["y"].data_ptr(), 32, 1, 32)
    assert len(bound) == 1
    rig.run(**call | {"x": plain["x"]})
    assert len(bound) == 2, "an array of another type"
    with torch._C.DisableTorchFunctionSubclass():
        call["x"].resize_(4, 7)
    with pytest.raises(InvalidProblem, match="shape"):
        rig.run(**call)


def test_a_subclass_that_stands_for_other_tensors_is_refused(rig):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.zeros(4, 8)
    with pytest.raises(InvalidProblem, match=r"x must be an ordinary tensor.*FakeTensor"):
        rig.run(**tensors() | {"x": fake})


@pytest.fixture
def by_position(rig, posing, monkeypatch):
    """Return a function that runs a call by position for the first time, and returns its result and its launch."""
    if posing == "one by one":
        pytest.skip("without the check nothing is recognized by position")
    guards = pytest.importorskip("torch._C._dynamo.guards")
    monkeypatch.setattr(cuda_arrays, "_compiled_allocator", lambda: (guards._empty_strided_cpu, lambda: 0))

    def first(x, scale=0.5, *, several=None, known=()):
        names, known = ("x", "scale", None), {"busy": lambda: False} | dict(known)
        shapes = {"y": tuple(x.shape)}
        positions = PositionalCall(names, {"x": x}, shapes, ("y",), several, unless="busy()", known=known)
        result = rig.plan.first_run("a key", {"x": x.detach().view(32), "scale": scale}, None, positions)
        (launch, *_) = rig.launches.of["a key"]
        return result, launch

    return first


@pytest.mark.parametrize("several", [None, tuple, list])
def test_a_call_by_position_gets_results_in_its_own_shape(rig, by_position, bound, several):
    _, launch = by_position(torch.zeros(2, 2, 8), several=several)
    for scale in (0.25, 3.0):
        x = torch.zeros(2, 2, 8)
        y = launch(x, scale, None)
        if several is not None:
            assert type(y) is several
            (y,) = y
        assert (y.shape, y.dtype) == (x.shape, torch.float32)
        assert rig.last == (x.data_ptr(), 32, 0, 0, scale, y.data_ptr(), 32, 1, 32)
    assert len(bound) == 1
    assert rig.plan not in rig.launches.of


@pytest.mark.parametrize(
    "call",
    [
        lambda x: (x[:, :1], 0.5, None),
        lambda x: (x.double(), 0.5, None),
        lambda x: (x.transpose(0, 1), 0.5, None),
        lambda x: (x.clone().requires_grad_(), 0.5, None),
        lambda x: (x, 0.5, x),
        lambda x: (x, "0.5", None),
        lambda x: (None, 0.5, None),
        lambda x: (torch.nn.Parameter(x, requires_grad=False), 0.5, None),
    ],
)
def test_any_other_call_by_position_does_nothing(rig, by_position, call):
    x = torch.zeros(2, 2, 8)
    _, launch = by_position(x)
    assert launch(*call(x)) is None
    with torch.autocast("cpu"):
        assert launch(x, 0.5, None) is None
    assert len(rig.engine.launches) == 1


def test_a_call_by_position_does_nothing_where_its_expression_says_so(rig, by_position):
    busy = []
    x = torch.zeros(2, 2, 8)
    _, launch = by_position(x, known={"busy": lambda: busy})
    assert launch(x, 0.5, None) is not None
    busy.append(1)
    assert launch(x, 0.5, None) is None


def test_a_parameter_is_recognized_by_position_while_no_gradients_are_recorded(rig, by_position, bound):
    x = torch.nn.Parameter(torch.zeros(2, 2, 8))
    _, launch = by_position(x)
    with torch.no_grad():
        assert launch(x, 0.5, None) is not None
    assert len(bound) == 1


def test_an_error_in_a_launch_by_position_names_the_kernel(rig, by_position):
    x = torch.zeros(2, 2, 8)
    _, launch = by_position(x)
    rig.engine.trouble = RuntimeError("illegal address")
    with pytest.raises(DriverError, match="illegal address"):
        launch(x, 0.5, None)
