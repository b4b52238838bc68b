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


def test_a_clean_run_is_stale_once_the_kernel_changed(run, capsys):
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
