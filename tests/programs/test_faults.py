"""The program that plants faults: it sees those that are caught, those that are not, and those that fit no more."""

from __future__ import annotations

import subprocess

import pytest
from faults.__main__ import every_fault, main
from faults.fault import Fault
from paths import ROOT
from support import SEED, sampled

RIGHT = "def double(x):\n    return 2 * x\n"
TEST = "from package import double\n\n\ndef test_double():\n    assert double(3) == 6\n"


@pytest.fixture
def repository(tmp_path):
    """A repository of one module and its test."""
    for name, text in (("package.py", RIGHT), ("test_package.py", TEST), (".typing/empty", "")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    return tmp_path


FAULTS = {
    "caught": (("2 * x", "x"), 0, "1 of 1 faults are caught"),
    "not caught": (("2 * x", "x + x"), 1, "NOT CAUGHT: one: its tests pass"),
    "not there": (("3 * x", "x"), 1, "NOT CAUGHT: one: its text stands 0 times in package.py"),
    "there twice": (("x", "y"), 1, "its text stands 2 times"),
    "no test runs": (("def double", "def doubled"), 1, "its tests do not run (status 2)"),
}


@pytest.mark.parametrize(
    ("edit", "status", "verdict"), sampled([pytest.param(*each, id=name) for name, each in FAULTS.items()], 2)
)
def test_the_verdict_on_a_fault(repository, capsys, edit, status, verdict):
    fault = Fault("one", "package.py", *edit, ["test_package.py"])
    assert main(["--jobs", "1"], root=repository, faults=[fault]) == status
    assert verdict in capsys.readouterr().out
    assert (repository / "package.py").read_text() == RIGHT


def test_tests_that_fail_without_a_fault_show_nothing(repository):
    (repository / "package.py").write_text(RIGHT.replace("2", "3"))
    fault = Fault("one", "package.py", "3 * x", "x", ["test_package.py"])
    with pytest.raises(SystemExit, match="fail without any fault"):
        main(["--jobs", "1"], root=repository, faults=[fault])


def test_every_fault_fits_its_file_and_names_tests_that_there_are():
    faults = every_fault()
    assert len(faults) >= 100
    for fault in faults:
        assert (ROOT / fault.path).read_text(encoding="utf-8").count(fault.old) == 1, fault.name
        assert fault.old != fault.new, fault.name
        for test in fault.tests:
            path, _, name = test.partition("::")
            assert (ROOT / path).exists(), f"{fault.name}: {test}"
            shown = f"def {name.partition('[')[0].rpartition('::')[2]}("
            assert not name or shown in (ROOT / path).read_text(encoding="utf-8"), f"{fault.name}: {test}"


@pytest.mark.full
@pytest.mark.long
def test_a_sample_of_the_faults_is_caught(capsys):
    assert main(["--sample", "3", "--seed", str(SEED)]) == 0, capsys.readouterr().out
