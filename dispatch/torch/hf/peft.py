"""LoRA of the package peft on int8 layers, which stay frozen while adapters beside them are trained.

Importing this module registers the layers. `get_peft_model`, `PeftModel.from_pretrained` and `LoraConfig` then take
`DynamicLinear` layers as they take `torch.nn.Linear`, also with ``target_modules="all-linear"``.

    import skuda.torch.peft

    quantize_(model, Dynamic())
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"]))
    # ... training ...
    model.save_pretrained(folder)  # the adapters
    model = model.merge_and_unload()  # int8 layers again

An adapter from a file is refused if it was trained on a model that is folded otherwise; see `skuda.torch.fold_`. The
files of adapters of folded models say so.
"""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from skuda.registry.errors import InvalidProblem, MissingDependency

try:
    from peft.config import PeftConfigMixin
    from peft.tuners import lora, tuners_utils
except ImportError as error:
    raise MissingDependency("peft", "pip install peft") from error

from skuda.torch.convert.dequantize import float_linear
from skuda.torch.linear.dequantized_weight import CodedLayer
from skuda.torch.linear.int8_linear import DynamicLinear
from skuda.torch.models.folded import FOLDED, check_adapter, folding_of


class LoraInt8Linear(lora.Linear):  # type: ignore[misc]
    """A `DynamicLinear` with LoRA adapters.

    The base runs in int8 and passes on the gradient of its input; see `skuda.torch.frozen_linear`. `merge` adds the
    adapters to the dequantized weight in f32 and quantizes the sum, so the layer stays int8 and the result of merging
    is rounded anew. `unmerge` puts back the very codes from before. For a merged layer without that rounding, call
    `skuda.torch.dequantize_` before merging.

    Parameters
    ----------
    base_layer : DynamicLinear
    adapter_name : str
        Name of the first adapter.
    more
        As in `peft.tuners.lora.Linear`.
    """

    base_layer: nn.Module
    merged_adapters: list[str]
    _before: dict[str, Tensor | None] | None = None
    """The buffers of the base without adapters, while adapters are merged."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, **more: Any) -> None:
        super().__init__(base_layer, adapter_name, **more)
        self.fan_in_fan_out = False  # it describes weights that are stored as (K, N)

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        """Return the sizes of the base, whose class peft does not know. It would warn."""
        weight = module.get_base_layer().weight if hasattr(module, "get_base_layer") else module.weight
        return int(weight.shape[1]), int(weight.shape[0])

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:  # noqa: FBT001, FBT002  the signature of peft
        """Merge adapters into the base, which is quantized again.

        Raises
        ------
        InvalidProblem
            If a merged weight is not finite, or the base has 4-bit weights. The layer is then unchanged.
        """
        base = self.get_base_layer()
        if not isinstance(base, DynamicLinear):  # `dequantize_` has replaced it
            super().merge(safe_merge, adapter_names)
            return
        wanted = tuners_utils.check_adapters_to_merge(self, adapter_names)
        if not wanted:
            return
        if base.group_size is not None:
            rule = "have 8-bit weights, because 4 bits would lose adapters: call skuda.torch.dequantize_ before merging"
            raise InvalidProblem("merge", "base_layer", "a DynamicLinear of 4-bit weights", rule)
        merged = [*self.merged_adapters, *wanted]
        if self.merged_adapters:
            self.unmerge()  # the sum is rounded once
        owner: nn.Module = self.base_layer
        floats = float_linear(base, torch.float32)
        self.base_layer = floats
        try:
            with torch.no_grad():
                super().merge(safe_merge, merged)
            codes, scale = base.format.quantize(floats.weight)
        except Exception:
            self.merged_adapters.clear()
            raise
        finally:
            self.base_layer = owner
        self._before = {name: base._buffers[name] for name in ("weight", "weight_scale", "bias")}  # noqa: SLF001  the two are one
        bias = None if floats.bias is None else floats.bias.detach().to(base.weight_dtype)
        base._buffers.update(weight=codes, weight_scale=scale.view(-1, 1), bias=bias)  # noqa: SLF001  as above

    def unmerge(self) -> None:
        """Put back the codes from before merging."""
        base = self.get_base_layer()
        if self._before is None or not isinstance(base, DynamicLinear):
            super().unmerge()
            return
        place = base.weight_q.device
        base._buffers.update({name: held if held is None else held.to(place) for name, held in self._before.items()})  # noqa: SLF001  as above
        self._before = None
        self.merged_adapters.clear()

    def __repr__(self) -> str:
        return f"skuda.{nn.Module.__repr__(self)}"


def adopt_(model: nn.Module) -> None:
    """Let LoRA layers whose base has become a `DynamicLinear` merge into it. `quantize_` calls this."""
    for module in model.modules():
        if type(module) is lora.Linear and isinstance(module.base_layer, DynamicLinear):
            module.__class__ = LoraInt8Linear


def _adapted(target: nn.Module, adapter_name: str, **more: Any) -> LoraInt8Linear:
    """Return an int8 layer with adapters.

    Raises
    ------
    InvalidProblem
        For a layer that passes no gradients on, or whose input is not that of the original layer.
    """
    base = target.get_base_layer() if isinstance(target, tuners_utils.BaseTunerLayer) else target
    if type(base) is not DynamicLinear:
        rule = "be a DynamicLinear, which passes gradients on: quantize_ with Dynamic(), and add adapters before fuse_"
        raise InvalidProblem("LoraConfig", "target_modules", f"a {type(base).__name__}", rule)
    return LoraInt8Linear(target, adapter_name, **more)


def _registering(own: Any) -> Any:
    """Wrap ``LoraConfig.__post_init__``, because peft registers the layers of others with each config."""

    @wraps(own)
    def wrapped(config: Any) -> None:
        own(config)
        config._register_custom_module({CodedLayer: _adapted})  # noqa: SLF001  its documented way

    return wrapped


def _including(own: Any) -> Any:
    """Wrap the function of peft that finds the layers of ``all-linear``, which it knows by class.

    The function sees every config with its model, so this also refuses adapters of models that are folded otherwise,
    and to train int8 layers as a whole: they have no parameters, and peft would train nothing.
    """

    @wraps(own)
    def wrapped(config: Any, model: nn.Module) -> Any:
        base, folding = config.base_model_name_or_path, folding_of(model)
        if isinstance(base, _Base):
            check_adapter(type(config).__name__, **vars(base), folding=folding)
        config.skuda_folded = folding
        trained = tuple(getattr(config, "modules_to_save", None) or ())
        for name, module in model.named_modules():
            if name.endswith(trained) and any(isinstance(inner, CodedLayer) for inner in module.modules()):
                rule = "be in floating point: leave it out of quantize_ with filter_fn, or call dequantize_"
                raise InvalidProblem(type(config).__name__, "modules_to_save", name, rule)
        everything = isinstance(config, lora.LoraConfig) and str(config.target_modules).lower() == "all-linear"
        found = own(config, model)
        if everything:
            find = getattr(model, "get_output_embeddings", None)
            logits = find() if find else None
            names = {
                name for name, layer in model.named_modules() if type(layer) is DynamicLinear and layer is not logits
            }
            found.target_modules |= {name for name in names if not name.endswith(".base_layer")}
        return found

    return wrapped


class _Base(str):  # noqa: SLOT000  it has attributes
    """The base of an adapter that was read from a file, with its name and config for `check_adapter`."""


def _reading(own: Any) -> Any:
    """Wrap what reads the file of an adapter. The digest of a folded base is no field of peft."""

    @wraps(own)
    def wrapped(cls: Any, path_json_file: Any, **more: Any) -> Any:
        fields = own(cls, path_json_file, **more)
        base: Any = _Base(fields.get("base_model_name_or_path") or "")
        base.name, base.config = str(Path(path_json_file).parent), fields
        return {name: fields[name] for name in fields if name != FOLDED} | {"base_model_name_or_path": base}

    return wrapped


def _writing(own: Any) -> Any:
    """Wrap what returns the fields of an adapter's config for a file."""

    @wraps(own)
    def wrapped(config: Any) -> Any:
        folding = getattr(config, FOLDED, "")
        return own(config) | ({FOLDED: folding} if folding else {})

    return wrapped


def _original(function: Any) -> Any:
    """Return a function of peft without the wrapper that an import has left which was interrupted afterwards."""
    return function.__wrapped__ if function.__globals__["__name__"] == __name__ else function


_all_linear = "_maybe_include_all_linear_layers"  # it has no public name
PeftConfigMixin.from_json_file = classmethod(_reading(_original(PeftConfigMixin.from_json_file.__func__)))
PeftConfigMixin.to_dict = _writing(_original(PeftConfigMixin.to_dict))
lora.LoraConfig.__post_init__ = _registering(_original(lora.LoraConfig.__post_init__))
setattr(tuners_utils, _all_linear, _including(_original(getattr(tuners_utils, _all_linear))))
