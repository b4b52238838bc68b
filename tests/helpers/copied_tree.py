"""A copy of the tree, to which a test adds files, and what is typed there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from paths import ROOT

PARTS = ("registry", "kernels", "dispatch", "tools", "tests", "docs", ".typing", "pyproject.toml", "Makefile")
PARTS += ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")


def copied_tree(tree):
    """Copy the tree, which commands then import in place of this one."""
    tree.mkdir()
    for name in PARTS:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree / name)
    return tree


def typed(command, folder, **changes):
    bin_ = Path(sys.executable).parent
    env = {**os.environ, "PATH": f"{bin_}{os.pathsep}{os.environ['PATH']}", **changes}
    ran = subprocess.run(["sh", "-c", command], cwd=folder, env=env, capture_output=True, text=True, check=False)
    return ran.returncode, ran.stdout + ran.stderr


def in_tree(command, tree):
    return typed(
        command, tree, PYTHONPATH=str(tree / ".typing"), SKUDA_PLUGINS="0", SKUDA_CACHE_DIR=str(tree / "cache")
    )
