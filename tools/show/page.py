"""``skuda list --html``: one page with the kernels, what the evidence says about them, and every run with its plots.

The page runs no script and loads nothing. Plots are those that `make plots` stored beside each record. They become
images, so that nothing in them can become part of the page.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from skuda.dispatch.select.environment import skuda_version
from skuda.registry.sku import KernelSku
from skuda.tools.files import read_json, read_text, write_whole
from skuda.tools.output import count, one_line, progress, stderr
from skuda.tools.show.kernels import Found, Judge, elements_of, evidence_words, legend, promise
from skuda.tools.verify.evidence import evidence_directory
from skuda.tools.words.devices import card_words

LARGEST = 1_000_000
"""Bytes of a page. Plots that do not fit are named by their files, those of the oldest runs first."""

_ALIEN = re.compile(r"<metadata\b.*?</metadata>|<!--.*?-->|<\?xml.*?\?>|<!DOCTYPE.*?>|(?<=>)\s+(?=<)", re.DOTALL)
"""Parts of a drawing that do not show."""
_PLAIN = "".join(character for character in string.printable if character not in "%#&'\n\r\t\v\f")
"""Characters that a data address in single quotes may hold."""
_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>skuda: kernels and runs</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 0 auto; padding: 1rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { border-bottom: 1px solid #ccc; padding: .2rem .7rem .2rem 0; text-align: left; vertical-align: top; }
figure { display: inline-block; margin: 1rem 1rem 0 0; }
img { max-width: 100%; }
.failed { color: #a00; font-weight: bold; }
</style>
</head>
<body>
"""


class Run(NamedTuple):
    """The envelope of a record: the file, the command's name, the card, the date, and further facts by name."""

    path: Path
    kind: str
    card: str
    date: str
    facts: dict[str, str]

    @property
    def plots(self) -> list[Path]:
        """The plots that lie in the folder of the record's name."""
        return sorted(self.path.with_suffix("").glob("*.svg"))


def write_page(path: Path, found: Found, judge: Judge, folder: Path | None) -> None:
    """Write the page about some kernels and the records in a folder; None is that of the checkout."""
    folder = folder or evidence_directory()
    files = sorted(folder.glob("*.json")) if folder is not None and folder.is_dir() else []
    runs: list[Run] = []
    steps: list[Callable[[], object]] = [partial(evidence_words, skus, judge) for _, skus in found]  # hashes sources
    steps += [lambda file=file: runs.extend(read_run(file)) for file in files]  # type: ignore[misc]
    with progress() as report:
        for number, step in enumerate(steps, 1):
            step()
            if report is not None:
                report(number, len(steps), "kernels and records")
        write_whole(path, page(found, judge, sorted(runs, key=lambda run: run.date, reverse=True)))
    stderr().print(f"wrote {one_line(str(path))}", style="dim", soft_wrap=True)


def read_run(path: Path) -> Iterator[Run]:
    """Yield the envelope of a file, if it is a record of a run."""
    try:
        found = read_json(read_text(path))
    except (OSError, ValueError):
        return
    if not isinstance(found, dict) or not str(found.get("kind")).startswith("skuda ") or "date" not in found:
        return
    device = found.get("device")
    name = str(device.get("name") if isinstance(device, dict) else device)
    versions = found.get("versions")
    facts = {name: str(found[name]) for name in ("command", "driver", "skuda", "seed") if found.get(name)}
    if isinstance(versions, dict):
        facts["versions"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    yield Run(path, str(found["kind"]).removeprefix("skuda "), name, str(found["date"]), facts)


def page(found: Found, judge: Judge, runs: Sequence[Run]) -> str:
    """Return the page; equal arguments give equal text."""
    every = [sku for _, skus in found for sku in skus]
    parts = [_HEAD, "<h1>skuda</h1>\n"]
    about = f"{count(len(found), 'op')}, {count(len(every), 'kernel')}: {evidence_words(every, judge)}."
    parts += [f"<p>{escape(about)} Made by skuda {escape(skuda_version())}.</p>\n<h2>Kernels</h2>\n"]
    parts += _kernels(found, judge)
    failed = [sku for sku in every if judge(sku).word == "failed"]
    if failed:
        rows = ((_code(sku.id), escape(judge(sku).describe())) for sku in failed)
        parts += ['<h2 class="failed">Failed</h2>\n', _table(("kernel", "evidence"), rows)]
    parts.append("<h2>Runs</h2>\n")
    left = LARGEST - sum(map(len, parts)) - 2000 * len(runs)
    for run in runs:
        drawn = list(_drawn(run, left))
        left -= sum(map(len, drawn))
        parts += [f"<h3>{escape(f'{run.kind} on {card_words(run.card)}, {run.date[:16]}')}</h3>\n"]
        facts = {"record": run.path.name, "card": run.card} | run.facts
        parts += [_table((), ((escape(name), _code(value)) for name, value in facts.items())), *drawn]
    if not runs:
        parts.append("<p>No record is here: <code>skuda verify</code> and <code>skuda bench</code> write them.</p>\n")
    return "".join((*parts, "</body>\n</html>\n"))


def _kernels(found: Found, judge: Judge) -> Iterator[str]:
    backends = list(dict.fromkeys(sku.backend for _, skus in found for sku in skus))
    used: set[str] = set()

    def cells(skus: Sequence[KernelSku]) -> Iterator[str]:
        for backend in backends:
            archs = [str(sku.arch) for sku in skus if sku.backend == backend]
            yield ", ".join(f"{archs.count(arch)} {arch}" for arch in dict.fromkeys(archs))

    rows = (
        (_code(op.name), elements_of(skus, used), *cells(skus), promise(skus), evidence_words(skus, judge))
        for op, skus in found
    )
    yield _table(
        ("op", "elements", *backends, "promise", "evidence"), ((row[0], *map(escape, row[1:])) for row in rows)
    )
    yield f"<p>{legend(used)}</p>\n"


def _drawn(run: Run, left: int) -> Iterator[str]:
    """Yield the plots of a run as images, as long as they fit into `left` bytes, then the names of the others."""
    for path in run.plots:
        try:
            image = quote(_ALIEN.sub("", read_text(path)), safe=_PLAIN)
        except (OSError, ValueError):
            image = ""
        name = escape(path.stem)
        if image and len(image) < left:
            left -= len(image)
            yield f"<figure><img alt=\"{name}\" src='data:image/svg+xml,{image}'></figure>\n"
        else:
            yield f"<p>The plot {name} is in {_code(f'{path.parent.name}/{path.name}')}.</p>\n"


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; the cells are HTML."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>\n" for row in rows)
    return f"<table>{f'<thead><tr>{head}</tr></thead>' if head else ''}\n<tbody>\n{body}</tbody></table>\n"
