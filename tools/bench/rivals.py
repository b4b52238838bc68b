"""The rivals of ``skuda bench``: other routines on torch tensors that compute the same, or something close to it."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from skuda.kernels.linear.problem import LinearProblem
from skuda.kernels.quantize.dynamic_range import DynamicRangeQuantizeDescriptor
from skuda.kernels.quantize.fake_quantize import FakeQuantize
from skuda.kernels.quantize.fake_quantize_backward import FakeQuantizeBackward
from skuda.kernels.quantize.granularity import PerTensor
from skuda.kernels.quantize.quantize import Quantize
from skuda.registry.descriptor import Descriptor
from skuda.registry.elements import ElementKind
from skuda.registry.vocabulary import DynamicRangeMode, DynamicRangeScope
from skuda.tools.bench import cupy as bench_cupy
from skuda.tools.bench.cutlass.rival import Cutlass, build_command, refusal
from skuda.tools.bench.formulas import formula, scaled_mm, token_codes, torch_dtype, views
from skuda.tools.bench.measurement import error_line
from skuda.tools.output import count

Inputs = Mapping[str, Any]
Call = Callable[[], Any]

_BITSANDBYTES = "bitsandbytes.functional"
_TORCHAO = "torchao.prototype.quantized_training.int8_mm"
_SCALING = frozenset({"compile", "torchao"})
"""Rivals of a product that scale its sums, which is something else where the sums are the output."""
_WHEELS = {"cupy": "cupy-cuda13x"}
"""The package to install for a module of another name."""


@dataclass(frozen=True)
class Alternatives:
    """Equivalent calls by name; the fastest one for the problem is the rival.

    Each call writes `outputs`, the op's outputs by name; those of the fastest call are checked before it is timed.
    """

    calls: Mapping[str, Call]
    outputs: Mapping[str, Any]


@dataclass(frozen=True)
class Rival:
    """Another library's routine for a problem.

    Attributes
    ----------
    name, computes : str
        Heading of its column, and how its computation differs from the op's.
    make : callable
        Takes problem and inputs, does the untimed preparation, and returns the call to time, or `Alternatives`. It
        raises if it cannot serve the problem.
    needs, away : str
        The module that it needs besides torch, and a known reason why it is not available; both may be empty.
    graph : bool
        Whether it is timed in a graph, as ours. A copy is not; see `skuda.tools.bench.lab.Ceiling`.
    """

    name: str
    computes: str
    make: Callable[[Any, Inputs], Call | Alternatives]
    needs: str = ""
    away: str = ""
    graph: bool = True


def rivals_of(problem: Descriptor, cutlass: Cutlass | str = "") -> tuple[Rival, ...]:
    """Return the rivals for a problem, in the order of their columns.

    `cutlass` holds the objects of ``--cutlass``, or the reason why they cannot run; empty if the option is not given.
    """
    if isinstance(problem, LinearProblem):
        dynamic = hasattr(problem, "activation_element") and hasattr(problem, "c_out")
        found = [_cutlass(cutlass, dynamic=dynamic), *_product_rivals(dynamic=dynamic)]
        summed = problem.output is ElementKind.S32
        return tuple(rival for rival in found if not summed or rival.name not in _SCALING)
    found = [
        Rival("eager", "the same, operation by operation", _eager),
        Rival("compile", "the same by torch.compile, whose roundings are its own", partial(_eager, compiled=True)),
    ]
    match problem:
        case FakeQuantize():
            what = "torch.fake_quantize_*_affine: multiplies by 1/scale, and writes a mask"
            found.append(Rival("builtin", what, _fake_quantize))
        case FakeQuantizeBackward():
            what = "the backward of torch.fake_quantize_*_affine, from a mask that its forward wrote"
            found.append(Rival("builtin", what, _fake_quantize_backward))
        case Quantize():
            found.append(Rival("builtin", "torch.quantize_per_*: multiplies by 1/scale", _quantize))
        case DynamicRangeQuantizeDescriptor(mode=DynamicRangeMode.SYMMETRIC, scope=DynamicRangeScope.TOKEN):
            what = "int8_vectorwise_quant: multiplies by 127/max"
            found.append(Rival("bitsandbytes", what, _vectorwise, _BITSANDBYTES))
        case _:
            pass
    if bench_cupy.serves(problem):
        found.append(Rival("cupy", "the same by one cupy.ElementwiseKernel", bench_cupy.elementwise, "cupy"))
    return (*found, Rival("copy", "copies the input, outside a graph", _copy, graph=False))


def _cutlass(found: Cutlass | str, *, dynamic: bool) -> Rival:
    before = "; the product alone, activation quantized before" if dynamic else ""
    how = "CUTLASS 3, both scales in its epilogue: the fastest of {} for this shape, found by quick runs"
    if isinstance(found, Cutlass):
        made = partial(_cutlass_calls, found)
        return Rival("cutlass", how.format(count(found.count, "configuration")) + before, made)
    away = found or f"no folder of built objects is named; run: {build_command()}, then bench with --cutlass FOLDER"
    return Rival("cutlass", how.format("its configurations") + before, partial(_cutlass_calls, Cutlass(())), away=away)


def _cutlass_calls(found: Cutlass, problem: Any, inputs: Inputs) -> Alternatives:
    why = refusal(problem)
    if why:
        raise ValueError(why)
    torch, operands = _torch(), _Product.of(problem, inputs)
    place = operands.codes.device
    output = torch.empty((len(operands.codes), len(operands.weight)), dtype=torch.bfloat16, device=place)
    scale = operands.scale.reshape(-1).contiguous()
    tensors = (operands.codes.contiguous(), operands.weight, scale, operands.weight_scale)
    return Alternatives(found.calls(tensors, output), {"output": output})


def _product_rivals(*, dynamic: bool) -> tuple[Rival, ...]:
    before = "; activation quantized before" if dynamic else ""
    ends = "quantization, " if dynamic else ""
    return (
        Rival("bf16", "F.linear in bf16, nothing quantized", _bf16),
        Rival("int_mm", f"torch._int_mm: int32 sums, no dequantization{before}", _int_mm),
        Rival("compile", f"{ends}torch._int_mm and dequantization by torch.compile", _int_mm_compiled),
        Rival("fp8", f"torch._scaled_mm in e4m3, one scale for all{before}", _scaled_mm),
        Rival("torchao", f"scaled_int8_mm{before}", _torchao, _TORCHAO),
    )


def absence(rival: Rival) -> str:
    """Return the reason why a rival is not available; empty if it is."""
    if rival.away or not rival.needs:
        return rival.away
    package = rival.needs.partition(".")[0]
    if find_spec(package) is None:
        return f"{package} is not installed; run: pip install {_WHEELS.get(package, package)}"
    try:
        importlib.import_module(rival.needs)
    except Exception as error:  # noqa: BLE001  a foreign package can fail in any way
        return f"{rival.needs} cannot be imported: {error_line(error)}"
    return ""


def _torch() -> Any:
    return importlib.import_module("torch")


def _eager(problem: Any, inputs: Inputs, *, compiled: bool = False) -> Call:
    found = formula(problem, inputs)
    if found is None:
        raise NotImplementedError("this problem has no formula in torch operations here")
    function, tensors = found
    return _compile(function, tensors) if compiled else lambda: function(*tensors)


def _compile(function: Callable[..., Any], tensors: tuple[Any, ...]) -> Call:
    compiled = _torch().compile(function, dynamic=False)
    compiled(*tensors)
    return lambda: compiled(*tensors)


def _copy(_problem: Any, inputs: Inputs) -> Call:
    source = next(inputs[name] for name in ("input", "d_output", "gate_up", "sums") if name in inputs)
    target = _torch().empty_like(source)
    return lambda: target.copy_(source)


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
    function = getattr(_torch(), f"fake_quantize_per_{form}_affine")
    return lambda: function(*arguments, problem.q_min, problem.q_max)


def _fake_quantize_backward(problem: Any, inputs: Inputs) -> Call:
    aten = _torch().ops.aten
    form, arguments = _affine(problem, inputs)
    forward = getattr(aten, f"fake_quantize_per_{form}_affine_cachemask")
    backward = getattr(aten, f"fake_quantize_per_{form}_affine_cachemask_backward")
    _, mask = forward(*arguments, problem.q_min, problem.q_max)
    dy = inputs["d_output"].reshape(arguments[0].shape)
    return lambda: backward(dy, mask)


def _quantize(problem: Any, inputs: Inputs) -> Call:
    torch, (form, arguments) = _torch(), _affine(problem, inputs)
    function = getattr(torch, f"quantize_per_{form}")
    return lambda: function(*arguments, torch.qint8)


def _vectorwise(_problem: Any, inputs: Inputs) -> Call:
    quantize, x = importlib.import_module(_BITSANDBYTES).int8_vectorwise_quant, inputs["input"]
    if x.dtype != _torch().float16:
        raise TypeError(f"int8_vectorwise_quant takes float16, not {x.dtype}")
    return lambda: quantize(x)


@dataclass(frozen=True)
class _Product:
    """A product's operands in the rivals' form: codes of both sides, and scales."""

    codes: Any
    scale: Any
    weight: Any
    weight_scale: Any

    @classmethod
    def of(cls, problem: Any, inputs: Inputs) -> _Product:
        weight = inputs["weight_q"]
        if "activation" in inputs:
            return cls(*token_codes(problem, inputs["activation"]), weight, inputs["weight_scale"])
        codes, ones = inputs["act_q"], _torch().ones(len(weight), device=weight.device)
        weight_scale = inputs.get("weight_scale", ones)  # sums have no scales
        if "act_scale" in inputs:
            scale = inputs["act_scale"].reshape(-1, 1).expand(len(codes), 1)
        else:
            value = getattr(problem, "act_scale", 1.0)
            scale = _torch().full((len(codes), 1), value, dtype=weight_scale.dtype, device=codes.device)
        return cls(codes, scale, weight, weight_scale)


def bf16_operands(problem: Any, inputs: Inputs) -> tuple[Any, Any]:
    """Return a product's activation and weight in bf16."""
    torch = _torch()
    found = _Product.of(problem, inputs)
    x = inputs["activation"] if "activation" in inputs else found.codes * found.scale
    return x.to(torch.bfloat16), (found.weight * found.weight_scale[:, None]).to(torch.bfloat16)


def _bf16(problem: Any, inputs: Inputs) -> Call:
    x, w = bf16_operands(problem, inputs)
    return partial(_torch().nn.functional.linear, x, w)


def _int_mm(problem: Any, inputs: Inputs) -> Call:
    torch = _torch()
    found = _Product.of(problem, inputs)
    codes, weight = found.codes, found.weight.T
    return lambda: torch._int_mm(codes, weight)  # noqa: SLF001  the only int8 product that torch has


def _int_mm_compiled(problem: Any, inputs: Inputs) -> Call:
    torch = _torch()
    found = _Product.of(problem, inputs)
    output = torch_dtype(problem.output if hasattr(problem, "output") else problem.output_element)
    if "act_scale" in inputs:

        def scaled(codes: Any, weight: Any, scale: Any, weight_scale: Any) -> Any:
            return (torch._int_mm(codes, weight).float() * (scale * weight_scale)).to(output)  # noqa: SLF001  as above

        return _compile(scaled, (found.codes, found.weight.T, found.scale, found.weight_scale))
    if "activation" not in inputs:

        def product(codes: Any, weight: Any, factors: Any) -> Any:
            return (torch._int_mm(codes, weight).float() * factors).to(output)  # noqa: SLF001  as above

        return _compile(product, (found.codes, found.weight.T, problem.act_scale * found.weight_scale))

    def layer(x: Any, weight: Any, weight_scale: Any, most: Any) -> Any:
        scale = x.abs().amax(1, keepdim=True).float() / most
        codes = torch.round(x.float() / scale).clamp(problem.q_min, problem.q_max).to(torch.int8)
        return (torch._int_mm(codes, weight).float() * (scale * weight_scale)).to(output)  # noqa: SLF001  as above

    most = torch.full((1,), float(problem.q_max), device=found.weight.device)
    return _compile(layer, (inputs["activation"], found.weight.T, found.weight_scale, most))


def _scaled_mm(problem: Any, inputs: Inputs) -> Call:
    torch = _torch()
    found = _Product.of(problem, inputs)
    # The codes are converted without a scale: e4m3 has 3 mantissa bits, so they are rounded.
    x, weight = found.codes.to(torch.float8_e4m3fn), found.weight.to(torch.float8_e4m3fn).T
    return partial(scaled_mm, torch, x, weight, torch.ones((), device=x.device))


def _torchao(problem: Any, inputs: Inputs) -> Call:
    multiply = importlib.import_module(_TORCHAO).scaled_int8_mm
    found = _Product.of(problem, inputs)
    codes, scale, weight, weight_scale = found.codes, found.scale.reshape(-1), found.weight.T, found.weight_scale
    return lambda: multiply(codes, weight, scale, weight_scale)
