"""``skuda bundle``: compiled kernels in one file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from skuda.dispatch import Dispatcher
from skuda.dispatch.compile.bundle import Bundle, open_bundle, refuse_to_replace, write_bundle
from skuda.dispatch.compile.member import CubinRecord
from skuda.kernels.sources import read_source
from skuda.registry.errors import InvalidProblem
from skuda.registry.registry import Registry
from skuda.tools.options import Archs, Backends, Descriptors, Devices, Json, Ops, flag, own_options
from skuda.tools.output import count, present, table_of, tell, words
from skuda.tools.ship.cache import compiler_words, size_words
from skuda.tools.ship.compile import compiled, print_outcomes
from skuda.tools.ship.cubins import Outcome


def run(
    context: typer.Context,
    *,
    ops: Ops = None,
    descriptors: Descriptors = None,
    archs: Archs = None,
    devices: Devices = None,
    backends: Backends = None,
    show: Annotated[bool, flag("--show", help="Check FILE and say what it holds; compile nothing.")] = False,
    as_json: Json = False,
) -> int:
    """Write compiled kernels into one file, to be shipped.

    Takes the options of `skuda compile`, compiles what is not in the cache yet, and writes exactly that into FILE,
    which comes first. A machine whose SKUDA_BUNDLE names a copy of FILE runs from it, with a driver, but without nvcc
    and NVRTC. FILE is code; docs/shipping.md says how a machine accepts no other. Exits with 1, and writes nothing,
    where a kernel does not compile. With --show, exits with 1 where loading would refuse a kernel.
    """
    file, *fields = context.args or [""]
    options = {"ops": ops, "descriptors": descriptors, "archs": archs, "devices": devices, "backends": backends}
    if not file or file.startswith("-"):
        raise InvalidProblem("bundle", "FILE", file or "nothing", "be named first, in front of a problem's fields")
    if show:
        others = [*fields, *(name for name, value in options.items() if value)]
        if others:
            raise InvalidProblem("bundle --show", "other words", words(others), "be left out")
        return _show(open_bundle(file), as_json=as_json)
    path = Path(file)
    refuse_to_replace(path)
    found = compiled("bundle", fields, own_options(context), descriptors, ops, archs, devices, backends)
    if not found:
        return 1
    if any(outcome.state == "failed" for outcome in found):
        print_outcomes(found, as_json=as_json)
        tell(f"{path} was not written: not everything compiles", "red")
        return 1
    write_bundle(path, version("skuda"), _members(found))
    return _show(open_bundle(file), as_json=as_json)


def _members(outcomes: Iterable[Outcome]) -> Iterator[tuple[CubinRecord, bytes]]:
    """Yield the compiled and cached cubins as members of a bundle."""
    for sku, launch, backend, device, _ in (outcome.wanted for outcome in outcomes):
        sought = backend.sought(sku, launch, device)
        cubin = backend.cubin(sku, launch, device).cubin
        yield CubinRecord.of(sought.key, cubin, sku=sku.id, file=sku.source, compiler=sought.identity or ""), cubin


def foreign_members(bundle: Bundle, registry: Registry) -> list[CubinRecord]:
    """Return the members of a bundle that no lookup finds, because the installed sources differ.

    Modules that only the bundle names are not imported.
    """
    files = {sku.source for sku in registry if ":" in sku.source} & {m.file for m in bundle.manifest.members}
    here = {file: read_source(file).digest for file in files}
    return [member for member in bundle.manifest.members if here.get(member.file) != member.source]


def _show(bundle: Bundle, *, as_json: bool) -> int:
    troubles = bundle.troubles()
    foreign = foreign_members(bundle, Dispatcher().registry)
    members = bundle.manifest.members
    with bundle.path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    parts: dict[tuple[str, str, str], list[int]] = {}
    for member in members:
        parts.setdefault((member.file, member.backend, member.arch), []).append(member.size)

    def person(console: Console) -> None:
        rows = [(*key, len(sizes), size_words(sum(sizes))) for key, sizes in sorted(parts.items())]
        console.print(table_of(rows, "source", "backend", "arch", "cubins", "size", numbers=3))
        console.print(f"\n{count(len(members), 'cubin')}, {size_words(bundle.size)}, by skuda {bundle.manifest.skuda}")
        compilers = {compiler_words(member.compiler) for member in members}
        console.print(f"compiled by {words(sorted(compilers))}", soft_wrap=True)
        console.print(f"in {bundle.path}\nsha256 {sha256}", style="dim", soft_wrap=True)

    head = {"file": str(bundle.path), "skuda": bundle.manifest.skuda, "size": bundle.size, "sha256": sha256}
    names = ("sku", "arch", "backend", "compiler", "size", "sha256", "file")
    cubins = [{name: getattr(m, name) for name in names} | {"flags": " ".join(m.flags)} for m in members]
    value = head | {"troubles": troubles, "foreign": len(foreign), "cubins": cubins}
    present(value, person, as_json=as_json)
    for trouble in troubles:
        tell(trouble, "red")
    if foreign:
        made = f"{len(foreign)} of {count(len(members), 'cubin')} were made from other sources"
        tell(f"{made} than those installed here, which do not find them")
    return 1 if troubles else 0
