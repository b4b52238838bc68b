"""The calls whose cost on the host ``skuda bench-model`` measures: small layers in bf16, and what replaces them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from skuda.dispatch import Dispatcher
from skuda.dispatch.system.packages import installed
from skuda.kernels.linear import QuantizedLinearDescriptor
from skuda.kernels.quantize import FakeQuantizeDescriptor
from skuda.registry.device import Device
from skuda.tools.bench.clock import Replay
from skuda.tools.studies.llama import LlamaMLP, LlamaSizes, config_of
from skuda.tools.studies.model import NO_OP, OPS
from skuda.torch import Dynamic, DynamicLinear, StaticLinear, fuse_, quantize_
from skuda.torch.linear.joined import JoinedLinear

_ROWS = 4
_CODES: Any = {"q_min": -127, "q_max": 127}
_SIZES = LlamaSizes(hidden=256, intermediate=512, heads=4, kv_heads=2, layers=1)
"""The device has little to do, so that a burst of calls never waits for it."""


def host_calls(device: Device, place: torch.device) -> dict[str, Replay]:
    """Return the calls by name; `skuda.tools.studies.model.HOST` has which of them replace which."""
    linear = nn.Linear(_SIZES.hidden, _SIZES.hidden, bias=False, device=place, dtype=torch.bfloat16)
    x = torch.ones(_ROWS, _SIZES.hidden, device=place, dtype=torch.bfloat16)
    ours: Any = DynamicLinear.from_linear(linear)
    static: Any = StaticLinear(ours.weight_q, ours.weight_scale, input_scale=torch.ones(1, device=place))
    joined: Any = JoinedLinear.of((ours, ours))
    weight, output = {"weight_q": ours.weight_q, "weight_scale": ours.weight_scale.reshape(-1)}, torch.empty_like(x)
    dispatcher = Dispatcher()
    layer = QuantizedLinearDescriptor(
        m=_ROWS, c_out=_SIZES.hidden, k=_SIZES.hidden, activation_element="bf16", **_CODES
    )
    # One launch that reads and writes what the product of x with itself does.
    rounded = FakeQuantizeDescriptor(numel=x.numel(), input_element="bf16", **_CODES)
    run = dispatcher.select(rounded, device=device).run
    mlp: Any = LlamaMLP(_SIZES).to(place, torch.bfloat16)
    found: dict[str, Replay] = {
        "torch.mul(out=)": partial(torch.mul, x, x, out=output),
        "plan.run(output=)": partial(run, input=x, scale=1.0, zero_point=0, output=output),
        "F.linear": partial(nn.functional.linear, x, linear.weight),
        "Dispatcher.run": partial(dispatcher.run, layer, activation=x, **weight),
        "nn.Linear": partial(linear, x),
        "DynamicLinear": partial(ours, x),
        "joined layers": partial(joined, x),
        "StaticLinear": partial(static, x),
        "gated MLP, bf16": partial(mlp, x),
        "gated MLP, fused": partial(fused(mlp), x),
    }
    on_gpu = device.processor == "cuda"  # on a CPU, what is compiled is timed with the computation
    found |= compiled_calls(x, linear.weight.detach(), weight) if on_gpu else {}
    return found | (_llama_calls(x, compiled=on_gpu) if installed("transformers") else {})


def compiled_calls(x: Tensor, real: Tensor, weight: dict[str, Tensor]) -> dict[str, Replay]:
    """Return functions that Inductor compiles: `OPS` ops in a chain, and none, which costs what is not the ops'."""
    quantized, norm = torch.ops.skuda.quantized_linear.default, torch.ops.skuda.rms_norm_quantize.default
    residual = torch.zeros_like(x)
    steps: dict[str, Callable[[Tensor], Tensor]] = {
        "mm": lambda y: torch.mm(y, real),
        "quantized_linear": lambda y: quantized(y, **weight, **_CODES),
        "rms_norm_quantize": lambda y: norm(y, residual, eps=1e-5, output_element="s8", **_CODES)[-1],  # the sum
    }

    def chain(step: Callable[[Tensor], Tensor], y: Tensor) -> Tensor:
        for _ in range(OPS):
            y = step(y)
        return y

    # What allocates an output as the others do; nothing would be compiled of a function that returns its input.
    functions: dict[str, Callable[[Tensor], Tensor]] = {NO_OP: lambda y: torch.empty_like(y)}  # noqa: PLW0108
    functions |= {f"{OPS} x {name}, compiled": partial(chain, step) for name, step in steps.items()}
    return {name: partial(torch.compile(function), x) for name, function in functions.items()}


def fused(module: Any, scheme: Dynamic = Dynamic()) -> Any:  # noqa: B008  a value
    """Return a quantized copy, whose norms and gated activations write codes; raise if one does not."""
    made = copy.deepcopy(module)
    quantize_(made, scheme)
    left = fuse_(made).left
    if left:
        raise RuntimeError(f"not fused: {left}")
    return made


def _llama_calls(x: Tensor, *, compiled: bool) -> dict[str, Replay]:
    """Return calls of a decoder layer of transformers, for sequences of one token."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    config = config_of(_SIZES)
    layer = LlamaDecoderLayer(config, 0).to(x.device, x.dtype).eval()
    given = x[:, None]
    angles = LlamaRotaryEmbedding(config).to(x.device)(given, torch.zeros(len(x), 1, dtype=torch.long, device=x.device))
    quantized = copy.deepcopy(layer)
    quantize_(quantized, Dynamic())
    forms = {"bf16": layer, "quantized": quantized, "fused": fused(layer)}

    def call_of(module: Any) -> Replay:
        return partial(module, given, position_embeddings=angles)

    found = {f"Llama layer, {name}": call_of(form) for name, form in forms.items()}
    if compiled:
        found |= {f"compiled layer, {name}": call_of(torch.compile(forms[name])) for name in ("bf16", "fused")}
    return found
