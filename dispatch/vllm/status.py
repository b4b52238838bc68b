"""Whether skuda serves vLLM here, and if not, why. vLLM itself is not imported."""

from __future__ import annotations

from importlib import metadata

from skuda.dispatch.settings import serves_vllm, vllm_plugins
from skuda.serving.status import EngineStatus, missing

NAME, GROUP = "skuda", "vllm.general_plugins"
"""The entry point and its group. The quantization of vLLM has the same name."""


def status() -> EngineStatus | None:
    """Return whether vLLM would use skuda, or None if vLLM is not installed."""
    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return None
    if not serves_vllm():
        return EngineStatus(version, "SKUDA_VLLM=0 leaves it as it is", "unset SKUDA_VLLM")
    allowed = vllm_plugins()
    if allowed is not None and NAME not in allowed:
        return EngineStatus(version, "VLLM_PLUGINS leaves out skuda", f"add {NAME} to VLLM_PLUGINS")
    if not metadata.entry_points(group=GROUP, name=NAME):
        return EngineStatus(version, f"skuda is installed without its entry point in {GROUP}", "pip install skuda")
    return EngineStatus(version, missing(), "see the backends above" if missing() else "")
