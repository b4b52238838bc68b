"""CuPy as a rival of ``skuda bench``: an elementwise kernel, made from one expression, on torch's memory and stream."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from skuda.kernels.quantize import _problems
from skuda.tools.bench_formulas import torch_dtype, views

_CODES = "min(max(rint(S(x) / scale) + S(zero), low), high)"
_EXPRESSIONS: dict[type, str] = {
    _problems.Quantize: _CODES,
    _problems.FakeQuantize: f"({_CODES} - S(zero)) * scale",
    _problems.Dequantize: "(S(x) - S(zero)) * scale",
}
"""What CuPy makes a kernel of, by kind of problem; ``S`` is the type of the scale, in which the op computes."""


def elementwise(problem: Any, inputs: Mapping[str, Any]) -> Callable[[], Any]:
    """Return what runs an op as an elementwise kernel of CuPy.

    Parameters
    ----------
    problem : Descriptor
        One that quantizes, dequantizes or does both.
    inputs : mapping of str to tensor or number
        Its inputs.

    Raises
    ------
    Exception
        Whatever CuPy says of an element that it does not have, such as bf16.
    """
    cupy, torch = importlib.import_module("cupy"), importlib.import_module("torch")
    data, segment = views(problem)
    source = inputs["input"].reshape(data)
    element = getattr(problem, problem.element_field)
    dtypes = {"scale": torch_dtype(element.compute), "zero_point": torch.int32}

    def factor(name: str) -> Any:
        # A number as an array too: the kernel's types are those of its arrays.
        value = torch.as_tensor(inputs[name], dtype=dtypes[name], device=source.device)
        return cupy.from_dlpack(value.reshape(segment))

    (made,) = (argument for argument in problem.arguments() if argument.name == "output")
    output = torch.empty(data, dtype=torch_dtype(made.elements[0]), device=source.device)
    x, scale, zero, y = cupy.from_dlpack(source), factor("scale"), factor("zero_point"), cupy.from_dlpack(output)
    bounds = (getattr(problem, "q_min", 0), getattr(problem, "q_max", 0))
    body = next(text for kind, text in _EXPRESSIONS.items() if isinstance(problem, kind))
    kernel = cupy.ElementwiseKernel("T x, S scale, Z zero, S low, S high", "U y", f"y = {body}", "skuda_rival")

    def call() -> Any:
        # Where torch is at that moment, also while it captures a graph.
        with x.device, cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            kernel(x, scale, zero, *bounds, y)
        return output

    return call


def serves(problem: Any) -> bool:
    """Whether an op has an expression here."""
    return isinstance(problem, tuple(_EXPRESSIONS))
