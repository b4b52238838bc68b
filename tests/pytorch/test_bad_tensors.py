"""The ops of torch refuse a bad argument by its name, with and without data."""

from __future__ import annotations

import pytest
import torch
from support import fresh

import skuda.torch  # noqa: F401  registers the ops
from skuda.registry import InvalidProblem

SKUDA = torch.ops.skuda
X = torch.linspace(-1, 1, 64).reshape(4, 16)
W, SCALE = torch.arange(-64, 64, dtype=torch.int8).reshape(8, 16), torch.linspace(0.1, 1, 8)
CODES, ZERO = torch.arange(-48, 48, dtype=torch.int8).reshape(2, 3, 16), torch.tensor(0, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": X.to(torch.complex64)}, r"activation must be of one of .* torch\.complex64"),
        ({"weight_scale": SCALE.to(torch.complex64)}, r"weight_scale must be .* complex64"),
        ({"activation": X > 0}, r"activation must be of one of .* torch\.bool"),
        ({"activation": torch.tensor(1.0)}, r"activation must have the axes \(m, k\); had shape \(\)"),
        ({"weight_q": W[None]}, r"weight_q must have the axes \(c_out, k\)"),
        ({"weight_q": W[:, :8]}, r"weight_q must be an array of shape \(8, 16\)"),
        ({"weight_q": W.t()}, r"weight_q must be an array of shape \(16, 16\)"),
        ({"weight_scale": SCALE[:, None]}, r"weight_scale must have the axes \(c_out\)"),
        ({"weight_scale": SCALE[0]}, r"weight_scale must have the axes \(c_out\); had shape \(\)"),
        ({"weight_scale": SCALE[:4]}, r"weight_scale must be an array of shape \(8,\)"),
        ({"bias": SCALE.to(torch.float64)}, r"bias must be .* float64"),
        ({"q_max": 128}, "q_max must"),
        ({"output_element": "f8"}, "output_element must be one of"),
        ({"epilogue": "tanh"}, "epilogue must be one of"),
    ],
)
def test_what_an_op_does_not_take_is_named(change, message):
    good = {"activation": X, "weight_q": W, "weight_scale": SCALE}
    for device in ("cpu", "meta"):
        given = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in (good | change).items()}
        with pytest.raises(InvalidProblem, match=message):
            SKUDA.quantized_linear(**given)


def test_leading_axes_must_agree():
    rest = {"weight_scale": SCALE, "output_element": "f32"}
    assert SKUDA.scaled_linear(CODES, W, act_scale=torch.ones(2, 3), **rest).shape == (2, 3, 8)
    assert SKUDA.scaled_linear(CODES[0, 0], W, act_scale=torch.tensor(1.0), **rest).shape == (8,)
    for shape in ((3, 2), (6,), (2, 3, 1), (1, 2, 3), ()):
        with pytest.raises(InvalidProblem, match=r"act_scale must have the leading axes \(2, 3\)"):
            SKUDA.scaled_linear(CODES, W, act_scale=torch.ones(shape), **rest)


def test_scalars():
    op, x = SKUDA.quantize_per_tensor, torch.tensor([0.3, -4.0])
    want = torch.tensor([3, -40], dtype=torch.int8)
    for shape in ((), (1,), (1, 1)):
        got = op(x, torch.full(shape, 0.1), torch.zeros(shape, dtype=torch.int32), output_element="s8")
        assert torch.equal(got, want)
    assert torch.equal(op(x, 0.1, 0, output_element="s8"), want)
    for bad in (float("nan"), float("inf"), 0.0):
        with pytest.raises(InvalidProblem, match="scale must be finite and not zero"):
            op.number(x, bad, 0, output_element="s8")
    with pytest.raises(InvalidProblem, match=r"zero_point must be .* s32; had an array of int64"):
        op(x, torch.tensor(0.1), torch.tensor(0), output_element="s8")
    with pytest.raises(InvalidProblem, match=r"scale must be a number or an array of one element"):
        op(x, torch.ones(2), ZERO, output_element="s8")
    with pytest.raises(InvalidProblem, match="zero_point must be an integer in"):
        op.number(x, 0.1, 2**40, output_element="s8")
    with pytest.raises(RuntimeError, match=r"type 'int' for argument 'zero_point'"):
        op.number(x, 0.1, 0.5, output_element="s8")
    for given, text in ((4.0, "type 'float'"), ("4", "type 'str'"), (X, "type 'Tensor'")):
        with pytest.raises(RuntimeError, match=text):
            SKUDA.quantized_linear(X, W, SCALE, q_max=given)


def test_packed_elements_need_the_sizes_that_they_hide():
    rng = fresh()
    stored = torch.from_numpy(rng.integers(0, 255, (4, 2), "uint8", endpoint=True))
    given = (stored, SCALE[:4], torch.zeros(4, dtype=torch.int32))
    for device in ("cpu", "meta"):
        moved = [tensor.to(device) for tensor in given]
        with pytest.raises(InvalidProblem, match="shape must be given: input holds two elements to a byte"):
            SKUDA.dequantize_per_channel(*moved, axis=0, input_element="s4", output_element="f32")
        for columns in (3, 4):
            got = SKUDA.dequantize_per_channel(
                *moved, axis=0, shape=[4, columns], input_element="s4", output_element="f32"
            )
            assert got.shape == (4, columns)


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:torch.quantize_per", "ignore:The PyTorch API of nested")
def test_tensors_of_another_kind_are_refused_by_torch():
    for kind in (
        X.to_sparse(),
        X.to_sparse_csr(),
        torch.quantize_per_tensor(X, 0.1, 0, torch.qint8),
        torch.nested.nested_tensor([X, X]),
        torch.nested.nested_tensor([X, X], layout=torch.jagged),
    ):
        with pytest.raises(NotImplementedError, match=r"skuda(::|\.)quantized_linear"):
            SKUDA.quantized_linear(kind, W, SCALE)
    with pytest.raises(NotImplementedError, match="SparseCPU"):
        SKUDA.quantized_linear(X, W.to_sparse(), SCALE)
    with pytest.raises(NotImplementedError, match="no tensor arguments"):
        SKUDA.silu_mul_quantize()
