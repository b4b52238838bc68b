"""Generated blocks of Markdown files.

A block stands between two lines: ``<!-- made by `COMMAND` -->``, or ``<!-- LABEL: made by ...``, and
``<!-- end of LABEL -->``.
"""

from __future__ import annotations

import re
from pathlib import Path

from skuda.registry.errors import InvalidProblem
from skuda.tools.files import read_text, write_whole

_BLOCK = re.compile(
    r"^(?P<begin><!-- (?:[^`\n]+: )?made by `(?P<command>[^`\n]+)` -->\n)"
    r"(?P<content>.*?)(?P<end><!-- end of [^\n]+ -->)$",
    re.MULTILINE | re.DOTALL,
)


def blocks(text: str) -> dict[str, str]:
    """Return the content of each generated block of a text, by the command that makes it."""
    return {found["command"]: found["content"] for found in _BLOCK.finditer(text)}


def embedded(text: str, command: str, content: str) -> str | None:
    """Return a text with new content, whole lines, in a command's block; None if it has no such block."""
    if command not in blocks(text):
        return None
    return _BLOCK.sub(
        lambda found: found["begin"] + content + found["end"] if found["command"] == command else found[0], text
    )


def write_into(path: Path, command: str, content: str) -> bool:
    """Write new content into a command's block of a file; return whether that changed the file.

    Raise `InvalidProblem` if the file cannot be read, or has no such block.
    """
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise InvalidProblem(command, "the file", str(path), f"be a file that can be read ({error})") from error
    fresh = embedded(text, command, content)
    if fresh is None:
        rule = f"have the lines <!-- made by `{command}` --> and <!-- end of ... -->, one behind the other"
        raise InvalidProblem(command, "the file", str(path), rule)
    if fresh != text:
        write_whole(path, fresh)
    return fresh != text
