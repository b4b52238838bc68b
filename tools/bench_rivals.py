"""Whom ``skuda bench`` compares with: what else computes the same, or as near to it as there is, on torch tensors."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from skuda.kernels.quantize import _problems
from skuda.kernels.quantize._linear import LinearProblem
from skuda.kernels.quantize.dynamic_range import DynamicRangeQuantizeDescriptor
from skuda.registry.descriptor import Descriptor
from skuda.registry.vocabulary import DynamicRangeMode, DynamicRangeScope
from skuda.tools import bench_cupy
from skuda.tools.bench_cutlass import Cutlass, build_command, refusal
from skuda.tools.bench_formulas import formula, token_codes, torch_dtype, views
from skuda.tools.output import count

Inputs = Mapping[str, Any]
Call = Callable[[], Any]

_BITSANDBYTES = "bitsandbytes.functional"
_TORCHAO = "torchao.prototype.quantized_training.int8_mm"
_WHEELS = {"cupy": "cupy-cuda13x"}
"""What to install where that is not called as the module is."""


@dataclass(frozen=True)
class Ways:
    """Several ways to do the same, of which the fastest for the very problem is the rival.

    Attributes
    ----------
    calls : mapping of str to callable
        By name.
    outputs : mapping of str to array
        The op's outputs, which each of them writes: the fastest one's are compared before it is timed.
    """

    calls: Mapping[str, Call]
    outputs: Mapping[str, Any]


@dataclass(frozen=True)
class Rival:
    """Somebody else's routine for a problem.

    Attributes
    ----------
    name : str
        Who, as a column's heading.
    computes : str
        What it computes, where that is not the very same thing.
    make : callable
        Takes problem and inputs, prepares everything that is not part of the job, and returns what is timed, or `Ways`
        to choose from. It raises where it refuses the problem.
    needs : str
        The module that it takes beside torch; empty for none.
    away : str
        Why it is not here, where that is known already.
    graph : bool
        Whether it is timed in a graph, as we are. A copy is not: as part of one the driver copies 512 MiB and more much
        slower.
    """

    name: str
    computes: str
    make: Callable[[Any, Inputs], Call | Ways]
    needs: str = ""
    away: str = ""
    graph: bool = True


def rivals_of(problem: Descriptor, cutlass: Cutlass | str = "") -> tuple[Rival, ...]:
    """Return the rivals for a problem, in the order of their columns.

    Parameters
    ----------
    problem : Descriptor
        The problem.
    cutlass : Cutlass or str
        What ``--cutlass`` names, or why it cannot run here; left out, it is absent for want of a folder.
    """
    if isinstance(problem, LinearProblem):
        dynamic = hasattr(problem, "activation_element") and hasattr(problem, "c_out")
        return (_cutlass(cutlass, dynamic=dynamic), *_product_rivals(dynamic=dynamic))
    found = [
        Rival("eager", "the same, operation by operation", _eager),
        Rival("compile", "the same by torch.compile, whose roundings are its own", _compiled),
    ]
    match problem:
        case _problems.FakeQuantize():
            told = "torch.fake_quantize_*_affine: multiplies by 1/scale, and writes a mask"
            found.append(Rival("builtin", told, _fake_quantize))
        case _problems.FakeQuantizeBackward():
            told = "the backward of torch.fake_quantize_*_affine, from a mask that its forward wrote"
            found.append(Rival("builtin", told, _fake_quantize_backward))
        case _problems.Quantize():
            found.append(Rival("builtin", "torch.quantize_per_*: multiplies by 1/scale", _quantize))
        case DynamicRangeQuantizeDescriptor(mode=DynamicRangeMode.SYMMETRIC, scope=DynamicRangeScope.TOKEN):
            told = "int8_vectorwise_quant: multiplies by 127/max"
            found.append(Rival("bitsandbytes", told, _vectorwise, _BITSANDBYTES))
        case _:
            pass
    if bench_cupy.serves(problem):
        found.append(Rival("cupy", "the same by one cupy.ElementwiseKernel", bench_cupy.elementwise, "cupy"))
    return (*found, Rival("copy", "copies the input, outside a graph", _copy, graph=False))


def _cutlass(found: Cutlass | str, *, dynamic: bool) -> Rival:
    before = "; the product alone, activation quantized before" if dynamic else ""
    how = "CUTLASS 3, both scales in its epilogue: the fastest of {} for this shape, found by quick runs"
    if isinstance(found, Cutlass):
        return Rival("cutlass", how.format(count(found.count, "configuration")) + before, partial(_cutlass_ways, found))
    away = found or f"no folder of built objects is named; run: {build_command()}, then bench with --cutlass FOLDER"
    return Rival("cutlass", how.format("its configurations") + before, _nowhere, away=away)


def _nowhere(_problem: Any, _inputs: Inputs) -> Call:
    raise NotImplementedError("CUTLASS is not here")


def _cutlass_ways(found: Cutlass, problem: Any, inputs: Inputs) -> Ways:
    why = refusal(problem)
    if why:
        raise ValueError(why)
    torch, operands = _torch(), _Product.of(problem, inputs)
    place = operands.codes.device
    output = torch.empty((len(operands.codes), len(operands.weight)), dtype=torch.bfloat16, device=place)
    scale = operands.scale.reshape(-1).contiguous()
    tensors = (operands.codes.contiguous(), operands.weight, scale, operands.weight_scale)
    return Ways(found.calls(tensors, output), {"output": output})


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
    """Say why a rival is not here; nothing where it is.

    Parameters
    ----------
    rival : Rival
        The rival.
    """
    if rival.away or not rival.needs:
        return rival.away
    package = rival.needs.partition(".")[0]
    if find_spec(package) is None:
        return f"{package} is not installed; run: pip install {_WHEELS.get(package, package)}"
    try:
        importlib.import_module(rival.needs)
    except Exception as error:  # noqa: BLE001  a foreign package can fail in any way
        return f"{rival.needs} cannot be imported: {said(error)}"
    return ""


def said(error: BaseException) -> str:
    """Return the first line of an error, with its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"
    return text if len(text) <= 240 else f"{text[:239]}…"


def _torch() -> Any:
    return importlib.import_module("torch")


def _formula(problem: Any, inputs: Inputs) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    found = formula(problem, inputs)
    if found is None:
        raise NotImplementedError("this problem has no formula in torch operations here")
    return found


def _eager(problem: Any, inputs: Inputs) -> Call:
    function, tensors = _formula(problem, inputs)
    return lambda: function(*tensors)


def _compiled(problem: Any, inputs: Inputs) -> Call:
    function, tensors = _formula(problem, inputs)
    return _compile(function, tensors)


def _compile(function: Callable[..., Any], tensors: tuple[Any, ...]) -> Call:
    compiled = _torch().compile(function, dynamic=False)
    compiled(*tensors)
    return lambda: compiled(*tensors)


def _copy(_problem: Any, inputs: Inputs) -> Call:
    source = inputs.get("input", inputs.get("d_output"))
    target = _torch().empty_like(source)
    return lambda: target.copy_(source)


def _channelwise(problem: Any, inputs: Inputs) -> tuple[Any, Any, Any, int]:
    """Return data, scale, zero point and axis as torch's per-channel routines take them.

    Tokens and groups are channels too, of data seen as one row for each.
    """
    data, segment = views(problem)
    axis = getattr(problem, "axis", 0)
    shape = data if hasattr(problem, "axis") else (math.prod(segment), -1)
    return inputs["input"].reshape(shape), inputs["scale"].reshape(-1), inputs["zero_point"].reshape(-1), axis


def _fake_quantize(problem: Any, inputs: Inputs) -> Call:
    torch, bounds = _torch(), (problem.q_min, problem.q_max)
    if isinstance(problem, _problems.PerTensor):
        x, scale, zero = inputs["input"], inputs["scale"], inputs["zero_point"]
        return lambda: torch.fake_quantize_per_tensor_affine(x, scale, zero, *bounds)
    x, scale, zero, axis = _channelwise(problem, inputs)
    return lambda: torch.fake_quantize_per_channel_affine(x, scale, zero, axis, *bounds)


def _fake_quantize_backward(problem: Any, inputs: Inputs) -> Call:
    aten = _torch().ops.aten
    bounds = (problem.q_min, problem.q_max)
    if isinstance(problem, _problems.PerTensor):
        scale, zero = inputs["scale"], inputs["zero_point"]
        _, mask = aten.fake_quantize_per_tensor_affine_cachemask(inputs["input"], scale, zero, *bounds)
        dy = inputs["d_output"]
        return lambda: aten.fake_quantize_per_tensor_affine_cachemask_backward(dy, mask)
    x, scale, zero, axis = _channelwise(problem, inputs)
    _, mask = aten.fake_quantize_per_channel_affine_cachemask(x, scale, zero, axis, *bounds)
    dy = inputs["d_output"].reshape(x.shape)
    return lambda: aten.fake_quantize_per_channel_affine_cachemask_backward(dy, mask)


def _quantize(problem: Any, inputs: Inputs) -> Call:
    torch = _torch()
    if isinstance(problem, _problems.PerTensor):
        x, scale, zero = inputs["input"], inputs["scale"], inputs["zero_point"]
        return lambda: torch.quantize_per_tensor(x, scale, zero, torch.qint8)
    x, scale, zero, axis = _channelwise(problem, inputs)
    return lambda: torch.quantize_per_channel(x, scale, zero, axis, torch.qint8)


def _vectorwise(_problem: Any, inputs: Inputs) -> Call:
    quantize, x = importlib.import_module(_BITSANDBYTES).int8_vectorwise_quant, inputs["input"]
    if x.dtype != _torch().float16:
        raise TypeError(f"int8_vectorwise_quant takes float16, not {x.dtype}")
    return lambda: quantize(x)


@dataclass(frozen=True)
class _Product:
    """A product's operands as rivals take them: codes on both sides, and scales."""

    codes: Any
    scale: Any
    weight: Any
    weight_scale: Any

    @classmethod
    def of(cls, problem: Any, inputs: Inputs) -> _Product:
        weight, weight_scale = inputs["weight_q"], inputs["weight_scale"]
        if "activation" in inputs:
            codes, scale = token_codes(problem, inputs["activation"])
        else:
            codes = inputs["act_q"]
            scale = _torch().full((len(codes), 1), problem.act_scale, dtype=weight_scale.dtype, device=codes.device)
        return cls(codes, scale, weight, weight_scale)


def _bf16(problem: Any, inputs: Inputs) -> Call:
    torch = _torch()
    found = _Product.of(problem, inputs)
    x = inputs["activation"] if "activation" in inputs else found.codes * found.scale
    x, w = x.to(torch.bfloat16), (found.weight * found.weight_scale[:, None]).to(torch.bfloat16)
    return lambda: torch.nn.functional.linear(x, w)


def _int_mm(problem: Any, inputs: Inputs) -> Call:
    torch = _torch()
    found = _Product.of(problem, inputs)
    codes, weight = found.codes, found.weight.T
    return lambda: torch._int_mm(codes, weight)  # noqa: SLF001  the only int8 product that torch has


def _int_mm_compiled(problem: Any, inputs: Inputs) -> Call:
    torch = _torch()
    found = _Product.of(problem, inputs)
    output = torch_dtype(problem.output if hasattr(problem, "output") else problem.output_element)
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
    # Codes as they are: e4m3 holds them to three bits, and its scale is 1.
    x, weight = found.codes.to(torch.float8_e4m3fn), found.weight.to(torch.float8_e4m3fn).T
    one = torch.ones((), device=x.device)
    return lambda: torch._scaled_mm(  # noqa: SLF001  torch's fp8 product has no public name
        x, weight, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _torchao(problem: Any, inputs: Inputs) -> Call:
    multiply = importlib.import_module(_TORCHAO).scaled_int8_mm
    found = _Product.of(problem, inputs)
    codes, scale, weight, weight_scale = found.codes, found.scale.reshape(-1), found.weight.T, found.weight_scale
    return lambda: multiply(codes, weight, scale, weight_scale)
