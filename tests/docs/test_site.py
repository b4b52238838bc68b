"""The pages and parts of pages that are made from the registry, the records, the settings and the doctor."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from paths import ROOT
from toy import ToyDescriptor

from skuda.dispatch import settings
from skuda.kernels.catalog import built_in_registry
from skuda.tools.show import doctor, findings, packages
from skuda.tools.verify.evidence import Records, load_records

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
        for heading in ("Formula", "Shapes", "Elements", "Units", "Errors"):
            assert re.search(rf"^## {heading}\n\n\S", page, re.MULTILINE), f"{op.name}: {heading}"
        fields = rows_of(page, "Fields")
        assert [row[0] for row in fields] == [f"`{name}`" for name in op.descriptor.model_fields if name != "op"]
        assert not [row for row in fields if not all(row)], f"{op.name}: a field without a description"
        taken = {argument.name for case in op.cases for argument in case.problem.arguments()}
        arguments = rows_of(page, "Arguments")
        assert {row[0].strip("`") for row in arguments} == taken
        assert not [row for row in arguments if "?" in row[3]], f"{op.name}: a size that no field or property names"
        skus = registry.skus_of(op.name)
        assert sum(int(row[-1]) for row in rows_of(page, "Kernels")) == len(skus)
        assert {row[0].strip("`") for row in rows_of(page, "Verified")} == {sku.backend for sku in skus}


def test_a_page_says_what_the_records_say(generate):
    registry, records = built_in_registry(), load_records(None)
    op = registry.ops["fill"]
    file = next(file for file in records.files if any(one.sku.split(".")[1] == "fill" for one in file.skus))
    fills = [one for one in file.skus if one.sku.split(".")[1] == "fill"]
    backend = fills[0].sku.split(".")[5]
    ours = [one for one in fills if one.sku.split(".")[5] == backend]
    page = generate.op_page(registry, op, Records((file,)))
    (row,) = (row for row in rows_of(page, "Verified") if row[0] == f"`{backend}`")
    assert file.device.name in row[2]
    assert file.date[:10] in row[2]
    assert row[3] == str(len(ours))
    assert row[4:] == [f"{sum(one.cases for one in ours):,}", f"{sum(one.outputs for one in ours):,}"]
    nothing = generate.op_page(registry, op, Records())
    assert [row[1:4] for row in rows_of(nothing, "Verified") if row[0] == f"`{backend}`"] == [["unverified", "", ""]]


def test_the_index_leads_to_every_op(generate):
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


def test_every_mark_in_a_page_is_one_that_is_filled_in_and_none_is_forgotten(generate):
    named = [name for page in HAND_WRITTEN for name in re.findall(r"<!-- made here: (\S+) -->", page.read_text())]
    assert sorted(named) == sorted(generate.PARTS)
    for page in HAND_WRITTEN:
        assert "made here" not in generate.filled(page.read_text(encoding="utf-8"))
    with pytest.raises(KeyError, match="nonsense"):
        generate.filled("<!-- made here: nonsense -->")


def test_no_setting_is_missing():
    declared = {one.name for one in settings.SETTINGS}
    assert [value for value in vars(settings).values() if isinstance(value, settings.Setting)] == list(
        settings.SETTINGS
    )
    named = {
        name
        for folder in ("registry", "kernels", "dispatch", "tools")
        for path in (ROOT / folder).rglob("*.py")
        for name in re.findall(r"\bSKUDA_[A-Z_]+", path.read_text(encoding="utf-8"))
    }
    assert named == declared
    # Read through a `Setting`, so that nothing is read that is not listed; handed on whole to a program it starts; and
    # added to for torch, which asks for what a caller has not set.
    assert re.findall(r".*os\.environ.*", Path(settings.__file__).read_text()) == [
        '        return os.environ.get(self.name, "")',
        "    return {**(defaults or {}), **os.environ, **changes}",
        '    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")',
    ]


def test_the_page_of_settings_names_them_with_what_they_take(generate):
    text = generate.PARTS["settings"]()
    for one in settings.SETTINGS:
        assert re.search(rf"^\| `{one.name}` \|.*{re.escape(one.meaning)}", text, re.MULTILINE)


def test_the_troubles_are_those_that_the_doctor_can_find(generate):
    sources = Path(doctor.__file__).read_text() + Path(packages.__file__).read_text()
    names = [name for name, value in vars(findings).items() if isinstance(value, findings.Finding)]
    assert len(names) == len(findings.TROUBLES) > 15
    for name in names:
        assert re.search(rf"\b{name}\b", sources), f"{name} is never found"
    text = generate.PARTS["troubles"]()
    assert text.count("\n") == len(findings.TROUBLES) + 2
    assert "{" not in text
    assert "pip install 'REQUIREMENT'" in text


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


def test_contributing_and_the_changelog_are_pages_whose_links_fit(generate, pages):
    text = "[a](docs/a.md) [b](README.md) [c](https://c) [d](#d)"
    assert generate.moved(text) == "[a](a.md) b [c](https://c) [d](#d)"
    assert pages["contributing.md"].startswith("# Contributing")
    assert pages["changelog.md"].startswith("# Changelog")
    assert "](docs/" not in pages["contributing.md"] + pages["changelog.md"]


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
