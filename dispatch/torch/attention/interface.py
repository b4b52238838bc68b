"""`attn_implementation="skuda"`: int8 attention for models of transformers, with the same bits in any batch and split.

Importing this module registers it. With an `Int8Cache`, new keys and values are quantized into the cache, and queries
see its codes. Without a cache, as in an encoder, the keys and values of the call are quantized in the same way; then
the result has the same bits. What a token gives depends only on the tokens that it sees.

A token's place among the tokens of its sequence is its position; columns of padding have none. So a mask is only a
number for each sequence, and the model never makes one of four axes. What this attention cannot do, it refuses by name.

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="skuda")
    with torch.no_grad():
        model.generate(**inputs, cache=Int8Cache(model.config))
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import masking_utils
from transformers.modeling_utils import AttentionInterface, PreTrainedModel

from skuda.kernels.attention.cache import HEAD_SIZES
from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown
from skuda.torch.attention.handed import Handed
from skuda.torch.attention.kv_cache import CacheLayer, Int8Cache, NewKeys
from skuda.torch.attention.sequences import Sequences, check

__all__ = ["NAME", "SUBJECT", "Int8Cache", "Mask", "attention", "check_call", "layer_of", "mask_of_call"]

NAME = "skuda"
"""The name of the implementation."""
SUBJECT = 'attn_implementation="skuda"'
"""What errors are about."""
_IGNORED = frozenset(
    {
        "cache_position",
        "logits_to_keep",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Arguments of models that reach an attention function and change nothing that it does."""


class Mask(Handed):
    """What the attention has to know of a mask, on its way from `mask_of_call` to `attention`.

    A model that computes its attention itself would take a tensor for a bias, and None for no mask. This it cannot use.

    Attributes
    ----------
    rows : tensor or None
        None without padding. For a causal mask s32 of shape (batch, 2): the position of the first new column of each
        sequence, negative in padding to the left, and the tokens after the call. Else u8 of shape (batch, columns).
    causal : bool
        Whether a token sees no later ones.
    window : int or None
        How many tokens a token sees, its own included.
    subject : str
        What errors are about.
    """

    ndim = 4  # transformers asks for it, where a mask comes back to `mask_of_call`

    def __init__(self, rows: Tensor | None, subject: str, window: int | None = None, *, causal: bool) -> None:
        self.rows, self.subject, self.window, self.causal = rows, subject, window, causal

    def refuse(self) -> NoReturn:
        """Refuse another attention."""
        raise InvalidProblem(self.subject, "attention", "own code for masks", _RULE)

    def to(self, device: Any, *, non_blocking: bool = False) -> Mask:
        """Return it on another device, for models that are on several."""
        if isinstance(device, (torch.dtype, Tensor)):
            self.refuse()
        rows = None if self.rows is None else self.rows.to(device, non_blocking=non_blocking)
        return Mask(rows, self.subject, self.window, causal=self.causal)


_RULE = 'be that of transformers\' attention interface: use another implementation, such as "eager", for this model'


def _in(module: nn.Module) -> str:
    return f"{SUBJECT} in a {type(module).__name__}"


def mask_of_call(
    batch_size: int,  # noqa: ARG001  the signature of transformers
    q_length: int,
    kv_length: int,  # noqa: ARG001
    q_offset: Any = 0,
    kv_offset: int = 0,  # noqa: ARG001
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | Mask | None = None,
    **others: Any,
) -> Mask:
    """Return what the attention has to know of a mask.

    Parameters
    ----------
    q_length : int
        New columns.
    q_offset : int or tensor
        Columns before them.
    mask_function : callable
        What transformers would make a mask of.
    attention_mask : tensor of shape (batch, columns), bool, optional
        Which columns are no padding. A mask of an earlier call is returned, if it is of this kind.
    **others
        Further arguments of transformers.

    Returns
    -------
    Mask
        Only `attention` can take it.

    Raises
    ------
    InvalidProblem
        For other masks than causal ones, windows and whole sequences, and for padding between tokens.
    """
    subject = f"{SUBJECT} in a model of {type(others.get('config')).__name__}"
    causal = _is_causal(mask_function, q_length, others, subject)
    window = others.get("local_size") if causal and mask_function is not masking_utils.causal_mask_function else None
    if isinstance(attention_mask, Mask):
        given = attention_mask.causal, attention_mask.window
        if given != (causal, window):
            had, rule = (f"causal={each[0]}, window={each[1]}" for each in (given, (causal, window)))
            raise InvalidProblem(subject, "attention_mask", had, f"be one of {rule}")
        return attention_mask
    if attention_mask is None:
        return Mask(None, subject, window, causal=causal)
    columns = attention_mask.shape[1]
    if columns < q_length or (isinstance(q_offset, int) and columns != q_offset + q_length):
        had = f"{columns} columns"
        rule = f"have {q_offset + q_length}, those of all tokens so far"
        raise InvalidProblem(subject, "attention_mask", had, rule)
    if not causal:
        return Mask(attention_mask.to(torch.uint8), subject, causal=False)
    new = attention_mask[:, columns - q_length :]
    before = attention_mask[:, : columns - q_length].sum(1)
    if q_length > 1:
        begins = (new[:, 1:] > new[:, :-1]).sum(1) + new[:, 0] * (before == 0)
        rule = "have padding to the left or right, and none before or between new tokens of a sequence that has tokens"
        check((begins <= (before == 0)).all(), "attention_mask", "zeros between the tokens", rule)
    leading = (new.cumsum(1) == 0).sum(1)
    first = torch.where(before > 0, before, -leading)
    rows = torch.stack((first, before + new.sum(1)), 1).to(torch.int32)
    return Mask(rows, subject, window, causal=True)


def _is_causal(function: Callable[..., Any], new: int, others: dict[str, Any], subject: str) -> bool:
    """Whether a mask is causal, apart from a window; False if all see all."""
    if function is masking_utils.causal_mask_function:
        return True
    if function is masking_utils.bidirectional_mask_function:
        return False
    if others.get("local_size") is not None and not others.get("use_vmap"):
        # Dynamo cannot look into a function. Transformers allows to skip a mask of many columns if it is nothing more.
        plain = new == 1 or bool(others.get("allow_is_causal_skip"))
        if plain if torch.compiler.is_compiling() else _is_window(function):
            return True
    rule = "be causal, with a window or without, or see all tokens: no packed sequences, and no masks of your own"
    if torch.compiler.is_compiling():  # what tells that sequences are packed is then not known
        rule += "; without a cache, pass an attention_mask"
    raise InvalidProblem(subject, "mask", getattr(function, "__qualname__", shown(function)), rule)


def _is_window(function: Callable[..., Any]) -> bool:
    """Whether a mask function of transformers is a causal one with a window.

    It is made anew for every call, so only the names of its parts tell.
    """
    parts = next((cell.cell_contents for cell in function.__closure__ or ()), ())
    window = masking_utils.sliding_window_overlay(1).__qualname__
    return (
        isinstance(parts, tuple)
        and len(parts) == 2
        and getattr(parts[0], "__qualname__", "") == window
        and parts[1] is masking_utils.causal_mask_function
    )


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor | NewKeys,
    value: Tensor,
    attention_mask: Mask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,  # noqa: FBT001  the signature of transformers
    **others: Any,
) -> tuple[Tensor, None]:
    """Return the attention of a module's call, an attention function of transformers.

    Parameters
    ----------
    module : torch.nn.Module
        The module of the attention.
    query : tensor of shape (batch, heads, columns, head_size)
        New queries, after rope.
    key, value : tensors of shape (batch, kv_heads, columns, head_size)
        New keys and values. Keys that came from an `Int8Cache` join it.
    attention_mask : Mask, optional
        What `mask_of_call` returned.
    scaling : float, optional
        What scores are multiplied by; by default 1 / sqrt(head_size).
    dropout : float
        Must be 0.
    sliding_window : int, optional
        How many tokens a token sees, its own included.
    is_causal : bool, optional
        Whether a token sees no later ones where no mask says it. By default what the module says.
    **others
        Further arguments of the model.

    Returns
    -------
    tuple of tensor and None
        The result, of shape (batch, columns, heads, head_size), 0 in padding to the left; and no weights.

    Raises
    ------
    InvalidProblem
        For what it cannot do.
    """
    new, size = query.shape[2:]
    causal = check_call(module, size, value, attention_mask, dropout, sliding_window, is_causal, others)
    cache, number, states = (key.cache, key.layer, key.states) if isinstance(key, NewKeys) else (None, 0, key)
    if states.shape[2] != new:
        had = f"{states.shape[2]} for {new} queries"
        rule = "be as many as queries: it needs an Int8Cache(model.config) as the cache, and has no cross-attention"
        raise InvalidProblem(_in(module), "keys", had, rule)
    if value.shape[-1] != size:
        rule = "have the head size of the queries: such attention has no int8 kernel"
        raise InvalidProblem(_in(module), "value", f"heads of {value.shape[-1]} beside {size}", rule)
    if cache is not None and not causal:
        raise InvalidProblem(_in(module), "cache", "an Int8Cache", "be left out where tokens see later ones")
    scaling = 1 / math.sqrt(size) if scaling is None else float(scaling)
    shape = tuple(states.shape)
    rows = None if attention_mask is None else attention_mask.rows
    if causal or rows is None:
        layer = layer_of(cache, number, shape, query.device, attention_mask)
        found = _attended(layer, query, states, value, scaling, sliding_window, causal=causal)
        if cache is not None:
            cache.end(number)
        return found, None
    # Tokens to the end, so that all padding lies to the left.
    order = rows.argsort(dim=1, stable=True)
    counts = rows.sum(1, dtype=torch.int32)
    ends = Mask(torch.stack((counts - new, counts), 1), "", causal=True)
    layer = layer_of(cache, number, shape, query.device, ends)
    q, k, v = (_picked(each, order, 2) for each in (query, states, value))
    found = _attended(layer, q, k, v, scaling, None, causal=False)
    return _picked(found, order.argsort(1), 1), None


def layer_of(cache: Any, number: int, shape: tuple[int, ...], device: torch.device, mask: Mask | None) -> CacheLayer:
    """Return a layer that is ready for the tokens of a call.

    Parameters
    ----------
    cache : Int8Cache or None
        Where it belongs. Without one, the layer lasts as long as the call.
    number, shape, device
        As in `Int8Cache.begin`.
    mask : Mask, optional
        What `mask_of_call` returned for causal attention.
    """
    batch, heads, new, size = shape
    rows = None if mask is None else mask.rows
    if cache is not None:
        found: CacheLayer = cache.begin(number, shape, device, rows)
        return found
    layer = CacheLayer(Sequences())
    layer.sequences.begin(batch, new, device, rows)
    layer.reserve(heads, size, device)
    return layer


def _attended(
    layer: CacheLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    window: int | None,
    *,
    causal: bool,
) -> Tensor:
    batch, heads, new, size = query.shape
    q, k, v = (each.transpose(1, 2).reshape(batch * new, -1) for each in (query, key, value))
    found = layer.attend(layer.append(q, k, v, heads), query.dtype, scaling, window, causal=causal)
    return found.view(batch, new, heads, size)


def _picked(states: Tensor, order: Tensor, axis: int) -> Tensor:
    """Return the columns of a tensor, on an axis, in an order of shape (batch, columns)."""
    shape = [len(order), *(1 for _ in states.shape[1:])]
    shape[axis] = order.shape[1]
    return states.take_along_dim(order.view(shape), axis)


def check_call(
    module: nn.Module,
    size: int,
    value: Tensor,
    mask: Mask | None,
    dropout: float,
    window: int | None,
    is_causal: Any,
    others: dict[str, Any],
) -> bool:
    """Return whether a call with heads of a size is causal; arguments and errors as in `attention`."""
    config = getattr(module, "config", None)
    if torch.is_grad_enabled() and value.requires_grad:
        rule = "be computed under torch.no_grad(): int8 attention has no gradient; train with another implementation"
        raise InvalidProblem(_in(module), "value", "a tensor that requires grad", rule)
    if dropout:
        raise InvalidProblem(_in(module), "dropout", str(dropout), "be 0: use model.eval(), or attention_dropout=0")
    for name, given in others.items():
        if name not in _IGNORED and given is not None and given is not False:
            had = f"a {type(given).__name__}" if isinstance(given, Tensor) else shown(given)
            raise InvalidProblem(
                _in(module), name, had, 'be left out; other implementations, such as "sdpa", may take it'
            )
    if getattr(config, "is_encoder_decoder", False):
        raise InvalidProblem(
            _in(module), "model", type(module).__name__, "be no encoder-decoder: it has cross-attention"
        )
    if mask is not None and not isinstance(mask, Mask):
        had = f"{str(mask.dtype).removeprefix('torch.')} of shape {tuple(mask.shape)}"
        rule = "be one of two axes, (batch, tokens), with ones and zeros, or left out"
        raise InvalidProblem(_in(module), "attention_mask", had, rule)
    _check_sizes(module, config, size, window)
    if mask is not None:
        if mask.window != window:
            rule = f"be {mask.window}, as in the model's mask; it does not understand this model"
            raise InvalidProblem(_in(module), "sliding_window", str(window), rule)
        return mask.causal
    causal = is_causal
    if causal is None:
        causal = getattr(module, "is_causal", True) and getattr(config, "is_causal", True)
    return bool(causal)


def _check_sizes(module: nn.Module, config: Any, size: int, window: int | None) -> None:
    """Check the size of heads, and that a module asks for the window of its config: masks do not say it."""
    if size not in HEAD_SIZES:
        rule = f"be one of {', '.join(map(str, HEAD_SIZES))}: others have no int8 kernel"
        raise InvalidProblem(_in(module), "head_size", str(size), rule)
    wanted = getattr(config, "sliding_window", None)
    types, number = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if types is not None and number is not None and types[number] != "sliding_attention":
        wanted = None
    if window != wanted:
        rule = f"be {wanted}, as in the model's config; it does not understand this model"
        raise InvalidProblem(_in(module), "sliding_window", str(window), rule)


def _stranger(model: type[PreTrainedModel]) -> str | None:
    """Return the name of an attention in a file of a model's class that does not call the interface, if there is one.

    That is any class of attention where nothing of the file can call it, and a table of classes by implementation.
    """
    for each in model.__mro__:
        if not issubclass(each, PreTrainedModel) or each is PreTrainedModel:
            continue
        names = vars(sys.modules.get(each.__module__, object))
        calls = any(isinstance(one, AttentionInterface) for one in names.values())
        for name, one in names.items():
            if isinstance(one, dict) and "eager" in one and NAME not in one:
                return name
            own = isinstance(one, type) and issubclass(one, nn.Module) and one.__module__ == each.__module__
            if own and not calls and "Attention" in name and "forward" in vars(one):
                return name
    return None


_correct = PreTrainedModel.get_correct_attn_implementation
_set = PreTrainedModel.set_attn_implementation


@functools.wraps(_correct)
def _checked(model: PreTrainedModel, requested_attention: str | None, *args: Any, **more: Any) -> Any:
    """Refuse a model that would not call the attention, when it is made or takes it."""
    if requested_attention == NAME and (stranger := _stranger(type(model))):
        raise InvalidProblem(SUBJECT, "attention", f"{stranger}, of a {type(model).__name__}", _RULE)
    return _correct(model, requested_attention, *args, **more)


@functools.wraps(_set)
def _set_or_refused(model: PreTrainedModel, attn_implementation: Any, *args: Any, **more: Any) -> None:
    """Refuse what transformers would only warn of: models that keep their implementation."""
    parts = [each for each in model.modules() if isinstance(each, PreTrainedModel)]
    before = [(each.config, each.config._attn_implementation) for each in parts]  # noqa: SLF001  of transformers
    _set(model, attn_implementation, *args, **more)
    asked = {id(each) for each in _asked(model.config, attn_implementation)}
    for part in parts:
        wanted = id(part.config) in asked or attn_implementation == NAME
        if wanted and part.config._attn_implementation != NAME:  # noqa: SLF001
            for config, name in before:
                config._attn_implementation_internal = name  # noqa: SLF001
            raise InvalidProblem(SUBJECT, "attention", f"one of a {type(part).__name__}", _RULE)


def _asked(config: Any, implementation: Any) -> Iterator[Any]:
    """Yield the configs for which `set_attn_implementation` is to set it."""
    own = implementation.get("") if isinstance(implementation, dict) else implementation
    if own == NAME:
        yield config
    for key in config.sub_configs:
        if (part := getattr(config, key, None)) is not None:
            yield from _asked(part, implementation.get(key) if isinstance(implementation, dict) else implementation)


# Transformers tells a model's class to no hook.
PreTrainedModel.get_correct_attn_implementation = _checked
PreTrainedModel.set_attn_implementation = _set_or_refused
AttentionInterface.register(NAME, attention)
masking_utils.AttentionMaskInterface.register(NAME, mask_of_call)
