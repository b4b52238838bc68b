"""What a rival of ``skuda bench`` is, and what the rivals that multiply codes share."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from skuda.kernels.dtypes import storage_dtype
from skuda.registry.descriptor import Descriptor
from skuda.registry.elements import ElementKind
from skuda.registry.vocabulary import EpilogueKind
from skuda.tools.output import words

Call = Callable[[], Any]
Inputs = Mapping[str, Any]


def torch_module() -> Any:
    """Return torch, which may be missing."""
    return importlib.import_module("torch")


def torch_dtype(element: ElementKind) -> Any:
    """Return torch's dtype for an array that stores `element`."""
    return getattr(torch_module(), str(storage_dtype(element)))


def scaled_mm(a: Any, b: Any, a_scale: Any, b_scale: Any) -> Any:
    """Multiply e4m3 matrices into bf16, with one scale for all of each, or one a row of `a` and a column of `b`."""
    torch = torch_module()
    return torch._scaled_mm(  # noqa: SLF001  torch's fp8 product has no public name
        a, b, scale_a=a_scale, scale_b=b_scale, out_dtype=torch.bfloat16, use_fast_accum=True
    )


class Check(NamedTuple):
    """Outputs that a call has written, by their names in the op; each may be `ulps` values from that of a problem."""

    problem: Descriptor
    inputs: Inputs
    outputs: Inputs
    ulps: int = 0


class Alternatives(NamedTuple):
    """Equivalent calls by name; the fastest one for the problem is the rival, and is checked before it is timed."""

    calls: Mapping[str, Call]
    checks: tuple[Check, ...]


class Rival(NamedTuple):
    """Another library's routine for a problem: the heading of its column, and how it differs from the op.

    `make` takes problem and inputs, does the untimed preparation, and returns the call to time, or `Alternatives`; it
    raises if it cannot serve the problem. `needs` is the module that it needs besides torch, and `away` a known reason
    why it is not available; both may be empty.
    """

    name: str
    computes: str
    make: Callable[[Any, Inputs], Call | Alternatives]
    needs: str = ""
    away: str = ""


def refusal(problem: Any, outputs: Iterable[ElementKind]) -> str:
    """Say why a library that scales s8 products into these outputs does not serve a problem; nothing where it does."""
    if (problem.code_element, problem.weight_element) != (ElementKind.S8, ElementKind.S8):
        return f"built for s8 by s8, not {problem.code_element} by {problem.weight_element}"
    if problem.has_zero_points:
        return "built without zero points"
    if problem.epilogue is not EpilogueKind.IDENTITY:
        return f"built without an epilogue such as {problem.epilogue}"
    if problem.output not in outputs:
        return f"built for a {words(outputs)} output, not {problem.output}"
    if problem.compute is not ElementKind.F32:
        return f"built for scales in f32, not {problem.compute}"
    return ""


def operands(problem: Any, inputs: Inputs) -> tuple[Any, Any, Any, Any]:
    """Return codes of the activation, their scales of shape (m, 1), codes of the weight, and their scales."""
    weight, torch = inputs["weight_q"], torch_module()
    if "activation" in inputs:
        return (*token_codes(problem, inputs["activation"]), weight, inputs["weight_scale"])
    codes, ones = inputs["act_q"], torch.ones(len(weight), device=weight.device)
    weight_scale = inputs.get("weight_scale", ones)  # sums have no scales
    if "act_scale" in inputs:
        return codes, inputs["act_scale"].reshape(-1, 1).expand(len(codes), 1), weight, weight_scale
    value = getattr(problem, "act_scale", 1.0)
    scale = torch.full((len(codes), 1), value, dtype=weight_scale.dtype, device=codes.device)
    return codes, scale, weight, weight_scale


def token_codes(problem: Any, x: Any) -> tuple[Any, Any]:
    """Quantize an activation of shape (m, k) as `quantized_linear` does: codes in s8, and one f32 scale per row."""
    torch = torch_module()
    # torch divides by a number by multiplying with its reciprocal, and by a tensor exactly.
    scale = x.abs().amax(1, keepdim=True).float() / torch.full((1,), float(problem.q_max), device=x.device)
    scale = torch.where(scale == 0, 1, scale)
    return torch.round(x.float() / scale).clamp(problem.q_min, problem.q_max).to(torch.int8), scale
