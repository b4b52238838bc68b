"""``skuda list``: the registered ops and kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from skuda.dispatch import Dispatcher
from skuda.registry.arch import ArchSku
from skuda.registry.elements import ElementKind
from skuda.registry.registry import Registry
from skuda.registry.sku import KernelSku
from skuda.tools.output import (
    OP_WORDS,
    SavePage,
    chosen,
    count,
    folded,
    one_line,
    plain_table,
    print_json,
    records,
    stderr,
    stdout,
    words,
)
from skuda.tools.show.aside import tell_aside
from skuda.tools.show.embed import write_into
from skuda.tools.show.matrix import COMMAND, Found, Judge, elements_of, legend, markdown
from skuda.tools.verify.evidence import Word, load_records, status, tally

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
    page: SavePage | None = None,
    evidence: Path | None = None,
    as_json: bool = False,
) -> int:
    """Run ``skuda list``; `page` writes the report page instead of printing.

    A kernel is listed if each given filter contains its value; ``none`` stands for no second element.
    """
    dispatcher = Dispatcher()
    tell_aside(dispatcher)
    registry = dispatcher.registry
    names = chosen("list", "--op", ops, registry.ops, **OP_WORDS)
    kinds = [kind.value for kind in ElementKind]
    wanted = {
        "element": chosen("list", "--element", elements, kinds),
        "aux_element": chosen("list", "--aux", aux, (_NONE, *kinds)),
        "arch": chosen("list", "--arch", archs, [arch.value for arch in ArchSku]),
        "backend": chosen("list", "--backend", backends, registry.backends),
    }
    found = _filtered(registry, names, {field: values for field, values in wanted.items() if values})
    recorded = load_records(evidence)

    def word(sku: KernelSku) -> Word:
        return status(sku, registry.ops[sku.op], recorded, reference=registry.is_reference(sku)).word

    if page is not None:
        page(registry, records=recorded, found=found, evidence=evidence)
    elif into is not None:
        if write_into(into, COMMAND, markdown(found, word)):
            stderr().print(f"{one_line(str(into))}: the op matrix has changed", soft_wrap=True)
    elif matrix:
        stdout().out(markdown(found, word), end="", highlight=False)
    elif skus:
        _print_skus(registry, [sku for _, kernels in found for sku in kernels], word, as_json=as_json)
    else:
        _print_ops(found, word, as_json=as_json)
    return 0


def _filtered(registry: Registry, names: Sequence[str], wanted: Mapping[str, Sequence[str]]) -> Found:
    """Return the ops of these names, or all, with their kernels whose fields have the wanted values."""
    found = []
    for op in sorted(registry.ops.values(), key=lambda op: (op.category, op.name)):
        kernels = tuple(
            sku
            for sku in registry.skus_of(op.name)
            if all((getattr(sku, field) or _NONE) in values for field, values in wanted.items())
        )
        # An op without kernels is listed too, unless filters ask for kernels.
        if (kernels or not wanted) and (not names or op.name in names):
            found.append((op, kernels))
    return found


def _unique(values: Iterable[str | None]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(value) for value in values if value is not None))


def promise(skus: Iterable[KernelSku]) -> str:
    """Return a word for the weakest guarantee of some kernels: how close to the reference they are."""
    guarantees = [sku.precision_guarantee for sku in skus]
    if not guarantees:
        return "-"
    bounds = [guarantee.max_ulp for guarantee in guarantees]
    worst = None if None in bounds else max(bound for bound in bounds if bound is not None)
    text = {0: "bit-exact", None: "no bound"}.get(worst, f"<= {worst} ulp")
    return text if all(guarantee.deterministic for guarantee in guarantees) else f"{text}, varies"


def _places(skus: Iterable[KernelSku]) -> dict[str, tuple[str, ...]]:
    """Return architectures by backend, both in order of preference."""
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
    elif stdout().is_terminal:
        _print_table(stdout(), found, word)
    else:
        fields = ("element", "aux_element", "arch", "backend")
        records(
            (
                op.name,
                op.category,
                *(",".join(_unique(getattr(sku, field) for sku in skus)) for field in fields),
                len(skus),
                promise(skus),
            )
            for op, skus in found
        )


def _print_table(console: Console, found: Found, word: Judge) -> None:
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
        table.add_row(
            Text(op.name, style="cyan"),
            elements_of(skus, used),
            "\n".join(f"{backend} {' '.join(archs)}" for backend, archs in _places(skus).items()),
            str(len(skus)),
            _promised(promise(skus), tally(word(sku) for sku in skus)),
        )
    console.print(table)
    total = sum(len(skus) for _, skus in found)
    console.print()
    console.print(f"{count(len(found), 'op')}, {count(total, 'kernel')}." + (f" {legend(used)}." if used else ""))
    console.print("`skuda show OP` describes an op, `skuda list --skus` names the kernels.", style="dim")


def _promised(promised: str, evidence: str) -> Text:
    """Return the guarantee and, below it, the evidence, because 80 columns have no room for another column."""
    text = Text().append(promised, style="green" if promised == "bit-exact" else "yellow")
    colours = {"verified": "green", "unverified": "dim"}
    if evidence not in ("reference", "-"):
        style = colours.get(evidence, "bold red" if "failed" in evidence else "yellow")
        text.append("\n" + evidence.replace(", ", "\n"), style=style)
    return text


def _print_skus(registry: Registry, skus: list[KernelSku], word: Judge, *, as_json: bool) -> None:
    console = stdout()
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
    elif not console.is_terminal:
        records((sku.id,) for sku in skus)
    else:
        for sku in skus:
            console.print(folded(sku.id, console.width))
        by_backend = words(f"{number} {name}" for name, number in Counter(sku.backend for sku in skus).items())
        console.print(f"{count(len(skus), 'kernel')}" + (f": {by_backend}" if skus else ""), style="dim")
