"""The rivals of ``skuda bench``: other routines on torch tensors that compute the same, or something close to it."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

from skuda.kernels.attention.cache import CacheProblem
from skuda.kernels.linear.problem import LinearProblem
from skuda.kernels.quantize.fake_quantize import FakeQuantize
from skuda.kernels.quantize.fake_quantize_backward import FakeQuantizeBackward
from skuda.kernels.quantize.granularity import PerTensor
from skuda.kernels.sampling.weights import LogitsProblem
from skuda.registry.descriptor import Descriptor
from skuda.registry.elements import ElementKind
from skuda.tools.bench.attention import cache_rivals
from skuda.tools.bench.cutlass.rival import Cutlass
from skuda.tools.bench.formulas import Inputs, formula, scaled_mm, torch_dtype, torch_module, views
from skuda.tools.bench.logits import logits_rivals
from skuda.tools.bench.rival import Call, Rival, operands
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
    if isinstance(problem, CacheProblem):
        return (*built, *cache_rivals(problem, _compile))
    if isinstance(problem, LogitsProblem):
        return (*built, *logits_rivals(problem))
    found = [
        *built,
        Rival("eager", "the same, operation by operation", _eager),
        Rival("compile", "the same by torch.compile, whose roundings are its own", partial(_eager, compiled=True)),
    ]
    if isinstance(problem, FakeQuantize):
        what = "torch.fake_quantize_*_affine: multiplies by 1/scale, and writes a mask"
        found.append(Rival("builtin", what, _fake_quantize))
    elif isinstance(problem, FakeQuantizeBackward):
        what = "the backward of torch.fake_quantize_*_affine, from a mask that its forward wrote"
        found.append(Rival("builtin", what, _fake_quantize_backward))
    return tuple(found)


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


def bitsandbytes_linear(linear: Any) -> Any:
    """Return a linear layer as bitsandbytes quantizes it to int8, without outliers in higher precision."""
    nn = importlib.import_module("bitsandbytes").nn
    made = nn.Linear8bitLt(linear.in_features, linear.out_features, bias=False, has_fp16_weights=False, threshold=0)
    weight = linear.weight.detach().to("cpu", torch_module().float16)
    made.weight = nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    return made.to(linear.weight.device)


# --- ops on rows -----------------------------------------------------------------------------------------------------


def _eager(problem: Any, inputs: Inputs, *, compiled: bool = False) -> Call:
    found = formula(problem, inputs)
    if found is None:
        raise NotImplementedError("this problem has no formula in torch operations here")
    return _compile(found) if compiled else found


def _compile(function: Callable[..., Any], *tensors: Any, **how: Any) -> Call:
    compiled = torch_module().compile(function, **{"dynamic": False, **how})
    compiled(*tensors)
    return lambda: compiled(*tensors)


def _affine(problem: Any, inputs: Inputs) -> tuple[str, tuple[Any, ...]]:
    """Return torch's form for a problem, and the arguments it takes: data, scale, zero point (and axis)."""
    if isinstance(problem, PerTensor):
        return "tensor", (inputs["input"], inputs["scale"], inputs["zero_point"])
    # Per token and per group are per channel of the data reshaped to one row per segment.
    data, segment = views(problem)
    shape = data if hasattr(problem, "axis") else (math.prod(segment), -1)
    factors = (inputs["scale"].reshape(-1), inputs["zero_point"].reshape(-1))
    return "channel", (inputs["input"].reshape(shape), *factors, getattr(problem, "axis", 0))


def _fake_quantize(problem: Any, inputs: Inputs) -> Call:
    form, arguments = _affine(problem, inputs)
    function = getattr(torch_module(), f"fake_quantize_per_{form}_affine")
    return lambda: function(*arguments, problem.q_min, problem.q_max)


def _fake_quantize_backward(problem: Any, inputs: Inputs) -> Call:
    aten = torch_module().ops.aten
    form, arguments = _affine(problem, inputs)
    forward = getattr(aten, f"fake_quantize_per_{form}_affine_cachemask")
    backward = getattr(aten, f"fake_quantize_per_{form}_affine_cachemask_backward")
    _, mask = forward(*arguments, problem.q_min, problem.q_max)
    gradient = inputs["d_output"].reshape(arguments[0].shape)
    return lambda: backward(gradient, mask)


# --- products --------------------------------------------------------------------------------------------------------


def _product_rivals(problem: LinearProblem) -> tuple[Rival, ...]:
    """Return the rivals of a product: of codes, or of a whole layer as users of PyTorch run it."""
    real = Rival("bf16", "F.linear in bf16, nothing quantized", _bf16)
    if not problem.dynamic:
        scaled = Rival("compile", "torch._int_mm and dequantization by torch.compile", _int_mm_compiled)
        return (
            real,
            Rival("int_mm", "torch._int_mm: int32 sums, no dequantization", _int_mm),
            *(() if problem.output is ElementKind.S32 else (scaled,)),
            Rival("fp8", "torch._scaled_mm in e4m3, one scale for all", _scaled_mm),
        )
    fp8 = "quantization to e4m3 with a scale a row, and torch._scaled_mm, by torch.compile"
    torchao = "Int8DynamicActivationInt8WeightConfig by torch.compile"
    return (
        real,
        Rival("bf16 compiled", "F.linear in bf16 by torch.compile", partial(_bf16, compiled=True)),
        Rival("compile", "quantization, torch._int_mm and dequantization by torch.compile", _int_mm_compiled),
        Rival("fp8", fp8, _fp8_layer),
        Rival("torchao", torchao, partial(_layer, torchao_linear, compiled=True), "torchao"),
        Rival("bitsandbytes", "Linear8bitLt, threshold 0", partial(_layer, bitsandbytes_linear), "bitsandbytes"),
    )


def _real_weight(inputs: Inputs, weight_scale: Any) -> Any:
    return (inputs["weight_q"] * weight_scale[:, None]).to(torch_module().bfloat16)


def _bf16(problem: Any, inputs: Inputs, *, compiled: bool = False) -> Call:
    torch, (codes, scale, _, weight_scale) = torch_module(), operands(problem, inputs)
    x = (inputs["activation"] if "activation" in inputs else codes * scale).to(torch.bfloat16)
    weight, linear = _real_weight(inputs, weight_scale), torch.nn.functional.linear
    return _compile(linear, x, weight) if compiled else partial(linear, x, weight)


def _layer(quantized: Callable[[Any], Any], _problem: Any, inputs: Inputs, *, compiled: bool = False) -> Call:
    """Return a call of another library's layer on the activation in bf16."""
    x = inputs["activation"].to(torch_module().bfloat16)
    made = quantized(linear_of(_real_weight(inputs, inputs["weight_scale"])))
    return _compile(made, x, **TORCHAO_COMPILED) if compiled else partial(made, x)


def _int_mm(problem: Any, inputs: Inputs) -> Call:
    codes, _, weight, _ = operands(problem, inputs)
    return partial(torch_module()._int_mm, codes, weight.T)  # noqa: SLF001  the only int8 product that torch has


def _int_mm_compiled(problem: Any, inputs: Inputs) -> Call:
    torch, (codes, scale, weight, weight_scale) = torch_module(), operands(problem, inputs)
    output, product = torch_dtype(problem.output), torch._int_mm  # noqa: SLF001  as above
    if not problem.dynamic:
        factors = scale * weight_scale if "act_scale" in inputs else problem.act_scale * weight_scale
        return _compile(lambda a, b, f: (product(a, b).float() * f).to(output), codes, weight.T, factors)

    def layer(x: Any, b: Any, b_scale: Any, most: Any) -> Any:
        a_scale = x.abs().amax(1, keepdim=True).float() / most
        a = torch.round(x.float() / a_scale).clamp(problem.q_min, problem.q_max).to(torch.int8)
        return (product(a, b).float() * (a_scale * b_scale)).to(output)

    most = torch.full((1,), float(problem.q_max), device=weight.device)
    return _compile(layer, inputs["activation"], weight.T, weight_scale, most)


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
