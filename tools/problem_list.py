"""Lists of problems in files, for commands that take many."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

from skuda.registry.descriptor import Descriptor
from skuda.registry.errors import InvalidProblem, SkudaError
from skuda.registry.registry import Registry

_OPTION = "--descriptors"


def read_problems(command: str, registry: Registry, path: Path) -> list[Descriptor]:
    """Read a list of problems: a JSON array of objects, or one object a line, each with ``op`` and the op's fields.

    Parameters
    ----------
    command : str
        Who asks, for messages.
    registry : Registry
        Whose ops.
    path : Path
        The file.

    Raises
    ------
    InvalidProblem
        For a file that cannot be read, or an entry that describes no problem.
    """

    def refused(rule: str) -> InvalidProblem:
        # What is quoted of a file may be as long as the file.
        return InvalidProblem(command, _OPTION, str(path), textwrap.shorten(rule, 400))

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise refused(f"be a file that can be read: {getattr(error, 'strerror', None) or error}") from error
    try:
        lines = [line for line in text.splitlines() if line.strip()]
        entries = json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in lines]
    except (ValueError, RecursionError) as error:
        raise refused(f"be a JSON array, or one JSON object a line: {error}") from error
    found: list[Descriptor] = []
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict) or entry.get("op") not in tuple(registry.ops):
            raise refused(f'hold objects with "op", a registered one, and its fields, which entry {number} is not')
        try:
            found.append(registry.ops[entry["op"]].descriptor(**entry))
        except SkudaError as error:
            raise refused(f"describe problems, which entry {number} does not: {error}") from error
    return list(dict.fromkeys(found))
