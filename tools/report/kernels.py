"""Registered kernels on the report page: counts, filters, the op matrix and the list of kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from urllib.parse import urlencode
from xml.etree.ElementTree import Element

from skuda.registry.op import Op
from skuda.registry.sku import KernelSku
from skuda.tools.output import count
from skuda.tools.report.markup import Cell, el, row, table
from skuda.tools.show.list import promise
from skuda.tools.verify.evidence import Status, Word

WORDS: tuple[Word, ...] = ("verified", "failed", "stale", "unverified", "reference")
_SIGNS: dict[Word, str] = {"verified": "✓", "failed": "✗", "stale": "~", "unverified": "?", "reference": "="}
_MEANINGS: dict[Word, str] = {
    "verified": "run and compared with the reference, both as they are today",
    "failed": "run as it is today, and wrong or in error",
    "stale": "run, but the kernel, its promise or its reference has changed since",
    "unverified": "no run is recorded",
    "reference": "what the others are compared with",
}


class Row(NamedTuple):
    """A kernel and the state of its evidence."""

    op: Op
    sku: KernelSku
    status: Status

    @property
    def facets(self) -> dict[str, str]:
        """The values that the page's filters compare."""
        return {
            "op": self.sku.op,
            "element": str(self.sku.element),
            "arch": self.sku.arch.value,
            "backend": self.sku.backend,
            "status": self.status.word,
        }


def badge(word: Word, number: int | None = None) -> Element:
    """Return a status as a word with a sign, so that it does not depend on colour alone."""
    return el("span", f"{_SIGNS[word]} {'' if number is None else f'{number} '}{word}", class_=f"badge {word}")


def summary(rows: Sequence[Row], ops: int) -> Element:
    """Return the number of ops, and of kernels by status; each status is a link that shows its kernels."""
    counts = Counter(found.status.word for found in rows)
    tiles = (
        el(
            "li",
            el("a", el("strong", f"{counts[word]:,}"), " ", badge(word), href=f"#{urlencode({'status': word})}"),
            el("p", _MEANINGS[word]),
        )
        for word in WORDS
    )
    total = f"{count(ops, 'op')}, {count(len(rows), 'kernel')}"
    return el("section", el("p", total), el("ul", *tiles, class_="tiles"), aria_label="Counts")


def filters(rows: Iterable[Row]) -> Element:
    """Return the form that filters matrix and list; it needs JavaScript and is hidden until that runs."""
    found: dict[str, dict[str, None]] = {}
    for each in rows:
        for name, value in each.facets.items():
            found.setdefault(name, {})[value] = None
    search = el(
        "label",
        el("span", "text"),
        el("input", type="search", name="q", placeholder="part of an id or a promise", autocomplete="off"),
    )
    chosen = (
        el(
            "label",
            el("span", name),
            el("select", el("option", "all", value=""), *(el("option", v, value=v) for v in values), name=name),
        )
        for name, values in found.items()
    )
    reset = el("button", "show all", type="reset")
    shown = el("output", id="count", aria_live="polite")
    label = "Filter kernels"
    return el("form", search, *chosen, reset, shown, id="filters", hidden="", role="search", aria_label=label)


def matrix(found: Iterable[tuple[Op, tuple[KernelSku, ...]]], rows: Sequence[Row]) -> Element:
    """Return the op matrix: op and element by backend and architecture, with the number of kernels of each status.

    An op without kernels is a row too.
    """
    places = list(dict.fromkeys((each.sku.backend, each.sku.arch) for each in rows))
    places.sort(key=lambda place: [each.sku.backend for each in rows].index(place[0]))
    cells: dict[tuple[str, str, str, str], Counter[Word]] = {}
    for each in rows:
        key = (each.sku.op, str(each.sku.element), each.sku.backend, each.sku.arch.value)
        cells.setdefault(key, Counter())[each.status.word] += 1
    lines = []
    for op, skus in found:
        for element in dict.fromkeys(str(sku.element) for sku in skus) or [""]:
            made = [
                _cell(op.name, element, backend, arch.value, cells.get((op.name, element, backend, arch.value)))
                for backend, arch in places
            ]
            name = Cell(el("code", op.name, title=op.summary), op.name)
            lines.append(row([name, el("code", element), *made], data_op=op.name, data_element=element))
    return table("Op matrix", ["op", "element", *(f"{backend} {arch}" for backend, arch in places)], lines, id="matrix")


def _cell(op: str, element: str, backend: str, arch: str, counts: Counter[Word] | None) -> Cell:
    if not counts:
        return Cell(el("span", "absent", class_="absent"), "")
    here = {"op": op, "element": element, "arch": arch, "backend": backend}
    links = (
        el("a", badge(word, counts[word]), href=f"#{urlencode({**here, 'status': word})}", data_status=word)
        for word in WORDS
        if counts[word]
    )
    key = " ".join(f"{WORDS.index(word)} {counts[word]:09}" for word in WORDS if counts[word])
    return Cell(el("span", *links, class_="cell", data_arch=arch, data_backend=backend), key)


def listing(rows: Iterable[Row]) -> Element:
    """Return the table of kernels."""
    headings = ("op", "elements", "arch", "backend", "variant", "promise", "status", "recorded", "id")
    return table("Kernels", headings, map(_line, rows), id="kernels")


def _line(found: Row) -> Element:
    sku, status = found.sku, found.status
    elements = " x ".join(str(part) for part in (sku.element, sku.aux_element) if part is not None)
    where = f"{status.device}, {status.date[:10]}" if status.device else ""
    described = "; ".join(filter(None, (sku.summary, sku.precision_guarantee.describe())))
    cells = (
        el("code", sku.op),
        elements,
        sku.arch.value,
        sku.backend,
        sku.variant,
        promise((sku,)),
        Cell(badge(status.word), str(WORDS.index(status.word))),
        where,
        el("div", el("code", sku.id), el("small", described), class_="id"),
    )
    return row(cells, **{f"data_{name}": value for name, value in found.facets.items()})
