"""``quantization="skuda"``: what vLLM gets for a model, and what is refused by name."""

from __future__ import annotations

import gc
import json
import pickle
import weakref
from types import SimpleNamespace

import pytest
import torch
from support import fresh
from torch import distributed, nn
from vllm.config import LoadConfig, LoRAConfig, ModelConfig, VllmConfig
from vllm.distributed import parallel_state
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager, WorkerLoRAManager
from vllm.model_executor import parameter
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm_layers import PARTS, described, made, quantization

import skuda.vllm
from skuda.registry import InvalidProblem
from skuda.torch.formats import INT8, Int4
from skuda.torch.formats.int4 import StoredPacked
from skuda.torch.formats.int8 import StoredInt8
from skuda.torch.hf.scheme import ActivationScheme, Scheme, SchemeGroup
from skuda.torch.models.folded import FOLDED
from skuda.vllm.adapters import check_loading
from skuda.vllm.config import SkudaVllmConfig
from skuda.vllm.linear_kernel import SkudaInt8ScaledMMLinearKernel as Kernel
from skuda.vllm.linear_method import SkudaLinearMethod

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def config_of(alone, tmp_path):
    """A function that makes vLLM's config for a tiny Llama on disk."""
    skuda.vllm.register()

    def make(description=None, **arguments):
        more = {} if description is None else {"quantization_config": description}
        (tmp_path / "config.json").write_text(json.dumps(LLAMA | more))
        return ModelConfig(model=str(tmp_path), tokenizer=str(tmp_path), skip_tokenizer_init=True, **arguments)

    return make


def quantized(config):
    """What vLLM makes of a model's config."""
    return VllmConfig.get_quantization_config(config, LoadConfig())


SHORT = {"quant_method": "skuda", "ignore": ["re:.*down_proj"]}


@pytest.mark.parametrize(
    ("description", "overrides", "ignored"),
    [
        (None, {}, ["lm_head"]),
        (described(), {}, ["lm_head"]),
        (described(dynamic=False, symmetric=False), {}, ["lm_head"]),
        (SHORT, {}, ["lm_head", "re:.*down_proj"]),
        (None, {"quantization_config": SHORT}, ["lm_head", "re:.*down_proj"]),
    ],
)
def test_vllm_gets_the_config(config_of, description, overrides, ignored):
    found = quantized(config_of(description, quantization="skuda", hf_overrides=overrides))
    assert type(found) is SkudaVllmConfig
    for each in (found, pickle.loads(pickle.dumps(found))):  # noqa: S301  vLLM sends it to its workers
        assert each.get_name() == "skuda"
        assert each.checkpoint.ignore == ignored


FOUR = SHORT | {"weights": "int4"}
OWN = Scheme(
    (SchemeGroup(("Linear",), ActivationScheme.DYNAMIC, StoredPacked(32)),), ("lm_head", "re:.*down_proj"), own=True
).fields()


@pytest.mark.parametrize(
    ("description", "group_size"), [(SHORT, None), (FOUR, 128), (FOUR | {"group_size": 0}, 0), (OWN, 32)]
)
def test_weights_have_4_bits_if_the_config_says_so(config_of, served, description, group_size):
    found = quantized(config_of(description, quantization="skuda"))
    for config in (found, pickle.loads(pickle.dumps(found))):  # noqa: S301  as above
        assert config.quantize.format == (INT8 if group_size is None else Int4(group_size or 128))
        assert config.quantize.group_size in (group_size, 128)
        assert config.checkpoint.ignore == ["lm_head", "re:.*down_proj"]
        layer = made("column", torch.bfloat16, config)
        assert layer.weight.dtype is (torch.int8 if group_size is None else torch.uint8)
    if description is OWN:
        assert type(quantized(config_of(OWN))) is SkudaVllmConfig  # the checkpoint names it


@pytest.mark.parametrize("description", [described(), SHORT, OWN])
def test_the_head_is_quantized_if_the_config_says_so(config_of, description):
    for head in (True, False):
        found = quantized(config_of(description | {"head": head}, quantization="skuda"))
        assert pickle.loads(pickle.dumps(found)).head is head  # noqa: S301  as above
    assert not quantized(config_of(description, quantization="skuda")).head


def test_checkpoints_are_left_to_vllm_without_the_word(config_of):
    assert quantized(config_of(described())).get_name() == "compressed-tensors"
    with pytest.raises(ValueError, match="skuda"):
        config_of({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}, quantization="skuda")


def changed(place, value, **scheme):
    """A checkpoint's description with another value at a place."""
    config = described(**scheme)
    *path, last = place.split(".")
    at = config
    for name in path:
        at = at[name]
    at[last] = value
    return config


GROUP = "config_groups.group_0"
WEIGHTS, INPUTS = f"{GROUP}.weights", f"{GROUP}.input_activations"
FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
OTHER = described(dynamic=False)["config_groups"]["group_0"] | {"targets": ["re:.*o_proj"]}


@pytest.mark.parametrize(
    ("place", "value", "field"),
    [
        ("kv_cache_scheme", FP8, "kv_cache_scheme"),
        ("sparsity_config", {"format": "sparse-24-bitmask"}, "sparsity_config"),
        ("transform_config", {"config_groups": {}}, "transform_config"),
        ("format", "pack-quantized", "format"),
        ("config_groups", {}, "config_groups"),
        ("config_groups.group_1", OTHER, "config_groups"),
        ("config_groups.attention", {"targets": ["LlamaAttention"], "input_activations": FP8}, "config_groups.att"),
        (f"{GROUP}.output_activations", FP8, f"{GROUP}.output_activations"),
        (f"{GROUP}.format", "float-quantized", f"{GROUP}.format"),
        (WEIGHTS, None, WEIGHTS),
        (WEIGHTS, FP8, f"{WEIGHTS}.type"),
        (f"{WEIGHTS}.num_bits", 4, f"{WEIGHTS}.num_bits"),
        (f"{WEIGHTS}.symmetric", False, f"{WEIGHTS}.symmetric"),
        (f"{WEIGHTS}.dynamic", True, WEIGHTS),
        (WEIGHTS, FP8 | {"type": "int", "strategy": "group", "group_size": 128}, f"{WEIGHTS}.strategy"),
        (INPUTS, None, INPUTS),
        (INPUTS, FP8, f"{INPUTS}.type"),
        (f"{INPUTS}.num_bits", 4, f"{INPUTS}.num_bits"),
        (f"{INPUTS}.symmetric", False, f"{INPUTS}.symmetric"),
        (f"{INPUTS}.strategy", "tensor", f"{INPUTS}.strategy"),
        (f"{INPUTS}.dynamic", False, INPUTS),
        (f"{INPUTS}.dynamic", "local", INPUTS),
    ],
)
def test_other_schemes_are_refused_by_name(config_of, place, value, field):
    with pytest.raises(InvalidProblem) as refusal:
        quantized(config_of(changed(place, value), quantization="skuda"))
    assert refusal.value.field.startswith(field)


@pytest.mark.parametrize("form", ["int-quantized", "pack-quantized"])
def test_other_4_bit_weights_are_refused_with_advice(config_of, form):
    config = changed(f"{WEIGHTS}.num_bits", 4) | {"format": form}
    with pytest.raises(InvalidProblem, match=r"skuda\.torch\.load_"):
        quantized(config_of(config, quantization="skuda"))


@pytest.mark.parametrize(
    ("field", "value"), [("bits", 8), ("weights", "int2"), ("weights", "int4"), ("group_size", 48), ("group_size", 64)]
)
def test_what_a_floating_checkpoint_cannot_say_is_refused(config_of, field, value):
    wrong = {"quant_method": "skuda", field: value} | ({"group_size": 16} if value == "int4" else {})
    with pytest.raises(InvalidProblem, match="group_size" if value == "int4" else field):
        quantized(config_of(wrong, quantization="skuda"))


def own(*groups, activation=ActivationScheme.DYNAMIC):
    """What the config says of a checkpoint that only skuda reads."""
    return Scheme(
        tuple(SchemeGroup(targets, activation, StoredPacked(g) if g else StoredInt8()) for targets, g in groups),
        own=True,
    )


@pytest.mark.parametrize(
    "scheme",
    [
        own((("Linear",), None)),
        own((("Conv1D",), 64)),
        own((("re:a",), 64), (("b",), 32)),
        own((("Linear",), 64), activation=ActivationScheme.STATIC),
    ],
)
def test_other_checkpoints_of_skuda_are_refused(config_of, scheme):
    with pytest.raises(InvalidProblem, match="all alike or by name"):
        quantized(config_of(scheme.fields()))


@pytest.mark.parametrize("ignore", [["re:.*[qkv]_proj"], [f"layers.0.self_attn.{name}_proj" for name in "qkv"]])
def test_layers_that_are_ignored_stay_floating(served, ignore):
    for config in (SkudaVllmConfig(described() | {"ignore": ignore}), SkudaVllmConfig(ignore=tuple(ignore))):
        config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
        methods = {kind: made(kind, torch.bfloat16, config).quant_method for kind in PARTS}
        assert type(methods.pop("qkv")) is UnquantizedLinearMethod
        assert {type(method) for method in methods.values()} == {SkudaLinearMethod}
        config.checkpoint.ignore = ignore[:1] if len(ignore) > 1 else ["re:.*q_proj"]
        with pytest.raises(ValueError, match="different"):
            made("qkv", torch.bfloat16, config)


def test_embeddings_and_heads_stay_floating(served):
    for config in (SkudaVllmConfig(), SkudaVllmConfig(described()), SkudaVllmConfig.from_config(OWN)):
        for kind in (VocabParallelEmbedding, ParallelLMHead):
            assert type(kind(128, 64, quant_config=config, prefix="lm_head").quant_method) is UnquantizedEmbeddingMethod
    config = changed(f"{GROUP}.targets", ["Linear", "re:.*lm_head"]) | {"ignore": []}
    for wrong in (SkudaVllmConfig(config), SkudaVllmConfig.from_config(OWN | {"ignore": []})):
        with pytest.raises(InvalidProblem, match="lm_head"):
            ParallelLMHead(128, 64, quant_config=wrong, prefix="lm_head")


def test_experts_are_refused_unless_they_are_ignored(alone):
    experts, prefix = RoutedExperts.__new__(RoutedExperts), "layers.0.mlp.experts"
    nn.Module.__init__(experts)
    for wrong in ((), ("re:.*gate_proj",)):
        with pytest.raises(InvalidProblem, match="experts"):
            SkudaVllmConfig(ignore=wrong).get_quant_method(experts, prefix)
    for right in ((prefix,), ("re:.*experts.*",), tuple(f"{prefix}.0.{name}_proj" for name in ("gate", "up", "down"))):
        assert SkudaVllmConfig(ignore=right).get_quant_method(experts, prefix) is None


def test_another_kernel_is_refused(served, monkeypatch):
    monkeypatch.setattr(Kernel, "can_implement", classmethod(lambda cls, c: (False, "of the test")))
    with pytest.raises((InvalidProblem, ValueError)) as refusal:
        made("row", torch.bfloat16, SkudaVllmConfig())
    assert "skuda" in str(refusal.value).lower()


@pytest.fixture
def two(served, monkeypatch):
    """Layers are made as on the first of two ranks."""
    for module in (linear, parameter):
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: 2)
    return served


def test_what_ranks_cannot_make_whole_is_refused_by_name(two, monkeypatch):
    with pytest.raises(InvalidProblem, match=r"o_proj .* at most 131071"):
        made("row", torch.bfloat16, SkudaVllmConfig(), k=131_074)
    with pytest.raises(InvalidProblem, match="reduce_results=False"):
        made("row", torch.bfloat16, SkudaVllmConfig(), bias=False, reduce_results=False)
    passes = two.compilation_config.pass_config
    if hasattr(passes, "enable_sp"):  # vLLM 0.33 has no such pass
        monkeypatch.setattr(passes, "enable_sp", True)
        with pytest.raises(InvalidProblem, match="enable_sp"):
            made("row", torch.bfloat16, SkudaVllmConfig())
        monkeypatch.setattr(passes, "enable_sp", False)
    monkeypatch.setattr(two, "lora_config", LoRAConfig())
    made("column", torch.bfloat16, SkudaVllmConfig())
    with pytest.raises(InvalidProblem, match="enable_lora"):
        made("row", torch.bfloat16, SkudaVllmConfig())


@pytest.mark.parametrize("folded", ["", "ab12"])
def test_an_adapter_of_a_model_that_is_folded_otherwise_is_refused(config_of, tmp_path, monkeypatch, folded):
    monkeypatch.setitem(LLAMA, FOLDED, folded)
    for name in ("__init__", "_load_adapter"):
        monkeypatch.setattr(WorkerLoRAManager, name, getattr(WorkerLoRAManager, name))
    check_loading()
    limits = SimpleNamespace(max_num_seqs=1, max_num_batched_tokens=8)
    whole = SimpleNamespace(model_config=config_of(described()), lora_config=LoRAConfig(), scheduler_config=limits)
    manager = LRUCacheWorkerLoRAManager(whole, "cpu", {})
    for digest in ("", "ab12", "cd34"):
        (tmp_path / "adapter_config.json").write_text(json.dumps({FOLDED: digest, "base_model_name_or_path": "base"}))
        # The manager of this test has no model, so vLLM's own method fails after the check.
        error, says = (AttributeError, "_adapter_manager") if digest == folded else (InvalidProblem, "mine, trained on")
        with pytest.raises(error, match=says):
            manager._load_adapter(LoRARequest("mine", 1, str(tmp_path)))


def test_packed_weights_are_cut_at_rows_and_elements_that_fit_or_refused(two, monkeypatch):
    def part(kind, rows, k=256):
        monkeypatch.setitem(PARTS, kind, rows)
        return made(kind, torch.bfloat16, SkudaVllmConfig(weights="int4"), k=k).weight.shape

    assert part("column", {None: 64}) == (2, 2, 1056)
    assert part("row", {None: 40}) == (3, 1, 1056)
    assert part("replicated", {None: 40}, 200) == (3, 2, 1056)
    with pytest.raises(InvalidProblem, match=r"up_proj .* multiples of 16 .* 24 rows"):
        part("column", {None: 48})
    with pytest.raises(InvalidProblem, match=r"gate_up_proj .* multiples of 16 .* 8 rows"):
        part("merged", {0: 32, 1: 16})
    with pytest.raises(InvalidProblem, match=r"o_proj .* multiple of 128 .* a K of 192"):
        part("row", {None: 48}, 384)


def test_what_reduces_after_a_layer_is_off(two):
    two.compilation_config.pass_config.fuse_allreduce_rms = True
    assert made("row", torch.bfloat16, quantization()).reduce_results
    assert two.compilation_config.pass_config.fuse_allreduce_rms
    assert not made("row", torch.bfloat16, SkudaVllmConfig()).reduce_results
    assert not two.compilation_config.pass_config.fuse_allreduce_rms


@pytest.mark.parametrize("how", ["max", "sum"])
@pytest.mark.parametrize("disabled", [True, False])
def test_tensors_are_exchanged_by_nccl_of_vllm_if_it_has_it(alone, monkeypatch, how, disabled):
    calls = []

    class Communicator:
        def all_reduce(self, tensor, op):
            calls.append(op)
            return None if disabled else tensor + 1

    group = parallel_state.get_tp_group()
    monkeypatch.setattr(group, "device_communicator", SimpleNamespace(pynccl_comm=Communicator()))
    given = torch.from_numpy(fresh(how).integers(-9, 9, (3, 4), dtype="int32"))
    found = torch.ops.skuda.all_reduce(given, how, group.unique_name)
    assert calls == [{"max": distributed.ReduceOp.MAX, "sum": distributed.ReduceOp.SUM}[how]]
    assert torch.equal(found, given if disabled else given + 1)
    assert found.data_ptr() != given.data_ptr()


def test_vllm_keeps_no_layer_for_its_reload(served):
    for config in (SkudaVllmConfig(described(per_channel=False)), SkudaVllmConfig(), SkudaVllmConfig(weights="int4")):
        model = nn.ModuleDict({"layer": made("qkv", torch.bfloat16, config)})
        record_metadata_for_reloading(model)
        alive = weakref.ref(model["layer"])
        del model
        gc.collect()
        assert alive() is None
