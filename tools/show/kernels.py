"""What the commands say about kernels in a few words: their elements, their promise, and the evidence for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache

from skuda.dispatch import Dispatcher
from skuda.registry.elements import CODES, CODES8, FLOATS, WHOLE_CODES, ElementKind
from skuda.registry.op import Op
from skuda.registry.registry import Registry
from skuda.registry.sku import KernelSku
from skuda.tools.output import tell
from skuda.tools.verify.evidence import KernelStatus, Records, status, tally

Found = Sequence[tuple[Op, tuple[KernelSku, ...]]]
Judge = Callable[[KernelSku], KernelStatus]
"""Returns what the evidence says about a kernel."""

_SETS = {"float": FLOATS, "int": CODES, "code": (*WHOLE_CODES, ElementKind.S4), "int8": CODES8}
_SETS |= {"sum": (ElementKind.S32, ElementKind.S64)}
"""Short names for sets of elements, so that an op fits on a line; the larger set is matched first."""


def tell_aside(dispatcher: Dispatcher) -> None:
    """Print one line on standard error for every plug-in that is set aside, and what to do about it."""
    for plugin in dispatcher.quarantined:
        tell(f"{plugin}; {plugin.remedy}")


def judge_of(registry: Registry, recorded: Records) -> Judge:
    """Return the function that says what some records say about a kernel."""
    return cache(lambda sku: status(sku, registry.ops[sku.op], recorded, reference=registry.is_reference(sku)))


def unique(values: Iterable[object]) -> tuple[str, ...]:
    """Return each value once, as text, without None."""
    return tuple(dict.fromkeys(str(value) for value in values if value is not None))


def elements_of(skus: Iterable[KernelSku], used: set[str]) -> str:
    """Return the elements of kernels, and after an x their second elements; short names are added to `used`."""
    skus = tuple(skus)
    found = (unique(sku.element for sku in skus), unique(sku.aux_element for sku in skus))
    return " x ".join(_short(elements, used) for elements in found if elements)


def _short(elements: Sequence[str], used: set[str]) -> str:
    rest, named = list(elements), []
    for name, members in _SETS.items():
        if set(members) <= set(rest):
            rest = [element for element in rest if element not in members]
            named.append(name)
            used.add(name)
    return " ".join((*named, *rest))


def legend(used: set[str]) -> str:
    """Return a line that explains short names of elements."""
    return "; ".join(f"{name} = {' '.join(_SETS[name])}" for name in _SETS if name in used)


def promise(skus: Iterable[KernelSku]) -> str:
    """Return the weakest guarantee of some kernels: how far they may be from the reference."""
    guarantees = [sku.precision_guarantee for sku in skus]
    if not guarantees:
        return "-"
    bounds = [guarantee.max_ulp for guarantee in guarantees]
    worst = None if None in bounds else max(bound for bound in bounds if bound is not None)
    text = {0: "bit-exact", None: "no bound"}.get(worst, f"<= {worst} ulp")
    return text if all(guarantee.deterministic for guarantee in guarantees) else f"{text}, varies"


def evidence_words(skus: Iterable[KernelSku], judge: Judge) -> str:
    """Count kernels by what the evidence says: ``24 verified on H200, 2 unverified``."""
    return tally(map(judge, skus))
