"""Write the generated blocks of README and the documentation: what the command of each block prints now.

A block stands between two lines: ``<!-- made by `COMMAND` -->``, or ``<!-- LABEL: made by ...``, and
``<!-- end of LABEL -->``.
"""

from __future__ import annotations

import json
import re
import runpy
import shlex
import statistics
import sys
from ast import literal_eval
from collections import defaultdict
from collections.abc import Iterator
from contextlib import chdir, redirect_stdout
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

from skuda.kernels.catalog import built_in_registry
from skuda.tools.cli import main
from skuda.tools.files import write_whole
from skuda.tools.frame.view import markdown_table
from skuda.tools.show.kernels import elements_of, evidence_words, judge_of, legend
from skuda.tools.verify.evidence import load_records

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
EVIDENCE = ROOT / "docs" / "evidence"

_BLOCK = re.compile(
    r"^(?P<begin><!-- (?:[^`\n]+: )?made by `(?P<command>[^`\n]+)` -->\n)"
    r"(?P<content>.*?)(?P<end><!-- end of [^\n]+ -->)$",
    re.MULTILINE | re.DOTALL,
)


def blocks(text: str) -> dict[str, str]:
    """Return the content of each generated block of a text, by the command that makes it."""
    return {found["command"]: found["content"] for found in _BLOCK.finditer(text)}


def embedded(text: str, command: str, content: str) -> str:
    """Return a text with new content, whole lines, in the block of a command."""
    return _BLOCK.sub(
        lambda found: found["begin"] + content + found["end"] if found["command"] == command else found[0], text
    )


def matrix() -> str:
    """Return the op matrix: every op, its elements, and the evidence for each backend's kernels."""
    registry = built_in_registry()
    judge = judge_of(registry, load_records())
    backends = list(dict.fromkeys(sku.backend for sku in registry))
    used: set[str] = set()
    rows = []
    for op in sorted(registry.ops.values(), key=lambda op: (op.category, op.name)):
        skus = registry.skus_of(op.name)
        cells = (evidence_words([sku for sku in skus if sku.backend == backend], judge) for backend in backends)
        rows.append((f"`{op.name}`", elements_of(skus, used), *cells))
    table = markdown_table(("op", "elements", *(f"`{backend}`" for backend in backends)), rows)
    return table + (f"\n{legend(used)}.\n" if used else "")


def exact_cost(record: Path = EVIDENCE / "h200-exact.json") -> str:
    """Return the times of an exact model and of others, which ``tests/programs/exact_cost.py`` recorded."""
    times = json.loads(record.read_text(encoding="utf-8"))

    def table(heading: str, ways: dict[str, str], phases: tuple[str, ...]) -> str:
        """Return a table of ways by their names in the record, in which ``*`` stands for a phase."""
        rows = []
        for way, pattern in ways.items():
            found = [times.get(pattern.replace("*", phase)) for phase in phases]
            rows.append((way, *("-" if ms is None else f"{ms:.2f}" for ms in found)))
        return markdown_table((heading, *phases), rows)

    served = {name: f"{name} *" for name in ("default", "default, int8 head", "exact")}
    served |= {"exact, with `sample` and `log_probs`": "exact *, sampled, logprob"}
    trained = {"exact, of `Mixed`": "trainer *", "bf16": "bf16 *"}
    return "\n".join(
        (
            table("served, ms", served, ("decode 1", "decode 16", "decode 64", "prefill 4096")),
            table("trained, ms", trained, ("forward no grad", "forward", "step")),
            f"`update_`: {1e3 * times['update_ s']:.1f} ms. {times['layers']} layers, {times['card']}.\n",
        )
    )


_ENGINES = EVIDENCE / "h200-vllm-engines.txt"


def _said(of: str, record: Path) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the names of engines of vLLM and what was printed of each."""
    for line in record.read_text(encoding="utf-8").splitlines():
        if one := re.fullmatch(rf"{of} (\S+) (\{{.*\}})", line):
            yield one[1], literal_eval(one[2])


def vllm_engines() -> str:
    """Return what was printed of engines of vLLM: decode steps, prompts, and mixed requests, once and again."""
    exact = {"skudaexact": "skuda, exact", "skudaint4exact": "skuda, exact, 4 bits", "fp8": "fp8, in the same run"}
    names = {"skuda": "skuda", "skudaint4": "skuda, 4 bits", "stock": "int8", "fp8": "fp8", "w4a16": "W4A16"}
    names["bf16"] = "bf16"
    columns = ("", "1, ms", "64, ms", "prompts, tokens/s", "requests, s", "again, s")
    rows = _engines(exact, EVIDENCE / "h200-vllm-exact.txt") + _engines(names, _ENGINES)
    return markdown_table(columns, rows)


def _engines(names: dict[str, str], record: Path) -> list[tuple[str, ...]]:
    rounds = dict(_said("round 0", record))
    mixed: dict[str, list[float]] = defaultdict(list)
    for name, said in _said("mixed", record):
        mixed[name].append(said["s"])
    return [
        (
            label,
            *(f"{rounds[name][f'step_ms {count}']:.2f}" for count in (1, 64)),
            f"{rounds[name]['prefill 8x2048']:,}",
            *(f"{seconds:.2f}" for seconds in mixed[name]),
        )
        for name, label in names.items()
    ]


def vllm_served(record: Path = EVIDENCE / "h200-vllm-exact.txt") -> str:
    """Return what vLLM's benchmark of its server said, the median of its rounds."""
    found: dict[tuple[str, int, str], list[dict[str, float]]] = defaultdict(list)
    for line in record.read_text(encoding="utf-8").splitlines():
        if one := re.fullmatch(r"served \d+ (\S+) (\{.*\})", line):
            said = json.loads(one[2])
            found[one[1], said["graphs"], said["load"]].append(said)
    names = {"skudaexact": "skuda, exact", "skudaint4exact": "skuda, exact, 4 bits", "fp8": "fp8", "stock": "int8"}
    names["w4a16"] = "W4A16"
    fields = ("median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms")
    rows = []
    for graphs, name in product((2048, 512), names):
        if (name, graphs, "at once") in found:
            speed = statistics.median(said["output_throughput"] for said in found[name, graphs, "at once"])
            often = found[name, graphs, "12 a second"]
            times = (f"{statistics.median(said[field] for said in often):.1f}" for field in fields)
            rows.append((names[name], f"{graphs:,}", f"{speed:,.0f}", *times))
    return markdown_table(("", "graphs", "tokens/s", "first, ms", "99%", "between, ms", "99%"), rows)


def accuracy(record: Path = EVIDENCE / "accuracy.json") -> str:
    """Return what ``skuda evaluate`` recorded of a language model, beside the speed of a larger one in vLLM."""
    found = json.loads(record.read_text(encoding="utf-8"))
    texts = ", ".join(text["name"].removesuffix(".txt") for text in found["texts"])
    calibrated = f"; calibrated on {len(found['calibration'])} other texts" if found["calibration"] else ""
    used = f"{found['windows']} windows of {found['length']} tokens of each of {texts}{calibrated}"
    rows = _accuracies(found)
    return f"{markdown_table(_ACCURACY, rows)}\n{found['model']['name']}, {used}; {found['device']}.\n"


def accuracy_in_short(record: Path = EVIDENCE / "accuracy.json") -> str:
    """Return five rows of `accuracy`, with fewer columns."""
    shown = ("f32", "int8", "int8, calibrated", "int4, groups of 32, calibrated", "int4, groups of 128, calibrated")
    rows = [row for row in _accuracies(json.loads(record.read_text(encoding="utf-8"))) if row[0] in shown]
    return markdown_table((*_ACCURACY[:4], _ACCURACY[-1]), [(*row[:4], row[-1]) for row in rows])


def accuracy_int16(record: Path = EVIDENCE / "accuracy-int16.json") -> str:
    """Return the rows of a record of ``skuda evaluate`` whose divergences are far apart."""
    found = json.loads(record.read_text(encoding="utf-8"))
    columns = "model", "MB", "divergence, nats", "its 99%", "same first choice"
    rows = [
        (
            row["model"].removesuffix(" True"),
            f"{row['bytes'] / 1e6:.0f}",
            *(f"{row[name]:.2g}" for name in ("divergence", "divergence_p99")),
            f"{row['agreement']:.3f}",
        )
        for row in found["rows"][1:]
    ]
    texts = ", ".join(each["name"].removesuffix(".txt") for each in found["texts"])
    return f"{markdown_table(columns, rows)}\n{found['windows']} windows of {found['length']} tokens of {texts}.\n"


_ACCURACY = ("weights", "MB", "perplexity", "divergence, nats", "its 99%", "same first choice", "tokens/s of 8B")


def _accuracies(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the rows of `accuracy`."""
    speeds = {name: f"{1e3 / said['step_ms 1']:.0f}" for name, said in _said("round 0", _ENGINES)}
    first, *others = found["rows"]
    rows: list[tuple[str, ...]] = [
        ("f32", f"{first['bytes'] / 1e6:.0f}", f"{first['perplexity']:.2f}", "", "", "", f"{speeds['bf16']} in bf16")
    ]
    for row in others:
        size, error = f"{row['bytes'] / 1e6:.0f}", f"{row['divergence']:.4f} ± {row['divergence_error']:.4f}"
        given = {"weights": "int8", **row["quantize"]}
        groups = f", groups of {given['group_size']}" if given.get("group_size") else ", whole rows"
        name = given["weights"] + (groups if given["weights"] == "int4" else "")
        name += f", {given['budget']} bits in the mean" if "budget" in given else ""
        name += ", calibrated" if row["model"].endswith("calibrated") else ""
        speed = speeds["skuda"] if given["weights"] == "int8" else ""
        speed = speeds["skudaint4"] if given.get("group_size") == 128 and "budget" not in given else speed
        shown = f"{row['perplexity']:.2f}", error, f"{row['divergence_p99']:.2f}", f"{row['agreement']:.3f}"
        rows.append((name, size, *shown, speed))
    return rows


_WEIGHTS = EVIDENCE / "h200-int16.txt"


def int4_times(record: Path = _WEIGHTS) -> str:
    """Return the times of 4-bit weights and of others over them, which ``tests/programs/weight_times.py`` printed."""
    over = {at: {name: us / found["W4A8"] for name, us in found.items()} for at, found in _times(record).items()}
    table = [
        (
            f"{n} x {k}",
            *(f"{_times(record)[n, k, m]['W4A8']:.1f} ({of['W8A8']:.2f}, {of['bf16']:.2f})" for m, of in each),
        )
        for (n, k), each in _by_weight(over)
    ]
    others = {"W8A8": "W8A8", "bf16": "bf16", "torch, int4 x bf16": "torch, int4 x bf16"}
    means = [(shown, *_means(over, name)) for name, shown in others.items()]
    return "\n".join((_by_rows(over, "weight", table), _by_rows(over, "over W4A8, geometric mean", means)))


def int16_times(record: Path = _WEIGHTS) -> str:
    """Return the times of codes of 16 bits over others, and steps of vLLM, which were printed."""
    times = _times(record)
    pairs = (("W8A16", "W8A8"), ("W4A16", "W4A8"), ("W8A16", "bf16"), ("W16A16", "bf16"))
    over = {at: {f"{a} over {b}": found[a] / found[b] for a, b in pairs} for at, found in times.items()}
    rows = [(name, *_means(over, name)) for name in next(iter(over.values()))]
    rounds = dict(_said("round 0", record))
    names = {"skudawideexact": "exact, W16A16", "skudaw8a16exact": "exact, W8A16", "bf16": "bf16"}
    steps = [
        (shown, *(f"{rounds[name][f'step_ms {m}']:.2f}" for m in (1, 16, 64)), f"{rounds[name]['prefill 8x2048']:,}")
        for name, shown in names.items()
    ]
    columns = "in vLLM, ms a step", "1 sequence", "16", "64", "prompts, tokens/s"
    return "\n".join((_by_rows(over, "product, geometric mean", rows), markdown_table(columns, steps)))


_Times = dict[tuple[int, int, int], dict[str, float]]
"""Of each weight and number of rows (n, k, m), microseconds or ratios by name."""


def _times(record: Path) -> _Times:
    pattern = re.compile(r"\{'n': (\d+), 'k': (\d+), 'm': (\d+), 'us': (\{.*?\})")
    lines = map(pattern.match, record.read_text(encoding="utf-8").splitlines())
    return {(int(one[1]), int(one[2]), int(one[3])): literal_eval(one[4]) for one in lines if one}


def _by_weight(found: _Times) -> list[tuple[tuple[int, int], list[tuple[int, dict[str, float]]]]]:
    weights = dict.fromkeys((n, k) for n, k, _ in found)
    return [(weight, [(m, of) for (n, k, m), of in found.items() if (n, k) == weight]) for weight in weights]


def _means(over: _Times, name: str) -> list[str]:
    rows = dict.fromkeys(m for *_, m in over)
    return [f"{statistics.geometric_mean(of[name] for (*_, m), of in over.items() if m == row):.2f}" for row in rows]


def _by_rows(found: _Times, what: str, table: list[tuple[str, ...]]) -> str:
    return markdown_table((what, *(f"M = {m}" for m in dict.fromkeys(m for *_, m in found))), table)


def attention_error() -> str:
    """Return the errors of int8 attention, which ``tests/programs/attention_error.py`` computes."""
    program = runpy.run_path(str(ROOT / "tests" / "programs" / "attention_error.py"))
    return str(program["table"]())


TABLES = {
    "make tables": matrix,
    "python docs/tables.py exact": exact_cost,
    "python docs/tables.py accuracy": accuracy,
    "python docs/tables.py accuracy-in-short": accuracy_in_short,
    "python docs/tables.py accuracy-int16": accuracy_int16,
    "python docs/tables.py int4-times": int4_times,
    "python docs/tables.py int16-times": int16_times,
    "python docs/tables.py vllm-engines": vllm_engines,
    "python docs/tables.py vllm-served": vllm_served,
    "python tests/programs/attention_error.py": attention_error,
}
"""Tables that no `skuda` command prints, by the command of their blocks."""


def printed(command: str) -> str:
    """Return what a `skuda` command prints when it runs in the checkout, or one of `TABLES`.

    A record of a wrong or missed result is shown like others, with exit status 1.

    Raises
    ------
    ValueError
        For another program, and for a command that fails.
    """
    if command in TABLES:
        return TABLES[command]()
    program, *arguments = shlex.split(command)
    with redirect_stdout(StringIO()) as output, chdir(ROOT):
        status = main(arguments) if program == "skuda" else None
    if status not in (0, 1) or not output.getvalue():
        raise ValueError(f"cannot make a block with `{command}`")
    return output.getvalue()


def outdated() -> Iterator[tuple[Path, str]]:
    """Yield every page with a block that is not what its command prints, and the text that the page should have."""
    for page in PAGES:
        text = fresh = page.read_text(encoding="utf-8")
        for command in blocks(text):
            fresh = embedded(fresh, command, printed(command))
        if fresh != text:
            yield page, fresh


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.stdout.write(printed(f"python docs/tables.py {sys.argv[1]}"))
        raise SystemExit
    for page, text in outdated():
        write_whole(page, text)
        print(f"{page.relative_to(ROOT)}: changed")  # noqa: T201  this is a program
