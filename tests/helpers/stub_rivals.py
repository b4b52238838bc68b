"""A stand-in for torchao, whose layers multiply by the weight that they were given."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")


def install(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the package be imported; return a list to which each call of one of its layers adds its name."""
    calls: list[str] = []

    class Counted(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, linear: Any) -> None:
            super().__init__()
            self.weight = linear.weight

        def forward(self, x: Any) -> Any:
            calls.append("torchao")
            return torch.nn.functional.linear(x, self.weight.to(x.dtype))

    def quantize_(holder: Any, config: dict[str, bool]) -> None:
        assert config == {"set_inductor_config": False}, "the other rivals are compiled as they were"
        for name, child in list(holder.items()):
            holder[name] = Counted(child)

    made: dict[str, dict[str, Any]] = {
        "torchao": {},
        "torchao.quantization": {"quantize_": quantize_, "Int8DynamicActivationInt8WeightConfig": dict},
    }
    for name, members in made.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return calls
