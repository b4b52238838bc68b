"""Draw the plots that pages show, each into a folder named after its record in docs/evidence."""

from __future__ import annotations

import re
from pathlib import Path

from skuda.tools.files import write_whole
from skuda.tools.studies.commands import records
from skuda.tools.study.plot import rendered
from skuda.tools.study.record import Record

ROOT = Path(__file__).resolve().parent.parent
_SHOWN = re.compile(r"evidence/([\w-]+/[\w-]+\.svg)")


def shown(root: Path = ROOT) -> frozenset[str]:
    """Return the plots that README and the pages show, as ``RECORD/PLOT.svg``."""
    pages = (root / "README.md", *sorted((root / "docs").rglob("*.md")))
    return frozenset(name for page in pages for name in _SHOWN.findall(page.read_text(encoding="utf-8")))


def draw(folder: Path, names: frozenset[str]) -> frozenset[str]:
    """Draw plots of the records in a folder, remove all others, and return the names that no record has.

    A plot that was drawn from the same record is kept, so that the version of matplotlib does not matter.
    """
    missing = set(names)
    for old in folder.glob("*/*.svg"):
        if old.relative_to(folder).as_posix() not in names:
            old.unlink()
    for path, (study, record) in records(folder).items():
        for plot in study.plots(record):
            name = f"{path.stem}/{plot.name}.svg"
            if name in names:
                missing.discard(name)
                file = folder / name
                if not is_of(file, record):
                    file.parent.mkdir(exist_ok=True)
                    write_whole(file, rendered([plot], "svg", record.digest()).decode())
    return frozenset(missing)


def is_of(file: Path, record: Record) -> bool:
    """Return whether a plot was drawn from a record."""
    return file.exists() and f"<dc:source>{record.digest()}</dc:source>" in file.read_text(encoding="utf-8")


if __name__ == "__main__":
    if missing := draw(ROOT / "docs" / "evidence", shown()):
        raise SystemExit(f"pages show plots that no record has: {', '.join(sorted(missing))}")
