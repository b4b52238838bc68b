"""The attention backend ``CUSTOM`` of vLLM: skuda's int8 attention, so a token's bits depend only on what it sees.

vLLM allocates, shares and frees the pages, blocks of 128 tokens. Its cache dtype ``int8_per_token_head`` has exactly
the bytes that skuda's cache needs: the codes of a key and a value, and a scale for each. A layer's memory is cut into
four arrays, as the ops want them: the codes of the keys of all pages, the codes of the values, and the scales of both.
So a page is in four places, and whatever takes pages for ranges of bytes is refused: connectors, offloading, and layers
of other shapes in the same memory.

    LLM(model, attention_backend="CUSTOM", kv_cache_dtype="int8_per_token_head")
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

from skuda.kernels.attention.cache import HEAD_SIZES, PAGE
from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown
from skuda.serving.blocks import BlockCache, Shape, Turn, append_and_attend, cut, problems, token_bytes, unturned
from skuda.serving.preparation import prepare, select, want
from skuda.serving.status import missing
from skuda.vllm.linear_kernel import logger

CACHE_DTYPE = "int8_per_token_head"
"""What vLLM calls a cache of int8 codes with an f32 scale for each key and value of a head."""

_SUBJECT = 'attention_backend="CUSTOM" of skuda'
_LEAST_CAPABILITY = 80


class ExactAttentionBackend(AttentionBackend):
    """What vLLM asks before it chooses the backend and allocates the cache."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [CACHE_DTYPE]

    @staticmethod
    def get_name() -> str:
        """Return the name in vLLM's list of backends."""
        return str(AttentionBackendEnum.CUSTOM.name)

    @staticmethod
    def get_impl_cls() -> type[ExactAttention]:
        """Return what computes."""
        return ExactAttention

    @staticmethod
    def get_builder_cls() -> type[ExactTablesBuilder]:
        """Return what reads the tables of a step."""
        return ExactTablesBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Return the tokens of a page. vLLM takes it as its block size, or multiples that the user wants."""
        del kv_cache_spec
        return [PAGE]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return the head sizes that kernels exist for."""
        return list(HEAD_SIZES)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Whether kernels exist for a card."""
        return bool(capability.to_int() >= _LEAST_CAPABILITY)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Return True."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Return True: it is what this attention is for."""
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """Return False: a connector moves blocks as ranges of bytes."""
        return False

    @classmethod
    def supports_combination(cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: Any, *_: Any) -> str | None:
        """Return what to do where the cache has another dtype, or why no kernel runs here."""
        del head_size, dtype
        return f"it needs kv_cache_dtype={CACHE_DTYPE!r}" if kv_cache_dtype != CACHE_DTYPE else missing() or None

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Return the shape of a layer's memory, in bytes, for vLLM 0.26; only its size counts."""
        del cache_dtype_str
        return num_blocks, num_kv_heads, block_size, token_bytes(head_size)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Return the description of a layer's cache with the bytes of a token and head, for vLLM 0.33."""
        return replace(spec, state_content_bytes=token_bytes(spec.head_size))

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """Return the layout of vLLM 0.33 in which the memory of a layer is one piece."""
        from vllm.v1.kv_cache_interface import KVCacheLayout

        return (KVCacheLayout.LBHNC,)


@dataclass
class ExactTables(AttentionMetadata):  # type: ignore[misc]
    """The tables of a step, as the ops want them. They are vLLM's own tensors, so captured graphs read new values.

    Attributes
    ----------
    block_table, lengths, starts : tensors, s32
        As `skuda.kernels.attention.cache` says.
    """

    block_table: Tensor
    lengths: Tensor
    starts: Tensor


class ExactTablesBuilder(AttentionMetadataBuilder[ExactTables]):  # type: ignore[misc]
    """Reads the tables of each step for a group of layers.

    Parameters
    ----------
    kv_cache_spec, layer_names, vllm_config, device
        As vLLM gives them.

    Raises
    ------
    InvalidProblem
        For layers of other kinds or shapes that may share memory with these, and experts with data parallelism.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        if parallel.data_parallel_size > 1 and model is not None and model.is_moe:
            rule = "be 1 for a model with experts: an idle rank runs dummy tokens, which would be written to the cache"
            _refuse("data_parallel_size", str(parallel.data_parallel_size), rule)
        layers = vllm_config.compilation_config.static_forward_context
        _check_layers(layers, layers[layer_names[0]], vllm_config)
        if device.type == "cuda":
            found = _problems_of_graphs(layers[layer_names[0]], vllm_config)
            want(found, vllm_config.scheduler_config.max_num_batched_tokens)
            prepare(str(device), logger)
            select(found, str(device))

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: Any = None
    ) -> ExactTables:
        """Return the tables of a step.

        Raises
        ------
        InvalidProblem
            For a step in which tokens see later ones.
        """
        del common_prefix_len, fast_build
        common = common_attn_metadata
        if common.causal is not True:
            _refuse("causal", shown(common.causal), "be True: tokens see no later ones")
        return ExactTables(common.block_table_tensor, common.seq_lens, common.query_start_loc)


class ExactAttention(AttentionImpl[ExactTables]):  # type: ignore[misc]
    """The attention of one layer.

    Parameters
    ----------
    num_heads, head_size, scale, num_kv_heads, sliding_window
        Fields of the op `attention`: `heads`, `head_size`, `scale`, `kv_heads` and `window`.
    kv_cache_dtype, attn_type
        What the backend serves: `CACHE_DTYPE`, and a decoder.
    alibi_slopes, logits_soft_cap, kv_sharing_target_layer_name, **others
        What the definition does not have.

    Attributes
    ----------
    turn : callable, optional
        Returns what is done to new queries and keys, if the model did not turn them; see `skuda.vllm.exact_model`.

    Raises
    ------
    InvalidProblem
        For what it cannot do, by name.
    """

    supports_dcp: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **others: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.window, self.kv_cache_dtype = sliding_window, kv_cache_dtype
        self.turn: Callable[[], Turn] | None = None
        # vLLM sets an attribute of this name to None when it frees a cache; other backends keep views of it there, too.
        self._k_scale_cache: tuple[Tensor, BlockCache] | None = None
        absent = "be left out: it is not part of the definition; use another attention backend"
        if kv_cache_dtype != CACHE_DTYPE:
            _refuse("kv_cache_dtype", shown(kv_cache_dtype), f"be {CACHE_DTYPE!r}")
        if attn_type != AttentionType.DECODER:
            _refuse("attn_type", shown(getattr(attn_type, "value", attn_type)), "be that of a decoder")
        if head_size not in HEAD_SIZES:
            _refuse("head_size", str(head_size), f"be one of {', '.join(map(str, HEAD_SIZES))}")
        others |= {"alibi_slopes": alibi_slopes, "kv_sharing_target_layer_name": kv_sharing_target_layer_name}
        others["logits_soft_cap"] = logits_soft_cap or None
        for name, given in others.items():
            if given is not None and given is not False:
                _refuse(name, f"a {type(given).__name__}", absent)
        if self.total_cp_world_size > 1 or self.pcp_world_size > 1:
            _refuse("context parallelism", "several ranks", "be off: a rank needs all keys of its heads")

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: ExactTables | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write new keys and values to the cache, and attention over it to `output`.

        Parameters
        ----------
        layer : Attention
            The layer; not needed.
        query, output : tensors of shape (tokens, num_heads, head_size)
            Queries, and what is written: 0 for rows of no sequence.
        key, value : tensors of shape (tokens, num_kv_heads, head_size)
            New keys and values. Queries and keys come after rope, unless `turn` says how they turn.
        kv_cache : tensor
            The layer's memory.
        attn_metadata : ExactTables, optional
            The tables. Without them, when vLLM measures memory, nothing is computed.
        output_scale, output_block_scale
            Must be None.

        Returns
        -------
        tensor
            `output`.
        """
        del layer
        if output_scale is not None or output_block_scale is not None:
            _refuse("output_scale", "a tensor", "be None: the output is not quantized here")
        if attn_metadata is None:
            return output.zero_()
        tables = (attn_metadata.block_table, attn_metadata.lengths, attn_metadata.starts)
        turned, cache = None if self.turn is None else self.turn(), self._cache(kv_cache)
        append_and_attend(cache, tables, query, key, value, output, scale=self.scale, window=self.window, turned=turned)
        return output

    def _cache(self, memory: Tensor) -> BlockCache:
        """Return the arrays in a layer's memory. They are made again if vLLM has allocated other memory."""
        if self._k_scale_cache is None or self._k_scale_cache[0] is not memory:
            self._k_scale_cache = memory, cut(memory, self.num_kv_heads, self.head_size)
        return self._k_scale_cache[1]


def register() -> None:
    """Let vLLM know the backend, unless another plug-in has its name."""
    ours, custom = f"{__name__}.{ExactAttentionBackend.__qualname__}", AttentionBackendEnum.CUSTOM
    if not custom.is_overridden():
        register_backend(custom, ours)
    elif custom.get_path() != ours:
        logger.info_once("attention_backend=CUSTOM is %s of another plug-in, not skuda's", custom.get_path())


def _check_layers(layers: dict[str, Any], first: Any, config: Any) -> None:
    """Refuse layers, those of a draft model included, where memory of one can become that of one with another cut.

    vLLM lets layers share memory if they lie in several groups, and they lie in one if all need as many blocks.
    """
    if first.head_size_v != first.impl.head_size:
        _refuse("head_size_v", str(first.head_size_v), f"be that of keys, {first.impl.head_size}")
    wanted = _form(first)
    others = {name: layer for name, layer in layers.items() if isinstance(layer, AttentionLayerBase)}
    forms = {name: _form(layer) for name, layer in others.items()}
    if set(forms.values()) == {wanted}:
        return
    specs = {name: layer.get_kv_cache_spec(config) for name, layer in others.items()}
    if UniformTypeKVCacheSpecs.is_uniform_type({name: spec for name, spec in specs.items() if spec is not None}):
        return
    for name, form in forms.items():
        if form != wanted:
            rule = f"have {', '.join(map(str, wanted))}, as {first.layer_name}: layers may share memory"
            _refuse(name, ", ".join(map(str, form)), rule)


def _form(layer: Any) -> tuple[Any, ...]:
    """Return what decides how a layer's memory is cut: backend, heads of keys, and their elements, and of values."""
    impl = getattr(layer, "impl", None)
    sizes = (impl.num_kv_heads, impl.head_size, layer.head_size_v) if isinstance(impl, ExactAttention) else ()
    return (type(impl or layer).__name__, *sizes)


def _problems_of_graphs(layer: Any, config: Any) -> set[Any]:
    """Return the problems of the graphs that vLLM captures, a token and its drafts a sequence, and of a long prompt."""
    impl, most = layer.impl, -(-config.model_config.max_model_len // PAGE)
    pages = config.cache_config.num_gpu_blocks or 1
    drafts = 0 if config.speculative_config is None else config.speculative_config.num_speculative_tokens
    sizes = config.compilation_config.cudagraph_capture_sizes or ()
    calls = {(size, -(-size // each)) for size in sizes for each in (1, 1 + drafts)}
    calls.add((config.scheduler_config.max_num_batched_tokens, 1))
    turn = (unturned(torch.device("cpu")) if impl.turn is None else impl.turn()).fields
    found: set[Any] = set()
    for tokens, sequences in calls:
        shape = Shape(tokens, sequences, pages, impl.num_kv_heads, most, impl.num_heads, impl.head_size)
        found.update(problems(shape, layer.dtype, impl.scale, impl.window, turn))
    return found


def _refuse(field: str, had: str, rule: str) -> NoReturn:
    raise InvalidProblem(_SUBJECT, field, had, rule)
