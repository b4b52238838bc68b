"""The registry: immutable snapshots of backends, ops and kernels."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from types import MappingProxyType
from typing import Any, TypeVar

from skuda.registry.arch import ArchSku
from skuda.registry.backend import BUILT_IN, BackendSpec
from skuda.registry.cached import cached_property
from skuda.registry.descriptor import Descriptor, FunctionalKey
from skuda.registry.errors import RegistrationError
from skuda.registry.guarantee import exceeds
from skuda.registry.op import Case, Op
from skuda.registry.sku import KernelSku
from skuda.registry.source import missing, resolve
from skuda.registry.text import shown

Record = Op | KernelSku | BackendSpec
Item = TypeVar("Item")


class Registry:
    """The registered backends, ops and kernels. It is immutable: `register` returns a new registry.

    Parameters
    ----------
    records : iterable of Op, KernelSku or BackendSpec
        What to register on top of the built-in backends. An op brings its own kernels.
    origin : str
        Who registers them, for errors and ``skuda show``.

    Raises
    ------
    RegistrationError
        For a duplicate, a dangling reference, or a promise that the backend cannot keep. The error names the record,
        the field and the origins.
    """

    def __init__(self, records: Iterable[Record] = (), *, origin: str = "this program") -> None:
        self._backends = {spec.name: spec for spec in BUILT_IN}
        self._ops: dict[str, Op] = {}
        self._skus: dict[str, KernelSku] = {}
        self._origins: dict[str, str] = {spec.name: "skuda" for spec in BUILT_IN}
        self._add(records, origin)

    def register(self, *records: Record, origin: str = "this program") -> Registry:
        """Return a new registry with `records` added.

        Raises
        ------
        RegistrationError
            See `Registry`.
        """
        new = Registry()
        new._backends, new._ops, new._skus = dict(self._backends), dict(self._ops), dict(self._skus)
        new._origins = dict(self._origins)
        new._add(records, origin)
        return new

    def _add(self, records: Iterable[Record], origin: str) -> None:
        try:
            records = tuple(records)
        except TypeError as error:
            rule = "must be an iterable of Ops, KernelSkus and BackendSpecs"
            raise RegistrationError(shown(records), "records", rule, (origin,)) from error
        for record in records:
            if isinstance(record, BackendSpec):
                self._claim(record.name, "name", origin)
                self._backends[record.name] = record
            elif isinstance(record, Op):
                fault = _fault_of(record)
                if fault is not None:
                    raise RegistrationError(shown(record), *fault, (origin,))
                self._claim(record.name, "op", origin)
                self._ops[record.name] = record
                for sku in record.skus:
                    self._add_sku(sku, origin)
            elif isinstance(record, KernelSku):
                self._add_sku(record, origin)
            else:
                raise RegistrationError(shown(record), "type", "must be an Op, a KernelSku or a BackendSpec", (origin,))
        self._index()

    def _claim(self, name: str, field: str, origin: str) -> None:
        if name in self._origins:
            raise RegistrationError(name, field, "is registered already", (self._origins[name], origin))
        self._origins[name] = origin

    def _add_sku(self, sku: KernelSku, origin: str) -> None:
        fault = self._fault(sku)
        if fault is not None:
            raise RegistrationError(sku.id, *fault, self._origins_of_op(sku.op, origin))
        self._claim(sku.id, "id", origin)
        self._skus[sku.id] = sku

    def _origins_of_op(self, op: str, origin: str) -> tuple[str, ...]:
        owner = self._origins.get(op)
        return (origin,) if owner in (None, origin) else (owner or "", origin)

    def _fault(self, sku: KernelSku) -> tuple[str, str] | None:
        op = self._ops.get(sku.op)
        if op is None:
            return "op", f"unknown op {sku.op!r}; register its Op first (known: {', '.join(self._ops) or 'none'})"
        if sku.category is not op.category:
            return "category", f"must be {op.category}, the category of op {op.name}"
        if sku.aux_element is not None and op.descriptor.aux_field is None:
            return "aux_element", f"op {op.name} has no second element; had {sku.aux_element}"
        backend = self._backends.get(sku.backend)
        if backend is None:
            return "backend", f"unknown backend {sku.backend!r} (known: {', '.join(self._backends)})"
        if (sku.arch is ArchSku.CPU) is not (backend.processor == "cpu"):
            return "arch", f"{sku.arch} does not exist under backend {backend.name}, which drives {backend.processor}"
        promised = exceeds(sku.precision_guarantee, backend.ceiling)
        if promised is not None:
            had, limit = getattr(sku.precision_guarantee, promised), getattr(backend.ceiling, promised)
            return (
                f"precision_guarantee.{promised}",
                f"promises {had}, more than backend {backend.name} can give ({limit})",
            )
        for constraint in sku.constraints:
            for name in constraint.fields:
                if not hasattr(op.descriptor, name) and name not in op.descriptor.model_fields:
                    return (
                        "constraints",
                        f"{constraint.describe()!r} reads {name}, which {op.descriptor.__name__} lacks",
                    )
        return missing(sku.source, sku.entry_point, sku.launch)

    def _index(self) -> None:
        by_key: dict[FunctionalKey, list[KernelSku]] = {}
        by_op: dict[str, list[KernelSku]] = {name: [] for name in self._ops}
        # The sort is stable, so list order is the ranking. References rank last, whoever registered them.
        for sku in sorted(self._skus.values(), key=self.is_reference):
            by_key.setdefault(sku.key, []).append(sku)
            by_op[sku.op].append(sku)
        self._by_key = {key: tuple(skus) for key, skus in by_key.items()}
        self._by_op = {name: tuple(skus) for name, skus in by_op.items()}

    @property
    def ops(self) -> MappingProxyType[str, Op]:
        """Ops by name."""
        return MappingProxyType(self._ops)

    @property
    def backends(self) -> MappingProxyType[str, BackendSpec]:
        """Backend facts by name, in order of preference."""
        return MappingProxyType(self._backends)

    def __iter__(self) -> Iterator[KernelSku]:
        return iter(self._skus.values())

    def __len__(self) -> int:
        return len(self._skus)

    def __contains__(self, sku_id: object) -> bool:
        return sku_id in self._skus

    def sku(self, sku_id: str) -> KernelSku | None:
        """Return the kernel with this id, or None."""
        return self._skus.get(sku_id)

    def candidates(self, key: FunctionalKey) -> tuple[KernelSku, ...]:
        """Return the kernels under exactly this key, best first."""
        return self._by_key.get(key, ())

    def skus_of(self, op: str) -> tuple[KernelSku, ...]:
        """Return every kernel of an op, best first."""
        return self._by_op.get(op, ())

    def is_reference(self, sku: KernelSku) -> bool:
        """Whether a kernel is the reference of its op, on a backend that runs references as they are."""
        if ":" in sku.source or not self._backends[sku.backend].reference:
            return False
        return resolve(sku.source, sku.entry_point) is self._ops[sku.op].reference

    def origin(self, name: str) -> str | None:
        """Return who registered a kernel id, an op or a backend, or None."""
        return self._origins.get(name)

    @cached_property
    def digest(self) -> str:
        """Hash of all records in order. Registries with equal digests give equal selections."""
        state = hashlib.sha256()
        for part in (*self._backends.values(), *self._skus.values()):
            state.update(part.model_dump_json().encode())
        return state.hexdigest()[:16]

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a Registry holds functions of ops; pickle its records or its digest instead")


def _fault_of(op: Op) -> tuple[str, str] | None:
    """Return (field, reason) for the first invalid field of an op, or None."""
    kind: Any = op.descriptor  # the annotation is not checked yet
    if not (isinstance(kind, type) and issubclass(kind, Descriptor) and "op" in kind.model_fields):
        return "descriptor", 'must be a class derived from Descriptor with op: Literal["name"] = "name"'
    for name in ("category", "element_field"):
        if not hasattr(kind, name):
            return "descriptor", f"{kind.__name__} must define {name}"
    reference: Any = op.reference
    skus: tuple[Any, ...] = op.skus
    if not callable(reference):
        return "reference", f"must be a function; had {reference!r}"
    cases: tuple[Any, ...] = op.cases
    if not all(isinstance(case, Case) and isinstance(case.problem, kind) for case in cases):
        return "cases", f"must be Case records of {kind.__name__}"
    if not all(isinstance(sku, KernelSku) for sku in skus):
        return "skus", "must be KernelSku records"
    return None
