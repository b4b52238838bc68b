"""Reads a checkpoint: the fields of its config, and its tensors, each with a check."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol, Self

import torch
from torch import Tensor

from skuda.registry.errors import InvalidRecord
from skuda.registry.text import shown

Kind = tuple[torch.dtype | str, tuple[int, ...]]
"""Dtype and shape of a tensor. A dtype that torch lacks is text."""

SCALES = (torch.float32, torch.bfloat16, torch.float16)
CODES = (torch.int8, torch.int32)
ONE = ((1,), (), (1, 1))
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
        self.device: torch.device | None = None
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

    def copies(self, device: torch.device) -> Self:
        """Return the same tensors, of which `take` returns copies on a device."""
        made = type(self)(self.source, self.kinds, self._read, files=self.files, prefix=self._prefix, left=self._left)
        made.device = device
        return made

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
        found = self._read(full)
        return found if self.device is None else found.detach().to(self.device, copy=True)

    def take_zeros(
        self, name: str, dtypes: tuple[torch.dtype, ...] = CODES, why: str = "the config says that this is symmetric"
    ) -> None:
        """Take a tensor of zeros, if it is there, such as the zero points that old writers store of a symmetric one."""
        if name in self:
            self.take(name, dtypes, self.kinds[self._prefix + name][1])
            if bool(self._read(self._prefix + name).any()):  # copies may have no values
                self.refuse(name, "other numbers", f"be 0: {why}")

    def finish(self) -> None:
        """Raise if a tensor with the prefix was not taken."""
        for name in sorted(name for name in self._left if name.startswith(self._prefix)):
            self.refuse(name.removeprefix(self._prefix), _text(self.kinds[name]), _ABSENT)

    def refuse(self, name: str, had: str, rule: str) -> NoReturn:
        """Raise `InvalidRecord` for a tensor."""
        raise InvalidRecord(self.source, f"tensor {self._prefix}{name}", had, rule)


class ConfigFields:
    """Takes the fields of a JSON object one by one, and refuses the fields that are left."""

    def __init__(self, source: str, place: str, fields: object) -> None:
        self.source, self.place = source, place
        if not isinstance(fields, Mapping):
            self.refuse("", shown(fields), "be an object that describes W8A8")
        self.fields: Mapping[str, Any] = fields
        self.names = list(fields)

    def refuse(self, name: str, had: str, rule: str) -> NoReturn:
        """Raise `InvalidRecord` for a field."""
        raise InvalidRecord(self.source, ".".join(filter(None, (self.place, name))), had, rule)

    def take(self, name: str, **default: Any) -> Any:
        """Return a field. Without a default it is required."""
        if name in self.names:
            self.names.remove(name)
            return self.fields[name]
        if "default" not in default:
            self.refuse(name, "nothing", "be given")
        return default["default"]

    def one_of(self, name: str, values: list[Any], **default: Any) -> Any:
        """Take a field that has one of these values."""
        found = self.take(name, **default)
        if not any(type(found) is type(value) and found == value for value in values):
            allowed = " or ".join(map(json.dumps, values))
            self.refuse(name, shown(found), f"be {allowed}: no other scheme is supported")
        return found

    def absent(self, *names: str) -> None:
        """Raise for fields that are not null."""
        for name in names:
            found = self.take(name, default=None)
            if found not in (None, {}, []):
                self.refuse(name, shown(found), "be null: it is not supported")

    def free(self, *names: str) -> None:
        """Skip fields that do not change the meaning of codes."""
        for name in names:
            self.take(name, default=None)

    def common(self, *bits: int) -> int:
        """Read the fields of a quantized tensor other than its strategy. Return its bits, one of these or 8."""
        found: int = self.one_of("num_bits", [*bits] or [8], default=8)
        self.one_of("type", ["int"], default="int")
        self.one_of("group_size", [None, -1], default=None)
        self.one_of("actorder", [None, False], default=None)
        self.absent("block_structure")
        self.free("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
        self.finish()
        return found

    def targets(self, name: str, **default: Any) -> tuple[str, ...]:
        """Read a list of targets."""
        found = self.take(name, **default)
        if not isinstance(found, list | tuple) or not all(isinstance(target, str) for target in found):
            self.refuse(name, shown(found), "be a list of names")
        for target in found:
            try:
                re.compile(target.removeprefix("re:") if target.startswith("re:") else "")
            except (re.error, RecursionError, OverflowError) as error:
                self.refuse(name, target, f"be regular expressions ({error})")
        return tuple(found)

    def finish(self) -> None:
        """Raise if a field was not taken."""
        for name in self.names:
            self.refuse(name, shown(self.fields[name]), "be absent: this version of skuda does not know it")


def _text(kind: Kind) -> str:
    return f"{kind[0]} of shape {list(kind[1])}"
