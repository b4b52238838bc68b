"""Every generated block on a page is the output of its command."""

from __future__ import annotations

import importlib.util
import json
import re

import pytest
from paths import ROOT

from skuda.tools.bench.record import BenchRecord
from skuda.tools.studies.model import ModelRecord

PAGES = sorted((*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")))
RECORDS = sorted(BenchRecord.files(ROOT / "docs" / "evidence"))
RECORD = ModelRecord.load(ROOT / "docs" / "evidence" / "h200x2-parallel.json")
FIGURE = re.compile(r"\d ?(?:us|ms|TOPS|TFLOP/s|[GT]B/s)\b|\d x (?:faster|slower)|\dx\b")
"""A time, a speed, or a ratio of two."""


SPEC = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
TABLES = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(TABLES)
blocks = TABLES.blocks


@pytest.fixture
def tables():
    return TABLES


def outside(text):
    """Return a page without its generated blocks."""
    for content in blocks(text).values():
        text = text.replace(content, "")
    return text


def test_every_block_is_what_its_command_prints(tables, monkeypatch):
    monkeypatch.setenv("SKUDA_PLUGINS", "0")
    assert {page.name for page in PAGES if blocks(page.read_text())} >= {"README.md", "performance.md"}
    stale = [f"{page.relative_to(ROOT)} is out of date: run `make tables`" for page, _ in tables.outdated()]
    assert not stale


def test_an_outdated_block_is_written_anew(tables, monkeypatch, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- made by `skuda list --op fill` -->\nold\n<!-- end of it -->\n1\n")
    monkeypatch.setattr(tables, "PAGES", (page,))
    ((found, text),) = tables.outdated()
    assert found == page
    assert re.fullmatch(r"<!-- made .* -->\nop [^<]*\nunary_elementwise *\nfill [^<]*\n<!-- end of it -->\n1\n", text)
    page.write_text(text)
    assert not list(tables.outdated())


def test_only_the_block_of_a_command_changes(tables):
    one, two = "<!-- made by `skuda one` -->\n1\n<!-- end of one -->", "<!-- two: made by `skuda two` -->\n<!-- end -->"
    text = f"a\n{one}\nb\n{two.replace('end', 'end of two')}\n"
    assert blocks(text) == {"skuda one": "1\n", "skuda two": ""}
    fresh = tables.embedded(text, "skuda two", "\\1 new\n")
    assert fresh.replace("\\1 new\n", "") == text
    assert blocks(fresh) == {"skuda one": "1\n", "skuda two": "\\1 new\n"}
    assert tables.embedded(text, "skuda three", "x\n") == text
    assert blocks("<!-- end of a -->\n<!-- made by `a` -->\n") == {}


def test_the_table_of_an_exact_model_has_every_time_of_the_record_once(tables, tmp_path):
    times = json.loads((ROOT / "docs" / "evidence" / "h200-exact.json").read_text())
    drawn = {name: float(i + 1) for i, name in enumerate(times)} | {"card": "NVIDIA H200", "update_ s": 0.5}
    (tmp_path / "exact.json").write_text(json.dumps(drawn))
    found = re.findall(r"\d+\.\d\d\b", tables.exact_cost(tmp_path / "exact.json"))
    left_out = {"card", "layers", "update_ first s", "update_ s"}
    assert sorted(map(float, found)) == [value for name, value in drawn.items() if name not in left_out]
    assert f"{drawn['layers']} layers, NVIDIA H200" in tables.exact_cost(tmp_path / "exact.json")
    assert "`update_`: 500.0 ms" in tables.exact_cost(tmp_path / "exact.json")
    row = [f"{drawn[f'exact {phase}']:.2f}" for phase in ("decode 1", "decode 16", "decode 64", "prefill 4096")]
    assert f"\n| exact | {' | '.join(row)} |\n" in tables.exact_cost(tmp_path / "exact.json")


def test_the_table_of_vllm_has_the_medians_of_its_rounds(tables, tmp_path):
    lines, names = ["==> times <=="], ("q", "exact", "full", "bf16", "bf16-bi")
    for at, name in enumerate(names):
        lines.append(f"{name} {{'ready': '{name}', 'tokens_per_gib': {1000 * (at + 1)}}}")
        for i in (0, 1):
            step = {"step_ms 4x9": at + i, "step_ms lp 4x9": 77, "prefill 2x8 tokens/s": 5000 * (at + 1) + 2 * i}
            lines.append(f"times {i} {name} {step}")
    (tmp_path / "vllm.txt").write_text("\n".join(lines))
    assert tables.vllm_times(tmp_path / "vllm.txt").splitlines()[2:] == [
        "| 4 x 9, ms | 3.50 | 4.50 | 0.50 | 1.50 | 2.50 |",
        "| prompts of 2 x 8, tokens/s | 20,001 | 25,001 | 5,001 | 10,001 | 15,001 |",
        "| tokens of cache in a GiB | 4,000 | 5,000 | 1,000 | 2,000 | 3,000 |",
    ]


def test_the_table_of_4_bits_has_a_row_for_each_way(tables, tmp_path):
    plain, smoothed = ({"error": e, "mean cosine": 0.5, "worst cosine": w} for e, w in ((0.25, 0.75), (0.125, 0.875)))
    record = {"model": "m 1", "layers": 7, "calibration sentences": 3, "held-out sentences": 4}
    record["errors"] = {"W9A9": {"plain": plain, "smoothed": smoothed}}
    (tmp_path / "int4.json").write_text(json.dumps(record))
    assert tables.int4_error(tmp_path / "int4.json").splitlines() == [
        "| weights | error, plain | error, smoothed | worst cosine, plain | worst cosine, smoothed |",
        "| --- | --- | --- | --- | --- |",
        "| W9A9 | 0.250 | 0.125 | 0.750 | 0.875 |",
        "",
        "m 1, 7 layers; 3 sentences calibrate, 4 are held out.",
    ]


@pytest.mark.parametrize("command", ["skuda nonsense", "ls"])
def test_a_block_of_a_command_that_fails_is_an_error(tables, command):
    with pytest.raises(ValueError, match=f"cannot make a block with `{command}`"):
        tables.printed(command)


def test_a_record_of_a_wrong_result_is_shown(tables, tmp_path):
    record = RECORD.model_copy(update={"phases": (RECORD.phases[0].model_copy(update={"wrong": "a bit"}),)})
    record.save(tmp_path / "wrong.json")
    assert "mlp 1: a bit" in tables.printed(f"skuda bench-model --show {tmp_path}/wrong.json --markdown phases")


@pytest.mark.parametrize("page", [p for p in PAGES if p.parent.name != "examples"], ids=lambda page: page.name)
def test_no_figure_is_written_by_hand(page):
    assert not [line for line in outside(page.read_text(encoding="utf-8")).splitlines() if FIGURE.search(line)]


def test_a_figure_is_known_when_it_is_seen():
    for text in ("12.8 us", "| 301 ms |", "1,437 TFLOP/s", "4.1 TB/s", "2.0 x faster", "1.50x"):
        assert FIGURE.search(text), text
    for text in ("16x4096", "128 x 256", "sm_90a", "100 columns", "64 MiB"):
        assert not FIGURE.search(text), text
