"""The calls whose cost on the host ``skuda bench-model`` measures: small layers in bf16, and what replaces them."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from skuda.dispatch import Dispatcher
from skuda.dispatch.system.packages import installed
from skuda.kernels.linear import QuantizedLinearDescriptor
from skuda.registry.device import Device
from skuda.tools.bench.clock import Replay
from skuda.tools.studies.llama import LlamaMLP, LlamaSizes
from skuda.torch import Dynamic, DynamicLinear, StaticLinear, fuse_, quantize_
from skuda.torch.joined import JoinedLinear

_ROWS = 4
_SIZES = LlamaSizes(hidden=256, intermediate=512, heads=4, kv_heads=2, layers=1)
"""The device has little to do, so that a burst of calls never waits for it."""


class HostCall(NamedTuple):
    """One call.

    Attributes
    ----------
    call : callable
        Runs it.
    over : str
        The name of the call that it replaces. Empty for a call of torch.
    at_most : float or None
        How many times that call's cost is wanted at most.
    """

    call: Replay
    over: str = ""
    at_most: float | None = None


def host_calls(device: Device, place: torch.device) -> dict[str, HostCall]:
    """Return the calls by name, each after the one that it replaces."""
    linear = nn.Linear(_SIZES.hidden, _SIZES.hidden, bias=False, device=place, dtype=torch.bfloat16)
    x = torch.ones(_ROWS, _SIZES.hidden, device=place, dtype=torch.bfloat16)
    ours: Any = DynamicLinear.from_linear(linear)
    static: Any = StaticLinear(ours.weight_q, ours.weight_scale, input_scale=torch.ones(1, device=place))
    joined: Any = JoinedLinear.of((ours, ours))
    weight, output = {"weight_q": ours.weight_q, "weight_scale": ours.weight_scale.reshape(-1)}, torch.empty_like(x)
    sizes = {"m": _ROWS, "c_out": _SIZES.hidden, "k": _SIZES.hidden, "q_min": -127, "q_max": 127}
    problem = QuantizedLinearDescriptor(**sizes, activation_element="bf16")
    dispatcher = Dispatcher()
    plan = dispatcher.select(problem, device=device)
    mlp: Any = LlamaMLP(_SIZES).to(place, torch.bfloat16)
    found = {
        "torch.mul(out=)": HostCall(partial(torch.mul, x, x, out=output)),
        "plan.run": HostCall(partial(plan.run, activation=x, **weight, output=output), "torch.mul(out=)", 1.15),
        "F.linear": HostCall(partial(nn.functional.linear, x, linear.weight)),
        "Dispatcher.run": HostCall(partial(dispatcher.run, problem, activation=x, **weight), "F.linear", 1.0),
        "nn.Linear": HostCall(partial(linear, x)),
        "DynamicLinear": HostCall(partial(ours, x), "nn.Linear", 1.1),
        "joined layers": HostCall(partial(joined, x), "nn.Linear", 1.1),
        "StaticLinear": HostCall(partial(static, x), "nn.Linear", 1.1),
        "gated MLP, bf16": HostCall(partial(mlp, x)),
        "gated MLP, fused": HostCall(partial(_fused(mlp), x), "gated MLP, bf16", 0.9),
    }
    return found | (_llama_calls(x, compiled=device.processor == "cuda") if installed("transformers") else {})


def _fused(module: Any) -> Any:
    made = copy.deepcopy(module)
    quantize_(made, Dynamic())
    left = fuse_(made).left
    if left:
        raise RuntimeError(f"not fused: {left}")
    return made


def _llama_calls(x: Tensor, *, compiled: bool) -> dict[str, HostCall]:
    """Return calls of a decoder layer of transformers, for sequences of one token."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=_SIZES.hidden,
        intermediate_size=_SIZES.intermediate,
        num_attention_heads=_SIZES.heads,
        num_key_value_heads=_SIZES.kv_heads,
        num_hidden_layers=1,
        attn_implementation="sdpa",
    )
    layer = LlamaDecoderLayer(config, 0).to(x.device, x.dtype).eval()
    given = x[:, None]
    angles = LlamaRotaryEmbedding(config).to(x.device)(given, torch.zeros(len(x), 1, dtype=torch.long, device=x.device))
    quantized = copy.deepcopy(layer)
    quantize_(quantized, Dynamic())
    forms = {"bf16": layer, "quantized": quantized, "fused": _fused(layer)}

    def call_of(module: Any) -> Replay:
        return partial(module, given, position_embeddings=angles)

    found = {f"Llama layer, {name}": call_of(form) for name, form in forms.items()}
    if compiled:
        found |= {f"compiled layer, {name}": call_of(torch.compile(forms[name])) for name in ("bf16", "fused")}
    wanted = {"Llama layer, fused": 0.85, "compiled layer, fused": 0.95}
    return {
        name: HostCall(call, "" if name.endswith("bf16") else f"{name.partition(',')[0]}, bf16", wanted.get(name))
        for name, call in found.items()
    }
