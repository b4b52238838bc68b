"""compute-sanitizer over CUDA kernels on a GPU, with a record that says which kernels those were.

    python tests/programs/sanitize.py --output docs/evidence/sanitizer.json
    python tests/programs/sanitize.py --show docs/evidence/sanitizer.json

Every tool watches `skuda verify --quick` of a kernel of each op and variant, drawn from the seed, and `skuda tune` of
all configurations of `warpgroup`, at shapes where tiles are divided, and of `streamed`, with and without clusters. Both
compare results with the references. A run whose kernels have changed since is shown as stale.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from skuda.dispatch.select.environment import driver_version
from skuda.dispatch.system import programs
from skuda.kernels.catalog import built_in_registry
from skuda.kernels.sources import source_hash
from skuda.tools.files import write_whole
from skuda.tools.verify.evidence import EvidenceFile

TOOLS = ("memcheck", "racecheck", "synccheck")
# cuda-bindings asks the driver for functions newer than the driver, which it refuses.
MORE = {"memcheck": ("--report-api-errors", "no"), "racecheck": ("--racecheck-report", "all")}
# Backtraces of Python keep its frames, and so the arrays that `verify` expects to be freed.
BACKTRACE = ("--show-backtrace", "device")
FOUND, PATIENCE = 86, 300.0
"""Exit status of the sanitizer if it found anything, and seconds after which a run is ended."""
CONFIGURED = {"warpgroup": "300x700x2064,1290x1072x2128", "streamed": "16x264x2064,40x264x2064"}
SHORTER = {"warpgroup": "130x256x1040", "streamed": "16x264x1040"}
"""By variant, shapes at which all configurations run, and those of racecheck, which takes hundreds of times as long."""
_PASSING = r"(?<!\+)\b0x[0-9a-f]+ |Thread \(\d+,\d+,\d+\) | \[.*?\]|\band (?=Read|Write)"
"""What differs between reports of one place: addresses, threads, counts."""
Record = dict[str, Any]


class Program(NamedTuple):
    """A command of skuda that runs kernels; it writes what it ran to a file."""

    name: str
    words: tuple[str, ...]


def programs_of(tool: str, backend: str, seed: int, only: Sequence[str] = ("",)) -> Iterator[Program]:
    """Yield what a tool shall watch: the programs that take longest come first."""
    drawn: dict[tuple[str, str], list[Any]] = {}
    for sku in built_in_registry():
        if sku.backend == backend and any(part in f"{sku.source} {sku.variant}" for part in only):
            drawn.setdefault((sku.op, sku.variant), []).append(sku)
    rng, sources = random.Random(seed), {}  # noqa: S311  a draw that can be repeated, not a secret
    for _, kernels in sorted(drawn.items()):
        sku = rng.choice(kernels)
        sources.setdefault((sku.source.partition(":")[2] or sku.source, sku.variant), []).append(sku.id)
    for variant, shapes in (SHORTER if tool == "racecheck" else CONFIGURED).items():
        if backend == "cuda_core" and any(part in variant for part in only):
            words = ("tune", "smoothquant_linear", "--element", "bf16", "--variant", variant, "--repeats", "1")
            yield Program(
                f"configurations of {variant} at {shapes}", (*words, "--backend", backend, "--shapes", shapes)
            )
    for (source, variant), ids in sorted(sources.items(), key=lambda pair: "linear" not in pair[0][0]):
        words = ("verify", "--quick", "--sku", ",".join(ids))
        yield Program(f"{source}, {variant}", (*words, *(("--device", "cpu") if backend == "numpy" else ())))


def watched(tool: str, program: Program, seed: int) -> Record:
    """Run a program under a tool; return what was run, how it ended, and what the tool reported."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "ran.json")
        words = (*program.words, "--seed", str(seed), "--output", str(written))
        command = ["compute-sanitizer", "--tool", tool, *MORE.get(tool, ()), *BACKTRACE, "--error-exitcode", str(FOUND)]
        # Every array is an allocation of its own, so that an access beside it is seen.
        more = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "SKUDA_PLUGINS": "0"}
        start = time.monotonic()
        try:
            done = programs.run([*command, sys.executable, "-m", "skuda", *words], timeout=PATIENCE, environment=more)
            status, printed = done.returncode, done.stdout + done.stderr
        except subprocess.TimeoutExpired as late:
            status, printed = None, "".join(_text(part) for part in (late.stdout, late.stderr))
        kernels, wrong = ran(written)
    shown = [*command, "skuda", *words[:-2]]
    return {
        "tool": tool,
        "program": program.name,
        "command": shlex.join(shown),
        "seconds": round(time.monotonic() - start, 1),
        "kernels": kernels,
        "wrong": wrong,
        "status": status,
        "summary": summary_of(printed),
        "reports": reports_of(printed),
        "end": "" if status in (0, FOUND) else printed[-1000:],
    }


def _text(part: bytes | str | None) -> str:
    return part.decode(errors="replace") if isinstance(part, bytes) else part or ""


def ran(path: Path) -> tuple[dict[str, str], list[str]]:
    """Return the kernels that `verify` or `tune` ran, with the hashes of their sources, and what gave wrong results."""
    if not path.exists():
        return {}, []
    record = json.loads(path.read_text())
    if record["kind"] == EvidenceFile.model_fields["kind"].default:
        record = EvidenceFile.load(path).model_dump(mode="json")
    checked = [each for each in record.get("skus", ()) if each["verdict"] != "skipped"]
    timed = [each for entry in record.get("entries", ()) for each in entry["candidates"]]
    wrong = [each["sku"] for each in checked if each["verdict"] == "failed"]
    wrong += [f"{each['sku']}, {each['choice']}: {each['refused']}" for each in timed if each["refused"]]
    return {each["sku"]: each["source_hash"] for each in (*checked, *timed)}, wrong


def summary_of(printed: str) -> str:
    """Return the tool's last line, without its mark: ``ERROR SUMMARY: 0 errors``."""
    return "; ".join(re.findall(r"^=+ (.*SUMMARY: .*)$", printed, re.MULTILINE))


def reports_of(printed: str) -> dict[str, int]:
    """Count the tool's reports by their first line, and by what was accessed from where in a kernel."""
    found: Counter[str] = Counter()
    for report in re.split(r"^=+\s*$", printed, flags=re.MULTILINE):
        lines = re.findall(r"^=+ (.*)$", report, re.MULTILINE)
        heads = (line for line in lines if not line.startswith((" ", "COMPUTE-SANITIZER")) and "SUMMARY" not in line)
        first = next(heads, "")
        if first:
            places = [line.strip() for line in lines if re.match(r" .*\bat \w+\+0x[0-9a-f]+", line)]
            found[re.sub(_PASSING, "", "; ".join((first, *places)))] += 1
    return dict(found)


def stale(run: Mapping[str, Any]) -> list[str]:
    """Return the kernels of a run that have changed since, or are gone."""
    registry = built_in_registry()
    today = {name: sku for name in run["kernels"] if (sku := registry.sku(name)) is not None}
    return [
        name
        for name, digest in run["kernels"].items()
        if name not in today or not source_hash(today[name]).startswith(digest)
    ]


def verdict(run: Mapping[str, Any]) -> str:
    """Say in a word how a run ended."""
    if run["status"] is None:
        return "unfinished"
    if run["wrong"]:
        return "wrong results"
    if run["status"] == FOUND:
        return "reports"
    return "clean" if run["status"] == 0 and run["kernels"] else "failed"


def show(record: Record) -> bool:
    """Print a record; return whether every run is clean and none is stale."""
    good = True
    sys.stdout.write(f"compute-sanitizer {record['version']} on {record['device']}, {record['date']}\n")
    for run in record["runs"]:
        changed = stale(run)
        cells = [run["tool"], run["program"], f"{len(run['kernels'])} kernels", verdict(run), run["summary"]]
        cells += [f"{number} x {report}" for report, number in run["reports"].items()]
        cells += [f"wrong: {wrong}" for wrong in run["wrong"]]
        cells += [f"stale: {name} has changed since" for name in changed]
        sys.stdout.write("\t".join(filter(None, cells)) + "\n" + run["end"])
        good = good and verdict(run) == "clean" and not changed
    return good


def sanitize(tools: Iterable[str], backend: str, seed: int, jobs: int, only: Sequence[str] = ("",)) -> Record:
    """Run everything and return the record."""
    # Those that take longest first, of all tools.
    several = ([(tool, program) for program in programs_of(tool, backend, seed, only)] for tool in tools)
    every = [each for together in zip(*several, strict=True) for each in together]
    with ThreadPoolExecutor(jobs) as pool:
        runs = list(pool.map(lambda each: watched(*each, seed), every))
    version = programs.run(["compute-sanitizer", "--version"], timeout=PATIENCE).stdout
    return {
        "kind": "compute-sanitizer runs",
        "version": (re.findall(r"[Vv]ersion (\S+)", version) or [""])[0],
        "device": _device(backend),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
        "runs": runs,
    }


def _device(backend: str) -> str:
    from skuda.dispatch import Dispatcher

    cuda = [device.name for device in Dispatcher(tuning="").devices if device.processor == "cuda"]
    return f"{cuda[0]}, driver {driver_version()}" if cuda and backend != "numpy" else platform.machine()


def main() -> int:
    """Read the command line; run or show."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tool", choices=TOOLS, action="append", help="these tools; all if left out")
    parser.add_argument("--backend", default="cuda_core")
    parser.add_argument("--only", action="append", help="sources or variants that contain this; all if left out")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path, help="write the record here")
    parser.add_argument("--show", type=Path, help="show this record; run nothing")
    given = parser.parse_args()
    if given.show:
        return 0 if show(json.loads(given.show.read_text())) else 1
    record = sanitize(given.tool or TOOLS, given.backend, given.seed, given.jobs, given.only or ("",))
    if given.output:
        write_whole(given.output, json.dumps(record, indent=1) + "\n")
    return 0 if show(record) else 1


if __name__ == "__main__":
    sys.exit(main())
