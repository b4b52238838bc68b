"""The report page: one file without external resources."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from string import Template

from skuda.dispatch.select.environment import skuda_version
from skuda.registry.op import Op
from skuda.registry.registry import Registry
from skuda.registry.sku import KernelSku
from skuda.tools.files import write_whole
from skuda.tools.output import one_line, stderr
from skuda.tools.report.kernels import Row, filters, listing, matrix, summary
from skuda.tools.report.markup import el, written
from skuda.tools.report.measured import Measured, load_measured, measured, measured_of
from skuda.tools.report.records import evidence
from skuda.tools.verify.evidence import Records, load_records, status

Found = Sequence[tuple[Op, tuple[KernelSku, ...]]]


def page(found: Found, registry: Registry, records: Records, runs: Sequence[Measured], *, version: str) -> str:
    """Return the page; equal arguments give equal text.

    The page shows the kernels in `found`; `registry` provides the references and the sources of measured kernels.
    """
    rows = [
        Row(op, sku, status(sku, op, records, reference=registry.is_reference(sku)))
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
        measured(runs, registry),
    )
    script = _part("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Template(_part("page.html")).substitute(
        # Inline styles are allowed, because plots use them on every element; only the script with this hash may run.
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


def save(
    path: Path,
    registry: Registry,
    *,
    records: Records | None = None,
    measured: Sequence[Measured] | None = None,
    found: Found | None = None,
    evidence: Path | None = None,
) -> None:
    """Write the page, and report that on standard error.

    `path` is the file of ``--html``. `records` are runs of ``skuda verify``, and `measured` those of the
    commands that measure; None for those in the folder `evidence`, or in the checkout. The page shows `found`, and of
    the ops in it what was measured; or everything in `registry` if it is None.
    """
    if found is None:
        ops = sorted(registry.ops.values(), key=lambda op: (op.category, op.name))
        found = [(op, registry.skus_of(op.name)) for op in ops]
    records = load_records(evidence) if records is None else records
    runs = load_measured(evidence) if measured is None else measured
    names = {op.name for op, _ in found}
    if not names >= registry.ops.keys():
        runs = measured_of(runs, names)
    write_whole(path, page(found, registry, records, runs, version=skuda_version()))
    stderr().print(f"wrote {one_line(str(path))}", style="dim", soft_wrap=True)
