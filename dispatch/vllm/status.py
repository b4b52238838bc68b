"""Whether skuda serves vLLM here, and if not, why. vLLM itself is not imported."""

from __future__ import annotations

from functools import lru_cache
from importlib import metadata
from typing import Any, NamedTuple

from skuda.dispatch.settings import serves_vllm, vllm_plugins
from skuda.registry.errors import SkudaError

NAME, GROUP = "skuda", "vllm.general_plugins"
"""The entry point and its group. The quantization of vLLM has the same name."""


class VllmStatus(NamedTuple):
    """The version of vLLM, and why skuda serves none of its layers, with the step that changes it; else empty."""

    version: str
    trouble: str = ""
    remedy: str = ""


def status() -> VllmStatus | None:
    """Return whether vLLM would use skuda, or None if vLLM is not installed."""
    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return None
    if not serves_vllm():
        return VllmStatus(version, "SKUDA_VLLM=0 leaves it as it is", "unset SKUDA_VLLM")
    allowed = vllm_plugins()
    if allowed is not None and NAME not in allowed:
        return VllmStatus(version, "VLLM_PLUGINS leaves out skuda", f"add {NAME} to VLLM_PLUGINS")
    if not metadata.entry_points(group=GROUP, name=NAME):
        return VllmStatus(version, f"skuda is installed without its entry point in {GROUP}", "pip install skuda")
    return VllmStatus(version, missing(), "see the backends above" if missing() else "")


@lru_cache(maxsize=1)
def missing() -> str:
    """Return why no kernel of skuda can serve vLLM on the current card; empty if one can."""
    try:
        import torch

        import skuda.torch  # noqa: F401  it defines the ops
        from skuda.functional import default_dispatcher
        from skuda.kernels.linear import QuantizedLinearDescriptor

        codes: Any = {"q_min": -127, "q_max": 127, "activation_element": "bf16", "output_element": "bf16"}
        dispatcher = default_dispatcher()
        problem = QuantizedLinearDescriptor(m=16, c_out=4096, k=4096, **codes)
        if dispatcher.explain(problem, device=f"cuda:{torch.cuda.current_device()}").chosen is not None:
            return ""
        absent = {name: found for name, found in dispatcher.status.items() if not found.available}
        why = "; ".join(f"{name}: {found.detail}: {found.remedy}" for name, found in absent.items())
    except (SkudaError, ImportError, AssertionError, RuntimeError) as error:  # torch without CUDA asserts
        why = str(error)
    return f"no CUDA kernel of skuda runs here: {why or 'the architecture of this card has none'}"
