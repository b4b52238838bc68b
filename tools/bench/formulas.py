"""The ops as torch operations: the expected results of a bench, and the basis of its rivals.

They are independent of the kernels. They divide by a tensor, because torch divides by a number by multiplying with its
reciprocal, and compute products in f64, where sums of int8 products are exact. Inputs must be finite and scales
positive, as a bench draws them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

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
from skuda.kernels.quantize.granularity import AffineProblem, PerChannel, PerGroup, PerTensor
from skuda.kernels.quantize.norm import CHUNK, LANES, NormProblem
from skuda.kernels.quantize.quantize import Quantize
from skuda.kernels.quantize.quantize_backward import QuantizeBackward
from skuda.registry.descriptor import Descriptor
from skuda.registry.elements import ElementKind
from skuda.registry.vocabulary import DynamicRangeMode, DynamicRangeScope, EpilogueKind, Scaling

Shape = tuple[int, ...]
Formula = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function of tensors, and the tensors to call it with."""

_DTYPES = {
    ElementKind.F16: "float16",
    ElementKind.BF16: "bfloat16",
    ElementKind.F32: "float32",
    ElementKind.F64: "float64",
    ElementKind.S8: "int8",
    ElementKind.U8: "uint8",
    ElementKind.S4: "uint8",
    ElementKind.U4: "uint8",
    ElementKind.S32: "int32",
}


def torch_dtype(element: ElementKind) -> Any:
    """Return torch's dtype for an array that stores `element`."""
    return getattr(importlib.import_module("torch"), _DTYPES[element])


def views(problem: Descriptor) -> tuple[Shape, Shape]:
    """Return the shapes in which data and scale of an affine problem broadcast against each other."""
    match problem:
        case PerTensor():
            return (problem.numel,), (1,)
        case PerChannel():
            return problem.shape, tuple(n if at == problem.axis else 1 for at, n in enumerate(problem.shape))
        case PerGroup():
            shape = (problem.outer_size, problem.num_groups)
            return (*shape, problem.group_size), (*shape, 1)
        case GatedProblem(scaling=Scaling.STATIC):
            return problem.data_shape, (1,)
        case DynamicRangeQuantizeDescriptor(scope=DynamicRangeScope.GROUP):
            return (*problem.segment_shape, problem.group_size or 1), (*problem.segment_shape, 1)
        case DynamicRangeQuantizeDescriptor(scope=DynamicRangeScope.TENSOR):
            return problem.data_shape, (1, 1)
        case DynamicRangeQuantizeDescriptor(scope=DynamicRangeScope.CHANNEL, axis=1):
            return problem.data_shape, (1, problem.d)
        case _:
            rows, columns = getattr(problem, "data_shape", (0, 0))
            return (rows, columns), (rows, 1)


def formula(problem: Descriptor, inputs: Mapping[str, Any]) -> Formula | None:  # noqa: C901, PLR0912  one case for each op
    """Return an affine op or a rescale as a function of tensors that returns the op's outputs in their order.

    Return None for products, asymmetric ranges, packed codes, and a rescale with zero points, an epilogue or codes. A
    symmetric range returns no zero points, which are 0. A norm sums in torch's own order, so only `answer` is exact.
    """
    if isinstance(problem, RescaleDescriptor):
        return _rescaled(problem, inputs)
    elements = {element for argument in problem.arguments() for element in argument.elements}
    if not isinstance(problem, AffineProblem) or any(element.is_packed for element in elements):
        return None
    terms = _Terms(problem, inputs)
    match problem:
        case DynamicRangeQuantizeDescriptor(mode=DynamicRangeMode.SYMMETRIC):
            return terms.ranged(problem)
        case NormProblem():
            return terms.normalized(problem)
        case GatedProblem():
            return terms.gated(problem)
        case GatedAmaxProblem():
            return terms.gated_amax(problem)
        case AmaxDescriptor():
            return terms.amax, terms.arrays("input")
        case AmaxQuantizeDescriptor():
            return partial(terms.scaled, terms.code(problem)), (
                *terms.arrays("input"),
                inputs["amax"].reshape(-1, 1),
                terms.most(),
            )
        case Dequantize():
            return terms.dequantize, (*terms.arrays("input"), *terms.factors())
        case DequantizeBackward():
            return terms.dequantize_backward, (*terms.arrays("d_output"), *terms.factors("scale"))
        case Quantize():
            return terms.quantize, (*terms.arrays("input"), *terms.factors())
        case FakeQuantize():
            return terms.fake_quantize, (*terms.arrays("input"), *terms.factors())
        case QuantizeBackward():
            return terms.quantize_backward, (*terms.arrays("input", "d_output"), *terms.factors())
        case FakeQuantizeBackward():
            return terms.passed, (*terms.arrays("input", "d_output"), *terms.factors())
        case _:
            return None


class _Terms:
    """A problem's tensors, reshaped to broadcast, and its formulas over them."""

    def __init__(self, problem: AffineProblem, inputs: Mapping[str, Any]) -> None:
        self._torch: Any = importlib.import_module("torch")
        element: ElementKind = getattr(problem, problem.element_field)
        self.stored, self.compute = torch_dtype(element), torch_dtype(element.compute)
        self.data, self.segment = views(problem)
        self.low, self.high = getattr(problem, "q_min", 0), getattr(problem, "q_max", 0)
        self._inputs = inputs
        self._device = next(value.device for value in inputs.values() if hasattr(value, "device"))

    def arrays(self, *names: str) -> tuple[Any, ...]:
        return tuple(self._inputs[name].reshape(self.data) for name in names)

    def factors(self, *names: str) -> tuple[Any, ...]:
        """Return scale and zero point as tensors, even if they are given as numbers."""
        dtypes = {"scale": self.compute, "zero_point": self._torch.int32}
        make = self._torch.as_tensor
        made = (make(self._inputs[name], dtype=dtypes[name], device=self._device) for name in names or dtypes)
        return tuple(factor.reshape(self.segment) for factor in made)

    def codes(self, x: Any, scale: Any, zero: Any) -> Any:
        return self._torch.round(x.to(self.compute) / scale) + zero

    def passed(self, x: Any, gradient: Any, scale: Any, zero: Any) -> Any:
        q = self.codes(x, scale, zero)
        return self._torch.where((q >= self.low) & (q <= self.high), gradient, 0).to(self.stored)

    def quantize(self, x: Any, scale: Any, zero: Any) -> Any:
        return self.codes(x, scale, zero).clamp(self.low, self.high).to(self._torch.int8)

    def quantize_backward(self, x: Any, gradient: Any, scale: Any, zero: Any) -> Any:
        return self.passed(x, gradient.to(self.compute) / scale, scale, zero)

    def fake_quantize(self, x: Any, scale: Any, zero: Any) -> Any:
        return ((self.codes(x, scale, zero).clamp(self.low, self.high) - zero) * scale).to(self.stored)

    def dequantize(self, q: Any, scale: Any, zero: Any) -> Any:
        return ((q.to(self.compute) - zero) * scale).to(self.stored)

    def dequantize_backward(self, gradient: Any, scale: Any) -> Any:
        return (gradient.to(self.compute) * scale).to(self.stored)

    def ranged(self, problem: DynamicRangeQuantizeDescriptor) -> Formula:
        axes = tuple(at for at, size in enumerate(self.segment) if size == 1)
        code = self.code(problem)

        def symmetric(x: Any, most: Any) -> Any:
            return self.symmetric(x, most, axes, code)

        return symmetric, (*self.arrays("input"), self.most())

    def most(self) -> Any:
        return self._torch.full((1,), self.high, dtype=self.compute, device=self._device)

    def symmetric(self, x: Any, most: Any, axes: tuple[int, ...], code: Any) -> Any:
        return self.scaled(code, x, x.abs().amax(axes, keepdim=True), most)

    def scaled(self, code: Any, x: Any, largest: Any, most: Any) -> Any:
        """Return codes of rows, or of other segments, from their largest magnitudes; and the scales."""
        scale = largest.to(self.compute) / most
        scale = self._torch.where(scale == 0, 1, scale)
        return self._torch.round(x.to(self.compute) / scale).clamp(self.low, self.high).to(code), scale

    def code(self, problem: Any) -> Any:
        return torch_dtype(problem.output_element)

    def amax(self, x: Any) -> Any:
        return x.abs().amax(1).to(self.compute)

    def gated_products(self, problem: GatedProblem, *, exact: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return products as models write them, of gates and ups; if `exact`, by f64, for 16-bit data."""
        torch, functional = self._torch, self._torch.nn.functional
        form = {"gelu": "none", "gelu_tanh": "tanh"}.get(problem.curve)

        def curve(x: Any) -> Any:
            return functional.silu(x) if form is None else functional.gelu(x, approximate=form)

        def products(*given: Any) -> Any:
            gate, up = given[0].chunk(2, -1) if problem.fused else given
            active = _to_odd(torch, curve(gate.double())).to(self.stored) if exact else curve(gate)
            return active * up

        return products, tuple(self._inputs[name] for name in ("gate_up", "gate", "up") if name in self._inputs)

    def gated_amax(self, problem: GatedAmaxProblem, *, exact: bool = False) -> Formula:
        products, tensors = self.gated_products(problem.quantized, exact=exact)

        def whole(*given: Any) -> Any:
            y = products(*given)
            return y, self.amax(y)

        return whole, tensors

    def gated(self, problem: GatedProblem, *, exact: bool = False) -> Formula:
        code, dynamic = self.code(problem), problem.scaling is Scaling.DYNAMIC
        products, tensors = self.gated_products(problem, exact=exact)

        def given(scale: Any, zero: Any, *both: Any) -> Any:
            codes = self.codes(products(*both), scale, zero).clamp(self.low, self.high).to(code)
            return (codes, *((products(*both),) if problem.has_product else ()))

        def ranged(most: Any, *both: Any) -> Any:
            y = products(*both)
            return (*self.symmetric(y, most, (1,), code), *((y,) if problem.has_product else ()))

        return (ranged, (self.most(), *tensors)) if dynamic else (given, (*self.factors(), *tensors))

    def normalized(self, problem: NormProblem) -> Formula:
        functional, d = self._torch.nn.functional, problem.d
        vectors = {name: self._inputs[name] for name in problem.vectors()}

        def whole(x: Any, residual: Any, weight: Any, bias: Any, *factors: Any) -> tuple[Any, ...]:
            h = x if residual is None else x + residual
            if problem.centred:
                y = functional.layer_norm(h, (d,), weight, bias, problem.eps)
            else:
                y = functional.rms_norm(h, (d,), weight, problem.eps)
            return self.norm_outputs(problem, h, y, *factors)

        data = self._inputs["input"], self._inputs.get("residual"), vectors.get("weight"), vectors.get("bias")
        return whole, (*data, *self.norm_factors(problem))

    def norm_factors(self, problem: NormProblem) -> tuple[Any, ...]:
        """Return what codes follow from: the largest code, or scale and zero point."""
        if not problem.is_dynamic:
            return self.factors()
        return (self.most(),)

    def norm_outputs(self, problem: NormProblem, h: Any, y: Any, first: Any, zero: Any = 0) -> tuple[Any, ...]:
        """Return the outputs of a norm, from the data and the normalized rows."""
        torch, scale = self._torch, first
        if problem.is_dynamic:
            scale = y.abs().amax(1, keepdim=True).to(self.compute) / first
            scale = torch.where(scale == 0, 1, scale)
        codes = self.codes(y, scale, zero).clamp(self.low, self.high).to(torch_dtype(problem.output_element))
        found = (codes, scale) if problem.is_dynamic else (codes,)
        return (*found, *((h,) if problem.has_residual else ()), *((y,) if problem.has_normalized else ()))

    def exactly_normalized(self, problem: NormProblem) -> tuple[Any, ...]:
        """Return the outputs of a norm, each sum in the order of the op."""
        torch, stored, wide = self._torch, self.stored, {}
        h = self._inputs["input"]
        for name in ("residual", *problem.vectors()):
            wide[name] = self._inputs[name].to(self.compute) if name in self._inputs else None
        if problem.has_residual:
            h = (h.to(self.compute) + wide["residual"]).to(stored)
        c, count = h.to(self.compute), torch.full((1,), problem.d, dtype=self.compute, device=self._device)
        if problem.centred:
            c = c - self._fold(c) / count
        # On a CPU torch does not round the root of f32 correctly; f64 has more than twice the bits.
        root = torch.sqrt((self._fold(c * c) / count + problem.eps).to(torch.float64)).to(self.compute)
        y = c * (1 / root)
        y = y * wide["weight"] if problem.has_weight else y
        y = (y + wide["bias"] if "bias" in problem.vectors() else y).to(stored)
        return self.norm_outputs(problem, h, y, *self.norm_factors(problem))

    def _fold(self, values: Any) -> Any:
        """Return the sums of rows, with one column."""
        rows, d = values.shape
        turns = -(-d // (CHUNK * LANES))
        padded = self._torch.nn.functional.pad(values, (0, turns * CHUNK * LANES - d))
        chunks = _halved(padded.reshape(rows, turns, LANES, CHUNK))
        lanes = self._torch.zeros_like(chunks[:, 0])
        for turn in range(turns):
            lanes = lanes + chunks[:, turn]
        return _halved(lanes)[:, None]


def _to_odd(torch: Any, x: Any) -> Any:
    """Round f64 to f32 so that a further rounding to 16 bits is the only one; torch itself would round twice."""
    near = x.float()
    back, bits = near.double(), near.view(torch.int32)
    inward = torch.where(back.abs() > x.abs(), bits - 1, bits)
    return torch.where((back == x) | x.isnan(), bits, inward | 1).view(torch.float32)


def _halved(values: Any) -> Any:
    """Add the upper half of the last axis to the lower half until one value is left."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0]


def answer(problem: Descriptor, inputs: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Compute the expected outputs with torch, in the op's order and in any shape.

    Return None where there is no formula, so that only the op's reference can compute them.
    """
    torch: Any = importlib.import_module("torch")
    if isinstance(problem, LinearProblem):
        return _product(torch, problem, inputs)
    if isinstance(problem, NormProblem):
        return _Terms(problem, inputs).exactly_normalized(problem)
    if not isinstance(problem, (GatedProblem, GatedAmaxProblem)):
        found = formula(problem, inputs)
    elif problem.data_element.bits > 16:  # what decides the last bit is the op's own algorithm
        found = None
    elif isinstance(problem, GatedProblem):
        found = _Terms(problem, inputs).gated(problem, exact=True)
    else:
        found = _Terms(problem, inputs).gated_amax(problem, exact=True)
    if found is None:
        return None
    function, tensors = found
    result = function(*tensors)
    if not isinstance(result, tuple):
        return (result,)
    if not isinstance(problem, DynamicRangeQuantizeDescriptor):
        return result
    codes, scale = result
    return codes, scale, torch.zeros_like(scale, dtype=torch.int32)


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
    found = formula(own, {"input": activation})
    assert found is not None
    codes, scale = found[0](*found[1])
    return codes, scale


def scaled_mm(torch: Any, a: Any, b: Any, one: Any) -> Any:
    """Multiply e4m3 matrices into bf16; `one` is the scale 1, which torch requires."""
    return torch._scaled_mm(  # noqa: SLF001  torch's fp8 product has no public name
        a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _rescaled(problem: RescaleDescriptor, inputs: Mapping[str, Any]) -> Formula | None:
    zeros = problem.has_act_zero_point or problem.has_weight_zero_point
    if zeros or problem.epilogue is not EpilogueKind.IDENTITY or not problem.output_element.is_float:
        return None
    compute, output = torch_dtype(problem.compute), torch_dtype(problem.output_element)

    def rescaled(sums: Any, act_scale: Any, weight_scale: Any) -> Any:
        return (act_scale.to(compute)[:, None] * weight_scale.to(compute) * sums.to(compute)).to(output)

    return rescaled, tuple(inputs[name] for name in ("sums", "act_scale", "weight_scale"))


def _product(torch: Any, problem: Any, inputs: Mapping[str, Any]) -> tuple[Any, ...] | None:
    output: ElementKind = problem.output if hasattr(problem, "output") else problem.output_element
    zeros = (getattr(problem, name, 0) for name in ("act_zero_point", "has_act_zero_point", "has_weight_zero_point"))
    summed = output is ElementKind.S32
    if any(zeros) or problem.epilogue is not EpilogueKind.IDENTITY or not (output.is_float or summed):
        return None
    compute, weight = torch_dtype(problem.compute), inputs["weight_q"]
    codes, scale = token_codes(problem, inputs["activation"]) if "activation" in inputs else (inputs["act_q"], None)
    # The product is exact, because f64 holds every partial sum.
    exact = codes.to(torch.float64) @ weight.to(torch.float64).T
    if summed:
        return (exact.to(torch.int32),)
    if "act_scale" in inputs:
        scale = inputs["act_scale"].reshape(-1, 1)
    elif scale is None:
        scale = torch.full((1, 1), problem.act_scale, dtype=compute, device=weight.device)
    factors = scale.to(compute) * inputs["weight_scale"].to(compute)
    return ((factors * exact.to(compute)).to(torch_dtype(output)),)
