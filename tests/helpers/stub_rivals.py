"""Stand-ins for torchao and bitsandbytes, whose layers multiply by the weight that they were given."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")


def install(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let both packages be imported; return a list to which each call of one of their layers adds its package."""
    calls: list[str] = []

    class Counted(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, linear: Any) -> None:
            super().__init__()
            self.weight = linear.weight

        def forward(self, x: Any) -> Any:
            calls.append("torchao")
            return torch.nn.functional.linear(x, self.weight.to(x.dtype))

    class Linear8bitLt(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, k: int, n: int, *, bias: bool, has_fp16_weights: bool, threshold: float) -> None:
            assert (bias, has_fp16_weights, threshold) == (False, False, 0)
            super().__init__()
            self.shape = (n, k)

        def forward(self, x: Any) -> Any:
            assert self.weight.shape == self.shape
            calls.append("bitsandbytes")
            return torch.nn.functional.linear(x, self.weight.to(x.dtype))

    def int8_params(weight: Any, *, requires_grad: bool, has_fp16_weights: bool) -> Any:
        assert (weight.dtype, has_fp16_weights) == (torch.float16, False)
        return torch.nn.Parameter(weight, requires_grad=requires_grad)

    def quantize_(holder: Any, config: dict[str, bool]) -> None:
        assert config == {"set_inductor_config": False}, "the other rivals are compiled as they were"
        for name, child in list(holder.items()):
            holder[name] = Counted(child)

    made: dict[str, dict[str, Any]] = {
        "torchao": {},
        "torchao.quantization": {"quantize_": quantize_, "Int8DynamicActivationInt8WeightConfig": dict},
        "bitsandbytes": {"nn": SimpleNamespace(Linear8bitLt=Linear8bitLt, Int8Params=int8_params)},
    }
    for name, members in made.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return calls
