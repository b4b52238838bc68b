"""Compiled kernels on disk: found by content, published whole or not at all, checked before use.

``<cache>/cubins-<schema>/<what>/<compiler>.cubin``: `what` fingerprints everything that a person wrote (source,
headers, flags, architecture, parameters, backend), `compiler` who compiled it. A machine without a compiler takes what
any compiler made of the same source; a machine with one takes its own.

One file holds one line of facts and the cubin, so a rename publishes both. A cache that cannot be written, is full, or
belongs to somebody else costs time, never the kernel.
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
    """Everything on which a cubin depends.

    Attributes
    ----------
    source : str
        Fingerprint of the source and of every header of ours that it includes.
    flags : tuple of str
        Of the SKU and of the configuration that its launch rule chose.
    arch : str
        Compiled for.
    launch : str
        Entry point and launch rule of the SKU. What the rule gives for one problem is compared with what the compiled
        kernels take whenever a cubin is loaded, so it need not tell apart cubins that are the same.
    backend : str
        Who launches it.
    """

    source: str
    flags: tuple[str, ...]
    arch: str
    launch: str
    backend: str

    @property
    def digest(self) -> str:
        """Fingerprint, schema included."""
        return hashlib.sha256(json.dumps([SCHEMA, *self]).encode()).hexdigest()[:32]


class Found(NamedTuple):
    """A cubin, and how it was come by.

    Attributes
    ----------
    cubin : bytes
        The binary.
    notes : tuple of str
        What a person should know: an entry that was corrupt, a cache that cannot be written.
    """

    cubin: bytes
    notes: tuple[str, ...] = ()


class Entry(NamedTuple):
    """One file of the cache, as somebody who looks after it sees it.

    Attributes
    ----------
    path : Path
        Where it is.
    facts : dict
        What stands beside the cubin; empty where it cannot be read.
    trouble : str
        Why it would not be used; empty where it would.
    size : int
        Bytes on disk.
    written : float
        When, in seconds since the epoch.
    """

    path: Path
    facts: dict[str, Any]
    trouble: str
    size: int
    written: float


class CubinCache:
    """The cache below one folder. Any number of processes and threads may share it.

    Parameters
    ----------
    folder : Path or None
        None for the one that the settings name.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = (folder or cache_directory()) / f"cubins-{SCHEMA}"

    def get(self, key: Key, compiler: str | None, build: Callable[[], bytes], facts: dict[str, Any]) -> Found:
        """Return the cubin of a key, building and publishing it where it is not there.

        Parameters
        ----------
        key : Key
            What is wanted.
        compiler : str or None
            Identity of the compiler that `build` uses; None where there is none, and any compiler's work will do.
        build : callable
            Returns the cubin. Called at most once, and by one thread of one process at a time as far as locks reach.
        facts : dict
            What else is written beside the cubin, for people.
        """
        notes: list[str] = []
        cubin = self._read_any(key, compiler, notes)
        if cubin is None:
            # Without a compiler nothing will be published: no folder is made, and nobody waits for anybody.
            cubin = build() if compiler is None else self._built(key, compiler, build, facts, notes)
        for note in notes:
            _log.warning("%s", note)
        return Found(cubin, tuple(notes))

    def _built(
        self, key: Key, compiler: str, build: Callable[[], bytes], facts: dict[str, Any], notes: list[str]
    ) -> bytes:
        with self._alone(key):
            # Somebody else may have built it while we waited.
            cubin = self._read_any(key, compiler, [])
            if cubin is None:
                cubin = build()
                self._publish(key, compiler, cubin, facts, notes)
            return cubin

    def has(self, key: Key, compiler: str | None) -> bool:
        """Whether `get` with the same arguments would build nothing."""
        return self._read_any(key, compiler, []) is not None

    def has_any(self, backend: str) -> bool:
        """Whether anything was ever compiled for a backend."""
        return any(json.loads(line)["backend"] == backend for _, line in self._lines())

    def entries(self) -> Iterator[tuple[Path, dict[str, Any] | None]]:
        """Yield every entry with its facts; None for a corrupt one."""
        for path in sorted(self.folder.glob("*/*.cubin")):
            read = _read(path)
            yield path, None if isinstance(read, str) else read[0]

    def survey(self) -> list[Entry]:
        """Return every entry, its checksum and its place compared; what vanishes meanwhile is left out.

        Raises
        ------
        OSError
            Where the folder is absent or cannot be read.
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
        """Return what processes that were killed while they published have left.

        Parameters
        ----------
        before : float
            Seconds since the epoch; what was written later may be in use, which costs whoever publishes it the cache.
        """
        found = []
        for path in sorted(self.folder.glob("*/.new-*")):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < before:
                    found.append(path)
        return found

    def obstacle(self) -> str | None:
        """Say why nothing can be published, or None. Makes the folder."""
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
        """Say why the folder is not used, or None: code that strangers can write is not run."""
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
        """Keep other threads, and where the file system allows it other processes, from building the same key."""
        name = str(self.folder / key.digest)
        with _locks_lock:
            lock = _locks.setdefault(name, threading.Lock())
        with lock, contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                Path(name).mkdir(exist_ok=True, mode=0o700)
            with contextlib.suppress(OSError, ImportError):
                # The folder itself is locked, so no lock files are left behind.
                handle = os.open(name, os.O_RDONLY)
                stack.callback(os.close, handle)
                _lock_file(handle)
            yield


def outdated(
    entries: Iterable[Entry], now: float, *, max_size: int | None = None, max_age: float | None = None
) -> list[Entry]:
    """Return what has to go, oldest first: all that is too old, then the oldest until the rest fits.

    Parameters
    ----------
    entries : iterable of Entry
        What there is.
    now : float
        Seconds since the epoch.
    max_size : int or None
        Bytes that may stay; None for any number.
    max_age : float or None
        Seconds; None for any age.
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
    """Remove files of the cache, and their folders where nothing else is in them; return what went wrong.

    A reader that has opened an entry keeps it, and a missing one is built again, so nobody has to be kept out.
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
    """Say that an entry does not lie where its key is looked for; nothing where it does."""
    try:
        fits = (Key(*facts["key"]).digest, _stem(facts["compiler"])) == (path.parent.name, path.stem)
    except (KeyError, TypeError, AttributeError):
        return "its facts cannot be read"
    return "" if fits else "it belongs to another kernel"


def _stem(compiler: str) -> str:
    return hashlib.sha256(compiler.encode()).hexdigest()[:16]


def _lock_file(handle: int) -> None:
    """Lock until the handle is closed; after a long wait go on without, since building twice is only slow."""
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
    """Return (facts, cubin), or what is wrong; ``absent`` where there is nothing."""
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
