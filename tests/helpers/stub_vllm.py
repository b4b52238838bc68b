"""A stand-in for vLLM's library: the same ops of torch, on the CPU, with vLLM's order of roundings.

Torch loads a library by its path; here that registers the ops, with planted faults where a test names them.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

FILE = "_C_stable_libtorch.abi3.so"
SCHEMAS = {
    "cutlass_scaled_mm": "Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor? bias",
    "dynamic_scaled_int8_quant": "Tensor! result, Tensor input, Tensor! scale, Tensor!? azp",
}


def coded(values: Any) -> Any:
    return torch.round(values).clamp(-128, 127).to(torch.int8)


def ranged(out: Any, x: Any, scale: Any) -> None:
    most = x.float().abs().amax(1, keepdim=True)
    scale.copy_(most / 127.0)
    out.copy_(coded(x.float() * (127.0 / most)))


class Stub:
    """The ops. `fault` is one of: "scale", "code", "weights", or nothing."""

    def __init__(self, fault: str = "") -> None:
        self.fault, self.calls = fault, list[str]()

    def cutlass_scaled_mm(self, out: Any, a: Any, b: Any, a_scales: Any, b_scales: Any, bias: Any) -> None:
        assert (a.shape[1] % 16, b.shape[1] % 16, b.stride(0), bias) == (0, 0, 1, None)
        assert a_scales.dtype == b_scales.dtype == torch.float32
        assert a_scales.is_contiguous()
        assert a_scales.shape == (len(a), 1)
        if self.fault == "weights":
            b = b.T.reshape(b.shape)
        sums = (a.double() @ b.double()).float()
        out.copy_(a_scales * (b_scales.reshape(1, -1) * sums))

    def dynamic_scaled_int8_quant(self, result: Any, x: Any, scale: Any, azp: Any) -> None:
        assert azp is None
        ranged(result, x, scale)
        if self.fault == "scale":
            scale[-1] *= 1 + 1e-5
        if self.fault == "code":
            result[-1, -1] += 2 - 4 * (result[-1, -1] > 0)


class Loader:
    """Stands for ``torch.ops.load_library``: a path in `paths` has the ops, and is loaded once."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack, self.paths, self.loaded = stack, dict[str, tuple[Stub, dict[str, str]]](), list[str]()
        self.own = torch.ops.load_library

    def __call__(self, path: str) -> None:
        if path not in self.paths:
            self.own(path)
        self.loaded.append(path)
        stub, schemas = self.paths[path]
        library = self.stack.enter_context(torch.library._scoped_library("_C", "FRAGMENT"))
        for name, arguments in schemas.items():

            def counted(*given: Any, name: str = name) -> None:
                stub.calls.append(name)
                getattr(stub, name)(*given)

            library.define(f"{name}({arguments}) -> ()")
            library.impl(name, counted, "CPU")


@pytest.fixture
def vllm_stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    """Return a function that makes a library with a fault, or with other schemas, and returns its path and `Stub`."""
    with ExitStack() as stack:
        loader = Loader(stack)
        monkeypatch.setattr(torch.ops, "load_library", loader)

        def made(fault: str = "", **schemas: str | None) -> tuple[Any, Stub]:
            path, stub = tmp_path / "vllm" / FILE, Stub(fault)
            path.parent.mkdir(exist_ok=True)
            path.touch()
            kept = {name: text for name, text in {**SCHEMAS, **schemas}.items() if text is not None}
            loader.paths[str(path.resolve())] = stub, kept
            return path, stub

        made.loader = loader  # type: ignore[attr-defined]
        yield made
