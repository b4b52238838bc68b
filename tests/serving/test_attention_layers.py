"""vLLM's layers with skuda's attention: a token has the same bits in every batch, chunk and cache."""

from __future__ import annotations

import json
import weakref
from types import SimpleNamespace

import pytest
import torch
from support import fresh, sampled
from vllm.config import ModelConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import attention as vllm_attention_layer
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.platforms.interface import DeviceCapability
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import MambaSpec
from vllm_attention import (
    HEADS,
    KV_HEADS,
    PAGE,
    SIZE,
    SIZES,
    Server,
    allocated,
    by_transformers,
    config_of,
    drawn,
    layer_of,
    specs_of,
)
from vllm_layers import default_dtype, ready

import skuda.vllm
from skuda.registry.errors import InvalidProblem
from skuda.vllm import attention
from skuda.vllm.attention import CACHE_DTYPE, ExactAttentionBackend

LENGTHS = {"a": 300, "b": 131, "c": 5, "d": 290}


def same(one, other):
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize("windows", [(None, None), (40, 40), (None, 150)])
@pytest.mark.parametrize("dtype", sampled([torch.float16, torch.bfloat16, torch.float32]))
def test_a_token_has_the_same_bits_in_every_batch_and_chunk(alone, windows, dtype):
    rng = fresh(windows, dtype)
    tokens = {name: drawn(rng, 2, length, dtype) for name, length in LENGTHS.items()}
    tokens["d"][:, : 2 * PAGE] = tokens["a"][:, : 2 * PAGE]
    want = {
        name: torch.stack([by_transformers(rows, window)[0] for rows, window in zip(each, windows, strict=True)])
        for name, each in tokens.items()
    }

    def check(server, *names):
        for name in names:
            assert same(server.whole(name), want[name][:, -server.whole(name).shape[1] :]), name

    for name, length in LENGTHS.items():
        server = Server(rng, windows, dtype)
        server.step(tokens, {name: length})
        check(server, name)

    server = Server(rng, windows, dtype)
    server.step(tokens, LENGTHS)
    check(server, *LENGTHS)

    server = Server(rng, windows, dtype)
    server.step(tokens, {"a": 200, "b": 130})
    server.step(tokens, {"b": 1, "c": 4, "a": 57})  # a step of decoding between parts of prompts
    server.begin("d", server.pages["a"][:2], 2 * PAGE)
    server.step(tokens, {"c": 1, "d": 33, "a": 41})
    server.step(tokens, {"d": 1, "a": 1})
    server.step(tokens, {"a": 1})
    check(server, *LENGTHS)
    assert server.whole("d").shape[1] == 34


@pytest.fixture
def llama(served, tmp_path, monkeypatch):
    """A Llama of vLLM with int8 layers and head, and this attention; and its config."""
    monkeypatch.setattr(vllm_attention_layer, "get_attn_backend", lambda *_, **__: ExactAttentionBackend)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    of_model = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "head_dim": SIZE, "num_hidden_layers": 2}
    of_model |= {"vocab_size": 100, "max_position_embeddings": 512, "tie_word_embeddings": False, "dtype": "bfloat16"}
    quantization = {"quantization_config": {"quant_method": "skuda", "head": True}}
    (tmp_path / "config.json").write_text(json.dumps(sizes | of_model | quantization))
    given = {"skip_tokenizer_init": True, "dtype": "bfloat16", "quantization": "skuda", "max_model_len": 512}
    config = config_of(model_config=ModelConfig(str(tmp_path), **given))
    config.compilation_config.mode = 0
    rng = fresh()
    with set_current_vllm_config(config), default_dtype(torch.bfloat16):
        model = LlamaForCausalLM(vllm_config=config)
    shapes = {f"self_attn.{name}_proj": (n, 64) for name, n in zip("qkv", SIZES, strict=True)}
    shapes |= {"self_attn.o_proj": (64, HEADS * SIZE)}
    shapes |= {"mlp.gate_proj": (96, 64), "mlp.up_proj": (96, 64), "mlp.down_proj": (64, 96)}
    shapes |= {"input_layernorm": (64,), "post_attention_layernorm": (64,)}
    shapes = {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in shapes.items()}
    shapes |= {"model.embed_tokens": (100, 64), "lm_head": (100, 64), "model.norm": (64,)}
    weights = {f"{name}.weight": rng.standard_normal(shape) / 4 + (len(shape) == 1) for name, shape in shapes.items()}
    model.load_weights((name, torch.from_numpy(weight).bfloat16()) for name, weight in weights.items())
    for module in model.modules():
        if getattr(module, "quant_method", None) is not None:
            ready(module)
    return config, model


def test_logits_have_the_same_bits_in_every_batch_and_chunk(llama):
    config, model = llama
    rng = fresh()
    tokens = {name: torch.from_numpy(rng.integers(0, 100, (1, length))) for name, length in LENGTHS.items()}

    def server():
        return Server(rng, (), config=config, model=model)

    want = {}
    for name, length in LENGTHS.items():
        one = server()
        one.step(tokens, {name: length})
        want[name] = one.whole(name)
        assert want[name].dtype is torch.float32
    together, chunks = server(), server()
    together.step(tokens, LENGTHS)
    for new in ({"a": 200, "b": 130}, {"b": 1, "c": 4, "a": 99}, {"c": 1, "d": 250, "a": 1}, {"d": 39}, {"d": 1}):
        chunks.step(tokens, new)
    for name in LENGTHS:
        assert same(together.whole(name), want[name]), name
        assert same(chunks.whole(name), want[name]), name


def test_what_a_captured_graph_has_more_of_is_zero_and_writes_nothing(alone):
    rng = fresh()
    tokens = {name: drawn(rng, 2, length) for name, length in LENGTHS.items()}
    server = Server(rng)
    server.step(tokens, {"a": 130, "c": 4})
    before = [cache.clone() for cache in server.caches.values()]
    rest = server.step(tokens, {"a": 1, "c": 1}, padding=6, idle=6)
    assert rest.shape[1] == 6
    assert not rest.any()
    for was, cache in zip(before, server.caches.values(), strict=True):
        # Of a token: the codes, at most, and two scales for each head.
        assert 0 < (was != cache).sum() <= 2 * KV_HEADS * 2 * (SIZE + 4)
    for name in ("a", "c"):
        want = [by_transformers(rows[: server.lengths[name]])[0] for rows in tokens[name]]
        assert same(server.whole(name), torch.stack(want))


def test_tokens_after_rejected_drafts_have_the_bits_without_drafts(alone):
    rng = fresh()
    tokens = {"a": drawn(rng, 2, 150), "b": drawn(rng, 2, 9)}
    drafts, server = {name: each.clone() for name, each in tokens.items()}, Server(rng)
    drafts["a"][:, 128:] = drawn(rng, 2, 22)
    server.step(tokens, {"a": 125, "b": 3})
    server.step(drafts, {"a": 8, "b": 1})
    server.lengths["a"], server.outputs["a"][-1] = 128, server.outputs["a"][-1][:, :3]
    server.step(tokens, {"b": 5, "a": 2})
    server.step(tokens, {"a": 20})
    for name, each in tokens.items():
        assert same(server.whole(name), torch.stack([by_transformers(rows)[0] for rows in each]))


def test_no_tables_give_zeros_and_leave_the_cache_alone(alone):
    server = Server(fresh())
    layer, output = server.layers[0], torch.full((3, HEADS, SIZE), torch.nan)
    assert layer.impl.forward(layer, output, output, output, torch.tensor([]), None, output) is output
    assert not output.any()


def test_vllm_allocates_exactly_the_bytes_of_the_cache(alone):
    rng = fresh()
    server, tokens = Server(rng, (None,), pages=5), {"a": drawn(rng, 1, 4 * PAGE)}
    server.step(tokens, {"a": 4 * PAGE})
    (memory,) = server.caches.values()
    assert memory.nbytes == 5 * PAGE * KV_HEADS * (2 * SIZE + 8)
    _, cache = by_transformers(tokens["a"][0])
    found = server.layers[0].impl._cache(memory)
    for array, want in zip(found, cache.layers[0].tensors, strict=True):
        assert same(array[[page for (page,) in server.pages["a"]]], want)
        assert (array.view(torch.int8)[0] == -1).all()
    assert sum(array.nbytes for array in found) == memory.nbytes


def test_a_layer_takes_other_memory_when_vllm_has_allocated_it(alone):
    rng = fresh()
    server, tokens = Server(rng, (None,)), {"a": drawn(rng, 1, 9)}
    (layer,) = server.layers
    server.step(tokens, {"a": 4})
    old = layer.kv_cache
    layer.kv_cache = old.clone()
    old.fill_(-1)
    server.step(tokens, {"a": 5})
    assert (old == -1).all()
    assert same(server.whole("a")[0], by_transformers(tokens["a"][0])[0])


def test_memory_that_vllm_frees_is_kept_by_nothing(alone):
    rng = fresh()
    server = Server(rng, (None,))
    server.step({"a": drawn(rng, 1, 4)}, {"a": 4})
    (layer,) = server.layers
    memory = weakref.ref(layer.kv_cache)
    server.caches.clear()
    layer.kv_cache = torch.tensor([])
    assert memory() is not None
    assert hasattr(layer.impl, "_k_scale_cache")  # what vLLM asks, in `GPUModelRunner._cleanup_profiling_kv_cache`
    layer.impl._k_scale_cache = None
    assert memory() is None


def test_captured_graphs_read_the_tables_of_vllm(alone):
    server = Server(fresh())
    given = {"block_table_tensor": object(), "seq_lens": object(), "query_start_loc": object(), "causal": True}
    found = server.builders[0].build(0, SimpleNamespace(**given))
    assert found.block_table is given["block_table_tensor"]
    assert found.lengths is given["seq_lens"]
    assert found.starts is given["query_start_loc"]
    assert server.builders[0].get_cudagraph_support(None, None) is AttentionCGSupport.ALWAYS


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"logits_soft_cap": 30.0}, "logits_soft_cap"),
        ({"alibi_slopes": [0.1] * HEADS}, "alibi_slopes"),
        ({"sinks": torch.zeros(HEADS)}, "sinks"),
        ({"kv_sharing_target_layer_name": "layers.0.attn"}, "kv_sharing_target_layer_name"),
        ({"attn_type": "encoder_only"}, "attn_type"),
        ({"attn_type": "encoder_decoder"}, "attn_type"),
        ({"num_kv_heads": HEADS, "head_size": 96}, "head_size"),
        ({"cache_dtype": "auto"}, "kv_cache_dtype"),
        ({"cache_dtype": "fp8"}, "kv_cache_dtype"),
    ],
)
def test_a_layer_that_the_definition_does_not_have_is_refused_by_name(alone, given, field):
    given = dict(given)
    config = config_of(cache_dtype=given.pop("cache_dtype", CACHE_DTYPE))
    size = given.pop("head_size", SIZE)
    with default_dtype(torch.bfloat16), pytest.raises(InvalidProblem) as found:
        layer_of(config, size=size, **given)
    assert found.value.field == field


def test_context_parallelism_is_refused(alone, monkeypatch):
    monkeypatch.setattr(attention.ExactAttention, "__new__", split)
    with pytest.raises(InvalidProblem, match="context parallelism"):
        attention.ExactAttention(HEADS, SIZE, 1.0, KV_HEADS, kv_cache_dtype=CACHE_DTYPE)


def split(cls, *_, **__):
    found = object.__new__(cls)
    found.total_cp_world_size, found.pcp_world_size = 2, 1
    return found


def built(config, *layers):
    (spec, *_) = specs_of(config, layers).values()
    names = [layer.layer_name for layer in layers]
    return ExactAttentionBackend.get_builder_cls()(spec, names[:1], config, torch.device("cpu"))


class StateSpace(AttentionLayerBase):
    """A layer whose state lies in the cache."""

    get_attn_backend = None

    def get_kv_cache_spec(self, config):
        return MambaSpec(block_size=PAGE, shapes=((1,),), dtypes=(torch.float32,))


def test_layers_of_other_forms_are_refused_where_they_may_share_memory(alone):
    config = config_of()
    built(config, layer_of(config), layer_of(config, "layers.1.attn", 40))
    for more in ({"num_kv_heads": 1}, {"size": 64}, {"head_size_v": 64}):
        config = config_of()
        with pytest.raises(InvalidProblem) as found:
            built(config, layer_of(config), layer_of(config, "layers.1.attn", 40, **more))
        assert found.value.field == "layers.1.attn"
    for more in ({"num_kv_heads": 1}, {"size": 64}):
        config = config_of()
        layers = layer_of(config), layer_of(config, "draft_model.layers.0.attn", **more)
        built(config, *layers)
        specs = specs_of(config, layers)
        caches = allocated(config, specs, 7)
        bounds = sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in caches.values())
        assert bounds[0][1] <= bounds[1][0]
        layers[0].impl._cache(caches[layers[0].layer_name])
    config = config_of()
    layer, layers = layer_of(config), config.compilation_config.static_forward_context
    layers["mixer"] = StateSpace()
    with pytest.raises(InvalidProblem, match="StateSpace"):
        built(config, layer)
    config = config_of()
    with pytest.raises(InvalidProblem, match="head_size_v"):
        built(config, layer_of(config, head_size_v=64))


def test_idle_ranks_of_experts_are_refused(alone):
    config = config_of()
    layer = layer_of(config)
    (spec,) = specs_of(config, [layer]).values()

    def build(**more):
        given = {"model_config": None, "parallel_config": config.parallel_config} | more
        whole = SimpleNamespace(**given, compilation_config=config.compilation_config)
        ExactAttentionBackend.get_builder_cls()(spec, [layer.layer_name], whole, torch.device("cpu"))

    two = SimpleNamespace(data_parallel_size=2)
    build(parallel_config=two, model_config=SimpleNamespace(is_moe=False))
    with pytest.raises(InvalidProblem, match="data_parallel_size"):
        build(parallel_config=two, model_config=SimpleNamespace(is_moe=True))


def test_a_step_in_which_tokens_see_later_ones_is_refused(alone):
    server = Server(fresh())
    with pytest.raises(InvalidProblem, match="causal"):
        server.builders[0].build(0, SimpleNamespace(causal=False))


def test_memory_in_another_layout_and_a_quantized_output_are_refused(alone):
    server = Server(fresh())
    layer = server.layers[0]
    for memory in (layer.kv_cache[::2], layer.kv_cache[..., :-1], layer.kv_cache.view(torch.uint8)):
        with pytest.raises(InvalidProblem, match="kv_cache"):
            layer.impl._cache(memory)
    with pytest.raises(InvalidProblem, match="output_scale"):
        layer.impl.forward(layer, None, None, None, layer.kv_cache, None, None, torch.ones(1))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, ""),
        ({"block_size": 256}, ""),
        ({"has_sliding_window": True}, ""),
        ({"use_batch_invariant": True}, ""),
        ({"head_size": 96}, "head_size"),
        ({"dtype": torch.float64}, "dtype"),
        ({"kv_cache_dtype": "auto"}, CACHE_DTYPE),
        ({"kv_cache_dtype": "fp8"}, CACHE_DTYPE),
        ({"block_size": 16}, "block_size"),
        ({"use_mla": True}, "MLA"),
        ({"has_sink": True}, "sinks"),
        ({"use_sparse": True}, "sparse"),
        ({"use_mm_prefix": True}, "multimodal"),
        ({"use_kv_connector": True}, "KV connector"),
        ({"use_non_causal": True}, "non-causal"),
        ({"use_pcp": True}, "PCP"),
        ({"attn_type": "encoder_only"}, "encoder_only"),
        ({"device_capability": DeviceCapability(7, 5)}, "compute capability"),
        ({"missing": "no compiler"}, "no compiler"),
    ],
)
def test_vllm_asks_the_backend_before_it_takes_it(alone, monkeypatch, given, said):
    why = given.get("missing", "")
    monkeypatch.setattr(attention, "missing", lambda: why)
    given = {name: value for name, value in given.items() if name != "missing"}
    every = {
        "head_size": 128,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": CACHE_DTYPE,
        "block_size": None,
        "use_mla": False,
        "has_sink": False,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": DeviceCapability(9, 0),
        "attn_type": "decoder",
    }
    reasons = " ".join(ExactAttentionBackend.validate_configuration(**every | given))
    assert said in reasons
    assert bool(reasons) is bool(said)


def test_it_is_the_custom_backend_unless_another_plug_in_is(monkeypatch):
    custom = AttentionBackendEnum.CUSTOM
    load_general_plugins()
    skuda.vllm.register()
    assert custom.get_class() is ExactAttentionBackend
    assert AttentionBackendEnum[ExactAttentionBackend.get_name()] is custom
    ours = custom.get_path()
    try:
        register_backend(custom, "another.Backend")
        attention.register()
        assert custom.get_path() == "another.Backend"
        custom.clear_override()
        attention.register()
        assert custom.get_path() == ours
    finally:
        register_backend(custom, ours)


def test_kernels_are_loaded_before_graphs_are_captured(alone, monkeypatch):
    config, seen = config_of(), []
    layer = layer_of(config)
    (spec,) = specs_of(config, [layer]).values()
    whole = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=3),
        model_config=SimpleNamespace(max_model_len=1000, is_moe=False),
        parallel_config=config.parallel_config,
        cache_config=SimpleNamespace(num_gpu_blocks=77),
        compilation_config=SimpleNamespace(
            static_forward_context={layer.layer_name: layer}, cudagraph_capture_sizes=[1, 8]
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=512),
    )
    for name in ("want", "prepare", "select"):
        monkeypatch.setattr(attention, name, lambda *given: seen.append(given))
    ExactAttentionBackend.get_builder_cls()(spec, [layer.layer_name], whole, torch.device("cuda", 1))
    (problems, most), *then = seen
    assert most == 512
    assert then == [("cuda:1", attention.logger), (problems, "cuda:1")]
    assert {(p.op, p.tokens, p.sequences, p.most_blocks, p.pages, p.heads, p.kv_heads) for p in problems} == {
        (op, tokens, sequences, 8, 77, HEADS, KV_HEADS)
        for op in ("attention", "rope_quantize_append")
        for tokens, sequences in ((1, 1), (8, 8), (8, 2), (512, 1))
    }
