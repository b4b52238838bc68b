"""``skuda list``: what is registered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from pathlib import Path

from rich.console import Console
from rich.text import Text

from skuda.dispatch import Dispatcher
from skuda.registry.arch import ArchSku
from skuda.registry.elements import ElementKind
from skuda.registry.op import Op
from skuda.registry.registry import Registry
from skuda.registry.sku import KernelSku
from skuda.tools.evidence import Word, load_records, status, tally
from skuda.tools.matrix import legend, markdown, short, write_into
from skuda.tools.output import count, folded, plain_table, print_json, records, refuse, split, stderr, stdout, words

_NONE = "none"


def run(
    *,
    ops: Sequence[str] = (),
    elements: Sequence[str] = (),
    aux: Sequence[str] = (),
    archs: Sequence[str] = (),
    backends: Sequence[str] = (),
    skus: bool = False,
    matrix: bool = False,
    into: Path | None = None,
    html: Path | None = None,
    evidence: Path | None = None,
    as_json: bool = False,
) -> int:
    """List ops, or kernels, that pass the filters.

    Parameters
    ----------
    ops, elements, aux, archs, backends : sequence of str
        A kernel passes where each filter that was given names its value; ``none`` stands for no second element.
    skus : bool
        One line per kernel rather than one row per op.
    matrix : bool
        A Markdown table of ops by backends.
    into : Path or None
        File to put that table into, between its markers, rather than printing it.
    html : Path or None
        File to write the report page to, rather than printing anything.
    evidence : Path or None
        Folder with records of ``skuda verify``, and of ``skuda bench`` for the page; None for the checkout's.
    as_json : bool
        JSON instead of text.

    Returns
    -------
    int
        Exit status 0, also where nothing passes.

    Raises
    ------
    InvalidProblem
        For a value that nobody knows, and a file that cannot be written.
    """
    registry = Dispatcher().registry
    found = _filtered(registry, ops, elements, aux, archs, backends)
    recorded = load_records(evidence)

    def word(sku: KernelSku) -> Word:
        return status(sku, registry.ops[sku.op], recorded, reference=registry.backends[sku.backend].reference).word

    if html is not None:
        # With what it needs: measuring's records are none of the list's business.
        from skuda.tools.bench_record import load_benches
        from skuda.tools.report import page

        page.check("list", html)
        page.save("list", html, registry, recorded, load_benches(evidence), found)
        stderr().print(f"wrote {html}", style="dim", soft_wrap=True)
    elif matrix or into is not None:
        table = markdown(found, word)
        if into is None:
            stdout().out(table, end="", highlight=False)
        elif write_into(into, table):
            stderr().print(f"{into}: the op matrix has changed", soft_wrap=True)
    elif skus:
        _print_skus(registry, [sku for _, kernels in found for sku in kernels], word, as_json=as_json)
    else:
        _print_ops(found, word, as_json=as_json)
    return 0


Found = list[tuple[Op, tuple[KernelSku, ...]]]
Judge = Callable[[KernelSku], Word]


def _filtered(
    registry: Registry,
    ops: Sequence[str],
    elements: Sequence[str],
    aux: Sequence[str],
    archs: Sequence[str],
    backends: Sequence[str],
) -> Found:
    names = split(ops)
    for name in names:
        if name not in registry.ops:
            refuse("list", "--op", name, registry.ops, kind="a registered op", more="`skuda list` names all")
    element_is = _one_of("--element", elements, _values(ElementKind))
    aux_is = _one_of("--aux", aux, (_NONE, *_values(ElementKind)))
    arch_is = _one_of("--arch", archs, _values(ArchSku))
    backend_is = _one_of("--backend", backends, tuple(registry.backends))
    found = []
    for op in sorted(registry.ops.values(), key=lambda op: (op.category, op.name)):
        kernels = tuple(
            sku
            for sku in registry.skus_of(op.name)
            if element_is(sku.element)
            and aux_is(sku.aux_element or _NONE)
            and arch_is(sku.arch)
            and backend_is(sku.backend)
        )
        # An op that has no kernel at all is still an op, unless the filters ask for kernels.
        unfiltered = not (elements or aux or archs or backends)
        if (kernels or unfiltered) and (not names or op.name in names):
            found.append((op, kernels))
    return found


def _values(kind: type[StrEnum]) -> tuple[str, ...]:
    return tuple(member.value for member in kind)


def _one_of(option: str, given: Sequence[str], known: tuple[str, ...]) -> Callable[[str], bool]:
    wanted = split(given)
    for value in wanted:
        if value not in known:
            refuse("list", option, value, known)
    return lambda value: not wanted or value in wanted


def _unique(values: Iterable[str | None]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(value) for value in values if value is not None))


def promise(skus: Iterable[KernelSku]) -> str:
    """Say in a word how close to the reference kernels promise to be: the weakest of them counts."""
    guarantees = [sku.precision_guarantee for sku in skus]
    if not guarantees:
        return "-"
    bounds = [guarantee.max_ulp for guarantee in guarantees]
    worst = None if None in bounds else max(bound for bound in bounds if bound is not None)
    text = {0: "bit-exact", None: "no bound"}.get(worst, f"<= {worst} ulp")
    return text if all(guarantee.deterministic for guarantee in guarantees) else f"{text}, varies"


def _places(skus: Iterable[KernelSku]) -> dict[str, tuple[str, ...]]:
    """Architectures by backend, both in order of preference."""
    found: dict[str, dict[str, None]] = {}
    for sku in skus:
        found.setdefault(sku.backend, {})[sku.arch.value] = None
    return {backend: tuple(archs) for backend, archs in found.items()}


def _print_ops(found: Found, word: Judge, *, as_json: bool) -> None:
    if as_json:
        print_json(
            [
                {
                    "op": op.name,
                    "category": op.category,
                    "summary": op.summary,
                    "elements": _unique(sku.element for sku in skus),
                    "aux_elements": _unique(sku.aux_element for sku in skus),
                    "backends": _places(skus),
                    "skus": len(skus),
                    "promise": promise(skus),
                    "evidence": Counter(word(sku) for sku in skus),
                }
                for op, skus in found
            ]
        )
        return
    console = stdout()
    if console.is_terminal:
        _matrix(console, found, word)
        return
    records(
        (
            op.name,
            op.category,
            ",".join(_unique(sku.element for sku in skus)),
            ",".join(_unique(sku.aux_element for sku in skus)),
            ",".join(_unique(sku.arch for sku in skus)),
            ",".join(_unique(sku.backend for sku in skus)),
            len(skus),
            promise(skus),
        )
        for op, skus in found
    )


def _matrix(console: Console, found: Found, word: Judge) -> None:
    if not found:
        console.print("no op passes these filters", style="yellow")
        return
    table = plain_table("op", "elements", "where", "SKUs", "promise")
    table.columns[0].no_wrap = table.columns[1].no_wrap = True
    table.columns[3].justify = "right"
    used: set[str] = set()
    category = None
    for op, skus in found:
        if op.category != category:
            category = op.category
            table.add_row(Text(f"{category}", style="bold"))
        first = short(_unique(sku.element for sku in skus), used)
        second = short(_unique(sku.aux_element for sku in skus), used)
        close = promise(skus)
        table.add_row(
            Text(op.name, style="cyan"),
            f"{first} x {second}" if second else first,
            "\n".join(f"{backend} {' '.join(archs)}" for backend, archs in _places(skus).items()),
            str(len(skus)),
            _promised(close, tally(word(sku) for sku in skus)),
        )
    console.print(table)
    total = sum(len(skus) for _, skus in found)
    console.print()
    console.print(f"{count(len(found), 'op')}, {count(total, 'kernel')}." + (f" {legend(used)}." if used else ""))
    console.print("`skuda show OP` tells all about one, `skuda list --skus` names the kernels.", style="dim")


def _promised(close: str, evidence: str) -> Text:
    """Say what is promised, and below it what was verified: 80 columns have no room for another column."""
    text = Text().append(close, style="green" if close == "bit-exact" else "yellow")
    colours = {"verified": "green", "unverified": "dim"}
    if evidence not in ("reference", "-"):
        style = colours.get(evidence, "bold red" if "failed" in evidence else "yellow")
        text.append("\n" + evidence.replace(", ", "\n"), style=style)
    return text


def _print_skus(registry: Registry, skus: list[KernelSku], word: Judge, *, as_json: bool) -> None:
    if as_json:
        print_json(
            [
                {
                    "id": sku.id,
                    "origin": registry.origin(sku.id),
                    "evidence": word(sku),
                    "sku": sku.model_dump(mode="json"),
                }
                for sku in skus
            ]
        )
        return
    console = stdout()
    if not console.is_terminal:
        records((sku.id,) for sku in skus)
        return
    for sku in skus:
        console.print(folded(sku.id, console.width))
    by_backend = words(f"{sum(sku.backend == name for sku in skus)} {name}" for name in _places(skus))
    console.print(f"{count(len(skus), 'kernel')}" + (f": {by_backend}" if skus else ""), style="dim")
