"""``"exact": True`` of ``quantization="skuda"``: skuda's layers and sampler in vLLM's place, or what prevents it.

vLLM has no place for these in plug-ins. So the method that makes a worker's runner is wrapped, and the runner's that
loads a model; where the config does not ask for it, nothing else changes.
"""

from __future__ import annotations

from functools import wraps
from typing import Any, NoReturn

from vllm.v1.attention.backends.registry import AttentionBackendEnum

from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown
from skuda.serving import tokens
from skuda.serving.preparation import want
from skuda.vllm.adapters import check_loading
from skuda.vllm.attention import CACHE_DTYPE
from skuda.vllm.config import SkudaVllmConfig
from skuda.vllm.linear_kernel import logger
from skuda.vllm.status import NAME
from skuda.vllm.warming import attend

_METHODS = "ngram", "draft_model"
"""The methods of speculative decoding that are served."""


_USUAL = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
"""Tokens of the steps that vLLM captures, up to twice as many as there may be sequences."""
_WITH_PROMPTS = range(640, 2049, 128)
"""Further ones, of steps with a prompt. The host takes longer to launch such a step than the GPU to compute it."""


def register() -> None:
    """Let configs of exact models choose skuda's cache, and workers prepare kernels and have what configs ask for."""
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    from skuda.torch.exact.exact import FAMILIES  # it imports transformers

    for family in FAMILIES:
        name = f"{family.capitalize()}ForCausalLM"
        MODELS_CONFIG_MAP[name] = _completing(MODELS_CONFIG_MAP.get(name, VerifyAndUpdateConfig))
    original: Any = WorkerWrapperBase.init_device
    if getattr(original, "serves_skuda", False):
        return

    @wraps(original)
    def init_device(wrapper: Any, *given: Any, **named: Any) -> Any:
        found = original(wrapper, *given, **named)
        if getattr(wrapper.worker.vllm_config, "lora_config", None) is not None:
            check_loading()
        attend(wrapper.worker)
        serve(wrapper.worker)
        return found

    init_device.serves_skuda = True  # type: ignore[attr-defined]
    WorkerWrapperBase.init_device = init_device


def _completing(kind: Any) -> Any:
    """Return vLLM's class of rules of a family's config with one rule more, once."""
    if hasattr(kind, "completes"):
        return kind

    class Completing(kind):  # type: ignore[misc]
        completes = True

        @staticmethod
        def verify_and_update_config(vllm_config: Any) -> None:
            complete(vllm_config)
            kind.verify_and_update_config(vllm_config)

    return Completing


def complete(config: Any) -> None:
    """Choose skuda's attention and cache for an exact model, and the sizes of graphs, where the user chose none.

    Parameters
    ----------
    config : VllmConfig
        Its `quant_config` is not made yet.
    """
    described = getattr(config.model_config.hf_config, "quantization_config", None) or {}
    if config.model_config.quantization != NAME or described.get("exact") is not True:
        return
    attention = config.attention_config
    if attention.backend is None and not attention.backend_per_kind:
        attention.backend = AttentionBackendEnum.CUSTOM
    if config.cache_config.cache_dtype == "auto":
        config.cache_config.cache_dtype = CACHE_DTYPE
    graphs = config.compilation_config
    chosen = graphs.cudagraph_capture_sizes is not None or graphs.max_cudagraph_capture_size is not None
    if not chosen and not config.model_config.enforce_eager and config.performance_mode != "interactivity":
        most = 2 * config.scheduler_config.max_num_seqs * (1 + config.num_speculative_tokens)
        graphs.cudagraph_capture_sizes = [size for size in _USUAL if size <= most] + [*_WITH_PROMPTS]


def serve(worker: Any) -> None:
    """Give a worker the sampler, and its model the layers, if its config asks for it.

    Parameters
    ----------
    worker
        Of vLLM; it has made its runner, which has not loaded its model yet.

    Raises
    ------
    InvalidProblem
        If something in the config cannot be exact.
    """
    config = worker.vllm_config
    if not isinstance(config.quant_config, SkudaVllmConfig) or not config.quant_config.exact:
        return
    check(config)
    from skuda.vllm import sampler  # it imports vLLM's
    from skuda.vllm.exact_model import make_exact

    runner = worker.model_runner
    load = runner.load_model

    @wraps(load)
    def load_model(*given: Any, **named: Any) -> None:
        load(*given, **named)
        make_exact(runner.get_model(), config)

    runner.load_model = load_model
    if config.use_v2_model_runner:
        from skuda.vllm import sampler_v2

        sampler_v2.install()
    else:
        runner.sampler = sampler.ExactSampler(runner)
        if config.speculative_config is not None:
            runner.rejection_sampler = runner.sampler.verify
            drafter: Any = getattr(runner, "drafter", None)
            if getattr(drafter, "_enable_probabilistic_draft_probs", False) and not drafter.parallel_drafting:
                runner.sampler.guide(drafter)
    if runner.device.type == "cuda":
        problems = tokens.problems(config.model_config.get_vocab_size())
        want(problems, config.scheduler_config.max_num_batched_tokens)
    logger.info_once("The model is skuda's exact one; tokens are drawn, and log-probabilities computed, by its ops")


def check(config: Any) -> None:
    """Refuse what cannot be exact.

    Parameters
    ----------
    config : VllmConfig

    Raises
    ------
    InvalidProblem
        For another attention or cache, adapters, drafts that are not verified here, and what vLLM's own sampler does.
    """
    backend, dtype = config.attention_config.backend, config.cache_config.cache_dtype
    if backend is not AttentionBackendEnum.CUSTOM or config.attention_config.backend_per_kind:
        _refuse("attention_backend", getattr(backend, "name", backend), "be 'CUSTOM' for all layers")
    if dtype != CACHE_DTYPE:
        _refuse("kv_cache_dtype", dtype, f"be {CACHE_DTYPE!r}")
    if config.speculative_config is not None:
        _check_drafts(config)
    absent: dict[str, Any] = {"enable_lora": config.lora_config is not None}
    absent |= {"watermark_config": _of(config, "watermark_config")}
    absent |= {name: _of(config.model_config, name) for name in ("use_fp64_gumbel", "return_sampling_mask")}
    for name, given in absent.items():
        if given:
            _refuse(name, given if given is True else type(given).__name__, "be left out")


def _check_drafts(config: Any) -> None:
    """Refuse drafts with which tokens would not be those without them."""
    given, reasoning = config.speculative_config, config.structured_outputs_config.reasoning_parser
    if given.method not in _METHODS:
        rule = f"be {' or '.join(map(repr, _METHODS))}: no others are tested"
        _refuse("speculative_config.method", given.method, rule)
    if given.rejection_sample_method != "standard":
        rule = "be 'standard': a draft is taken only if it is the token without drafts"
        _refuse("speculative_config.rejection_sample_method", given.rejection_sample_method, rule)
    if reasoning or _of(config, "reasoning_config"):
        rule = "be left out beside drafts: vLLM then ends thinking, and begins structured outputs, at other tokens"
        _refuse("reasoning_parser", reasoning, rule)
    if shards := _of(config.parallel_config, "enable_batch_sharded_sampling"):
        rule = "be left out beside drafts: vLLM does not gather the log-probabilities of named tokens"
        _refuse("enable_batch_sharded_sampling", shards, rule)


def _of(config: Any, name: str) -> Any:
    """Return a field that not every version of vLLM has."""
    return getattr(config, name, None)


def _refuse(field: str, had: Any, rule: str) -> NoReturn:
    raise InvalidProblem('"exact": True of quantization="skuda"', field, shown(had), rule)
