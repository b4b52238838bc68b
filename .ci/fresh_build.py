"""How setuptools builds a wheel and an sdist of this project."""

import gzip
import io
import os
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from setuptools.command.build import build
from setuptools.command.sdist import sdist


class FreshBuild(build):
    """Build in a fresh folder, because old files in ``build/lib`` would get into the wheel."""

    def initialize_options(self, *arguments: Any) -> None:
        """Set the defaults; the folder is deleted when the process ends."""
        super().initialize_options(*arguments)
        self._folder = tempfile.TemporaryDirectory()
        self.build_base = self._folder.name


class SteadySdist(sdist):
    """Write the same bytes each time where ``SOURCE_DATE_EPOCH`` is set; setuptools does so for wheels only."""

    def make_archive(self, *arguments: Any, **options: Any) -> str:
        """Return the path of the archive."""
        path = super().make_archive(*arguments, **options)
        moment = os.environ.get("SOURCE_DATE_EPOCH")
        if moment is not None and path.endswith(".tar.gz"):
            _settle(Path(path), int(moment))
        return path


def _settle(path: Path, moment: int) -> None:
    """Write an archive again, in order of names, with one time for all files, no owner, and no umask."""
    content = io.BytesIO(path.read_bytes())
    with (
        tarfile.open(fileobj=content) as given,
        path.open("wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=moment) as packed,
        tarfile.open(fileobj=packed, mode="w") as made,
    ):
        for member in sorted(given, key=lambda each: each.name):
            member.mtime, member.pax_headers = moment, {}
            member.uid, member.gid, member.uname, member.gname = 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            made.addfile(member, given.extractfile(member) if member.isfile() else None)
