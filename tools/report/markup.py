"""HTML as a tree: text is escaped when it is written, so no text of a record can become markup."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from xml.etree import ElementTree as ET

from skuda.tools.plot import INK

Node = ET.Element | str
_COLOUR = re.compile(r"#[0-9a-fA-F]{6}\b")


def el(tag: str, *children: Node | None, **attributes: str | None) -> ET.Element:
    """Return an element with its children and attributes; None is left out.

    A keyword ``class_`` is the attribute ``class``; underscores are dashes.
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
    """A table's cell: its content, its sort key (None for its text), and its class."""

    content: Node
    key: str | None = None
    kind: str | None = None


def number(value: float | None, text: str, kind: str = "") -> Cell:
    """Return a cell with a number, sorted by its value; the cell is empty for None."""
    return Cell("", "", "number") if value is None else Cell(text, f"{value:.9g}", f"number {kind}".strip())


def row(cells: Iterable[Cell | Node], **attributes: str) -> ET.Element:
    """Return a table's row, whose first cell is its heading."""
    made = el("tr", **attributes)
    for at, cell in enumerate(cells):
        content, key, kind = cell if isinstance(cell, Cell) else Cell(cell)
        head = {"scope": "row"} if at == 0 else {}
        made.append(el("th" if at == 0 else "td", content, data_sort=key, class_=kind, **head))
    # Each row is one line, so that people can read the file.
    made.tail = "\n"
    return made


def table(label: str, headings: Sequence[str], rows: Iterable[ET.Element], **attributes: str) -> ET.Element:
    """Return a table that scrolls inside its own box and has sortable columns; `label` describes its content."""
    body = el("tbody", *rows)
    # The heading of a numeric column is aligned like its numbers.
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

    `svg` is matplotlib's output; `name` is the prefix of its ids and must be unique on the page.
    """
    text = svg.decode()
    root = ET.fromstring(_ALIEN.sub("", text))  # noqa: S314  our own drawing
    used = set(_USED.findall(text))
    for node in root.iter():
        node.tag = _local(node.tag)
        # Unused ids and indentation are a third of the drawing.
        if node.get("id") not in used:
            node.attrib.pop("id", None)
        node.text, node.tail = (text if text and text.strip() else None for text in (node.text, node.tail))
        node.attrib = {_local(key): _adapted(_local(key), value, name) for key, value in node.attrib.items()}
    for size in ("width", "height", "version"):
        root.attrib.pop(size, None)
    root.attrib |= {"role": "img", "aria-label": title}
    return el("figure", el("div", root, class_="scroll", tabindex="0", role="region", aria_label=title))


_ALIEN = re.compile(r"<(metadata|style)\b.*?</\1>", re.DOTALL)
"""Elements of a drawing that would affect or describe the whole page."""
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
