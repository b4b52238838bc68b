"""Finds the linear layers of a model that can be replaced, and the reasons why others cannot."""

from __future__ import annotations

import inspect
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown
from skuda.torch.linear.int8_linear import Int8Linear
from skuda.torch.models.source import CALL_HOOKS, linear_subclass

Filter = Callable[[nn.Module, str], bool]
"""A function of a layer and its qualified name that selects layers, like the filters of torchao."""

ALREADY = "it is already int8"
NOT_SELECTED = "it is not selected"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MOST_SHOWN = 3
_OF_TORCH = frozenset(vars(nn.Linear(1, 1, device="meta")))
"""The attributes of every layer."""
_CARRIED, _ORIGINAL = "_carried", "original"
"""Attributes of a replacement: the names of those that users had set on the original, and the class of the original."""
_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel"}
"""Names instead of classes, because importing the second class takes seconds."""
_READS_WEIGHTS = (nn.TransformerEncoderLayer,)
"""Modules of torch that pass the weights of their layers to a fused kernel instead of calling the layers."""
_TABLES = (nn.Embedding, nn.EmbeddingBag)
_CONVOLUTIONS = nn.modules.conv._ConvNd  # noqa: SLF001  torch has no public name for all of them
_STATE_HOOKS = tuple(
    f"_{what}_hooks" for what in ("state_dict", "state_dict_pre", "load_state_dict_pre", "load_state_dict_post")
)


def check_model(subject: str, model: object, filter_fn: object) -> None:
    """Raise `InvalidProblem` unless the arguments are a model, and a filter or None."""
    if not isinstance(model, nn.Module):
        raise InvalidProblem(subject, "model", shown(model), "be a torch.nn.Module")
    if filter_fn is not None and not _takes_two(filter_fn):
        raise InvalidProblem(subject, "filter_fn", shown(filter_fn), "be a function of a module and its name, or None")


def _takes_two(function: object) -> bool:
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(None, "")
    except TypeError:
        return False
    except ValueError:  # it is written in C and does not say
        pass
    return True


def check_count(subject: str, field: str, number: object, least: int = 0, below: float = math.inf) -> None:
    """Raise `InvalidProblem` unless the number is an integer in [least, below)."""
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise InvalidProblem(subject, field, shown(number), f"be an integer, at least {least}")
    if number >= below:
        raise InvalidProblem(subject, field, shown(number), f"be below {below}")


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is the linear layer of GPT-2 in transformers, whose weight has the shape (K, N)."""
    # Without an import: if nobody has imported transformers, no module is one.
    return type(module) is getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)


def is_linear(module: nn.Module) -> bool:
    """Whether this is an `nn.Linear`, or of a subclass that is proven to compute the same."""
    return isinstance(module, nn.Linear) and (type(module) is nn.Linear or linear_subclass(module) is None)


def sizes_of(layer: Any) -> tuple[int, int]:
    """Return the numbers of output and input channels of a linear layer of any kind."""
    return (layer.nf, layer.nx) if is_conv1d(layer) else (layer.out_features, layer.in_features)


def as_linear(layer: Any) -> nn.Linear:
    """Return a `Conv1D` as a new `nn.Linear` with a dense weight of shape (N, K), and any other layer itself.

    One of a subclass that computes the same is returned as a new `nn.Linear` with its parameters.
    """
    conv1d = is_conv1d(layer)
    if not conv1d and (type(layer) is nn.Linear or not is_linear(layer)):
        found: nn.Linear = layer
        return found
    n, k = sizes_of(layer)
    linear = nn.Linear(k, n, device="meta")
    weight = layer.weight
    if conv1d:
        weight = nn.Parameter(weight.detach().t().contiguous(), requires_grad=weight.requires_grad)
    linear.weight, linear.bias = weight, layer.bias
    vars(linear).update(_own_attributes(layer))
    return linear.train(layer.training)


def original_of(layer: nn.Module) -> str:
    """Return the name of the class that a linear layer had in floating point: ``Linear`` or ``Conv1D``."""
    return "Conv1D" if is_conv1d(layer) else getattr(layer, _ORIGINAL, "Linear")


def carry(layer: nn.Module, new: nn.Module) -> None:
    """Give the replacement of a layer the attributes that users have set on the layer.

    Raises
    ------
    InvalidProblem
        If the replacement itself has an attribute of such a name.
    """
    own = _own_attributes(layer)
    for key in own:
        if key != _ORIGINAL and hasattr(new, key):
            kind = type(new).__name__
            raise InvalidProblem(kind, key, "an attribute of the layer", f"have another name: {kind} needs this one")
    if own:
        vars(new).update(own, **{_CARRIED: tuple(own)})


def _own_attributes(layer: nn.Module) -> dict[str, Any]:
    """Return the attributes that users have set on a layer.

    Those of a layer of another class may belong to the class, so only those that it was given by `carry` count.
    """
    held = vars(layer)
    if is_conv1d(layer):
        own = {key: held[key] for key in held if key not in _OF_TORCH | {"nf", "nx"}}
        return own | {_ORIGINAL: original_of(layer)}
    if is_linear(layer):
        return {key: held[key] for key in held if key not in _OF_TORCH}
    return {key: held[key] for key in (*held.get(_CARRIED, ()), _ORIGINAL) if key in held}


def linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the linear layers, float or int8, each once, under its first name."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, Int8Linear)) or is_conv1d(module):
            yield name, module


def selects(subject: str, filter_fn: Filter | None, module: nn.Module, name: str) -> bool:
    """Whether a filter selects a module. Without a filter, all are selected.

    Raises
    ------
    InvalidProblem
        If the filter returns anything but True or False.
    """
    found: object = True if filter_fn is None else filter_fn(module, name)
    if not isinstance(found, bool):
        rule = "return True or False: put bool(...) around what it returns"
        raise InvalidProblem(subject, "filter_fn", f"{shown(found)} for {name or 'the model'}", rule)
    return found


class Matrix(NamedTuple):
    """A parameter of two or more axes that belongs to no linear layer.

    Attributes
    ----------
    name, owner : str
        Names of the parameter and of its module.
    module : Module
        The module.
    reason : str
        Why it stays in floating point.
    multiplies : bool
        Whether inputs may be multiplied by it. False for tables and norms.
    """

    name: str
    owner: str
    module: nn.Module
    reason: str
    multiplies: bool


def other_matrices(model: nn.Module) -> Iterator[Matrix]:
    """Yield the parameters of floats with two or more axes outside of the linear layers, each once."""
    seen: set[int] = set()
    for _, layer in linears(model):
        seen |= {id(inner) for inner in layer.modules()}
    for owner, module in model.named_modules():
        if id(module) in seen:
            continue
        for key, parameter in module._parameters.items():  # noqa: SLF001  torch has no other way to skip children
            if parameter is None or id(parameter) in seen or not parameter.is_floating_point():
                continue
            lazy = nn.parameter.is_lazy(parameter)
            if lazy or parameter.dim() > 1:
                seen.add(id(parameter))
                reason, multiplies = ("it is lazy: run the model once", True) if lazy else _use_of(module, parameter)
                yield Matrix(f"{owner}.{key}" if owner else key, owner, module, reason, multiplies)


def _use_of(module: nn.Module, parameter: Tensor) -> tuple[str, bool]:
    """Return why a module's parameter stays in floating point, and whether inputs may be multiplied by it."""
    kind = type(module).__name__
    if isinstance(module, _TABLES):
        return f"it is a table, whose rows {kind} looks up", False
    if "Norm" in kind:
        return f"{kind} scales elements by it", False
    if isinstance(module, _CONVOLUTIONS):
        return f"it belongs to {kind}, which has no int8 form", True
    if isinstance(module, nn.MultiheadAttention):
        return f"{kind} reads it without calling a layer: use an attention of nn.Linear layers", True
    if parameter.dim() > 2:
        many = "if these are several matrices, such as experts, give each an nn.Linear"
        return f"it has {parameter.dim()} axes in {kind}: {many}", True
    return f"{kind} is no linear layer: if inputs are multiplied by it, use an nn.Linear", True


def bytes_of(module: nn.Module) -> int:
    """Return the memory of a module's parameters and buffers. Memory with several names counts once."""
    sizes: dict[object, int] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        coo = tensor.layout is torch.sparse_coo
        parts = (tensor._indices(), tensor._values()) if coo else (tensor,)  # noqa: SLF001  the public ones coalesce
        sizes[_span(tensor) or id(tensor)] = sum(part.nbytes for part in parts)
    return sum(sizes.values())


class ReplacementChecks:
    """Finds the reasons why layers of a model cannot be replaced.

    Parameters
    ----------
    model : torch.nn.Module
    break_ties : bool
        Whether a weight that other modules share may be quantized for one of them.
    """

    def __init__(self, model: nn.Module, *, break_ties: bool) -> None:
        self._break_ties = break_ties
        self._owners: dict[_Span, dict[int, str]] = {}
        self._inside: dict[int, str] = {}
        found: list[tuple[_Span, int, str]] = []
        for name, module in model.named_modules():
            held = module._parameters.values()  # noqa: SLF001  torch itself has no other way to see ties
            spans = (_span(each) for each in held if each is not None)
            found += [(span, id(module), name) for span in spans if span is not None]
            for wrapper in _WRAPPERS & {base.__name__ for base in type(module).__mro__}:
                rule = f"it is inside a {wrapper}: quantize the model before it is wrapped"
                self._inside |= {id(inner): rule for inner in module.modules()}
            for adapter in _adapters(module):
                rule = "it is an adapter beside a layer, and stays as it was trained"
                self._inside |= {id(inner): rule for inner in adapter.modules()}
            if isinstance(module, _READS_WEIGHTS):
                rule = f"a {type(module).__name__} reads its weight instead of calling it"
                self._inside |= {id(inner): rule for inner in module.children()}
        end = _Span("", 0, 0)
        tied: dict[int, str] = {}
        for span, owner, name in sorted(found, key=lambda one: one[0]):
            if span.device != end.device or span.start >= end.stop:
                end, tied = span, {}
            end = max(end, span, key=lambda one: one.stop)
            tied.setdefault(owner, name)
            self._owners[span] = tied

    def of(self, linear: nn.Module) -> str | None:
        """Return why a selected layer cannot be replaced, or None."""
        if isinstance(linear, Int8Linear):
            return ALREADY
        found = self._inside.get(id(linear)) or _own_code(linear) or _unfit(linear)
        if found is not None or self._break_ties:
            return found
        span = _span(linear.weight)
        others = [name for owner, name in self._owners.get(span, {}).items() if owner != id(linear)] if span else []
        return f"its weight is also that of {others[0] or 'the model'}: choose it with filter_fn" if others else None


CHANGED: dict[str, Callable[[nn.Module, bool], object]] = {}
"""What is called when layers of a model have become others, by package: with the model, and whether they are int8."""


def changed(model: nn.Module, *, int8: bool) -> None:
    """Tell those in `CHANGED` that layers of a model have become others."""
    for tell in CHANGED.values():
        tell(model, int8)


def has_adapters(model: nn.Module) -> bool:
    """Whether a model has adapters of peft, such as LoRA. Everything else in it is frozen."""
    return any(True for module in model.modules() for _ in _adapters(module))


def check_no_adapters(op: str, name: str, model: nn.Module) -> None:
    """Raise `InvalidProblem` for a model with adapters of peft."""
    if has_adapters(model):
        rule = "have none: merge them into the layers first, as merge_and_unload of peft does"
        raise InvalidProblem(op, name, "adapters of peft", rule)


def _adapters(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the adapters that a module of peft names. Whether they require grad says nothing: they may be loaded."""
    names = getattr(type(module), "adapter_layer_names", ())
    yield from (child for name in names if isinstance(child := getattr(module, name, None), nn.Module))


def is_of_transformers(module: object) -> bool:
    """Whether this is a model of transformers."""
    # Without an import, as in `is_conv1d`.
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return kind is not None and isinstance(module, kind)


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


def _own_code(linear: Any) -> str | None:
    """Return what a layer does besides a product, because a replacement would not do it; or None."""
    plain = is_linear(linear) or is_conv1d(linear)
    if not plain and not hasattr(linear, "to_int8"):
        if nn.utils.parametrize.is_parametrized(linear):
            return "it has parametrizations: remove them first (torch.nn.utils.parametrize)"
        if isinstance(linear, nn.modules.lazy.LazyModuleMixin):
            return "it is lazy: run the model once"
        return f"it is a {type(linear).__name__}, {linear_subclass(linear)}"
    if "forward" in vars(linear):
        return "its forward was replaced (as by a device map)"
    if vars(linear).get("_compiled_call_impl") is not None:
        return "it is compiled, which would be lost: compile it after it is replaced"
    if hooked(linear):
        return "it has hooks, which would be lost"
    names = {*linear._parameters, *linear._buffers, *linear._modules}  # noqa: SLF001  as above
    if plain and names != {"weight", "bias"}:
        return f"it holds {', '.join(sorted(names))}, not a weight and a bias alone"
    return None


def _unfit(linear: Any) -> str | None:
    """Return why a layer's parameters have no int8 form here, or None."""
    weight = linear.weight
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
    for name, tensor in (("weight", weight), ("bias", linear.bias)):
        # Torch itself has no other way to see the hooks of a tensor.
        if getattr(tensor, "_backward_hooks", None) or getattr(tensor, "_post_accumulate_grad_hooks", None):
            return f"its {name} has gradient hooks, which would be lost: remove them"
    return None


class _Span(NamedTuple):
    """The memory from the first byte of a tensor to the end of its last element."""

    device: str
    start: int
    stop: int


def _span(tensor: Tensor) -> _Span | None:
    """Return the memory of a tensor, or None if it has none or cannot be known."""
    plain = type(tensor) in (nn.Parameter, Tensor) and tensor.layout is torch.strided and not tensor.is_meta
    if not plain or not tensor.numel():
        return None
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return _Span(str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size())
