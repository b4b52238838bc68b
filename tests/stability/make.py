"""What a version promises to keep: names as trees of JSON, and files that later versions must read.

``python tests/stability/make.py 0.2`` makes the folder of a version, once; it needs torch, transformers and NVRTC.
Each function of `KINDS` returns a tree. It reads the files of a folder with the code of today; `promised.json` has what
the code of then gave. `lost` compares them: more is allowed, less and other is not.
"""

from __future__ import annotations

import ast
import base64
import dataclasses
import gzip
import hashlib
import importlib
import importlib.util
import io
import json
import pickle
import re
import sys
import tempfile
import textwrap
import warnings
import zlib
from contextlib import suppress
from functools import cache, partial, reduce
from importlib.metadata import distribution
from pathlib import Path

import numpy as np
from pydantic import BaseModel

FEW = ("fill.f32.plain.cpu.numpy.reference", "f32-s8.rcr-identity.cpu.numpy.reference")
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FACADES = (
    *("registry", "dispatch", "dispatch.shard", "torch", "ops"),
    *(f"tools.{name}" for name in ("testing", "smoothquant", "checkpoint")),
    *(f"kernels.{name}" for name in ("quantize", "linear", "elementwise", "attention", "sampling")),
)
BLOCK = re.compile(r"^( *)```python[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"`(skuda(?:\.\w+)+)(?:\(.*?\))?`")
MEMBERS = re.compile(r"^::: (skuda[\w.]+)\n +options:\n +members: \[(.*?)\]", re.MULTILINE)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = ("docs/examples", "tests/example_kernel", "tests/example_backend")


def lost(saved, now, path=""):
    """Yield where a tree has not kept another: (path, what it was, what it is)."""
    if isinstance(saved, dict) and isinstance(now, dict):
        for name, value in saved.items():
            yield from lost(value, now.get(name, "gone"), f"{path}/{name}")
    elif saved != now and not (path.startswith("/schemas/") and now != "gone" and compatible(saved, now)):
        yield path, saved, now


def compatible(saved, now):
    """Whether programs that call an op by one schema can do so by another."""
    import torch

    return torch._C.parse_schema(now).is_backward_compatible_with(torch._C.parse_schema(saved))


# -------------------------------------------------------------------------------------------------------------- names


def imports(_, saved):
    """Return the dotted names that are there: those of `documented`, and classes in pickles of models."""
    return {name: {} for name in saved if resolves(name)}


def imported():
    """Yield module and name of everything of ours that programs on pages and examples import."""
    programs = [path.read_text(encoding="utf-8") for folder in EXAMPLES for path in (ROOT / folder).rglob("*.py")]
    for page in PAGES:
        blocks = [textwrap.dedent(block) for _, block in BLOCK.findall(page.read_text(encoding="utf-8"))]
        # A new op becomes a part of skuda.
        programs += [block for block in blocks if page.name != "CONTRIBUTING.md" or "(Backend)" in block]
    for node in (node for program in programs for node in ast.walk(ast.parse(program))):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("skuda."):
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if f"{alias.name}.".startswith("skuda."))


def documented():
    """Return the names that pages and examples import, and those of the facades."""
    found = {f"skuda.{name}" for name in FACADES} | {".".join(filter(None, names)) for names in imported()}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        found |= {name for name in NAME.findall(text) if page.name != "CONTRIBUTING.md"}
        found |= {f"{module}.{name}" for module, names in MEMBERS.findall(text) for name in names.split(", ")}
    for name in FACADES:
        module = importlib.import_module(f"skuda.{name}")
        own = [name for name, one in vars(module).items() if getattr(one, "__module__", "") == module.__name__]
        found |= {f"skuda.{name}.{one}" for one in getattr(module, "__all__", own) if one[0] != "_"}
    return set(filter(resolves, found))


def resolves(name):
    """Whether a dotted name is there; those of torch count where torch is not."""
    parts = name.split(".")
    if parts[1:2] == ["torch"] and importlib.util.find_spec("torch") is None:
        return True
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        with suppress(AttributeError):
            return reduce(getattr, parts[end:], found) is not None
        return False
    return False


def variables(*_):
    from skuda.dispatch.settings import SETTINGS

    return {setting.name: {} for setting in SETTINGS}


def entry_points(*_):
    from skuda.dispatch.plugins import loading

    groups = {name: {} for name in ("skuda.backends", "skuda.kernels") if name in vars(loading).values()}
    own = {point.group: {point.name: point.value} for point in distribution("skuda").entry_points}
    return {"of skuda": own, "for others": groups}


def commands(*_):
    import typer

    from skuda.tools.commands import COMMANDS, app, loaded

    def options(command, path=""):
        command = loaded(path) if path in COMMANDS else command
        verbs = getattr(command, "commands", {})
        words = (word for one in command.params for word in one.opts if word.startswith("-"))
        below = {name: options(verb, f"{path} {name}".strip()) for name, verb in verbs.items()}
        return below | {word: {} for word in words}

    return options(typer.main.get_command(app))


def schemas(*_):
    import torch

    import skuda.torch  # noqa: F401  it registers them

    known = torch._C._dispatch_get_all_op_names()
    packets = [getattr(torch.ops.skuda, name[7:].partition(".")[0]) for name in known if name[:7] == "skuda::"]
    return {f"{p.__name__}.{one}": str(getattr(p, one)._schema) for p in packets for one in p.overloads()}


def hooks(*_):
    """Return what transformers knows of skuda."""
    from transformers.modeling_utils import AttentionInterface
    from transformers.quantizers import auto

    import skuda.torch.transformers  # noqa: F401  it registers them

    found = {"quantizer": auto.AUTO_QUANTIZER_MAPPING, "config": auto.AUTO_QUANTIZATION_CONFIG_MAPPING}
    found["attention"] = AttentionInterface()
    return {name: {"skuda": {}} for name, known in found.items() if "skuda" in known}


# -------------------------------------------------------------------------------------------------------------- files


def kernels(folder, _):
    """Return the kernels that are gone or promise less, and what a lock says."""
    from skuda.kernels.catalog import built_in_registry
    from skuda.registry.guarantee import exceeds
    from skuda.tools.ship.lock import Lock

    lock = Lock.model_validate_json(gzip.decompress((folder / "selection.lock.json.gz").read_bytes()))
    now = {sku.id: sku.precision_guarantee for sku in built_in_registry()}
    worse = [sku for sku, then in lock.promised.items() if sku not in now or exceeds(then, now[sku]) is not None]
    return {"gone or weaker": worse, "selection": {" ".join(place): str(answer) for place, answer in lock.answers()}}


def bundle(folder, _):
    from skuda.dispatch.compile.bundle import open_bundle

    (folder / "kernels.skuda").chmod(0o644)  # one that others can write is refused
    found = open_bundle(str(folder / "kernels.skuda"))
    return {"troubles": found.troubles(), "manifest": found.manifest.model_dump(mode="json")}


def tuning(folder, _):
    from skuda.dispatch import Tuning

    return Tuning.load(folder / "tuning.json").model_dump(mode="json")


def unpickled(file, folder, _):
    """Return what pickles hold, and whether records in JSON hold the same."""
    found = {}
    for name, text in json.loads((folder / file).read_text()).items():
        mine = found[name] = {}
        try:
            one = pickle.loads(zlib.decompress(base64.b64decode(text["pickle"])))  # noqa: S301  our own
            mine["pickle"] = value_of(one)
            if "json" in text:
                mine["json holds the same"] = type(one).model_validate_json(text["json"]) == one
        except Exception as error:  # noqa: BLE001  whatever a class that has moved or changed leads to
            mine["json holds the same" if mine else "pickle"] = repr(error)
    return found


def value_of(one):
    """Return what an object holds as JSON; of tensors and layers, hashes of bits."""
    match one:
        case BaseModel():
            return one.model_dump(mode="json")
        case Exception():
            return [type(one).__name__, *map(value_of, one.args)]
        case dict():
            return {str(name): value_of(value) for name, value in one.items()}
        case list() | tuple() | set() | frozenset():
            return [value_of(value) for value in (sorted(one) if isinstance(one, (set, frozenset)) else one)]
        case None | str() | int() | float():
            return one
    if hasattr(one, "to_dict"):
        return value_of(one.to_dict())
    return layers(one) if hasattr(one, "modules") else digest(one) if hasattr(one, "dtype") else value_of(vars(one))


def digest(tensor):
    """Return dtype and shape of a tensor, and a hash of its bits."""
    import torch

    bits = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(bits).hexdigest()[:12]}"


def given(layer):
    """Return an input of a layer, the same on every machine."""
    import torch

    from skuda.torch import CodesLinear

    k = getattr(layer, "in_features", 32)
    numbers = torch.arange(3 * k).reshape(3, k) * 37 % 101 - 50
    return numbers.to(torch.int8) if isinstance(layer, CodesLinear) else numbers.float() / 16


def layers(model):
    """Return the names, dtypes and shapes in a model's state, and the bits that its int8 layers return."""
    import torch
    from tensors import GatedMLP

    from skuda.torch import Int8Linear, MixedLinear

    exact = (Int8Linear, MixedLinear, GatedMLP)
    with torch.no_grad():
        bits = {name: digest(m(given(m))) for name, m in model.named_modules() if isinstance(m, exact)}
        if isinstance(getattr(model, "lm_head", None), Int8Linear):  # that of an exact model
            bits["logits"] = digest(model(torch.tensor([[1, 5, 9, 2]]), use_cache=False).logits)
    return {"state": {name: digest(one) for name, one in model.state_dict().items()}, "bits": bits}


def exported(folder, _):
    """Return the bits of a program of `torch.export`."""
    import torch

    import skuda.torch  # noqa: F401  it registers the ops

    found = torch.export.load(folder / "exported.pt2").module()
    with torch.no_grad():
        return {"bits": digest(found(torch.arange(-48, 48).reshape(3, 32) / 16))}


def checkpoints(folder, _):
    """Return what checkpoints of every scheme give, loaded in every way, and what is written again."""
    import torch

    from skuda.torch import load_, save

    found = {}
    for path in (folder / "checkpoints").iterdir():
        model, name = schemes()[path.name][0](), path.name
        found[name] = {"names": list(load_(model, path)), **layers(model)}
        with tempfile.TemporaryDirectory() as again:
            save(model, again)
            found[name]["written"] = written(Path(again))
        if hasattr(model, "from_pretrained"):
            import skuda.torch.transformers  # noqa: F401  it registers the quantizer

            found[name]["from_pretrained"] = layers(type(model).from_pretrained(path, dtype=torch.float32).eval())
    return found


def written(path):
    """Return the tensors of a checkpoint, and its scheme."""
    from safetensors import safe_open

    with safe_open(path / "model.safetensors", "pt") as file:
        tensors = {name: digest(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118  it is no mapping
    return {"tensors": tensors, "config": json.loads((path / "config.json").read_text())["quantization_config"]}


def smoothquant(folder, _):
    """Return the layers of `skuda.tools.checkpoint`."""
    from skuda.tools.checkpoint import load_layers

    found = load_layers(folder / "layers.safetensors")
    return {name: {part: v.tolist() for part, v in one.tensors().items()} for name, one in found.items()}


NAMES, FILES = (imports, variables, entry_points, commands), (kernels, bundle, tuning, smoothquant)
KINDS = {kind.__name__: kind for kind in (*NAMES, *FILES)}
KINDS["records"] = partial(unpickled, "records.json")
OF_TORCH = {kind.__name__: kind for kind in (schemas, hooks, exported, checkpoints)}
OF_TORCH["torch_records"] = partial(unpickled, "torch_records.json")


# -------------------------------------------------------------------------------------------------------------- make


@cache
def schemes():
    """Return, by name, what builds a model with other weights, and what makes it int8."""
    import torch
    from torch import nn
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    import skuda.torch as st
    from skuda.torch.exact import exact_

    def smoothed(kind, **more):
        def change(model):
            with st.calibrate(model) as calibration:
                model(torch.randn(5, 32))
            return st.quantize_(model, kind(calibration, **more))

        return change

    def small():
        return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8)).eval()

    def single():
        return nn.Sequential(nn.Linear(64, 16)).eval()

    def llama():
        sizes = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
        return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=1, num_key_value_heads=1)).eval()

    def gpt2():
        return GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=1)).eval()

    def dynamic(filter_fn=None, **more):
        return lambda model: st.quantize_(model, st.Dynamic(**more), filter_fn)

    return {
        "dynamic": (small, dynamic()),
        "propagate": (small, dynamic(nonfinite="propagate")),
        "static": (small, smoothed(st.SmoothStatic, alpha=None)),
        "smooth-static": (small, smoothed(st.SmoothStatic, fold=False)),
        "smooth-dynamic-int4": (small, smoothed(st.SmoothDynamic, fold=False, weights="int4", group_size=32)),
        "int4": (small, dynamic(weights="int4", group_size=32)),
        "int4-symmetric": (single, dynamic(weights="int4", group_size=32, symmetric=True)),
        "int4-rows": (small, dynamic(weights="int4", group_size=0)),
        "mixed": (small, lambda m: (dynamic(lambda _, n: n == "1", weights="int4", group_size=32)(m), dynamic()(m))),
        "int8-int16": (small, dynamic(activations="int16")),
        "int16": (small, dynamic(weights="int16", activations="int16")),
        "llama": (llama, dynamic()),
        "llama-exact": (llama, lambda model: (dynamic(lambda *_: True)(model), exact_(model))),
        "gpt2": (gpt2, dynamic()),
    }


def write(folder):
    """Fill the folder of a version."""
    import torch

    import skuda.torch
    from skuda.dispatch import Dispatcher
    from skuda.tools.checkpoint import save_layers
    from skuda.tools.cli import main
    from skuda.tools.smoothquant import SmoothQuantLayer

    folder.mkdir()
    torch.manual_seed(0)
    problems, lock = folder / "problems.json", folder / "selection.lock.json"
    linear = {"op": "quantized_linear", "m": 8, "c_out": 4096, "k": 4096, "q_min": -127, "q_max": 127}
    fill = {"op": "fill", "numel": 8, "output_element": "f32"}
    problems.write_text(json.dumps([linear | {"activation_element": "bf16"}, fill]))
    main(["lock", "--descriptors", str(problems), "--device", "cpu,h200,l4", "--output", str(lock)])
    lock.with_suffix(".json.gz").write_bytes(gzip.compress(lock.read_bytes(), mtime=0))
    words = [f"--{name.replace('_', '-')}={value}" for name, value in fill.items()]
    main(["bundle", str(folder / "kernels.skuda"), *words, "--arch", "sm_90", "--backend", "cuda_core"])
    main(["tune", "fill", *words[1:], "--repeats", "1", "--output", str(folder / "tuning.json")])
    lock.unlink()
    problems.unlink()
    rng, dispatcher = np.random.default_rng(0), Dispatcher(tuning="")
    weight, largest = rng.normal(size=(3, 4)).astype(np.float32), np.arange(1, 5, dtype=np.float32)
    up = SmoothQuantLayer.quantize(dispatcher, largest, weight, alpha=0.5)
    save_layers(folder / "layers.safetensors", {"up": up})
    pickled(folder / "records.json", some_records(of_few()))
    pickled(folder / "torch_records.json", some_torch_records())
    found = documented()
    for name, (build, change) in schemes().items():
        model, path = build(), folder / "checkpoints" / name
        change(model)
        if hasattr(model, "save_pretrained"):
            model.save_pretrained(path)
            (path / "generation_config.json").unlink(missing_ok=True)
        else:
            skuda.torch.save(model, path)
        if name == "dynamic":
            torch.export.save(torch.export.export(model[1:], (torch.zeros(3, 32),)), folder / "exported.pt2")
        found |= classes(model)
    promised = {name: kind(folder, found if name == "imports" else {}) for name, kind in (KINDS | OF_TORCH).items()}
    (folder / "promised.json").write_text(json.dumps(promised, indent=0, sort_keys=True) + "\n")


def of_few():
    """Return a dispatcher that has few kernels, so that what it explains is short."""
    from skuda.dispatch import Dispatcher
    from skuda.dispatch.backends.numpy import NumpyBackend
    from skuda.kernels.catalog import built_in_ops
    from skuda.registry import Registry

    few = [dataclasses.replace(op, skus=[sku for sku in op.skus if sku.id.endswith(FEW)]) for op in built_in_ops()]
    return Dispatcher(Registry(few, origin="skuda"), backends=[NumpyBackend()], tuning="")


def pickled(file, found):
    """Write objects as pickles, and records as JSON, too."""
    texts = {}
    for name, one in found.items():
        texts[name] = {"pickle": base64.b64encode(zlib.compress(pickle.dumps(one, protocol=4), 9)).decode()}
        if isinstance(one, BaseModel):
            texts[name]["json"] = one.model_dump_json()
    file.write_text(json.dumps(texts, indent=1) + "\n")


def classes(model):
    """Return the names of ours in the pickle of a model. The pickle would also have those of transformers."""
    names = set()

    class Reader(pickle.Unpickler):
        def find_class(self, module, name):
            names.add(f"{module}.{name}")
            return super().find_class(module, name)

    Reader(io.BytesIO(pickle.dumps(model))).load()
    return {name for name in names if name.startswith("skuda.")}


def some_records(dispatcher):
    """Return one record of every kind that a dispatcher takes or returns, and one error of every kind."""
    from skuda import registry
    from skuda.dispatch import PlanPreference, Plugin, Tuning, device_named
    from skuda.dispatch.select.environment import Environment
    from skuda.dispatch.shard import NVLINK, Shards, Traffic, explain_shards
    from skuda.kernels.catalog import built_in_ops

    found = {op.descriptor.__name__: op.cases[-1].problem for op in built_in_ops()}
    sizes = {"m": 2, "c_out": 3, "k": 4, "q_min": -127, "q_max": 127, "activation_element": "f32"}
    linear = found["QuantizedLinearDescriptor"] = type(found["QuantizedLinearDescriptor"])(**sizes)
    problem = found["FillDescriptor"] = type(found["FillDescriptor"])(numel=2, output_element="f32")
    plan, shards = dispatcher.select(problem, device="cpu"), Shards(axis="k", count=2)
    explanation = dispatcher.explain(linear, PlanPreference(require={"max_ulp": 0}, backend="numpy"), "h200")
    records = (
        *(plan, plan.sku, plan.sku.identity, plan.precision_guarantee, explanation, explanation.decisions[0]),
        *(device_named("h200"), device_named("cpu"), PlanPreference(require={"max_ulp": 0}), NVLINK, shards),
        explain_shards(dispatcher, linear, Shards(axis="n", count=1), device="cpu"),
        Traffic(m=2, n=3, k=4, output_bytes=2, dynamic=True),
        Tuning(environment=Environment(device=device_named("h200"), skuda="0.1.0")),
        *(dispatcher.status["numpy"], dispatcher.registry.backends["numpy"], linear.key()),
        *(registry.Between(field="k", minimum=1), registry.MultipleOf(field="k", divisor=2)),
        *(registry.OneOf(field="k", allowed=("a",)), registry.ProductAtMost(factors=("k",), maximum=3)),
        *(registry.WorkspaceTerm(factors=("k",), bytes_each=4), Plugin(group="a", name="b", origin="c", package="d")),
    )
    found |= {f"{type(one).__name__} {at}": one for at, one in enumerate(records)}
    texts = {"InvalidProblem": 4, "InvalidRecord": 4, "FrozenRecord": 2, "RegistrationError": 4, "NotPrepared": 1}
    texts |= {"MissingDependency": 2, "FloatModeError": 2, "OutOfMemory": 3, "DriverError": 3, "BundleError": 2}
    texts |= {"CompileError": 4, "KernelFailed": 3, "SkudaError": 1}
    found |= {name: getattr(registry, name)(*map(str, range(count))) for name, count in texts.items()}
    return found | {"Unsupported": registry.Unsupported(explanation)}


def some_torch_records():
    """Return configs, reports, and layers of every class."""
    import torch
    from tensors import GatedMLP
    from torch import nn

    import skuda.torch as st
    from skuda.torch.transformers import SkudaConfig

    configs = (
        st.Dynamic(weights="int4"),
        st.Mixed(),
        st.FakeQuant("tensor"),
        SkudaConfig(weights="int4", ignore=["a"]),
    )
    found = {type(one).__name__: one for one in configs}
    for name in ("dynamic", "propagate", "smooth-static", "smooth-dynamic-int4", "int4"):
        build, change = schemes()[name]
        model = build()
        found[f"report of {name}"] = change(model)
        found[name] = model
    mlp = GatedMLP(32, 16).eval()
    st.quantize_(mlp, st.Dynamic())
    found["fuse_"], found["fused"] = st.fuse_(mlp), mlp
    for name, config in (("mixed", st.Mixed()), ("fake", st.FakeQuant("tensor"))):
        found[name] = nn.Sequential(nn.Linear(32, 8))
        st.quantize_(found[name], config)
    one, weight = torch.ones(1), torch.ones(4, 32, dtype=torch.int8)
    found["codes"] = st.CodesLinear(weight, torch.ones(4, 1), None, input_scale=one, output_scale=one)
    with st.calibrate(build := schemes()["dynamic"][0]()) as calibration:
        build(torch.ones(2, 32))
    configs = (calibration, st.SmoothStatic(calibration), st.SmoothDynamic(calibration))
    return found | {type(one).__name__: one for one in configs}


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    warnings.simplefilter("ignore")
    write(HERE / sys.argv[1])
