"""Every record in docs/evidence is in a page, and a page says which logs of tests are not of the present kernels."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from paths import ROOT
from support import kernels_tested

from skuda.dispatch import Dispatcher, Plan, device_named
from skuda.dispatch.preference import NO_PREFERENCE
from skuda.kernels.catalog import built_in_registry
from skuda.tools.bench.bench import Bench
from skuda.tools.bench.record import BenchRecord

EVIDENCE = ROOT / "docs" / "evidence"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
MARK = "older log"
_LOG = re.compile(r"^(=* ?)?\d+ passed.* in [\d.]+s", re.MULTILINE)
_NAMED = re.compile(r"evidence/([\w.-]+\.txt)")


def unmarked(pages: dict[str, str], logs: dict[str, str]) -> list[str]:
    """Return the pages that name a log of other kernels than the present ones without `MARK` in the sentence."""
    old = {name for name, log in logs.items() if _LOG.search(log) and kernels_tested() not in log}
    return [
        f"{page}: {name}: run it again, or call it an {MARK}"
        for page, text in pages.items()
        for sentence in re.split(r"[.;:|](?=\s)", text)
        for name in _NAMED.findall(sentence)
        if name in old and MARK not in " ".join(sentence.split())
    ]


def test_logs_of_other_kernels_are_called_so():
    pages = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
    logs = {log.name: log.read_text(encoding="utf-8") for log in EVIDENCE.glob("*.txt")}
    assert sum(bool(_LOG.search(log)) for log in logs.values()) >= 4
    assert not unmarked(pages, logs)


@pytest.mark.parametrize(
    ("sentence", "log", "found"),
    [
        ("It [passed](evidence/a.txt).", "5 passed in 1.00s", True),
        ("It [passed](evidence/a.txt).", "5 passed in 1.00s\nof the kernels 0123456789abcdef", True),
        ("It [passed](evidence/a.txt).", f"5 passed in 1.00s\n{kernels_tested()}", False),
        ("It [passed](evidence/a.txt, an older\nlog).", "===== 5 passed, 1 skipped in 1.00s =====", False),
        ("It [passed](evidence/a.txt). This is no older log.", "5 passed in 1.00s", True),
        ("Times are [here](evidence/a.txt).", "5.0 us", False),
    ],
)
def test_an_old_log_without_the_mark_is_found(sentence, log, found):
    assert bool(unmarked({"page.md": f"Before. {sentence}"}, {"a.txt": log})) is found


@pytest.mark.parametrize("name", ["linear", "random", "random-2"])
def test_an_h200_launches_the_warpgroup_products_that_its_record_has(name):
    dispatcher, device = Dispatcher(built_in_registry()), device_named("h200")
    every = BenchRecord.load(EVIDENCE / f"h200-bench-{name}.json").cases
    cases = [case for case in every if case.steps and case.sku.endswith(".warpgroup")]
    assert len(cases) > 20
    for case in cases:
        sku, problem = dispatcher.registry.sku(case.sku), dispatcher.describe(**case.problem)
        plan = Plan.prepared(sku, problem, device, NO_PREFERENCE, runner=None)
        named = Bench._named(SimpleNamespace(dispatcher=dispatcher, device=device), plan)
        assert named["steps"] == case.steps, case.label


def test_every_record_is_in_a_page():
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    records = [path.name for path in EVIDENCE.iterdir() if path.is_file()]
    assert len(records) > 20
    assert [name for name in records if f"evidence/{name}" not in text] == []


def test_a_run_of_tests_names_the_kernels_that_it_is_of():
    one = f"{Path(__file__).relative_to(ROOT)}::test_every_record_is_in_a_page"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", one]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
    assert kernels_tested() in ran.stdout.splitlines()
