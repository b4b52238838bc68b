"""The rivals of ``skuda bench``: other routines on torch tensors that compute the same, or something close to it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

from skuda.kernels.attention.attention import AttentionDescriptor
from skuda.kernels.attention.cache import PAGE, column_of
from skuda.kernels.linear.problem import LinearProblem
from skuda.registry.descriptor import Descriptor
from skuda.tools.bench.cutlass.rival import Cutlass
from skuda.tools.bench.rival import Alternatives, Call, Inputs, Rival, operands, scaled_mm, torch_module
from skuda.tools.bench.timing import error_line
from skuda.tools.bench.vllm import Vllm

_E4M3_MOST = 448.0
_TUNED = ("coordinate_descent_tuning", "coordinate_descent_check_all_directions", "force_fuse_int_mm_with_mul")
TORCHAO_COMPILED = {"dynamic": False, "options": dict.fromkeys(_TUNED, True)}
"""How torchao is compiled: with what it sets for the whole process, if it may; here it must not change the others."""


def rivals_of(problem: Descriptor, libraries: Sequence[Cutlass | Vllm] = (Cutlass(), Vllm())) -> tuple[Rival, ...]:
    """Return the rivals for a problem, in the order of their columns; first those of what the options name."""
    built = tuple(rival for library in libraries if (rival := library.rival(problem)) is not None)
    if isinstance(problem, LinearProblem):
        return (*built, *_product_rivals(problem))
    if isinstance(problem, AttentionDescriptor):
        what = "in bf16 over contiguous keys and values, nothing quantized"
        named = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION"}
        return (
            *built,
            *(Rival(name, f"torch's {own} {what}", partial(_attention, own)) for name, own in named.items()),
        )
    return built


def absence(rival: Rival) -> str:
    """Return the reason why a rival is not available; empty if it is."""
    if rival.away or not rival.needs:
        return rival.away
    if find_spec(rival.needs) is None:
        return f"{rival.needs} is not installed; run: pip install {rival.needs}"
    try:
        importlib.import_module(rival.needs)
    except Exception as error:  # noqa: BLE001  a foreign package can fail in any way
        return f"{rival.needs} cannot be imported: {error_line(error)}"
    return ""


def linear_of(weight: Any) -> Any:
    """Return a linear layer without a bias that holds a weight."""
    nn = torch_module().nn
    made = nn.Linear(*reversed(weight.shape), bias=False, device="meta", dtype=weight.dtype)
    made.weight = nn.Parameter(weight, requires_grad=False)
    return made


def torchao_linear(linear: Any) -> Any:
    """Return a linear layer as torchao quantizes it to int8, with activations quantized when it runs."""
    torchao = importlib.import_module("torchao.quantization")
    holder = torch_module().nn.ModuleDict({"linear": linear})
    torchao.quantize_(holder, torchao.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False))
    return holder["linear"]


# --- products --------------------------------------------------------------------------------------------------------


def _product_rivals(problem: LinearProblem) -> tuple[Rival, ...]:
    """Return the rivals of a product: of codes, or of a whole layer as users of PyTorch run it."""
    real = Rival("bf16", "F.linear in bf16, nothing quantized", _bf16)
    if not problem.dynamic:
        return real, Rival("fp8", "torch._scaled_mm in e4m3, one scale for all", _scaled_mm)
    fp8 = "quantization to e4m3 with a scale a row, and torch._scaled_mm, by torch.compile"
    return (
        real,
        Rival("bf16 compiled", "F.linear in bf16 by torch.compile", partial(_bf16, compiled=True)),
        Rival("fp8", fp8, _fp8_layer),
        Rival("torchao", "Int8DynamicActivationInt8WeightConfig by torch.compile", _torchao, "torchao"),
    )


def _compile(function: Callable[..., Any], *tensors: Any, **how: Any) -> Call:
    compiled = torch_module().compile(function, **{"dynamic": False, **how})
    compiled(*tensors)
    return lambda: compiled(*tensors)


def _real_weight(inputs: Inputs, weight_scale: Any) -> Any:
    return (inputs["weight_q"] * weight_scale[:, None]).to(torch_module().bfloat16)


def _bf16(problem: Any, inputs: Inputs, *, compiled: bool = False) -> Call:
    torch, (codes, scale, _, weight_scale) = torch_module(), operands(problem, inputs)
    x = (inputs["activation"] if "activation" in inputs else codes * scale).to(torch.bfloat16)
    weight, linear = _real_weight(inputs, weight_scale), torch.nn.functional.linear
    return _compile(linear, x, weight) if compiled else partial(linear, x, weight)


def _torchao(_problem: Any, inputs: Inputs) -> Call:
    layer = torchao_linear(linear_of(_real_weight(inputs, inputs["weight_scale"])))
    return _compile(layer, inputs["activation"].to(torch_module().bfloat16), **TORCHAO_COMPILED)


def _scaled_mm(problem: Any, inputs: Inputs) -> Call:
    torch, (codes, _, weight, _) = torch_module(), operands(problem, inputs)
    # The codes are converted without a scale: e4m3 has 3 mantissa bits, so they are rounded.
    x, w = codes.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn).T
    one = torch.ones((), device=x.device)
    return partial(scaled_mm, x, w, one, one)


def _fp8_layer(_problem: Any, inputs: Inputs) -> Call:
    torch, weight_scale = torch_module(), inputs["weight_scale"]
    real = _real_weight(inputs, weight_scale)

    def coded(x: Any, most: Any) -> tuple[Any, Any]:
        scale = x.abs().amax(1, keepdim=True).float() / most
        return (x.float() / scale).clamp(-_E4M3_MOST, _E4M3_MOST).to(torch.float8_e4m3fn), scale

    def layer(x: Any, w: Any, w_scale: Any, most: Any) -> Any:
        a, a_scale = coded(x, most)
        return scaled_mm(a, w, a_scale, w_scale)

    most = torch.full((1,), _E4M3_MOST, device=real.device)
    weight, scale = coded(real, most)
    return _compile(layer, inputs["activation"].to(torch.bfloat16), weight.T, scale.T, most)


# --- attention -------------------------------------------------------------------------------------------------------


def attention_operands(problem: AttentionDescriptor, inputs: Inputs) -> tuple[Any, Any, Any]:
    """Return q, k and v in bf16, [sequences, heads, tokens, head_size]; raise for what torch has no mask for."""
    torch, keys = torch_module(), problem.most_blocks * PAGE
    new = problem.tokens // problem.sequences
    if not problem.causal or problem.window is not None or new not in (1, keys):
        raise NotImplementedError("torch's attention has a mask for one new token, or for all, of every sequence")

    def real(codes: str, scale: str) -> Any:
        return inputs[codes].to(torch.bfloat16) * inputs[scale][..., None].to(torch.bfloat16)

    def gathered(pages: Any) -> Any:
        """Return pages [pages, kv_heads, 128, head_size] in the order of the table."""
        split = pages[inputs["block_table"].reshape(-1).long()].unflatten(0, (problem.sequences, -1))
        shape = (problem.sequences, problem.kv_heads, keys, problem.head_size)
        return split.transpose(1, 2).reshape(shape).contiguous()

    q = real("q_codes", "q_scale").unflatten(0, (problem.sequences, new)).transpose(1, 2).contiguous()
    k = gathered(real("k_codes", "k_scale"))
    columns = column_of(torch.arange(PAGE, device=q.device))
    v = inputs["v_codes"][..., columns].transpose(2, 3).to(torch.bfloat16)
    return q, k, gathered(v * inputs["v_scale"][..., None].to(torch.bfloat16))


def _attention(name: str, problem: AttentionDescriptor, inputs: Inputs) -> Alternatives:
    """Return torch's attention by one of its backends: heads share keys, or are rows of one query where they can be."""
    torch = torch_module()
    attention, (q, k, v) = torch.nn.functional.scaled_dot_product_attention, attention_operands(problem, inputs)
    sdpa_kernel, backend = torch.nn.attention.sdpa_kernel, getattr(torch.nn.attention.SDPBackend, name)

    def call(query: Any, *, causal: bool, **how: Any) -> Any:
        with sdpa_kernel(backend):
            return attention(query, k, v, is_causal=causal, scale=problem.scale, **how)

    one = q.shape[2] == 1
    calls = {"shared heads": partial(call, q, causal=not one, enable_gqa=problem.group > 1)}
    if one:
        calls["heads as rows"] = partial(call, q.reshape(*k.shape[:2], problem.group, -1), causal=False)
    return Alternatives(calls, ())
