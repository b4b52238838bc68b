"""`--markdown`: the tables of README and docs say what the records say, and are the same for the same record."""

from __future__ import annotations

import io

import pytest
from measured import REGISTRY, measured, record_of, some_record
from paths import ROOT
from rich.console import Console

from skuda.dispatch import Tuning
from skuda.dispatch.select.explanation import Measured, Verdict
from skuda.registry import InvalidProblem
from skuda.tools.bench.markdown import bench_markdown, markdown_table
from skuda.tools.bench.outcome import Outcome, print_tuning
from skuda.tools.bench.record import BenchRecord, HostCost, Timing
from skuda.tools.cli import main

EVIDENCE = ROOT / "docs" / "evidence"


def test_a_cell_stays_one_cell():
    assert markdown_table(("a", "b"), [("x|y", "two\nlines")]) == "| a | b |\n| --- | --- |\n| x\\|y | two lines |\n"


def test_a_table_of_an_op_has_a_row_for_every_case():
    text = bench_markdown(some_record(), REGISTRY, "smoothquant_linear")
    head, rule, *rows = text.splitlines()
    assert head == "| shape | element | us | rate | of ceiling | x bf16 | x copy | x int_mm | kernel |"
    assert rule.count("---") == 9
    assert [row.split(" | ")[0] for row in rows] == ["| 16x512x512", "| 1024x512x512", "| 64x1024x512"]
    assert " | 8.0 | 67.1 TOPS | " in rows[1]
    assert " | 0.50 | - | 1.12 | " in rows[1]
    assert rows[0].endswith("(stale) |"), "a record of made-up kernels"
    assert "| 4096x4096 | bf16 | refused | wrong |" in bench_markdown(some_record(), REGISTRY, "fake_quantize")


def test_means_and_bandwidth_and_host():
    record = some_record(
        host=(HostCost(name="plan.run", timing=Timing.of([4.5])), HostCost(name="other", refused="no nvcc"))
    )
    assert bench_markdown(record, REGISTRY, "host").splitlines()[2:] == [
        "| plan.run | 4.50 | 4.50 |",
        "| other | - | - |",
    ]
    means = bench_markdown(record, REGISTRY, "means").splitlines()
    assert means[0] == "| op | geometric mean (of) | M >= 1000 | 64 <= M < 1000 | M < 64 |"
    assert means[2] == "| smoothquant_linear | x bf16 | 0.50 (1) | 0.50 (1) | 2.00 (1) |"
    bandwidth = bench_markdown(record, REGISTRY, "bandwidth").splitlines()
    assert bandwidth[0] == "| op | bf16 | f16 | x compile | x bitsandbytes |", "a copy is the ceiling, not a rival"
    assert bandwidth[3].startswith("| `fake_quantize` | 2.4 TB/s, 60% |  | 1.07 | - |")
    assert len(bandwidth) == 4
    products = record_of(measured("smoothquant_linear", (16, 512, 512), 5.0))
    assert bench_markdown(products, REGISTRY, "bandwidth") == bench_markdown(products, REGISTRY, "host") == ""


def test_facts_say_on_what_it_was_measured():
    record = some_record(driver="1.2", versions={"torch": "2"}, absent={"cupy": "it is_not_installed"})
    text = bench_markdown(record, REGISTRY, "facts")
    assert "- device: NVIDIA H200 (compute capability 9.0), driver 1.2\n" in text
    assert "- ceilings: copy 4.00 TB/s, bf16 product 800 TFLOP/s, fp8 product 1,600 TFLOP/s\n" in text
    assert "- absent: cupy: it is\\_not\\_installed\n" in text


def test_another_section_is_refused():
    with pytest.raises(
        InvalidProblem, match="--markdown must be one of all, facts, cases, means, bands, bandwidth, host"
    ):
        bench_markdown(some_record(), REGISTRY, "tables")


@pytest.mark.parametrize("path", sorted(EVIDENCE.glob("*-bench-*.json")), ids=lambda path: path.stem)
def test_the_command_prints_all_of_a_record(path, capsys):
    record = BenchRecord.load(path)
    assert main(["bench", "--show", str(path), "--markdown", "all"]) == int(bool(record.refused))
    out, err = capsys.readouterr()
    assert (out, err) == (bench_markdown(record, REGISTRY), "")
    for case in record.cases:
        us = case.timing.median
        assert f"| {case.size} | {case.element} | {us:.{int(us < 1000)}f} | " in out
    assert all(f"| {cost.name} | {cost.timing.median:.2f} | " in out for cost in record.host if cost.timing)


def test_a_tuning_is_a_table_of_first_fastest_and_what_runs(capsys):
    assert main(["tune", "--show", str(EVIDENCE / "h200-tuning.json"), "--markdown"]) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head == "| op | problem | candidates | first of the ranking | us | fastest | us | runs |"
    assert len(rows) == 8
    assert rows[0].startswith("| quantized_linear | m=16 c_out=4096 k=4096 q_min=-127 q_max=127 ")
    assert all(row.count(" | ") == 7 for row in rows)


def test_a_page_of_a_tuning_leaves_slow_candidates_out_and_says_so():
    tuning = Tuning.load(EVIDENCE / "h200-tuning.json")
    entry = tuning.entries[0]
    times = (Measured(sku=c.sku, choice=c.choice, microseconds=c.timing.median, against="") for c in entry.candidates)
    verdict = Verdict(origin="", chosen=False, reason="it is the fastest", times=tuple(times))
    console = Console(file=io.StringIO(), width=120)
    print_tuning(console, tuning, [Outcome(entry, verdict, None)])
    assert f"{len(entry.candidates) - 8} more are slower" in console.file.getvalue()
