"""Write the generated blocks of README and the documentation: what the command of each block prints now.

A block stands between two lines: ``<!-- made by `COMMAND` -->``, or ``<!-- LABEL: made by ...``, and
``<!-- end of LABEL -->``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path

from skuda.kernels.catalog import built_in_registry
from skuda.tools.cli import main
from skuda.tools.files import write_whole
from skuda.tools.show.kernels import elements_of, evidence_words, judge_of, legend
from skuda.tools.study.view import markdown_table
from skuda.tools.verify.evidence import load_records

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))

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


def printed(command: str) -> str:
    """Return what a `skuda` command prints when it runs in the checkout, or the op matrix for ``make tables``.

    A record of a wrong or missed result is shown like others, with exit status 1.

    Raises
    ------
    ValueError
        For another program, and for a command that fails.
    """
    if command == "make tables":
        return matrix()
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
    for page, text in outdated():
        write_whole(page, text)
        print(f"{page.relative_to(ROOT)}: changed")  # noqa: T201  this is a program
