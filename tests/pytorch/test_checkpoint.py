"""`save` and `load_`: checkpoints of the compressed-tensors format, bit for bit, and files that are refused."""

from __future__ import annotations

import copy
import json
import os
import pickle
import struct
import subprocess
import sys

import pytest
import safetensors
import torch
from compressed_tensors import compressors, quantization
from safetensors.torch import load_file, save_file
from support import fresh, sampled
from tensors import same
from torch import nn

from skuda.registry.errors import InvalidProblem, InvalidRecord
from skuda.torch import CodesLinear, DynamicLinear, SmoothedLinear, StaticLinear, load_, save
from skuda.torch.formats import quantizer
from skuda.torch.formats.int8 import StoredInt8
from skuda.torch.hf.scheme import ActivationScheme, Scheme, SchemeGroup

DYNAMIC = Scheme((SchemeGroup(("Linear",), ActivationScheme.DYNAMIC, StoredInt8()),))


class Net(nn.Module):
    """Linear layers with and without a bias, an embedding that may be tied to the last one, and a norm."""

    def __init__(self, dtype=torch.float32, *, tied=False):
        super().__init__()
        self.embed = nn.Embedding(11, 24, dtype=dtype)
        self.norm = nn.LayerNorm(24, dtype=dtype)
        self.block = nn.ModuleDict(
            {"up": nn.Linear(24, 40, dtype=dtype), "down": nn.Linear(40, 24, bias=False, dtype=dtype)}
        )
        self.head = nn.Linear(24, 11, bias=False, dtype=dtype)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.norm(self.embed(ids))
        return self.head(x + self.block["down"](torch.relu(self.block["up"](x))))


OWN = {"smooth", "smoothed"}
LAYERS = {"dynamic": DynamicLinear, "smoothed": SmoothedLinear}


def drawn(rng, dtype=torch.float32, **kinds):
    """Return a net with random values, and layers of `block` int8 of these kinds."""
    net = Net(dtype, tied=kinds.pop("tied", False)).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.from_numpy(rng.standard_normal(parameter.shape)))
    for name, kind in kinds.items():
        linear = net.block[name]
        bits = rng.choice(["int8", "int4"]) if kind in OWN else "int8"
        given = (
            *quantizer("test", str(bits), int(rng.choice([0, 32, 64])) if bits == "int4" else 128)(linear.weight),
            linear.bias,
        )
        extra = {"dtype": dtype, "in_features": linear.in_features}
        if kind in OWN:
            extra["smooth"] = torch.from_numpy(rng.uniform(0.5, 2, linear.in_features).astype("float32"))
        if kind not in ("dynamic", "smoothed"):
            extra["input_scale"] = torch.tensor([float(rng.uniform(0.01, 0.1))], dtype=dtype)
        if kind == "shifted":
            extra["input_zero_point"] = torch.tensor([int(rng.integers(-128, 128))], dtype=torch.int32)
        layer = LAYERS.get(kind, StaticLinear)(*given, **extra)
        net.block[name] = layer.eval()
    return net


def assert_same(one, other, rng):
    states = one.state_dict(), other.state_dict()
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        assert same(tensor, states[1][name]), name
    ids = torch.from_numpy(rng.integers(0, 11, (3, 5)))
    with torch.no_grad():
        assert same(one(ids), other(ids))


def assert_loads(folder, net):
    """Check that a new net is as a saved one, once it has loaded it."""
    found = Net().eval()
    load_(found, folder)
    assert_same(net, found, fresh())


KINDS = ("dynamic", "smoothed", "static", "shifted", "smooth", "")


@pytest.mark.parametrize(
    ("up", "down", "dtype"),
    sampled(
        [
            pytest.param(up, down, dtype)
            for up in KINDS
            for down in KINDS[:-1]
            for dtype in (torch.float32, torch.bfloat16)
        ],
        1,
        each=lambda up, down, dtype: up,
    ),
)
def test_what_is_saved_is_loaded_bit_for_bit(up, down, dtype, tmp_path):
    rng = fresh(up, down, dtype)
    net = drawn(rng, dtype, **({"up": up} if up else {}), down=down)
    save(net, tmp_path / "a")
    found = Net(dtype).eval()
    assert load_(found, tmp_path / "a") == tuple(f"block.{name}" for name, kind in (("up", up), ("down", down)) if kind)
    assert_same(net, found, rng)
    save(found, tmp_path / "b")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    method = "skuda" if OWN & {up, down} else "compressed-tensors"
    assert json.loads((tmp_path / "a" / "config.json").read_text())["quantization_config"]["quant_method"] == method
    assert_same(net, loaded_over(found, tmp_path / "a"), rng)


def loaded_over(net, path):
    """Load into a model whose layers are int8 already."""
    with torch.no_grad():
        for tensor in net.state_dict().values():
            tensor.zero_()
    load_(net, path)
    return net


def test_names_and_dtypes_are_those_of_the_format(tmp_path):
    save(drawn(fresh(), torch.bfloat16, up="shifted", down="dynamic"), tmp_path)
    found = {
        name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    assert found == {
        "block.up.weight": (torch.int8, (40, 24)),
        "block.up.weight_scale": (torch.float32, (40, 1)),
        "block.up.bias": (torch.bfloat16, (40,)),
        "block.up.input_scale": (torch.bfloat16, (1,)),
        "block.up.input_zero_point": (torch.int8, (1,)),
        "block.down.weight": (torch.int8, (24, 40)),
        "block.down.weight_scale": (torch.float32, (24, 1)),
        "embed.weight": (torch.bfloat16, (11, 24)),
        "norm.weight": (torch.bfloat16, (24,)),
        "norm.bias": (torch.bfloat16, (24,)),
        "head.weight": (torch.bfloat16, (11, 24)),
    }


def test_the_package_compressed_tensors_reads_config_and_codes(tmp_path):
    rng = fresh()
    net = drawn(rng, up="dynamic", down="shifted")
    fields = Scheme.of(net).fields()
    read = quantization.QuantizationConfig.model_validate(fields)
    written = json.loads(read.model_dump_json())
    assert written == {name: fields[name] for name in written}
    compressor = compressors.BaseCompressor.get_value_from_registry("int-quantized")
    for group in read.config_groups.values():
        assert group.format == "int-quantized"
        for target in group.targets:
            layer = net.get_submodule(target)
            state = {name: value for name, value in layer.state_dict().items() if name.startswith("weight")}
            plain = compressor.decompress(state, group)
            assert torch.equal(plain["weight"], layer.weight)
            assert same(compressor.compress(plain, group)["weight"], layer.weight_q)


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path):
    rng = fresh()
    net = drawn(rng, tied=True, up="dynamic")
    save(net, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert "embed.weight" in stored
    assert "head.weight" not in stored
    found = Net(tied=True).eval()
    load_(found, tmp_path)
    assert found.head.weight is found.embed.weight
    assert_same(net, found, rng)
    with pytest.raises(InvalidRecord, match=r"head\.weight"):
        load_(Net(), tmp_path)
    write(tmp_path, stored | {"head.weight": stored["embed.weight"] + 1})
    with pytest.raises(InvalidRecord, match="one tensor of the model"):
        load_(found, tmp_path)


def write(folder, tensors):
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


@pytest.fixture
def saved(tmp_path):
    """Return a net with a dynamic and a static layer, and its checkpoint."""
    net = drawn(fresh(), up="static", down="dynamic")
    save(net, tmp_path)
    return net, tmp_path


def refused(folder, match, net=None):
    """Check that a load is refused with these words, and changes nothing."""
    net = net or Net()
    before = copy.deepcopy(net.state_dict())
    modules = [id(module) for module in net.modules()]
    with pytest.raises((InvalidRecord, InvalidProblem), match=match):
        load_(net, folder)
    assert modules == [id(module) for module in net.modules()]
    assert all(same(tensor, before[name]) for name, tensor in net.state_dict().items())


def edit(folder, change):
    """Change the quantization_config of a checkpoint."""
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


def setting(path, value):
    def change(config):
        *parents, last = path.split("/")
        for parent in parents:
            config = config[parent]
        config[last] = value

    return change


WEIGHTS, INPUTS = "config_groups/group_0/weights", "config_groups/group_0/input_activations"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("quant_method", "fp8"),
        ("format", "marlin-24"),
        ("quantization_status", "frozen"),
        ("kv_cache_scheme", {"num_bits": 8}),
        ("sparsity_config", {"format": "sparse-24-bitmask"}),
        ("transform_config", {"config_groups": {}}),
        ("moe_sparsity_config", {"experts": 2}),
        ("something_new", 1),
        ("ignore", "head"),
        ("ignore", ["re:("]),
        ("dtypes", {"default": "float8"}),
        ("dtypes", {"default": "float16", "int8": ["head.weight"]}),
        ("dtypes", {"default": "float16", "float32": "head.weight"}),
        ("config_groups", {}),
        ("config_groups/group_0", ["Linear"]),
        ("config_groups/group_0/targets", None),
        ("config_groups/group_0/format", "naive-quantized"),
        ("config_groups/group_0/output_activations", {"num_bits": 8}),
        ("config_groups/group_0/something_new", 1),
        (WEIGHTS, None),
        (f"{WEIGHTS}/num_bits", 3),
        (f"{WEIGHTS}/num_bits", 8.0),
        (f"{WEIGHTS}/type", "float"),
        (f"{WEIGHTS}/strategy", "group"),
        (f"{WEIGHTS}/group_size", 128),
        (f"{WEIGHTS}/block_structure", [128, 128]),
        (f"{WEIGHTS}/actorder", "weight"),
        (f"{WEIGHTS}/symmetric", False),
        (f"{WEIGHTS}/dynamic", True),
        (f"{WEIGHTS}/something_new", None),
        (INPUTS, None),
        (f"{INPUTS}/strategy", "token"),
        (f"{INPUTS}/dynamic", "local"),
        (f"{INPUTS}/dynamic", 1),
        ("config_groups/group_1/input_activations/symmetric", False),
    ],
)
def test_a_scheme_that_is_not_served_is_refused_by_its_name(path, value, saved):
    edit(saved[1], setting(path, value))
    refused(saved[1], path.rpartition("/")[2])


def test_fields_that_do_not_change_what_codes_mean_are_skipped(saved):
    net, folder = saved
    edit(folder, setting(f"{WEIGHTS}/observer", "mse"))
    edit(folder, setting(f"{WEIGHTS}/group_size", -1))
    edit(folder, setting(f"{INPUTS}/actorder", None))
    edit(folder, lambda config: config.pop("quantization_status"))
    assert_loads(folder, net)


UP = "block.up."


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (f"{UP}weight", None),
        (f"{UP}weight", lambda t: t.float()),
        (f"{UP}weight", lambda t: t.view(torch.uint8)),
        (f"{UP}weight", lambda t: t[:-1]),
        (f"{UP}weight_scale", None),
        (f"{UP}weight_scale", lambda t: t.double()),
        (f"{UP}weight_scale", lambda t: t[:-1]),
        (f"{UP}weight_scale", lambda t: t.expand(-1, 2)),
        (f"{UP}weight_scale", lambda t: -t),
        (f"{UP}weight_scale", lambda t: t / 0),
        (f"{UP}weight_scale", lambda t: t * float("nan")),
        (f"{UP}input_scale", None),
        (f"{UP}input_scale", lambda t: t * 0),
        (f"{UP}input_scale", lambda t: t.int()),
        (f"{UP}bias", None),
        (f"{UP}bias", lambda t: t.half()),
        (f"{UP}input_zero_point", lambda _: torch.ones(1, dtype=torch.int8)),
        (f"{UP}weight_zero_point", lambda _: torch.ones(40, 1, dtype=torch.int8)),
        (f"{UP}weight_g_idx", lambda _: torch.zeros(24, dtype=torch.int32)),
        (f"{UP}smooth", lambda _: torch.ones(24)),
        ("block.down.bias", lambda _: torch.zeros(24)),
        ("block.down.input_scale", lambda _: torch.ones(1)),
        ("head.weight", None),
        ("head.weight", lambda t: t.bfloat16()),
        ("norm.bias", None),
        ("lm_head.weight", lambda _: torch.zeros(3)),
        ("norm.running", lambda _: torch.zeros(3).to(torch.float8_e4m3fn)),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_its_name(name, change, saved):
    _, folder = saved
    tensors = load_file(folder / "model.safetensors")
    old = tensors.pop(name, None)
    if change is not None:
        tensors[name] = change(old)
    write(folder, tensors)
    refused(folder, name.replace(".", r"\."))


def test_zero_points_of_something_symmetric_may_be_stored(saved):
    net, folder = saved
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{UP}input_zero_point"] = torch.zeros(1, dtype=torch.int8)
    tensors[f"{UP}weight_zero_point"] = torch.zeros(40, 1, dtype=torch.int8)
    write(folder, tensors)
    assert_loads(folder, net)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (40,)])
def test_a_weight_has_one_scale_or_a_vector_of_them(shape, saved):
    net, folder = saved
    tensors = load_file(folder / "model.safetensors")
    scale = tensors[f"{UP}weight_scale"]
    if shape != (40,):
        edit(folder, setting(f"{WEIGHTS}/strategy", "tensor"))
        tensors[f"{UP}input_scale"] = tensors[f"{UP}input_scale"].reshape(shape)
        scale = scale[0]
        net.block["up"].weight_scale[:] = scale.item()
    tensors[f"{UP}weight_scale"] = scale.reshape(shape).contiguous()
    write(folder, tensors)
    assert_loads(folder, net)


@pytest.mark.parametrize(
    ("targets", "ignore", "found"),
    [
        (["Linear"], [], {"block.up", "block.down", "head"}),
        (["Linear"], ["head"], {"block.up", "block.down"}),
        (["Linear"], ["re:.*ead"], {"block.up", "block.down"}),
        (["Linear"], ["ead"], {"block.up", "block.down", "head"}),
        (["re:block"], [], {"block.up", "block.down"}),
        (["re:up"], [], set()),
        ([r"re:.*\.up$", "head"], ["head"], {"block.up"}),
        (["re:.*"], ["Embedding", "LayerNorm"], {"block.up", "block.down", "head"}),
    ],
)
def test_targets_and_ignore_are_names_patterns_or_classes(targets, ignore, found):
    fields = DYNAMIC.fields() | {"ignore": ignore}
    fields["config_groups"]["group_0"]["targets"] = targets
    assert {name for name, *_ in Scheme.parse("test", fields).layers(Net())} == found


def test_a_name_goes_before_a_pattern_and_a_pattern_before_a_class():
    fields = DYNAMIC.fields()
    static = copy.deepcopy(fields["config_groups"]["group_0"])
    static["input_activations"] |= {"dynamic": False, "strategy": "tensor"}
    groups = {"a": static | {"targets": ["Linear"]}}
    groups["b"] = copy.deepcopy(fields["config_groups"]["group_0"]) | {"targets": ["re:block"]}
    groups["c"] = static | {"targets": ["block.down"]}
    scheme = Scheme.parse("test", fields | {"config_groups": groups})
    found = {name: str(group.activation) for name, _, group in scheme.layers(Net())}
    assert found == {"block.up": "dynamic", "block.down": "static", "head": "static"}


def test_every_matrix_of_floats_is_ignored_by_name(tmp_path):
    """Also those that belong to no linear layer, but not tables, norms and tokens."""
    net = drawn(fresh(), up="dynamic")
    net.router = nn.Module()
    net.router.weight = nn.Parameter(torch.ones(4, 24))
    net.experts = nn.Module()
    net.experts.gate_up = nn.Parameter(torch.ones(4, 24, 24))
    net.token = nn.Parameter(torch.ones(1, 1, 24))
    save(net, tmp_path)
    ignore = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["ignore"]
    assert set(ignore) == {"block.down", "head", "router", r"re:(.*\.)?experts(\..*)?$"}
    layers = Scheme((SchemeGroup(("Linear",), ActivationScheme.DYNAMIC, StoredInt8()),), tuple(ignore)).layers(net)
    assert [name for name, *_ in layers] == ["block.up"]


def test_a_layer_that_cannot_be_replaced_is_refused_by_its_name(saved):
    _, folder = saved
    hooked, twice, other = Net(), Net(), Net()
    hooked.block["up"].register_forward_hook(lambda *_: None)
    refused(folder, r"block\.up must have no hooks", hooked)
    twice.block["down"] = twice.block["up"]
    refused(folder, r"block\.down must be registered once", twice)
    other.block["up"] = nn.modules.linear.NonDynamicallyQuantizableLinear(24, 40)
    refused(folder, r"block\.up must be a torch\.nn\.Linear", other)
    with pytest.raises(InvalidProblem, match=r"embed\.weight must be a dense tensor"):
        load_(Net().to("meta"), folder)
    edit(folder, setting("config_groups/group_0/targets", ["Linear", "Embedding"]))
    refused(folder, "embed must be a torch.nn.Linear: add it to ignore")
    edit(folder, setting("config_groups/group_0/targets", ["Linear"]))
    refused(folder, "contains layers", nn.Linear(3, 3))


def sharded(folder, index=None):
    """Split a checkpoint into two files."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    right = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index(right) if index else right}))


def test_a_checkpoint_of_several_files_is_loaded(saved):
    net, folder = saved
    sharded(folder)
    assert_loads(folder, net)
    with pytest.raises(InvalidProblem, match="names other files"):
        save(net, folder)
    save(net, folder / "other")
    (folder / "other" / "model.safetensors").replace(folder / "model.safetensors")
    refused(folder, "beside an index")


@pytest.mark.parametrize(
    "index",
    [
        lambda right: [],
        lambda right: {},
        lambda right: right | {"head.weight": "../one.safetensors"},
        lambda right: right | {"head.weight": "/dev/zero"},
        lambda right: right | {"head.weight": None},
        lambda right: right | {"head.weight": "one.bin"},
        lambda right: right | {"more": "one.safetensors"},
        lambda right: {name: right[name] for name in right if name != "head.weight"},
        lambda right: right | {name: "two.safetensors" for name in right if right[name] == "one.safetensors"},
    ],
)
def test_an_index_that_does_not_agree_with_its_files_is_refused(index, saved):
    sharded(saved[1], index)
    refused(saved[1], "weight_map|tensor")


def test_a_file_that_the_index_names_must_be_there(saved):
    sharded(saved[1], lambda right: right | {"head.weight": "three.safetensors"})
    with pytest.raises(OSError, match=r"three\.safetensors"):
        load_(Net(), saved[1])


class Evil:
    def __reduce__(self):
        return os._exit, (77,)


@pytest.mark.parametrize("most", [0, 7, 8, 9, 500, -1])
def test_a_truncated_file_is_refused(most, saved):
    file = saved[1] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:most])
    refused(saved[1], "whole safetensors file")


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(Evil()),
        struct.pack("<Q", 2**63),
        struct.pack("<Q", 2) + b"{}" + b"more",
        struct.pack("<Q", 4) + b"\xff\xff\xff\xff",
        struct.pack("<Q", 60) + b'{"a":{"dtype":"F32","shape":[9,9],"data_offsets":[0,4]}}'.ljust(60) + b"1234",
        struct.pack("<Q", 99)
        + b'{"a":{"dtype":"F32","shape":[4611686018427387905],"data_offsets":[0,4]}}'.ljust(99)
        + b"1234",
    ],
    ids=["pickle", "huge", "more", "text", "shape", "overflow"],
)
def test_a_hostile_file_is_refused(content, saved):
    (saved[1] / "model.safetensors").write_bytes(content)
    refused(saved[1], "whole safetensors file|block")


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"quantization_config": 3}', b"{}"])
def test_a_config_that_is_none_is_refused(content, saved):
    (saved[1] / "config.json").write_bytes(content)
    refused(saved[1], "JSON|quantization_config")


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_only_regular_files_are_read(file, saved):
    (saved[1] / file).unlink()
    with pytest.raises(FileNotFoundError):
        load_(Net(), saved[1])
    os.mkfifo(saved[1] / file)
    with pytest.raises(OSError, match="no regular file"):
        load_(Net(), saved[1])


def chained(net):
    layer = net.block["up"]
    net.block["up"] = CodesLinear(layer.weight_q, layer.weight_scale, layer.bias, input_scale=torch.ones(1))
    return net


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (chained, r"block\.up must be a DynamicLinear or a StaticLinear"),
        (lambda net: Net(), "hold int8 layers"),
        (lambda net: net.to("meta"), "dense tensor with values"),
        (lambda net: net.register_buffer("s", torch.eye(2).to_sparse()) or net, "s must be a dense tensor"),
        (lambda net: net.block["up"].input_zero_point.fill_(128) and net, "input_zero_point must be a code"),
    ],
)
def test_what_the_format_cannot_hold_is_not_written(change, match, tmp_path):
    net = drawn(fresh(), up="shifted")
    save(net, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(InvalidProblem, match=match):
        save(change(net), tmp_path)
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_a_failed_write_leaves_the_files_as_they_were(saved, monkeypatch):
    _, folder = saved
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail(tensors, file, metadata):
        file.write_bytes(b"half")
        raise safetensors.SafetensorError("no space left")

    monkeypatch.setattr(safetensors.torch, "save_file", fail)
    with pytest.raises(OSError, match="no space left"):
        save(drawn(fresh("other"), up="dynamic"), folder)
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_package_imports_neither_transformers_nor_safetensors():
    names = ("compressed_tensors", "safetensors", "transformers")
    quantized = "st.quantize_(torch.nn.Sequential(torch.nn.Linear(3, 4)), st.Dynamic(), strict=True)"
    code = f"import sys, torch, skuda.torch as st; {quantized}; print([n for n in {names} if n in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
