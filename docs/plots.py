"""Draw the plots of every record in docs/evidence that has any, each into the folder of its name."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from skuda.tools.cli import main
from skuda.tools.report.measured import KINDS
from skuda.tools.verify.evidence import evidence_directory


def draw(folder: Path | None) -> None:
    """Replace the plots of the records in a folder.

    Raises
    ------
    RuntimeError
        If a command cannot show a record. A record of a wrong or missed result is drawn like others.
    """
    for kind in KINDS:
        for path in kind.files(folder):
            place = path.with_suffix("")
            for old in place.glob("*.svg"):
                old.unlink()
            with redirect_stdout(StringIO()):
                status = main([kind.maker(), "--show", str(path), "--plot", str(place)])
            if status not in (0, 1):
                raise RuntimeError(f"cannot draw {path}")


if __name__ == "__main__":
    draw(evidence_directory())
