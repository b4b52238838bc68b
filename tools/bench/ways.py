"""The ways in which ``skuda bench-model`` runs a stack: as it is, quantized by this library, and by others."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from skuda.tools.bench.rivals import Rival, absence


@dataclass(frozen=True)
class Way:
    """One way to run the stack.

    Attributes
    ----------
    name, computes : str
        Heading of its column, and what it is.
    make : callable
        Takes the stack in bf16, which it must not change, and returns a module that is called like it.
    base : str
        Name of an earlier way whose module is taken instead of making one.
    compiled : dict or None
        Arguments of `torch.compile`, if it is compiled.
    ours : bool
        Whether it is this library, whose ways have equal bits.
    needs : str
        The module that it needs besides torch.
    """

    name: str
    computes: str
    make: Callable[[Any], Any] = lambda stack: stack
    base: str = ""
    compiled: Mapping[str, Any] | None = None
    ours: bool = False
    needs: str = ""

    @property
    def absence(self) -> str:
        """The reason why it is not available; empty if it is."""
        return absence(Rival(self.name, self.computes, lambda *_: lambda: None, self.needs))


def converted(stack: Any, convert: Callable[[Any], Any]) -> Any:
    """Return a copy of a stack in which every linear layer is what `convert` makes of it."""
    linears = (module for module in stack.modules() if type(module) is importlib.import_module("torch").nn.Linear)
    # What a copy finds among the copies that were made is not copied again.
    return copy.deepcopy(stack, {id(linear): convert(linear) for linear in linears})


def _fused(stack: Any) -> Any:
    skuda_torch = importlib.import_module("skuda.torch")
    made = converted(stack, skuda_torch.DynamicLinear.from_linear)
    left = skuda_torch.fuse_(made).left
    if left:
        raise RuntimeError(f"not fused: {left}")
    return made


def _torchao(stack: Any) -> Any:
    torchao = importlib.import_module("torchao.quantization")

    def convert(linear: Any) -> Any:
        holder = importlib.import_module("torch").nn.ModuleDict({"linear": copy.deepcopy(linear)})
        torchao.quantize_(holder, torchao.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False))
        return holder["linear"]

    return converted(stack, convert)


def _bitsandbytes(stack: Any) -> Any:
    nn = importlib.import_module("bitsandbytes").nn

    def convert(linear: Any) -> Any:
        made = nn.Linear8bitLt(linear.in_features, linear.out_features, bias=False, has_fp16_weights=False, threshold=0)
        weight = linear.weight.detach().to("cpu", importlib.import_module("torch").float16)
        made.weight = nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
        return made.to(linear.weight.device)

    return converted(stack, convert)


# Rounds where eager execution does, so that the bits are those of eager execution.
_EXACT = {"fullgraph": True, "dynamic": False, "options": {"emulate_precision_casts": True}}
_STATIC = {"dynamic": False}
# What torchao sets for the whole process, if it is let; here it must not change the other ways.
_TUNED = ("coordinate_descent_tuning", "coordinate_descent_check_all_directions", "force_fuse_int_mm_with_mul")
_TORCHAO = {"dynamic": False, "options": dict.fromkeys(_TUNED, True)}
WAYS = (
    Way("bf16", "nothing quantized, eager"),
    Way("bf16 compiled", "nothing quantized, torch.compile", base="bf16", compiled=_STATIC),
    Way("skuda", "DynamicLinear and fuse_, eager", _fused, ours=True),
    Way("skuda compiled", "DynamicLinear and fuse_, torch.compile", base="skuda", compiled=_EXACT, ours=True),
    Way(
        "torchao", "Int8DynamicActivationInt8WeightConfig, torch.compile", _torchao, compiled=_TORCHAO, needs="torchao"
    ),
    Way("bitsandbytes", "Linear8bitLt, threshold 0, eager", _bitsandbytes, needs="bitsandbytes"),
)
"""The ways, in the order of their columns."""
