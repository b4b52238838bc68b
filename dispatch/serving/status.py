"""Whether skuda can serve an engine here, and if not, why."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from skuda.registry.errors import SkudaError


class EngineStatus(NamedTuple):
    """The version of an engine, and why skuda serves none of its layers, with the step that changes it; else empty."""

    version: str
    trouble: str = ""
    remedy: str = ""


@lru_cache(maxsize=1)
def missing() -> str:
    """Return why no kernel of skuda can serve an engine on the current card; empty if one can."""
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
