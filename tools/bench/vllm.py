"""vLLM's int8 kernels as rivals: ops of torch that its library registers, with outputs that are there before.

For a bench only; no kernel of the library comes from here. Nothing is loaded before a library is named, and vLLM's
Python is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from skuda.kernels.linear import ScaledLinearDescriptor
from skuda.kernels.quantize import DynamicRangeQuantizeDescriptor
from skuda.registry.descriptor import Descriptor
from skuda.registry.elements import ElementKind
from skuda.registry.errors import InvalidProblem
from skuda.tools.bench.rival import (
    Alternatives,
    Call,
    Check,
    Inputs,
    Rival,
    operands,
    refusal,
    torch_dtype,
    torch_module,
)
from skuda.tools.output import words

_FILE = "_C_stable_libtorch.abi3.so"
_ARGUMENTS = {
    "cutlass_scaled_mm": "Tensor, Tensor, Tensor, Tensor, Tensor, Optional[Tensor]",
    "dynamic_scaled_int8_quant": "Tensor, Tensor, Tensor, Optional[Tensor]",
}
"""The types of the ops' arguments, in vLLM 0.26 to 0.33."""
_SCALE = 8
"""Representable values, 1e-6, that scales of the same data may be apart."""


@dataclass(frozen=True)
class Vllm:
    """The library of an installed vLLM, whose ops torch has, or why there is none."""

    away: str = f"no library is named; bench with --vllm LIBRARY, the path of {_FILE} or of the package vllm"

    @classmethod
    def load(cls, path: Path | None) -> Vllm:
        """Load a library, if one is named; refuse one that is not there, or without an op that is called here."""
        if path is None:
            return cls()
        torch, file = torch_module(), path / _FILE if path.is_dir() else path
        must = f"be {_FILE} of vLLM 0.26 to 0.33, or the folder of the package vllm that holds it"
        if not file.exists():
            raise InvalidProblem("bench", "--vllm", f"{file}, which is not there", must)
        try:
            torch.ops.load_library(str(file.resolve()))
        except (OSError, RuntimeError) as error:
            had = f"{file.name}, which does not load: {error.__cause__ or error}"  # the path may be long
            raise InvalidProblem("bench", "--vllm", had, f"{must}, built for this torch") from error
        for name, wanted in _ARGUMENTS.items():
            op = getattr(torch.ops._C, name, None)  # noqa: SLF001  the namespace of vLLM's ops
            found = op and words(argument.type for argument in op.default._schema.arguments)  # noqa: SLF001  as above
            if found != wanted:
                had = f"none in {file}" if found is None else f"one of ({found})"
                raise InvalidProblem("bench", "--vllm", had, f"{must}: with an op {name} of ({wanted})")
        return cls("")

    def rival(self, problem: Descriptor) -> Rival | None:
        """Return the rival for a problem; None for an op that vLLM does not have."""
        found = _OPS.get(problem.op_name())
        return found and Rival("vllm", f"vLLM's {found.computes}", found.make, away=self.away)


class _Op(NamedTuple):
    """How vLLM computes an op: the values of fields that it serves, and what returns its calls and their checks."""

    computes: str
    served: Mapping[str, Collection[Any]]
    parts: Callable[[Any, Inputs], tuple[Any, ...]]

    def make(self, problem: Any, inputs: Inputs) -> Alternatives:
        """Return all calls for a problem as one; a ValueError says why vLLM does not serve it."""
        if why := refusal(problem, (ElementKind.BF16, ElementKind.F16)):
            raise ValueError(why)
        for name, values in self.served.items():
            if getattr(problem, name) not in values:
                raise ValueError(f"built for {name} {words(values)}, not {getattr(problem, name)}")
        calls, checks = self.parts(problem, inputs)
        return Alternatives({"": lambda: [call() for call in calls]}, checks)


def _call(name: str, *arguments: Any) -> tuple[Call]:
    return (partial(getattr(torch_module().ops._C, name).default, *arguments),)  # noqa: SLF001  as above


def _ranged(x: Any, element: ElementKind) -> tuple[Any, ...]:
    """Return a call that writes codes and scales of rows, its checks, and both."""
    torch, (n, d) = torch_module(), x.shape
    codes, scale = torch.empty_like(x, dtype=torch.int8), torch.empty((n, 1), dtype=torch.float32, device=x.device)
    elements = {"input_element": element, "output_element": ElementKind.S8}
    problem, given = DynamicRangeQuantizeDescriptor(n=n, d=d, q_min=-127, q_max=127, **elements), {"input": x}
    checks = Check(problem, given, {"output": codes}, 1), Check(problem, given, {"scale_out": scale}, _SCALE)
    return _call("dynamic_scaled_int8_quant", codes, x, scale, None), checks, codes, scale


def _layer(problem: Any, inputs: Inputs) -> tuple[Any, ...]:
    calls, checks, codes, scale = _ranged(inputs["activation"], problem.activation_element)
    more, check = _multiplied(problem, codes, scale, inputs["weight_q"], inputs["weight_scale"])
    return calls + more, checks + check


def _product(problem: Any, inputs: Inputs) -> tuple[Any, ...]:
    return _multiplied(problem, *operands(problem, inputs))


def _multiplied(problem: Any, codes: Any, scale: Any, weight: Any, weight_scale: Any) -> tuple[Any, ...]:
    """Return a call that writes the product of codes, and its check; its scales are applied in another order."""
    torch, (m, n, k), scale = torch_module(), problem.sizes, scale.contiguous()
    output = torch.empty((m, n), dtype=torch_dtype(problem.output), device=codes.device)
    same = ScaledLinearDescriptor(m=m, n=n, k=k, output_element=problem.output)
    given = {"act_q": codes, "act_scale": scale[:, 0], "weight_q": weight, "weight_scale": weight_scale}
    call = _call("cutlass_scaled_mm", output, codes, weight.T, scale, weight_scale[:, None], None)
    return call, (Check(same, given, {"output": output}, 1),)


_OPS = {
    "quantized_linear": _Op(
        "dynamic_scaled_int8_quant and cutlass_scaled_mm", {"q_min": (-127, -128), "q_max": (127,)}, _layer
    ),
    **dict.fromkeys(("scaled_linear", "smoothquant_linear"), _Op("cutlass_scaled_mm", {}, _product)),
}
