"""Linear layers of vLLM with int8 weights, as a checkpoint of compressed-tensors describes them, or with 4-bit ones."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.model_loader.reload import layerwise

from skuda.kernels.linear.packed import group_of
from skuda.torch.int4 import int4_weight
from skuda.vllm.config import SkudaVllmConfig

K, HEAD = 64, 16
PARTS = {
    "column": {None: 48},
    "merged": {0: 96, 1: 96},
    "qkv": {"q": 64, "k": 32, "v": 32},
    "row": {None: 48},
    "replicated": {None: 48},
}
"""For each kind of layer, the output channels of its parts by what vLLM's loaders call them."""
ELEMENTS = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}
SCHEMES = {
    f"{dynamic=}, {symmetric=}, {per_channel=}": {
        "dynamic": dynamic,
        "symmetric": symmetric,
        "per_channel": per_channel,
    }
    for dynamic, symmetric, per_channel in itertools.product((True, False), repeat=3)
} | {f"{group_size=}": {"group_size": group_size} for group_size in (0, 32, 64, 128)}
"""What the functions below take. With a group size, weights have 4 bits."""


def quantization(*, group_size=None, **scheme):
    """vLLM's own config of a checkpoint whose linear layers are int8, or skuda's of 4-bit weights."""
    if group_size is not None:
        return SkudaVllmConfig(weights="int4", group_size=group_size)
    return CompressedTensorsConfig.from_config(described(**scheme))


def described(*, dynamic=True, symmetric=True, per_channel=True):
    """What the config of a model says of a checkpoint whose linear layers are int8."""
    common = {"num_bits": 8, "type": "int"}
    weights = {**common, "strategy": "channel" if per_channel else "tensor", "dynamic": False, "symmetric": True}
    inputs = {**common, "strategy": "token" if dynamic else "tensor", "dynamic": dynamic, "symmetric": symmetric}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
    }


def made(kind, dtype, config, *, bias=True, k=K, **more):
    """A layer without weights."""
    with default_dtype(dtype):
        more |= {"bias": bias, "quant_config": config}
        if kind == "qkv":
            return QKVParallelLinear(k, HEAD, 4, 2, **more, prefix="layers.0.self_attn.qkv_proj")
        if kind == "merged":
            return MergedColumnParallelLinear(k, list(PARTS[kind].values()), **more, prefix="layers.0.mlp.gate_up_proj")
        if kind == "row":
            return RowParallelLinear(k, PARTS[kind][None], **more, prefix="layers.0.self_attn.o_proj")
        if kind == "replicated":
            return ReplicatedLinear(k, PARTS[kind][None], **more, prefix="layers.0.self_attn.q_a_proj")
        return ColumnParallelLinear(k, PARTS[kind][None], **more, prefix="layers.0.mlp.up_proj")


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def checkpoint(kind, rng, *, dynamic=True, symmetric=True, per_channel=True, group_size=None, bias=True, k=K):
    """Tensors of each part of a layer by their names in a checkpoint. Parts share the scale of the input."""
    input_scale, zero_point = torch.tensor([rng.uniform(0.01, 0.1)]), torch.tensor([rng.integers(-90, 90)])
    found = {}
    for part, n in PARTS[kind].items():
        codes = torch.from_numpy(rng.integers(-128, 128, (n, k), dtype="int8"))
        scale = torch.from_numpy(rng.uniform(0.001, 0.1, (n, 1) if per_channel else ())).float()
        if group_size is not None:
            codes = int4_weight(torch.from_numpy(rng.standard_normal((n, k))).float(), group_size).packed(group_size)
        found[part] = {"weight": codes, "weight_scale": scale}
        if bias:
            found[part]["bias"] = torch.from_numpy(rng.standard_normal(n))
        if not dynamic:
            found[part]["input_scale"] = input_scale.float()
            if not symmetric:
                found[part]["input_zero_point"] = zero_point.to(torch.int8)
    return found


def load(layer, parts):
    """Write tensors to the parameters of a layer as the loaders of vLLM's models do."""
    parameters = dict(layer.named_parameters())
    for part, tensors in parts.items():
        for name, tensor in tensors.items():
            parameter = parameters[name]
            parameter.weight_loader(parameter, tensor, *(() if part is None else (part,)))


def ready(layer):
    """Process the weights of a layer as vLLM does after it has loaded a model."""
    layer.quant_method.process_weights_after_loading(layer)
    return layer


@contextmanager
def reloading(model):
    """What is loaded into a model goes through the layerwise reload of vLLM."""
    layerwise.initialize_layerwise_reload(model)
    yield
    layerwise.finalize_layerwise_reload(model, SimpleNamespace(dtype=torch.bfloat16))


def memory(layer):
    """Where the tensors of a layer are."""
    return {name: tensor.data_ptr() for name, tensor in (*layer.named_parameters(), *layer.named_buffers())}


def joined(parts, name):
    """A tensor of the whole layer; a scale for each output channel."""
    tensors = [
        (t[name].expand(len(t["weight"]), 1) if name == "weight_scale" and t[name].numel() == 1 else t[name])
        for t in parts.values()
        if name in t
    ]
    return torch.cat(tensors) if tensors else None


def expected(x, parts, *, dynamic=True, symmetric=True, **_):
    """The layer's output by the ops of skuda, on whole tensors. Weights of 4 bits are unpacked first."""
    ops, low = torch.ops.skuda, -127 if dynamic and symmetric else -128
    fields = {"q_min": low, "q_max": 127, "output_element": "s8"}
    first = next(iter(parts.values()))
    if dynamic:
        mode = "symmetric" if symmetric else "asymmetric"
        codes, scale, zero_point = ops.dynamic_range(x, **fields, mode=mode, scope="token")
    else:
        scale, zero_point = first["input_scale"], first.get("input_zero_point", torch.zeros(1)).to(torch.int32)
        codes = ops.quantize_per_tensor(x, scale, zero_point, **fields)
    bias, weight, weight_scale = (joined(parts, name) for name in ("bias", "weight", "weight_scale"))
    if weight.dtype is torch.uint8:
        weight = ops.unpack_weight(weight, n=len(weight_scale), k=x.shape[-1], group_size=group_of(weight.shape[-1]))
    return ops.scaled_linear(
        codes,
        weight,
        scale,
        None if symmetric else zero_point,
        weight_scale.reshape(-1),
        None,
        None if bias is None else bias.to(x.dtype),
        output_element=ELEMENTS[x.dtype],
        act_scale_scope="token" if dynamic else "tensor",
    )
