"""vLLM on a CPU without its libraries. In its layers the kernel of `skuda.vllm` computes by the reference."""

from __future__ import annotations

import os
import socket
import warnings

os.environ |= {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_TARGET_DEVICE": "cpu", "VLLM_NO_USAGE_STATS": "1"}

import pytest
import torch

with warnings.catch_warnings(action="ignore"):  # pytest has not read tests/conftest.py yet
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.model_executor.kernels import linear as kernels
    from vllm.platforms.interface import PlatformEnum
    from vllm.plugins import load_general_plugins

torch.set_num_threads(1)
torch.cpu._is_amx_tile_supported = lambda: False  # where it is, vLLM packs weights by its library
# vLLM 0.26 asks its library for this op when it builds the layer, and runs it only on a GPU.
torch.library.define("_C::silu_and_mul", "(Tensor! result, Tensor input) -> ()")


@pytest.fixture(scope="session")
def alone():
    """A group of one rank, as vLLM has it in every process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)


@pytest.fixture
def served(alone, monkeypatch):
    """Let vLLM choose skuda's kernel on the CPU. Gives the present config of vLLM."""
    from skuda.vllm.linear_kernel import SkudaInt8ScaledMMLinearKernel as Kernel

    monkeypatch.setattr(Kernel, "is_supported", classmethod(lambda cls, compute_capability=None: (True, None)))
    load_general_plugins()
    known = kernels._POSSIBLE_INT8_KERNELS
    monkeypatch.setitem(known, PlatformEnum.CPU, known[PlatformEnum.CUDA])
    config = VllmConfig()
    with set_current_vllm_config(config), torch.inference_mode():
        yield config
