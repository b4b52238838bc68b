"""`fuse_`: fewer launches for a model of int8 layers, by joined products, and norms and gates that write codes."""

from __future__ import annotations

import functools
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from skuda.torch.fuse.fused_modules import (
    PROPAGATE,
    AttentionForm,
    Fused,
    FusedAttention,
    FusedDecoderLayer,
    FusedGatedMLP,
    LayerForm,
    MLPForm,
    NormForm,
    fused_class,
)
from skuda.torch.linear.int8_linear import DynamicLinear, Int8Linear
from skuda.torch.linear.joined import JoinedLinear, Part
from skuda.torch.models.replaceable_layers import check_model, table
from skuda.torch.models.source import Forward, NotProven

_QKV = ("q_proj", "k_proj", "v_proj")
_GATE_UP = ("gate_proj", "up_proj")
_JOINED_QKV, _JOINED_GATE_UP = "qkv_proj", "gate_up_proj"
_CALLED = r"self\.(?P<{}>\w+)\(x\)"
_ACT = r"(?P<act>[\w.]+)\({}(?:, approximate='(?P<form>\w+)')?\)"
_APART = {"gate": _CALLED.format("gate"), "up": _CALLED.format("up")}
_CHUNKS = r"\.chunk\(2, (?:dim=)?-1\)"
_HALVES = {
    "gate": rf"(?P<halves>{_CALLED.format('gate_up')}{_CHUNKS})\[0\]",
    "up": rf"self\.\w+\(x\){_CHUNKS}\[1\]",
}
_GATED = tuple(
    re.compile(rf"self\.(?P<down>\w+)\({form.format(act=_ACT.format(parts['gate']), up=parts['up'])}\)")
    for form in (r"{act} \* {up}", r"{up} \* {act}")
    for parts in (_APART, _HALVES)
)
"""The forms of a gated MLP, with layers of any names. A joined layer is read once, so both halves are its."""
_RMS_NORM = (
    "self.weight * (x.to(torch.float32) * torch.rsqrt("
    "x.to(torch.float32).pow(2).mean(-1, keepdim=True) + self.{eps})).to(x.dtype)"
)
LAYER = re.compile(
    r"(?P<sum>x \+ self\.(?P<attention>\w+)\((?:(?P<keyword>\w+)=)?self\.(?P<first>\w+)\(x\)(?P<rest>[^()]*)\)"
    r"(?P<index>\[0\])?) \+ self\.(?P<mlp>\w+)\(self\.(?P<second>\w+)\((?P=sum)\)\)"
)
"""The form of a decoder layer."""
_CURVES: dict[object, tuple[str, dict[str, str]]] = {
    "silu": ("silu_mul_quantize", {}),
    "none": ("gelu_mul_quantize", {"approximation": "erf"}),
    "tanh": ("gelu_mul_quantize", {"approximation": "tanh"}),
}


@dataclass(frozen=True)
class Fusion:
    """The report of `fuse_`.

    Attributes
    ----------
    fused : dict
        The change, by the name of the module.
    left : dict
        Why a module did not change, by its name.
    """

    fused: Mapping[str, str] = field(default_factory=dict)
    left: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        texts = [("fused", text) for text in self.fused.values()] + [("left", text) for text in self.left.values()]
        lines = [f"{count} x {word}: {text}" for (word, text), count in Counter(texts).items()]
        return "\n".join(lines) or "nothing to fuse: no module holds int8 layers that belong together"


def fuse_(model: nn.Module) -> Fusion:
    """Replace known structures of dynamic int8 layers, in place, by modules that need fewer launches.

    - An attention with ``q_proj``, ``k_proj`` and ``v_proj``, or with any three layers that take its input and another
      one: one quantization of the input and one product. With `attn_implementation="skuda"`, one op does norms and rope
      of the heads and writes the cache.
    - A gated MLP, ``down(act(gate(x)) * up(x))`` with any names, or with one layer for gates and ups, with SiLU or
      GELU: one product, a gated activation that writes codes, and the last product.
    - A decoder layer of both, ``h = x + attention(norm(x), ...)`` and ``h + mlp(norm(h))``, with RMSNorms or
      LayerNorms: the norms write codes, and the second norm adds the residual.

    A structure is checked in the source of ``forward``. If the check of a module with the names of transformers fails,
    the module does not change, and a `UserWarning` says why. A module with hooks does not change, either.
    `skuda.torch.fuse.fused_modules` says what the new modules compute, and what happens if they get hooks or other
    children later. `fuse_graph` finds more structures, in compiled graphs. The names in ``state_dict`` do not change: a
    fused model can be saved, and can load checkpoints of fused and unfused models. Its tensors are views of joined
    tensors.

    Parameters
    ----------
    model : Module
        A model after `quantize_`. If the model is itself such a structure, its class changes.

    Returns
    -------
    Fusion
        The changes, and the modules that did not change.

    Raises
    ------
    InvalidProblem
        If `model` is not a module.
    """
    check_model("fuse_", model, None)
    fused: dict[str, str] = {}
    left: dict[str, str] = {}
    missed: dict[str, str] = {}
    forms = {name: become for read in ATTENTION_FORMS.values() for name, become in read(model).items()}
    held = Counter(id(child) for module in model.modules() for _, child in module.named_children())
    for fits, fuse in _RULES:
        for name, module in list(model.named_modules()):
            if isinstance(module, (Fused, nn.ModuleList, nn.Sequential)):
                continue
            if not any(isinstance(part, Int8Linear) for part in module.modules()) or not fits(module):
                continue
            try:
                fused[name] = fuse(module, held)
            except NotProven as reason:
                left[name] = str(reason)
                if fuse is not _fuse_layer or _has_norm(module):
                    missed[name] = str(reason)
    _turn(model, forms, fused, left)
    for name, module in model.named_modules():
        loose = [key for key, child in module.named_children() if isinstance(child, DynamicLinear)]
        if len(loose) > 1 and not isinstance(module, Fused) and name not in left:
            left[name] = f"{', '.join(loose)} are not part of a known structure"
    if missed:
        warnings.warn("\n".join(["fuse_ left some modules as they were:", *table("because", missed)]), stacklevel=2)
    return Fusion(fused, left)


AttentionForms = dict[str, Callable[[nn.Module], str]]
"""Functions that change fused attentions further, and say how, by the name of the module."""
ATTENTION_FORMS: dict[str, Callable[[nn.Module], AttentionForms]] = {}
"""What reads the attentions of a model before they are fused, by the name of the implementation."""


def _turn(
    model: nn.Module, forms: Mapping[str, Callable[[nn.Module], str]], fused: dict[str, str], left: dict[str, str]
) -> None:
    """Change fused attentions as `forms` says, and report it."""
    for name, become in forms.items():
        module = model.get_submodule(name)
        if isinstance(module, FusedAttention):
            try:
                fused[name] = become(module)
            except NotProven as reason:
                left[name] = str(reason)


def _has_norm(module: nn.Module) -> bool:
    """Whether a child is a norm by its name or class. That proves nothing, but only a warning depends on it."""
    return any("norm" in f"{name} {type(child).__name__}".lower() for name, child in module.named_children())


def _is_attention(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in _QKV) or bool(_projections(module))


def _projections(module: nn.Module) -> tuple[str, ...]:
    """Return the dynamic layers that take the input of a module, if there are three and another one."""
    try:
        names = Forward(module).projects()
    except NotProven:
        return ()
    dynamic = [name for name, child in module.named_children() if type(child) is DynamicLinear]
    return names if len(names) == 3 and len(dynamic) > 3 and set(names) < set(dynamic) else ()


def _fuse_attention(module: nn.Module, held: Counter[int]) -> str:
    forward = Forward(module)
    names = _QKV if all(hasattr(module, name) for name in _QKV) else _projections(module)
    layers = _layers(module, names, held)
    forward.only_projects(names)
    _join(module, names, layers, _JOINED_QKV)
    become(module, FusedAttention, AttentionForm(forward.input, _JOINED_QKV, names))
    return "q, k and v are one product"


def _is_mlp(module: nn.Module) -> bool:
    if all(hasattr(module, name) for name in _GATE_UP) or hasattr(module, _JOINED_GATE_UP):
        return True
    try:
        return _gated(module) is not None
    except NotProven:
        return False


def _gated(module: nn.Module) -> re.Match[str] | None:
    """Return the names of the parts of a gated MLP, or None for another module; errors as `Forward.expression`."""
    expression = Forward(module).expression()
    return next(filter(None, (form.fullmatch(expression) for form in _GATED)), None)


def gated_form(module: nn.Module) -> MLPForm:
    """Return the form of a gated MLP. Its layers are not joined: the parts are gates and ups, or one layer of both.

    Raises
    ------
    NotProven
        For another module.
    """
    found = _gated(module)
    if found is None:
        raise NotProven("its forward is not a known form of a gated MLP")
    named = found.groupdict()
    act = named["act"].removeprefix("self.") if named["act"].startswith("self.") else ""
    if act and named["form"]:
        raise NotProven(f"it calls {act} with more than its input")
    curve = _curve(module, act) if act else _curve_of(Forward(module).resolve(named["act"]), named["form"])
    if curve is None:
        raise NotProven(f"its activation, {named['act']}, is neither SiLU nor GELU")
    parts = (named["gate_up"],) if "gate_up" in named else (named["gate"], named["up"])
    return MLPForm("", named["down"], *_CURVES[curve], parts, act)


def _fuse_mlp(module: nn.Module, held: Counter[int]) -> str:
    form = gated_form(module)
    layers = _layers(module, (*form.parts, form.down), held)
    split = len(form.parts) > 1
    if layers[0].out_features != (1 if split else 2) * layers[-1].in_features:
        raise NotProven(f"{form.parts[0]} and {form.down} do not fit")
    if split:
        _join(module, form.parts, layers[:-1], _JOINED_GATE_UP)
        joined = form._replace(joined=_JOINED_GATE_UP)
    else:
        joined = form._replace(joined=form.parts[0], parts=())
    become(module, FusedGatedMLP, joined._replace(codes=layers[-1].activation.codes))
    if layers[-1].nonfinite is not None:
        cast("Fused", module).propagate()
    return "gate and up are one product, the gated activation writes codes"


def _fuse_layer(module: nn.Module, _held: Counter[int]) -> str:
    forward = Forward(module)
    found = LAYER.fullmatch(forward.expression())
    if found is None:
        raise NotProven("its forward is not a known form of a decoder layer")
    others = forward.parameters[1:]
    several = [p.name for p in others if p.kind is p.VAR_KEYWORD]
    named = [p for p in others if p.kind is not p.VAR_KEYWORD]
    if any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in named):
        raise NotProven("a parameter of its forward is not an ordinary one")
    given = [text.rpartition("=") for text in found["rest"].split(", ")[1:]]
    passed = tuple((name, value) for name, _, value in given if not value.startswith("**"))
    if any(value not in [p.name for p in named] for _, value in passed):
        raise NotProven("it passes more than its arguments on to its attention")
    if [f"**{name}" for name in several] != [value for _, _, value in given if value.startswith("**")]:
        raise NotProven(f"it does not pass its arguments on to its attention: **{', **'.join(several)}")
    attention, mlp = getattr(module, found["attention"]), getattr(module, found["mlp"])
    keyword = found["keyword"] or ""
    if not isinstance(attention, FusedAttention) or keyword not in ("", attention.fused_form.input):
        raise NotProven(f"its {found['attention']} is not fused")
    if not isinstance(mlp, FusedGatedMLP):
        raise NotProven(f"its {found['mlp']} is not fused")
    for name in (found["attention"], found["mlp"]):
        _forward_of(module, name)
    form = LayerForm(
        input=forward.input,
        attention=found["attention"],
        mlp=found["mlp"],
        norms=(_norm_before(module, found["first"], attention), _norm_before(module, found["second"], mlp)),
        order=tuple(p.name for p in named),
        defaults={p.name: p.default for p in named if p.default is not p.empty},
        keyword=keyword,
        passed=passed,
        others=bool(several),
        first=found["index"] is not None,
        renamed=forward.renamed,
    )
    become(module, FusedDecoderLayer, form)
    return "the norms write codes, the second one adds the residual"


def _norm_before(layer: nn.Module, name: str, part: Fused) -> NormForm:
    """Return the form of the norm in front of a part; errors as `norm_form`."""
    how = getattr(part, part.fused_form.joined).activation
    return norm_form(layer, name)._replace(fields=PROPAGATE if how.nonfinite is not None else {}, codes=how.codes)


def norm_form(layer: nn.Module, name: str) -> NormForm:
    """Return how an op computes a norm.

    Raises
    ------
    NotProven
        If no op computes it.
    """
    norm = getattr(layer, name)
    forward = _forward_of(layer, name)
    if type(norm) in (nn.RMSNorm, nn.LayerNorm):
        if len(norm.normalized_shape) != 1 or norm.eps is None:
            raise NotProven(f"{name} normalizes more than one axis, or its eps is torch's default")
        op, eps = "rms_norm_quantize" if type(norm) is nn.RMSNorm else "layer_norm_quantize", "eps"
    else:
        eps = next((eps for eps in ("variance_epsilon", "eps") if hasattr(norm, eps)), "")
        op = "rms_norm_quantize"
        if forward.expression() != _RMS_NORM.format(eps=eps) or forward.resolve("torch") is not torch:
            raise NotProven(f"{name}, a {type(norm).__name__}, is not a known form of a norm")
    vectors = [key for key in ("weight", "bias") if getattr(norm, key, None) is not None]
    return NormForm(name, op, eps, tuple(vectors))


def _curve(mlp: nn.Module, name: str) -> object:
    """Return the key of an activation, a child of a module.

    Raises
    ------
    NotProven
        If no op has this activation.
    """
    act, forward = getattr(mlp, name), _forward_of(mlp, name)
    if type(act) is nn.SiLU:
        return "silu"
    if type(act) is nn.GELU:
        return act.approximate
    called = re.fullmatch(r"([\w.]+)\(x\)", forward.expression())
    curve = _curve_of(forward.resolve(called[1]) if called else None)
    if curve is None:
        raise NotProven(f"its activation, {type(act).__name__}, is neither SiLU nor GELU")
    return curve


def _curve_of(function: Any, approximate: str | None = None) -> object:
    """Return the key of an activation, a function, or None if no op has it."""
    given: dict[str, Any] = {} if approximate is None else {"approximate": approximate}
    if isinstance(function, functools.partial) and not function.args:
        function, given = function.func, {**function.keywords, **given}
    if function is nn.functional.silu and not given:
        return "silu"
    if function is nn.functional.gelu and set(given) <= {"approximate"}:
        return given.get("approximate", "none")
    return None


def _layers(module: nn.Module, names: tuple[str, ...], held: Counter[int]) -> tuple[DynamicLinear, ...]:
    """Return the int8 layers of these names.

    Raises
    ------
    NotProven
        If a layer is missing, has another class, is called differently, or belongs to other modules, too.
    """
    layers: tuple[Any, ...] = tuple(getattr(module, name, None) for name in names)
    for name, layer in zip(names, layers, strict=True):
        if type(layer) is not DynamicLinear:
            raise NotProven(f"{name} is {'missing' if layer is None else type(layer).__name__}, no DynamicLinear")
        if held[id(layer)] > 1:
            raise NotProven(f"{name} belongs to other modules, too")
        _forward_of(module, name)
    return layers


def _forward_of(module: nn.Module, name: str) -> Forward:
    """Return the ``forward`` of a child; errors as `Forward`, with the child's name."""
    try:
        return Forward(getattr(module, name))
    except NotProven as reason:
        raise NotProven(f"{name}: {reason}") from reason


def _join(module: nn.Module, names: tuple[str, ...], layers: tuple[DynamicLinear, ...], joined_name: str) -> None:
    """Put a joined layer into a module, and its parts in place of the original layers."""
    first = layers[0]
    for name, layer in zip(names, layers, strict=True):
        pairs = [(first.weight, layer.weight), (first.weight_scale, layer.weight_scale), (first.bias, layer.bias)]
        if any((a is None) is not (b is None) for a, b in pairs):
            raise NotProven(f"one of {names[0]} and {name} has a bias, the other has none")
        if any(a is not None and (a.dtype, a.device) != (b.dtype, b.device) for a, b in pairs):
            raise NotProven(f"{names[0]} and {name} differ in a dtype or device")
        if layer.in_features != first.in_features:
            raise NotProven(f"{names[0]} and {name} differ in their inputs")
        if layer.format != first.format:
            raise NotProven(f"{names[0]} and {name} differ in the bits or groups of their weights")
        if layer.activation != first.activation:
            raise NotProven(f"{names[0]} and {name} differ in what they do with a NaN, or in their codes of inputs")
        unit = layer.format.units["n"]
        if layer.out_features % unit:
            raise NotProven(f"{name} has {layer.out_features} rows; packed weights are joined in multiples of {unit}")
    if hasattr(module, joined_name):
        raise NotProven(f"it has a {joined_name} already")
    joined = JoinedLinear.of(layers)
    for number, name in enumerate(names):
        module.register_module(name, Part(joined, number))
    module.register_module(joined_name, joined)


def become(module: nn.Module, kind: type[Fused], form: object) -> None:
    """Make a module one of a kind."""
    module.__class__ = fused_class(kind, type(module))
    fused = cast("Fused", module)
    fused.fused_form = form
    fused.hold()
    for attributes in (fused.__dict__, *fused.fused_held[2]):
        attributes.pop("forward", None)  # the method of its class as an attribute, which would hide the new one


_RULES: tuple[tuple[Callable[[nn.Module], bool], Callable[[nn.Module, Counter[int]], str]], ...] = (
    (_is_attention, _fuse_attention),
    (_is_mlp, _fuse_mlp),
    (lambda module: any(isinstance(each, (FusedAttention, FusedGatedMLP)) for each in module.children()), _fuse_layer),
)
"""Which modules may be a structure, and the function that fuses it. A layer comes after its parts."""
