"""``skuda show``: the facts of one kernel or one op."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from skuda.dispatch import Dispatcher
from skuda.registry.descriptor import Argument, Descriptor
from skuda.registry.op import Op
from skuda.registry.registry import Registry
from skuda.registry.sku import KernelSku
from skuda.tools.output import (
    count,
    facts,
    folded,
    heading,
    indented,
    plain_table,
    print_json,
    records,
    reflowed,
    refuse,
    stdout,
)
from skuda.tools.show.aside import tell_aside
from skuda.tools.verify.evidence import Status, load_records, status
from skuda.tools.words.problem import default_words, fields_of, type_words

_IDS_SHOWN = 10


def run(name: str, *, evidence: Path | None = None, as_json: bool = False) -> int:
    """Run ``skuda show``: show a kernel by its id or an op by its name."""
    dispatcher = Dispatcher()
    tell_aside(dispatcher)
    registry = dispatcher.registry
    sku = registry.sku(name)
    if sku is not None:
        reference = registry.is_reference(sku)
        found = status(sku, registry.ops[sku.op], load_records(evidence), reference=reference)
        _show_sku(registry, sku, found, as_json=as_json)
    elif name in registry.ops:
        _show_op(registry, registry.ops[name], as_json=as_json)
    else:
        known = tuple(registry.ops) if "." not in name else tuple(sku.id for sku in registry)
        refuse("show", "ID", name, known, kind="the id of a kernel or the name of an op", more="see `skuda list`")
    return 0


def _show_sku(registry: Registry, sku: KernelSku, found: Status, *, as_json: bool) -> None:
    sections = _sku_facts(registry, sku, found)
    console = stdout()
    if as_json:
        print_json(
            {
                "kind": "sku",
                "id": sku.id,
                "origin": registry.origin(sku.id),
                "verified": found.word in ("verified", "reference"),
                "evidence": asdict(found),
                "promise": sku.precision_guarantee.describe(),
                "requires": _requirements(sku),
                "workspace": _workspace(sku),
                "sku": sku.model_dump(mode="json"),
            }
        )
    elif not console.is_terminal:
        rows = (item for rows in sections.values() for item in rows.items())
        records([("kind", "sku"), ("id", sku.id), *((name, *_lines(value)) for name, value in rows)])
    else:
        console.print(folded(sku.id, console.width), style="bold cyan")
        if sku.summary:
            console.print(indented(sku.summary, 2))
        width = max(len(name) for section in sections.values() for name in section)
        for title, section in sections.items():
            console.print(heading(f"\n{title}"))
            console.print(facts(((name, "\n".join(_lines(value))) for name, value in section.items()), width))


def _lines(value: object) -> list[str]:
    if isinstance(value, list):
        return [str(part) for part in value]
    if isinstance(value, bool):
        return ["yes" if value else "no"]
    return ["none" if value is None else str(value)]


def _requirements(sku: KernelSku) -> list[str]:
    return [sku.arch.describe(), *(constraint.describe() for constraint in sku.constraints)]


def _workspace(sku: KernelSku) -> str:
    return " + ".join(" x ".join((f"{term.bytes_each} bytes", *term.factors)) for term in sku.workspace) or "none"


def _sku_facts(registry: Registry, sku: KernelSku, found: Status) -> dict[str, dict[str, object]]:
    promised = sku.precision_guarantee
    return {
        "Identity": {name: getattr(sku, name) for name in type(sku.identity).model_fields},
        "Promise": {
            "math precision": promised.math_precision,
            "accumulator": promised.accumulator,
            "max ulp to reference": "0 (bit-exact)" if promised.bit_exact else promised.max_ulp,
            "deterministic": promised.deterministic,
            "bit-stable on same hardware": promised.bit_stable_on_same_hardware,
            "batch-invariant": promised.batch_invariant,
            "verified": found.describe(),
        },
        "Needs": {"requires": _requirements(sku), "workspace": _workspace(sku)},
        "Code": {
            "source": sku.source,
            "entry point": sku.entry_point,
            "launch": sku.launch,
            "flags": " ".join(sku.flags) or None,
            "origin": registry.origin(sku.id),
        },
    }


@dataclass(frozen=True)
class ArgumentFacts:
    """One argument of an op over all its cases.

    `elements` are all that some case accepts. `shape` names extents by the descriptor's fields, as far as the cases
    distinguish them. `needed` is ``always``, ``optional``, ``allocated``, or ``some problems`` if only some
    cases take it.
    """

    name: str
    role: str
    elements: tuple[str, ...]
    shape: str
    needed: str


def arguments_of(op: Op) -> list[ArgumentFacts]:
    """Return the arguments of an op over all its cases; empty without cases."""
    seen: dict[str, list[tuple[Descriptor, Argument]]] = {}
    for case in op.cases:
        for argument in case.problem.arguments():
            seen.setdefault(argument.name, []).append((case.problem, argument))
    found = []
    for name, uses in seen.items():
        first = uses[0][1]
        required = all(argument.required for _, argument in uses)
        needed = "optional" if not required else "always" if len(uses) == len(op.cases) else "some problems"
        needed = "allocated" if first.role == "output" else needed
        elements = tuple(dict.fromkeys(str(element) for _, argument in uses for element in argument.elements))
        found.append(ArgumentFacts(name, first.role, elements, _shape(uses), needed))
    # Some cases lack an argument, so the order of first appearance is not that of the declaration.
    order = {"output": 1, "scratch": 2}
    return sorted(found, key=lambda argument: order.get(argument.role, 0))


def _shape(uses: list[tuple[Descriptor, Argument]]) -> str:
    problem, first = uses[0]
    if first.is_scalar:
        return "a number"
    ranks = {len(argument.shape) for _, argument in uses}
    whole = [name for name in _names(problem) if all(getattr(p, name) == a.shape for p, a in uses)]
    if whole:
        return whole[0]
    if len(ranks) > 1:
        return "by the problem"
    axes = [_extent(uses, axis) for axis in range(ranks.pop())]
    return f"[{', '.join(axes)}]" + (" in any shape" if first.flat else "")


def _extent(uses: list[tuple[Descriptor, Argument]], axis: int) -> str:
    """Return the size that an axis has in every problem, or twice which size that is."""
    for factor, text in ((1, "{}"), (2, "2 {}")):
        for name in _names(uses[0][0]):
            if all(_is_times(factor, getattr(problem, name), argument.shape[axis]) for problem, argument in uses):
                return text.format(name)
    return "?"


def _is_times(factor: int, size: object, extent: int) -> bool:
    return size == extent if factor == 1 else isinstance(size, int) and factor * size == extent


def _names(problem: Descriptor) -> Iterator[str]:
    yield from fields_of(type(problem))
    for kind in type(problem).__mro__:
        if issubclass(kind, Descriptor):
            yield from (name for name, value in vars(kind).items() if isinstance(value, property))


def _show_op(registry: Registry, op: Op, *, as_json: bool) -> None:
    fields = [(name, type_words(field), default_words(field)) for name, field in fields_of(op.descriptor).items()]
    arguments = arguments_of(op)
    ids = [sku.id for sku in registry.skus_of(op.name)]
    descriptor = f"{op.descriptor.__module__}:{op.descriptor.__qualname__}"
    about = [
        ("op", op.name),
        ("category", op.category),
        ("descriptor", descriptor),
        ("source", op.source),
        ("origin", registry.origin(op.name)),
        ("cases", len(op.cases)),
    ]
    console = stdout()
    if as_json:
        print_json(
            {
                "kind": "op",
                **dict(about),
                "summary": op.summary,
                "documentation": op.documentation,
                "fields": [dict(zip(("name", "takes", "default"), field, strict=True)) for field in fields],
                "arguments": [asdict(argument) for argument in arguments],
                "skus": ids,
            }
        )
    elif not console.is_terminal:
        records(
            [
                ("kind", "op"),
                *about,
                *(("documentation", line) for line in op.documentation.splitlines()),
                *(("field", *field) for field in fields),
                *(("argument", a.name, a.role, ",".join(a.elements), a.shape, a.needed) for a in arguments),
                *(("sku", sku_id) for sku_id in ids),
            ]
        )
    else:
        _print_op(console, op, about, fields, arguments, ids)


def _print_op(
    console: Console,
    op: Op,
    about: list[tuple[str, Any]],
    fields: list[tuple[str, str, str]],
    arguments: list[ArgumentFacts],
    ids: list[str],
) -> None:
    console.print(Text(op.name, style="bold cyan"))
    for line in reflowed(op.documentation, console.width - 2):
        console.print(indented(line, 2))
    console.print(heading("\nFields"))
    table = plain_table("name", "takes", "default", indent=2)
    for name, takes, default in fields:
        table.add_row("", Text(name, style="cyan"), takes, default)
    console.print(table)
    console.print(heading("\nArguments"))
    table = plain_table("name", "role", "elements", "shape", "passed", indent=2)
    for argument in arguments:
        styled = Text(argument.name, style="cyan")
        table.add_row("", styled, argument.role, " ".join(argument.elements), argument.shape, argument.needed)
    console.print(table if arguments else "  unknown: the op has no cases to read them from")
    console.print(heading("\nAbout"))
    console.print(facts((name, str(value)) for name, value in about[1:]))
    console.print(heading(f"\n{count(len(ids), 'kernel').capitalize()}, best first"))
    shown = ids if len(ids) <= _IDS_SHOWN + 2 else ids[:_IDS_SHOWN]
    for sku_id in shown:
        console.print(indented(folded(sku_id, console.width - 2), 2))
    if len(shown) < len(ids):
        more = f"and {len(ids) - len(shown)} more: skuda list --skus --op {op.name}"
        console.print(indented(Text(more, style="dim"), 2))
