"""The report page: built from values, written as one file that asks nobody for anything."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from string import Template

from skuda.registry.errors import InvalidProblem
from skuda.registry.op import Op
from skuda.registry.registry import Registry
from skuda.registry.sku import KernelSku
from skuda.tools.bench_record import BenchRecord
from skuda.tools.evidence import Records, status
from skuda.tools.report.kernels import Row, filters, listing, matrix, summary
from skuda.tools.report.markup import el, written
from skuda.tools.report.records import evidence, measured
from skuda.tools.verifying import skuda_version

Found = Sequence[tuple[Op, tuple[KernelSku, ...]]]


def page(found: Found, registry: Registry, records: Records, benches: Sequence[BenchRecord], *, version: str) -> str:
    """Return the page; the same for the same values.

    Parameters
    ----------
    found : sequence of (Op, tuple of KernelSku)
        What it shows of the registry.
    registry : Registry
        All that is registered: what is a reference, and which measured kernels have changed since.
    records : Records
        Runs of ``skuda verify``.
    benches : sequence of BenchRecord
        Runs of ``skuda bench``.
    version : str
        Of skuda.
    """
    rows = [
        Row(op, sku, status(sku, op, records, reference=registry.backends[sku.backend].reference))
        for op, skus in found
        for sku in skus
    ]
    body = written(
        summary(rows, len(found)),
        el(
            "section",
            el("h2", "Op matrix and kernels", id="registered"),
            filters(rows),
            el("h3", "Op matrix"),
            matrix(found, rows),
            el("h3", "Kernels", id="listed"),
            listing(rows),
        ),
        evidence(records.files, rows),
        measured(benches, registry),
    )
    script = _part("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Template(_part("page.html")).substitute(
        # Styles may be inline: plots set theirs on every element. Of scripts only this one runs.
        policy=f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'",
        version=written(el("span", version)),
        style=_part("page.css"),
        body=body,
        script=script,
    )


@cache
def _part(name: str) -> str:
    return (files("skuda.tools.report") / name).read_text(encoding="utf-8")


def check(command: str, path: Path) -> None:
    """Refuse a place for the page before anything slow happens.

    Parameters
    ----------
    command : str
        Whose option ``--html`` is.
    path : Path
        The file.

    Raises
    ------
    InvalidProblem
        For a folder, and for a file in a folder that does not exist.
    """
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise InvalidProblem(command, "--html", str(path), "be a file in a folder that exists")


def save(
    command: str,
    path: Path,
    registry: Registry,
    records: Records,
    benches: Sequence[BenchRecord],
    found: Found | None = None,
) -> None:
    """Write the page; a reader never sees half of it.

    Parameters
    ----------
    command : str
        Whose option ``--html`` is.
    path : Path
        The file.
    registry, records, benches
        See `page`.
    found : sequence of (Op, tuple of KernelSku) or None
        What it shows of the registry; None for all.

    Raises
    ------
    InvalidProblem
        Where the file cannot be written.
    """
    if found is None:
        ops = sorted(registry.ops.values(), key=lambda op: (op.category, op.name))
        found = [(op, registry.skus_of(op.name)) for op in ops]
    text = page(found, registry, records, benches, version=skuda_version())
    fresh = path.with_name(f".{path.name}.new")
    try:
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)
    except OSError as error:
        raise InvalidProblem(command, "--html", str(path), f"be a file that can be written ({error})") from error
