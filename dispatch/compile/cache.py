"""The cubin cache on disk: entries are found by content, published atomically, and checked before use.

An entry is ``<cache>/cubins-<format>/<key>-<compiler>.cubin``. The key hashes the source, headers, flags, architecture,
entry point, launch rule and backend; `compiler` is a hash of the compiler's identity. A machine with a compiler uses
only entries of that compiler; a machine without one uses those of any. The layout of an entry is::

    skuda cubin 2
    <sha256 of the facts>
    <the facts: a `CubinRecord` in JSON, with the size and the sha256 of the cubin>
    <the cubin>

Checksums cover every byte, and a single rename publishes an entry. If the cache cannot be written, is full or belongs
to another user, kernels are compiled again but never lost. The same holds for an entry that is damaged, that is not a
regular file, or that other users can change. Only regular files are opened.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from skuda.dispatch.compile.member import LARGEST_CUBIN, CubinRecord, Key, validated
from skuda.dispatch.settings import cache_directory
from skuda.dispatch.system.files import open_regular, shared
from skuda.registry.errors import InvalidRecord
from skuda.registry.text import printable

FORMAT = 3
_MAGIC = b"skuda cubin 2\n"
_HEAD = re.compile(_MAGIC + rb"([0-9a-f]{64})\n")
_LARGEST = LARGEST_CUBIN + (1 << 22)
_ENTRY, _UNFINISHED = ".cubin", ".new-"
_ABSENT = "absent"
_LONGEST_WAIT = 300.0
_log = logging.getLogger("skuda")


class Found(NamedTuple):
    """A cubin with notes for the user, for example about a corrupt entry or a cache that cannot be written.

    `built` says whether it was compiled now.
    """

    cubin: bytes
    notes: tuple[str, ...] = ()
    built: bool = False


class CacheEntry(NamedTuple):
    """One entry of the cache, or something else in its place."""

    path: Path  # path of the file
    facts: CubinRecord | None  # the facts stored with the cubin; None if it would not be used
    trouble: str  # why it would not be used; empty if it would be
    size: int  # size on disk in bytes
    written: float  # time of the last change, in seconds since the epoch


class CubinCache:
    """The cache in one folder. Any number of processes and threads may share it.

    `folder` None means the one in the settings.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = (folder or cache_directory()) / f"cubins-{FORMAT}"

    def get(self, key: Key, compiler: str | None, build: Callable[[], bytes], *, sku: str, file: str) -> Found:
        """Return the cubin of a key; build and publish it if it is not cached.

        `compiler` is the identity of the compiler that `build` uses; None if there is none, and entries of any compiler
        may be used. `build` returns the cubin. It is called at most once; locks keep other threads and processes from
        building it too. `sku` and `file` are for the record; see `CubinRecord`.
        """
        notes: list[str] = []
        cubin = self._read_any(key, compiler, notes)
        if cubin is None:
            # What will not be published needs no folder and no lock.
            alone = compiler is None or self.distrust()
            cubin = build() if alone else self._built(key, str(compiler), build, (sku, file), notes)
        for note in notes:
            _log.warning("%s", note)
        return Found(cubin, tuple(notes))

    def _built(
        self, key: Key, compiler: str, build: Callable[[], bytes], named: tuple[str, str], notes: list[str]
    ) -> bytes:
        """Build and publish. Other threads and processes wait.

        Where there are no locks, and after a long wait, it goes on without: that costs at most a second build.
        """
        from filelock import FileLock  # imported here, because only who compiles waits for that

        with contextlib.ExitStack() as held:
            with contextlib.suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                locks = self.folder / "locks"
                locks.mkdir(exist_ok=True, mode=0o700)
                # Lock files stay, so kernels share a few thousand of them.
                held.enter_context(FileLock(locks / key.digest[:3], timeout=_LONGEST_WAIT, mode=0o600))
            # Another process may have built it while this one waited.
            cubin = self._read_any(key, compiler, [])
            if cubin is None:
                cubin = build()
                self._publish(key, compiler, cubin, named, notes)
            return cubin

    def has(self, key: Key, compiler: str | None) -> bool:
        """Return whether `get` with the same arguments would build nothing."""
        return self._read_any(key, compiler, []) is not None

    def has_any(self, backend: str) -> bool:
        """Return whether any entry is for a backend."""
        with contextlib.suppress(OSError):
            return any(entry.facts is not None and entry.facts.backend == backend for entry in self._entries())
        return False

    def survey(self) -> list[CacheEntry]:
        """Return every entry, checked as `get` checks it; entries that vanish meanwhile are left out.

        Raise `OSError` if the folder is absent or cannot be read.
        """
        return list(self._entries())

    def _entries(self) -> Iterator[CacheEntry]:
        for path in sorted(self.folder.iterdir()):
            read = _read(path) if path.suffix == _ENTRY else _ABSENT
            if read != _ABSENT:
                with contextlib.suppress(OSError):  # it has vanished
                    status = path.lstat()
                    facts, trouble = (None, read) if isinstance(read, str) else (read[0], "")
                    yield CacheEntry(path, facts, trouble, status.st_size, status.st_mtime)

    def leftovers(self, before: float = float("inf")) -> list[Path]:
        """Return the temporary files of processes that were killed while publishing.

        Files written later than `before`, in seconds since the epoch, are left out, because their writers may still
        need them.
        """
        found = []
        for path in sorted(self.folder.glob(f"{_UNFINISHED}*")):
            with contextlib.suppress(OSError):
                if path.lstat().st_mtime < before:
                    found.append(path)
        return found

    def earlier(self) -> list[Path]:
        """Return the folders of earlier formats, which nothing reads any more."""
        beside = (self.folder.with_name(f"cubins-{number}") for number in range(1, FORMAT))
        return [folder for folder in beside if os.path.lexists(folder)]

    def obstacle(self) -> str | None:
        """Return why nothing can be published, or None; creates the folder if needed."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryFile(dir=self.folder):
                return self.distrust()
        except OSError as error:
            return f"the cache {self.folder} cannot be written: {error}"

    def _place(self, key: Key, compiler: str) -> Path:
        return self.folder / f"{key.digest}-{_stem(compiler)}{_ENTRY}"

    def _read_any(self, key: Key, compiler: str | None, notes: list[str]) -> bytes | None:
        trouble = self.distrust()
        if trouble:
            notes.append(trouble)
            return None
        any_of = f"{key.digest}-*{_ENTRY}"
        for path in sorted(self.folder.glob(any_of)) if compiler is None else [self._place(key, compiler)]:
            read = _read(path)
            if isinstance(read, tuple):
                return read[1]
            if read != _ABSENT:
                notes.append(f"the cached kernel {printable(str(path))} was not used: {read}")
        return None

    def distrust(self) -> str | None:
        """Return why the folder must not be used, or None; code that other users can write is not run."""
        try:
            if not shared(self.folder.stat()):
                return None
        except OSError:
            return None
        return f"the cache {self.folder} is not used: others can write it; chmod go-w, chown, or set SKUDA_CACHE_DIR"

    def _publish(self, key: Key, compiler: str, cubin: bytes, named: tuple[str, str], notes: list[str]) -> None:
        temporary = None
        try:
            facts = (
                CubinRecord.of(key, cubin, sku=named[0], file=named[1], compiler=compiler).model_dump_json().encode()
            )
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, temporary = tempfile.mkstemp(dir=self.folder, prefix=_UNFINISHED)
            with os.fdopen(handle, "wb") as file:
                file.write(_MAGIC + hashlib.sha256(facts).hexdigest().encode() + b"\n" + facts + b"\n" + cubin)
            os.replace(temporary, self._place(key, compiler))  # noqa: PTH105  the temporary name is a string
            temporary = None
        except (OSError, InvalidRecord) as error:
            notes.append(f"the kernel was compiled but could not be cached: {error}")
        finally:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)  # noqa: PTH108  as above


def outdated(
    entries: Iterable[CacheEntry], now: float, *, max_size: int | None = None, max_age: float | None = None
) -> list[CacheEntry]:
    """Return the entries to remove, oldest first: all that are too old, then the oldest until the rest fits.

    `now` is the current time in seconds since the epoch, `max_size` the total size in bytes that may remain, `max_age`
    the greatest age in seconds. None means no limit.
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
    """Remove entries of the cache; return a description of each failure.

    A folder in the place of an entry is removed with its content; a link is removed, not followed. A reader that has
    opened an entry keeps it, and a missing entry is built again, so no lock is needed.
    """
    troubles = []
    for path in paths:
        try:
            if stat.S_ISDIR(path.lstat().st_mode):
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except FileNotFoundError:
            pass
        except OSError as error:
            troubles.append(f"{printable(str(path))} cannot be removed: {error.strerror or error}")
    return troubles


def _stem(compiler: str) -> str:
    return hashlib.sha256(compiler.encode()).hexdigest()[:16]


def _read(path: Path) -> tuple[CubinRecord, bytes] | str:
    """Return (facts, cubin), or a description of the defect; ``absent`` if there is nothing."""
    try:
        with open_regular(path, follow=False) as file:
            status = os.fstat(file.fileno())
            if shared(status):
                return "others can write it"
            if status.st_size > _LARGEST:
                return f"it has {status.st_size} bytes and may have {_LARGEST}"
            content = file.read(_LARGEST)
    except (FileNotFoundError, NotADirectoryError):
        return _ABSENT
    except OSError as error:
        return f"it cannot be read: {error.strerror or error}"
    head = _HEAD.match(content)
    if head is None:
        return "it is not a kernel of ours"
    facts, _, cubin = content[head.end() :].partition(b"\n")
    if hashlib.sha256(facts).hexdigest() != head[1].decode():
        return "the checksum of its facts is wrong"
    try:
        member = validated(CubinRecord, facts)
    except ValueError as error:
        return f"its facts are wrong: the record {error}"
    if not member.holds(cubin):
        return f"its checksum is wrong ({len(cubin)} of {member.size} bytes)"
    if f"{member.key.digest}-{_stem(member.compiler)}" != path.stem:
        return "it belongs to another kernel"
    return member, cubin
