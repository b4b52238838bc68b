"""4-bit weights of compressed-tensors checkpoints: exactly what that package reads and writes, or refused."""

from __future__ import annotations

import json

import pytest
import torch
from compressed_tensors import compressors, quantization
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file
from support import fresh, sampled
from tensors import same
from torch import nn

from skuda.registry.errors import InvalidProblem, InvalidRecord
from skuda.torch import DynamicLinear, load_, save
from skuda.torch.formats import ConfigFields, Tensors
from skuda.torch.formats.grouped import Int4Format, int4_tensors, unpacked_int4
from skuda.torch.formats.int8 import quantized_weight
from skuda.torch.formats.weight import Difference
from skuda.torch.int4 import Int4Weight, int4_weight

FORMATS = {False: "int-quantized", True: "pack-quantized"}
N, K = 21, 256
BITS = {torch.float32: 19, torch.float16: 6, torch.bfloat16: 3}
"""Bits of a channel scale, so that its multiples up to 16 are exact."""


def scheme_of(stored):
    inputs = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
    return quantization.QuantizationScheme(targets=["Linear"], weights=stored.fields(), input_activations=inputs)


def package(packed):
    return compressors.BaseCompressor.get_value_from_registry(FORMATS[packed])


def layer(rng, stored, dtype=torch.float32, *, observed=False):
    """A random layer of floats, with its scales and zero points: of all numbers, or multiples of a number a row."""
    groups = K // stored.group_size if stored.group_size else 1
    weight = torch.from_numpy(rng.standard_normal((N, K)) * rng.uniform(0.5, 1, (N, 1))).to(dtype)
    if observed:
        ends = weight.view(N, groups, -1)
        scale, zero = calculate_qparams(ends.amin(2), ends.amax(2), scheme_of(stored).weights)
    else:
        unit = torch.from_numpy(rng.integers(2 ** BITS[dtype], 2 ** (BITS[dtype] + 1), (N, 1))) * 2.0 ** -BITS[dtype]
        multiple = torch.from_numpy(rng.integers(1, 17 if stored.symmetric else 9, (N, groups)))
        scale = (unit * multiple / 32).to(dtype)
        weight = (weight.view(N, groups, -1) * 20 * scale[:, :, None]).view(N, K).to(dtype)  # no group of zeros
        zero = torch.from_numpy(rng.integers(-8, 8, (N, groups))).to(torch.int8)
    held = {"weight": weight, "weight_scale": scale}
    return held if stored.symmetric else held | {"weight_zero_point": zero}


def found(tensors):
    kinds = {f"block.up.{name}": (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return Tensors("file", kinds, lambda name: tensors[name.removeprefix("block.up.")]).within("block.up")


def read(tensors, stored, **options):
    given = found(tensors)
    codes, scale, difference = stored.read(given, (N, K), **options)
    given.finish()
    return unpacked_int4(codes, scale, K), difference


def value_of(weight, dtype):
    return (weight.codes().double() * weight.channel_scale.double()[:, None]).to(dtype)


@pytest.mark.parametrize("packed", FORMATS)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("size", [0, 32, 64, 128])
@pytest.mark.parametrize("dtype", sampled(BITS))
def test_what_the_package_writes_is_read_exactly_and_written_again(size, symmetric, packed, dtype):
    """For a scale a row, of any number, and for groups of multiples. The values are those that the package reads."""
    stored, rng = Int4Format(size, symmetric, packed), fresh(size, symmetric, packed, dtype)
    floats, scheme = layer(rng, stored, dtype, observed=not size), scheme_of(stored)
    tensors = package(packed).compress(floats, scheme)
    made, difference = read(tensors, stored)
    assert difference == Difference()
    assert torch.equal(value_of(made, dtype), package(packed).decompress(tensors, scheme)["weight"])
    written, own = int4_tensors("block.up", made, symmetric=symmetric, dtype=dtype)
    assert own == Int4Format(size, symmetric)
    want = package(False).compress(floats, scheme)  # noqa: FBT003
    assert written.keys() == want.keys()
    assert all(same(written[name], want[name]) for name in want)


def test_negative_scales_and_groups_of_zeros_keep_their_values():
    rng, stored = fresh(), Int4Format(64, symmetric=False)
    floats = layer(rng, stored)
    tensors = package(False).compress(floats, scheme_of(stored))  # noqa: FBT003
    tensors["weight"].view(N, 4, 64)[:, 1] = tensors["weight_zero_point"][:, 1, None]
    tensors["weight"].view(N, 4, 64)[5] = tensors["weight_zero_point"][5, :, None]
    tensors["weight_scale"][:, 1] = float(rng.standard_normal())
    tensors["weight_scale"][:, 2] *= -1
    want = package(False).decompress(tensors, scheme_of(stored))["weight"]  # noqa: FBT003
    made, difference = read(tensors, stored)
    assert difference == Difference()
    assert torch.equal(value_of(made, torch.float32), want)
    again, own = int4_tensors("block.up", made)
    assert torch.equal(package(False).decompress(again, scheme_of(own))["weight"], want)  # noqa: FBT003


@pytest.mark.parametrize(
    ("packed", "name", "change"),
    [
        (False, "weight", None),
        (False, "weight", lambda t: t[:, 1:]),
        (False, "weight", lambda t: t + 8),
        (False, "weight", lambda t: t.int()),
        (False, "weight_scale", lambda t: t[:, 1:]),
        (False, "weight_scale", lambda t: t.double()),
        (False, "weight_scale", lambda t: t / 0),
        (False, "weight_zero_point", None),
        (False, "weight_zero_point", lambda t: t - 17),
        (False, "weight_g_idx", lambda _: torch.zeros(K, dtype=torch.int32)),
        (True, "weight_packed", None),
        (True, "weight_packed", lambda t: t[:, 1:]),
        (True, "weight_shape", lambda t: t + 1),
        (True, "weight_zero_point", lambda t: t[1:]),
        (True, "weight_zero_point", lambda t: t.to(torch.int8)),
        (True, "weight", lambda _: torch.zeros(N, K, dtype=torch.int8)),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_its_name(packed, name, change):
    stored = Int4Format(64, symmetric=False, packed=packed)
    tensors = package(packed).compress(layer(fresh(packed, name), stored), scheme_of(stored))
    old = tensors.pop(name, None)
    if change is not None:
        tensors[name] = change(old)
    with pytest.raises(InvalidRecord, match=rf"tensor block\.up\.{name} must"):
        read(tensors, stored)


@pytest.mark.parametrize("packed", FORMATS)
def test_a_symmetric_weight_may_have_zero_points_of_0(packed):
    stored = Int4Format(64, packed=packed)
    tensors = package(packed).compress(layer(fresh(packed), stored), scheme_of(stored))
    want = read(tensors, stored)[0]
    tensors["weight_zero_point"] = torch.zeros(N, 4, dtype=torch.int8)
    assert all(map(torch.equal, read(tensors, stored)[0], want))
    tensors["weight_zero_point"] += 1
    with pytest.raises(InvalidRecord, match="weight_zero_point must be 0"):
        read(tensors, stored)


def fields_of(stored, **changes):
    return Int4Format.parse(ConfigFields("file", "weights", stored.fields() | changes), FORMATS[stored.packed])


@pytest.mark.parametrize("packed", FORMATS)
def test_the_fields_of_a_config_are_those_of_the_package(packed):
    preset = quantization.preset_name_to_scheme("W4A8", ["Linear"]).weights
    fields = preset.model_dump()
    assert Int4Format.parse(ConfigFields("file", "weights", fields), FORMATS[packed]) == Int4Format(128, packed=packed)
    for stored in (Int4Format(size, symmetric, packed) for size in (0, 32, 64, 128) for symmetric in (True, False)):
        dumped = quantization.QuantizationArgs.model_validate(stored.fields()).model_dump()
        assert Int4Format.parse(ConfigFields("file", "weights", dumped), FORMATS[packed]) == stored
        assert (
            fields_of(stored) == fields_of(stored, actorder="weight") == fields_of(stored, actorder="static") == stored
        )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("actorder", "group"),
        ("actorder", "dynamic"),
        ("actorder", True),
        ("type", "float"),
        ("dynamic", True),
        ("strategy", "tensor"),
        ("strategy", "channel"),
        ("group_size", 16),
        ("group_size", 256),
        ("group_size", None),
        ("block_structure", [128, 128]),
        ("something_new", 1),
    ],
)
def test_a_field_that_is_not_served_is_refused_by_its_name(field, value):
    """A size of groups does not fit a scale a row."""
    name = "group_size" if value == "channel" else field
    with pytest.raises(InvalidRecord, match=rf"weights\.{name} must"):
        fields_of(Int4Format(128), **{field: value})


def drawn(rng, size):
    """A weight of which some groups have one code, and whose zero points are in different places."""
    groups = K // size if size else 1
    width = torch.from_numpy(rng.integers(0, 16, (N, groups)))
    scale = torch.from_numpy(rng.integers(0, 9, (N, groups)))
    scale[::7, 0] = 0
    shift = torch.from_numpy(rng.integers(-15, 1, (N, groups)))
    offset = torch.where(scale == 0, torch.from_numpy(rng.integers(-128, 128, (N, groups))), shift * scale)
    offset[:15:7, 0] = torch.tensor([-128, 0, 127])
    levels = torch.from_numpy(rng.integers(0, 1 << 16, (N, K))) % (1 + width.repeat_interleave(K // groups, 1))
    unit = torch.from_numpy(rng.integers(1, 1 << 17, N) / 2**20).float()
    return Int4Weight(levels.to(torch.uint8), scale.to(torch.uint8), offset.to(torch.int8), unit)


@pytest.mark.parametrize("size", [0, 32, 64, 128])
def test_the_package_reads_what_is_written(size):
    weight = drawn(fresh(size), size)
    tensors, stored = int4_tensors("block.up", weight)
    assert stored == Int4Format(size, symmetric=False)
    decompressed = package(False).decompress(tensors, scheme_of(stored))["weight"]  # noqa: FBT003
    assert torch.equal(decompressed, value_of(weight, torch.float32))
    made, difference = read(tensors, stored)
    assert difference == Difference()
    assert torch.equal(value_of(made, torch.float32), value_of(weight, torch.float32))


def test_zero_points_are_left_out_where_nothing_needs_them():
    weight = drawn(fresh(), 64)
    scale = weight.group_scale.clamp(min=1)
    weight = weight._replace(group_scale=scale, group_offset=(-8 * scale.int()).to(torch.int8))
    tensors, stored = int4_tensors("block.up", weight)
    assert (stored.symmetric, tensors.keys()) == (True, {"weight", "weight_scale"})
    tensors, stored = int4_tensors("block.up", weight, symmetric=False)
    assert not stored.symmetric
    assert not tensors["weight_zero_point"].any()


@pytest.mark.parametrize(
    ("change", "options", "match"),
    [
        ({"group_offset": -15}, {}, r"the offset -15 and the scale 2 in group 0 of row 0"),
        ({"group_offset": 2}, {}, r"1 to 16 times the scale in group 0 of row 0"),
        ({"group_offset": -32}, {}, r"-16 to -1 times the scale"),
        ({"group_offset": -14}, {"symmetric": True}, "need no zero points with symmetric=True"),
        ({"group_scale": 3, "group_offset": -24, "channel_scale": 1 + 2**-23}, {}, "exact in torch.float32"),
        ({"channel_scale": 1 + 2**-9}, {"dtype": torch.bfloat16}, "exact in torch.bfloat16"),
        ({"levels": None}, {}, "a multiple of the group size as K"),
    ],
)
def test_a_weight_that_the_format_cannot_express_is_refused_with_the_reason(change, options, match):
    levels = torch.arange(128, dtype=torch.uint8).expand(2, 128) % 16
    parts = {"levels": levels, "group_scale": 2, "group_offset": -16, "channel_scale": 0.5} | change
    weight = Int4Weight(
        levels if parts["levels"] is not None else levels[:, 1:],
        torch.full((2, 4), parts["group_scale"], dtype=torch.uint8),
        torch.full((2, 4), parts["group_offset"], dtype=torch.int8),
        torch.full((2,), parts["channel_scale"]),
    )
    with pytest.raises(InvalidProblem, match=match) as caught:
        int4_tensors("block.up", weight, **options)
    assert caught.value.field == "block.up"


def layer_of(weight, size, **attributes):
    k = weight.levels.shape[1]
    made = DynamicLinear(weight.packed(size), weight.channel_scale, in_features=k, dtype=torch.float32)
    vars(made).update(attributes)
    return made


def saved(folder, *layers):
    """Save a model of these layers, and load it into one of floats. Return the scheme, and what was loaded."""
    save(nn.Sequential(*layers), folder)
    again = nn.Sequential(*(nn.Linear(layer.in_features, layer.out_features, bias=False) for layer in layers))
    load_(again, folder)
    return json.loads((folder / "config.json").read_text())["quantization_config"], again


def test_layers_are_saved_with_zero_points_if_one_needs_some(tmp_path):
    rng = fresh()
    shifted, _ = read(*int4_tensors("block.up", drawn(rng, 64)))
    floats = torch.from_numpy(rng.standard_normal((2, N, K)).astype("float32"))
    plain = int4_weight(floats[0], 64, symmetric=True)
    layers = layer_of(shifted, 64), layer_of(plain, 64), DynamicLinear(*quantized_weight(floats[1]))
    fields, again = saved(tmp_path, *layers)
    assert fields["quant_method"] == "compressed-tensors"
    groups = quantization.QuantizationConfig.model_validate(fields).config_groups.values()
    stored = Int4Format(64, symmetric=False)
    found = {tuple(group.targets): group.weights.model_dump() for group in groups}
    assert found.keys() == {("0", "1"), ("2",)}
    assert stored.fields().items() <= found["0", "1"].items()
    tensors = load_file(tmp_path / "model.safetensors")
    for number, (one, other) in enumerate(zip(layers, again, strict=True)):
        assert same(one.weight_scale, other.weight_scale)
        assert same(codes_of(one), codes_of(other))
        if number < 2:
            own = {part: tensors[f"{number}.{part}"] for part in ("weight", "weight_scale", "weight_zero_point")}
            want = package(False).decompress(own, scheme_of(stored))["weight"]  # noqa: FBT003
            assert torch.equal(one.weight, want)


def codes_of(layer):
    return layer.weight_q if layer.group_size is None else unpacked_int4(layer.weight_q, layer.weight_scale, K).codes()


@pytest.mark.parametrize("case", ["free", "width", "factor", "zeros", "narrow", "Conv1D"])
def test_layers_that_others_would_misread_stay_packed(case, tmp_path):
    """Such as one whose scales have a common factor: the channel scale that is read would contain it."""
    rng = fresh(case)
    floats = torch.from_numpy(rng.standard_normal((N, 160 if case == "width" else K)).astype("float32"))
    weight = int4_weight(floats, 64, symmetric=case != "free")
    if case == "factor":
        levels = torch.from_numpy(rng.integers(0, 16, (N, K))).to(torch.uint8)
        scale = torch.full((N, 4), 2)
        weight = Int4Weight(levels, scale.to(torch.uint8), (-8 * scale).to(torch.int8), weight.channel_scale)
    if case == "zeros":
        weight.levels[5], weight.group_offset[5], weight.channel_scale[5] = 0, 0, 2
    if case == "narrow":
        weight = weight._replace(channel_scale=weight.channel_scale.bfloat16())
    layer = layer_of(weight, 64, **({"original": "Conv1D"} if case == "Conv1D" else {}))
    fields, again = saved(tmp_path, layer_of(int4_weight(floats[:, :64], 64, symmetric=True), 64), layer)
    assert fields["quant_method"] == "skuda"
    assert same(again[1].weight_q, layer.weight_q)
    assert same(again[1].weight_scale, layer.weight_scale)
