"""How checkpoints of transformers name, merge and cast the tensors of its models, and which of them are tied.

A file's tensors may have other names than the model's, and several of them may be one parameter. Transformers converts
them when it loads and saves. Everything here follows its rules, for what it cannot know: int8 layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.modeling_utils import PreTrainedModel

from skuda.registry.errors import InvalidRecord
from skuda.registry.text import one_line
from skuda.torch.formats import Tensors
from skuda.torch.hf.scheme import Dtypes, FileNames, Scheme
from skuda.torch.linear.joined import Part, int8_layers
from skuda.torch.models.replaceable_layers import linears


def derived(model: Any) -> frozenset[str]:
    """Return the names of tensors that are in no file, because every model of the architecture makes the same."""
    return frozenset(model._keys_to_ignore_on_save or ())  # noqa: SLF001  it has no public name


def in_file(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of a model as `save_pretrained` stores them. None of an int8 layer may be merged or split."""
    left = derived(model)
    found: dict[str, Tensor] = revert_weight_conversion(
        model, {n: each for n, each in tensors.items() if n not in left}
    )
    return found


def file_names(model: Any, tensors: Mapping[str, Tensor]) -> FileNames:
    """Return the names that `save_pretrained` gives to tensors of a model."""
    empty = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in tensors.items()}
    names = {id(each): name for name, each in empty.items()}
    stored = in_file(model, empty)
    same = {names[id(each)]: new for new, each in stored.items() if id(each) in names}
    return FileNames(same, {new: each for new, each in stored.items() if id(each) not in names})


def in_model(model: Any, scheme: Scheme) -> tuple[Scheme, dict[str, str], dict[str, torch.dtype]]:
    """Return what `Renamed` has for a scheme, of a model that transformers has loaded: the scheme, files and dtypes."""
    names = file_names(model, model.state_dict()).of
    files = {name.rpartition(".")[0]: new.rpartition(".")[0] for name, new in names.items()}
    said = scheme.dtypes
    dtypes = {} if said is None else {name: said.other.get(new, said.default) for name, new in names.items()}
    return scheme.renamed(_Names(model).module), files, dtypes


def keep_codes_(model: Any, tensors: Iterable[str]) -> None:
    """Let saving leave out conversions that would merge, split or permute these tensors, but not their scales."""
    found = getattr(model, "_weight_conversions", None)
    if found is None:  # what transformers itself takes then
        found = [
            each for each in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(each, PrefixChange)
        ]
    names = tuple(tensors)
    kept = [each for each in found if not (_converts(each) and _takes(each.reverse_transform(), names))]
    if len(kept) < len(found):
        model._weight_conversions = kept  # noqa: SLF001  transformers reads it when it saves


def without_codes(conversions: Iterable[Any], names: Collection[str]) -> list[Any]:
    """Return the conversions of a file without those that would change these tensors, which are of int8 layers."""
    return [each for each in conversions if not (_converts(each) and _takes(each, names))]


def _converts(conversion: Any) -> bool:
    return isinstance(conversion, WeightConverter)


def _takes(conversion: Any, names: Iterable[str]) -> bool:
    return any(conversion.rename_source_key(name)[1] is not None for name in names)


class Renamed(NamedTuple):
    """A checkpoint under the names of a model.

    Attributes
    ----------
    tensors : Tensors
    files : dict of str to str
        Names of modules in the file, by their names in the model.
    names : dict of str to str
        Names of tensors in the model, by those in the file.
    module : callable
        Returns the model's name for a module's name in the file.
    codes : tuple of str
        Names of the tensors of int8 layers, of which conversions must take none.
    """

    tensors: Tensors
    files: dict[str, str]
    names: dict[str, str]
    module: Callable[[str], str]
    codes: tuple[str, ...]

    def dtypes(self, stored: Dtypes | None) -> dict[str, torch.dtype]:
        """Return the dtypes that a file says, by the model's names of its tensors."""
        if stored is None:
            return {}
        return {new: stored.other.get(name, stored.default) for name, new in self.names.items()}


def renamed(model: Any, found: Tensors, *, convert: bool = False) -> Renamed:
    """Return a checkpoint under the names of a model of transformers.

    Parameters
    ----------
    model : PreTrainedModel
    found : Tensors
    convert : bool
        Whether tensors that are one parameter of the model become that. Else they keep their names.

    Raises
    ------
    InvalidRecord
        With `convert`, for tensors that are not those of one parameter.
    """
    names = _Names(model)
    every = sorted(found.kinds, key=dot_natural_key)  # conversions collect tensors in this order
    plain = {name: names.of(name)[0] for name in every}
    scaled = {new.rpartition(".")[0] for new in plain.values() if new.endswith(".weight_scale")}
    codes = tuple(new for new in plain.values() if new.rpartition(".")[0] in scaled)
    converters = without_codes(names.converters, codes)
    groups: dict[str, _Conversion] = {}
    same: dict[str, str] = {}
    for name in every:
        new, pattern = names.of(name, converters)
        if pattern is None:
            same[name] = new
        else:
            converter = next(each for each in converters if pattern in each.source_patterns)
            groups.setdefault(new, _Conversion(converter, model, found, new)).add(name, pattern)
    files = {new.rpartition(".")[0]: name.rpartition(".")[0] for name, new in same.items()}
    merged = {name: new for new, each in groups.items() for name, _ in each.parts}
    made = found.renamed(same, groups.values()) if convert else found.renamed(same | {name: name for name in merged})
    return Renamed(made, files, same | merged, names.module, codes)


class _Names:
    """Gives a model's names to the tensors and modules of a file, as transformers does."""

    def __init__(self, model: Any) -> None:
        conversions = get_model_conversion_mapping(model)
        self._renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
        self.converters = [each for each in conversions if _converts(each)]
        self._held = _Held(model)
        self._given = model.base_model_prefix, self._held

    def of(self, name: str, converters: Sequence[Any] = ()) -> tuple[str, str | None]:
        """Return the name of a tensor in the model, and the pattern of the converter that takes it, or None."""
        new, pattern = rename_source_key(name, self._renamings, converters, *self._given)
        if self._held.get(new) is None and self._held.get(name) is not None:
            new, pattern = rename_source_key(name, [], [], *self._given)
        return new, pattern

    def module(self, name: str) -> str:
        """Return the name of a module in the model, or the same name for what is no module."""
        new = self.of(f"{name}.weight")[0].rpartition(".")[0]
        return new if new in self._held.modules else name


class _Held:
    """Stands for the state of a model whose linear layers may become int8, where transformers looks for a name."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = {name for name, _ in model.named_modules(remove_duplicate=False)}
        self._state = set(model.state_dict())
        self._layers = {name for name, module in model.named_modules() if isinstance(module, Part)}
        self._layers |= {name for name, _ in linears(model)}

    def get(self, name: str) -> bool | None:
        return True if name in self._state or name.rpartition(".")[0] in self._layers else None


class _Conversion:
    """Tensors of a file that are merged or split into parameters of a model."""

    def __init__(self, converter: Any, model: Any, found: Tensors, name: str) -> None:
        self._converter, self._model, self._found, self._name = converter, model, found, name
        self.parts: list[tuple[str, str]] = []

    def add(self, name: str, pattern: str) -> None:
        self.parts.append((name, pattern))

    def kinds(self) -> dict[str, Any]:
        """Return the dtypes and shapes of the parameters."""
        made = self._made(self._found.without_values)
        return {name: (each.dtype, tuple(each.shape)) for name, each in made.items()}

    def values(self) -> dict[str, Tensor]:
        """Return the parameters."""
        return self._made(lambda name: self._found.take(name, *self._found.kinds[name]))

    def _made(self, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        converter = deepcopy(self._converter)
        for name, pattern in self.parts:
            converter.add_tensor(self._name, name, pattern, partial(read, name))
        try:
            made = converter.convert(self._name, model=self._model, config=self._model.config)
        except InvalidRecord:
            raise
        except Exception as error:  # noqa: BLE001  transformers may raise anything
            self._refuse(one_line(f"{type(error).__name__}: {error}", 200))
        return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}

    def _refuse(self, why: str) -> NoReturn:
        had = f"{len(self.parts)} tensors, the first {self.parts[0][0]}"
        raise InvalidRecord(self._found.source, f"tensor {self._name}", had, f"be what transformers converts ({why})")


def cast_(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Give tensors of a model other dtypes. Ties remain."""
    for name, dtype in dtypes.items():
        owner, _, part = name.rpartition(".")
        module = model.get_submodule(owner)
        tensor = module._parameters.get(part)  # noqa: SLF001  codes have an attribute that is not the buffer
        if tensor is None:
            held = module._buffers.get(part)  # noqa: SLF001
            if held is not None and held.dtype is not dtype:
                module._buffers[part] = held.to(dtype)  # noqa: SLF001
        elif tensor.is_meta and tensor.dtype is not dtype:
            module._parameters[part] = nn.Parameter(tensor.to(dtype), requires_grad=tensor.requires_grad)  # noqa: SLF001
        elif tensor.dtype is not dtype:
            tensor.data = tensor.data.to(dtype)


def planned(model: Any, dtype: torch.dtype) -> Callable[[str], torch.dtype]:
    """Return the function that gives the dtype in which transformers loads a tensor into a model of this dtype."""
    plan: dict[str, torch.dtype] = model._get_dtype_plan(dtype)  # noqa: SLF001  it has no public name
    if not plan:
        return lambda _: dtype
    pattern, keys, _ = build_glob_alternation(list(plan))

    def of(name: str) -> torch.dtype:
        match = pattern.search(name)
        return dtype if match is None or match.lastgroup is None else plan[keys[match.lastgroup]]

    return of


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of a model, as transformers tells it: that of the first parameter of floats."""
    floats = (each.dtype for each in model.parameters() if each.is_floating_point())
    return next(floats, None) or next(layer.weight.dtype for _, layer in int8_layers(model))


def dtypes_of(model: Any, tensors: Mapping[str, Tensor], names: FileNames) -> Dtypes | None:
    """Return the dtypes that a file must say, because transformers would load others; or None."""
    layers = dict(int8_layers(model))
    default = dtype_of(model)
    plan = planned(model, default)
    every: dict[str, tuple[torch.dtype, torch.dtype]] = {}
    for name, new in names.of.items():
        owner, _, part = name.rpartition(".")
        dtype = tensors[name].dtype
        if owner in layers and part != "bias":
            if part == "weight":
                every[new] = layers[owner].weight.dtype, plan(name)
        elif dtype.is_floating_point:
            every[new] = dtype, plan(name)
    every |= {name: (each.dtype, default) for name, each in names.converted.items() if each.is_floating_point()}
    if all(dtype is loaded for dtype, loaded in every.values()):
        return None
    return Dtypes(default, {name: dtype for name, (dtype, _) in every.items() if dtype is not default})


def untie_(model: nn.Module, layers: Collection[str] | None = None) -> None:
    """End the ties of int8 layers in the models of transformers inside a model, and no other tie.

    Codes share no memory with an embedding. A config says that no weights are tied if none is left. Some models are
    scaled by what it says, so it does not say that while others are tied.

    Parameters
    ----------
    model : Module
    layers : collection of str, optional
        Names of the int8 layers. By default those that are int8.
    """
    coded = {name for name, _ in int8_layers(model)} if layers is None else layers
    left: dict[int, bool] = {}
    ended: dict[int, Any] = {}
    for prefix, module in model.named_modules():
        if not isinstance(module, PreTrainedModel):
            continue
        start = f"{prefix}." if prefix else ""
        inside = {name.removeprefix(start) for name in coded if name.startswith(start)}
        tied: dict[str, str] = module.all_tied_weights_keys
        kept = _kept(tied, inside)
        if kept != tied:
            module._tied_weights_keys = module.all_tied_weights_keys = kept  # noqa: SLF001  it is what `tie_weights` reads
            ended[id(module.config)] = module.config
        left[id(module.config)] = left.get(id(module.config), False) or bool(kept)
    for of, config in ended.items():
        if not left[of]:
            config.tie_word_embeddings = False


def _kept(tied: Mapping[str, str], layers: Collection[str]) -> dict[str, str]:
    """Return the ties, sources by targets, that remain when layers are int8. One target takes the place of a source."""
    kept: dict[str, str] = {}
    first: dict[str, str] = {}
    for target, source in tied.items():
        if target.rpartition(".")[0] in layers:
            continue
        if source.rpartition(".")[0] not in layers:
            kept[target] = source
        elif first.setdefault(source, target) != target:
            kept[target] = first[source]
    return kept
