"""Int8 models of the package transformers, which loads, quantizes and saves them with its own methods.

Importing this module registers a quantizer. `from_pretrained` then loads W8A8 and W4A8 checkpoints of the
compressed-tensors format as int8 modules; without it, transformers multiplies their weights in floating point. With a
`SkudaConfig`, `from_pretrained` quantizes a checkpoint of floats. Checkpoints of other formats load as before. The
import also registers `attn_implementation="skuda"`; see `skuda.torch.attention`.

    import skuda.torch.transformers

    model = AutoModelForCausalLM.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(floats, quantization_config=SkudaConfig())
    model.save_pretrained(folder)  # a checkpoint that vLLM reads, too

Weights of int8 layers are buffers, so that nothing trains them. ``next(model.parameters())`` therefore fails for a
module of int8 layers alone. `device`, `dtype` and `num_parameters()` of a model count them. With a device map to the
disk, floats are offloaded, and codes stay in memory. ``model.dequantize()`` does what `skuda.torch.dequantize_` does. A
layer that a checkpoint lacks, such as the head of a classifier from a language model, is a new one of floats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from skuda.registry.errors import InvalidProblem, InvalidRecord, MissingDependency
from skuda.registry.text import one_line, shown
from skuda.registry.value import expect

try:
    from transformers.modeling_utils import PreTrainedModel
    from transformers.quantizers import HfQuantizer, auto, register_quantization_config, register_quantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ImportError as error:
    raise MissingDependency("transformers", "pip install 'skuda[transformers]'") from error

import skuda.torch.attention  # noqa: F401  it registers an attention
from skuda.torch.convert.budget import Budget
from skuda.torch.convert.calibration import calibrate
from skuda.torch.convert.dequantize import dequantize_
from skuda.torch.convert.quantize import Dynamic, Report, quantize_, report_of_loaded
from skuda.torch.exact.exact import exact_
from skuda.torch.formats import INT8, Tensors
from skuda.torch.formats.grouped import PACK_QUANTIZED
from skuda.torch.formats.int4 import warn_per_row
from skuda.torch.formats.int8 import INT_QUANTIZED
from skuda.torch.formats.weight import Difference
from skuda.torch.hf.checkpoint import described, opened_files, scheme_of
from skuda.torch.hf.renaming import cast_, dtype_of, in_model, planned, renamed, untie_, without_codes
from skuda.torch.hf.scheme import METHOD, OWN_METHOD, Scheme, SchemeGroup, matches
from skuda.torch.hf.stored import check_approximate, check_values, int8_layer, warn_approximate
from skuda.torch.linear.int8_linear import Int8Linear
from skuda.torch.linear.joined import int8_layers
from skuda.torch.models.folded import describe
from skuda.torch.models.replaceable_layers import Filter, sizes_of

for _known in (auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AUTO_QUANTIZER_MAPPING):
    _known.pop(OWN_METHOD, None)  # that of an import that was interrupted afterwards; registering again is an error

_OF_FLOATS = ("ignore", "weights", "group_size", "symmetric", "activations")
"""Options that choose how floats are quantized."""
_OPTIONS = (*_OF_FLOATS, "exact", "approximate")
_MOST_ROWS = 1 << 14
"""Inputs of a layer that a calibration keeps."""


@register_quantization_config(OWN_METHOD)
class SkudaConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The `quantization_config` of `from_pretrained` for int8 layers with dynamic scales.

    `from_pretrained` loads the whole checkpoint of floats, then quantizes layer by layer. So it needs the memory of the
    floats for a while. The report of `quantize_` is in ``model.hf_quantizer.report``. A mapping such as
    ``{"quant_method": "skuda", "weights": "int4"}`` does the same.

    For a checkpoint that is quantized already, only `exact` and `approximate` apply. Others are refused, except for
    `weights` and `activations` that it has.

    Parameters
    ----------
    ignore : sequence of str, optional
        Layers that stay in floating point: names, or patterns of ``re:`` and a regular expression that matches from the
        start of a name. By default the layer that returns the logits.
    weights, group_size, symmetric, activations : optional
        As in `skuda.torch.Dynamic`.
    exact : bool, optional
        Whether the whole model becomes exact, the head included; see `skuda.torch.exact.exact_`. Then `ignore` must be
        left out. By default as the checkpoint says; one of floats does not become exact.
    approximate : str, optional
        As in `skuda.torch.load_`, for a checkpoint of other projects, whose own config says all else.
    scheme : Scheme, optional
        The scheme of an int8 checkpoint, in place of all other arguments.
    calibration : sequence of tensor or mapping, optional
        Batches of tokens of shape (B, T), or arguments of the model. The model of floats runs on them after loading, on
        the device where it was loaded, and `Dynamic` gets the calibration, with up to 16,384 inputs of each layer. It
        is not saved with the model.
    budget : Budget, optional
        As in `quantize_`.

    Raises
    ------
    InvalidProblem
        For an invalid value.
    """

    asked: Scheme | None = None
    """The scheme in the config that a user gave for a checkpoint with its own."""
    approximate: str | None = None  # those of pickles of version 0.1, which lack them
    activations: str | None = None

    def __init__(
        self,
        ignore: Sequence[str] | None = None,
        *,
        weights: str | None = None,
        group_size: int | None = None,
        symmetric: bool | None = None,
        activations: str | None = None,
        exact: bool | None = None,
        approximate: str | None = None,
        scheme: Scheme | None = None,
        calibration: Sequence[Tensor | Mapping[str, Any]] | None = None,
        budget: Budget | None = None,
    ) -> None:
        expect("SkudaConfig", "budget", budget, Budget | None, "be a Budget, or None")
        if calibration is not None and (not isinstance(calibration, list | tuple) or not calibration):
            rule = "be a list of tensors of tokens, or of mappings of arguments"
            raise InvalidProblem("SkudaConfig", "calibration", shown(calibration), rule)
        if exact is not None and not isinstance(exact, bool):
            raise InvalidProblem("SkudaConfig", "exact", shown(exact), "be True or False")
        check_approximate("SkudaConfig", approximate)
        if not (ignore is None or isinstance(ignore, (list, tuple, set, frozenset, str))):
            raise InvalidProblem("SkudaConfig", "ignore", shown(ignore), "be a list of names")
        if exact and ignore:
            raise InvalidProblem("SkudaConfig", "ignore", shown(ignore), "be left out with exact=True")
        if ignore is not None and (isinstance(ignore, str) or not all(isinstance(name, str) for name in ignore)):
            raise InvalidProblem("SkudaConfig", "ignore", shown(ignore), "be a list of names")
        for pattern in ignore or ():
            try:
                re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
            except re.error as error:
                rule = f"be names and regular expressions ({error})"
                raise InvalidProblem("SkudaConfig", "ignore", pattern, rule) from error
        self.quant_method = OWN_METHOD
        self.ignore = None if ignore is None else tuple(ignore)
        self.weights, self.group_size, self.symmetric, self.activations = weights, group_size, symmetric, activations
        self.exact, self.approximate = exact, approximate
        self.scheme, self.calibration, self.budget = scheme, calibration, budget
        _ = self.dynamic
        if scheme is not None and (self._given() or calibration or budget):
            raise InvalidProblem("SkudaConfig", "scheme", "a scheme beside other arguments", "be the only argument")

    @property
    def dynamic(self) -> Dynamic:
        """How layers of floats are quantized."""
        given = {name: value for name, value in self._given().items() if name in _OF_FLOATS[1:]}
        return Dynamic(**given)

    def _given(self) -> dict[str, Any]:
        """Return the options that differ from those of `SkudaConfig()`, as JSON has them."""
        held = {name: getattr(self, name) for name in _OPTIONS}
        given = {name: value for name, value in held.items() if value is not None}
        if self.ignore is not None:
            given["ignore"] = list(self.ignore)
        return given

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:  # noqa: FBT001, FBT002  the signature of transformers
        """Read what `to_dict` returns: the `quantization_config` of a checkpoint, or options.

        Raises
        ------
        InvalidProblem
            For options that are unknown, or have invalid values.
        InvalidRecord
            As `Scheme.parse`.
        """
        if config_dict.get("quant_method") == OWN_METHOD and not {"config_groups", "format"} & config_dict.keys():
            options = {name: value for name, value in config_dict.items() if name != "quant_method"}
            for name in options.keys() - set(_OPTIONS):
                rule = f"be left out: the options are {', '.join(_OPTIONS)}"
                raise InvalidProblem("SkudaConfig", name, shown(options[name]), rule)
            found = cls(**options)
        else:
            found = cls(scheme=Scheme.parse("config.json", config_dict))
        return (found, kwargs) if return_unused_kwargs else found

    def get_loading_attributes(self) -> dict[str, Any]:
        """Return what transformers gives to the config of a checkpoint. `check_checkpoint` then checks it."""
        asked = {} if self.scheme is None else {"asked": self.scheme}
        held = {"approximate": self.approximate, "calibration": self.calibration, "budget": self.budget}
        return self._given() | held | asked

    def check_checkpoint(self) -> None:
        """Raise `InvalidProblem` for an option that a checkpoint which is quantized already cannot take."""
        if self.scheme is None:
            rule = "describe int8 layers: to quantize floats, give it to from_pretrained, not in config.json"
            raise InvalidProblem("from_pretrained", "quantization_config", shown(self.to_dict()), rule)
        if self.asked not in (None, self.scheme):
            rule = "be that of the checkpoint's own config, or be left out"
            raise InvalidProblem("from_pretrained", "scheme", "another scheme", rule)
        held = {
            "weights": " and ".join(sorted({group.stored.name for group in self.scheme.groups})),
            "activations": " and ".join(sorted({f"int{group.activation.bits}" for group in self.scheme.groups})),
        }
        for name in (*_OF_FLOATS, "calibration", "budget"):
            value = getattr(self, name)
            if value is not None and value != held.get(name):
                kinds = f"weights of {held['weights']} and activations of {held['activations']}"
                rule = f"be left out: the checkpoint is quantized already, with {kinds}, as its config says"
                raise InvalidProblem("from_pretrained", name, shown(value), rule)

    def to_dict(self) -> dict[str, Any]:
        """Return the `quantization_config` of a checkpoint or, before quantization, the options."""
        return {"quant_method": OWN_METHOD, **self._given()} if self.scheme is None else self.scheme.fields()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SkudaConfig) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]


class _CompressedTensorsConfig:
    """Replaces transformers' own class for reading a `quantization_config`."""

    own = auto.AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD]
    own = getattr(own, "own", own)  # an import that was interrupted afterwards may have replaced it

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], *arguments: Any, **named: Any) -> Any:
        """Read W8A8 and W4A8 as a `SkudaConfig`, and any other format as before."""
        reader = SkudaConfig if _is_integer(config_dict) else cls.own
        return reader.from_dict(config_dict, *arguments, **named)


auto.AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = _CompressedTensorsConfig
_others = (kind for kind in auto.LOADING_ATTRIBUTES_CONFIG_TYPES if kind.__module__ != __name__)
auto.LOADING_ATTRIBUTES_CONFIG_TYPES = (*_others, SkudaConfig)


def _answers() -> None:
    """Let models tell device, dtype and number of parameters of int8 layers, whose weights are no parameters."""
    told: Any = PreTrainedModel
    device, dtype, count = told.device.fget, told.dtype.fget, told.num_parameters

    def asked(ask: Callable[[Any], Any], of_layer: Callable[[Any], Any]) -> property:
        @wraps(ask)
        def answer(model: Any) -> Any:
            try:
                return ask(model)
            except StopIteration:  # it has no parameter
                layer = next((layer for _, layer in int8_layers(model)), None)
                if layer is None:
                    raise
                return of_layer(layer)

        return property(answer)

    @wraps(count)
    def num_parameters(model: Any, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:  # noqa: FBT001, FBT002  the signature of transformers
        found: int = count(model, only_trainable, exclude_embeddings)
        if only_trainable:
            return found
        tensors = [each for _, layer in int8_layers(model) for each in (layer.weight, layer.bias) if each is not None]
        return found + sum(int(tensor.numel()) for tensor in tensors)

    told.device = asked(device, lambda layer: layer.weight_q.device)
    told.dtype = asked(dtype, lambda layer: layer.weight_dtype)
    told.num_parameters = num_parameters


_answers()


_merge = auto.AutoHfQuantizer.merge_quantization_configs
_merge = getattr(_merge, "__wrapped__", _merge)  # that of an import that was interrupted afterwards


@wraps(_merge)
def _merged(of_file: Any, given: Any) -> Any:
    """Let a `SkudaConfig` read checkpoints that transformers would give to other packages, as those of GPTQ."""
    if isinstance(given, SkudaConfig) and isinstance(of_file, dict) and {"config_groups", "bits"} & of_file.keys():
        of_file = SkudaConfig(scheme=Scheme.parse("config.json", of_file, approximate=given.approximate is not None))
    return _merge(of_file, given)


auto.AutoHfQuantizer.merge_quantization_configs = staticmethod(_merged)


@register_quantizer(OWN_METHOD)
class SkudaQuantizer(HfQuantizer):  # type: ignore[misc]
    """Puts int8 layers into a model: before loading an int8 checkpoint, or after loading a checkpoint of floats.

    Attributes
    ----------
    report : Report or None
        The report of `quantize_`, which a user finds in ``model.hf_quantizer.report``. It lists what `ignore` excludes,
        too. That of an int8 checkpoint compares its layers with the same layers of floats.
    """

    requires_calibration = False
    is_compileable = True

    quantization_config: SkudaConfig
    report: Report | None = None

    def __init__(self, quantization_config: SkudaConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._unread: dict[str, tuple[nn.Module, SchemeGroup]] = {}
        """Layers of which transformers reads the tensors as they are stored."""
        self._differences: dict[str, Difference] = {}
        """How far layers are from the checkpoint."""
        self._codes: tuple[str, ...] = ()
        """Tensors of int8 layers in the checkpoint."""
        self._dtypes: dict[str, torch.dtype] = {}
        """Dtypes of tensors. Those in which transformers loads them may differ, also by its version."""

    def validate_environment(self, *_: Any, **__: Any) -> None:
        """Raise `InvalidProblem` for options that a checkpoint cannot take."""
        if self.pre_quantized:
            self.quantization_config.check_checkpoint()
        elif self.quantization_config.scheme is not None:
            rule = "be left out: the checkpoint is of floats, and nothing says that it is quantized"
            raise InvalidProblem("from_pretrained", "scheme", "a scheme of int8 layers", rule)
        elif self.quantization_config.approximate is not None:
            rule = "be left out: the checkpoint is of floats, which `weights` quantizes"
            raise InvalidProblem("from_pretrained", "approximate", self.quantization_config.approximate, rule)

    @property
    def is_trainable(self) -> bool:
        """Whether adapters such as LoRA can be trained. All layers must be dynamic, which pass gradients on."""
        scheme = self.quantization_config.scheme
        return scheme is not None and all(group.activation.dynamic for group in scheme.groups)

    def is_serializable(self) -> bool:
        """Return True: `save_pretrained` writes the compressed-tensors format."""
        return True

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Return the tensors for `save_pretrained`, and update the config to the model's present state."""
        self.quantization_config.scheme, tensors = described(model)
        describe(model)
        return tensors, {}

    def param_needs_quantization(self, model: nn.Module, param_name: str, **_: Any) -> bool:
        """Whether a tensor of a file need not have the shape (N, K) of the attribute, as codes of other formats."""
        owner, name = param_name.rpartition(".")[::2]
        layer = model.get_submodule(owner)
        return name == "weight" and isinstance(layer, Int8Linear) and layer.format != INT8

    def update_weight_conversions(self, weight_conversions: list[Any], *model: Any) -> list[Any]:
        """Return the conversions of a checkpoint without those that would change codes and not their scales."""
        found: list[Any] = super().update_weight_conversions(without_codes(weight_conversions, self._codes), *model)
        return found

    def _process_model_before_weight_loading(
        self,
        model: Any,
        checkpoint_files: Sequence[str] | None = None,
        device_map: Mapping[str, Any] | str | None = None,
        **_: Any,
    ) -> None:
        if not self.pre_quantized:
            _check_one_device(device_map)
            return
        scheme = self.quantization_config.scheme
        files = [Path(file) for file in checkpoint_files or ()]
        if scheme is None or not files or any(file.suffix != ".safetensors" for file in files):
            had = shown([file.name for file in files])
            raise InvalidProblem("from_pretrained", "checkpoint", had, "be safetensors files, with their config")
        with opened_files(*files) as found:
            stored = renamed(model, found)
            tensors, self._codes = stored.tensors, stored.codes
            # transformers makes models of the dtype that the user asks for, or else of that in the config.
            default = torch.get_default_dtype()
            said = stored.dtypes(scheme.dtypes) if scheme.dtypes and scheme.dtypes.default is default else {}
            plan = planned(model, default)
            every = list(scheme.named(found.kinds).renamed(stored.module).layers(model, stored.files))
            layers = [each for each in every if not _is_new(model, each[0], tensors)] or every
            self._unread = {name: (module, group) for name, module, group in layers if group.stored.converts}
            kept: dict[str, torch.dtype] = {}
            for name, module, group in layers:
                part = tensors.within(name)
                dtype = said.get(f"{name}.weight", plan(f"{name}.weight"))
                bias = {} if module.bias is None else {"bias": said.get(f"{name}.bias", plan(f"{name}.bias"))}
                if group.stored.converts:
                    layer: nn.Module = _Stored(module, part, dtype)
                else:
                    # The model has no memory yet, and transformers will read the tensors. This only checks them.
                    note = partial(self._differences.__setitem__, name)
                    layer = int8_layer(module, group, part, smooth=scheme.own, dtype=dtype, note=note)
                    part.finish()
                for own, buffer in layer.named_buffers():
                    if own not in part:
                        continue
                    # transformers compares shapes, and writers store a single scale or a vector in several.
                    empty = part.without_values(own)
                    kept[f"{name}.{own}"] = bias.get(own, empty.dtype)
                    setattr(layer, own, buffer.new_empty(empty.shape, dtype=kept[f"{name}.{own}"]))
                model.set_submodule(name, layer)
        untie_(model, {name for name, *_ in layers})
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point() and name not in kept:
                own = plan(name) if plan(name) is not default else tensor.dtype
                kept[name] = said.get(name, own)
        self._dtypes = kept
        cast_(model, kept)

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        if self.pre_quantized:
            self._finish(model)
            return model
        _check_one_device(getattr(model, "hf_device_map", None))
        self.report = quantize_as(model, self.quantization_config)
        self._describe(model, scheme_of(model))
        return model

    def _finish(self, model: Any) -> None:
        """Check the int8 layers that transformers has read, and make the model exact if it is to be."""
        _refuse_offloaded_codes(model)
        cast_(model, self._dtypes)
        self._make_unread(model)
        _refuse_offloaded_codes(model)
        for name, layer in model.named_modules():
            if not isinstance(layer, Int8Linear):
                continue
            layer.weight_scale = layer.weight_scale.reshape(-1, 1).expand(layer.out_features, 1).contiguous()
            # transformers does not initialize tensors that are in no file, and keeps the dtype of the file.
            layer.hold(**{each: layer._buffers[each] for each in layer.activation.buffers})  # noqa: SLF001
            check_values("from_pretrained", name, layer)
        scheme = self.quantization_config.scheme
        assert scheme is not None
        self.report = report_of_loaded(model)
        warn_per_row(self.report.per_row, stacklevel=3)
        self._make_exact(model, scheme)

    def _describe(self, model: Any, scheme: Scheme) -> None:
        """Put the scheme in the place of the options, in a config of the model's own."""
        self.quantization_config = model.config.quantization_config = SkudaConfig(scheme=scheme)

    def _make_exact(self, model: Any, scheme: Scheme) -> None:
        """Make a model of int8 layers exact if the file, or the user, says so."""
        asked = self.quantization_config.exact
        exact = scheme.exact if asked is None else asked
        if exact:
            try:
                exact_(model)
            except InvalidProblem as problem:
                if asked:
                    raise
                rule = (
                    f"{problem.must}: the checkpoint says that it is exact; SkudaConfig(exact=False) loads its layers"
                )
                raise InvalidProblem("from_pretrained", problem.field, problem.had, rule) from problem
        self._describe(model, scheme_of(model))

    def dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        """Return the model with layers in floating point, as `dequantize_` makes them; see there."""
        dequantize_(model, dtype)
        return model

    def _make_unread(self, model: nn.Module) -> None:
        """Make the layers of 4-bit weights from stored tensors that transformers has read."""
        for name, (module, group) in self._unread.items():
            held: Any = model.get_submodule(name)
            device = next((each.device for each in held.state_dict().values()), None)
            if device is not None and device.type == "meta":
                _refuse_offloaded(name)
            tensors = _held("from_pretrained", name, held)
            layer = int8_layer(
                module,
                group,
                tensors,
                approximate=self.quantization_config.approximate,
                note=partial(self._differences.__setitem__, name),
                device=device,
                dtype=held.dtype,
            )
            tensors.finish()
            model.set_submodule(name, layer.train(held.training))
            if hasattr(held, "_hf_hook"):  # of a device map
                import_module("accelerate.hooks").add_hook_to_module(layer, held._hf_hook)  # noqa: SLF001  its only name
        self._unread = {}
        warn_approximate(self._differences, stacklevel=2)


def quantize_as(model: Any, config: SkudaConfig) -> Report:
    """Quantize a model of floats of transformers, in place, as `from_pretrained` does with a config."""
    ignore = config.ignore
    if ignore is None:
        logits = None if config.exact else model.get_output_embeddings()
        ignore = tuple(name for name, module in model.named_modules() if module is logits)
    chosen = partial(_chosen, tuple(ignore))
    dynamic = config.dynamic if config.calibration is None else _calibrated(model, config, chosen)
    report = quantize_(model, dynamic, chosen, budget=config.budget)
    if not report.converted:
        rule = "have a torch.nn.Linear that can be int8; load it without quantization_config"
        had = one_line(f"{type(model).__name__}, {report}", 200)
        raise InvalidProblem("from_pretrained", "model", had, rule)
    warn_per_row(report.per_row, stacklevel=4)
    if config.exact:
        exact_(model)
    return report


def _chosen(ignore: tuple[str, ...], module: nn.Module, name: str) -> bool:
    return not matches(ignore, name, module)


def _calibrated(model: nn.Module, config: SkudaConfig, chosen: Filter) -> Dynamic:
    """Return the config with the calibration of a model of floats."""
    batches = [each if isinstance(each, Mapping) else {"input_ids": each} for each in config.calibration or ()]
    tokens = sum(max(each.numel() for each in batch.values() if isinstance(each, Tensor)) for batch in batches)
    device = next(model.parameters()).device
    with calibrate(model, chosen, rows=min(tokens, _MOST_ROWS)) as calibration:
        for batch in batches:
            model(**{name: each.to(device) if isinstance(each, Tensor) else each for name, each in batch.items()})
    return replace(config.dynamic, calibration=calibration)


def convert_(model: Any) -> tuple[str, ...]:
    """Give int8 layers to a model that transformers loaded from a W8A8 checkpoint.

    It is for a model that was loaded before this module was imported. Transformers keeps the codes until the first call
    of the model, and then converts them to floating point; both states work. For a model with int8 layers, such as
    `skuda.torch.quantize_` makes, only `save_pretrained` changes.

    Parameters
    ----------
    model : PreTrainedModel
        The model, changed in place.

    Returns
    -------
    tuple of str
        Names of the int8 layers.

    Raises
    ------
    InvalidProblem
        If the model has no int8 layers, or its weights have changed since it was loaded.
    InvalidRecord
        For an unsupported scheme.
    """
    config = getattr(model, "config", None)
    if not isinstance(model, nn.Module) or config is None:
        raise InvalidProblem("convert_", "model", shown(type(model)), "be a model of transformers")
    described = getattr(config, "quantization_config", None)
    if described is not None and not isinstance(described, SkudaConfig):
        fields = dict(described if isinstance(described, Mapping) else described.to_dict())
        # Dropped, because the dtype of the weights shows whether they are codes.
        fields.pop("quantization_status", None)
        scheme = Scheme.parse("convert_", json.loads(json.dumps(fields)))
        if any(group.stored.converts for group in scheme.groups):
            rule = "have 8 bits: import skuda.torch.transformers before from_pretrained, or use skuda.torch.load_"
            raise InvalidRecord("convert_", "weights", "4 bits", rule)
        layers = {}
        scheme, files, said = in_model(model, scheme)
        plan = planned(model, dtype_of(model))
        for name, module, group in scheme.layers(model, files):
            tensors = _held("convert_", name, module)
            dtype = said.get(f"{name}.weight", plan(f"{name}.weight"))
            layers[name] = int8_layer(module, group, tensors, dtype=dtype)
            tensors.finish()
            check_values("convert_", name, layers[name])
        for name, tensor in model.state_dict().items():
            other = name.rpartition(".")[0] not in layers and said.get(name, tensor.dtype) is not tensor.dtype
            if other and tensor.is_floating_point():
                rule = f"be {said[name]}, as in the file: import skuda.torch.transformers before from_pretrained"
                raise InvalidProblem("convert_", name, str(tensor.dtype), rule)
        for name, layer in layers.items():
            model.set_submodule(name, layer.train(model.get_submodule(name).training))
        # It would look for codes to convert at the first call.
        hook = model.__dict__.pop("ct_decompress_hook", None)
        if hook is not None:
            hook.remove()
    now = scheme_of(model)
    config.quantization_config = SkudaConfig(scheme=now)
    model.hf_quantizer = SkudaQuantizer(config.quantization_config, pre_quantized=True)
    model.is_quantized, model.quantization_method = True, OWN_METHOD
    return tuple(name for name, _ in int8_layers(model))


def describe_(model: nn.Module) -> None:
    """Let `save_pretrained` of the transformers models inside a model write their present int8 layers.

    A model that has a quantizer already, or no int8 layer, does not change. Unlike `convert_`, this does not prevent
    casting and training.
    """
    untie_(model)
    described: dict[int, SkudaQuantizer] = {}
    inside: set[int] = set()
    for module in model.modules():
        if not isinstance(module, PreTrainedModel):
            continue
        if id(module) not in inside:
            # The config of the outer model also describes inner models that have their own config.
            inside |= {id(part) for part in module.modules()}
            int8 = any(isinstance(part, Int8Linear) for part in module.modules())
            if int8 and getattr(module, "hf_quantizer", None) is None:
                quantizer = SkudaQuantizer(SkudaConfig(), pre_quantized=True)
                module.config.quantization_config = quantizer.quantization_config
                described[id(module.config)] = quantizer
        if id(module.config) in described:
            module.hf_quantizer = described[id(module.config)]


def forget_(model: nn.Module) -> None:
    """Let `save_pretrained` of the transformers models inside a model write floats again."""
    for module in model.modules():
        quantizer = getattr(module, "hf_quantizer", None)
        if isinstance(module, PreTrainedModel) and isinstance(quantizer, SkudaQuantizer):
            quantizer.remove_quantization_config(module)


def _is_integer(fields: Mapping[str, Any]) -> bool:
    """Whether a config of compressed-tensors quantizes weights and activations to integers."""
    groups = fields.get("config_groups")
    if fields.get("format") != PACK_QUANTIZED or not isinstance(groups, Mapping):
        return fields.get("format") == INT_QUANTIZED
    return all(isinstance(group, Mapping) and group.get("input_activations") for group in groups.values())


def _is_new(model: Any, name: str, tensors: Tensors) -> bool:
    """Whether a layer was not in the model that the checkpoint is of, as a classifier's. It stays as it is initialized.

    The model's own class has no such layer, and none lacks in a row of layers of which the checkpoint has others.
    """
    if type(model).__name__ in (model.config.architectures or ()):
        return False
    numbered = re.compile(re.sub("[0-9]+", "[0-9]+", re.escape(name)) + r"\.weight_scale")
    return not any(found.startswith(f"{name}.") or numbered.fullmatch(found) for found in tensors.kinds)


def _check_one_device(device_map: Mapping[str, Any] | str | None) -> None:
    """Refuse a map to several places for floats that are to be quantized. Their layers cannot be replaced then."""
    places = set(map(str, device_map.values())) if isinstance(device_map, Mapping) else set()
    if len(places) > 1 or "disk" in places:
        rule = "be one device: quantize and save the model there, and load what it saved with this map"
        raise InvalidProblem("from_pretrained", "device_map", ", ".join(sorted(places)), rule)


def _refuse_offloaded_codes(model: nn.Module) -> None:
    """Refuse int8 layers without codes in memory. Reading the codes mends what a device map has put in their place."""
    for name, layer in model.named_modules():
        if isinstance(layer, Int8Linear) and layer.weight_q.is_meta:
            _refuse_offloaded(name)


def _refuse_offloaded(name: str) -> NoReturn:
    rule = "be False: the codes of int8 layers are buffers, and stay in memory"
    raise InvalidProblem("from_pretrained", "offload_buffers", f"True, for {name}", rule)


def _held(source: str, name: str, module: nn.Module) -> Tensors:
    """Return the tensors of a layer as they are stored. The weight becomes codes."""
    held = {part: tensor.detach() for part, tensor in module.state_dict().items()}
    weight, scale = held.get("weight"), held.get("weight_scale")
    if weight is not None and scale is not None and weight.is_floating_point():
        codes = (weight.float() / scale.float()).round().clamp(-128, 127)
        if not torch.equal((codes * scale.float()).to(weight.dtype), weight):
            raise InvalidProblem(
                "convert_", f"{name}.weight", "other numbers", "be codes times weight_scale, unchanged"
            )
        held["weight"] = codes.to(torch.int8)
    kinds = {part: (tensor.dtype, tuple(tensor.shape)) for part, tensor in held.items()}
    return Tensors(f"{source}, layer {name}", kinds, held.__getitem__)


class _Stored(nn.Module):
    """Holds the tensors of a layer of 4-bit weights as they are stored, while transformers reads them.

    Models read the sizes, the weight and the bias of their layers to initialize them.
    """

    def __init__(self, module: nn.Module, tensors: Tensors, dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features, self.in_features = sizes_of(module)
        self.dtype = dtype
        self.register_buffer("weight", torch.empty(0, self.in_features, device="meta"), persistent=False)
        self.register_buffer("bias", None)
        for part, empty in tensors.empty().items():
            self.register_buffer(part, empty)
