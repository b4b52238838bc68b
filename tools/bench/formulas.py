"""The ops as torch operations: the expected results of a bench, and the basis of its rivals.

They share no code with the kernels. They divide by a tensor, because torch divides by a number by multiplying with its
reciprocal, and compute products in f64, where sums of int8 products are exact. Inputs must be finite and scales
positive, as a bench draws them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from skuda.kernels.dtypes import storage_dtype
from skuda.kernels.linear.packed import LEVELS
from skuda.kernels.linear.problem import LinearProblem
from skuda.kernels.linear.rescale import RescaleDescriptor
from skuda.kernels.quantize.amax import AmaxDescriptor
from skuda.kernels.quantize.amax_quantize import AmaxQuantizeDescriptor
from skuda.kernels.quantize.dequantize import Dequantize
from skuda.kernels.quantize.dequantize_backward import DequantizeBackward
from skuda.kernels.quantize.dynamic_range import DynamicRangeQuantizeDescriptor
from skuda.kernels.quantize.fake_quantize import FakeQuantize
from skuda.kernels.quantize.fake_quantize_backward import FakeQuantizeBackward
from skuda.kernels.quantize.gated import GatedProblem
from skuda.kernels.quantize.gated_amax import GatedAmaxProblem
from skuda.kernels.quantize.granularity import AffineProblem, PerChannel, PerGroup
from skuda.kernels.quantize.norm import NormProblem
from skuda.kernels.quantize.quantize import Quantize
from skuda.kernels.quantize.quantize_backward import QuantizeBackward
from skuda.registry.descriptor import Descriptor
from skuda.registry.elements import ElementKind
from skuda.registry.vocabulary import DynamicRangeMode, DynamicRangeScope, EpilogueKind, Scaling

Inputs = Mapping[str, Any]
Shape = tuple[int, ...]
ROWS = (NormProblem, GatedProblem, GatedAmaxProblem)
"""Problems of independent rows whose bits torch does not have."""
Formula = Callable[[], tuple[Any, ...]]
"""Computes the outputs of a problem in their order, from inputs that it holds."""


def torch_module() -> Any:
    """Return torch, which may be missing."""
    return importlib.import_module("torch")


def torch_dtype(element: ElementKind) -> Any:
    """Return torch's dtype for an array that stores `element`."""
    return getattr(torch_module(), str(storage_dtype(element)))


def views(problem: AffineProblem) -> tuple[Shape, Shape]:
    """Return the shapes in which data and scale of an affine problem broadcast against each other."""
    match problem:
        case _ if not problem.granularity.segments:
            return problem.data_shape, (1,)
        case PerChannel():
            return problem.shape, tuple(n if at == problem.axis else 1 for at, n in enumerate(problem.shape))
        case PerGroup():
            shape = (problem.outer_size, problem.num_groups)
            return (*shape, problem.group_size), (*shape, 1)
        case _:
            return problem.data_shape, (problem.data_shape[0], 1)


def formula(problem: Descriptor, inputs: Inputs) -> Formula | None:
    """Return a function that computes an affine op or a rescale.

    It has the bits of the op, but for norms, which torch sums in its own order, and gates, which torch curves. Return
    None where there is no formula: products, ranges that are not symmetric and per token, packed codes, and a rescale
    with zero points, an epilogue or codes. A symmetric range has no zero points, which are 0.
    """
    if isinstance(problem, RescaleDescriptor):
        return _rescale(problem, inputs)
    elements = {element for argument in problem.arguments() for element in argument.elements}
    if not isinstance(problem, AffineProblem) or any(element.is_packed for element in elements):
        return None
    return _Affine(problem, inputs).formula(problem)


class _Affine:
    """The tensors of an affine problem, and its formulas over them."""

    def __init__(self, problem: AffineProblem, inputs: Inputs) -> None:
        self.torch, self.inputs = torch_module(), inputs
        element: ElementKind = problem.data_element
        self.stored, self.compute = torch_dtype(element), torch_dtype(element.compute)
        self.data, self.segment = views(problem)
        self.low, self.high = getattr(problem, "q_min", 0), getattr(problem, "q_max", 0)
        output = getattr(problem, "output_element", None)
        self.code = torch_dtype(output) if output else None
        self.place = next(value.device for value in inputs.values() if hasattr(value, "device"))
        self.scale, self.zero = self._factor("scale", self.compute), self._factor("zero_point", self.torch.int32)
        self.most = self.torch.full((1,), self.high, dtype=self.compute, device=self.place)

    def _factor(self, name: str, dtype: Any) -> Any:
        """Return scale or zero point as a tensor, even if it is a number; None if there is none."""
        if name not in self.inputs:
            return None
        return self.torch.as_tensor(self.inputs[name], dtype=dtype, device=self.place).reshape(self.segment)

    def _data(self, name: str) -> Any:
        return self.inputs[name].reshape(self.data) if name in self.inputs else None

    def formula(self, problem: AffineProblem) -> Formula | None:  # noqa: C901, PLR0912  one case for each op
        """Return the formula of the problem."""
        x, gradient = (self._data(name) for name in ("input", "d_output"))
        match problem:
            case DynamicRangeQuantizeDescriptor(mode=DynamicRangeMode.SYMMETRIC, scope=DynamicRangeScope.TOKEN):
                return lambda: self.ranged(x)
            case NormProblem():
                return lambda: self.normalized(problem, x)
            case GatedProblem(scaling=Scaling.DYNAMIC):
                return lambda: self.with_product(problem, self.ranged)
            case GatedProblem():
                return lambda: self.with_product(problem, lambda y: (self.clamped(self.codes(y)),))
            case GatedAmaxProblem():
                return lambda: (y := self.gated(problem.quantized), self.amax(y))
            case AmaxDescriptor():
                return lambda: (self.amax(x),)
            case AmaxQuantizeDescriptor():
                return lambda: self.ranged(x, self.inputs["amax"].reshape(-1, 1))
            case Dequantize():
                return lambda: (((x.to(self.compute) - self.zero) * self.scale).to(self.stored),)
            case DequantizeBackward():
                return lambda: ((gradient.to(self.compute) * self.scale).to(self.stored),)
            case Quantize():
                return lambda: (self.clamped(self.codes(x)),)
            case FakeQuantize():
                return lambda: (self.fake(x),)
            case QuantizeBackward():
                return lambda: (self.passed(x, gradient.to(self.compute) / self.scale),)
            case FakeQuantizeBackward():
                return lambda: (self.passed(x, gradient),)
            case _:
                return None

    def codes(self, x: Any) -> Any:
        return self.torch.round(x.to(self.compute) / self.scale) + self.zero

    def fake(self, x: Any) -> Any:
        return ((self.codes(x).clamp(self.low, self.high) - self.zero) * self.scale).to(self.stored)

    def clamped(self, codes: Any) -> Any:
        return codes.clamp(self.low, self.high).to(self.code)

    def passed(self, x: Any, gradient: Any) -> Any:
        codes = self.codes(x)
        return self.torch.where((codes >= self.low) & (codes <= self.high), gradient, 0).to(self.stored)

    def amax(self, x: Any) -> Any:
        return x.abs().amax(1).to(self.compute)

    def ranged(self, x: Any, largest: Any = None) -> tuple[Any, Any]:
        """Return codes of rows, from their largest magnitudes, and the scales."""
        largest = x.abs().amax(1, keepdim=True) if largest is None else largest
        scale = largest.to(self.compute) / self.most
        scale = self.torch.where(scale == 0, 1, scale)
        return self.clamped(self.torch.round(x.to(self.compute) / scale)), scale

    def with_product(self, problem: GatedProblem, coded: Callable[[Any], tuple[Any, ...]]) -> tuple[Any, ...]:
        y = self.gated(problem)
        return (*coded(y), *((y,) if problem.has_product else ()))

    def gated(self, problem: GatedProblem) -> Any:
        """Return the products of activated gates with ups."""
        functional, form = self.torch.nn.functional, {"gelu": "none", "gelu_tanh": "tanh"}.get(problem.curve)
        inputs = self.inputs
        gate, up = inputs["gate_up"].chunk(2, -1) if problem.fused else (inputs["gate"], inputs["up"])
        return (functional.silu(gate) if form is None else functional.gelu(gate, approximate=form)) * up

    def normalized(self, problem: NormProblem, x: Any) -> tuple[Any, ...]:
        """Return the outputs of a norm."""
        residual = self.inputs.get("residual")
        vectors = [self.inputs.get(name) if name in problem.vectors() else None for name in ("weight", "bias")]
        functional, h = self.torch.nn.functional, x if residual is None else x + residual
        own = functional.layer_norm if problem.centred else functional.rms_norm
        y = own(h, (problem.d,), *vectors[: 1 + problem.centred], problem.eps)
        coded = self.ranged(y) if problem.is_dynamic else (self.clamped(self.codes(y)),)
        return (*coded, *((h,) if problem.has_residual else ()), *((y,) if problem.has_normalized else ()))


def answer(problem: Descriptor, inputs: Inputs) -> tuple[Any, ...] | None:
    """Compute the expected outputs with torch, bit for bit.

    Return None where only the op's reference computes them: without a formula, and for norms and gates.
    """
    if isinstance(problem, LinearProblem):
        return _product(problem, inputs)
    found = None if isinstance(problem, ROWS) else formula(problem, inputs)
    if found is None:
        return None
    outputs = found()
    if isinstance(problem, DynamicRangeQuantizeDescriptor):
        return *outputs, torch_module().zeros_like(outputs[1], dtype=torch_module().int32)
    return outputs


def token_codes(problem: Any, activation: Any) -> tuple[Any, Any]:
    """Quantize an activation of shape (m, k) as `quantized_linear` does: codes, and one scale per row."""
    own = DynamicRangeQuantizeDescriptor(
        n=problem.m,
        d=problem.k,
        q_min=problem.q_min,
        q_max=problem.q_max,
        input_element=problem.activation_element,
        output_element=problem.code_element,
    )
    return _Affine(own, {"input": activation}).ranged(activation)


def scaled_mm(a: Any, b: Any, a_scale: Any, b_scale: Any) -> Any:
    """Multiply e4m3 matrices into bf16, with one scale for all of each, or one a row of `a` and a column of `b`."""
    torch = torch_module()
    return torch._scaled_mm(  # noqa: SLF001  torch's fp8 product has no public name
        a, b, scale_a=a_scale, scale_b=b_scale, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _rescale(problem: RescaleDescriptor, inputs: Inputs) -> Formula | None:
    zeros = problem.has_act_zero_point or problem.has_weight_zero_point
    if zeros or problem.epilogue is not EpilogueKind.IDENTITY or not problem.output_element.is_float:
        return None
    compute, output = torch_dtype(problem.compute), torch_dtype(problem.output_element)
    sums, scale, weight_scale = (inputs[name] for name in ("sums", "act_scale", "weight_scale"))
    return lambda: ((scale.to(compute)[:, None] * weight_scale.to(compute) * sums.to(compute)).to(output),)


def _unpacked(weight: Any, n: int, k: int) -> Any:
    """Return the codes (n, k) of a packed weight in ``skuda.kernels.linear.packed``'s layout, whose codes fit in s8."""
    torch, (units, blocks, _) = torch_module(), weight.shape
    pairs = weight[..., :LEVELS].reshape(units, blocks, 2, 8, 4, 2, 2, 4).permute(0, 6, 3, 1, 2, 5, 4, 7)
    scales = weight[..., LEVELS:].reshape(units, blocks, 8, -1, 2, 2).permute(5, 0, 4, 2, 1, 3)
    levels = torch.stack([pairs & 15, pairs >> 4], 6).reshape(units * 16, blocks * scales.shape[5], -1)
    scale, base = scales.reshape(2, units * 16, -1, 1).to(torch.int16)
    return (levels * scale + base - 128).to(torch.int8).reshape(units * 16, -1)[:n, :k]


def _product(problem: Any, inputs: Inputs) -> tuple[Any, ...] | None:
    summed = problem.output is ElementKind.S32
    if (
        problem.has_zero_points
        or problem.epilogue is not EpilogueKind.IDENTITY
        or not (problem.output.is_float or summed)
    ):
        return None
    torch, compute, weight = torch_module(), torch_dtype(problem.compute), inputs["weight_q"]
    if problem.group_size:
        weight = _unpacked(weight, problem.n, problem.k)
    codes, scale = token_codes(problem, inputs["activation"]) if problem.dynamic else (inputs["act_q"], None)
    # The product is exact, because f64 holds every partial sum.
    exact = codes.to(torch.float64) @ weight.to(torch.float64).T
    if summed:
        return (exact.to(torch.int32),)
    if "act_scale" in inputs:
        scale = inputs["act_scale"].reshape(-1, 1)
    elif scale is None:
        scale = torch.full((1, 1), problem.act_scale, dtype=compute, device=weight.device)
    factors = scale.to(compute) * inputs["weight_scale"].to(compute)
    return ((factors * exact.to(compute)).to(torch_dtype(problem.output)),)
