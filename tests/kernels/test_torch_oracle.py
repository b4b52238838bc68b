"""PyTorch on the CPU as a second oracle, and torch tensors in and out.

PyTorch multiplies by the reciprocal of the scale where we divide: scales are powers of two, so both are exact. Its
gradient is ``dy * mask``, ours ``mask ? dy : 0``: zeros are compared as numbers. Inputs are finite and moderate.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from support import assert_same_bits, dispatcher, fresh

from skuda.registry.errors import InvalidProblem

torch = pytest.importorskip("torch")

FLOATS = {"f32": torch.float32, "f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16}


@pytest.mark.parametrize("exponent", [-7, -3, 0, 4])
@pytest.mark.parametrize(("zero_point", "low", "high"), [(0, -128, 127), (3, -8, 7), (128, 0, 255)])
def test_fake_quantize_and_its_gradient_per_tensor(exponent, zero_point, low, high):
    scale, rng = 2.0**exponent, fresh(exponent, zero_point)
    x = (rng.integers(-600, 601, (40, 50)) / 4 * scale).astype(np.float32)  # with ties
    dy = rng.standard_normal(x.shape).astype(np.float32)
    theirs = torch.from_numpy(x).requires_grad_()
    y = torch.fake_quantize_per_tensor_affine(theirs, scale, zero_point, low, high)
    y.backward(torch.from_numpy(dy))
    fields = {"numel": x.size, "q_min": low, "q_max": high, "input_element": "f32"}
    describe, arrays = dispatcher().describe, {"input": x, "scale": scale, "zero_point": zero_point}
    ours = dispatcher().run(describe("fake_quantize", **fields), **arrays)
    assert_same_bits(ours, y.detach().numpy())
    gradient = dispatcher().run(describe("fake_quantize_backward", **fields), d_output=dy, **arrays)
    assert 0 < np.count_nonzero(gradient) < x.size
    np.testing.assert_array_equal(gradient, theirs.grad.numpy())


@pytest.mark.parametrize("epilogue", ["identity", "bias", "bias_relu"])
@pytest.mark.parametrize(("m", "n", "k"), [(7, 9, 33), (130, 65, 2100), (1, 1, 1)])
def test_linear_with_torch_s_integer_product(m, n, k, epilogue):
    rng = fresh(m, n, k, epilogue)
    act, weight = (torch.from_numpy(rng.integers(-128, 128, shape, np.int8)) for shape in ((m, k), (n, k)))
    shift = torch.from_numpy(rng.integers(-128, 128, n, np.int32))
    scale, bias = (torch.from_numpy(rng.standard_normal(n).astype(np.float32)) for _ in range(2))
    acc = act.int() @ weight.int().T - act.int().sum(1, keepdim=True).int() * shift
    want = (torch.tensor(0.037) * scale) * acc.float()
    want = want if epilogue == "identity" else want + bias
    want = torch.relu(want) if epilogue == "bias_relu" else want
    problem = dispatcher().describe(
        "smoothquant_linear",
        **dict(zip("mnk", (m, n, k), strict=True)),
        act_scale=0.037,
        output_element="f32",
        epilogue=epilogue,
        has_weight_zero_point=True,
    )
    arrays = {"act_q": act, "weight_q": weight, "weight_scale": scale, "weight_zero_point": shift}
    got = dispatcher().run(problem, **arrays, **({} if epilogue == "identity" else {"bias": bias}))
    assert_same_bits(got.numpy() + 0, want.numpy() + 0)


# --- tensors in, tensors out -----------------------------------------------------------------------------------------


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


UNUSABLE = {
    "requires grad": lambda: torch.zeros(4).requires_grad_(),
    "sparse": lambda: torch.zeros(4).to_sparse(),
    "meta": lambda: torch.zeros(4, device="meta"),
    "negated lazily": lambda: torch.zeros(4, dtype=torch.complex64).conj().imag,
    "float8": lambda: torch.zeros(4, dtype=torch.float8_e4m3fn),
    "float64": lambda: torch.zeros(4, dtype=torch.float64),
}


@pytest.mark.parametrize("kind", UNUSABLE)
@pytest.mark.parametrize("name", ["input", "output"])
def test_a_tensor_that_cannot_be_used_where_it_is_is_refused_by_name(kind, name):
    problem = dispatcher().describe("fake_quantize", numel=4, q_min=-8, q_max=7, input_element="f32")
    with pytest.raises(InvalidProblem) as caught:
        dispatcher().run(problem, **{"input": torch.zeros(4), name: UNUSABLE[kind]()}, scale=1.0, zero_point=0)
    assert caught.value.field == name


def test_an_expanded_tensor_may_be_read_and_not_written():
    problem = dispatcher().describe("fake_quantize", numel=4, q_min=-8, q_max=7, input_element="f32")
    one = torch.full((1,), 2.4).expand(4)
    assert dispatcher().run(problem, input=one, scale=1.0, zero_point=0).tolist() == [2.0] * 4
    with pytest.raises(InvalidProblem, match="output must have one place in memory"):
        dispatcher().run(problem, input=torch.zeros(4), scale=1.0, zero_point=0, output=one)
