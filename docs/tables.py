"""Write the generated blocks of README and the documentation: what the command of each block prints now."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path

from skuda.tools.cli import main
from skuda.tools.files import write_whole
from skuda.tools.show.embed import blocks, embedded

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def printed(command: str) -> str:
    """Return what a `skuda` command prints when it runs in the checkout.

    A record of a wrong or missed result is shown like others, with exit status 1.

    Raises
    ------
    ValueError
        For another program, and for a command that fails.
    """
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
            fresh = embedded(fresh, command, printed(command)) or fresh
        if fresh != text:
            yield page, fresh


if __name__ == "__main__":
    for page, text in outdated():
        write_whole(page, text)
        print(f"{page.relative_to(ROOT)}: changed")  # noqa: T201  this is a program
