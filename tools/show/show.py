"""``skuda show``: the facts of one kernel or one op."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from rich.console import Console
from rich.text import Text

from skuda.dispatch import Dispatcher
from skuda.registry.op import Op
from skuda.registry.registry import Registry
from skuda.registry.sku import KernelSku
from skuda.tools.options import Evidence, Json, argument
from skuda.tools.output import count, facts, folded, indented, plain_table, present, refuse
from skuda.tools.parse.arguments import COLUMNS, argument_rows
from skuda.tools.parse.problem import default_words, fields_of, type_words
from skuda.tools.show.kernels import evidence_words, judge_of, tell_aside
from skuda.tools.verify.evidence import KernelStatus, load_records

_IDS_SHOWN = 10
_FIELDS = ("name", "takes", "default")


def run(
    name: Annotated[str, argument("ID", "The id of a kernel, or the name of an op.")],
    *,
    evidence: Evidence = None,
    as_json: Json = False,
) -> int:
    """Show everything about a kernel or an op."""
    dispatcher = Dispatcher()
    tell_aside(dispatcher)
    registry = dispatcher.registry
    judge = judge_of(registry, load_records(evidence))
    sku = registry.sku(name)
    if sku is not None:
        _show_sku(registry, sku, judge(sku), as_json=as_json)
    elif name in registry.ops:
        verified = evidence_words(registry.skus_of(name), judge)
        _show_op(registry, registry.ops[name], verified, as_json=as_json)
    else:
        known = tuple(registry.ops) if "." not in name else tuple(sku.id for sku in registry)
        refuse("show", "ID", name, known, kind="the id of a kernel or the name of an op", more="see `skuda list`")
    return 0


def _show_sku(registry: Registry, sku: KernelSku, found: KernelStatus, *, as_json: bool) -> None:
    promised, origin = sku.precision_guarantee, registry.origin(sku.id)
    requires = [sku.arch.describe(), *(constraint.describe() for constraint in sku.constraints)]
    workspace = " + ".join(" x ".join((f"{term.bytes_each} bytes", *term.factors)) for term in sku.workspace) or "none"
    sections: dict[str, dict[str, object]] = {
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
        "Needs": {"requires": requires, "workspace": workspace},
        "Code": {
            "source": sku.source,
            "entry point": sku.entry_point,
            "launch": sku.launch,
            "flags": " ".join(sku.flags) or None,
            "origin": origin,
        },
    }

    def person(console: Console) -> None:
        console.print(folded(sku.id, console.width), style="bold cyan")
        if sku.summary:
            console.print(indented(sku.summary, 2))
        width = max(len(name) for section in sections.values() for name in section)
        for title, section in sections.items():
            console.print(f"\n{title}", style="bold")
            console.print(facts(((name, "\n".join(_lines(value))) for name, value in section.items()), width))

    value = {
        "kind": "sku",
        "id": sku.id,
        "origin": origin,
        "verified": found.word in ("verified", "reference"),
        "evidence": asdict(found),
        "promise": promised.describe(),
        "requires": requires,
        "workspace": workspace,
        "sku": sku.model_dump(mode="json"),
    }
    present(value, person, as_json=as_json)


def _lines(value: object) -> list[str]:
    if isinstance(value, list):
        return [str(part) for part in value]
    if isinstance(value, bool):
        return ["yes" if value else "no"]
    return ["none" if value is None else str(value)]


def _show_op(registry: Registry, op: Op, verified: str, *, as_json: bool) -> None:
    fields = [(name, type_words(field), default_words(field)) for name, field in fields_of(op.descriptor).items()]
    arguments, ids = argument_rows(op.descriptor), [sku.id for sku in registry.skus_of(op.name)]
    about: dict[str, object] = {
        "op": op.name,
        "category": op.category,
        "descriptor": f"{op.descriptor.__module__}:{op.descriptor.__qualname__}",
        "source": op.source,
        "origin": registry.origin(op.name),
        "cases": len(op.cases),
        "evidence": verified,
    }

    def person(console: Console) -> None:
        console.print(Text(op.name, style="bold cyan"))
        console.print(indented(op.documentation, 2))
        for title, columns, rows in (("Arguments", COLUMNS, arguments), ("Fields", _FIELDS, fields)):
            console.print(f"\n{title}", style="bold")
            table = plain_table(*columns, indent=2)
            for name, *cells in rows:
                table.add_row("", Text(name, style="cyan"), *cells)
            console.print(table)
        console.print("\nAbout", style="bold")
        console.print(facts((name, str(value)) for name, value in list(about.items())[1:]))
        console.print(f"\n{count(len(ids), 'kernel').capitalize()}, best first", style="bold")
        for sku_id in ids[:_IDS_SHOWN]:
            console.print(indented(folded(sku_id, console.width - 2), 2))
        if len(ids) > _IDS_SHOWN:
            more = f"and {len(ids) - _IDS_SHOWN} more: skuda list --skus --op {op.name}"
            console.print(indented(Text(more, style="dim"), 2))

    value = {
        "kind": "op",
        **about,
        "summary": op.summary,
        "documentation": op.documentation,
        "arguments": [dict(zip(COLUMNS, row, strict=True)) for row in arguments],
        "fields": [dict(zip(_FIELDS, field, strict=True)) for field in fields],
        "skus": ids,
    }
    present(value, person, as_json=as_json)
