"""``skuda bundle``: compiled kernels in one file, written, or looked at."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.text import Text

from skuda.dispatch import Dispatcher
from skuda.dispatch.bundle import Bundle, Member, open_bundle, refuse_to_replace, write_bundle
from skuda.registry.errors import InvalidProblem
from skuda.tools.bundling import foreign_members, members_of
from skuda.tools.cache_page import size_words
from skuda.tools.compile_page import Request, compiled, print_outcomes
from skuda.tools.output import count, plain_table, print_json, records, stderr, stdout, words


def run(file: str, request: Request, *, show: bool = False, as_json: bool = False) -> int:
    """Compile what is asked for into one file, or say what a file holds.

    Parameters
    ----------
    file : str
        The bundle.
    request : Request
        What goes in.
    show : bool
        Write nothing: check the file and print what it holds.
    as_json : bool
        The contents as JSON.

    Returns
    -------
    int
        0; 1 where a kernel does not compile, nothing fits, or a checksum is wrong.

    Raises
    ------
    InvalidProblem
        For a word that nobody knows.
    CompileError
        Without a compiler, or where the cache cannot be written.
    BundleError
        For a file that is no bundle, is damaged, or cannot be written.
    """
    if not file or file.startswith("-"):
        raise InvalidProblem("bundle", "FILE", file or "nothing", "be named first, in front of a problem's fields")
    if show:
        asked = [*request.tokens, *request.ops, *request.archs, *request.devices, *request.backends]
        if asked or request.descriptors is not None:
            raise InvalidProblem("bundle --show", "other words", words(asked) or "--descriptors", "be left out")
        return _show(open_bundle(file), as_json=as_json)
    path = Path(file)
    refuse_to_replace(path)
    found = compiled(request)
    if not found:
        return 1
    if any(outcome.state == "failed" for outcome in found):
        print_outcomes(found, as_json=as_json)
        stderr().print(f"skuda: {path} was not written: not everything compiles", style="red", soft_wrap=True)
        return 1
    write_bundle(path, version("skuda"), members_of(found))
    return _show(open_bundle(file), as_json=as_json)


def _show(bundle: Bundle, *, as_json: bool) -> int:
    troubles = bundle.troubles()
    foreign = foreign_members(bundle, Dispatcher().registry)
    members = bundle.manifest.members
    with bundle.path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if as_json:
        head = {"file": str(bundle.path), "skuda": bundle.manifest.skuda, "size": bundle.size, "sha256": sha256}
        whole = {"troubles": troubles, "foreign": len(foreign), "cubins": [_as_json(member) for member in members]}
        print_json(head | whole)
    elif stdout().is_terminal:
        _print(bundle, sha256)
    else:
        records(tuple(_as_json(member).values()) for member in members)
    for trouble in troubles:
        stderr().print(f"skuda: {trouble}", style="red", soft_wrap=True)
    if foreign:
        told = (
            f"{len(foreign)} of {count(len(members), 'cubin')} were made from other sources than those installed here"
        )
        stderr().print(f"skuda: {told}, which do not find them", style="yellow", soft_wrap=True)
    return 1 if troubles else 0


def _as_json(member: Member) -> dict[str, Any]:
    names = ("sku", "arch", "backend", "compiler", "size", "sha256", "file")
    return {name: getattr(member, name) for name in names} | {"flags": " ".join(member.flags)}


def _print(bundle: Bundle, sha256: str) -> None:
    console, members = stdout(), bundle.manifest.members
    table = plain_table("source", "backend", "arch", "cubins", "size")
    for column in table.columns[3:]:
        column.justify = "right"
    parts: dict[tuple[str, str, str], list[int]] = {}
    for member in members:
        parts.setdefault((member.file, member.backend, member.arch), []).append(member.size)
    for (file, backend, arch), sizes in sorted(parts.items()):
        table.add_row(Text(file, style="cyan"), backend, arch, str(len(sizes)), size_words(sum(sizes)))
    console.print(table)
    console.print()
    console.print(f"{count(len(members), 'cubin')}, {size_words(bundle.size)}, by skuda {bundle.manifest.skuda}")
    console.print(f"compiled by {_compilers(members)}", soft_wrap=True)
    console.print(f"in {bundle.path}", style="dim", soft_wrap=True)
    console.print(f"sha256 {sha256}", style="dim", soft_wrap=True)


def _compilers(members: Sequence[Member]) -> str:
    # The language standard is the same for all.
    return words(sorted({member.compiler.partition(" -std")[0] for member in members}))
