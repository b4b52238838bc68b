"""The program that plants faults sees those that are caught and those that are not."""

from __future__ import annotations

import random
import subprocess

import pytest
from faults import FAULTS, Fault, drawn, main
from paths import ROOT
from support import SEED

RIGHT = "def double(x):\n    return 2 * x\n"
TEST = "from package import double\n\n\ndef test_double():\n    assert double(3) == 6\n"


@pytest.mark.parametrize(("new", "status"), [("x", 1), ("x + x", 0)])
def test_a_fault_that_changes_nothing_is_not_caught(tmp_path, capsys, new, status):
    for name, text in (("package.py", RIGHT), ("test_package.py", TEST), (".typing/empty", "")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    fault = Fault("one", "package.py", "2 * x", new, ["test_package.py"])
    assert main(["--drawn", "0"], root=tmp_path, faults=[fault]) == 1 - status
    assert f"{status} of 1 planted faults are caught" in capsys.readouterr().out


def test_every_fault_fits_its_file_and_edits_are_drawn():
    for fault in FAULTS:
        assert (ROOT / fault.path).read_text(encoding="utf-8").count(fault.old) == 1, fault.name
        for test in fault.tests:
            path, _, name = test.partition("::")
            assert not name or f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(encoding="utf-8"), test
    for edit in drawn(ROOT, random.Random(SEED), 200):  # noqa: S311  no secret
        text = (ROOT / edit.path).read_text(encoding="utf-8")
        assert text[edit.at :].startswith(edit.old)
        assert edit.new != edit.old
