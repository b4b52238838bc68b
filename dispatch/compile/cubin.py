"""Properties of a cubin's kernels: parameters, registers, stack, and a hash of their machine code, without a GPU.

The attributes are those that ``cuobjdump --dump-elf`` prints. NVIDIA does not document their encoding, so a missing
attribute means that the property is unknown, not that the cubin is invalid.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

_REGISTERS, _FRAME, _PARAMETER = 0x2F, 0x11, 0x17
_BANK, _EXTERNS = 0x0A, 0x0F
_NAMED = {_BANK: 4, _EXTERNS: 1 << 16}
"""Attributes that begin with indices of symbols, and how many bytes of them: another name may change an index."""
_ENTRY = (".text.", ".nv.info.", ".nv.constant", ".nv.shared.")
"""How the names of sections of one kernel begin."""
_WHOLE = re.compile(r"\.nv\.(global.*|constant\d+)")
"""Names of sections that all kernels may read."""
_NO_CONTENT, _FLAGS_SHIFT = 8, 20  # SHT_NOBITS; the lower flags are ELF's own
_REGISTERS_SHIFT = 24
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
        sections = {section.name: section.content for section in _sections(cubin)}
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


def machine_code(cubin: bytes) -> dict[str, str]:
    """Return a hash of the machine code of every function of a cubin, by name.

    It covers the code, its registers and barriers, its attributes, and the constants, tables and sizes of shared memory
    that it may use. Names of functions and variables do not count, and neither does what only a debugger reads. Raise
    `ValueError` if the bytes are not a cubin.
    """
    try:
        sections = list(_sections(cubin))
        contents = {section.name: section.content for section in sections}
        symbols = _symbols(contents)
        of_all = [each.hashed(each.name) for each in sections if _WHOLE.fullmatch(each.name)]
        found = {}
        for entry in (each.name.removeprefix(".text.") for each in sections if each.name.startswith(".text.")):
            own = [
                each.hashed(each.name.removesuffix(entry), _attributed(each) if ".nv.info." in each.name else None)
                for each in sections
                if each.name.startswith(_ENTRY) and each.name.endswith(f".{entry}")
            ]
            about = [
                (kind, payload[4:])
                for kind, payload in _attributes(contents.get(".nv.info", b""))
                if len(payload) >= 4 and symbols.get(struct.unpack_from("<I", payload)[0]) == entry
            ]
            found[entry] = hashlib.sha256(repr((sorted(own), sorted(about), sorted(of_all))).encode()).hexdigest()
    except (struct.error, IndexError, OverflowError, ValueError) as error:
        raise ValueError(f"not a cubin: {error}") from error
    return found


class _Section(NamedTuple):
    """A section of an ELF file; `info` and `flags` of a kernel's code have its registers and barriers."""

    name: str
    flags: int
    info: int
    size: int
    content: bytes

    def hashed(self, name: str, content: object = None) -> tuple[str, int, int, int, str]:
        content = self.content if content is None else content
        facts = self.flags >> _FLAGS_SHIFT, self.info >> _REGISTERS_SHIFT, self.size
        return name, *facts, hashlib.sha256(repr(content).encode()).hexdigest()


def _attributed(section: _Section) -> list[tuple[int, bytes]]:
    return [(kind, payload[_NAMED.get(kind, 0) :]) for kind, payload in _attributes(section.content)]


def _sections(cubin: bytes) -> Iterator[_Section]:
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQII", cubin, table + i * size) for i in range(count)]
    strings = headers[names][4]
    for name, kind, flags, _, offset, length, _, info in headers:
        start = strings + name
        content = b"" if kind == _NO_CONTENT else cubin[offset : offset + length]
        yield _Section(cubin[start : cubin.index(b"\0", start)].decode(), flags, info, length, content)


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
