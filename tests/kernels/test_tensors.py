"""Tensors of torch on the CPU: the results are tensors with the bits of arrays, and given ones are written in place."""

from __future__ import annotations

import ml_dtypes
import pytest
from support import assert_same_bits, dispatcher, fresh

from skuda.registry.errors import InvalidProblem

torch = pytest.importorskip("torch")

FLOATS = {"f32": torch.float32, "f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16}


def _array(tensor):
    """Copy a tensor into an array; bf16, which NumPy lacks, by its bits."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().copy().view(ml_dtypes.bfloat16)
    return tensor.numpy().copy()


@pytest.mark.parametrize("element", FLOATS)
def test_tensors_in_give_tensors_out_and_the_same_bits_as_arrays(element):
    rng = fresh(element)
    x = torch.from_numpy(rng.standard_normal((6, 8))).to(FLOATS[element])
    fields = {"q_min": -127, "q_max": 127, "input_element": element}
    problem = dispatcher().describe("dynamic_range", n=6, d=8, output_element="s8", **fields)
    found = dispatcher().run(problem, input=x)
    assert [type(part) for part in found] == [torch.Tensor] * 3
    compute = torch.float64 if element == "f64" else torch.float32
    assert [part.dtype for part in found] == [torch.int8, compute, torch.int32]
    fake = dispatcher().describe("fake_quantize_per_token", n=6, d=8, **fields)
    y = dispatcher().run(fake, input=x, scale=found.scale_out, zero_point=found.zero_point_out)
    assert (type(y), y.dtype, y.shape) == (torch.Tensor, x.dtype, x.shape)
    back = dispatcher().describe("dequantize_per_token", n=6, d=8, input_element="s8", output_element=element)
    again = dispatcher().run(back, input=found.output, scale=found.scale_out, zero_point=found.zero_point_out)
    assert torch.equal(again, y)
    for part, want in zip(found, dispatcher().run(problem, input=_array(x)), strict=True):
        assert_same_bits(part.numpy(), want)
    arrays = {"input": _array(x), "scale": found.scale_out.numpy(), "zero_point": found.zero_point_out.numpy()}
    assert_same_bits(_array(y), dispatcher().run(fake, **arrays))


@pytest.mark.parametrize("element", FLOATS)
@pytest.mark.parametrize("transposed", [False, True])
def test_given_tensors_are_written_where_they_are(element, transposed):
    fields = {"numel": 12, "q_min": -8, "q_max": 7, "input_element": element}
    problem = dispatcher().describe("fake_quantize", **fields)
    x = torch.linspace(-3, 3, 12, dtype=torch.float64).to(FLOATS[element]).reshape(3, 4)
    room = torch.full((4, 3) if transposed else (3, 4), float("nan"), dtype=x.dtype)
    out = room.T if transposed else room
    got = dispatcher().run(problem, input=x, scale=0.5, zero_point=1, output=out)
    assert got is out
    want = (torch.round(x.double() / 0.5) + 1).clamp(-8, 7).sub(1).mul(0.5)
    assert torch.equal(out.double(), want)
    before = x.data_ptr()
    assert dispatcher().run(problem, input=x, scale=0.5, zero_point=1, output=x) is x
    assert x.data_ptr() == before
    assert torch.equal(x.double(), want)


def test_an_expanded_tensor_may_be_read_and_not_written():
    problem = dispatcher().describe("fake_quantize", numel=4, q_min=-8, q_max=7, input_element="f32")
    one = torch.full((1,), 2.4).expand(4)
    assert dispatcher().run(problem, input=one, scale=1.0, zero_point=0).tolist() == [2.0] * 4
    with pytest.raises(InvalidProblem, match="output must have one place in memory"):
        dispatcher().run(problem, input=torch.zeros(4), scale=1.0, zero_point=0, output=one)
