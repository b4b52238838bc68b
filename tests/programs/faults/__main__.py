"""Plant faults in a copy of the repository, one at a time, and check that the tests named for each of them fail.

    python tests/programs/faults                     all faults
    python tests/programs/faults cubin- telemetry-   those whose names begin so
    python tests/programs/faults --sample 3          three of them, drawn at random

Faults lie in the modules beside this file, as `FAULTS`. The exit status is 1 if a fault is not caught, or cannot be
planted: its text must stand in its file exactly once. All named tests first run without any fault, and must pass.
"""

from __future__ import annotations

import argparse
import importlib
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(HERE.parent), str(ROOT / "tests" / "helpers")]

from paths import uses_torch  # noqa: E402  the path is set above

from faults.fault import Fault  # noqa: E402

TORCH = ROOT / ".venv" / "torch" / "bin" / "python"
LONGEST = 1800.0
"""Seconds after which the tests of a fault are ended."""


def say(text: str) -> None:
    """Write a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def every_fault() -> list[Fault]:
    """Return the faults of all modules; raise `ValueError` if two have one name."""
    modules = sorted(path.stem for path in HERE.glob("*.py") if path.stem not in {"__init__", "__main__", "fault"})
    found = [Fault(*fault) for module in modules for fault in importlib.import_module(f"faults.{module}").FAULTS]
    names = [fault.name for fault in found]
    if len(set(names)) < len(names):
        raise ValueError(f"these names stand twice: {sorted({name for name in names if names.count(name) > 1})}")
    return found


def needs_torch(fault: Fault) -> bool:
    """Whether the tests of a fault need the environment with torch."""
    return any(uses_torch(ROOT / test.partition("::")[0]) for test in fault.tests)


class Tree:
    """A copy of the repository's files, from which `skuda` is imported."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder = folder
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=root, check=True, capture_output=True, text=True).stdout.split("\0")
        for name in filter(None, names):
            if (root / name).is_symlink() or (root / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, folder / name, follow_symlinks=False)

    def test(self, python: Path, tests: Sequence[str], *options: str) -> tuple[int, str]:
        """Run tests; return pytest's exit status (-1 if they take too long) and what it wrote."""
        command = [python, "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider", *options, *tests]
        # The links in .typing make a package of the folders; an editable install is looked at only after them.
        environment = {**os.environ, "PYTHONPATH": str(self.folder / ".typing")}
        try:
            done = subprocess.run(
                command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=LONGEST, check=False
            )
        except subprocess.TimeoutExpired:
            return -1, ""
        return done.returncode, done.stdout + done.stderr

    def verdict(self, python: Path, fault: Fault, number: int) -> str:
        """Plant a fault, run its tests, and take it out again; return an empty string if it is caught, or why not."""
        file = self.folder / fault.path
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        if text.count(fault.old) != 1:
            return f"its text stands {text.count(fault.old)} times in {fault.path}"
        before = file.stat()
        file.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
        # Python recognizes a compiled file by the time and size of its source.
        os.utime(file, (before.st_atime, before.st_mtime + 60 * (number + 1)))
        try:
            status, said = self.test(python, fault.tests, "-x")
        finally:
            file.write_text(text, encoding="utf-8")
            os.utime(file, (before.st_atime, before.st_mtime))
        if status == 1:
            return ""
        last = said.strip().splitlines()[-1:] or [f"they ran for more than {LONGEST:.0f} s"]
        return "its tests pass" if status == 0 else f"its tests do not run (status {status}): {last[0]}"


def catch(root: Path, faults: Sequence[Fault], jobs: int) -> dict[str, str]:
    """Plant each fault and return the verdict on it by name: empty if it is caught."""
    verdicts: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        trees: queue.Queue[Tree] = queue.Queue()
        for number in range(jobs):
            trees.put(Tree(root, Path(folder) / str(number)))

        def one(numbered: tuple[int, Fault]) -> None:
            number, fault = numbered
            tree, start = trees.get(), time.monotonic()
            try:
                verdict = tree.verdict(_python(fault), fault, number)
            finally:
                trees.put(tree)
            verdicts[fault.name] = verdict
            say(f"{verdict or 'caught':12} {fault.name} ({time.monotonic() - start:.1f} s)")

        for python in sorted({_python(fault) for fault in faults}):
            tests = sorted({test for fault in faults if _python(fault) == python for test in fault.tests})
            tree = trees.get()
            status, said = tree.test(python, tests, *(("--numprocesses", str(jobs)) if jobs > 1 else ()))
            trees.put(tree)
            if status != 0:
                raise SystemExit(f"{said}\ntests named for the faults fail without any fault")
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(one, enumerate(faults)))
    return verdicts


def _python(fault: Fault) -> Path:
    return TORCH if needs_torch(fault) else Path(sys.executable)


def main(arguments: Sequence[str] | None = None, *, root: Path = ROOT, faults: Sequence[Fault] | None = None) -> int:
    """Run the program; return its exit status."""
    parser = argparse.ArgumentParser(prog="faults", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", help="beginnings of names")
    parser.add_argument("--sample", type=int, help="how many to draw")
    parser.add_argument("--seed", default=os.environ.get("SKUDA_TEST_SEED"), help="draws the same sample again")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="how many copies of the repository")
    given = parser.parse_args(arguments)
    chosen = [
        fault
        for fault in (every_fault() if faults is None else faults)
        if not given.names or fault.name.startswith(tuple(given.names))
    ]
    if not chosen:
        parser.error(f"no fault has a name that begins with {' or '.join(given.names)}")
    here = [fault for fault in chosen if TORCH.exists() or not needs_torch(fault)]
    if len(here) < len(chosen):
        say(f"{len(chosen) - len(here)} faults are left out: their tests need torch in {TORCH.parents[1]}")
    if given.sample is not None:
        here = random.Random(given.seed).sample(here, min(given.sample, len(here)))  # noqa: S311  no secret
    verdicts = catch(root, here, given.jobs)
    missed = {name: verdict for name, verdict in verdicts.items() if verdict}
    say(f"{len(verdicts) - len(missed)} of {len(verdicts)} faults are caught")
    for name, verdict in missed.items():
        say(f"NOT CAUGHT: {name}: {verdict}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
