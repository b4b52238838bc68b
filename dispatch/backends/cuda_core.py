"""The ``cuda_core`` backend: NVRTC from wheels, modules and launches through cuda-bindings, on any stream."""

from __future__ import annotations

from skuda.dispatch.backends.base import BackendStatus
from skuda.dispatch.backends.cuda import CudaBackend
from skuda.dispatch.compile.compilers import Nvrtc, find_nvrtc, nvrtc_trouble
from skuda.dispatch.cuda.modules import BindingsEngine, BindingsModule, bindings_trouble, bindings_version, load_module
from skuda.dispatch.cuda.packing import Packed
from skuda.registry.backend import BUILT_IN

_REMEDY = "pip install 'skuda[cuda13]'"


class CudaCoreBackend(CudaBackend[BindingsModule]):
    """CUDA source through NVRTC and cuda-bindings."""

    spec = next(spec for spec in BUILT_IN if spec.name == "cuda_core")
    compilers = f"install NVRTC: {_REMEDY}"

    def trouble(self) -> BackendStatus | None:
        """Return what is missing, or None."""
        found = bindings_trouble()
        return BackendStatus(available=False, detail=found, remedy=_REMEDY) if found else None

    def compiler(self) -> Nvrtc | None:
        """Return NVRTC, or None if it is not installed."""
        return find_nvrtc()

    def versions(self) -> str:
        """Return the names and versions of cuda-bindings and NVRTC."""
        nvrtc = find_nvrtc()
        compiler = nvrtc_trouble() if nvrtc is None else f"NVRTC {nvrtc.version[0]}.{nvrtc.version[1]}"
        return f"{bindings_version()}, {compiler}"

    def load(self, cubin: bytes, ordinal: int) -> BindingsModule:  # noqa: ARG002  the context is current
        """Load a cubin."""
        return load_module(cubin)

    def engine(self, module: BindingsModule, packed: Packed, ordinal: int) -> BindingsEngine:  # noqa: ARG002  the context is current
        """Return the steps of a launch."""
        return BindingsEngine(module, packed)
