"""The backends: `torch` on the CPU and `torch_cuda` on NVIDIA GPUs, the same functions on either."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from importlib import metadata
from typing import Any

from skuda.dispatch import Backend, BackendStatus, Device, driver
from skuda.registry import HOST, BackendSpec, Descriptor, DriverError, InvalidProblem, KernelSku, resolve
from skuda_torch.tensors import bound


class TorchRunner:
    """Runs a function over tensors."""

    notes: tuple[str, ...] = ()

    def __init__(self, problem: Descriptor, kernel: Callable[..., None], device: str) -> None:
        self._problem, self._kernel, self._device = problem, kernel, device

    def check(self, arrays: Mapping[str, Any]) -> None:
        """Raise what `run` would raise."""
        bound(self._problem, arrays, self._device)

    def run(self, arrays: Mapping[str, Any], stream: Any) -> Any:
        """Run once."""
        return self.bind(arrays, stream)()

    def bind(self, arrays: Mapping[str, Any], stream: Any) -> Callable[[], Any]:
        """Check once; return what runs."""
        turn = self._on(stream)
        tensors, result = bound(self._problem, arrays, self._device)

        def launch() -> Any:
            with turn():
                self._kernel(self._problem, **tensors)
            return result

        return launch

    def _on(self, stream: Any) -> Callable[[], Any]:
        """Return what makes a stream the current one: torch's own kind, or the integer that CUDA knows it by."""
        if stream is None:
            return nullcontext
        if self._device == "cpu":
            raise InvalidProblem(self._problem.op_name(), "stream", repr(stream), "be None: this plan runs on the CPU")
        import torch

        if isinstance(stream, int):
            stream = torch.cuda.ExternalStream(stream, device=self._device)
        if not isinstance(stream, torch.cuda.Stream):
            raise InvalidProblem(self._problem.op_name(), "stream", repr(stream), "be a torch.cuda.Stream or a handle")
        return lambda: torch.cuda.stream(stream)


class TorchBackend(Backend):
    """torch on the CPU."""

    spec = BackendSpec(name="torch", processor="cpu")

    def status(self) -> BackendStatus:
        """Say which torch is installed; importing it can wait."""
        try:
            return BackendStatus(available=True, detail=f"torch {metadata.version('torch')}")
        except metadata.PackageNotFoundError:
            return BackendStatus(available=False, detail="torch is not installed", remedy="pip install torch")

    def devices(self) -> tuple[Device, ...]:
        """Return the CPU."""
        return (HOST,) if self.status().available else ()

    def prepare(self, sku: KernelSku, problem: Descriptor, device: Device) -> TorchRunner:
        """Look the function up."""
        name = "cpu" if device.processor == "cpu" else f"cuda:{device.ordinal}"
        return TorchRunner(problem, resolve(sku.source, sku.entry_point), name)


class TorchCudaBackend(TorchBackend):
    """torch on NVIDIA GPUs."""

    spec = BackendSpec(name="torch_cuda", processor="cuda")

    def status(self) -> BackendStatus:
        """Ask the driver first: without a GPU there is no need to import torch."""
        state = super().status()
        try:
            count = driver().device_count
        except DriverError as error:
            return BackendStatus(available=False, detail=str(error), remedy="install the NVIDIA driver")
        if not state.available or not count:
            return (
                state if count else BackendStatus(available=False, detail="no GPU", remedy="set CUDA_VISIBLE_DEVICES")
            )
        import torch

        if torch.version.cuda is None:
            remedy = "pip install torch --index-url https://download.pytorch.org/whl/cu130"
            return BackendStatus(available=False, detail=f"{state.detail} without CUDA", remedy=remedy)
        return BackendStatus(available=True, detail=f"{state.detail} for CUDA {torch.version.cuda}")

    def devices(self) -> tuple[Device, ...]:
        """Return the driver's devices."""
        return driver().devices() if self.status().available else ()
