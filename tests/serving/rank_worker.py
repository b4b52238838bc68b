"""What each rank of `test_ranks` does."""

import itertools
import os
from contextlib import nullcontext
from types import SimpleNamespace

os.environ |= {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_TARGET_DEVICE": "cpu", "VLLM_NO_USAGE_STATS": "1"}

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import destroy_model_parallel, ensure_model_parallel_initialized, init_distributed_environment
from vllm.model_executor.kernels import linear as kernels
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import layerwise
from vllm.platforms import current_platform
from vllm.platforms.interface import PlatformEnum
from vllm_layers import (
    ELEMENTS,
    PARTS,
    K,
    checkpoint,
    default_dtype,
    described,
    expected,
    load,
    made,
    quantization,
    ready,
    reloading,
)

import skuda.vllm
from skuda.torch.formats import TO_INT8, quantizer
from skuda.torch.int4 import int4_weight
from skuda.vllm import linear_method
from skuda.vllm.config import SkudaVllmConfig
from skuda.vllm.linear_kernel import SkudaInt8ScaledMMLinearKernel as Kernel

RANK, COUNT, SEED = 0, 1, 0
"""Which rank of how many this is, and the seed of what it draws: `every` sets them."""
HEADS = {"q": 4, "k": 2, "v": 2}
SCHEMES = tuple(
    {"dynamic": dynamic, "symmetric": symmetric, "per_channel": per_channel}
    for dynamic, symmetric in ((True, True), (False, True), (False, False))
    for per_channel in (True, False)
)
DYNAMIC, STATIC = SCHEMES[0], SCHEMES[-1]
MERGED, WIDE = PARTS["merged"], 512
CONFIG = VllmConfig()
CONFIG.quant_config = SkudaVllmConfig()
KEY = current_platform.pass_key
OF_ONE = {}
"""Outputs of one rank, by the number of rows."""
# vLLM 0.26 asks its library for this op when it builds the layer.
torch.library.define("_C::silu_and_mul", "(Tensor! result, Tensor input) -> ()")


def drawn(*case):
    """Random numbers, the same on every rank and for every number of ranks."""
    return np.random.default_rng([SEED, *map(ord, " ".join(map(str, case)))])


def inputs(rng, rows, dtype, k=K):
    """Rows whose largest magnitude is on one rank."""
    return torch.from_numpy(rng.standard_normal((rows, k)) * rng.uniform(0.01, 3, (rows, k)) ** 3).to(dtype)


def own(kind, whole, degree):
    """What a rank has of the output of the whole layer."""
    if kind in ("row", "replicated") or degree == 1:
        return whole
    rank = RANK % degree
    counts = [min(degree, HEADS.get(part, degree)) for part in PARTS[kind]]
    parts = zip(whole.split(list(PARTS[kind].values()), -1), counts, strict=True)
    return torch.cat([part.chunk(count, -1)[rank * count // degree] for part, count in parts], -1)


def called(layer, x, degree, forward=None):
    """The layer's output for the rank's part of the input."""
    return (forward or layer)(x.chunk(degree, -1)[RANK % degree] if getattr(layer, "input_is_parallel", False) else x)


def right(layer, kind, x, parts, degree, scheme, forward=None):
    """Whether the layer's output has the bits of the whole layer."""
    want = own(kind, expected(x, parts, dynamic=scheme["dynamic"], symmetric=scheme["symmetric"]), degree)
    found, _ = called(layer, x, degree, forward)
    return found.dtype is x.dtype and torch.equal(found.contiguous().view(torch.uint8), want.view(torch.uint8))


def new(kind, dtype, scheme, **more):
    """A layer of a checkpoint without weights."""
    config = quantization(**scheme) if "group_size" in scheme else SkudaVllmConfig.from_config(described(**scheme))
    return made(kind, dtype, config, **more)


def floats(kind, rng, dtype):
    """Floating weights of a layer, and what becomes of them."""
    weights = {part: torch.from_numpy(rng.standard_normal((n, K))).to(dtype) for part, n in PARTS[kind].items()}
    fields = {"q_min": -127, "q_max": 127, "output_element": "s8"}
    codes = {part: torch.ops.skuda.dynamic_range(weight, **fields)[:2] for part, weight in weights.items()}
    whole = {part: {"weight": code, "weight_scale": scale.view(-1, 1)} for part, (code, scale) in codes.items()}
    return {part: {"weight": weight} for part, weight in weights.items()}, whole


def schemes(degree):
    """Every kind of layer with every scheme, dtype and bias."""
    for kind, (number, scheme), dtype, bias in itertools.product(PARTS, enumerate(SCHEMES), ELEMENTS, (True, False)):
        rng = drawn(kind, number, dtype, bias)
        layer = new(kind, dtype, scheme, bias=bias)
        parts = checkpoint(kind, rng, **scheme, bias=bias)
        load(layer, parts)
        ready(layer)
        for rows in (1, 7):
            yield right(layer, kind, inputs(rng, rows, dtype), parts, degree, scheme)


def rows_with(degree):
    """Layers of columns that get the whole input, that return their bias, and that have several axes of rows."""
    rng = drawn("rows with")
    for scheme, more in itertools.product(
        (DYNAMIC, STATIC), ({}, {"input_is_parallel": False}, {"skip_bias_add": True})
    ):
        layer, parts = new("row", torch.bfloat16, scheme, **more), checkpoint("row", rng, **scheme)
        load(layer, parts)
        ready(layer)
        x = inputs(rng, 6, torch.bfloat16)
        if layer.skip_bias_add:
            bias = called(layer, x, degree)[1]
            yield torch.equal(bias, parts[None].pop("bias").bfloat16())
        yield right(layer, "row", x, parts, degree, scheme)
        found = called(layer, x.view(2, 3, K), degree)[0]
        yield torch.equal(found, called(layer, x, degree)[0].view(2, 3, -1))


def not_split(degree):
    """Layers that every rank has whole, with codes and then with floating weights."""
    for kind, scheme in itertools.product(PARTS, (DYNAMIC, STATIC)):
        rng = drawn("not split", kind, scheme["dynamic"])
        more = {} if kind == "replicated" else {"disable_tp": True}
        layer = new(kind, torch.bfloat16, scheme, bias=False, **more)
        parts, (weights, whole) = checkpoint(kind, rng, **scheme, bias=False), floats(kind, rng, torch.bfloat16)
        load(layer, parts)
        ready(layer)
        x = inputs(rng, 6, torch.bfloat16)
        yield right(layer, kind, x, parts, 1, scheme)
        load(layer, weights)
        yield right(layer, kind, x, {part: parts[part] | whole[part] for part in parts}, 1, scheme)


def floating(degree):
    """Weights of a floating checkpoint, quantized on the way."""
    for kind, dtype in itertools.product(PARTS, ELEMENTS):
        rng = drawn(kind, dtype)
        weights, whole = floats(kind, rng, dtype)
        layer = made(kind, dtype, SkudaVllmConfig(), bias=False)
        yield layer.weight.dtype is torch.int8
        load(layer, weights)
        ready(layer)
        yield right(layer, kind, inputs(rng, 5, dtype), whole, degree, DYNAMIC)


def sixteen_bits(degree):
    """Codes of 16 bits, whose sums are s64; weights are quantized on the way."""
    given = {"weight_element": "s16", "q_min": -32639, "q_max": 32639}
    for kind in PARTS:
        rng = drawn("sixteen bits", kind)
        weights, _ = floats(kind, rng, torch.bfloat16)
        layer = made(kind, torch.bfloat16, SkudaVllmConfig(weights="int16", activations="int16"), bias=False)
        load(layer, weights)
        ready(layer)
        x, make = inputs(rng, 5, torch.bfloat16), quantizer("ranks", "int16")
        whole = [make(each["weight"]) for each in weights.values()]
        outputs = [torch.ops.skuda.quantized_linear(x, codes.flatten(1), scale, **given) for codes, scale in whole]
        yield torch.equal(called(layer, x, degree)[0], own(kind, torch.cat(outputs, -1), degree))


def four_bits(degree):
    """Packed weights: of a checkpoint, quantized on the way, and loaded again by the layerwise reload of vLLM."""
    before = PARTS.copy()
    # 16 rows of each part on a rank, or more; rows that are not cut, any number.
    PARTS.update({"column": {None: 64}, "merged": {0: 64, 1: 128}, "row": {None: 40}})
    for kind, group_size, floating in itertools.product(PARTS, (0, 32, 128), (False, True)):
        rng = drawn("four bits", kind, group_size, floating)
        model = nn.ModuleDict({"layer": new(kind, torch.bfloat16, {"group_size": group_size}, k=WIDE)})
        layer = model["layer"]
        layerwise.record_metadata_for_reloading(model)
        yield layer.weight.dtype is torch.uint8
        for reloads in (False, False, True):
            parts = checkpoint(kind, rng, group_size=group_size, k=WIDE)
            given = {part: dict(tensors) for part, tensors in parts.items()}
            for part, n in PARTS[kind].items() if floating else ():
                del given[part]["weight_scale"]
                weight = given[part]["weight"] = torch.from_numpy(rng.standard_normal((n, WIDE))).bfloat16()
                whole = int4_weight(weight, group_size)
                parts[part] |= {"weight": whole.packed(group_size), "weight_scale": whole.channel_scale.view(-1, 1)}
            with reloading(model) if reloads else nullcontext():
                load(layer, given)
            if not reloads:
                ready(layer)
            yield right(layer, kind, inputs(rng, 5, torch.bfloat16, WIDE), parts, degree, DYNAMIC)
    PARTS.update(before)


def compiled(degree):
    """One graph for any number of rows."""
    backend = "inductor" if degree == 2 else "aot_eager"
    cases = itertools.product(PARTS if degree == COUNT else ("row",), (DYNAMIC, STATIC))
    for kind, scheme in (*cases, ("row", DYNAMIC | {"group_size": 64})):
        rng, k = drawn("compiled", kind, *scheme.items()), WIDE if "group_size" in scheme else K
        layer, parts = new(kind, torch.bfloat16, scheme, k=k), checkpoint(kind, rng, **scheme, k=k)
        load(layer, parts)
        ready(layer)
        torch.compiler.reset()
        forward = torch.compile(layer.forward, fullgraph=True, dynamic=True, backend=backend)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for rows in (3, 8, 5):
                yield right(layer, kind, inputs(rng, rows, torch.bfloat16, k), parts, degree, scheme, forward)


class Gated(nn.Module):
    """What a decoder layer has behind its attention."""

    def __init__(self, rng):
        super().__init__()
        with default_dtype(torch.bfloat16):
            self.norm, self.act = RMSNorm(K), SiluAndMul()
        self.up, self.down = new("merged", torch.bfloat16, DYNAMIC), new("row", torch.bfloat16, DYNAMIC, k=WIDE)
        for layer, kind, k in ((self.up, "merged", K), (self.down, "row", WIDE)):
            load(layer, checkpoint(kind, rng, **DYNAMIC, k=k))
            ready(layer)

    def forward(self, x):
        h, _ = self.up(self.norm.forward_native(x))
        return self.down(self.act.forward_native(h))[0]


def gated(degree):
    """Layers around a norm and a gated activation, in a graph with the pass of `skuda.vllm`."""
    torch.compiler.reset()
    rng = drawn("gated")
    PARTS["merged"] = {0: WIDE, 1: WIDE}
    model = Gated(rng)
    PARTS["merged"] = MERGED
    options = CONFIG.compilation_config.inductor_compile_config
    forward = torch.compile(model, fullgraph=True, dynamic=True, options={KEY: options[KEY]})
    for rows in (3, 8, 5):
        x = inputs(rng, rows, torch.bfloat16)
        found, coded = forward(x), model.down.scheme.kernel.gated(model.down, model.up(x)[0])
        yield torch.equal(found, OF_ONE.setdefault(rows, found))
        yield torch.equal(coded, OF_ONE.setdefault(("coded", rows), coded))


def head(degree):
    """A head of which each rank has a part of the vocabulary."""
    rng = drawn("head")
    weight, x = torch.from_numpy(rng.standard_normal((100, WIDE))).bfloat16(), inputs(rng, 5, torch.bfloat16, WIDE)
    for more in ({}, {"weights": "int4", "group_size": 64}):
        with default_dtype(torch.bfloat16):
            layer = ParallelLMHead(100, WIDE, quant_config=SkudaVllmConfig(head=True, **more), prefix="lm_head")
        layer.weight.weight_loader(layer.weight, weight)
        ready(layer)
        yield len(layer.weight_scale) == 128 // degree
        found = LogitsProcessor(100)(layer, x)
        codes, scale = (quantizer("head", **more) if more else TO_INT8)(weight)
        yield torch.equal(found, torch.ops.skuda.quantized_linear(x, codes, scale.view(-1, 1), output_element="f32"))


class OwnMaximum:
    """The ops, but each rank uses the maximum of its own columns."""

    def __getattr__(self, name):
        found = getattr(torch.ops.skuda, name)
        if name == "all_reduce":
            return SimpleNamespace(default=lambda x, how, group: x if how == "max" else found.default(x, how, group))
        return found


def faults(degree):
    """Whether wrong layers have the right bits: with maxima of their own, and with parts rounded before the sum."""
    rng = drawn("faults")
    layer, parts = new("row", torch.bfloat16, DYNAMIC), checkpoint("row", rng, **DYNAMIC)
    load(layer, parts)
    ready(layer)
    x = inputs(rng, 16, torch.bfloat16)
    linear_method._OPS = OwnMaximum()
    yield right(layer, "row", x, parts, degree, DYNAMIC)
    linear_method._OPS = torch.ops.skuda
    yield right(layer, "row", x, parts, degree, DYNAMIC)
    kernel = layer.scheme.kernel
    layer.scheme.kernel, layer.reduce_results = Kernel(kernel.config, kernel.layer_param_names), True
    yield right(layer, "row", x, parts, degree, DYNAMIC)


def every(folder, count, seed):
    """Return what all cases found on 1, 2, ... and `count` ranks, by their names and numbers of ranks."""
    global RANK, COUNT, SEED
    RANK, COUNT, SEED = (rank := int(os.environ["RANK"])), count, seed
    Kernel.is_supported = classmethod(lambda cls, compute_capability=None: (True, None))
    skuda.vllm.register()
    kernels._POSSIBLE_INT8_KERNELS[PlatformEnum.CPU] = kernels._POSSIBLE_INT8_KERNELS[PlatformEnum.CUDA]
    found, degree = {}, 1
    layers = schemes, rows_with, not_split, floating, four_bits, sixteen_bits
    with set_current_vllm_config(CONFIG):
        init_distributed_environment(count, rank, f"file://{folder}/store", rank, "gloo")
        while degree <= count:
            ensure_model_parallel_initialized(degree, 1)
            with torch.inference_mode():
                for case in (*layers, compiled, gated, head, faults):
                    found[f"{case.__name__} {degree}"] = list(case(degree))
            destroy_model_parallel()
            degree *= 2
    torch.distributed.barrier()
    return found
