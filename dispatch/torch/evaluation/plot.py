"""A plot of what layers cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any


def drawn(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return bars of the divergence that each layer costs as SVG, one model below the other."""
    found, y = list[str](), 4
    for row in rows:
        costs = {name: max(cost or 0.0, 0.0) for name, cost in row.get("layers", {}).items()}
        if costs:
            title = f"{escape(row['model'])}: divergence by layer"
            found.append(f'<text x="8" y="{y + 16}" font-weight="bold">{title}</text>')
            y += 24
        for name, cost in costs.items():
            wide = 300 * cost / (max(costs.values()) or 1.0)
            found.append(f'<text x="312" y="{y + 9}" text-anchor="end">{escape(name)}</text>')
            found.append(f'<rect x="320" y="{y}" width="{wide:.1f}" height="10" fill="#0072B2"/>')
            found.append(f'<text x="{325 + wide:.1f}" y="{y + 9}">{cost:.2g}</text>')
            y += 13
    size = f'width="700" height="{y + 8}" font-family="sans-serif" font-size="10"'
    return "\n".join((f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', *found, "</svg>\n"))
