"""Checkpoints of int8 models in the compressed-tensors format: safetensors files, and a config.json with the scheme.

The tensors of an int8 layer are the buffers of the modules of `skuda.torch`:

- `weight`, s8 of shape (N, K); `weight_scale`, a float of shape (N, 1); `bias`.
- With static activations: `input_scale`, a float of shape (1,), and `input_zero_point`, s8 of shape (1,), if the code
  of 0 is not 0.
- With smoothing factors: `smooth`, f32 of shape (K,). The checkpoint then has ``quant_method: skuda``, because readers
  of other projects would ignore the factors.

4-bit weights have the tensors of `skuda.torch.formats.grouped` if these can hold all of them bit for bit. Else they are
packed, u8; see `skuda.kernels.linear.packed`. Only skuda reads these: ``quant_method: skuda``, and
``format: skuda-int4`` of their group. So it is with weights of 16 bits, s8 of shape (N, 2, K), which are
``skuda-int16``, and with activations of 16 bits, ``num_bits: 16``, beside any weights.

Tensors of a model of transformers have the names that `save_pretrained` gives them, and so have the layers that the
scheme names. `dtypes` in the scheme lists tensors and layers of other dtypes than the model's, where a reader could not
know them.

The layer of a `Conv1D` of transformers, whose weight is (K, N), has the same tensors. Readers of other projects would
expect codes (K, N), so such a checkpoint has ``quant_method: skuda``, too.

Source: the package compressed-tensors 0.20. The tests read files that it wrote.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from skuda.dispatch.shard.group import Group
from skuda.dispatch.system.files import open_regular
from skuda.dispatch.system.writing import replacing
from skuda.registry.errors import InvalidProblem, InvalidRecord, MissingDependency
from skuda.registry.text import path_of, shown
from skuda.torch.formats import CodedWeight, StoredWeight, Tensors, WeightFormat
from skuda.torch.formats.int4 import warn_per_row
from skuda.torch.formats.reading import Kind
from skuda.torch.formats.weight import Difference
from skuda.torch.hf.scheme import ActivationScheme, Scheme
from skuda.torch.hf.stored import check_approximate, check_values, int8_layer, warn_approximate
from skuda.torch.linear.activation import PerRow
from skuda.torch.linear.int8_linear import Int8Linear, kind_of
from skuda.torch.linear.joined import Part, int8_layers, is_joined
from skuda.torch.models.folded import FOLDED, describe, digest_in
from skuda.torch.models.replaceable_layers import carry, changed, is_of_transformers

CONFIG, TENSORS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_LARGEST_JSON = 64 << 20
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""The supported dtypes, by their names in a file."""


def load_(model: nn.Module, path: str | os.PathLike[str], *, approximate: str | None = None) -> tuple[str, ...]:
    """Load a checkpoint into a model. Linear layers that are int8 in the checkpoint become int8 in the model.

    They keep the attributes that users have set. A single scale of a weight becomes the scale of every output channel.
    A checkpoint of an exact model makes the model exact; see `skuda.torch.exact.exact_`.

    The whole checkpoint is read and checked first. If this raises, the model has not changed. Tensors outside of int8
    layers must have the same dtype as in the model, and so must tensors of layers that `fuse_` has joined. Names may be
    those of the model, or those that transformers gives to its tensors in files. Each rank keeps its part of a layer
    that `parallelize_` has split. A checkpoint describes the whole, unfused model, whoever wrote it.

    Parameters
    ----------
    model : Module
        A model of the checkpoint's architecture, with the checkpoint's names.
    path : path
        The folder. It has `config.json`, and `model.safetensors` or an index of several files.
    approximate : str, optional
        Takes checkpoints of other projects that layers cannot hold exactly. Activations that are floats there (W4A16,
        GPTQ, AWQ) have 8 bits here, with a scale a row. 4-bit weights whose group scales are not multiples of one scale
        a channel become ``"int4"``, with the nearest multiples, or ``"int8"``, which are closer, and twice the bytes.
        Weights that fit exactly stay as they are. A warning has the number of layers, and the largest and the mean
        difference; see `skuda.torch.hf.stored.warn_approximate`. By default such a checkpoint is refused.

    Returns
    -------
    tuple of str
        Names of the int8 layers.

    Raises
    ------
    InvalidProblem
        If `model` is not a module, has another architecture or dtype, has a layer that cannot be replaced, or cannot be
        exact as the checkpoint is; or for another `approximate`.
    InvalidRecord
        If the files are not such a checkpoint, or have an unsupported scheme. The error names the field or tensor.
    MissingDependency
        If the package safetensors is not installed.
    OSError
        If a file cannot be read.
    """
    folder = _folder("load_", model, path)
    check_approximate("load_", approximate)
    with opened(folder) as stored:
        tensors = stored
        config = read_object(folder / CONFIG)
        fields, approximates = config.get("quantization_config"), approximate is not None
        scheme = Scheme.parse(str(folder / CONFIG), fields, approximate=approximates).named(tensors.kinds)
        files: dict[str, str] = {}
        dtypes: dict[str, torch.dtype] = {}
        renaming = _renaming(model)
        if renaming is not None:
            found = renaming.renamed(model, tensors, convert=True)
            scheme, tensors, files = scheme.renamed(found.module), found.tensors, found.files
            dtypes = found.dtypes(scheme.dtypes)
        state = _state(model)
        if renaming is not None:
            state = {name: own for name, own in state.items() if name in tensors or name not in renaming.derived(model)}
        names: list[str] = []
        rows: list[str] = []
        differences: dict[str, Difference] = {}
        layers: dict[str, Int8Linear] = {}
        copies: list[tuple[Tensor, Tensor]] = []
        for name, module, group in scheme.layers(model, files):
            dtype = dtypes.get(f"{name}.weight", module.weight.dtype)
            if dtype is not module.weight.dtype:
                rule = f"be {module.weight.dtype}, as in the model: convert that layer of the model first"
                raise InvalidRecord(tensors.source, f"tensor {name}.weight", f"codes of a weight in {dtype}", rule)
            own, note = tensors.within(name), partial(differences.__setitem__, name)
            layer = int8_layer(module, group, own, smooth=scheme.own, approximate=approximate, note=note)
            check_values(tensors.source, name, layer)
            names.append(name)
            if layer.format.per_row(layer.weight_q):
                rows.append(name)
            if isinstance(module, Part):
                copies += _copies_of_part(tensors.source, name, module, layer)
            else:
                layers[name] = module.like(layer) if hasattr(module, "like") else layer
                carry(module, layers[name])
        copies += _copies(state, set(names), tensors)
        tensors.finish()
        before = {name: model.get_submodule(name) for name in layers}
        for name, layer in layers.items():
            model.set_submodule(name, layer.train(before[name].training))
        if scheme.exact:
            _make_exact(model, before)
        with torch.no_grad():
            for own, tensor in copies:
                own.copy_(tensor)
    describe(model, loaded=digest_in(config))
    changed(model, int8=True)
    warn_approximate(differences, stacklevel=2)
    warn_per_row(rows, stacklevel=2)
    return tuple(names)


def _make_exact(model: nn.Module, before: dict[str, nn.Module]) -> None:
    """Make a model exact that is not. If it cannot be, put back the modules that it had before, and raise."""
    from skuda.torch.exact import exact  # it needs transformers

    if exact.is_exact(model):
        return
    try:
        exact.exact_inside_(model)
    except InvalidProblem:
        for name, module in before.items():
            model.set_submodule(name, module)
        raise


def _copies_of_part(source: str, name: str, part: Part, layer: Int8Linear) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the buffers of a joined layer's part, each with the tensor to copy into it."""
    if layer.activation != PerRow(bits=part.activation.element.bits):
        own = f"a DynamicLinear{part.activation.text()}"
        rule = f"be {own}, as the model's layer, which fuse_ has joined with others: load before fuse_"
        raise InvalidRecord(source, name, f"a {kind_of(layer)}", rule)
    held = dict(layer.named_buffers())
    for own, view in part.views().items():
        tensor = held[own]
        if tensor.dtype is not view.dtype:
            rule = f"be {view.dtype}, as in the model, where fuse_ has joined it with others: load before fuse_"
            raise InvalidRecord(source, f"tensor {name}.{own}", str(tensor.dtype), rule)
        here = part.of_rank(own, tensor)
        if here.shape != view.shape:
            rule = f"be {list(view.shape)}, as in the model, where fuse_ has joined it with others: load before fuse_"
            raise InvalidRecord(source, f"tensor {name}.{own}", f"shape {list(here.shape)}", rule)
        yield view, here


def _copies(state: dict[str, Tensor], layers: Container[str], tensors: Tensors) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the tensors of a model outside of its int8 layers, each with the tensor to copy into it."""
    places: defaultdict[object, list[str]] = defaultdict(list)
    for name, own in state.items():
        if name.rpartition(".")[0] not in layers:
            places[own.device, own.data_ptr(), own.shape, own.stride()].append(name)
    for names in places.values():
        # A tensor with several names is stored once, under one of them.
        own = state[names[0]]
        found = {name: tensors.take(name, own.dtype, tuple(own.shape)) for name in names if name in tensors}
        if not found:
            tensors.take(names[0], own.dtype, tuple(own.shape))
        first, *others = found.values()
        if not all(torch.equal(_bytes(other), _bytes(first)) for other in others):
            rule = f"be equal to {names[0]}: they are one tensor of the model"
            raise InvalidRecord(tensors.source, f"tensor {names[-1]}", "other values", rule)
        yield own, first


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a model with int8 layers as a checkpoint, which `load_`, compressed-tensors and vLLM read.

    If `parallelize_` has split the model, every rank calls this, and rank 0 writes the checkpoint of the whole model.

    Parameters
    ----------
    model : Module
        A model with `DynamicLinear` or `StaticLinear` layers. A `config`, as models of transformers have, is written,
        too. Tokenizers are not.
    path : path
        A folder, which is made if it is missing. Old files are replaced when the new ones are complete.

    Raises
    ------
    InvalidProblem
        If `model` is not a module, has no int8 layer, or has a tensor that the format cannot hold.
    MissingDependency
        If the package safetensors is not installed.
    OSError
        If a file cannot be written.
    GroupMismatch, GroupBroken
        If another rank does something else, or does not take part.
    """
    folder = _folder("save", model, path)
    _safetensors()
    group = _group(model)
    scheme, tensors = described(model, parts=True)
    folding = describe(model)
    fields = _config_of(model) | ({FOLDED: folding} if folding else {}) | {"quantization_config": scheme.fields()}
    text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
    if group is None:
        _write(folder, text, _in_file(model, tensors))
        return
    failure: Exception | None = None
    if group.rank == 0:
        try:
            _write(folder, text, _in_file(model, tensors))
        except Exception as error:  # noqa: BLE001  the other ranks wait to hear of it
            failure = error
    reported, *_ = group.exchange("" if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    if reported:
        raise OSError(f"rank 0 could not write {folder}: {reported}")


def _group(model: nn.Module) -> Group | None:
    """Return the group whose ranks have parts of a model, or None if the model is whole."""
    splits = (part.split for part in model.modules() if isinstance(part, Int8Linear) and part.split is not None)
    groups = {id(split.group): split.group for split in splits}
    if len(groups) > 1:
        raise InvalidProblem("save", "model", f"layers of {len(groups)} groups", "be split over one group")
    return next(iter(groups.values()), None)


def _write(folder: Path, text: str, tensors: dict[str, Tensor]) -> None:
    """Write the files."""
    safetensors = _safetensors()
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / INDEX).exists():
        raise InvalidProblem("save", "path", str(folder), f"be a folder without {INDEX}, which names other files")
    with ExitStack() as stack:
        # Files are replaced in reverse order: the tensors are in place before the config that describes them.
        config = stack.enter_context(replacing(folder / CONFIG))
        file = stack.enter_context(replacing(folder / TENSORS))
        config.write_text(text, encoding="utf-8")
        try:
            safetensors.torch.save_file(tensors, file, {"format": "pt"})
        except safetensors.SafetensorError as error:
            raise OSError(f"{folder / TENSORS}: {error}") from error


def described(model: nn.Module, *, parts: bool = False) -> tuple[Scheme, dict[str, Tensor]]:
    """Return the scheme of a model's checkpoint, and its tensors by the model's names, where zero points are s8.

    With `parts`, layers may be split over ranks. They are gathered, so every rank must then call this.

    Raises
    ------
    InvalidProblem
        For a model without int8 layers, a layer or tensor that a file cannot hold, or a zero point outside of
        -128..127.
    """
    Scheme.of(model, parts=parts)  # it refuses what a file cannot hold
    tensors = _stored(model)
    others = _for_others(model, tensors)
    named = _named(model, tensors)
    common = Scheme.of(model, parts=parts, stored={name: form for name, (_, form) in others.items()}, **named)
    if common.own:
        return Scheme.of(model, parts=parts, **named), tensors
    return common, tensors | {f"{name}.{own}": part for name, (made, _) in others.items() for own, part in made.items()}


def scheme_of(model: nn.Module) -> Scheme:
    """Return the scheme of a model's layers, with weights as the layers hold them; errors as `described`."""
    return Scheme.of(model, **_named(model, model.state_dict()))


def _named(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return what `Scheme.of` needs to know of the file of a model: names and dtypes."""
    renaming = _renaming(model)
    if renaming is None:
        return {}
    renaming.keep_codes_(model, _coded(model, tensors))
    names = renaming.file_names(model, tensors)
    return {"names": names, "dtypes": renaming.dtypes_of(model, tensors, names)}


def _coded(model: nn.Module, tensors: dict[str, Tensor]) -> set[str]:
    """Return the names of those tensors that belong to int8 layers."""
    layers = {name for name, _ in int8_layers(model)}
    return {name for name in tensors if name.rpartition(".")[0] in layers}


def _for_others(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, tuple[Mapping[str, Tensor], StoredWeight]]:
    """Return the tensors of weights for other readers, by layer, where those of layers are skuda's own.

    Nothing if one of them would be read as other bits.
    """
    weights: defaultdict[type[WeightFormat], dict[str, CodedWeight]] = defaultdict(dict)
    for name, layer in int8_layers(model):
        if layer.format.stored().own:
            weight = CodedWeight(tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"], layer.whole[1])
            weights[type(layer.format)][name] = weight
    found: dict[str, tuple[Mapping[str, Tensor], StoredWeight]] = {}
    layers = dict(int8_layers(model))
    for kind, each in weights.items():
        made = kind.stored_for_others(each)
        if made is None:
            return {}
        for name, (_, form) in made.items():
            activation = ActivationScheme.of(layers[name])
            if form.dynamic and not (activation and activation.dynamic):
                return {}
        found |= made
    return found


def _stored(model: nn.Module) -> dict[str, Tensor]:
    layers = {f"{name}.input_zero_point" for name, _ in int8_layers(model)}
    tensors = _state(model)
    wholes: dict[int, Int8Linear] = {}
    for name, module in model.named_modules():
        layer: Any = module.joined if isinstance(module, Part) else module
        if not isinstance(layer, Int8Linear) or layer.split is None or is_joined(module):
            continue
        if id(layer) not in wholes:
            wholes[id(layer)] = layer.gathered()
        whole = Part(wholes[id(layer)], module.number) if isinstance(module, Part) else wholes[id(layer)]
        tensors |= {f"{name}.{own}": value for own, value in whole.state_dict().items()}
    for name, tensor in tensors.items():
        if name in layers:
            if not bool(((tensor >= -128) & (tensor <= 127)).all()):
                raise InvalidProblem("checkpoint", name, str(tensor.item()), "be a code, -128..127")
            tensors[name] = tensor.to(torch.int8)
    # What a layer shares with another module, such as a bias, is stored for both: their tie has ended.
    own = _coded(model, tensors)
    others = {tensor.untyped_storage().data_ptr() for name, tensor in tensors.items() if name not in own}
    shared = {name for name in own if tensors[name].untyped_storage().data_ptr() in others}
    return tensors | {name: tensors[name].clone() for name in shared}


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's tensors by name; raise `InvalidProblem` for one that is not dense, or has no values."""
    state = dict(model.state_dict())
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor) or tensor.is_meta or tensor.layout is not torch.strided:
            raise InvalidProblem("checkpoint", name, shown(tensor), "be a dense tensor with values")
    return state


@contextmanager
def opened(folder: Path) -> Iterator[Tensors]:
    """Open the files of a checkpoint: one file, or several with an index.

    Raises
    ------
    InvalidRecord
        If a file is not a complete safetensors file, or an index and its files do not agree.
    OSError
        If a file cannot be read.
    """
    if (folder / INDEX).exists():
        if (folder / TENSORS).exists():
            raise InvalidRecord(str(folder), TENSORS, "a file beside an index", f"be absent, or {INDEX} be")
        index = read_object(folder / INDEX).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise InvalidRecord(str(folder / INDEX), "weight_map", shown(index), "map tensors to files")
        for file in index.values():
            if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
                raise InvalidRecord(str(folder / INDEX), "weight_map", shown(file), "name files of the same folder")
        with opened_files(*(folder / file for file in sorted(set(index.values())))) as tensors:
            for name, file in tensors.files.items():
                if index.get(name) != file.name:
                    rule = f"be in {file.name}, where it is"
                    raise InvalidRecord(str(folder / INDEX), f"tensor {name}", shown(index.get(name)), rule)
            for name in sorted(index.keys() - tensors.files.keys()):
                raise InvalidRecord(str(folder / INDEX), f"tensor {name}", "nothing", f"be in {index[name]}")
            yield tensors
    else:
        with opened_files(folder / TENSORS) as tensors:
            yield tensors


@contextmanager
def opened_files(*paths: Path) -> Iterator[Tensors]:
    """Open safetensors files; errors as `opened`."""
    safetensors = _safetensors()
    with ExitStack() as stack:
        kinds: dict[str, Kind] = {}
        files: dict[str, Path] = {}
        handles = {}
        for path in paths:
            open_regular(path).close()
            try:
                handle = handles[path] = stack.enter_context(safetensors.safe_open(path, framework="pt"))
                for name in handle.keys():  # noqa: SIM118  safe_open is no mapping
                    if name in kinds:
                        raise InvalidRecord(str(path), f"tensor {name}", f"also in {files[name]}", "be in one file")
                    view = handle.get_slice(name)
                    kinds[name] = _DTYPES.get(view.get_dtype(), view.get_dtype()), tuple(view.get_shape())
                    files[name] = path
            except safetensors.SafetensorError as error:
                raise InvalidRecord(str(path), "file", str(error), "be a whole safetensors file") from error
        source = str(paths[0] if len(paths) == 1 else paths[0].parent)
        yield Tensors(source, kinds, lambda name: handles[files[name]].get_tensor(name), files=files)


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of at most 64 MiB.

    Raises
    ------
    InvalidRecord
        If the file holds something else.
    OSError
        If it cannot be read.
    """
    with open_regular(path) as file:
        content = file.read(_LARGEST_JSON + 1)
    try:
        found = json.loads(content) if len(content) <= _LARGEST_JSON else None
    except (ValueError, RecursionError) as error:
        raise InvalidRecord(str(path), "file", str(error), "be JSON") from error
    if not isinstance(found, dict):
        raise InvalidRecord(str(path), "file", shown(content[:80]), "be an object of JSON of at most 64 MiB")
    return found


def _config_of(model: nn.Module) -> dict[str, Any]:
    """Return the fields of a model's own config, if it has one as models of transformers do."""
    config: Any = getattr(model, "config", None)
    if not callable(getattr(config, "to_json_string", None)):
        return {}
    fields: dict[str, Any] = json.loads(config.to_json_string())
    renaming = _renaming(model)
    dtype = {} if renaming is None else {"dtype": str(renaming.dtype_of(model)).removeprefix("torch.")}
    return fields | {"architectures": [type(model).__name__]} | dtype


def _renaming(model: nn.Module) -> Any:
    """Return the module that knows the names of tensors in files of transformers; None for other models."""
    if not is_of_transformers(model):
        return None
    try:
        from skuda.torch.hf import renaming  # it needs transformers
    except ImportError:  # an old version; `skuda.torch.hf.hooks` has warned
        return None
    return renaming


def _in_file(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's tensors by their names in a file, each once."""
    tensors, renaming = _unshared(tensors), _renaming(model)
    return tensors if renaming is None else _unshared(renaming.in_file(model, tensors))


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return each tensor once, under its first name, and dense. Views of other tensors are copied."""
    kept: dict[str, Tensor] = {}
    views, storages = set(), set()
    for name, tensor in tensors.items():
        view = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        if tensor.numel() and view in views:
            continue
        storage = tensor.untyped_storage().data_ptr()
        kept[name] = tensor.clone() if storage in storages else tensor.contiguous()
        views.add(view)
        storages.add(storage)
    return kept


def _folder(subject: str, model: object, path: object) -> Path:
    if not isinstance(model, nn.Module):
        raise InvalidProblem(subject, "model", shown(model), "be a torch.nn.Module")
    found = path_of(Path(path).absolute()) if isinstance(path, str | os.PathLike) and os.fspath(path) else None
    if found is None:
        raise InvalidProblem(subject, "path", shown(path), "be the path of a folder")
    return found


def _safetensors() -> ModuleType:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise MissingDependency("safetensors", "pip install 'safetensors>=0.4'") from error
    return safetensors
