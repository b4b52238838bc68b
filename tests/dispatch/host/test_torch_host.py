"""Torch tensors on the CPU: subclasses, and the mode that flushes subnormal numbers."""

from __future__ import annotations

import warnings

import ml_dtypes
import numpy as np
import pytest
from support import assert_same_bits, dispatcher

import skuda
from skuda.dispatch.host.arrays import host_view
from skuda.registry import FloatModeError, InvalidProblem
from skuda.tools import smoothquant

torch = pytest.importorskip("torch")

PROBLEM = dispatcher().describe(
    "quantize_per_token", n=2, d=3, q_min=-8, q_max=7, input_element="f32", output_element="s8"
)
X, SCALE = np.float32([[0.3, -1.2, 3], [9, 0, -4]]), np.float32([0.5, 2])


class Loud(torch.Tensor):
    """A tensor whose every use by name of torch runs code of ours."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"code of a subclass ran: {func}")


def loud(array):
    with torch._C.DisableTorchFunctionSubclass():
        return torch.from_numpy(array).as_subclass(Loud)


def test_the_code_of_a_subclass_never_runs():
    zero_point = np.int32([0, 1])
    want = dispatcher().run(PROBLEM, input=X, scale=SCALE, zero_point=zero_point)
    memory = np.zeros((2, 3), np.int8)
    output = loud(memory)
    given = {"input": loud(X), "scale": loud(SCALE), "zero_point": loud(zero_point)}
    assert dispatcher().run(PROBLEM, **given, output=output) is output
    assert_same_bits(memory, want)
    made = skuda.ops.quantize_per_token(**given, output_element="s8", q_min=-8, q_max=7)
    assert type(made) is torch.Tensor
    assert_same_bits(made.numpy(), want)
    seen = host_view("op", "x", given["input"])
    assert type(seen) is np.ndarray
    assert np.shares_memory(seen, X)


def test_parameters_are_tensors():
    for kind in (torch.nn.Parameter, torch.nn.Buffer):
        given = torch.from_numpy(X)
        given = kind(given, requires_grad=False) if kind is torch.nn.Parameter else kind(given)
        assert np.shares_memory(host_view("op", "x", given), X)
    with pytest.raises(InvalidProblem, match=r"detach\(\)"):
        host_view("op", "x", torch.nn.Parameter(torch.from_numpy(X)))


DTYPES = {
    "bool": "?", "int8": "i1", "int16": "i2", "int32": "i4", "int64": "i8", "uint8": "u1", "uint16": "u2",
    "uint32": "u4", "uint64": "u8", "float16": "f2", "float32": "f4", "float64": "f8", "bfloat16": ml_dtypes.bfloat16,
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_have_the_memory_the_shape_and_the_strides(dtype):
    whole = torch.arange(24).reshape(2, 3, 4).to(getattr(torch, dtype))
    for tensor in (
        whole,
        whole[1],
        whole[:, 1:, ::2],
        whole.transpose(0, 2),
        whole[0, 0].expand(5, 4),
        whole[:0],
        whole[:, :, :0],
        whole[1, 1, 1],
    ):
        seen = host_view("op", "x", tensor)
        assert seen.dtype == np.dtype(DTYPES[dtype])
        assert seen.shape == tensor.shape
        assert seen.astype("f8").tolist() == tensor.double().tolist()
        assert seen.flags.writeable
        if seen.size:
            assert seen.ctypes.data == tensor.data_ptr()
            assert seen.strides == tuple(stride * tensor.itemsize for stride in tensor.stride())


def test_a_view_keeps_its_memory():
    seen = host_view("op", "x", torch.full((1000, 1000), 3.0))[5:].reshape(-1)
    others = [torch.zeros(1000, 1000) for _ in range(5)]  # would take memory that is free
    assert len(others) == 5
    assert (seen == 3).all()


def test_inputs_can_be_resized_after_a_call():
    zero_point = torch.zeros(2, dtype=torch.int32)
    x, scale = torch.from_numpy(X).clone(), torch.from_numpy(SCALE).clone()
    for _ in range(3):  # first by the checks, then by a launch
        dispatcher().run(PROBLEM, input=x, scale=scale, zero_point=zero_point)
        skuda.ops.quantize_per_token(
            input=x, scale=scale, zero_point=zero_point, output_element="s8", q_min=-8, q_max=7
        )
    for tensor in (x, scale, zero_point):
        tensor.resize_(100)
        tensor.untyped_storage().resize_(0)  # as `fully_shard` does
        with pytest.raises(InvalidProblem, match="it has no memory"):
            host_view("op", "x", tensor)


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:torch.quantize_per", "ignore:Casting")
def test_tensors_that_are_no_plain_memory_are_refused():
    x, wave = torch.ones(2, 2), torch.ones(2, 2, dtype=torch.complex64)
    for wrong in (
        x.to_sparse(),
        x.to_sparse_csr(),
        x.to_mkldnn(),
        x.to(torch.float8_e4m3fn),
        torch._neg_view(x),
        torch._efficientzerotensor(3),
        wave.conj(),
        torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    ):
        with pytest.raises(InvalidProblem, match="be readable without a copy"):
            host_view("op", "x", wrong)
    assert host_view("op", "x", wave).dtype == np.complex64


def test_a_subclass_that_stands_for_other_tensors_is_refused():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.masked import masked_tensor

    with FakeTensorMode():
        fake = torch.zeros(2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # masked tensors are a prototype
        masked = masked_tensor(torch.from_numpy(X), torch.ones(2, 3, dtype=torch.bool))
        for wrong in (fake, masked):
            with pytest.raises(InvalidProblem, match="input must be an ordinary tensor") as caught:
                dispatcher().run(PROBLEM, input=wrong, scale=SCALE, zero_point=np.int32([0, 0]))
            assert type(wrong).__name__ in caught.value.had


def test_flushed_subnormals_are_refused_until_they_are_kept_again():
    if not torch.set_flush_denormal(False):
        pytest.skip("this processor has no such mode")
    x, scale = np.float32([[1e-40, 1, 2], [3, 4, 5]]), np.float32([1e-41, 1])
    plan, given = dispatcher().select(PROBLEM), {"input": x, "scale": scale, "zero_point": np.int32([0, 0])}
    want, bound = plan.run(**given), plan.bind(**given)
    assert want[0, 0] == 7, "a subnormal number counts"
    weight = np.float32([[1, 2]])
    try:
        for call in (lambda: plan.run(**given), bound, lambda: smoothquant.quantize_weight(dispatcher(), weight)):
            torch.set_flush_denormal(True)
            with pytest.raises(FloatModeError, match=r"torch\.set_flush_denormal\(False\)"):
                call()
            torch.set_flush_denormal(False)
            call()
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits(plan.run(**given), want)
