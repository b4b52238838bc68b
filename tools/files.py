"""Files that are replaced only when the new content is complete."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file beside a path; it replaces the path at the end of the block, unless the block fails."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        yield fresh
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a text file; a reader finds either the old content or all of the new one."""
    with replacing(path) as fresh:
        fresh.write_text(text, encoding="utf-8")
