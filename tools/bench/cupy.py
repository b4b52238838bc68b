"""CuPy as a rival of ``skuda bench``: one elementwise kernel per op, on torch's memory and stream."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from skuda.kernels.quantize.dequantize import Dequantize
from skuda.kernels.quantize.fake_quantize import FakeQuantize
from skuda.kernels.quantize.quantize import Quantize
from skuda.tools.bench.formulas import torch_dtype, views

_CODES = "min(max(rint(S(x) / scale) + S(zero), low), high)"
_EXPRESSIONS: dict[type, str] = {
    Quantize: _CODES,
    FakeQuantize: f"({_CODES} - S(zero)) * scale",
    Dequantize: "(S(x) - S(zero)) * scale",
}
"""The expression of CuPy's kernel by kind of problem; ``S`` is the type of the scale, in which the op computes."""


def elementwise(problem: Any, inputs: Mapping[str, Any]) -> Callable[[], Any]:
    """Return a function that runs an op as an elementwise kernel of CuPy; `serves` must accept the problem.

    CuPy raises its own error for an element that it does not support, such as bf16.
    """
    cupy, torch = importlib.import_module("cupy"), importlib.import_module("torch")
    data, segment = views(problem)
    source = inputs["input"].reshape(data)
    element = getattr(problem, problem.element_field)
    dtypes = {"scale": torch_dtype(element.compute), "zero_point": torch.int32}

    def factor(name: str) -> Any:
        # A number becomes an array as well, because the kernel's types are those of its arrays.
        value = torch.as_tensor(inputs[name], dtype=dtypes[name], device=source.device)
        return cupy.from_dlpack(value.reshape(segment))

    (made,) = (argument for argument in problem.arguments() if argument.name == "output")
    output = torch.empty(data, dtype=torch_dtype(made.elements[0]), device=source.device)
    x, scale, zero, y = cupy.from_dlpack(source), factor("scale"), factor("zero_point"), cupy.from_dlpack(output)
    bounds = (getattr(problem, "q_min", 0), getattr(problem, "q_max", 0))
    body = next(text for kind, text in _EXPRESSIONS.items() if isinstance(problem, kind))
    kernel = cupy.ElementwiseKernel("T x, S scale, Z zero, S low, S high", "U y", f"y = {body}", "skuda_rival")

    def call() -> Any:
        # The current stream is read at each call, because torch changes it while it captures a graph.
        with x.device, cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            kernel(x, scale, zero, *bounds, y)
        return output

    return call


def serves(problem: Any) -> bool:
    """Whether there is an expression for an op."""
    return isinstance(problem, tuple(_EXPRESSIONS))
