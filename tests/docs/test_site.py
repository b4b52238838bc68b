"""The generated pages and parts of pages."""

from __future__ import annotations

import importlib.util
import inspect
import pkgutil
import re
from types import SimpleNamespace

import pytest
from paths import ROOT
from toy import ToyDescriptor

import skuda
from skuda.dispatch import settings
from skuda.kernels.catalog import built_in_registry

HAND_WRITTEN = sorted((ROOT / "docs").rglob("*.md"))


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(generate):
    return generate.pages()


def rows_of(text, heading):
    """Return the cells of the table below a heading."""
    _, _, section = text.partition(f"\n## {heading}\n")
    lines = re.findall(r"^\|.*\|$", section.partition("\n## ")[0], re.MULTILINE)
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def test_every_op_has_a_page_with_everything_about_it(pages):
    registry = built_in_registry()
    for op in registry.ops.values():
        page = pages[f"ops/{op.name}.md"]
        assert page.startswith(f"# {op.name}\n")
        for heading in ("Formula", "Arguments", "Elements", "Units", "Errors"):
            assert re.search(rf"^## {heading}\n\n\S", page, re.MULTILINE), f"{op.name}: {heading}"
        fields = rows_of(page, "Fields")
        assert [row[0] for row in fields] == [f"`{name}`" for name in op.descriptor.model_fields if name != "op"]
        assert not [row for row in fields if not all(row)], f"{op.name}: a field without a description"
        taken = {argument.name for case in op.cases for argument in case.problem.arguments()}
        arguments = rows_of(page, "Arguments")
        assert {row[0].strip("`") for row in arguments} == taken
        assert not [row for row in arguments if not all(row[:4])], (
            f"{op.name}: an argument of which something is unsaid"
        )
        skus = registry.skus_of(op.name)
        assert sum(int(row[-1]) for row in rows_of(page, "Kernels")) == len(skus)
        assert {row[0].strip("`") for row in rows_of(page, "Verified")} == {sku.backend for sku in skus}


def test_modules_that_a_definition_refers_to_are_linked(pages):
    found = set()
    for op in built_in_registry().ops.values():
        for name in re.findall(r"`(skuda\.kernels[\w.]+)`", op.documentation):
            part = pkgutil.resolve_name(name)
            module = part.__name__ if inspect.ismodule(part) else part.__module__
            (link,) = set(re.findall(rf"\[`{name}`\]\(\.\./(.+?)\)", pages[f"ops/{op.name}.md"]))
            other = built_in_registry().ops.get(link.removeprefix("ops/").removesuffix(".md"))
            assert f"\n::: {module}\n" in pages[link] if other is None else other.descriptor.__module__ == module
            found.add(module.removeprefix("skuda.kernels."))
    assert found >= {"attention.cache", "attention.exp2", "linear.packed", "sampling.weights"}


def test_the_page_of_ops_leads_to_every_op(generate):
    linked = re.findall(r"\]\(ops/(\w+)\.md\)", generate.PARTS["ops"]())
    assert sorted(linked) == sorted(built_in_registry().ops)


def test_a_field_is_described_by_the_nearest_class_that_says_something(generate):
    class Nearer(ToyDescriptor):
        """A problem.

        Attributes
        ----------
        m, n : int
            Rows
            and columns.
        """

    assert generate.field_descriptions(Nearer) == {"m": "Rows and columns.", "n": "Rows and columns."}


def test_the_site_is_named_after_the_version_and_lists_all_ops(generate):
    found = generate.on_config(SimpleNamespace(site_name="skuda", nav=[{"Ops": "ops/"}]))
    assert found.site_name == f"skuda {skuda.__version__}"
    assert found.nav[0]["Ops"][: 1 + len(built_in_registry().ops)] == [
        "ops.md",
        *(f"ops/{name}.md" for name in sorted(built_in_registry().ops)),
    ]


def test_every_mark_in_a_page_is_filled_in(generate):
    named = [name for page in HAND_WRITTEN for name in re.findall(r"<!-- made here: (\S+) -->", page.read_text())]
    assert sorted(named) == sorted(generate.PARTS)
    for page in HAND_WRITTEN:
        assert "made here" not in generate.filled(page.read_text(encoding="utf-8"))
    with pytest.raises(KeyError, match="nonsense"):
        generate.filled("<!-- made here: nonsense -->")


def test_no_setting_is_missing():
    declared = {one.name for one in settings.SETTINGS}
    named = {
        name
        for folder in ("registry", "kernels", "dispatch", "tools")
        for path in (ROOT / folder).rglob("*.py")
        for name in re.findall(r"\bSKUDA_[A-Z_]+", path.read_text(encoding="utf-8"))
    }
    assert named == declared


def test_the_page_of_settings_names_them_with_what_they_take(generate):
    text = generate.PARTS["settings"]()
    for one in settings.SETTINGS:
        assert re.search(rf"^\| `{one.name}` \|.*{re.escape(one.meaning)}", text, re.MULTILINE)


def ragged(text):
    """Return the rows of tables whose number of cells differs from that of their heading."""
    found, width = [], None
    for line in text.splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else None
        width = None if cells is None else width or cells
        found += [line] if cells != width else []
    return found


def test_no_table_is_ragged(generate, pages):
    parts, written = (make() for make in generate.PARTS.values()), (page.read_text() for page in HAND_WRITTEN)
    for text in (*pages.values(), *parts, *written):
        assert not ragged(text)
    assert ragged("| a | b |\n| - | - |\n| 1 |")


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://x/y.js"></script>',
        '<link rel="stylesheet" href="//x/y.css">',
        '<link rel="preconnect" href="https://x">',
        '<img src="http://x/y.png">',
        '<img srcset="a.png 1x, https://x/y.png 2x">',
        '<p style="background: url(https://x/y.png)">',
        "<style>@import 'https://x/y.css';</style>",
        '<pre class="mermaid">graph</pre>',
    ],
)
def test_a_page_that_fetches_from_another_host_is_found(generate, text):
    assert len(generate.fetched_from_elsewhere("page.html", text)) == 1


def test_links_and_own_files_are_no_fetches(generate):
    text = (
        '<a href="https://x">x</a><img src="a.png"><link rel="canonical" href="https://x"><script>"https://x"</script>'
    )
    assert generate.fetched_from_elsewhere("page.html", text) == []
    assert generate.fetched_from_elsewhere("a.css", "p {background: url(a.png)}") == []
    assert generate.fetched_from_elsewhere("a.css", "p {background: url('https://x/a.png')}") == ["https://x/a.png"]
