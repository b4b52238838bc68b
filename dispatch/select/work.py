"""`WorkShard`: the part of a list of work that one of several processes does, and the records of such parts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Self, TypeVar

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from skuda.registry.value import Integer, Size, Value

Piece = TypeVar("Piece")
_Place = Annotated[Integer, Field(ge=1, lt=2**31)]


class WorkShard(Value):
    """One of the equal parts of a list of work. All shards of a list are disjoint, and together they are the list.

    Attributes
    ----------
    index : int
        Number of the part, from 1.
    count : int
        Number of parts.
    total : int
        Number of pieces in the whole list.
    list_hash : str
        SHA-256 of the names of all pieces in order; equal for shards of one list.
    """

    index: _Place
    count: _Place
    total: Size
    list_hash: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        if self.index > self.count:
            self.refuse("index", self.index, f"be at most the count, {self.count}")

    @classmethod
    def of(cls, index: int, count: int, names: Iterable[str]) -> Self:
        """Return a shard of the list of the pieces with these names."""
        every = list(names)
        return cls(index=index, count=count, total=len(every), list_hash=hash_of(every))

    @property
    def label(self) -> str:
        """Number and count, as ``--shard`` takes them: ``2/4``."""
        return f"{self.index}/{self.count}"

    @property
    def size(self) -> int:
        """Number of its pieces."""
        rows, rest = divmod(self.total, self.count)
        return rows + ((self.index - 1 + rows) % self.count < rest)

    def places(self) -> list[int]:
        """Return the places of its pieces in the list, in order.

        The list is dealt out in rows of one piece for each shard. Each row begins with the shard before the last row's
        first one, because lists are often periodic: without that, one shard would get all of the large sizes.
        """
        return [row * self.count + (self.index - 1 + row) % self.count for row in range(self.size)]

    def pick(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return its pieces of the list."""
        return [pieces[place] for place in self.places()]


def hash_of(names: Iterable[str]) -> str:
    """Return the hash of a list of work; see `WorkShard.list_hash`."""
    return hashlib.sha256(json.dumps(list(names)).encode()).hexdigest()


class ShardedRecord(Value):
    """The base of records with a field ``shard: WorkShard | None``, which is not written if it is None."""

    @model_serializer(mode="wrap")
    def _without_absent_shard(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = written(self)
        if fields.get("shard") is None:
            fields.pop("shard", None)
        return fields
