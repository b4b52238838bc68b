"""Packs the parameters of a kernel: their layout, and their values as bytes."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from skuda.dispatch.cuda.tensor_maps import ALIGNMENT, BYTES, Encoder, encoder
from skuda.kernels.launch import Columns, Leading, Pointer, Rows, Step, TensorMap, Which
from skuda.registry.cached import cached_property
from skuda.registry.elements import ElementKind

_FORMATS = {
    ElementKind.F16: "e",
    ElementKind.BF16: "H",
    ElementKind.F32: "f",
    ElementKind.F64: "d",
    ElementKind.S8: "b",
    ElementKind.S4: "b",
    ElementKind.U8: "B",
    ElementKind.U4: "B",
    ElementKind.S32: "i",
    ElementKind.U32: "I",
    ElementKind.S64: "q",
}
_FORMATS_OF_KINDS: dict[type, str] = {
    TensorMap: f"{BYTES}s",
    Pointer: "Q",
    Which: "i",
    Leading: "q",
    Rows: "q",
    Columns: "q",
}
"""The formats of parameters without an element."""

_MOST_LAYOUTS = 1024


def formats_of(step: Step) -> tuple[str, ...]:
    """Return the `struct` format of every parameter of a step."""
    plain = _FORMATS_OF_KINDS.get
    # Inlined, because every new size comes here.
    return tuple([plain(each.__class__) or _FORMATS[each.element] for each in step.parameters])  # type: ignore[union-attr]


def parameter_layout(step: Step) -> tuple[tuple[int, int], ...]:
    """Return (offset, size) of every parameter of a step."""
    return _layout(step.lead, formats_of(step))


@lru_cache(maxsize=_MOST_LAYOUTS)
def _layout(lead: int, formats: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    layout, end = [], lead
    for size in map(struct.calcsize, formats):
        alignment = min(size, ALIGNMENT)
        offset = lead + -(-(end - lead) // alignment) * alignment
        layout.append((offset, size))
        end = offset + size
    return tuple(layout)


def packing(step: Step) -> struct.Struct:
    """Return how the parameters of a step are packed, tensor maps encoded."""
    return struct.Struct(f"@{step.lead}x" + "".join(formats_of(step)))


class Packer(NamedTuple):
    """Packs the parameters of a step for the kernel.

    `size` is in bytes. `pack` takes the parameters. A tensor map is two of them: an address and the bytes between rows.
    """

    size: int
    pack: Callable[..., bytes]


def packer(step: Step, op: str, whole: struct.Struct | None = None) -> Packer:
    """Return the packer of a step. Errors name `op`.

    Tensor maps come first, so that alignment needs no gap. `whole` is the `packing`, which steps of other sizes share.
    """
    whole = packing(step) if whole is None else whole
    maps: list[Encoder] = [encoder(each, op) for each in step.parameters if isinstance(each, TensorMap)]
    if not maps:
        return Packer(whole.size, whole.pack)
    if len(maps) == 2:  # every product on tensor cores
        first, second = maps

        def pack_two(a: int, a_leading: int, b: int, b_leading: int, *given: Any) -> bytes:
            return whole.pack(first(a, a_leading), second(b, b_leading), *given)

        return Packer(whole.size, pack_two)
    count = len(maps)

    def pack(*given: Any) -> bytes:
        made = [encode(given[2 * at], given[2 * at + 1]) for at, encode in enumerate(maps)]
        return whole.pack(*made, *given[2 * count :])

    return Packer(whole.size, pack)


class Packed:
    """The steps of a launch, and the packing of their parameters. Errors name `op`.

    `packings` has the `packing` of each.
    """

    def __init__(self, steps: tuple[Step, ...], packings: tuple[struct.Struct, ...], op: str) -> None:
        self.steps, self.op, self._packings = steps, op, packings

    @cached_property
    def packers(self) -> tuple[Packer, ...]:
        """The packer of each step, made by the first run."""
        return tuple(packer(step, self.op, whole) for step, whole in zip(self.steps, self._packings, strict=True))


def packable(number: Any, element: ElementKind) -> Any:
    """Return a number that `struct` packs exactly: f32 is rounded, and bf16 becomes its bits."""
    if element is ElementKind.BF16:
        return struct.unpack("<I", struct.pack("<f", float(number)))[0] >> 16
    if element is ElementKind.F32:
        return struct.unpack("<f", struct.pack("<f", float(number)))[0]
    return number if isinstance(number, int) else float(number)
