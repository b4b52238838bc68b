"""Properties of a cubin's kernels: parameters, registers, stack. They are read from the ELF file, without a GPU.

The attributes are those that ``cuobjdump --dump-elf`` prints. NVIDIA does not document their encoding, so a missing
attribute means that the property is unknown, not that the cubin is invalid.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

_REGISTERS, _FRAME, _PARAMETER = 0x2F, 0x11, 0x17
_SIZED = 4  # EIFMT_SVAL: the attribute is followed by its size and payload; all others are four bytes in all


class Kernel(NamedTuple):
    """Properties of one kernel."""

    parameters: tuple[tuple[int, int], ...]
    """Offset and size of every parameter in bytes, in order; empty if unknown or if there are none."""
    registers: int | None  # registers per thread
    frame: int | None  # bytes of stack per thread; for a kernel without local arrays and calls, this is what it spills


def read_kernels(cubin: bytes) -> dict[str, Kernel]:
    """Return the properties of every kernel of a cubin, by name.

    Raise `ValueError` if the bytes are not a 64-bit ELF file.
    """
    if cubin[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a cubin: it does not begin as a 64-bit little-endian ELF file")
    try:
        sections = dict(_sections(cubin))
        symbols = _symbols(sections)
    except (struct.error, IndexError, OverflowError, ValueError) as error:
        raise ValueError(f"not a cubin: {error}") from error
    registers: dict[str, int] = {}
    frames: dict[str, int] = {}
    for kind, payload in _attributes(sections.get(".nv.info", b"")):
        if kind in {_REGISTERS, _FRAME} and len(payload) == 8:
            symbol, value = struct.unpack("<II", payload)
            (registers if kind == _REGISTERS else frames)[symbols.get(symbol, "")] = value
    found = {}
    for name, content in sections.items():
        if not name.startswith(".nv.info."):
            continue
        entry = name.removeprefix(".nv.info.")
        parameters = {}
        for kind, payload in _attributes(content):
            if kind == _PARAMETER and len(payload) == 12:
                _, ordinal, offset, flags = struct.unpack("<IHHI", payload)
                parameters[ordinal] = (offset, flags >> 18)
        ordered = tuple(parameters[i] for i in sorted(parameters))
        found[entry] = Kernel(ordered, registers.get(entry), frames.get(entry))
    return found


def _sections(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    strings = headers[names][4]
    for name, kind, _, _, offset, length in headers:
        start = strings + name
        content = b"" if kind == 8 else cubin[offset : offset + length]  # 8: SHT_NOBITS
        yield cubin[start : cubin.index(b"\0", start)].decode(), content


def _symbols(sections: dict[str, bytes]) -> dict[int, str]:
    table, strings = sections.get(".symtab", b""), sections.get(".strtab", b"")
    found = {}
    for index in range(len(table) // 24):
        (name,) = struct.unpack_from("<I", table, index * 24)
        found[index] = strings[name : strings.index(b"\0", name)].decode()
    return found


def _attributes(content: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(content):
        form, kind, value = struct.unpack_from("<BBH", content, at)
        at += 4
        if form == _SIZED:
            yield kind, content[at : at + value]
            at += value
        else:
            yield kind, struct.pack("<H", value)
