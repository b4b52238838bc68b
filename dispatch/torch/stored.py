"""Makes int8 layers from stored tensors, after checking each tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol, Self

import torch
from torch import Tensor

from skuda.kernels.linear.packed import shape_of
from skuda.registry.errors import InvalidRecord
from skuda.torch.int4_checkpoint import read_int4
from skuda.torch.int8_linear import DynamicLinear, Int8Linear, SmoothedLinear, StaticLinear
from skuda.torch.replaceable_layers import original_of, sizes_of
from skuda.torch.scheme import ActivationScheme, SchemeGroup

Kind = tuple[torch.dtype | str, tuple[int, ...]]
"""Dtype and shape of a tensor. A dtype that torch lacks is text."""

_SCALES = (torch.float32, torch.bfloat16, torch.float16)
_CODES = (torch.int8, torch.int32)
_ONE = ((1,), (), (1, 1))
"""The shapes of a single scale. Writers differ."""
_ABSENT = "be absent: the model has no such tensor, or another scheme"


class Converted(Protocol):
    """Stored tensors that are merged or split into others."""

    def kinds(self) -> Mapping[str, Kind]:
        """Return the dtypes and shapes of the others, by name."""

    def values(self) -> Mapping[str, Tensor]:
        """Return the others."""


class Tensors:
    """Named tensors. Each is taken with an expected dtype and shape, and none may be left over.

    Parameters
    ----------
    source : str
        The origin, for errors.
    kinds : mapping of str to Kind
        The tensors' dtypes and shapes.
    read : callable
        Returns a tensor by its name.
    files : mapping of str to Path
        The file of each tensor, if there are files.
    prefix : str
        Prefix of every requested name.
    left : set of str
        Names that were not taken yet. By default all names.
    """

    def __init__(
        self,
        source: str,
        kinds: Mapping[str, Kind],
        read: Callable[[str], Tensor],
        *,
        files: Mapping[str, Path] | None = None,
        prefix: str = "",
        left: set[str] | None = None,
    ) -> None:
        self.source, self.kinds, self.files = source, kinds, files or {}
        self._read, self._prefix = read, prefix
        self._left = set(kinds) if left is None else left

    def renamed(self, names: Mapping[str, str], converted: Iterable[Converted] = ()) -> Self:
        """Return tensors under other names.

        Parameters
        ----------
        names : mapping of str to str
            New names by old ones. Other tensors are left out.
        converted : iterable of Converted
            What becomes of those.

        Raises
        ------
        InvalidRecord
            For two tensors of one name.
        """
        read: dict[str, Callable[[str], Tensor]] = {}
        kinds: dict[str, Kind] = {}
        ready: dict[str, Tensor] = {}

        def add(name: str, kind: Kind, function: Callable[[str], Tensor]) -> None:
            if name in kinds:
                raise InvalidRecord(self.source, f"tensor {name}", "two tensors that become it", "be there once")
            kinds[name], read[name] = kind, function

        def made(group: Converted, name: str) -> Tensor:
            if name not in ready:
                ready.update(group.values())
            return ready.pop(name)

        def original(old: str, _: str) -> Tensor:
            return self._read(old)

        for old, new in names.items():
            add(new, self.kinds[old], partial(original, old))
        for group in converted:
            for name, kind in group.kinds().items():
                add(name, kind, partial(made, group))
        return type(self)(self.source, kinds, lambda name: read[name](name))

    def within(self, prefix: str) -> Self:
        """Return the same tensors, with a prefix and a dot before every requested name."""
        return type(self)(self.source, self.kinds, self._read, files=self.files, prefix=f"{prefix}.", left=self._left)

    def without_values(self, name: str) -> Tensor:
        """Return a tensor on the meta device; raise `InvalidRecord` for a dtype that torch lacks."""
        dtype, shape = self.kinds[self._prefix + name]
        if isinstance(dtype, str):
            self.refuse(name, _text((dtype, shape)), _ABSENT)
        return torch.empty(shape, dtype=dtype, device="meta")

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self.kinds

    def empty(self) -> dict[str, Tensor]:
        """Return the tensors with the prefix, by the rest of their names, on the meta device."""
        found = {}
        for full in filter(lambda full: full.startswith(self._prefix), self.kinds):
            name = full.removeprefix(self._prefix)
            if "." in name:
                self.refuse(name, _text(self.kinds[full]), _ABSENT)
            found[name] = self.without_values(name)
        return found

    def take(self, name: str, dtypes: torch.dtype | tuple[torch.dtype, ...], *shapes: tuple[int, ...]) -> Tensor:
        """Return a tensor that has one of these dtypes and one of these shapes.

        Raises
        ------
        InvalidRecord
            If it is missing, or has another dtype or shape.
        """
        allowed = dtypes if isinstance(dtypes, tuple) else (dtypes,)
        full = self._prefix + name
        dtype, shape = self.kinds.get(full, ("nothing", ()))
        if dtype not in allowed or shape not in shapes:
            words = " or ".join(str(each) for each in allowed), " or ".join(str(list(each)) for each in shapes)
            had = _text(self.kinds[full]) if full in self.kinds else "nothing"
            self.refuse(name, had, f"be {words[0]} of shape {words[1]}")
        self._left.discard(full)
        return self._read(full)

    def take_zeros(self, name: str) -> None:
        """Take the zero point of a symmetric tensor, which old writers store, if it is there."""
        if name in self:
            zeros = self.take(name, _CODES, self.kinds[self._prefix + name][1])
            if bool(zeros.any()):
                self.refuse(name, "other codes", "be 0: the config says that this is symmetric")

    def finish(self) -> None:
        """Raise if a tensor with the prefix was not taken."""
        for name in sorted(name for name in self._left if name.startswith(self._prefix)):
            self.refuse(name.removeprefix(self._prefix), _text(self.kinds[name]), _ABSENT)

    def refuse(self, name: str, had: str, rule: str) -> NoReturn:
        """Raise `InvalidRecord` for a tensor."""
        raise InvalidRecord(self.source, f"tensor {self._prefix}{name}", had, rule)


def int8_layer(
    module: Any,
    group: SchemeGroup,
    found: Tensors,
    *,
    smooth: bool = False,
    rounded: Callable[[float], object] | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> DynamicLinear | SmoothedLinear | StaticLinear:
    """Return the int8 replacement of a module. It shares no memory with the stored tensors.

    Parameters
    ----------
    module : Linear, Conv1D, Int8Linear or Part
        The module, for sizes, and the presence and dtype of the bias.
    group : SchemeGroup
        The quantization.
    found : Tensors
        The layer's tensors.
    smooth : bool
        Whether the layer may have smoothing factors.
    rounded : callable, optional
        Allows rounded group scales of 4-bit weights, and takes their largest difference; see `read_int4`.
    device : device, optional
        By default that of the module.
    dtype : dtype, optional
        The dtype of the weight that the codes stand for. The bias may then have any of floats. By default that of the
        module.

    Raises
    ------
    InvalidRecord
        For a tensor that is missing, or has another dtype or shape.
    """
    n, k = module.whole if hasattr(module, "whole") else sizes_of(module)
    biases = _SCALES if dtype or module.bias is None else module.bias.dtype
    device, dtype = device or module.weight.device, dtype or module.weight.dtype
    dtype = dtype if dtype.is_floating_point else None  # codes of another library

    def taken(name: str, dtypes: torch.dtype | tuple[torch.dtype, ...], *shapes: tuple[int, ...]) -> Tensor:
        return found.take(name, dtypes, *shapes).detach().to(device, copy=True)

    if group.int4 is not None:
        four, difference = read_int4(found, (n, k), group.int4, device=device, round_scales=rounded is not None)
        weight, scale = four.packed(group.int4.group_size), four.channel_scale[:, None]
        if rounded is not None:
            rounded(difference)
    else:
        if group.group_size is None:
            weight = taken("weight", torch.int8, (n, k))
        else:
            weight = taken("weight", torch.uint8, shape_of(n, k, group.group_size))
        scale = taken("weight_scale", _SCALES, *(_ONE if group.per_tensor else ((n, 1), (n,))))
        scale = scale.reshape(-1, 1).expand(n, 1).contiguous()
        found.take_zeros("weight_zero_point")
    bias = None if module.bias is None else taken("bias", biases, (n,))
    factors = taken("smooth", torch.float32, (k,)) if smooth and "smooth" in found else None
    made: DynamicLinear | SmoothedLinear | StaticLinear
    if group.activation is not ActivationScheme.DYNAMIC:
        shifted = group.activation is ActivationScheme.SHIFTED
        if not shifted:
            found.take_zeros("input_zero_point")
        made = StaticLinear(
            weight,
            scale,
            bias,
            input_scale=taken("input_scale", _SCALES, *_ONE),
            input_zero_point=taken("input_zero_point", _CODES, *_ONE) if shifted else None,
            smooth=factors,
            dtype=dtype,
            in_features=k,
        )
    elif factors is not None:
        made = SmoothedLinear(weight, scale, bias, smooth=factors, dtype=dtype, in_features=k)
    else:
        made = DynamicLinear(weight, scale, bias, dtype=dtype, in_features=k)
    made.original = original_of(module)
    return made


def check_values(source: str, name: str, layer: Int8Linear) -> None:
    """Raise for a layer with impossible scales or factors.

    Raises
    ------
    InvalidRecord
        For a scale that is negative or not finite, and for an input scale or smoothing factor of 0.
    """
    for part, value in layer.named_buffers():
        if not value.is_floating_point() or part == "bias":
            continue
        least_ok = value >= 0 if part == "weight_scale" else value > 0
        if not bool((least_ok & value.isfinite()).all()):
            rule = "be finite and not negative" if part == "weight_scale" else "be finite and positive"
            raise InvalidRecord(source, f"tensor {name}.{part}", "other values", rule)


def _text(kind: Kind) -> str:
    return f"{kind[0]} of shape {list(kind[1])}"
