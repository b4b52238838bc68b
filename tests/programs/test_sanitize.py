"""The program that runs compute-sanitizer, with a stand-in for the tool."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import sanitize
from paths import TESTS

TOOL = """#!/usr/bin/env bash
[ "$1" = --version ] && {{ echo 'NVIDIA (R) Compute Sanitizer'; echo 'Version 2025.3.1.0 (build 1)'; exit; }}
while [ "$1" != --error-exitcode ]; do shift; done
shift 2
echo '========= COMPUTE-SANITIZER'
{command} || exit
{after}
"""
FOUND = """
cat <<'END'
========= Invalid __global__ read of size 4 bytes
=========     at fill+0x90
=========     by thread (3,0,0) in block (0,0,0)
=========
========= Invalid __global__ read of size 4 bytes
=========     at fill+0x90
=========     by thread (4,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 2 errors
END
exit 86"""
WRONG = """
import itertools
import sys
from skuda.dispatch.backends import numpy
from skuda.tools.cli import main

right, calls = numpy.HostRunner.run, itertools.count()
numpy.HostRunner.run = lambda self, arrays, stream: right(self, {**arrays, "value": next(calls) % 7}, stream)
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def run(tmp_path):
    def run(after="echo '========= ERROR SUMMARY: 0 errors'", command='"$@"'):
        path = tmp_path / "bin" / "compute-sanitizer"
        path.parent.mkdir(exist_ok=True)
        path.write_text(TOOL.format(command=command, after=after))
        path.chmod(0o755)
        only = ("--backend", "numpy", "--only", "fill", "--tool", "memcheck")
        words = [sys.executable, TESTS / "programs" / "sanitize.py", *only]
        more = os.environ | {"PATH": f"{path.parent}{os.pathsep}{os.environ['PATH']}"}
        output = tmp_path / "record.json"
        done = subprocess.run([*words, "--output", output], capture_output=True, text=True, env=more, check=False)
        assert "Traceback" not in done.stderr
        return done, json.loads(output.read_text())

    return run


def test_a_clean_run_names_tool_kernel_and_hash_and_is_stale_once_the_kernel_changed(run, capsys):
    done, record = run()
    assert done.returncode == 0, done.stdout + done.stderr
    (only,) = record["runs"]
    assert only["tool"] == "memcheck"
    assert only["summary"] == "ERROR SUMMARY: 0 errors"
    assert only["reports"] == {}
    (name,) = only["kernels"]
    assert name.startswith("unary_elementwise.fill.")
    assert record["version"] == "2025.3.1.0"
    assert f"{record['seed']}" in only["command"]
    assert "clean" in done.stdout
    record["runs"][0]["kernels"] = {name: "another", "gone.kernel": "x"}
    assert not sanitize.show(record)
    assert f"stale: {name} has changed since" in capsys.readouterr().out
    assert sanitize.stale(record["runs"][0]) == [name, "gone.kernel"]


def test_what_the_tool_reports_is_counted_by_kernel_and_fails(run):
    done, record = run(FOUND)
    assert done.returncode == 1
    assert record["runs"][0]["reports"] == {"Invalid __global__ read of size 4 bytes; at fill+0x90": 2}
    assert "2 x Invalid __global__ read of size 4 bytes; at fill+0x90" in done.stdout
    assert "ERROR SUMMARY: 2 errors" in done.stdout


def test_a_run_that_breaks_off_is_not_clean(run):
    done, record = run("kill -9 $$")
    assert done.returncode == 1
    assert sanitize.verdict(record["runs"][0]) == "failed"


def test_a_run_that_takes_too_long_is_unfinished(run, monkeypatch, tmp_path):
    run()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sanitize, "PATIENCE", 0.2)
    (program,) = sanitize.programs_of("memcheck", "numpy", 1, ["fill"])
    assert sanitize.verdict(sanitize.watched("memcheck", program, 1)) == "unfinished"


def test_a_kernel_that_is_wrong_is_reported_although_the_tool_finds_nothing(run, tmp_path):
    program = tmp_path / "wrong.py"
    program.write_text(WRONG)
    done, record = run(command=f'"{sys.executable}" "{program}" "${{@:4}}"')
    assert done.returncode == 1
    (wrong,) = record["runs"][0]["wrong"]
    assert f"wrong results\twrong: {wrong}" in done.stdout


def test_hazards_are_counted_by_their_places_in_the_kernel():
    hazard = """========= Error: Potential RAW hazard detected at __shared__ 0x{address} in block (0,0,0) :
=========     Write Thread ({thread},0,0) at quantized_linear_streamed+0x2a40
=========     Read Thread (0,0,0) at quantized_linear_streamed+0x2b00
=========     Current Value : 0
=========
"""
    printed = "".join(hazard.format(address=4 * thread, thread=thread) for thread in range(3))
    printed += """========= Error: Race reported between Write access at mma+0x10
=========     and Read access at mma+0x20 [8 hazards]
=========
========= RACECHECK SUMMARY: 4 hazards displayed (4 errors, 0 warnings)
"""
    write, read = "Write at quantized_linear_streamed+0x2a40", "Read at quantized_linear_streamed+0x2b00"
    assert sanitize.reports_of(f"========= COMPUTE-SANITIZER\n{printed}") == {
        f"Error: Potential RAW hazard detected at __shared__ in block (0,0,0) :; {write}; {read}": 3,
        "Error: Race reported between Write access at mma+0x10; Read access at mma+0x20": 1,
    }
    assert sanitize.summary_of(printed) == "RACECHECK SUMMARY: 4 hazards displayed (4 errors, 0 warnings)"


def test_every_source_variant_and_op_is_watched():
    from skuda.kernels.catalog import built_in_registry

    skus = {sku.id: sku for sku in built_in_registry() if sku.backend == "cuda_core"}
    for tool in sanitize.TOOLS:
        tiles, few, *rest = sanitize.programs_of(tool, "cuda_core", 7)
        assert [each.words[each.words.index("--variant") + 1] for each in (tiles, few)] == ["warpgroup", "streamed"]
        picked = [skus[name] for each in rest for name in each.words[each.words.index("--sku") + 1].split(",")]
        assert {(sku.op, sku.variant) for sku in picked} == {(sku.op, sku.variant) for sku in skus.values()}
        assert len({sku.source for sku in picked}) == len({sku.source for sku in skus.values()})
