"""Layers of vLLM with skuda's attention, and the cache that vLLM allocates for them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from vllm.config import CacheConfig, VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm_layers import default_dtype

from skuda.vllm.attention import CACHE_DTYPE, ExactAttentionBackend

try:  # vLLM 0.33
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups, get_kv_cache_groups
    from vllm.v1.worker.utils import allocate_kv_cache, customize_attention_spec
except ImportError:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
    from vllm.v1.worker.gpu.attn_utils import _reshape_attention_kv_cache

    allocate_kv_cache = None

HEADS, KV_HEADS, SIZE, SCALE, PAGE = 4, 2, 32, 0.3, 128
SIZES = HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE
"""Columns of queries, keys and values."""


def config_of(cache_dtype=CACHE_DTYPE, **more):
    return VllmConfig(cache_config=CacheConfig(cache_dtype=cache_dtype, block_size=PAGE), **more)


def layer_of(config, name="layers.0.attn", window=None, size=SIZE, **more):
    """A layer of vLLM that has the backend."""
    given = {"num_kv_heads": KV_HEADS, "cache_config": config.cache_config, "prefix": name} | more
    with set_current_vllm_config(config):
        return Attention(
            HEADS, size, SCALE, per_layer_sliding_window=window, attn_backend=ExactAttentionBackend, **given
        )


def specs_of(config, layers):
    """What vLLM knows of the cache of each layer."""
    found = {layer.layer_name: layer.get_kv_cache_spec(config) for layer in layers}
    if allocate_kv_cache is None:
        return found
    return {name: customize_attention_spec(ExactAttentionBackend, spec) for name, spec in found.items()}


def allocated(config, specs, pages):
    """The memory of each layer, as vLLM allocates and views it, full of what may be anything."""
    if allocate_kv_cache is not None:
        layouts = get_supported_kv_cache_layouts([ExactAttentionBackend])
        layout = resolve_kv_cache_layout(config, [[each.name for each in layouts]], specs.values())
    page = sum(spec.page_size_bytes for spec in specs.values())
    found = get_kv_cache_config_from_groups(config, get_kv_cache_groups(config, specs), available_memory=pages * page)
    if allocate_kv_cache is not None:
        caches = allocate_kv_cache(found, torch.device("cpu"), layout, [PAGE] * len(found.kv_cache_groups))
    else:
        caches = {}
        for tensor in found.kv_cache_tensors:
            raw = torch.zeros(tensor.size, dtype=torch.int8)
            for name in tensor.shared_by:
                spec, blocks = specs[name], tensor.size // specs[name].page_size_bytes
                shape = ExactAttentionBackend.get_kv_cache_shape(blocks, PAGE, spec.num_kv_heads, spec.head_size)
                order = tuple(range(len(shape)))
                caches[name] = _reshape_attention_kv_cache(raw, spec, shape, order, blocks, None)
    for cache in caches.values():
        cache.fill_(-1)  # scales are NaN
    return caches


class Server:
    """Sequences in pages of any order, and their tokens step by step.

    Layers have pages of their own, as vLLM's groups of layers do: it lets them share memory.

    Parameters
    ----------
    rng : numpy.random.Generator
    windows : tuple of (int or None)
        A layer for each.
    config, model : VllmConfig and module, optional
        A model, which takes ids. It returns logits.
    """

    def __init__(self, rng, windows=(None, None), dtype=torch.bfloat16, pages=32, config=None, model=None):
        self.config, self.model = config or config_of(), model
        with default_dtype(dtype):
            self.layers = [layer_of(self.config, f"layers.{i}.attn", each) for i, each in enumerate(windows)]
        if model is not None:
            self.layers = [each for each in model.modules() if isinstance(each, Attention)]
        specs = specs_of(self.config, self.layers)
        self.caches = allocated(self.config, specs, pages)
        for layer in self.layers:
            layer.kv_cache = self.caches[layer.layer_name]
        self.builders = [
            ExactAttentionBackend.get_builder_cls()(spec, [name], self.config, torch.device("cpu"))
            for name, spec in specs.items()
        ]
        self.free = [int(page) for page in rng.permutation(np.arange(1, pages))]  # vLLM keeps page 0 for nothing
        self.pages, self.lengths, self.outputs = {}, {}, {}

    def begin(self, name, prefix=(), length=0):
        """Begin a sequence, with pages of another one that hold its first tokens."""
        self.pages[name], self.lengths[name], self.outputs[name] = [*prefix], length, []

    def step(self, tokens, new, padding=0, idle=0):
        """Run new tokens of some sequences.

        Parameters
        ----------
        tokens : dict of str to tensor of shape (layers, tokens, (heads + 2 kv_heads) size) or (1, tokens)
            All queries, keys and values of each sequence; or all ids, for a model.
        new : dict of str to int
            How many new tokens of which sequences there are.
        padding, idle : int
            Rows and sequences that a captured graph has beyond those.

        Returns
        -------
        tensor
            What the layers gave for the padding.
        """
        rows, starts, lengths = [], [0], []
        table = torch.zeros((len(self.layers), len(new) + idle, 5), dtype=torch.int32)
        for at, (name, count) in enumerate(new.items()):
            self.begin(name) if name not in self.pages else None
            first = self.lengths[name]
            self.lengths[name] += count
            while len(self.pages[name]) * PAGE < self.lengths[name]:
                self.pages[name].append([self.free.pop() for _ in self.layers])
            table[:, at, : len(self.pages[name])] = torch.tensor(self.pages[name]).T
            rows.append(tokens[name][:, first : first + count])
            starts.append(starts[-1] + count)
            lengths.append(self.lengths[name])
        if padding:
            rows.append(torch.full((len(self.layers), padding, sum(SIZES)), torch.nan, dtype=rows[0].dtype))
        starts, lengths = torch.tensor(starts + [starts[-1]] * idle), torch.tensor(lengths + [0] * idle)
        given = torch.cat(rows, 1)
        found = self.run(given, table, lengths.int(), starts.int())
        for at, name in enumerate(new):
            self.outputs[name].append(found[:, starts[at] : starts[at + 1]])
        return found[:, starts[-1] :]

    def run(self, given, table, lengths, starts):
        """Run rows of each layer, with a table of pages of its own, through vLLM's own layers."""
        tables = {}
        for layer, builder, pages in zip(self.layers, self.builders, table, strict=True):
            common = CommonAttentionMetadata(
                query_start_loc=starts,
                query_start_loc_cpu=starts,
                seq_lens=lengths,
                num_reqs=len(lengths),
                num_actual_tokens=given.shape[1],
                max_query_len=int(starts.diff().max()),
                max_seq_len=int(lengths.max()),
                block_table_tensor=pages,
                slot_mapping=torch.full((given.shape[1],), -1),
            )
            tables[layer.layer_name] = builder.build(common_prefix_len=0, common_attn_metadata=common)
        with set_forward_context(tables, self.config, slot_mapping={}), torch.inference_mode():
            if self.model is not None:
                counts = starts.diff()
                first = (lengths - counts - starts[:-1]).repeat_interleave(counts)
                hidden = self.model(given[0], first + torch.arange(len(first)))
                return self.model.compute_logits(hidden)[None]
            found = [
                layer(*rows.split(SIZES, -1)).view(-1, HEADS, SIZE)
                for layer, rows in zip(self.layers, given, strict=True)
            ]
        return torch.stack(found)

    def whole(self, name):
        """All outputs of a sequence so far, of shape (layers, tokens, heads, size)."""
        return torch.cat(self.outputs[name], 1)


def drawn(rng, layers, tokens, dtype=torch.bfloat16):
    """Queries, keys and values of a sequence, for `Server.step`."""
    shape = layers, tokens, sum(SIZES)
    return torch.from_numpy(rng.standard_normal(shape) * rng.uniform(0.1, 3, (layers, tokens, 1))).to(dtype)


def by_transformers(given, window=None):
    """The same attention of one layer and sequence by `skuda.torch.attention`, and the cache that it used."""
    from skuda.torch.attention.interface import Int8Cache, attention

    text = SimpleNamespace(num_hidden_layers=1, sliding_window=window, is_causal=True)
    text.get_text_config = lambda decoder: text
    cache, module = Int8Cache(text), torch.nn.Module()
    module.config = text
    q, k, v = (each.unflatten(-1, (-1, SIZE)).transpose(0, 1)[None] for each in given.split(SIZES, -1))
    with torch.inference_mode():
        output, _ = attention(module, q, *cache.update(k, v, 0), None, SCALE, sliding_window=window)
    return output[0], cache
