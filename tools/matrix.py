"""The op matrix as Markdown: every op, its elements, and what the evidence says about each backend's kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from skuda.registry.elements import CODES, FLOATS, ElementKind
from skuda.registry.errors import InvalidProblem
from skuda.registry.op import Op
from skuda.registry.sku import KernelSku
from skuda.tools.evidence import Word, tally

BEGIN, END = "<!-- op matrix: made by `skuda list --matrix` -->", "<!-- end of the op matrix -->"
_SETS = {"float": FLOATS, "int": CODES, "int8": (ElementKind.S8, ElementKind.U8)}
"""Short names for sets of elements, so that a row fits on a line; the larger set is tried first."""

Found = Iterable[tuple[Op, tuple[KernelSku, ...]]]


def markdown(found: Found, word: Callable[[KernelSku], Word]) -> str:
    """Return the matrix as a Markdown table with a line that explains it.

    Parameters
    ----------
    found : iterable of (Op, tuple of KernelSku)
        What to show.
    word : callable
        What the evidence says about a kernel.
    """
    rows = list(found)
    backends = list(dict.fromkeys(sku.backend for _, skus in rows for sku in skus))
    used: set[str] = set()
    lines = [
        "| op | elements | " + "".join(f"`{backend}` | " for backend in backends).rstrip(),
        "| --- | --- |" + " --- |" * len(backends),
    ]
    for op, skus in rows:
        first, second = (
            short(tuple(dict.fromkeys(str(part) for part in parts if part is not None)), used)
            for parts in ((sku.element for sku in skus), (sku.aux_element for sku in skus))
        )
        told = [tally(word(sku) for sku in skus if sku.backend == backend) for backend in backends]
        cells = [f"`{op.name}`", f"{first} x {second}" if second else first, *told]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + (f"\n\n{legend(used)}." if used else "") + "\n"


def short(elements: tuple[str, ...], used: set[str]) -> str:
    """Name elements, sets of them by their short names, which are added to `used`."""
    rest, said = list(elements), []
    for name, members in _SETS.items():
        if set(members) <= set(rest):
            rest = [element for element in rest if element not in members]
            said.append(name)
            used.add(name)
    return " ".join((*said, *rest))


def legend(used: set[str]) -> str:
    """Say what the short names stand for."""
    return "; ".join(f"{name} = {' '.join(_SETS[name])}" for name in _SETS if name in used)


def embedded(text: str, table: str, where: str) -> str:
    """Return a text with the table between the markers.

    Parameters
    ----------
    text : str
        The text, which has both markers.
    table : str
        The table.
    where : str
        The text's file, for errors.

    Raises
    ------
    InvalidProblem
        Where a marker is missing.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise InvalidProblem("list", "--into", where, f"have the lines {BEGIN} and {END}, one behind the other")
    return f"{before}{BEGIN}\n{table}{END}{after}"


def write_into(path: Path, table: str) -> bool:
    """Put the table into a file; return whether that changed it.

    Raises
    ------
    InvalidProblem
        Where the file cannot be read, or lacks a marker.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidProblem("list", "--into", str(path), f"be a file that can be read ({error})") from error
    fresh = embedded(text, table, str(path))
    if fresh == text:
        return False
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(fresh, encoding="utf-8")
    beside.replace(path)
    return True
