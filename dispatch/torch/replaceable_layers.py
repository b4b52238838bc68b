"""Finds the linear layers of a model that can be replaced, and the reasons why others cannot."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown
from skuda.torch.int8_linear import Int8Linear

Filter = Callable[[nn.Module, str], bool]
"""A function of a layer and its qualified name that selects layers, like the filters of torchao."""

ALREADY = "it is already int8"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MOST_SHOWN = 3
_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel"}
"""Names instead of classes, because importing the second class takes seconds."""
_READS_WEIGHTS = (nn.TransformerEncoderLayer,)
"""Modules of torch that pass the weights of their layers to a fused kernel instead of calling the layers."""
CALL_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_STATE_HOOKS = tuple(
    f"_{what}_hooks" for what in ("state_dict", "state_dict_pre", "load_state_dict_pre", "load_state_dict_post")
)


def check_model(subject: str, model: object, filter_fn: object) -> None:
    """Raise `InvalidProblem` unless the arguments are a model, and a filter or None."""
    if not isinstance(model, nn.Module):
        raise InvalidProblem(subject, "model", shown(model), "be a torch.nn.Module")
    if filter_fn is not None and not callable(filter_fn):
        raise InvalidProblem(subject, "filter_fn", shown(filter_fn), "be a function of a module and its name, or None")


def check_count(subject: str, field: str, number: object, least: int = 0) -> None:
    """Raise `InvalidProblem` unless the number is an integer of at least `least`."""
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise InvalidProblem(subject, field, shown(number), f"be an integer, at least {least}")


def linears(model: nn.Module, filter_fn: Filter | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Yield the selected linear layers, float or int8, each once, under its first name."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, Int8Linear)) and (filter_fn is None or filter_fn(module, name)):
            yield name, module


class Obstacles:
    """Finds the reasons why layers of a model cannot be replaced.

    Parameters
    ----------
    model : torch.nn.Module
    break_ties : bool
        Whether a weight that other modules share may be quantized for one of them.
    """

    def __init__(self, model: nn.Module, *, break_ties: bool) -> None:
        self._break_ties = break_ties
        self._owners: defaultdict[object, dict[int, str]] = defaultdict(dict)
        self._inside: dict[int, str] = {}
        for name, module in model.named_modules():
            for parameter in module._parameters.values():  # noqa: SLF001  torch itself has no other way to see ties
                if parameter is not None and (memory := _memory(parameter)) is not None:
                    self._owners[memory].setdefault(id(module), name)
            for wrapper in _WRAPPERS & {base.__name__ for base in type(module).__mro__}:
                rule = f"it is inside a {wrapper}: quantize the model before it is wrapped"
                self._inside |= {id(inner): rule for inner in module.modules()}
            for adapter in _adapters(module):
                rule = "it is an adapter beside a layer, and stays as it was trained"
                self._inside |= {id(inner): rule for inner in adapter.modules()}
            if isinstance(module, _READS_WEIGHTS):
                rule = f"a {type(module).__name__} reads its weight instead of calling it"
                self._inside |= {id(inner): rule for inner in module.children()}

    def of(self, linear: nn.Module) -> str | None:
        """Return why a selected layer cannot be replaced, or None."""
        if isinstance(linear, Int8Linear):
            return ALREADY
        found = self._inside.get(id(linear)) or _own_code(linear) or _unfit(linear.weight)
        if found is not None or self._break_ties:
            return found
        others = [name for owner, name in self._owners[_memory(linear.weight)].items() if owner != id(linear)]
        return f"its weight is also that of {others[0] or 'the model'}: choose it with filter_fn" if others else None


def adopt_adapters(model: nn.Module) -> None:
    """Let the LoRA layers of peft in a model merge into their int8 base."""
    if "peft" in sys.modules and has_adapters(model):
        importlib.import_module("skuda.torch.peft").adopt_(model)  # by name, because it imports this module


def has_adapters(model: nn.Module) -> bool:
    """Whether a model has adapters of peft, such as LoRA. Everything else in it is frozen."""
    return any(True for module in model.modules() for _ in _adapters(module))


def _adapters(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the adapters that a module of peft names. Whether they require grad says nothing: they may be loaded."""
    names = getattr(type(module), "adapter_layer_names", ())
    yield from (child for name in names if isinstance(child := getattr(module, name, None), nn.Module))


def describe_saving(model: nn.Module) -> None:
    """Let `save_pretrained` of models of transformers write the scheme of their int8 layers.

    Without the scheme, a reader would take the codes for weights in floating point.
    """
    loaded = sys.modules.get("transformers.modeling_utils")
    kind = getattr(loaded, "PreTrainedModel", None)
    if kind is None or not any(isinstance(module, kind) for module in model.modules()):
        return
    try:
        bridge = importlib.import_module("skuda.torch.transformers")  # by name, because it imports this module
    except ImportError:
        text = "save_pretrained cannot write int8 layers with this version of transformers; use skuda.torch.save"
        warnings.warn(f"{text}, or: pip install 'skuda[transformers]'", stacklevel=3)
    else:
        bridge.describe_(model)


def table(title: str, of: Mapping[str, str]) -> list[str]:
    """Return a line for each value, with the first of its names."""
    names: defaultdict[str, list[str]] = defaultdict(list)
    for name, value in of.items():
        names[value].append(name or "the model")
    return [
        f"  {title} {value}: {', '.join(found[:_MOST_SHOWN])}"
        + (f" and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else "")
        for value, found in names.items()
    ]


def hooked(module: nn.Module) -> bool:
    """Whether a module has hooks."""
    return any(getattr(module, name, None) for name in CALL_HOOKS + _STATE_HOOKS)


def _own_code(linear: nn.Module) -> str | None:
    """Return what a layer does besides a product, because a replacement would not do it; or None."""
    if type(linear) is not nn.Linear and not hasattr(linear, "to_int8"):
        if nn.utils.parametrize.is_parametrized(linear):
            return "it has parametrizations: remove them first (torch.nn.utils.parametrize)"
        if isinstance(linear, nn.modules.lazy.LazyModuleMixin):
            return "it is lazy: run the model once"
        return f"it is a {type(linear).__name__}, which may do more than nn.Linear"
    if "forward" in vars(linear):
        return "its forward was replaced (as by a device map)"
    if hooked(linear):
        return "it has hooks, which would be lost"
    names = {*linear._parameters, *linear._buffers, *linear._modules}  # noqa: SLF001  as above
    if type(linear) is nn.Linear and names != {"weight", "bias"}:
        return f"it holds {', '.join(sorted(names))}, not a weight and a bias alone"
    return None


def _unfit(weight: Tensor) -> str | None:
    """Return why a weight has no int8 form here, or None."""
    if weight.is_meta:
        return "its weight is on the meta device: load it first"
    if type(weight) not in (nn.Parameter, Tensor):
        return f"its weight is a {type(weight).__name__}"
    if weight.layout is not torch.strided:
        return f"its weight is {weight.layout}, not dense"
    if weight.dtype not in _DTYPES:
        return f"its weight is {weight.dtype}, not float16, bfloat16 or float32"
    if weight.device.type not in ("cpu", "cuda"):
        return f"its weight is on {weight.device}, for which there are no kernels"
    if weight._backward_hooks:  # noqa: SLF001  torch itself has no other way to see them
        return "its weight has gradient hooks, which would be lost"
    return None


def _memory(parameter: Tensor) -> object:
    """Return a value that is equal for tied parameters, or None if it cannot be known."""
    if parameter.is_meta or parameter.layout is not torch.strided or type(parameter) is not nn.Parameter:
        return None
    return (parameter.device, parameter.data_ptr(), parameter.shape) if parameter.numel() else None
