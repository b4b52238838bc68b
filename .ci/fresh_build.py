"""How setuptools builds a wheel of this project."""

import tempfile
from typing import Any

from setuptools.command.build import build


class FreshBuild(build):
    """Build in a fresh folder, because old files in ``build/lib`` would get into the wheel."""

    def initialize_options(self, *arguments: Any) -> None:
        """Set the defaults; the folder is deleted when the process ends."""
        super().initialize_options(*arguments)
        self._folder = tempfile.TemporaryDirectory()
        self.build_base = self._folder.name
