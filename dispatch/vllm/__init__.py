"""skuda in vLLM: int8 linear layers, norms and gated activations that write codes, attention, and sampling.

vLLM loads `register` from the entry-point group ``vllm.general_plugins``, so installing skuda beside it is all. The
versions 0.26 to 0.33 are tested. ``SKUDA_VLLM=0`` leaves vLLM as it is.
"""

from __future__ import annotations

from skuda.dispatch.settings import serves_vllm

__all__ = ["register"]


def register() -> None:
    """Let skuda serve vLLM's int8 layers, and add ``quantization="skuda"`` and an attention backend, ``CUSTOM``.

    vLLM calls this in each of its processes, in some of them more than once.
    """
    if not serves_vllm():
        return
    from skuda.vllm import attention, config, exact, linear_kernel

    linear_kernel.register()
    attention.register()
    config.register()
    exact.register()
