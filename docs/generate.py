"""Pages and parts of pages that are made from the registry and the records, and the hooks that MkDocs calls.

Generated pages: one for every op, one for every module that ops' definitions refer to, and copies of CONTRIBUTING and
CHANGELOG. Generated parts: a comment ``<!-- made here: NAME -->`` in a page is replaced by one of `PARTS`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import groupby
from pathlib import Path
from typing import Any

import skuda
from skuda.dispatch import KNOWN_DEVICES
from skuda.dispatch.settings import SETTINGS
from skuda.kernels.catalog import built_in_registry
from skuda.registry import Descriptor, KernelSku, Op, Registry
from skuda.registry.elements import ElementKind
from skuda.tools.frame.view import markdown_table
from skuda.tools.parse.arguments import COLUMNS, argument_rows
from skuda.tools.parse.problem import default_words, fields_of, type_words
from skuda.tools.show.kernels import elements_of, evidence_words, judge_of, legend, unique
from skuda.tools.verify.evidence import Records, load_records

ROOT = Path(__file__).resolve().parent.parent
_MARK = re.compile(r"^<!-- made here: (\S+) -->$", re.MULTILINE)
_NAMED = re.compile(r"`(skuda\.kernels(?:\.\w+)+)`")
_STALE = "`skuda verify` compares every kernel with its reference. A stale kernel was verified before a change."


def pages() -> dict[str, str]:
    """Return every generated page by its path below docs/."""
    registry, recorded = built_in_registry(), load_records(None)
    found = {f"ops/{op.name}.md": op_page(registry, op, recorded) for op in registry.ops.values()}
    found |= {page: f"# {name}\n\n::: {name}\n" for name, page in definitions().items() if page not in found}
    for name in ("CONTRIBUTING", "CHANGELOG"):
        found[f"{name.lower()}.md"] = moved((ROOT / f"{name}.md").read_text(encoding="utf-8"))
    return found


@functools.cache
def definitions() -> dict[str, str]:
    """Return the page below docs/ of every module that holds definitions of ops, by the module's name.

    These are the modules of ops, the modules that these refer to, and so on.
    """
    ops = sorted(built_in_registry().ops.values(), key=lambda op: op.name, reverse=True)
    found = {op.descriptor.__module__: f"ops/{op.name}.md" for op in ops}
    texts = [op.documentation for op in ops]
    while texts:
        new = {_module_of(name) for name in _NAMED.findall(texts.pop())} - found.keys()
        texts += [inspect.getsource(importlib.import_module(name)) for name in new]
        found |= {name: f"definitions/{name.removeprefix('skuda.kernels.')}.md" for name in new}
    return found


def _module_of(name: str) -> str:
    """Return the module that a name is of, or in."""
    above = name.rpartition(".")[0]
    return name if hasattr(importlib.import_module(above), "__path__") else above


def moved(text: str) -> str:
    """Return a page of the top level as a page of docs/: links into docs/ are adapted, other file links become text."""
    text = re.sub(r"\[([^]]+)\]\((?!https?:|#|docs/)[^)]+\)", r"\1", text)
    return re.sub(r"\]\(docs/", "](", text)


def filled(text: str) -> str:
    """Return a page with its generated parts.

    Raises
    ------
    KeyError
        For an unknown part.
    """
    return _MARK.sub(lambda found: PARTS[found[1]](), text)


def _code(value: object) -> str:
    return f"`{value}`"


def _plain(text: str) -> str:
    """Escape Markdown's markup outside backticks."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([*_<\[\]])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


def _ops() -> str:
    registry = built_in_registry()
    lines = []
    ops = sorted(registry.ops.values(), key=lambda op: (op.category, op.name))
    for category, group in groupby(ops, key=lambda op: op.category):
        rows = [
            (f"[`{op.name}`](ops/{op.name}.md)", _plain(op.summary), len(registry.skus_of(op.name))) for op in group
        ]
        lines += [f"## {category.replace('_', ' ').capitalize()}\n", markdown_table(("op", "", "kernels"), rows)]
    return "\n".join(lines)


def op_page(registry: Registry, op: Op, recorded: Records) -> str:
    """Return the page of an op."""
    summary, _, text = op.documentation.partition("\n")
    # As its category exports it.
    name = f"{op.descriptor.__module__.rpartition('.')[0]}.{op.descriptor.__name__}"
    facts = [
        f"# {op.name}\n",
        f"{_plain(summary)}\n",
        f"Descriptor: [`{name}`][{name}]. At a terminal: `skuda show {op.name}`, `skuda explain {op.name}`.\n",
    ]
    # The sections of the docstring are numpy's: a title over a line of dashes.
    text = re.sub(r"^(\w[\w ]*)\n-+$", r"## \1\n", _plain(text.strip()), flags=re.MULTILINE)
    facts.append(_NAMED.sub(_linked, text) + "\n")
    said = field_descriptions(op.descriptor)
    fields = (
        (_code(key), type_words(field), default_words(field), _plain(said.get(key, "")))
        for key, field in fields_of(op.descriptor).items()
    )
    rows = ((_code(row[0]), *map(_plain, row[1:])) for row in argument_rows(op.descriptor))
    facts += ["## Arguments\n", "Of several rows of an argument, the first one that holds counts.\n"]
    facts += [markdown_table(COLUMNS, rows)]
    facts += ["## Fields\n", markdown_table(("field", "takes", "default", ""), fields)]
    facts += [
        "## Kernels\n",
        "Best first. The first kernel that accepts a problem is chosen.\n",
        _kernels(registry, op),
    ]
    facts += ["## Verified\n", _verified(registry, op, recorded)]
    return "\n".join(facts)


def _linked(named: re.Match[str]) -> str:
    """Return a name with a link to where it is defined, in a page of an op."""
    return f"[{named[0]}](../{definitions()[_module_of(named[1])]})"


def field_descriptions(kind: type[Descriptor]) -> dict[str, str]:
    """Return the description of each field from the Attributes sections of a descriptor's docstring and its bases'."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        _, _, section = inspect.cleandoc(base.__dict__.get("__doc__") or "").partition("Attributes\n----------\n")
        for names, text in re.findall(r"^(\w[\w, ]*) : .*\n((?:    .*\n?)+)", section, re.MULTILINE):
            found |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return found


def _kernels(registry: Registry, op: Op) -> str:
    """Return a table of an op's kernels; kernels that differ only in element, epilogue or backend share a row."""
    groups: dict[tuple[str, str, str], list[KernelSku]] = {}
    for sku in registry.skus_of(op.name):
        needs = "; ".join((sku.arch.describe(), *(constraint.describe() for constraint in sku.constraints)))
        groups.setdefault((sku.variant, needs, sku.precision_guarantee.describe()), []).append(sku)
    used: set[str] = set()
    rows = []
    for (variant, needs, promise), skus in groups.items():
        epilogues = unique(_code(sku.epilogue) for sku in skus if sku.epilogue is not None)
        backends = unique(_code(sku.backend) for sku in skus)
        cells = (elements_of(skus, used), ", ".join(epilogues), needs, promise, len(skus))
        rows.append((_code(variant), ", ".join(backends), *cells))
    headings = ("variant", "backends", "elements", "epilogues", "needs", "promises", "kernels")
    return markdown_table(headings, rows) + (f"\n{legend(used)}.\n" if used else "")


def _verified(registry: Registry, op: Op, recorded: Records) -> str:
    """Return the results of the records for an op's kernels, by backend and device."""
    judge = judge_of(registry, recorded)
    rows: list[tuple[object, ...]] = []
    for name, backend in registry.backends.items():
        skus = [sku for sku in registry.skus_of(op.name) if sku.backend == name]
        if not skus:
            continue
        words = evidence_words(skus, judge)
        runs: dict[tuple[str, str, str], list[tuple[int, int]]] = {}
        for sku in () if backend.reference else skus:
            for file, one in recorded.of(sku.id):
                key = (file.device.name, f"driver {file.driver}", file.date[:10])
                runs.setdefault(key, []).append((one.cases, one.outputs))
        rows += [
            (_code(name), words, ", ".join(key), len(found), *(f"{sum(count):,}" for count in zip(*found, strict=True)))
            for key, found in runs.items()
        ] or [(_code(name), words, "", "", "", "")]
    headings = ("backend", "today", "recorded on", "kernels run", "problems", "outputs compared")
    return f"{_STALE}\n\n{markdown_table(headings, rows)}"


def _settings() -> str:
    rows = ((_code(one.name), one.takes, one.default, one.meaning, one.read) for one in SETTINGS)
    return markdown_table(("variable", "takes", "without it", "", "read"), rows)


def _devices() -> str:
    rows = (
        (
            _code(short_name),
            device.name,
            ".".join(map(str, device.compute_capability or ())) or "-",
            device.sm_count or "-",
            f"{device.memory_bandwidth / 1e12:.2f} TB/s" if device.memory_bandwidth else "-",
        )
        for short_name, device in KNOWN_DEVICES.items()
    )
    return markdown_table(("name", "card", "compute capability", "SMs", "memory bandwidth"), rows)


PARTS: dict[str, Callable[[], str]] = {
    "devices": _devices,
    "elements": lambda: ", ".join(_code(kind) for kind in ElementKind) + "\n",
    "ops": _ops,
    "settings": _settings,
}
"""The generated parts of pages, by the name in the comment."""


class _Loads(HTMLParser):
    """Gathers what a browser fetches without a click when it shows a page."""

    _SOURCES = frozenset({"script", "img", "source", "iframe", "video", "audio", "embed", "track", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag in self._SOURCES:
            self.found += [given.get("src", ""), *given.get("srcset", "").split(",")]
        elif tag == "link" and given.get("rel", "") not in {"canonical", "prev", "next", "alternate"}:
            self.found.append(given.get("href", ""))
        elif tag == "object":
            self.found.append(given.get("data", ""))
        self.found += _in_styles(given.get("style", ""))
        if "mermaid" in given.get("class", "").split():
            self.found.append("https: the theme fetches Mermaid for this page")


def _in_styles(text: str) -> list[str]:
    return re.findall(r"(?:url\(|@import)\s*[\"']?([^\"')]+)", text)


def fetched_from_elsewhere(name: str, text: str) -> list[str]:
    """Return the addresses on other hosts that a page or a style sheet makes a browser fetch.

    Parameters
    ----------
    name : str
        The file's name.
    text : str
        What is in it.
    """
    if name.endswith(".css"):
        found = _in_styles(text)
    else:
        loads = _Loads()
        loads.feed(text)
        inside = re.findall(r"<style[^>]*>(.*?)</style>", text, re.DOTALL)
        found = [*loads.found, *(one for style in inside for one in _in_styles(style))]
    return [one.strip() for one in found if re.match(r"\s*(https?:|//)", one)]


# What MkDocs calls.


def on_config(config: Any) -> Any:
    """Put the version into the name of the site, and the pages of ops and their definitions into the navigation."""
    config.site_name = f"skuda {skuda.__version__}"
    below = ["ops.md", *(f"ops/{name}.md" for name in sorted(built_in_registry().ops))]
    below += sorted(page for page in definitions().values() if page.startswith("definitions/"))
    config.nav = [{"Ops": below} if entry == {"Ops": "ops/"} else entry for entry in config.nav]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(text: str, **_: Any) -> str:
    """Fill in the generated parts."""
    return filled(text)


def on_post_build(config: Any) -> None:
    """Fail where a page would fetch something from another host."""
    from mkdocs.exceptions import PluginError

    site = Path(config.site_dir)
    for path in sorted(site.rglob("*")):
        if path.suffix in {".html", ".css"}:
            found = fetched_from_elsewhere(path.name, path.read_text(encoding="utf-8"))
            if found:
                raise PluginError(f"{path.relative_to(site)} fetches {', '.join(found)}")
