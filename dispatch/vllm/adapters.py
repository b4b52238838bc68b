"""Adapters in vLLM: one that was trained on a model which is folded otherwise is refused when a request loads it.

vLLM has no place for such a check, and keeps no config beside an adapter. So two methods of its manager are wrapped.
"""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

from skuda.torch.hf.checkpoint import read_object
from skuda.torch.models.folded import check_adapter, digest_in


def check_loading() -> None:
    """Let managers of adapters that are made after this check each adapter before they load it."""
    from vllm.lora.utils import get_adapter_absolute_path
    from vllm.lora.worker_manager import WorkerLoRAManager

    make, load = WorkerLoRAManager.__init__, WorkerLoRAManager._load_adapter  # noqa: SLF001  it has no public name
    if hasattr(load, "__wrapped__"):
        return

    @wraps(make)
    def init(manager: Any, vllm_config: Any, *given: Any, **named: Any) -> None:
        make(manager, vllm_config, *given, **named)
        manager.skuda_folding = digest_in(vllm_config.model_config.hf_config.to_dict())

    @wraps(load)
    def load_adapter(manager: Any, lora_request: Any) -> Any:
        file = Path(get_adapter_absolute_path(lora_request.lora_path), "adapter_config.json")
        config = read_object(file) if file.is_file() else {}
        check_adapter("LoRARequest", lora_request.lora_name, config, manager.skuda_folding)
        return load(manager, lora_request)

    WorkerLoRAManager.__init__, WorkerLoRAManager._load_adapter = init, load_adapter  # noqa: SLF001  as above
