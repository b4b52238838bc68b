"""Bundles: compiled kernels in one file, written on a machine with a compiler and read on others.

The layout of a bundle is::

    skuda bundle 1
    <bytes of the manifest, 12 digits> <sha256 of the manifest>
    <the manifest: JSON that lists every cubin with its key, its size and its sha256>
    <the cubins, in the manifest's order>

It contains no file names and no compression, so reading it can neither follow a path or a link nor expand data. The
file size must equal the sum of the parts, so truncated and appended data are detected. Reading it runs no code.

Checksums detect damage, not tampering. A bundle is code, so it is read only if no other user can write it, or if its
name includes its sha256.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, BinaryIO

from pydantic import Field

from skuda.dispatch.compile.cubin import Kernel, read_kernels
from skuda.dispatch.compile.member import SCHEMA, CubinRecord, Key, Text, validated
from skuda.dispatch.system.files import open_regular, shared
from skuda.dispatch.system.writing import check_place, replacing
from skuda.registry.errors import BundleError, InvalidRecord
from skuda.registry.value import Integer, Value

MOST_CUBINS = 1 << 16
LARGEST_MANIFEST = 1 << 26
LARGEST_BUNDLE = 1 << 32

_FORMAT = re.compile(rb"skuda bundle (\d{1,9})\n")
_MAGIC = b"skuda bundle 1\n"
_HEAD = re.compile(rb"(\d{12}) ([0-9a-f]{64})\n")
_HEAD_SIZE = 12 + 1 + 64 + 1
_PIN = "#sha256="
_AGAIN = "copy it again, or make it again with `skuda bundle`"
_BY_THIS = "make it again with the `skuda bundle` of this version"


class Manifest(Value):
    """The description of a bundle's content."""

    skuda: Text  # the version that made it
    cubins: Integer  # schema version of the cubins' keys, the same as that of the cubin cache
    members: Annotated[tuple[CubinRecord, ...], Field(max_length=MOST_CUBINS)]
    """The cubins, in the order in which they are stored."""


class Bundle:
    """An open bundle. It keeps the manifest, and reads and checks each cubin on demand.

    `path` is absolute. `manifest` describes the content. `size` is that of the file in bytes.
    """

    def __init__(self, path: Path, manifest: Manifest, size: int) -> None:
        self.path, self.manifest, self.size = path, manifest, size
        self._found: dict[Key, list[CubinRecord]] = {}
        self._starts: dict[tuple[Key, str], int] = {}
        start = size - sum(member.size for member in manifest.members)
        for member in manifest.members:
            key = member.key
            if (key, member.compiler) in self._starts:
                raise BundleError(path, f"it holds the same cubin of {member.sku} twice; {_AGAIN}")
            self._found.setdefault(key, []).append(member)
            self._starts[key, member.compiler] = start
            start += member.size

    def find(self, key: Key, compiler: str | None = None) -> CubinRecord | None:
        """Return the cubin of a key, preferably by this compiler, else by any, or None."""
        found = self._found.get(key, [])
        return next((member for member in found if member.compiler == compiler), found[0] if found else None)

    def serves(self, backend: str) -> bool:
        """Return whether it holds any cubin for a backend."""
        return any(member.backend == backend for member in self.manifest.members)

    def read(self, member: CubinRecord) -> bytes:
        """Return the bytes of a cubin.

        Raise `BundleError` if the file can no longer be read, or the cubin's checksum is wrong.
        """
        try:
            with open_regular(self.path) as file:
                file.seek(self._starts[member.key, member.compiler])
                cubin = file.read(member.size)
        except OSError as error:
            raise BundleError(self.path, f"it cannot be read: {error.strerror or error}; {_AGAIN}") from error
        if not member.holds(cubin):
            raise BundleError(self.path, f"the checksum of the cubin of {member.sku} is wrong; {_AGAIN}")
        return cubin

    def load(self, member: CubinRecord) -> tuple[bytes, dict[str, Kernel]]:
        """Return the bytes of a cubin, and the properties of its kernels.

        Raise `BundleError` as `read`, and if the bytes are not a cubin.
        """
        cubin = self.read(member)
        try:
            return cubin, read_kernels(cubin)
        except ValueError as error:
            message = f"what it has for {member.sku} is no cubin ({error}); make it again with `skuda bundle`"
            raise BundleError(self.path, message) from error

    def troubles(self) -> list[str]:
        """Load every cubin and return a description of each defect."""
        found = []
        for member in self.manifest.members:
            try:
                self.load(member)
            except BundleError as error:
                found.append(error.reason)
        return found

    def lacks(self, key: Key, file: str) -> str:
        """Return why the bundle lacks a key. `file` is the kernel's ``package:file`` source."""
        made = f"it was made by skuda {self.manifest.skuda} from other sources of {file}"
        left: Sequence[CubinRecord] = self.manifest.members
        for name, wanted, message in (
            ("backend", key.backend, f"it holds nothing for the backend {key.backend}"),
            ("arch", key.arch, f"it holds nothing for {key.arch} under the backend {key.backend}"),
            ("file", file, f"it holds no kernel of {file} for {key.arch}"),
            ("source", key.source, made),
            ("launch", key.launch, f"it lacks the kernel {key.launch.partition(' ')[0]} of {file} for {key.arch}"),
        ):
            left = [member for member in left if getattr(member, name) == wanted]
            if not left:
                return message
        return f"it lacks the configuration {' '.join(key.flags) or 'without flags'} of {file} for {key.arch}"


def open_bundle(name: str) -> Bundle:
    """Open a bundle and check everything but its cubins, which are checked when they are read.

    Raise `BundleError` if the file is not a bundle, is damaged, does not have the required hash, or can be written by
    other users. `name` is its path, optionally followed by ``#sha256=`` and the required hash of the file.
    """
    text, pinned, pin = name.partition(_PIN)
    path = Path(text).absolute()
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            if not pinned:
                _refuse_shared(path, status)
            head, manifest = _read_head(path, file, status.st_size)
            if pinned:
                _refuse_another(path, file, head, pin)
    except OSError as error:
        message = f"it cannot be read: {error.strerror or error}; name a file that `skuda bundle` has written"
        raise BundleError(path, message) from error
    parts = len(head) + sum(member.size for member in manifest.members)
    if parts != status.st_size:
        raise BundleError(path, f"it has {status.st_size} bytes and its parts have {parts}; {_AGAIN}")
    return Bundle(path, manifest, status.st_size)


def _read_head(path: Path, file: BinaryIO, size: int) -> tuple[bytes, Manifest]:
    """Return all bytes before the cubins, and the manifest."""
    magic = file.read(len(_MAGIC))
    if magic != _MAGIC:
        other = _FORMAT.match(magic + file.read(9))
        if other is not None:
            message = f"it is of format {other[1].decode()}, and this skuda reads format 1"
            raise BundleError(path, f"{message}; {_BY_THIS}")
        raise BundleError(path, "it is no bundle; name a file that `skuda bundle` has written")
    if size > LARGEST_BUNDLE:
        raise BundleError(path, f"it has {size} bytes and may have {LARGEST_BUNDLE}; make several bundles")
    line = file.read(_HEAD_SIZE)
    found = _HEAD.fullmatch(line)
    if found is None:
        raise BundleError(path, f"its second line is damaged; {_AGAIN}")
    length, digest = int(found[1]), found[2].decode()
    if length > LARGEST_MANIFEST:
        raise BundleError(path, f"its manifest has {length} bytes and may have {LARGEST_MANIFEST}; {_AGAIN}")
    manifest = file.read(length)
    if len(manifest) != length or hashlib.sha256(manifest).hexdigest() != digest:
        raise BundleError(path, f"the checksum of its manifest is wrong; {_AGAIN}")
    try:
        read = validated(Manifest, manifest)
    except ValueError as error:
        raise BundleError(path, f"its manifest {error}; {_BY_THIS}") from error
    if read.cubins != SCHEMA:
        message = f"skuda {read.skuda} made it, and names kernels in another way ({read.cubins}, here {SCHEMA})"
        raise BundleError(path, f"{message}; {_BY_THIS}")
    return magic + line + manifest, read


def _refuse_shared(path: Path, status: os.stat_result) -> None:
    if shared(status):
        remedy = f"chmod go-w and chown it, or say which one is meant: {path}{_PIN} and what sha256sum says of it"
        raise BundleError(path, f"others can write it, and it holds code; {remedy}")


def _refuse_another(path: Path, file: BinaryIO, head: bytes, pin: str) -> None:
    """Compare the file's sha256 with the pinned one. `head` is the part that was read already."""
    state = hashlib.sha256(head)
    while piece := file.read(1 << 20):
        state.update(piece)
    if state.hexdigest() != pin.lower():
        message = f"its sha256 is {state.hexdigest()}, not {pin or 'empty'} as behind {_PIN[:-1]}"
        raise BundleError(path, f"{message}; name the file that is meant")


def write_bundle(path: Path, skuda: str, cubins: Iterable[tuple[CubinRecord, bytes]]) -> Path:
    """Write a bundle atomically and return its path; the same cubins give the same bytes.

    Raise `BundleError` if the file cannot be written, exists and is not a bundle, or would exceed the limits. Only an
    existing bundle is replaced. `skuda` is the version that makes it. `cubins` has each pair of key and compiler at
    most once.
    """
    refuse_to_replace(path)
    try:
        ordered = sorted(cubins, key=lambda item: (item[0].sku, item[0].key.digest, item[0].compiler))
        manifest = Manifest(skuda=skuda, cubins=SCHEMA, members=tuple(member for member, _ in ordered))
        text = manifest.model_dump_json().encode()
        head = _MAGIC + f"{len(text):012d} {hashlib.sha256(text).hexdigest()}\n".encode() + text
        size = len(head) + sum(len(cubin) for _, cubin in ordered)
        if len(text) > LARGEST_MANIFEST or size > LARGEST_BUNDLE:
            raise BundleError(path, f"it would have {size} bytes and may have {LARGEST_BUNDLE}; make several bundles")
        with replacing(path) as fresh:
            with fresh.open("wb") as file:
                file.write(head)
                file.writelines(cubin for _, cubin in ordered)
            # All users of the target machine must be able to read a new one.
            fresh.chmod(0o644)
    except InvalidRecord as error:
        raise BundleError(path, f"it was not written: {error}") from error
    except OSError as error:
        raise BundleError(path, f"it cannot be written: {error.strerror or error}") from error
    return path


def refuse_to_replace(path: Path) -> None:
    """Raise `BundleError` if the path is anything but a bundle or a new file in an existing folder."""
    try:
        check_place(path)
        if not path.exists():
            return
        with path.open("rb") as file:
            if _FORMAT.match(file.read(len(_MAGIC) + 9)):
                return
    except OSError as error:
        raise BundleError(path, f"it cannot be written: {error.strerror}; name another file") from error
    raise BundleError(path, "something else is there; name a new file, or a bundle to replace")
