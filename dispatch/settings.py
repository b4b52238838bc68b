"""The only module that reads the environment."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_directory() -> Path:
    """Where compiled kernels are kept: ``SKUDA_CACHE_DIR``, else the platform's user cache."""
    given = os.environ.get("SKUDA_CACHE_DIR")
    return Path(given) if given else Path(platformdirs.user_cache_dir("skuda", appauthor=False))


def bundle_names() -> tuple[str, ...]:
    """Which files of compiled kernels are read: ``SKUDA_BUNDLE``, separated as in ``PATH``."""
    return tuple(filter(None, os.environ.get("SKUDA_BUNDLE", "").split(os.pathsep)))


def plugins_enabled() -> bool:
    """Whether installed plug-ins are loaded; ``SKUDA_PLUGINS=0`` turns them off."""
    return os.environ.get("SKUDA_PLUGINS", "1") != "0"
