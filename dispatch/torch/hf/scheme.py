"""`Scheme`: the `quantization_config` of a compressed-tensors checkpoint, which says how layers are quantized.

Only W8A8 with symmetric weights and W4A8 are supported, and in files of skuda activations of 16 bits, also with such
weights. A weight of 8 bits has one scale, or one per output channel.
Activations have a dynamic scale per token, or one scale from calibration; those of other projects' 4-bit weights must
be dynamic. Any other field is refused by name, so that no checkpoint is misread. If the user says so, weights of 8 or 4
bits have activations of 8 bits that are floats in the checkpoint, as with GPTQ and AWQ.

Source: the package compressed-tensors 0.20. The tests read a config that it wrote.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, Self

import torch
from torch import Tensor, nn

from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown
from skuda.torch.formats.int4 import StoredPacked
from skuda.torch.formats.int8 import StoredInt8, tensor_fields
from skuda.torch.formats.reading import ConfigFields
from skuda.torch.formats.weight import StoredWeight, stored_weights
from skuda.torch.linear.int8_linear import WHOLE, Int8Linear, described_as
from skuda.torch.linear.joined import Part, int8_layers, is_joined
from skuda.torch.models.replaceable_layers import hooked, is_conv1d, is_linear, linears, original_of, other_matrices

METHOD = "compressed-tensors"
OWN_METHOD = "skuda"
"""Marks a checkpoint that others would misread: smoothing factors, packed weights, 16 bits, or a `Conv1D`'s codes."""

_FLOATS = "have activations of 8 bits: approximate='int4' or 'int8' of load_ and SkudaConfig gives them, a scale a row"
_VERSION = "0.20.0"
_MOST_NAMES = 64
"""Names in `ignore` that differ in numbers alone. More of them become one pattern."""
_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


class ActivationScheme(StrEnum):
    """How the input of a layer is quantized."""

    DYNAMIC = "dynamic"
    STATIC = "static"
    SHIFTED = "static with a zero point"
    WIDE = "dynamic with 16 bits"

    @classmethod
    def of(cls, layer: Int8Linear | Part) -> Self | None:
        """Return how a module quantizes its input, or None if the format cannot express it."""
        scheme = layer.activation.scheme
        return None if scheme is None or described_as(layer) not in (*WHOLE, Part) else cls(scheme)

    @property
    def dynamic(self) -> bool:
        """Whether each row has a scale of its own."""
        return self in (ActivationScheme.DYNAMIC, ActivationScheme.WIDE)

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 16 if self is ActivationScheme.WIDE else 8

    def fields(self) -> dict[str, Any]:
        """Return the fields of `input_activations`."""
        strategy, symmetric = "token" if self.dynamic else "tensor", self is not ActivationScheme.SHIFTED
        return tensor_fields(strategy, dynamic=self.dynamic, symmetric=symmetric, bits=self.bits)


def check_whole(subject: str, model: nn.Module) -> None:
    """Raise for a model with layers of which this process has only a part."""
    for name, module in model.named_modules():
        if isinstance(module, Int8Linear) and module.split is not None:
            rule = "be a whole layer: use skuda.torch.save, or save before parallelize_"
            raise InvalidProblem(subject, name, f"a rank's part, {type(module).__name__}", rule)


@dataclass(frozen=True)
class SchemeGroup:
    """Layers with the same quantization.

    Attributes
    ----------
    targets : tuple of str
        Names of layers, patterns (``re:`` and a regular expression, matched from the start of a name) or names of
        classes.
    activation : ActivationScheme
    stored : StoredWeight
        How the file holds the weights.
    weights_only : bool
        Whether activations are floats in the checkpoint, and have 8 bits here.
    """

    targets: tuple[str, ...]
    activation: ActivationScheme
    stored: StoredWeight
    weights_only: bool = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of a pickle. That of version 0.1 has a field for each kind of weights."""
        old = {name: state.pop(name) for name in ("per_tensor", "group_size", "int4") if name in state}
        if old:
            packed = old["group_size"] and StoredPacked(old["group_size"])
            state["stored"] = old["int4"] or packed or StoredInt8(old["per_tensor"])
        vars(self).update(state)


class FileNames(NamedTuple):
    """The names of a model's tensors in a file.

    Attributes
    ----------
    of : mapping of str to str
        The name in a file, by the model's name, of tensors that have others there.
    converted : mapping of str to Tensor
        What tensors become that are merged or split for the file, by name, without values.
    """

    of: Mapping[str, str]
    converted: Mapping[str, Tensor]

    def owner(self, name: str) -> str:
        """Return the name in a file of the module of a tensor."""
        return self.of.get(name, name).rpartition(".")[0]

    def matrices(self, model: nn.Module) -> Iterator[tuple[str, int]]:
        """Yield the name in a file, and the number of axes, of each matrix of floats by which inputs may be multiplied.

        Readers may make a linear layer of any of them, also of those that are one parameter of several matrices here.
        """
        plain = {f"{name}.weight": 2 for name, layer in linears(model) if not isinstance(layer, Int8Linear)}
        for each in other_matrices(model):
            shape = model.get_parameter(each.name).shape
            if each.multiplies and (len(shape) == 2 or shape[0] > 1):  # others are tokens and positions
                plain[each.name] = len(shape)
        yield from ((self.of.get(name, name), axes) for name, axes in plain.items() if name in self.of or not self.of)
        yield from ((name, each.dim()) for name, each in self.converted.items() if each.dim() > 1)


def _ignored(matrices: Iterable[tuple[str, int]], layers: Collection[str]) -> tuple[str, ...]:
    """Return targets that match the modules of these tensors, and none of the int8 layers."""
    owners: dict[str, bool] = {}
    for name, axes in matrices:
        owner, _, last = name.rpartition(".")
        several = axes > 2 and last != "weight" and not any(layer.startswith(f"{owner}.") for layer in layers)
        owners[owner or name] = several or owners.get(owner, False)
    alike: defaultdict[tuple[str, bool], list[str]] = defaultdict(list)
    for owner, several in owners.items():
        alike[re.sub(r"\d+", "#", owner), several].append(owner)
    found: list[str] = []
    for (form, several), names in alike.items():
        end = r"(\..*)?$" if several else "$"  # readers name each of several matrices
        kept = form[form[: max(form.find(".#"), 0)].rfind(".") + 1 :]  # readers put models into others
        pattern = f"(.*\\.)?{re.escape(kept)}{end}".replace(r"\#", r"\d+")
        if not (several or len(names) > _MOST_NAMES):
            found += names
        elif not any(re.match(pattern, layer) for layer in layers):
            found.append(f"re:{pattern}")
        else:
            found += [f"re:{re.escape(name)}{end}" for name in names] if several else names
    return tuple(found)


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of a model whose tensors of floats differ in them.

    Attributes
    ----------
    default : dtype
        That of all tensors that are not in `other`.
    other : mapping of str to dtype
        Those of other tensors, by their names in the file. That of the codes of a layer is the dtype of the weight that
        they stand for.
    """

    default: torch.dtype
    other: Mapping[str, torch.dtype]

    def fields(self) -> dict[str, Any]:
        """Return the JSON object."""
        names = {dtype: [name for name, own in self.other.items() if own is dtype] for dtype in self.other.values()}
        return {"default": _text(self.default)} | {_text(dtype): found for dtype, found in names.items()}

    @classmethod
    def parse(cls, source: str, fields: object) -> Self:
        """Read the JSON object; errors as `Scheme.parse`."""
        read = ConfigFields(source, "dtypes", fields)
        default = _DTYPES[read.one_of("default", [*_DTYPES])]
        other = {name: _DTYPES[key] for key in _DTYPES for name in read.targets(key, default=())}
        read.finish()
        return cls(default, other)


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Scheme:
    """The int8 layers of a model, and how they are quantized. All names are those of the file.

    Attributes
    ----------
    groups : tuple of SchemeGroup
    ignore : tuple of str
        Targets of layers that stay in floating point.
    own : bool
        Whether only skuda reads it: layers may have smoothing factors, 4-bit weights, codes of 16 bits or those of a
        `Conv1D`.
    dtypes : Dtypes or None
        The dtypes of tensors, if they differ and a reader could not know them.
    exact : bool
        Whether the model is exact; see `skuda.torch.exact.exact_`. Other readers ignore it.
    """

    groups: tuple[SchemeGroup, ...]
    ignore: tuple[str, ...] = ()
    own: bool = False
    dtypes: Dtypes | None = None
    exact: bool = False

    def renamed(self, module: Callable[[str], str]) -> Self:
        """Return the scheme with the names that a model has for modules besides those of the file."""

        def both(targets: tuple[str, ...]) -> tuple[str, ...]:
            names = (name for name in targets if not name.startswith("re:"))
            return tuple(dict.fromkeys((*targets, *map(module, names))))

        groups = tuple(replace(group, targets=both(group.targets)) for group in self.groups)
        return replace(self, groups=groups, ignore=both(self.ignore))

    def named(self, tensors: Iterable[str]) -> Self:
        """Return the scheme with the names of layers, where a file's tensors tell them, and no targets do."""
        names = tuple(name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight"))
        groups = (replace(each, targets=names) if each.stored.method else each for each in self.groups)
        return replace(self, groups=tuple(groups))

    def layers(
        self, model: nn.Module, files: Mapping[str, str] = MappingProxyType({})
    ) -> Iterator[tuple[str, nn.Module, SchemeGroup]]:
        """Yield the name, module and group of each layer that the scheme makes int8. Joined layers appear as `Part`.

        Parameters
        ----------
        model : Module
        files : mapping of str to str
            Names that patterns are about, by names of modules, if they have others in the file.

        Raises
        ------
        InvalidProblem
            For a target that is another module with parameters, is registered twice, has hooks, or is the model
            itself.
        """
        seen: set[int] = set()
        for name, module in model.named_modules(remove_duplicate=False):
            stored = files.get(name, name)
            group = self._group(name, module, stored)
            if group is None or matches(self.ignore, name, module, stored) or is_joined(module):
                continue
            if not isinstance(module, Int8Linear | Part) and not is_linear(module) and not is_conv1d(module):
                if next(module.parameters(recurse=False), None) is None:
                    continue
                _refuse(name, type(module).__name__, "be a torch.nn.Linear: add it to ignore")
            if not name:
                _refuse("the model", type(module).__name__, "be a module that contains layers, not a layer itself")
            if id(module) in seen:
                _refuse(name, "a module that is registered twice", "be registered once, or be in ignore")
            if hooked(module) or hasattr(module, "_hf_hook"):  # the second moves tensors between devices
                _refuse(name, "hooks", "have no hooks, which would be lost: remove them, or add it to ignore")
            seen.add(id(module))
            yield name, module, group

    def _group(self, name: str, module: nn.Module, stored: str) -> SchemeGroup | None:
        """Return the group with the best target: a name, then a pattern, then a class. Of equals, the first."""
        ranks = [(_matched(group.targets, name, module, stored), group) for group in self.groups]
        fitting = [(rank, group) for rank, group in ranks if rank is not None]
        return min(fitting, key=lambda pair: pair[0])[1] if fitting else None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        *,
        parts: bool = False,
        stored: Mapping[str, StoredWeight] = MappingProxyType({}),
        names: FileNames | None = None,
        dtypes: Dtypes | None = None,
    ) -> Self:
        """Describe the int8 layers of a model.

        Parameters
        ----------
        model : Module
        parts : bool
            Whether layers may be this rank's parts.
        stored : mapping of str to StoredWeight
            How the file holds the weights of layers, by name. By default as the layers do.
        names : FileNames, optional
            The names of tensors in the file. By default those of the model.
        dtypes : Dtypes, optional

        Raises
        ------
        InvalidProblem
            If there are none, or the format cannot hold one of them.
        """
        if not parts:
            check_whole("checkpoint", model)
        layers = dict(int8_layers(model))
        names = names or FileNames({}, {})
        coded = {name: names.owner(f"{name}.weight") for name in layers}
        ways: dict[tuple[ActivationScheme, StoredWeight], list[str]] = {}
        for name, layer in layers.items():
            activation = ActivationScheme.of(layer)
            if activation is None:
                _refuse(name, type(layer).__name__, "be a DynamicLinear or a StaticLinear")
            ways.setdefault((activation, stored.get(name, layer.format.stored())), []).append(coded[name])
        if not ways:
            raise InvalidProblem("checkpoint", "model", type(model).__name__, "hold int8 layers: quantize it first")
        kinds = tuple(sorted({original_of(layer) for layer in layers.values()}))
        groups = tuple(
            SchemeGroup(kinds if len(ways) == 1 else tuple(targets), activation, form)
            for (activation, form), targets in ways.items()
        )
        smooth = any(getattr(layer, "smooth", None) is not None for layer in layers.values())
        own = smooth or any(each.stored.own or each.activation.bits == 16 for each in groups) or "Conv1D" in kinds
        exact = any(getattr(part, "fused_exact", False) for part in model.modules())
        return cls(groups, _ignored(names.matrices(model), coded.values()), own=own, dtypes=dtypes, exact=exact)

    def fields(self) -> dict[str, Any]:
        """Return the `quantization_config`."""
        return {
            **({} if self.dtypes is None else {"dtypes": self.dtypes.fields()}),
            "config_groups": {
                f"group_{i}": {
                    "format": group.stored.file_format,
                    "input_activations": None if group.weights_only else group.activation.fields(),
                    "output_activations": None,
                    "targets": list(group.targets),
                    "weights": group.stored.fields(),
                }
                for i, group in enumerate(self.groups)
            },
            "format": self.groups[0].stored.file_format,
            "global_compression_ratio": None,
            "ignore": list(self.ignore),
            "kv_cache_scheme": None,
            "moe_sparsity_config": None,
            "quant_method": OWN_METHOD if self.own else METHOD,
            "quantization_status": "compressed",
            "sparsity_config": {},
            "transform_config": {},
            "version": _VERSION,
        } | ({"exact": True} if self.exact else {})

    @classmethod
    def parse(cls, source: str, fields: object, *, approximate: bool = False) -> Self:
        """Read a `quantization_config`.

        Parameters
        ----------
        source : str
            The origin, for errors.
        fields : mapping
            The JSON object.
        approximate : bool
            Whether activations that are floats in the checkpoint may have 8 bits.

        Raises
        ------
        InvalidRecord
            For any scheme but W8A8 with symmetric weights, W4A8 and, with `approximate`, weights alone. The error names
            the field.
        """
        read = ConfigFields(source, "quantization_config", fields)
        others = [kind.method for kind in stored_weights() if kind.method]
        method = read.one_of("quant_method", [METHOD, OWN_METHOD, *others])
        if method in others:
            if not approximate:
                read.refuse("quant_method", f"{method}, for floats", _FLOATS)
            stored = next(filter(None, (kind.parse(read, method) for kind in stored_weights())))
            return cls((SchemeGroup((), ActivationScheme.DYNAMIC, stored, weights_only=True),))
        own = method == OWN_METHOD
        kinds = [kind for kind in stored_weights() if (own or not kind.own) and not kind.method]
        formats = list(dict.fromkeys(name for kind in kinds for name in kind.file_formats))
        given = read.one_of("format", formats)
        read.one_of("quantization_status", ["compressed"], default="compressed")
        read.absent("kv_cache_scheme", "sparsity_config", "transform_config", "moe_sparsity_config")
        read.free("global_compression_ratio", "version")
        ignore, exact = read.targets("ignore", default=()), read.one_of("exact", [False, True], default=False)
        dtypes = read.take("dtypes", default=None)
        groups = ConfigFields(source, "config_groups", read.take("config_groups"))
        found = tuple(
            _group_of(ConfigFields(source, name, groups.take(name)), formats, given, own=own)
            for name in tuple(groups.names)
        )
        if not found:
            groups.refuse("", "no group", "hold a group of layers")
        if not approximate and any(group.weights_only for group in found):
            groups.refuse("input_activations", "null, for floats", _FLOATS)
        read.finish()
        kept = None if dtypes is None else Dtypes.parse(source, dtypes)
        return cls(found, ignore, own=own, dtypes=kept, exact=exact)


def _group_of(read: ConfigFields, formats: list[str], default: str, *, own: bool) -> SchemeGroup:
    """Read a group. Its format is one of `formats`, by default that of all groups. `own`: only skuda reads the file."""
    file_format = read.one_of("format", [*formats, None], default=None) or default
    weights = ConfigFields(read.source, f"{read.place}.weights", read.take("weights"))
    stored = next(filter(None, (kind.parse(weights, file_format) for kind in stored_weights())), None)
    if stored is None:
        read.refuse("weights", shown(weights.fields), f"be weights of the format {file_format}")
    given = read.take("input_activations")
    fields = tensor_fields("token", dynamic=True) if given is None else given
    inputs = ConfigFields(read.source, f"{read.place}.input_activations", fields)
    dynamic = inputs.one_of("dynamic", [True] if stored.dynamic else [False, True], default=False)
    inputs.one_of("strategy", ["token" if dynamic else "tensor"])
    symmetric = inputs.one_of("symmetric", [True] if dynamic else [True, False], default=True)
    bits = inputs.common(*(stored.beside if own and dynamic else ()))
    read.absent("output_activations")
    targets = read.targets("targets")
    read.finish()
    if dynamic:
        activation = ActivationScheme.WIDE if bits == 16 else ActivationScheme.DYNAMIC
    else:
        activation = ActivationScheme.STATIC if symmetric else ActivationScheme.SHIFTED
    return SchemeGroup(targets, activation, stored, given is None)


def matches(targets: tuple[str, ...], name: str, module: nn.Module, stored: str | None = None) -> bool:
    """Whether a module is a target, by its name, a pattern of its name in the file, or its class."""
    return _matched(targets, name, module, name if stored is None else stored) is not None


def _matched(targets: tuple[str, ...], name: str, module: nn.Module, stored: str) -> tuple[int, str] | None:
    """Return the rank of the best matching target, lowest first, or None."""
    classes = {kind.__name__ for kind in type(module).__mro__} | (
        {original_of(module)} if isinstance(module, Int8Linear | Part) else set()
    )
    ranks = []
    for target in targets:
        if target == name:
            ranks.append((0, target))
        elif target.startswith("re:") and re.match(target.removeprefix("re:"), stored):
            ranks.append((1, target))
        elif target in classes:
            ranks.append((2, target))
    return min(ranks, default=None)


def _refuse(name: str, had: str, rule: str) -> NoReturn:
    raise InvalidProblem("checkpoint", name, had, rule)
