"""`Key`: identifies a compiled kernel. `CubinRecord`: its record in the cache and in bundles."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, NamedTuple, Self, TypeVar

from pydantic import Field, StringConstraints, ValidationError

from skuda.registry.errors import InvalidRecord
from skuda.registry.text import one_line
from skuda.registry.value import Integer, Value

SCHEMA = 1
LARGEST_CUBIN = 1 << 28
_LONGEST_QUOTE = 200

# Text from a file must be printable, because terminals interpret control characters.
Text = Annotated[str, StringConstraints(pattern=r"^[ -~]{1,1000}$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Record = TypeVar("Record", bound=Value)


class Key(NamedTuple):
    """Everything that determines a cubin, except the compiler."""

    source: str  # hash of the source and of all headers of skuda and its plug-ins that it includes
    flags: tuple[str, ...]  # compiler flags of the SKU and of the configuration that its launch rule chose
    arch: str  # target architecture
    launch: str
    """Entry point and launch rule of the SKU. The rule's results are not part of the key: whenever a cubin is loaded,
    the launch's parameters are compared with those of its kernels."""
    backend: str  # the backend that launches it

    @property
    def digest(self) -> str:
        """Hash of the key and the schema version."""
        return hashlib.sha256(json.dumps([SCHEMA, *self]).encode()).hexdigest()[:32]


class CubinRecord(Value):
    """One cubin of the cache or of a bundle."""

    sku: Text  # id of the kernel, or of one of several that share the cubin
    file: Text  # the kernel's ``package:file`` source
    source: Sha256  # from here to `backend`: parts of the key; see `Key`
    flags: Annotated[tuple[Text, ...], Field(max_length=1000)]
    arch: Text
    launch: Text
    backend: Text
    compiler: Text  # identity of the compiler
    size: Annotated[Integer, Field(ge=1, le=LARGEST_CUBIN)]  # size in bytes
    sha256: Sha256  # hash of the cubin

    @property
    def key(self) -> Key:
        """The key of the cubin."""
        return Key(self.source, self.flags, self.arch, self.launch, self.backend)

    @classmethod
    def of(cls, key: Key, cubin: bytes, *, sku: str, file: str, compiler: str) -> Self:
        """Return the record of a cubin. Raise `InvalidRecord` if a part of it breaks a rule."""
        return cls(
            sku=sku,
            file=file,
            compiler=compiler,
            size=len(cubin),
            sha256=hashlib.sha256(cubin).hexdigest(),
            **key._asdict(),
        )

    def holds(self, cubin: bytes) -> bool:
        """Return whether a cubin has the size and the hash."""
        return len(cubin) == self.size and hashlib.sha256(cubin).hexdigest() == self.sha256


def validated(kind: type[Record], text: bytes) -> Record:
    """Return the record in a JSON text. Raise `ValueError` with a printable reason for anything else."""
    try:
        return kind.model_validate_json(text)
    except InvalidRecord as error:
        raise ValueError(f"breaks a rule: {one_line(str(error), _LONGEST_QUOTE)}") from error
    except ValidationError as error:
        raise ValueError(f"cannot be read: {one_line(error.errors()[0]['msg'], _LONGEST_QUOTE)}") from error
