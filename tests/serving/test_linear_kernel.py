"""vLLM's int8 layers compute what the reference of skuda computes, bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from support import fresh, sampled
from vllm.model_executor.kernels import linear as kernels
from vllm.platforms.interface import PlatformEnum
from vllm_layers import PARTS, SCHEMES, K, checkpoint, expected, load, made, quantization, ready

import skuda.vllm
from skuda.torch.ops.tensor_op import TensorOp
from skuda.vllm import linear_kernel
from skuda.vllm.linear_kernel import SkudaInt8ScaledMMLinearKernel as Kernel

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("kind", sampled(PARTS, 3))
@pytest.mark.parametrize("name", SCHEMES)
def test_a_layer_of_every_scheme_has_the_bits_of_the_reference(served, kind, name):
    rng, scheme = fresh(kind, name), SCHEMES[name]
    k = 5 * K // 2 if "group_size" in scheme else K  # one block and a half of another
    for dtype, bias in itertools.product(DTYPES, (True, False)):
        layer = made(kind, dtype, quantization(**scheme), bias=bias, k=k)
        assert type(layer.scheme.kernel) is Kernel
        parts = checkpoint(kind, rng, **scheme, bias=bias, k=k)
        load(layer, parts)
        ready(layer)
        for rows in (1, 7):
            x = torch.from_numpy(rng.standard_normal((rows, k)) * rng.uniform(0.1, 10)).to(dtype)
            output, _ = layer(x)
            want = expected(x, parts, **scheme)
            assert output.dtype is dtype
            assert torch.equal(output.view(torch.uint8), want.view(torch.uint8))
        assert torch.equal(layer(x[3:4])[0].view(torch.uint8), output[3:4].view(torch.uint8))  # alone


@pytest.mark.parametrize("name", SCHEMES)
def test_calls_like_an_earlier_one_are_not_checked_in_full_again(served, monkeypatch, name):
    rng, scheme = fresh(name), SCHEMES[name]
    layers = [made("qkv", torch.bfloat16, quantization(**scheme)) for _ in range(2)]
    for layer in layers:
        load(layer, checkpoint("qkv", rng, **scheme))
        ready(layer)
    x = torch.from_numpy(rng.standard_normal((5, K))).to(torch.bfloat16)
    first, _ = layers[0](x)
    monkeypatch.delattr(TensorOp, "first_run")
    assert torch.equal(layers[0](x)[0], first)
    assert layers[1](x)[0].shape == first.shape


def test_it_stands_before_the_kernels_of_vllm_once(served):
    for _ in range(2):
        skuda.vllm.register()
    assert [kernel for kernel in kernels._POSSIBLE_INT8_KERNELS[PlatformEnum.CUDA] if kernel is Kernel] == [Kernel]
    assert kernels._POSSIBLE_INT8_KERNELS[PlatformEnum.CUDA][0] is Kernel


def test_a_setting_leaves_vllm_as_it_is(alone, monkeypatch):
    monkeypatch.setitem(kernels._POSSIBLE_INT8_KERNELS, PlatformEnum.CUDA, [])
    monkeypatch.setenv("SKUDA_VLLM", "0")
    skuda.vllm.register()
    assert kernels._POSSIBLE_INT8_KERNELS[PlatformEnum.CUDA] == []
    monkeypatch.setenv("SKUDA_VLLM", "1")
    skuda.vllm.register()
    assert kernels._POSSIBLE_INT8_KERNELS[PlatformEnum.CUDA] == [Kernel]


def test_it_declines_with_a_reason_where_it_cannot_serve(alone, monkeypatch):
    said = []
    monkeypatch.setattr(linear_kernel.logger, "warning_once", lambda text, *values: said.append(text % values))
    assert Kernel.is_supported() == (False, "requires CUDA")
    monkeypatch.setattr(type(linear_kernel.current_platform), "is_cuda", lambda self: True)
    supported, reason = Kernel.is_supported(90)
    assert not supported
    assert "no CUDA kernel of skuda runs here" in reason
    assert said == [f"skuda serves no layer: {reason}"]
    monkeypatch.setattr(linear_kernel, "missing", lambda: "")
    assert Kernel.is_supported(90) == (True, None)
