"""A worker of vLLM prepares its kernels before vLLM says that it is ready; see `skuda.serving.preparation`."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from vllm.logger import init_logger

from skuda.dispatch.telemetry import KERNELS
from skuda.functional import default_dispatcher
from skuda.serving.preparation import prepare, want

logger = init_logger("vllm.skuda")  # vLLM shows what loggers below its own say


def attend(worker: Any) -> None:
    """Prepare everything when a worker has warmed up, from what it has run until then; later kernels are late.

    Parameters
    ----------
    worker
        Of vLLM. Its device is set up, and nothing else. vLLM calls `compile_or_warm_up_model` last, in every worker.
    """
    runner = worker.model_runner
    if runner.device.type != "cuda":
        return
    watching, device = ExitStack(), str(runner.device)
    seen = watching.enter_context(default_dispatcher().recorded())
    watching.enter_context(KERNELS.expected())
    original = worker.compile_or_warm_up_model

    def compile_or_warm_up_model() -> Any:
        with watching:
            found = original()
        most = worker.vllm_config.scheduler_config.max_num_batched_tokens
        want((problem for problem, where in seen if where.processor == "cuda"), most)
        prepare(device, logger)
        if seen:
            KERNELS.watch(lambda line: logger.warning("skuda: %s", line))
        return found

    worker.compile_or_warm_up_model = compile_or_warm_up_model
