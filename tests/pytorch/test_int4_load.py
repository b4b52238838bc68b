"""`load_` of W4A8 checkpoints that compressed-tensors wrote."""

from __future__ import annotations

import json

import pytest
import torch
from compressed_tensors import compressors, quantization
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file
from support import fresh
from tensors import same
from torch import nn

from skuda.registry.errors import InvalidRecord
from skuda.torch import DynamicLinear, load_
from skuda.torch.int4_checkpoint import PACK_QUANTIZED, Int4Format
from skuda.torch.scheme import FORMAT

N, K = 40, 256


def written(folder, rng, stored):
    """A checkpoint of a layer between others, and its dequantized weight."""
    inputs = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=stored.fields(), input_activations=inputs)
    weight = torch.from_numpy(rng.standard_normal((N, K)).astype("float32"))
    ends = weight.view(N, K // (stored.group_size or K), -1)
    scale, zero = calculate_qparams(ends.amin(2), ends.amax(2), scheme.weights)
    held = {"weight": weight, "weight_scale": scale} | ({} if stored.symmetric else {"weight_zero_point": zero})
    file_format = PACK_QUANTIZED if stored.packed else FORMAT
    package = compressors.BaseCompressor.get_value_from_registry(file_format)
    tensors = package.compress(held, scheme)
    bias = torch.from_numpy(rng.standard_normal(N).astype("float32"))
    save_file({f"0.{name}": part for name, part in (tensors | {"bias": bias}).items()}, folder / "model.safetensors")
    config = quantization.QuantizationConfig(
        config_groups={"group_0": scheme}, quant_method="compressed-tensors", format=file_format, ignore=[]
    )
    fields = config.model_dump(mode="json") | {"quantization_status": "compressed"}
    (folder / "config.json").write_text(json.dumps({"quantization_config": fields}))
    return package.decompress(tensors, scheme)["weight"]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_scale_a_row_loads_as_the_weight_that_was_written(symmetric, packed, tmp_path):
    rng = fresh(symmetric, packed)
    want = written(tmp_path, rng, Int4Format(0, symmetric, packed))
    model = nn.Sequential(nn.Linear(K, N), nn.ReLU()).eval()
    assert load_(model, tmp_path) == ("0",)
    assert isinstance(model[0], DynamicLinear)
    assert model[0].weight_q.dtype is torch.uint8
    assert torch.equal(model[0].weight.to(torch.float32), want)
    codes = torch.ops.skuda.unpack_weight(model[0].weight_q, n=N, k=K, group_size=128)
    x = torch.from_numpy(rng.standard_normal((3, K)).astype("float32"))
    eight = DynamicLinear(codes, model[0].weight_scale, model[0].bias)
    assert same(model[0](x), eight(x))


def test_groups_load_rounded_only_if_that_is_asked(tmp_path):
    written(tmp_path, fresh(), Int4Format(64))
    model = nn.Sequential(nn.Linear(K, N), nn.ReLU()).eval()
    with pytest.raises(InvalidRecord, match=r"0\.weight_scale must be multiples"):
        load_(model, tmp_path)
    assert isinstance(model[0], nn.Linear)
    with pytest.warns(UserWarning, match="1 layers have group scales rounded"):
        load_(model, tmp_path, round_scales=True)
    assert model[0].group_size == 64


def test_transformers_is_told_of_the_way_that_there_is(tmp_path):
    bridge = pytest.importorskip("skuda.torch.transformers")
    written(tmp_path, fresh(), Int4Format(0))
    fields = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    with pytest.raises(InvalidRecord, match=r"use skuda\.torch\.load_"):
        bridge.SkudaConfig.from_dict(fields)
