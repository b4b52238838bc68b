"""The backend `triton`: it compiles the kernels with Triton and launches them on NVIDIA GPUs.

`CudaRunner` does what all backends for NVIDIA GPUs need. It checks the arguments of a call, allocates missing outputs
in the caller's framework, and finds the stream. It then passes addresses and numbers to an engine, which launches.
"""

from functools import partial
from importlib import metadata
from importlib.util import find_spec

from skuda.dispatch import Backend, BackendStatus, CudaRunner, driver
from skuda.registry import BackendSpec, DriverError
from skuda_triton.records import INTERPRETED, TILE, WARPS, launch


def unavailable(detail, remedy):
    return BackendStatus(available=False, detail=detail, remedy=remedy)


def kernel_of(problem):
    """Return the Triton kernel of a problem and its compile-time arguments. Only this imports Triton."""
    import triton.language as tl

    from skuda_triton import kernels

    element = {"f32": tl.float32, "f16": tl.float16, "bf16": tl.bfloat16}[problem.input_element]
    return getattr(kernels, problem.op), {"X": element, **TILE}


class TritonBackend(Backend):
    spec = BackendSpec(name="triton", processor="cuda")

    def status(self):
        """Say whether it works here; where it does not, `skuda doctor` prints the reason and the remedy."""
        for package in ("triton", "torch"):
            if find_spec(package) is None:
                return unavailable(f"{package} is not installed", f"pip install {package}")
        if INTERPRETED:
            return unavailable("TRITON_INTERPRET=1 replaces the compiler", "unset TRITON_INTERPRET")
        try:
            count = driver().device_count
        except DriverError as error:
            return unavailable(str(error), "install the NVIDIA driver")
        if count == 0:
            return unavailable("the driver sees no GPU", "set CUDA_VISIBLE_DEVICES")
        return BackendStatus(available=True, detail=f"triton {metadata.version('triton')}")

    def devices(self):
        return driver().devices() if self.status().available else ()

    def prepare(self, sku, problem, device, choice=""):
        place = (device.ordinal, driver().primary_context(device.ordinal))
        return CudaRunner(problem, launch(problem), Engine(problem, device.ordinal), driver(), place)


class Engine:
    """Launches the kernel of one problem on one GPU."""

    def __init__(self, problem, ordinal):
        self._ordinal = ordinal
        self._kernel, self._constants = kernel_of(problem)
        self.sends = [partial(self._send, step.grid) for step in launch(problem).steps]

    def bound(self, step, parameters):
        return partial(self.sends[step], parameters)

    def _send(self, grid, parameters, handle, stream):
        import torch

        # Triton launches on torch's current stream. The first launch compiles the kernel.
        default = torch.cuda.default_stream(self._ordinal)
        given = torch.cuda.ExternalStream(handle, device=self._ordinal) if handle else default
        with torch.cuda.stream(given):
            self._kernel[grid](*parameters, **self._constants, num_warps=WARPS, enable_fp_fusion=False)
