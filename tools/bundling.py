"""What goes into a bundle, and what of one this installation would use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from skuda.dispatch.bundle import Bundle, Member
from skuda.dispatch.sources import read_source
from skuda.registry.registry import Registry
from skuda.tools.cubins import Outcome


def members_of(outcomes: Iterable[Outcome]) -> Iterator[tuple[Member, bytes]]:
    """Return what was compiled, or found in the cache, as a bundle holds it.

    Parameters
    ----------
    outcomes : iterable of Outcome
        None of them failed.
    """
    for sku, launch, backend, device, _ in (outcome.wanted for outcome in outcomes):
        sought = backend.sought(sku, launch, device)
        cubin = backend.cubin(sku, launch, device).cubin
        yield Member.of(sought.key, cubin, sku=sku.id, file=sku.source, compiler=sought.identity or ""), cubin


def foreign_members(bundle: Bundle, registry: Registry) -> list[Member]:
    """Return what a bundle holds for other sources than those installed here: it is never found.

    Parameters
    ----------
    bundle : Bundle
        The bundle.
    registry : Registry
        Whose sources; nothing that only the bundle names is looked for, or imported.
    """
    files = {sku.source for sku in registry if ":" in sku.source} & {m.file for m in bundle.manifest.members}
    here = {file: read_source(file).digest for file in files}
    return [member for member in bundle.manifest.members if here.get(member.file) != member.source]
