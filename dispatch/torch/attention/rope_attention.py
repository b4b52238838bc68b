"""Fused attention for `attn_implementation="skuda"`: norms and rope of the heads, and the cache, in one op.

`fuse_` makes these of attentions whose source is that of Llama, Mistral, Qwen2 or Qwen3. The cosines are those of the
model's own rope, as data. The op rounds less often than the separate modules, so bits differ from those of the unfused
model. They are still the same alone, in any batch, in any split of a prompt, and with a cache or without.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from skuda.registry.errors import InvalidProblem
from skuda.torch.attention import interface
from skuda.torch.attention.kv_cache import Int8Cache
from skuda.torch.fuse.fuse import norm_form
from skuda.torch.fuse.fused_modules import FusedAttention, fused_class
from skuda.torch.linear.joined import projected
from skuda.torch.models.source import Forward, NotProven, source_of

_NORMS = ("q_norm", "k_norm")
_HEADS = r"(?P<{0}>self\.{0}_norm\()?self\.{0}_proj\((?P=x)\)\.view\(hidden_shape\)(?({0})\)|)\.transpose\(1, 2\)"
_FORWARD = re.compile(
    r"input_shape = (?P<x>\w+)\.shape\[:-1\]\n"
    r"hidden_shape = \(\*input_shape, -1, self\.head_dim\)\n"
    rf"query_states = {_HEADS.format('q')}\n"
    rf"key_states = {_HEADS.format('k')}\n"
    r"value_states = self\.v_proj\((?P=x)\)\.view\(hidden_shape\)\.transpose\(1, 2\)\n"
    r"cos, sin = position_embeddings\n"
    r"query_states, key_states = apply_rotary_pos_emb\(query_states, key_states, cos, sin\)\n"
    r"if (?P<cache>\w+) is not None:\n"
    r"    key_states, value_states = (?P=cache)\.update\("
    r"key_states, value_states, self\.layer_idx(, kwargs=kwargs)?\)\n"
    r"attention_interface: Callable = ALL_ATTENTION_FUNCTIONS\.get_interface\("
    r"self\.config\._attn_implementation, eager_attention_forward\)\n"
    r"attn_output, attn_weights = attention_interface\(self, query_states, key_states, value_states, attention_mask, "
    r"dropout=0\.0 if not self\.training else self\.attention_dropout, scaling=self\.scaling"
    r"(, sliding_window=(?P<window>self\.sliding_window|getattr\(self\.config, 'sliding_window', None\)))?"
    r", \*\*kwargs\)\n"
    r"attn_output = attn_output\.reshape\(\*input_shape, -1\)\.contiguous\(\)\n"
    r"attn_output = self\.o_proj\(attn_output\)\n"
    r"return \(attn_output, attn_weights\)"
)
_ROPE = (
    "cos = cos.unsqueeze(unsqueeze_dim)\nsin = sin.unsqueeze(unsqueeze_dim)\n"
    "q_embed = q * cos + rotate_half(q) * sin\nk_embed = k * cos + rotate_half(k) * sin\nreturn (q_embed, k_embed)"
)
_HALF = "x1 = x[..., :x.shape[-1] // 2]\nx2 = x[..., x.shape[-1] // 2:]\nreturn torch.cat((-x2, x1), dim=-1)"
_EMBEDDED = re.compile(r"position_embeddings = self\.rotary_emb\(hidden_states, (position_ids=)?position_ids\)")
FIXED = ("default", "linear", "llama3", "yarn")
"""Types of rope whose frequencies do not change with the length."""
_ROUNDED = 1e-6
"""Relative difference of frequencies that were computed on different devices."""
_PROBED = 64
"""Positions at which a model's rope is compared with its table."""


class RopeTable:
    """Cosines and sines of a model's rope, for all positions so far, with the same bits on every device.

    Parameters
    ----------
    rotary : torch.nn.Module
        The model's rope, with its frequencies ``inv_freq`` and its ``attention_scaling``.
    """

    def __init__(self, rotary: Any) -> None:
        self.rotary, self._frequencies = rotary, _frequencies(rotary)
        self._table: Tensor | None = None
        self._dtype: torch.dtype | None = None

    def of(self, like: Tensor, positions: int) -> Tensor:
        """Return a table for this many positions, at least: f32 of shape (positions, head_size), the cosines first.

        The numbers are rounded to the dtype of `like`, as the model's rope rounds them.
        """
        table = self._table
        if table is None or len(table) < positions or table.device != like.device or self._dtype is not like.dtype:
            scaling = float(self.rotary.attention_scaling)
            made = torch.ops.skuda.rope_table.default(self._frequencies.to(like.device), positions, scaling)
            self._table, self._dtype = made.to(like.dtype).float(), like.dtype
        return self._table  # type: ignore[return-value]

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_table": None}


def _frequencies(rotary: Any) -> Tensor:
    """Return a rope's frequencies as a CPU computes them: a GPU, on which a model may be made, rounds otherwise."""
    own: Tensor = rotary.inv_freq
    if not type(rotary).__module__.startswith("transformers.models."):
        return own
    with torch.device("cpu"):
        made: Tensor = type(rotary)(rotary.config).inv_freq
    same = made.shape == own.shape and made.dtype is own.dtype
    return made if same and torch.allclose(made, own.cpu(), rtol=_ROUNDED, atol=0) else own


class RopeForm(NamedTuple):
    """An attention; for the first three see `AttentionForm`.

    Attributes
    ----------
    order : tuple of str
        The parameters of its original ``forward``.
    cache : str
        The one that is the cache.
    renamed : frozenset of str
        Former names of parameters.
    norms : tuple of str
        Names of the norms of queries and keys, if it has them.
    eps : float
        Their epsilon.
    window : str
        What the original passes on as the window, or nothing.
    rope : RopeTable
        The cosines.
    """

    input: str
    joined: str
    parts: tuple[str, ...]
    order: tuple[str, ...]
    cache: str
    renamed: frozenset[str]
    norms: tuple[str, ...]
    eps: float
    window: str
    rope: RopeTable


class FusedRopeAttention(FusedAttention):
    """An attention with one product for queries, keys and values, and one op for all that comes before the scores.

    The original ``forward`` runs for another `attn_implementation`, and where tokens see later ones.
    """

    fused_form: RopeForm  # type: ignore[assignment]

    def bypassed(self) -> dict[str, tuple[str, ...]]:
        """Return the joined layers, and the norms, which are not called."""
        return super().bypassed() | dict.fromkeys(self.fused_form.norms, ("_forward_hooks", "_forward_pre_hooks"))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the original."""
        form, given = self.fused_form, dict(kwargs)
        given |= zip(self.fused_form.order, args, strict=False)
        cache, ids = given.pop(form.cache, None), given.get("position_ids")
        turns = (
            self.config._attn_implementation == interface.NAME  # noqa: SLF001  of transformers
            and given.get("is_causal") is not False
            and self.is_causal
            and getattr(self.config, "is_causal", True)
            and getattr(given.get("attention_mask"), "causal", True)
            and isinstance(ids, Tensor)
            and ids.dim() == 2
            and form.renamed.isdisjoint(kwargs)
            and self.intact()
        )
        if not turns:
            self.refuse_inexact("a call that the op does not compute, or a change to its parts")
            return super().forward(*args, **kwargs)
        cache = Int8Cache.in_place_of(cache, self.config)
        if cache is not None and not isinstance(cache, Int8Cache):
            rule = "be an Int8Cache(model.config), or be left out"
            raise InvalidProblem(interface.SUBJECT, form.cache, f"a {type(cache).__name__}", rule)
        rows, mask, cos_sin = (given.pop(name, None) for name in (form.input, "attention_mask", "position_embeddings"))
        heads = self.heads(rows)
        window = getattr(self.config if form.window.startswith("getattr") else self, "sliding_window", None)
        window = window if form.window else None
        causal = given.pop("is_causal", None)
        dropout = self.attention_dropout if self.training else 0.0
        alone = cache is None or not cache.layers[self.layer_idx].is_initialized
        recorded = self.trains and alone and torch.is_grad_enabled() and heads[2].requires_grad
        with torch.no_grad() if recorded else nullcontext():
            interface.check_call(self, self.head_dim, heads[2], mask, dropout, window, causal, given)
            found = self.attend(heads, cache, mask, ids, window)
        if recorded:
            found = self.with_gradient(found, heads, cos_sin, mask, window)
        return self.o_proj(found), None

    trains: ClassVar[bool] = False
    """Whether a call without earlier tokens has a gradient."""

    def warm(self, rows: Tensor) -> None:
        """Run everything but the last product, on one sequence without a cache."""
        heads = tuple(each[None] for each in self.heads(rows))
        if self.config._attn_implementation == interface.NAME and len(rows):  # noqa: SLF001  of transformers
            self.attend(heads, None, None, torch.arange(len(rows), device=rows.device)[None], None)

    def heads(self, rows: Any) -> tuple[Tensor, ...]:
        """Return queries, keys and values, of shape (batch, columns, heads * head_size)."""
        joined = getattr(self, self.fused_form.joined)
        found: tuple[Tensor, ...] = projected(joined, rows).split(joined.sizes, -1)
        return found

    def attend(
        self,
        heads: tuple[Tensor, ...],
        cache: Int8Cache | None,
        mask: interface.Mask | None,
        ids: Tensor,
        window: int | None,
    ) -> Tensor:
        """Return the attention of new heads, of shape (batch, columns, heads * head_size)."""
        form, size = self.fused_form, self.head_dim
        batch, new, width = heads[1].shape
        layer = interface.layer_of(cache, self.layer_idx, (batch, width // size, new, size), heads[1].device, mask)
        table = layer.sequences.place(ids, functools.partial(form.rope.of, heads[1]))
        norms = tuple(getattr(self, name).weight for name in form.norms) or (None, None)
        q, k, v = (each.flatten(0, 1) for each in heads)
        codes = layer.append(q, k, v, q.shape[1] // size, table, norms, form.eps)
        found = layer.attend(codes, q.dtype, self.scaling, window, causal=True)
        if cache is not None:
            cache.end(self.layer_idx)
        return found.view(batch, new, -1)

    def with_gradient(
        self, found: Tensor, heads: tuple[Tensor, ...], cos_sin: Any, mask: interface.Mask | None, window: int | None
    ) -> Tensor:
        """Return the same values with a gradient, where `trains`."""
        raise NotImplementedError


def forms(model: nn.Module) -> dict[str, Callable[[nn.Module], str]]:
    """Return a function for each attention of a model with `attn_implementation="skuda"`, by name.

    It makes a `FusedAttention` a `FusedRopeAttention`, and returns what changed, or raises `NotProven`.
    """
    proven, reasons = rope_forms(model)
    found: dict[str, Callable[[nn.Module], str]] = {}
    found |= {name: functools.partial(_become, form) for name, form in proven.items()}
    left = {name: f"rope and cache stay separate: {why}" for name, why in reasons.items()}
    return found | {name: functools.partial(_refuse, why) for name, why in left.items()}


def rope_forms(model: nn.Module) -> tuple[dict[str, RopeForm], dict[str, str]]:
    """Return the forms of a model's attentions that are not fused, by name, and why others have none.

    It looks at those with `attn_implementation="skuda"`.
    """
    proven: dict[str, RopeForm] = {}
    reasons: dict[str, str] = {}
    tables: dict[nn.Module, RopeTable] = {}
    for name, module in model.named_modules():
        if getattr(getattr(module, "config", None), "_attn_implementation", None) != interface.NAME:
            continue
        if hasattr(module, "layer_idx") and not isinstance(module, FusedAttention):
            try:
                proven[name] = _proven(module, name, model, tables)
            except NotProven as reason:
                reasons[name] = str(reason)
    return proven, reasons


def _become(form: RopeForm, module: nn.Module) -> str:
    """Make a `FusedAttention` a `FusedRopeAttention`."""
    module.__class__ = fused_class(FusedRopeAttention, type(module).__bases__[1])
    module.fused_form = form._replace(**module.fused_form._asdict())  # type: ignore[operator, union-attr, assignment]
    module.hold()  # type: ignore[operator]
    return "q, k and v are one product, one op does norms, rope and the cache"


def _refuse(reason: str, _: nn.Module) -> str:
    raise NotProven(reason)


def _proven(module: nn.Module, name: str, model: nn.Module, tables: dict[nn.Module, RopeTable]) -> RopeForm:
    """Return the form of an attention, without the names of its layers.

    Raises
    ------
    NotProven
        If it is unknown.
    """
    forward = Forward(module)
    found = _FORWARD.fullmatch(forward.statements())
    if found is None or found["x"] != forward.input or (found["q"] is None) is not (found["k"] is None):
        raise NotProven("its forward is not a known form of an attention with rope")
    rope = forward.resolve("apply_rotary_pos_emb")
    half = getattr(rope, "__globals__", {}).get("rotate_half")
    if source_of(rope) != _ROPE or source_of(half) != _HALF:
        raise NotProven("its apply_rotary_pos_emb is not a known form")
    if forward.resolve("ALL_ATTENTION_FUNCTIONS") is not ALL_ATTENTION_FUNCTIONS:
        raise NotProven("it has attention functions of its own")
    norms = tuple(norm_form(module, each) for each in _NORMS) if found["q"] else ()
    if any(each.op != "rms_norm_quantize" or each.vectors != ("weight",) for each in norms):
        raise NotProven("its norms of heads are not RMS norms with a weight")
    eps = {float(getattr(getattr(module, each.name), each.eps)) for each in norms} or {0.0}
    if len(eps) > 1:
        raise NotProven("its norms of heads differ in eps")
    rotary = _rotary(module, name, model)
    return RopeForm(
        input=forward.input,
        joined="",
        parts=(),
        order=tuple(each.name for each in forward.parameters if each.kind is each.POSITIONAL_OR_KEYWORD),
        cache=found["cache"],
        renamed=forward.renamed,
        norms=tuple(each.name for each in norms),
        eps=eps.pop(),
        window=found["window"] or "",
        rope=tables.setdefault(rotary, RopeTable(rotary)),
    )


def _rotary(module: Any, name: str, model: nn.Module) -> nn.Module:
    """Return the rope that gives an attention its cosines; errors as `_proven`."""
    parent = name
    while parent:
        parent = parent.rpartition(".")[0]
        owner = model.get_submodule(parent)
        if isinstance(getattr(owner, "rotary_emb", None), nn.Module):
            break
    else:
        raise NotProven("no module around it has a rotary_emb")
    rotary: Any = owner.rotary_emb
    text = source_of(type(owner).forward)
    if len(re.findall(r"rotary_emb|position_embeddings =", text)) != 2 or not _EMBEDDED.search(text):
        raise NotProven("the model does not use its rotary_emb in a known way")
    if getattr(rotary, "rope_type", None) not in FIXED:
        raise NotProven(f"its rope, {getattr(rotary, 'rope_type', type(rotary).__name__)}, may change with the length")
    device = rotary.inv_freq.device
    cos, sin = rotary(torch.empty(1, device=device), torch.arange(_PROBED, device=device)[None])
    for part in (cos, sin):
        if part.shape != (1, _PROBED, module.head_dim) or not torch.equal(*part.chunk(2, -1)):
            raise NotProven("its rope does not turn all of a head, in halves")
    table = RopeTable(rotary).of(cos, _PROBED)
    if not torch.allclose(torch.cat([part[0].chunk(2, -1)[0] for part in (cos, sin)], 1), table, rtol=0, atol=1e-5):
        raise NotProven("its rope is not that of its inv_freq and attention_scaling")
    return rotary
