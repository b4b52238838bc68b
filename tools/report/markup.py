"""HTML as a tree: text is escaped where it is written out, so nothing that a record says can become markup."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from xml.etree import ElementTree as ET

from skuda.tools.bench_drawing import INK

Node = ET.Element | str
_COLOUR = re.compile(r"#[0-9a-fA-F]{6}\b")


def el(tag: str, *children: Node | None, **attributes: str | None) -> ET.Element:
    """Return an element.

    Parameters
    ----------
    tag : str
        Its name.
    *children : Element, str or None
        What it holds; None is left out.
    **attributes : str or None
        Its attributes, ``class_`` for ``class`` and underscores for dashes; None is left out.
    """
    named = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items() if value is not None}
    node = ET.Element(tag, named)
    for child in children:
        if isinstance(child, str):
            if len(node):
                node[-1].tail = (node[-1].tail or "") + child
            else:
                node.text = (node.text or "") + child
        elif child is not None:
            node.append(child)
    return node


def written(*nodes: ET.Element) -> str:
    """Return elements as HTML."""
    return "\n".join(ET.tostring(node, encoding="unicode", method="html") for node in nodes)


class Cell(NamedTuple):
    """A table's cell.

    Attributes
    ----------
    content : Element or str
        What it shows.
    key : str or None
        What it is sorted by; None for its text.
    kind : str or None
        Its class.
    """

    content: Node
    key: str | None = None
    kind: str | None = None


def number(value: float | None, text: str, kind: str = "") -> Cell:
    """Return a cell with a number, sorted by its value; an empty one for None."""
    return Cell("", "", "number") if value is None else Cell(text, f"{value:.9g}", f"number {kind}".strip())


def row(cells: Iterable[Cell | Node], **attributes: str) -> ET.Element:
    """Return a table's row, whose first cell is its heading."""
    made = el("tr", **attributes)
    for at, cell in enumerate(cells):
        content, key, kind = cell if isinstance(cell, Cell) else Cell(cell)
        head = {"scope": "row"} if at == 0 else {}
        made.append(el("th" if at == 0 else "td", content, data_sort=key, class_=kind, **head))
    # One line each, for whoever reads the file.
    made.tail = "\n"
    return made


def table(label: str, headings: Sequence[str], rows: Iterable[ET.Element], **attributes: str) -> ET.Element:
    """Return a table that scrolls inside its own box and whose columns can be sorted.

    Parameters
    ----------
    label : str
        What it holds, for those who do not see it.
    headings : sequence of str
        Of its columns.
    rows : iterable of Element
        See `row`.
    **attributes : str
        Of the table.
    """
    body = el("tbody", *rows)
    # A heading stands over the side where its column's numbers are.
    numbers = {at for line in body for at, cell in enumerate(line) if cell.get("class", "").startswith("number")}
    head = (
        el("th", heading, scope="col", class_="number" if at in numbers else None)
        for at, heading in enumerate(headings)
    )
    whole = el("table", el("thead", el("tr", *head)), body, aria_label=label, class_="sortable", **attributes)
    return el("div", whole, class_="scroll", role="region", aria_label=label, tabindex="0")


def facts(pairs: Iterable[tuple[str, Node]]) -> ET.Element:
    """Return a list of names and values; empty values are left out."""
    return el("dl", *(part for name, value in pairs if value != "" for part in (el("dt", name), el("dd", value))))


def drawing(svg: bytes, name: str, title: str) -> ET.Element:
    """Return a plot as part of the page: text and axes in the page's colour, data in colours that the page may change.

    Parameters
    ----------
    svg : bytes
        As matplotlib writes it.
    name : str
        Unlike that of any other plot of the page: its ids start with it.
    title : str
        What it shows.
    """
    text = svg.decode()
    root = ET.fromstring(_ALIEN.sub("", text))  # noqa: S314  our own drawing
    used = set(_USED.findall(text))
    for node in root.iter():
        node.tag = _local(node.tag)
        # Names that nobody uses, and indentation, are a third of the drawing.
        if node.get("id") not in used:
            node.attrib.pop("id", None)
        node.text, node.tail = (said if said and said.strip() else None for said in (node.text, node.tail))
        node.attrib = {_local(key): _adapted(_local(key), value, name) for key, value in node.attrib.items()}
    for size in ("width", "height", "version"):
        root.attrib.pop(size, None)
    root.attrib |= {"role": "img", "aria-label": title}
    return el("figure", el("div", root, class_="scroll", tabindex="0", role="region", aria_label=title))


_ALIEN = re.compile(r"<(metadata|style)\b.*?</\1>", re.DOTALL)
"""What would speak about, or to, the whole page."""
_USED = re.compile(r"(?:href=\"#|url\(#)([^\")]+)")


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _adapted(attribute: str, value: str, name: str) -> str:
    if attribute == "id":
        return f"{name}-{value}"
    if attribute == "href":
        return f"#{name}-{value.removeprefix('#')}"
    return _COLOUR.sub(_colour, value.replace("url(#", f"url(#{name}-"))


def _colour(found: re.Match[str]) -> str:
    colour = found[0].lower()
    return "currentColor" if colour == INK.lower() else f"var(--plot-{colour[1:]}, {colour})"
