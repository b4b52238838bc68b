"""The only module that reads the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from skuda.registry.errors import InvalidRecord


class Setting(NamedTuple):
    """One environment variable: its name, accepted values, default, meaning, and when it is read."""

    name: str
    takes: str
    default: str
    meaning: str
    read: str

    @property
    def given(self) -> str:
        """Its value; empty if it is not set."""
        return os.environ.get(self.name, "")

    def refuse(self, must: str) -> InvalidRecord:
        """Return the error for its present value."""
        return InvalidRecord("the environment", self.name, repr(self.given), must)


_TOPICS = ("dispatch", "compile")
_BY_DISPATCHER = "when a `Dispatcher` is made"

_CACHE_DIR = Setting(
    "SKUDA_CACHE_DIR",
    "a folder",
    "the platform's folder for the user's caches",
    "The folder of compiled kernels.",
    "at the first compilation or lookup of a kernel",
)
_BUNDLE = Setting(
    "SKUDA_BUNDLE",
    "files of `skuda bundle`, separated as in `PATH`, each optionally followed by `#sha256=` and its checksum",
    "none",
    "Bundles of compiled kernels, which are searched before the cache.",
    "at the first use of a CUDA backend",
)
_TUNING = Setting(
    "SKUDA_TUNING",
    "a file of `skuda tune`",
    "the ranking decides",
    "Measured times that may change the choice of a kernel.",
    _BY_DISPATCHER,
)
_PLUGINS = Setting(
    "SKUDA_PLUGINS",
    "names separated by commas (only these are loaded), names with a leading minus (these are not), or `0` (none)",
    "all are loaded",
    "The plug-ins to load.",
    _BY_DISPATCHER,
)
_LOG = Setting(
    "SKUDA_LOG",
    f"one or more of {', '.join(f'`{topic}`' for topic in _TOPICS)}, separated by commas",
    "nothing is logged",
    "Log selections (`dispatch`), or compilations and cache lookups (`compile`), to standard error.",
    f"{_BY_DISPATCHER}, and at a compilation or lookup",
)
_NVTX = Setting(
    "SKUDA_NVTX",
    "`0` or `1`",
    "`0`",
    "An NVTX range around every launch of a plan, for Nsight Systems; needs the package `nvtx`.",
    _BY_DISPATCHER,
)

_TEST_SEED = Setting(
    "SKUDA_TEST_SEED",
    "a whole number",
    "a fresh one",
    "What the conformance suite draws its inputs from.",
    "when `skuda.tools.testing` is imported",
)
_VLLM = Setting(
    "SKUDA_VLLM", "`0` or `1`", "`1`", "Whether skuda serves the int8 layers of vLLM.", "when vLLM loads its plug-ins"
)
_VLLM_FUSE = Setting(
    "SKUDA_VLLM_FUSE",
    "`0` or `1`",
    "`1`",
    "Whether norms and gated activations write int8 codes in vLLM.",
    "when vLLM builds a model",
)

SETTINGS = (_CACHE_DIR, _BUNDLE, _TUNING, _PLUGINS, _LOG, _NVTX, _VLLM, _VLLM_FUSE, _TEST_SEED)
"""Every environment variable that skuda reads."""


def cache_directory() -> Path:
    """Return the directory of compiled kernels: ``SKUDA_CACHE_DIR``, else the platform's user cache."""
    given = _CACHE_DIR.given
    if given:
        return Path(given)
    import platformdirs  # a program that only imports skuda does not need it

    return Path(platformdirs.user_cache_dir("skuda", appauthor=False))


def bundle_names() -> tuple[str, ...]:
    """Return the bundles of compiled kernels to read: ``SKUDA_BUNDLE``, separated as in ``PATH``."""
    return tuple(filter(None, _BUNDLE.given.split(os.pathsep)))


def tuning_file() -> Path | None:
    """Return the file of measured times that ``SKUDA_TUNING`` names, or None."""
    return Path(_TUNING.given) if _TUNING.given else None


def plugin_enabled(*names: str) -> bool:
    """Whether a plug-in with these names (of its entry point and its distribution) is loaded.

    ``SKUDA_PLUGINS`` is a list separated by commas: names (only these are loaded), names with a leading minus (these
    are not loaded), or ``0`` (none). Unset, all are loaded.
    """
    from packaging.utils import canonicalize_name as plain  # a program that only imports skuda does not need it

    words = [word.strip() for word in _PLUGINS.given.split(",")]
    known = {plain(name) for name in names}
    left_out = {plain(word[1:]) for word in words if word.startswith("-")}
    only = {plain(word) for word in words if word not in {"", "1"} and not word.startswith("-")}
    return not known & left_out and (not only or bool(known & only))


def environment(defaults: Mapping[str, str] | None = None, /, **changes: str) -> dict[str, str]:
    """Return the environment of a child process: `defaults`, then this process's variables, then `changes`."""
    return {**(defaults or {}), **os.environ, **changes}


def refuse_multicast() -> None:
    """Disable NVLink multicast in torch's symmetric memory, unless the environment sets it."""
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")


def logged_topics() -> frozenset[str]:
    """Return the topics that ``SKUDA_LOG`` names. Raise `InvalidRecord` for an unknown topic."""
    topics = frozenset(word.strip() for word in _LOG.given.split(",")) - {""}
    if not topics <= set(_TOPICS):
        raise _LOG.refuse(f"be one or more of {', '.join(_TOPICS)}, separated by commas")
    return topics


def nvtx_enabled() -> bool:
    """Whether ``SKUDA_NVTX`` requests ranges around launches. Raise `InvalidRecord` if it is neither 0 nor 1."""
    return _switch(_NVTX, otherwise=False)


def serves_vllm() -> bool:
    """Whether ``SKUDA_VLLM`` lets skuda serve int8 layers of vLLM. Raise `InvalidRecord` if it is neither 0 nor 1."""
    return _switch(_VLLM, otherwise=True)


def vllm_plugins() -> frozenset[str] | None:
    """Return the plug-ins that ``VLLM_PLUGINS``, a setting of vLLM, lets it load. None means all."""
    given = os.environ.get("VLLM_PLUGINS")
    return None if given is None else frozenset(given.split(","))


def vllm_in_this_process() -> None:
    """Let engines of vLLM that begin after this be in this process. Workers of other ranks are no forks of it."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_WORKER_MULTIPROC_METHOD="spawn")


def fuses_in_vllm() -> bool:
    """Whether ``SKUDA_VLLM_FUSE`` lets norms and gates of vLLM write codes. Raise `InvalidRecord` if not 0 or 1."""
    return _switch(_VLLM_FUSE, otherwise=True)


def conformance_seed() -> int:
    """Return the seed of ``SKUDA_TEST_SEED``, or a fresh one. Raise `InvalidRecord` if it is not a whole number."""
    if _TEST_SEED.given and not _TEST_SEED.given.isdecimal():
        raise _TEST_SEED.refuse("be a whole number")
    return int(_TEST_SEED.given or int.from_bytes(os.urandom(4), "little"))


def _switch(setting: Setting, *, otherwise: bool) -> bool:
    if setting.given not in ("", "0", "1"):
        raise setting.refuse("be 0 or 1")
    return setting.given == "1" if setting.given else otherwise
