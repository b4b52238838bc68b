"""The op matrix as Markdown: every op, its elements, and the evidence for each backend's kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from skuda.registry.elements import CODES, FLOATS, ElementKind
from skuda.registry.op import Op
from skuda.registry.sku import KernelSku
from skuda.tools.verify.evidence import Word, tally

COMMAND = "skuda list --matrix"
"""The command that makes the table."""
_SETS = {"float": FLOATS, "int": CODES, "int8": (ElementKind.S8, ElementKind.U8)}
"""Short names for sets of elements, so that a row fits on a line; the larger set is matched first."""

Found = Sequence[tuple[Op, tuple[KernelSku, ...]]]
Judge = Callable[[KernelSku], Word]
"""Returns the state of the evidence for a kernel."""


def markdown(found: Found, word: Judge) -> str:
    """Return `found` as a Markdown table with a line that explains it; `word` judges each kernel."""
    backends = list(dict.fromkeys(sku.backend for _, skus in found for sku in skus))
    used: set[str] = set()
    rows = [["op", "elements", *(f"`{backend}`" for backend in backends)], ["---"] * (2 + len(backends))]
    for op, skus in found:
        cells = (tally(word(sku) for sku in skus if sku.backend == backend) for backend in backends)
        rows.append([f"`{op.name}`", elements_of(skus, used), *cells])
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return table + (f"\n{legend(used)}.\n" if used else "")


def elements_of(skus: Iterable[KernelSku], used: set[str]) -> str:
    """Return the elements of kernels, and after an x their second elements; see `short`."""
    kinds = ((sku.element for sku in skus), (sku.aux_element for sku in skus))
    named = (short(tuple(dict.fromkeys(str(kind) for kind in each if kind is not None)), used) for each in kinds)
    return " x ".join(filter(None, named))


def short(elements: tuple[str, ...], used: set[str]) -> str:
    """Return the names of elements, with short names for sets of them, which are added to `used`."""
    rest, named = list(elements), []
    for name, members in _SETS.items():
        if set(members) <= set(rest):
            rest = [element for element in rest if element not in members]
            named.append(name)
            used.add(name)
    return " ".join((*named, *rest))


def legend(used: set[str]) -> str:
    """Return a line that explains the short names."""
    return "; ".join(f"{name} = {' '.join(_SETS[name])}" for name in _SETS if name in used)
