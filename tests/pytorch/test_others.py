"""Checkpoints of GPTQ and AWQ, and of compressed-tensors with any scales: read exactly, or as users say."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from support import fresh
from torch import nn

from skuda.registry.errors import InvalidProblem, InvalidRecord
from skuda.torch import load_, save
from skuda.torch.formats import Tensors, format_of
from skuda.torch.formats.weight import Difference
from skuda.torch.hf.scheme import Scheme
from skuda.torch.hf.transformers import SkudaConfig

N, K = 24, 256
CONFIGS = {
    "gptq": {"quant_method": "gptq", "bits": 4, "sym": False, "desc_act": True, "dynamic": {}},
    "gptq_v2": {"quant_method": "gptq", "bits": 4, "sym": False, "checkpoint_format": "gptq_v2", "lm_head": False},
    "symmetric": {"quant_method": "gptq", "bits": 4, "sym": True, "format": "gptq", "damp_percent": 0.1},
    "awq": {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "GEMM", "modules_to_not_convert": ["a"]},
}


def words(values, order=slice(None)):
    """Pack eight values of a row into a word, the first into its lowest bits."""
    eight = values.reshape(len(values), -1, 8)[:, :, order].astype(np.uint32) << np.arange(0, 32, 4, dtype=np.uint32)
    return torch.from_numpy(np.bitwise_or.reduce(eight, axis=2).view(np.int32)).contiguous()


def drawn(rng, kind, n=N, k=K, size=32, *, exact=False, order=None):
    """Return the tensors of a layer, and its weight in f64. `order` is the group of each element of K."""
    order = np.arange(k) // (size if size > 0 else k) if order is None else order
    levels, zeros = rng.integers(0, 16, (n, k)), rng.integers(kind == "gptq", 16, (n, order.max() + 1))
    zeros[:] = 8 if kind in ("symmetric", "W4A8", "W4A16") else zeros
    scales = rng.integers(1, 8, (n, 1)) * rng.integers(1, 9, zeros.shape) / 512
    scales = (scales if exact else rng.uniform(0.01, 0.05, zeros.shape)).astype(np.float16)
    weight = (levels - zeros[:, order]) * scales.astype(float)[:, order]
    if kind.startswith("W"):
        return {"weight": torch.from_numpy(levels - 8).to(torch.int8), "weight_scale": torch.from_numpy(scales)}, weight
    tensors = {"scales": torch.from_numpy(scales.T.copy())}
    if kind == "awq":
        own = [0, 2, 4, 6, 1, 3, 5, 7]
        return tensors | {"qweight": words(levels.T, own), "qzeros": words(zeros.T, own)}, weight
    tensors |= {"qweight": words(levels).T.contiguous(), "g_idx": torch.from_numpy(order).int()}
    return tensors | {"qzeros": words((zeros - (kind != "gptq_v2")).T)}, weight


def read(tensors, config, approximate=None):
    """Return the weight that a layer holds, and how far it is away, by its own account."""
    stored = Scheme.parse("file", {"group_size": 32} | config, approximate=True).groups[0].stored
    kinds = {name: (each.dtype, tuple(each.shape)) for name, each in tensors.items()}
    given = Tensors("file", kinds, tensors.__getitem__)
    codes, scale, difference = stored.read(given, (N, K), approximate)
    given.finish()
    integers = format_of("test", codes, N, K).integers(codes, N, K)
    return (integers.double() * scale.double()).numpy(), difference


@pytest.mark.parametrize("size", [32, 128, -1])
@pytest.mark.parametrize("kind", CONFIGS)
def test_weights_that_fit_are_read_exactly(kind, size):
    tensors, weight = drawn(fresh(kind, size), kind, size=size, exact=True)
    for approximate in (None, "int4", "int8"):
        made, difference = read(tensors, CONFIGS[kind] | {"group_size": size}, approximate)
        assert difference == Difference()
        assert np.array_equal(made, weight)


def test_groups_in_another_order_are_held_in_8_bits_alone():
    rng = fresh()
    tensors, weight = drawn(rng, "gptq", order=rng.permutation(K) // 32)
    for approximate in (None, "int4"):
        with pytest.raises(InvalidRecord, match=r"g_idx must be k // group_size.*approximate='int8'"):
            read(tensors, CONFIGS["gptq"], approximate)
    made, difference = read(tensors, CONFIGS["gptq"], "int8")
    errors, root = np.abs(made - weight), np.sqrt((weight**2).mean())
    assert (errors.max(1) <= np.abs(weight).max(1) / 127 * 0.501).all()
    assert difference[:2] == pytest.approx((errors.max() / root, np.sqrt((errors**2).mean()) / root), rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "tensor", "change", "words"),
    [
        ("gptq", "qzeros", lambda t: t | 15, "15 means: convert the checkpoint to gptq_v2"),
        ("symmetric", "qzeros", lambda t: t ^ 1, "must be 7: the config says"),
        ("gptq", "g_idx", lambda t: t - 1, "must be 0 to 7"),
        ("gptq_v2", "qweight", lambda t: t.T, r"of shape \[32, 24\]"),
        ("awq", "scales", lambda t: t / 0, "must be finite"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_its_name(kind, tensor, change, words):
    tensors, _ = drawn(fresh(kind, tensor), kind)
    with pytest.raises(InvalidRecord, match=f"tensor {tensor} .*{words}"):
        read(tensors | {tensor: change(tensors[tensor])}, CONFIGS[kind], "int4")


def test_a_field_that_is_not_served_is_refused_by_its_name():
    of_gptq = {"bits": 8, "group_size": 16, "checkpoint_format": "marlin", "dynamic": {"+:.*up.*": {"bits": 8}}}
    of_awq = {"version": "gemv", "backend": "llm-awq", "zero_point": False, "something_new": 1}
    for kind, fields in (("gptq", of_gptq), ("awq", of_awq)):
        for field, value in fields.items():
            with pytest.raises(InvalidRecord, match=rf"quantization_config\.{field} must"):
                Scheme.parse("file", CONFIGS[kind] | {"group_size": 32, field: value}, approximate=True)


def written(rng, folder, kind):
    """Write a Llama of one layer, and return it in floating point. Its GPTQ file has biases of zeros, too."""
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, dtype=torch.float16, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16).eval()
    tensors = {name: each.clone() for name, each in model.state_dict().items()}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name != "lm_head":
            made, weight = drawn(rng, kind, layer.out_features, layer.in_features)
            made |= {"bias": torch.zeros(len(weight)).half()} if kind == "gptq" else {}
            del tensors[f"{name}.weight"]
            tensors |= {f"{name}.{part}": each for part, each in made.items()}
            layer.weight.data = torch.from_numpy(weight).half()
    weights = {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True}
    inputs = {"num_bits": 8, "strategy": "token", "dynamic": True} if kind == "W4A8" else None
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
    own = {"quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"]}
    scheme = CONFIGS[kind] | {"group_size": 32} if kind in CONFIGS else own | {"config_groups": groups}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    fields = json.loads(config.to_json_string()) | {"architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": scheme}))
    return model


@torch.no_grad()
@pytest.mark.parametrize("approximate", ["int4", "int8"])
@pytest.mark.parametrize("kind", ["gptq", "awq", "W4A16", "W4A8"])
def test_other_models_are_approximated_if_the_user_says_so_and_saved_as_that(kind, approximate, tmp_path):
    def loaded(name, **options):
        warnings.filterwarnings("ignore", ".*already has a `quantization_config`")
        config = {"quantization_config": SkudaConfig(**options)} if options else {}
        return transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, **config)

    rng = fresh(kind, approximate)
    plain = written(rng, tmp_path / "theirs", kind)
    ids = torch.from_numpy(rng.integers(3, 97, (2, 7)))
    floats = {name: layer.weight.double() for name, layer in plain.named_modules() if isinstance(layer, nn.Linear)}
    for load in (lambda: load_(plain, tmp_path / "theirs"), lambda: loaded("theirs", exact=False)):
        with pytest.raises(InvalidRecord, match="approximate='int4'"):
            load()
    with pytest.raises(InvalidProblem, match="approximate must be 'int4' or 'int8'"):
        load_(plain, tmp_path / "theirs", approximate=True)
    text = "7 layers have weights that differ.* in model.layers.0.[a-z._]+$"
    text = text if kind == "W4A8" else f"^7 layers have activations of 8 bits.*{text}"
    with pytest.warns(UserWarning, match=text):
        names = load_(plain, tmp_path / "theirs", approximate=approximate)
    with pytest.warns(UserWarning, match=text):
        model = loaded("theirs", approximate=approximate)
    for name in names:
        layer = plain.get_submodule(name)
        error = (layer.weight.double() - floats[name]).square().mean() / floats[name].square().mean()
        assert layer.format.name == approximate
        assert error.sqrt() < (0.01 if approximate == "int8" else 0.06)
    want = plain(ids).logits
    assert torch.equal(model(ids).logits, want)
    save(plain, tmp_path / "ours")
    model.save_pretrained(tmp_path / "again")
    assert all(torch.equal(loaded(folder)(ids).logits, want) for folder in ("ours", "again"))
