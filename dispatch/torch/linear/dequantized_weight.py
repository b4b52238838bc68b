"""The weight of an int8 layer as other code reads it: a tensor whose values are made from codes when they are read."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, Self, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown
from skuda.torch.formats import WeightFormat
from skuda.torch.linear.autograd import dequantized_weight
from skuda.torch.ops.tensor_op import not_scripted

_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
"""Views of the whole weight, which need no values."""
_COPIED = torch.ops.aten._to_copy.default  # noqa: SLF001  the op of `to`
_RULE = "not be changed, because it is made from codes: change a clone(), or call skuda.torch.dequantize_(model) first"

_FROZEN = "have no gradient: train adapters beside the layer, or quantize_ with FakeQuant() or Mixed()"


class DequantizedWeight(Tensor):
    """A weight of shape (N, K) that is stored as codes and scales. It can be read but not changed.

    Its shape, dtype and device cost nothing. Any other use computes the values, `weight_of`, and does not keep them.
    Views of it can be read only, too. Other results are ordinary tensors. It gets no gradient.

    Raises
    ------
    InvalidProblem
        For a write, and for a request of its gradient.
    """

    _is_hf_initialized = True  # transformers draws the values of tensors without this mark
    _owner: str
    _width: int
    _names: tuple[str, ...]
    _shown: Tensor | None = None
    """The values, once their address is known to others."""

    @staticmethod
    def __new__(cls: type[Self], held: tuple[Tensor, ...], dtype: torch.dtype, owner: str, width: int = 0) -> Self:
        """Make a tensor without memory.

        Parameters
        ----------
        held : tuple of tensor
            Codes in the form of a format, scales of shape (N, 1) and, if the layer divides its input, the divisors of
            shape (K,). Or the values, alone.
        dtype : dtype
            Dtype of the values.
        owner : str
            Class of the layer, for errors.
        width : int
            K, for codes.
        """
        first = held[0]
        shape = first.shape if len(held) == 1 else (len(held[1]), width)
        layout = (first.stride(), first.storage_offset()) if len(held) == 1 else ()  # values are dense
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]  # noqa: SLF001  the public way to do it
            cls, shape, *layout, dtype=dtype, device=first.device
        )
        made._hold(held)  # noqa: SLF001
        made._owner, made._width = owner, width  # noqa: SLF001
        return cast("Self", made)

    __torch_function__ = torch._C._disabled_torch_function_impl  # noqa: SLF001  as torch's own subclasses

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse a write, and run anything else with the values."""
        del types
        named = dict(kwargs or {})
        schema = getattr(func, "_schema", None)  # operators of higher order have none
        for written in _written(schema, args, named):
            written.refuse(str(func))
        if func in _SAME:
            return args[0].moved()
        if func is _COPIED and named.get("dtype") in (None, args[0].dtype) and named.get("device") is not None:
            return args[0].moved(named["device"], non_blocking=bool(named.get("non_blocking")))
        plain_args, plain_named = tree_map_only(cls, cls.values, (args, named))
        found = func(*plain_args, **plain_named)
        if schema is None or all(one.alias_info is None for one in schema.returns):
            return found
        owner = next(leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, cls))._owner  # noqa: SLF001
        return tree_map_only(Tensor, lambda view: cls((view,), view.dtype, owner), found)

    def moved(self, device: torch.device | None = None, *, non_blocking: bool = False) -> Self:
        """Return the same weight, or its copy on a device. Packages that move layers put the copy in place of codes."""
        held = tuple(tensor.to(device, non_blocking=non_blocking) for tensor in self._held) if device else self._held
        return type(self)(held, self.dtype, self._owner, self._width)

    def codes(self) -> Tensor | None:
        """Return the codes, or None for a view."""
        return self._held[0] if len(self._held) > 1 else None

    def _hold(self, held: tuple[Tensor, ...]) -> None:
        self._names = tuple(f"held_{number}" for number in range(len(held)))
        for name, tensor in zip(self._names, held, strict=True):
            setattr(self, name, tensor)

    @property
    def _held(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in self._names)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(self._names), (self.dtype, self._owner, self._width)

    @classmethod
    def __tensor_unflatten__(cls, inner: Mapping[str, Tensor], about: Any, size: Any, stride: Any) -> Self:
        del size, stride
        return cls(tuple(inner.values()), *about)

    def values(self) -> Tensor:
        """Return the values, as an ordinary tensor."""
        held = self._held
        if self._shown is not None:
            return self._shown
        return held[0] if len(held) == 1 else weight_of(*held, dtype=self.dtype, width=self._width)

    def refuse(self, had: str) -> NoReturn:
        """Raise `InvalidProblem` for a write or a gradient."""
        raise InvalidProblem(self._owner, "weight", had, _RULE)

    @property
    def data(self) -> Tensor:
        """The same, which cannot be changed either."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        self.refuse(f"assigned data {shown(value)}")

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """False."""
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Self:  # noqa: FBT001, FBT002  torch's signature
        """Return the weight for False; raise `InvalidProblem` for True."""
        if requires_grad:
            raise InvalidProblem(self._owner, "weight", "requires_grad=True", _FROZEN)
        return self

    def share_memory_(self) -> NoReturn:
        """Raise `InvalidProblem`, because there is no memory to share but that of the layer's codes."""
        self.refuse("share_memory_()")

    def data_ptr(self) -> int:
        """Return the address of values, which live as long as this object."""
        self._shown = self.values()
        return int(self._shown.data_ptr())

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array."""
        return self.values().numpy(force=force)

    def tolist(self) -> Any:
        """Return the values as a list."""
        return self.values().tolist()

    def __dlpack__(self, **options: Any) -> Any:
        return self.values().__dlpack__(**options)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return repr(self.values())

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), self.clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.values().__reduce_ex__(protocol)


class CodedLayer(nn.Module):
    """The base of layers with codes and scales, whose `weight` reads as the weight that they stand for.

    Attributes
    ----------
    weight_dtype : dtype
        Dtype of `weight`.
    format : WeightFormat
        The form of the codes.
    """

    format: WeightFormat
    weight_scale: Tensor
    bias: Tensor | None
    weight_dtype: torch.dtype
    in_features: int
    __prepare_scriptable__ = not_scripted

    @property
    def width(self) -> int:
        """K of the weight."""
        return self.in_features

    @property
    def group_size(self) -> int | None:
        """Elements of a group of 4-bit weights, with one scale and offset; 128 for whole rows. None for 8-bit ones."""
        return self.format.group_size

    @property
    @abstractmethod
    def weight_q(self) -> Tensor:
        """Codes, in the form of `format`."""

    @property
    def operand(self) -> Tensor:
        """The weight as the ops take it; see `skuda.torch.formats.WeightFormat.operand`."""
        return self.format.operand(self.weight_q, len(self.weight_scale), self.width)

    @property
    def weight(self) -> Tensor:
        """The dequantized weight of shape (N, K), which is made when it is read; see `weight_of`.

        In compiled code it is an ordinary tensor, and costs nothing if only its shape, dtype or device are read.
        """
        held = self.coded()
        if torch.compiler.is_compiling():
            return weight_of(*held, dtype=self.weight_dtype, width=self.width, form=self.format)
        return DequantizedWeight(held, self.weight_dtype, type(self).__name__, self.width)

    def coded(self) -> tuple[Tensor, ...]:
        """Return the codes, the scales and, if there are some, the divisors of the input."""
        smooth = self._buffers.get("smooth")
        return (self.weight_q, self.weight_scale, *(() if smooth is None else (smooth,)))

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse another weight. It would be lost."""
        if name in ("weight", "weight_q"):
            self._set_codes(name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """Refuse to lose the weight, as a parametrization would."""
        if name == "weight":
            raise InvalidProblem(type(self).__name__, name, "a deletion, as by a parametrization", _RULE)
        super().__delattr__(name)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:  # type: ignore[override]
        """Load the buffers. A weight that does not hold codes is an error, because rounding would lose it."""
        given, own = state_dict.get(f"{prefix}weight"), self.format.dtype
        if not isinstance(given, Tensor) or given.dtype is own:
            self._load(state_dict, prefix, *rest)
        else:
            text = f"the checkpoint has {given.dtype}, the module has codes, {_name(own)}: load before quantizing."
            rest[-1].append(f"{prefix}weight: {text}")

    def _load(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        """Load codes and scales, with torch's arguments."""
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _set_codes(self, name: str, value: Any) -> None:
        had = f"{value.dtype} of shape {list(value.shape)}" if isinstance(value, Tensor) else shown(value)
        raise InvalidProblem(type(self).__name__, name, had, _RULE)


def weight_of(
    codes: Tensor,
    scale: Tensor,
    smooth: Tensor | None = None,
    *,
    dtype: torch.dtype,
    width: int,
    form: WeightFormat | None = None,
) -> Tensor:
    """Return the weight that multiplies a layer's input: ``codes * scale``, or ``codes * scale / smooth``, in a dtype.

    Parameters
    ----------
    codes : tensor
        Codes of a format.
    scale : tensor of shape (N, 1), f32 or narrower
    smooth : tensor of shape (K,), f32, optional
        Divisors of the input, which the codes have taken over.
    dtype : dtype
    width : int
        K.
    form : WeightFormat, optional
        The format of the codes. By default it follows from their shape and dtype.
    """
    if smooth is None:
        return dequantized_weight(codes, scale.view(-1), dtype, width, form)
    rows = dequantized_weight(codes, scale.view(-1), torch.promote_types(dtype, torch.float32), width, form)
    found: Tensor = torch.ops.skuda.smooth.default(rows, smooth)
    return found.to(dtype)


def codes_in(owner: str, held: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the codes in a tensor that a package, such as accelerate, has put in place of codes when it moved a layer.

    It may be the weight, or codes in the weight's dtype. Those returned have their own dtype, s8 or u8.

    Raises
    ------
    InvalidProblem
        For other values.
    """
    if isinstance(held, DequantizedWeight):
        codes = held.codes()
    else:
        rounded = held.to(dtype)
        codes = rounded if held.is_meta or torch.equal(rounded.to(held.dtype), held) else None
    if codes is None:
        raise InvalidProblem(owner, "weight", f"other values, {held.dtype}, in the buffer", f"be codes, {_name(dtype)}")
    return codes


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _written(schema: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Iterator[DequantizedWeight]:
    """Yield the weights that a call of an op writes to."""
    for number, about in enumerate(schema.arguments if schema else ()):
        if about.alias_info is not None and about.alias_info.is_write:
            given = named.get(about.name) if about.kwarg_only or number >= len(args) else args[number]
            yield from (leaf for leaf in tree_leaves(given) if isinstance(leaf, DequantizedWeight))
