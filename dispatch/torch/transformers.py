"""Int8 models of the package transformers, which loads, quantizes and saves them with its own methods.

Importing this module registers a quantizer. `from_pretrained` then loads W8A8 and W4A8 checkpoints of the
compressed-tensors format as int8 modules; without it, transformers multiplies their weights in floating point. With a
`SkudaConfig`, `from_pretrained` quantizes a checkpoint of floats. Checkpoints of other formats load as before. The
import also registers `attn_implementation="skuda"`; see `skuda.torch.attention`.

    import skuda.torch.transformers

    model = AutoModelForCausalLM.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(floats, quantization_config=SkudaConfig())
    model.save_pretrained(folder)  # a checkpoint that vLLM reads, too
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn

from skuda.registry.errors import InvalidProblem, InvalidRecord, MissingDependency
from skuda.registry.text import one_line, shown

try:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key
    from transformers.modeling_utils import PreTrainedModel
    from transformers.quantizers import HfQuantizer, auto, register_quantization_config, register_quantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ImportError as error:
    raise MissingDependency("transformers", "pip install 'skuda[transformers]'") from error

import skuda.torch.attention  # noqa: F401  it registers an attention
from skuda.torch.checkpoint import described, opened_files
from skuda.torch.exact import exact_
from skuda.torch.int4_checkpoint import PACK_QUANTIZED, warn_rounded
from skuda.torch.int8_linear import Int8Linear, StaticLinear
from skuda.torch.joined import int8_layers
from skuda.torch.quantize import Dynamic, Report, quantize_
from skuda.torch.replaceable_layers import check_flag
from skuda.torch.scheme import FORMAT, METHOD, OWN_METHOD, ActivationScheme, Scheme, SchemeGroup, matches
from skuda.torch.stored import Tensors, check_values, int8_layer

for _known in (auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AUTO_QUANTIZER_MAPPING):
    _known.pop(OWN_METHOD, None)  # that of an import that was interrupted afterwards; registering again is an error


@register_quantization_config(OWN_METHOD)
class SkudaConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The `quantization_config` of `from_pretrained` for int8 layers with dynamic scales.

    `from_pretrained` loads the whole checkpoint of floats, then quantizes layer by layer. So it needs the memory of the
    floats for a while. The report of `quantize_` is in ``model.hf_quantizer.report``.

    Parameters
    ----------
    ignore : sequence of str, optional
        Layers that stay in floating point: names, or patterns of ``re:`` and a regular expression that matches from the
        start of a name. By default the layer that returns the logits.
    weights, group_size, symmetric
        As in `skuda.torch.Dynamic`.
    exact : bool
        Whether the whole model becomes exact, the head included; see `skuda.torch.exact.exact_`. Then `ignore` must be
        left out.
    round_scales : bool
        As in `skuda.torch.load_`, for a checkpoint of 4-bit weights, whose own config says all else.
    scheme : Scheme, optional
        The scheme of an int8 checkpoint. With it, nothing is quantized.
    """

    def __init__(
        self,
        ignore: Sequence[str] | None = None,
        *,
        weights: Literal["int8", "int4"] = "int8",
        group_size: int = 128,
        symmetric: bool = False,
        exact: bool = False,
        round_scales: bool = False,
        scheme: Scheme | None = None,
    ) -> None:
        for name, flag in (("exact", exact), ("round_scales", round_scales)):
            check_flag("SkudaConfig", name, flag)
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
        self.ignore = () if exact else None if ignore is None else tuple(ignore)
        self.dynamic = Dynamic(weights=weights, group_size=group_size, symmetric=symmetric)
        self.exact = exact
        self.round_scales = round_scales
        self.scheme = scheme

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:  # noqa: FBT001, FBT002  the signature of transformers
        """Read the `quantization_config` of a checkpoint; errors as `Scheme.parse`."""
        found = cls(scheme=Scheme.parse("config.json", config_dict))
        return (found, kwargs) if return_unused_kwargs else found

    def get_loading_attributes(self) -> dict[str, Any]:
        """Return what transformers gives to the config of a checkpoint."""
        return {"round_scales": self.round_scales}

    def to_dict(self) -> dict[str, Any]:
        """Return the `quantization_config` of a checkpoint. Before quantization it has only the method."""
        return {"quant_method": OWN_METHOD} if self.scheme is None else self.scheme.fields()


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


@register_quantizer(OWN_METHOD)
class SkudaQuantizer(HfQuantizer):  # type: ignore[misc]
    """Puts int8 layers into a model: before loading an int8 checkpoint, or after loading a checkpoint of floats.

    Attributes
    ----------
    report : Report or None
        The report of `quantize_`, which a user finds in ``model.hf_quantizer.report``. It lists what `ignore` excludes,
        too. None for an int8 checkpoint.
    """

    requires_calibration = False
    is_compileable = True

    quantization_config: SkudaConfig
    report: Report | None = None
    _unread: Mapping[str, tuple[nn.Module, SchemeGroup]] = MappingProxyType({})
    """Layers of which transformers reads the tensors as they are stored."""

    @property
    def is_trainable(self) -> bool:
        """Whether adapters such as LoRA can be trained. All layers must be dynamic, which pass gradients on."""
        scheme = self.quantization_config.scheme
        return scheme is not None and all(group.activation is ActivationScheme.DYNAMIC for group in scheme.groups)

    def is_serializable(self) -> bool:
        """Return True: `save_pretrained` writes the compressed-tensors format."""
        return True

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Return the tensors for `save_pretrained`, and update the config to the model's present state."""
        self.quantization_config.scheme, tensors = described(model)
        return tensors, {}

    def param_needs_quantization(self, model: nn.Module, param_name: str, **_: Any) -> bool:
        """Whether a tensor of a file need not have the shape of the attribute: a packed weight, which checks itself."""
        owner, name = param_name.rpartition(".")[::2]
        return name == "weight" and getattr(model.get_submodule(owner), "group_size", None) is not None

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Sequence[str] | None = None, **_: Any
    ) -> None:
        if not self.pre_quantized:
            return
        scheme = self.quantization_config.scheme
        files = [Path(file) for file in checkpoint_files or ()]
        if scheme is None or not files or any(file.suffix != ".safetensors" for file in files):
            had = shown([file.name for file in files])
            raise InvalidProblem("from_pretrained", "checkpoint", had, "be safetensors files, with their config")
        with opened_files(*files) as found:
            # transformers applies the same renaming later, when it loads them.
            renamings = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)]
            tensors = found.renamed(lambda name: _name_in(model, rename_source_key(name, renamings, [])[0]))
            layers = list(scheme.layers(model))
            self._unread = {name: (module, group) for name, module, group in layers if group.int4 is not None}
            for name in self._unread:
                layer: nn.Module = nn.Module()
                for part, empty in tensors.within(name).empty().items():
                    layer.register_buffer(part, empty)
                model.set_submodule(name, layer)
            for name, module, group in layers:
                if name in self._unread:
                    continue
                # The model has no memory yet, and transformers will read the tensors. This only checks them.
                layer = int8_layer(module, group, tensors.within(name), smooth=scheme.own)
                tensors.within(name).finish()
                # transformers compares shapes, and writers store a single scale or a vector in several.
                for part, buffer in layer.named_buffers():
                    if f"{name}.{part}" in tensors:
                        setattr(layer, part, buffer.new_empty(tensors.kinds[f"{name}.{part}"][1]))
                model.set_submodule(name, layer)

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        if self.pre_quantized:
            self._make_unread(model)
            for name, layer in model.named_modules():
                if not isinstance(layer, Int8Linear):
                    continue
                layer.weight_scale = layer.weight_scale.reshape(-1, 1).expand(layer.out_features, 1).contiguous()
                if isinstance(layer, StaticLinear):
                    # transformers does not initialize tensors that are in no file, and keeps the dtype of the file.
                    layer.zero.zero_()
                    layer.input_scale = layer.input_scale.reshape(1)
                    if layer.input_zero_point is not None:
                        layer.input_zero_point = layer.input_zero_point.reshape(1).to(torch.int32)
                check_values("from_pretrained", name, layer)
            return model
        ignore = self.quantization_config.ignore
        if ignore is None:
            logits = model.get_output_embeddings()
            ignore = tuple(name for name, module in model.named_modules() if module is logits)
        config = self.quantization_config
        self.report = quantize_(model, config.dynamic, lambda module, name: not matches(ignore, name, module))
        if not self.report.converted:
            rule = "have a torch.nn.Linear that can be int8; load it without quantization_config"
            had = one_line(f"{type(model).__name__}, {self.report}", 200)
            raise InvalidProblem("from_pretrained", "model", had, rule)
        config.scheme = Scheme.of(model)
        if config.exact:
            exact_(model)
        return model

    def _make_unread(self, model: nn.Module) -> None:
        """Make the layers of 4-bit weights from stored tensors that transformers has read."""
        rounded: dict[str, float] = {}
        for name, (module, group) in self._unread.items():
            held = model.get_submodule(name)
            tensors = _held("from_pretrained", name, held)
            layer = int8_layer(
                module,
                group,
                tensors,
                rounded=partial(rounded.__setitem__, name) if self.quantization_config.round_scales else None,
                device=next((each.device for each in held.buffers()), None),
            )
            tensors.finish()
            model.set_submodule(name, layer.train(held.training))
        self._unread = {}
        warn_rounded(rounded, stacklevel=2)


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
        if any(group.int4 is not None for group in scheme.groups):
            rule = "have 8 bits: import skuda.torch.transformers before from_pretrained, or use skuda.torch.load_"
            raise InvalidRecord("convert_", "weights", "4 bits", rule)
        layers = {}
        for name, module, group in scheme.layers(model):
            tensors = _held("convert_", name, module)
            layers[name] = int8_layer(module, group, tensors)
            tensors.finish()
            check_values("convert_", name, layers[name])
        for name, layer in layers.items():
            model.set_submodule(name, layer.train(model.get_submodule(name).training))
        # It would look for codes to convert at the first call.
        hook = model.__dict__.pop("ct_decompress_hook", None)
        if hook is not None:
            hook.remove()
    now = Scheme.of(model)
    config.quantization_config = SkudaConfig(scheme=now)
    model.hf_quantizer = SkudaQuantizer(config.quantization_config, pre_quantized=True)
    model.is_quantized, model.quantization_method = True, OWN_METHOD
    return tuple(name for name, _ in int8_layers(model))


def describe_(model: nn.Module) -> None:
    """Let `save_pretrained` of the transformers models inside a model write their present int8 layers.

    A model that has a quantizer already, or no int8 layer, does not change. Unlike `convert_`, this does not prevent
    casting and training.
    """
    described: dict[int, SkudaQuantizer] = {}
    inside: set[int] = set()
    for module in model.modules():
        if not isinstance(module, PreTrainedModel):
            continue
        if isinstance(module.get_output_embeddings(), Int8Linear):
            module.config.tie_word_embeddings = False  # codes share no memory with an embedding
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
        return fields.get("format") == FORMAT
    return all(isinstance(group, Mapping) and group.get("input_activations") for group in groups.values())


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


def _name_in(model: Any, name: str) -> str:
    """Return the model's name of a tensor, if the checkpoint is of the model with or without its head."""
    prefix = f"{model.base_model_prefix}."
    if hasattr(model, model.base_model_prefix):
        return name if name.startswith(prefix) or _has(model, name) else prefix + name
    return name.removeprefix(prefix)


def _has(model: nn.Module, name: str) -> bool:
    """Whether a model has the module of a tensor of this name."""
    try:
        model.get_submodule(name.rpartition(".")[0])
    except AttributeError:
        return False
    return True
