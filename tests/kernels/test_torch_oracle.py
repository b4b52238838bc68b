"""PyTorch on the CPU as a second oracle, and torch tensors in and out.

Where PyTorch means something else, the inputs are chosen so that both agree:

- it multiplies by the reciprocal of the scale where we divide: scales are powers of two, so both are exact;
- per channel, and when it makes quantized tensors, it may add the zero point before it rounds: no quotient is half
  way between two integers there (per tensor fake quantization rounds first, as we do, so ties are kept);
- its gradient is ``dy * mask``, ours ``mask ? dy : 0``: a zero may have another sign, so zeros are compared as numbers;
- casting infinities, NaN or numbers beyond int64 is undefined in its kernels: inputs are finite and moderate;
- dequantizing may be one fused multiply-add: exact, too, for powers of two.
"""

from __future__ import annotations

import warnings

import ml_dtypes
import numpy as np
import pytest
from support import assert_same_bits, dispatcher, fresh

import skuda
from skuda.registry.errors import InvalidProblem

torch = pytest.importorskip("torch")

FLOATS = {"f32": torch.float32, "f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16}
CODES = {"s8": (torch.qint8, -128, 127), "u8": (torch.quint8, 0, 255)}


def _quarters(shape, scale, rng, *, ties):
    """Draw multiples of a quarter step within about 150 steps, halves among them or not."""
    steps = rng.integers(-600, 601, shape)
    if not ties:
        steps = np.where(steps % 4 == 2, steps + 1, steps)
    return (steps / 4 * scale).astype(np.float32)


def _quantized(make, *args):
    """Make a quantized tensor; torch may warn that these are on their way out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(*args)


@pytest.mark.parametrize("exponent", [-7, -3, 0, 4])
@pytest.mark.parametrize(("zero_point", "low", "high"), [(0, -128, 127), (3, -8, 7), (128, 0, 255)])
def test_fake_quantize_and_its_gradient_per_tensor(exponent, zero_point, low, high):
    scale, rng = 2.0**exponent, fresh(exponent, zero_point)
    x = _quarters((40, 50), scale, rng, ties=True)
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


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_fake_quantize_and_its_gradient_per_channel(axis):
    rng = fresh(axis)
    shape = (6, 5, 7)
    scale = np.exp2(rng.integers(-6, 3, shape[axis])).astype(np.float32)
    zero_point = rng.integers(-8, 8, shape[axis], np.int32)
    along = [-1 if i == axis else 1 for i in range(3)]
    x = _quarters(shape, scale.reshape(along), rng, ties=False)
    dy = rng.standard_normal(shape).astype(np.float32)
    theirs = torch.from_numpy(x).requires_grad_()
    parameters = torch.from_numpy(scale), torch.from_numpy(zero_point)
    y = torch.fake_quantize_per_channel_affine(theirs, *parameters, axis, -100, 90)
    y.backward(torch.from_numpy(dy))
    fields = {"shape": shape, "axis": axis, "q_min": -100, "q_max": 90, "input_element": "f32"}
    describe, arrays = dispatcher().describe, {"input": x, "scale": scale, "zero_point": zero_point}
    ours = dispatcher().run(describe("fake_quantize_per_channel", **fields), **arrays)
    assert_same_bits(ours, y.detach().numpy())
    gradient = dispatcher().run(describe("fake_quantize_per_channel_backward", **fields), d_output=dy, **arrays)
    assert 0 < np.count_nonzero(gradient) < x.size
    np.testing.assert_array_equal(gradient, theirs.grad.numpy())


@pytest.mark.parametrize("code", CODES)
def test_quantize_and_dequantize_per_tensor(code):
    kind, low, high = CODES[code]
    rng, scale, zero_point = fresh(code), 0.25, low + 100
    x = _quarters((1000,), scale, rng, ties=False)
    theirs = _quantized(torch.quantize_per_tensor, torch.from_numpy(x), scale, zero_point, kind)
    describe = dispatcher().describe
    there = describe("quantize_per_tensor", numel=1000, q_min=low, q_max=high, input_element="f32", output_element=code)
    codes = dispatcher().run(there, input=x, scale=scale, zero_point=zero_point)
    assert_same_bits(codes, _quantized(theirs.int_repr).numpy())
    back = describe("dequantize_per_tensor", numel=1000, input_element=code, output_element="f32")
    real = dispatcher().run(back, input=codes, scale=scale, zero_point=zero_point)
    assert_same_bits(real, _quantized(theirs.dequantize).numpy())


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("code", CODES)
def test_quantize_and_dequantize_per_channel(code, axis):
    kind, low, high = CODES[code]
    rng, shape = fresh(code, axis), (9, 11)
    scale = np.exp2(rng.integers(-6, 3, shape[axis])).astype(np.float32)
    zero_point = rng.integers(low, high, shape[axis], np.int32)
    x = _quarters(shape, scale.reshape([-1, 1] if axis == 0 else [1, -1]), rng, ties=False)
    parameters = torch.from_numpy(scale).double(), torch.from_numpy(zero_point).long()
    theirs = _quantized(torch.quantize_per_channel, torch.from_numpy(x), *parameters, axis, kind)
    describe, arrays = dispatcher().describe, {"scale": scale, "zero_point": zero_point}
    fields = {"shape": shape, "axis": axis}
    there = describe("quantize_per_channel", **fields, q_min=low, q_max=high, input_element="f32", output_element=code)
    codes = dispatcher().run(there, input=x, **arrays)
    assert_same_bits(codes, _quantized(theirs.int_repr).numpy())
    back = describe("dequantize_per_channel", **fields, input_element=code, output_element="f32")
    assert_same_bits(dispatcher().run(back, input=codes, **arrays), _quantized(theirs.dequantize).numpy())


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


@pytest.mark.parametrize("scope", ["token", "tensor"])
@pytest.mark.parametrize(("m", "n", "k"), [(7, 9, 33), (130, 65, 2100), (1, 1, 1)])
def test_scaled_linear_and_its_sums_with_torch_s_integer_product(m, n, k, scope):
    rng = fresh(m, n, k, scope)
    act, weight = (torch.from_numpy(rng.integers(-128, 128, shape, np.int8)) for shape in ((m, k), (n, k)))
    rows = m if scope == "token" else 1
    za, zw = (torch.from_numpy(rng.integers(-128, 128, count, np.int32)) for count in (rows, n))
    sa, sw = (torch.from_numpy(rng.standard_normal(count).astype(np.float32)) for count in (rows, n))
    acc = (act.int() - za[:, None]) @ (weight.int() - zw[:, None]).T
    fields = dict(zip("mnk", (m, n, k), strict=True))
    flags = {"act_scale_scope": scope, "has_act_zero_point": True, "has_weight_zero_point": True}
    problem = dispatcher().describe("scaled_linear", **fields, output_element="f32", **flags)
    arrays = {"act_scale": sa, "act_zero_point": za, "weight_scale": sw, "weight_zero_point": zw}
    got = dispatcher().run(problem, act_q=act, weight_q=weight, **arrays)
    assert_same_bits(got.numpy() + 0, ((sa[:, None] * sw) * acc.float()).numpy() + 0)
    sums = dispatcher().describe("scaled_linear", **fields, output_element="s32")
    assert torch.equal(dispatcher().run(sums, act_q=act, weight_q=weight), act.int() @ weight.int().T)


def test_activations_are_torch_s_gelu_and_silu():
    bias = torch.linspace(-12, 12, 4001, dtype=torch.float64)
    functional = torch.nn.functional
    for name, function in (("bias_gelu", functional.gelu), ("bias_silu", functional.silu)):
        problem = dispatcher().describe(
            "smoothquant_linear", m=1, n=4001, k=1, act_scale=1.0, output_element="f64", epilogue=name
        )
        codes = torch.zeros((1, 1), dtype=torch.int8), torch.zeros((4001, 1), dtype=torch.int8)
        got = dispatcher().run(
            problem, act_q=codes[0], weight_q=codes[1], weight_scale=torch.ones(4001, dtype=torch.float64), bias=bias
        )
        # torch's own erf form cancels in the negative tail.
        torch.testing.assert_close(got[0], function(bias), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("element", ["f32", "f64", "bf16", "f16"])
@pytest.mark.parametrize("op", ["rms_norm_quantize", "layer_norm_quantize"])
def test_norms_are_torch_s_but_for_the_order_of_the_sums(op, element):
    rng, (n, d), eps = fresh(op, element), (7, 1000), 1e-5
    x, more = (torch.from_numpy(rng.standard_normal((n, d)) + 1).to(FLOATS[element]) for _ in range(2))
    weight, bias = (torch.from_numpy(rng.standard_normal(d)).to(FLOATS[element]) for _ in range(2))
    functional, wide = torch.nn.functional, torch.float64
    arrays = {"input": x, "residual": more, "weight": weight}
    if op == "rms_norm_quantize":
        want = functional.rms_norm((x + more).to(wide), (d,), weight.to(wide), eps)
    else:
        arrays["bias"] = bias
        want = functional.layer_norm((x + more).to(wide), (d,), weight.to(wide), bias.to(wide), eps)
    run = getattr(skuda.ops, op)
    found = run(**arrays, eps=eps, output_element="s8", has_normalized=True, dispatcher=dispatcher())
    assert torch.equal(found.residual_out, x + more)
    # Some roundings in C, and one to T, of numbers up to about 16.
    step = torch.finfo(x.dtype).eps * 8
    compute = torch.finfo(torch.float64 if element == "f64" else torch.float32).eps * 64
    torch.testing.assert_close(found.normalized_out.to(wide), want, rtol=step / 8, atol=compute)
    back = found.output.to(wide) * found.scale_out.to(wide)[:, None]
    assert bool(((back - want).abs() <= found.scale_out.to(wide)[:, None] * 0.51 + want.abs() * step).all())


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


def test_strided_tensors_and_one_element_tensors_are_read_in_place():
    x = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)[::2, 1::2]
    problem = dispatcher().describe("fake_quantize", numel=6, q_min=-128, q_max=127, input_element="bf16")
    scale, zero_point = torch.tensor([2.0]), torch.tensor(3, dtype=torch.int32)
    got = dispatcher().run(problem, input=x, scale=scale, zero_point=zero_point)
    assert torch.equal(got, torch.round(x.float() / 2).mul(2).bfloat16())


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
