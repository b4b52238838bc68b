"""The cubin cache on disk: entries are found by content, published atomically, and checked before use.

An entry is ``<cache>/cubins-<schema>/<key>/<compiler>.cubin``. The key hashes the source, headers, flags, architecture,
entry point, launch rule and backend; `compiler` is a hash of the compiler's identity. A machine with a compiler uses
only entries of that compiler; a machine without one uses those of any.

One file holds a line of facts and the cubin, so a single rename publishes both. If the cache cannot be written, is full
or belongs to another user, kernels are compiled again but never lost.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from skuda.dispatch.settings import cache_directory

SCHEMA = 1
_MAGIC = b"skuda cubin\n"
_LONGEST_WAIT = 300.0
_log = logging.getLogger("skuda")

_locks: dict[str, threading.Lock] = {}
_locks_lock = threading.Lock()


class Key(NamedTuple):
    """Everything that a cubin depends on, apart from the compiler.

    Attributes
    ----------
    source : str
        Hash of the source and of all headers of skuda and its plug-ins that it includes.
    flags : tuple of str
        Compiler flags of the SKU and of the configuration that its launch rule chose.
    arch : str
        Target architecture.
    launch : str
        Entry point and launch rule of the SKU. The rule's results are not part of the key: whenever a cubin is loaded,
        the launch's parameters are compared with those of its kernels.
    backend : str
        The backend that launches it.
    """

    source: str
    flags: tuple[str, ...]
    arch: str
    launch: str
    backend: str

    @property
    def digest(self) -> str:
        """Hash of the key and the schema version."""
        return hashlib.sha256(json.dumps([SCHEMA, *self]).encode()).hexdigest()[:32]


class Found(NamedTuple):
    """A cubin with notes for the user, for example about a corrupt entry or a cache that cannot be written."""

    cubin: bytes
    notes: tuple[str, ...] = ()


class Entry(NamedTuple):
    """One file of the cache, with its state.

    Attributes
    ----------
    path : Path
        Path of the file.
    facts : dict
        The facts stored with the cubin; empty if they cannot be read.
    trouble : str
        Why it would not be used; empty if it would be.
    size : int
        Size on disk in bytes.
    written : float
        Time of the last change, in seconds since the epoch.
    """

    path: Path
    facts: dict[str, Any]
    trouble: str
    size: int
    written: float


class CubinCache:
    """The cache below one folder; any number of processes and threads may share it.

    Parameters
    ----------
    folder : Path or None
        The folder; None for the one in the settings.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = (folder or cache_directory()) / f"cubins-{SCHEMA}"

    def get(self, key: Key, compiler: str | None, build: Callable[[], bytes], facts: dict[str, Any]) -> Found:
        """Return the cubin of a key; build and publish it if it is not cached.

        Parameters
        ----------
        key : Key
            The key.
        compiler : str or None
            Identity of the compiler that `build` uses; None if there is none, and entries of any compiler may be used.
        build : callable
            Returns the cubin. Called at most once; locks keep other threads and processes from building it too.
        facts : dict
            Further facts for users, stored with the cubin.
        """
        notes: list[str] = []
        cubin = self._read_any(key, compiler, notes)
        if cubin is None:
            # Without a compiler nothing will be published, so no folder and no lock is needed.
            cubin = build() if compiler is None else self._built(key, compiler, build, facts, notes)
        for note in notes:
            _log.warning("%s", note)
        return Found(cubin, tuple(notes))

    def _built(
        self, key: Key, compiler: str, build: Callable[[], bytes], facts: dict[str, Any], notes: list[str]
    ) -> bytes:
        with self._alone(key):
            # Another process may have built it while this one waited.
            cubin = self._read_any(key, compiler, [])
            if cubin is None:
                cubin = build()
                self._publish(key, compiler, cubin, facts, notes)
            return cubin

    def has(self, key: Key, compiler: str | None) -> bool:
        """Return whether `get` with the same arguments would build nothing."""
        return self._read_any(key, compiler, []) is not None

    def has_any(self, backend: str) -> bool:
        """Return whether any entry is for a backend."""
        return any(json.loads(line)["backend"] == backend for _, line in self._lines())

    def entries(self) -> Iterator[tuple[Path, dict[str, Any] | None]]:
        """Yield every entry with its facts, or with None if it is corrupt."""
        for path in sorted(self.folder.glob("*/*.cubin")):
            read = _read(path)
            yield path, None if isinstance(read, str) else read[0]

    def survey(self) -> list[Entry]:
        """Return every entry with its checksum and its path checked; entries that vanish meanwhile are left out.

        Raises
        ------
        OSError
            If the folder is absent or cannot be read.
        """
        found = []
        for folder in sorted(Path(item) for item in os.scandir(self.folder) if item.is_dir(follow_symlinks=False)):
            for path in sorted(folder.glob("*.cubin")):
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    read = _read(path)
                    facts, trouble = ({}, read) if isinstance(read, str) else (read[0], _misplaced(path, read[0]))
                    found.append(Entry(path, facts, trouble, status.st_size, status.st_mtime))
        return found

    def leftovers(self, before: float = float("inf")) -> list[Path]:
        """Return the temporary files of processes that were killed while publishing.

        Parameters
        ----------
        before : float
            Seconds since the epoch. Files written later are left out, because their writers may still need them.
        """
        found = []
        for path in sorted(self.folder.glob("*/.new-*")):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < before:
                    found.append(path)
        return found

    def obstacle(self) -> str | None:
        """Return why nothing can be published, or None; creates the folder if needed."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryFile(dir=self.folder):
                return self.distrust()
        except OSError as error:
            return f"the cache {self.folder} cannot be written: {error}"

    def _lines(self) -> Iterator[tuple[Path, bytes]]:
        for path in self.folder.glob("*/*.cubin"):
            with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
                if file.read(len(_MAGIC)) == _MAGIC:
                    line = file.readline()
                    json.loads(line)
                    yield path, line

    def _path(self, key: Key, compiler: str) -> Path:
        return self.folder / key.digest / f"{_stem(compiler)}.cubin"

    def _read_any(self, key: Key, compiler: str | None, notes: list[str]) -> bytes | None:
        trouble = self.distrust()
        if trouble:
            notes.append(trouble)
            return None
        if compiler is not None:
            paths = [self._path(key, compiler)]
        else:
            paths = sorted((self.folder / key.digest).glob("*.cubin"))
        for path in paths:
            read = _read(path)
            if isinstance(read, tuple) and (read[0]["key"] == _as_json(key)):
                return read[1]
            if read == "absent":
                continue
            trouble = read if isinstance(read, str) else "it belongs to another kernel"
            notes.append(f"the cached kernel {path} was not used: {trouble}")
        return None

    def distrust(self) -> str | None:
        """Return why the folder must not be used, or None; code that other users can write is not run."""
        if not hasattr(os, "geteuid"):
            return None
        try:
            status = self.folder.stat()
        except OSError:
            return None
        if status.st_uid in {os.geteuid(), 0} and not status.st_mode & 0o022:
            return None
        return f"the cache {self.folder} is not used: others can write it; chmod go-w, chown, or set SKUDA_CACHE_DIR"

    def _publish(self, key: Key, compiler: str, cubin: bytes, facts: dict[str, Any], notes: list[str]) -> None:
        path = self._path(key, compiler)
        line = json.dumps(
            {
                **facts,
                "key": _as_json(key),
                "backend": key.backend,
                "arch": key.arch,
                "compiler": compiler,
                "built": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "size": len(cubin),
                "sha256": hashlib.sha256(cubin).hexdigest(),
            }
        )
        temporary = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self.distrust():
                return
            path.parent.mkdir(exist_ok=True, mode=0o700)
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
            with os.fdopen(handle, "wb") as file:
                file.write(_MAGIC + line.encode() + b"\n" + cubin)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)  # noqa: PTH105  the temporary name is a string
            temporary = None
            _sync_folder(path.parent)
        except OSError as error:
            notes.append(f"the kernel was compiled but could not be cached: {error}")
        finally:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)  # noqa: PTH108  as above

    @contextlib.contextmanager
    def _alone(self, key: Key) -> Iterator[None]:
        """Lock out other threads, and where the file system allows it other processes, while a key is built."""
        name = str(self.folder / key.digest)
        with _locks_lock:
            lock = _locks.setdefault(name, threading.Lock())
        with lock, contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                Path(name).mkdir(exist_ok=True, mode=0o700)
            with contextlib.suppress(OSError, ImportError):
                # The folder itself is locked, so no lock file remains.
                handle = os.open(name, os.O_RDONLY)
                stack.callback(os.close, handle)
                _lock_file(handle)
            yield


def outdated(
    entries: Iterable[Entry], now: float, *, max_size: int | None = None, max_age: float | None = None
) -> list[Entry]:
    """Return the entries to remove, oldest first: all that are too old, then the oldest until the rest fits.

    Parameters
    ----------
    entries : iterable of Entry
        All entries.
    now : float
        Current time in seconds since the epoch.
    max_size : int or None
        Total size in bytes that may remain; None for no limit.
    max_age : float or None
        Greatest age in seconds; None for no limit.
    """
    oldest_first = sorted(entries, key=lambda entry: (entry.written, entry.path))
    remaining = sum(entry.size for entry in oldest_first)
    found = []
    for entry in oldest_first:
        too_old = max_age is not None and now - entry.written > max_age
        if too_old or (max_size is not None and remaining > max_size):
            found.append(entry)
            remaining -= entry.size
    return found


def remove(paths: Iterable[Path]) -> list[str]:
    """Remove files of the cache and folders that become empty; return a description of each failure.

    A reader that has opened an entry keeps it, and a missing entry is built again, so no lock is needed.
    """
    troubles = []
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            troubles.append(f"{path} cannot be removed: {error.strerror or error}")
            continue
        with contextlib.suppress(OSError):
            path.parent.rmdir()
    return troubles


def _misplaced(path: Path, facts: dict[str, Any]) -> str:
    """Return why an entry cannot be found under its key; an empty string if it can."""
    try:
        fits = (Key(*facts["key"]).digest, _stem(facts["compiler"])) == (path.parent.name, path.stem)
    except (KeyError, TypeError, AttributeError):
        return "its facts cannot be read"
    return "" if fits else "it belongs to another kernel"


def _stem(compiler: str) -> str:
    return hashlib.sha256(compiler.encode()).hexdigest()[:16]


def _lock_file(handle: int) -> None:
    """Lock until the handle is closed; after a long wait continue unlocked, which costs at most a second build."""
    import fcntl

    end = time.monotonic() + _LONGEST_WAIT
    while time.monotonic() < end:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05)
        else:
            return


def _read(path: Path) -> tuple[dict[str, Any], bytes] | str:
    """Return (facts, cubin), or a description of the defect; ``absent`` if there is no file."""
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return "absent"
    except OSError as error:
        return f"it cannot be read: {error}"
    head, _, cubin = content.removeprefix(_MAGIC).partition(b"\n")
    if not content.startswith(_MAGIC):
        return "it is not a kernel of ours"
    try:
        facts = json.loads(head)
        size, digest = facts["size"], facts["sha256"]
    except (ValueError, KeyError, TypeError):
        return "its facts cannot be read"
    if len(cubin) != size or hashlib.sha256(cubin).hexdigest() != digest:
        return f"its checksum is wrong ({len(cubin)} of {size} bytes)"
    return facts, cubin


def _as_json(key: Key) -> list[Any]:
    found: list[Any] = json.loads(json.dumps(list(key)))
    return found


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
