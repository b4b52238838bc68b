"""What `skuda bench` shows of a record: tables and Markdown sections."""

from __future__ import annotations

import re

import pytest
from measured import CEILINGS, REGISTRY, measured, record_of, some_record

from skuda.dispatch.select.tuning import Timing
from skuda.tools.bench.bench import STUDY
from skuda.tools.bench.record import Ceilings, RivalResult
from skuda.tools.bench.report import sections
from skuda.tools.cli import main
from skuda.tools.frame.view import markdown
from skuda.tools.verify.fingerprint import source_hash


def section(record, name):
    return markdown(sections(record)[name])


@pytest.fixture
def shown(tmp_path, capsys, monkeypatch):
    """Show a record in a terminal of some width; without one, piped."""
    monkeypatch.setenv("SKUDA_PLUGINS", "0")

    def run(record, *arguments, width=0):
        path = tmp_path / "r.json"
        record.save(path)
        if width:
            monkeypatch.setenv("FORCE_COLOR", "1")
            monkeypatch.setenv("COLUMNS", str(width))
        status = main(["bench", "--show", str(path), *arguments])
        out, err = capsys.readouterr()
        return status, re.sub(r"\x1b\[[0-9;]*m", "", out), err

    return run


# --- tables ----------------------------------------------------------------------------------------------------------


def test_a_table_of_an_op_has_a_row_for_every_case():
    text = section(some_record(), "smoothquant_linear")
    title, _, head, rule, *rows = text.splitlines()
    assert title == "### smoothquant_linear"
    assert head == "| shape | element | us | rate | of ceiling | x bf16 | x int_mm | kernel |", "a copy is no rival"
    assert rule.count("---") == 8
    assert [row.split(" | ")[0] for row in rows] == ["| 16x512x512", "| 1024x512x512", "| 64x1024x512"]
    assert " | 8.0 | 67.1 TOPS | 6% | 0.50 | 1.12 | " in rows[1]
    assert all(row.endswith("(stale) |") for row in rows), "their kernels have no hash"
    assert "| 4096x4096 | bf16 | refused | " in section(some_record(), "fake_quantize")


def test_the_rate_of_attention_is_that_of_products_or_memory():
    cases = [measured("attention", shape, 100.0) for shape in ((1, 1, 1024, 128), (1, 2048, 2048, 128))]
    decode, prefill = section(record_of(*cases), "attention").splitlines()[-2:]
    assert decode.startswith("| 1x1x1024x128 | bf16 | 100.0 | 0.0218 TB/s | ")
    assert prefill.startswith("| 1x2048x2048x128 | bf16 | 100.0 | 344 TOPS | ")


def test_samples_of_few_tokens_have_a_table_of_their_own():
    few, shape = "sample, top-k and top-p", (16, 128256)
    every = measured("sample", shape, 2.0, "f32", exponential=3.0)
    some = measured("sample", shape, 4.0, "f32", sorted=8.0).model_copy(update={"label": f"{few} 16x128256 f32"})
    record = record_of(every, some)
    shown = [section(record, name).splitlines()[-1] for name in ("sample", few)]
    assert [row.partition(" TB/s")[0] for row in shown] == [
        "| 16x128256 | f32 | 2.0 | 4.1",
        "| 16x128256 | f32 | 4.0 | 2.05",
    ]


def test_a_kernel_is_stale_where_its_source_has_changed():
    case = measured("fake_quantize", (1024, 4096), 7.0)
    fresh = case.model_copy(update={"source_hash": source_hash(REGISTRY.sku(case.sku))})
    assert "(stale)" not in section(record_of(fresh), "cases")
    assert "(stale)" in section(record_of(fresh.model_copy(update={"source_hash": "0" * 64})), "cases")
    assert "(stale)" in section(record_of(fresh.model_copy(update={"sku": "a.kernel.that.is.gone"})), "cases")


def test_random_shapes_have_a_table_of_their_own():
    drawn = measured("smoothquant_linear", (7, 512, 512), 5.0).model_copy(update={"drawn": True})
    record = record_of(measured("smoothquant_linear", (16, 512, 512), 5.0), drawn)
    assert "| 7x512x512 |" in section(record, "smoothquant_linear, random shapes")
    assert "| 7x512x512 |" not in section(record, "smoothquant_linear")
    assert section(record, "cases").count("### ") == 2


def test_means_are_of_a_class_of_rows():
    record = some_record()
    means = section(record, "means").splitlines()
    assert means[2] == "| op | geometric mean | M >= 1000 | 64 <= M < 1000 | M < 64 |"
    assert means[4] == "| smoothquant_linear | x bf16 | 0.50 (0.50 of 1) | 0.50 (0.50 of 1) | 2.00 (2.00 of 1) |"
    two = [measured("smoothquant_linear", (m, 512, 512), 5.0, bf16=us) for m, us in ((1, 5.0), (2, 20.0))]
    assert "| 2.00 (1.00 of 2) |" in section(record_of(*two), "means"), "the geometric mean, and the lowest"
    assert section(record_of(measured("dynamic_range", (16, 4096), 5.0)), "means") == ""


def test_the_least_time_is_that_of_the_lower_ceiling():
    ceilings = Ceilings(copy_bandwidth=4e12, bf16=7e14, fp8=1.4e15)
    assert ceilings.least(4_000_000, 0) == 1.0
    assert ceilings.least(4_000_000, int(2.8e9)) == 2.0
    assert ceilings.least(12_000_000, int(2.8e9)) == 3.0
    assert Ceilings().least(1, 1) is None
    assert Ceilings(fp8=1e12).least(1, 10**6) == 1.0


def test_facts_name_circumstances_rivals_and_what_is_absent():
    other = RivalResult(name="bf16", computes="something else", timing=Timing.of([3.0]))
    case = measured("dynamic_range", (16, 4096), 5.0).model_copy(update={"rivals": (other,)})
    record = some_record(driver="1.2", versions={"torch": "2"}, absent={"cupy": "it is_not_installed"})
    sensed = case.model_copy(update={"mhz": 1500.0, "watts": 600.0})
    text = section(record.model_copy(update={"cases": (*record.cases, sensed)}), "facts")
    assert "- device: NVIDIA H200 (compute capability 9.0), driver 1.2\n" in text
    assert "- ceilings: copy 4 T/s, bf16 product 800 T/s, fp8 product 1600 T/s (bytes, or operations)\n" in text
    assert "- absent: cupy: it is\\_not\\_installed\n" in text
    assert "- x bf16, dynamic\\_range: something else\n" in text
    assert "- x int\\_mm: the same\n" in text
    assert "- SM clock: 1500 to 1500 MHz\n" in text
    assert "- power: 600 to 600 W\n" in text
    assert "clean lines" in text
    empty = CEILINGS.model_copy(update={"empty": 2.5, "notes": ("fp8: no",)})
    text = section(some_record(ceilings=empty), "facts")
    assert "empty kernel 2.50 us" in text
    assert "- notes: fp8: no\n" in text


def test_a_stale_record_looks_stale(shown):
    assert "stale" not in section(some_record(), "facts")
    old = some_record(method=0)
    assert "- stale: measured by method 0, today's is 1\n" in section(old, "facts")
    assert "measured by method 0, today's is 1" in shown(old, width=140)[1]


def test_a_terminal_gets_padded_tables(shown):
    record = some_record(absent={"gone": "gone is not installed"})
    gone = RivalResult(name="gone", computes="the same", refused="gone is not installed")
    first = record.cases[0].model_copy(update={"rivals": (*record.cases[0].rivals, gone)})
    status, text, err = shown(record.model_copy(update={"cases": (first, *record.cases[1:])}), width=80)
    assert status == 1
    assert "skuda: fake_quantize 4096x4096 bf16: wrong" in err
    assert re.search(r"16x512x512 +\| bf16 +\| 5\.0 +\| \S+ TB/s +\| \d+% +\| 2\.00", text)
    assert re.search(r"4096x4096 +\| bf16 +\| refused", text)
    assert "fake\\_quantize 4096x4096 bf16: wrong" in text
    assert "int\\_mm refuses 16x512x512 bf16: M must exceed 16" in text
    assert "gone refuses" not in text
    assert "gone is not installed" in text
    assert "fake_quantize, " not in text, "no section twice"


def test_a_pipe_gets_every_section_as_markdown(shown):
    text = shown(some_record())[1]
    assert text == shown(some_record(), "--markdown", "all")[1]
    assert section(some_record(), "cases") in text
    assert section(some_record(), "facts") in text


def test_another_section_is_refused(shown):
    said = "--markdown must be one of all, cases, means, facts, layer, product, smoothquant_linear"
    status, out, err = shown(some_record(), "--markdown", "tables")
    assert (status, out) == (2, "")
    assert said in err


# --- the layer that users compare ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("what", "op"), [("layer", "quantized_linear"), ("product", "smoothquant_linear")])
def test_only_rivals_that_do_the_same_work_are_shown_by_rows(what, op):
    said = {"cutlass": "a product, activation quantized before", "int_mm": "int32 sums, no dequantization"}
    less = [RivalResult(name=name, computes=what, timing=Timing.of([1.0])) for name, what in said.items()]
    cases = [measured(op, (m, 4096, 4096), us, bf16=30.0, fp8=20.0) for m, us in ((2048, 20.0), (16, 10.0))]
    cases[0] = cases[0].model_copy(update={"rivals": (*cases[0].rivals, *less)})
    others = measured(op, (8, 512, 512), 1.0), measured(op, (16, 4096, 4096), 1.0, "f16")
    head, _, *rows = section(record_of(*others, *cases), what).splitlines()
    assert head == "| M | skuda, us | bf16, us | fp8, us |"
    assert rows == ["| 16 | 10.0 | 30.0 | 20.0 |", "| 2048 | 20.0 | 30.0 | 20.0 |"]
    assert what in STUDY.apart(record_of(*cases)), "it repeats what the op's table has"
