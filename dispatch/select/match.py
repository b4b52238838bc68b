"""Selects kernels for a problem, with pure functions that touch no device, compiler or array."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple

from skuda.dispatch.preference import NO_PREFERENCE, PlanPreference
from skuda.registry.arch import ArchSku
from skuda.registry.descriptor import Descriptor, FunctionalKey, key_field
from skuda.registry.device import Device
from skuda.registry.reason import Reason, ReasonCode
from skuda.registry.registry import Registry
from skuda.registry.sku import KernelSku

if TYPE_CHECKING:
    from skuda.dispatch.select.explanation import Explanation, Verdict
    from skuda.dispatch.select.measured import Tuned


class Pick(NamedTuple):
    """A kernel and the configuration to run it in."""

    sku: KernelSku
    choice: str = ""  # name of its configuration; empty for the one that its launch rule ranks first
    reason: str = ""  # the measurement that chose it; empty if the ranking did


class Unavailable(dict[str, tuple[str, str]]):
    """The backends, by name, and kernels, by id, that cannot be used here, each with (remedy, reason).

    It never changes, so a selection that depends on it can be cached by its identity.
    """

    __hash__ = object.__hash__  # type: ignore[assignment]  # a dict has none
    __eq__ = object.__eq__


ALL_AVAILABLE = Unavailable()

_KEY_PARTS: tuple[ReasonCode, ...] = ("element", "aux_element", "layout", "epilogue")
"""The parts of a functional key after category and op, in its order."""


@lru_cache(maxsize=1024)
def _unlike(code: ReasonCode, field: str, wanted: str, had: str) -> Reason:
    """Return the reason against kernels of another key. Many kernels share it."""
    return Reason(code=code, field=field, wanted=wanted, had=had)


class _Circumstances:
    """The rules that do not depend on the problem. Reasons that many kernels share are cached."""

    def __init__(self, device: Device, preference: PlanPreference, obstacles: Unavailable) -> None:
        self.device, self.preference = device, preference
        # For a card that is not here, the software of this machine does not matter.
        self._obstacles = obstacles if device.ordinal is not None else ALL_AVAILABLE
        self._requires = preference.require != NO_PREFERENCE.require
        self._by_arch = cache(lambda arch: tuple(self._arch_reasons(arch)))
        self._by_backend = cache(lambda backend: tuple(self._backend_reasons(backend)))

    def reasons_against(self, sku: KernelSku) -> tuple[Reason, ...]:
        shared = self._by_arch(sku.arch) + self._by_backend(sku.backend) + self._obstacle(sku.id)
        return shared if self.preference is NO_PREFERENCE else (*shared, *self._preference_reasons(sku))

    def _arch_reasons(self, arch: ArchSku) -> Iterator[Reason]:
        # A CUDA device of unknown capability runs nothing; it must not be treated as a CPU.
        same_processor = (arch is ArchSku.CPU) is (self.device.processor == "cpu")
        if not same_processor or not arch.runs_on(self.device.compute_capability):
            yield Reason(code="arch", field="device", wanted=arch.describe(), had=self.device.describe())
        if arch.is_specific and not self.preference.allow_arch_specific:
            yield Reason(code="preference", field="preference.allow_arch_specific", wanted="False", had=f"{arch} only")

    def _backend_reasons(self, backend: str) -> Iterator[Reason]:
        wanted = self.preference.backend
        if wanted is not None and backend != wanted:
            yield Reason(code="preference", field="preference.backend", wanted=wanted, had=backend)
        yield from self._obstacle(backend)

    def _obstacle(self, name: str) -> tuple[Reason, ...]:
        found = self._obstacles.get(name)
        return () if found is None else (Reason(code="backend", field="backend", wanted=found[0], had=found[1]),)

    def _preference_reasons(self, sku: KernelSku) -> Iterator[Reason]:
        if self.preference.sku is not None and sku.id != self.preference.sku:
            yield Reason(code="preference", field="preference.sku", wanted=self.preference.sku, had=sku.id)
        if self._requires:
            yield from self.preference.require.check(sku.precision_guarantee)


class _Rules:
    """All rules for one problem."""

    def __init__(self, problem: Descriptor, device: Device, preference: PlanPreference, obstacles: Unavailable) -> None:
        self.problem, self._circumstances = problem, _Circumstances(device, preference, obstacles)
        parts = zip(_KEY_PARTS, problem.key()[2:], strict=True)
        self._parts = tuple((key_field(type(problem), code), code, had) for code, had in parts)

    def reasons_against(self, sku: KernelSku) -> tuple[Reason, ...]:
        """Return every reason why `sku` cannot be used; empty if it can."""
        by_key = (
            _unlike(code, field, str(wanted), str(had))
            for (field, code, had), wanted in zip(self._parts, sku.key[2:], strict=True)
            if wanted != had
        )
        return (*by_key, *self._circumstances.reasons_against(sku), *self._size_reasons(sku))

    def _size_reasons(self, sku: KernelSku) -> Iterator[Reason]:
        for constraint in sku.constraints:
            reason = constraint.check(self.problem)
            if reason is not None:
                yield reason
        most = self._circumstances.preference.max_workspace_bytes
        if most is not None and sku.workspace_size(self.problem) > most:
            yield Reason(
                code="workspace",
                field="preference.max_workspace_bytes",
                wanted=f"at least {sku.workspace_size(self.problem)}",
                had=str(most),
            )


@lru_cache(maxsize=1024)
def shortlist(
    registry: Registry, key: FunctionalKey, device: Device, preference: PlanPreference, obstacles: Unavailable
) -> tuple[KernelSku, ...]:
    """Return the kernels that can serve problems of a key, best first. `serves` then checks the sizes.

    It is cached, so a new size does not look at kernels for other cards or backends.
    """
    circumstances = _Circumstances(device, preference, obstacles)
    return tuple(sku for sku in registry.candidates(key) if not circumstances.reasons_against(sku))


def serves(sku: KernelSku, problem: Descriptor, preference: PlanPreference) -> bool:
    """Whether a kernel that fits the key serves the sizes of a problem."""
    for constraint in sku.constraints:
        if not constraint.serves(problem):
            return False
    most = preference.max_workspace_bytes
    return most is None or sku.workspace_size(problem) <= most


def choose(
    registry: Registry,
    problem: Descriptor,
    device: Device,
    preference: PlanPreference,
    obstacles: Unavailable,
    *,
    behind: KernelSku | None = None,
    tuned: Tuned | None = None,
) -> Pick | None:
    """Return the best kernel that has no reason against it, or None.

    With `behind`, only kernels ranked after that one count. With `tuned`, measured times may overrule the ranking; see
    `Tuned.weigh`. Only kernels under the problem's exact key are checked, so the time does not grow with the registry.
    """
    fitting = shortlist(registry, problem.key(), device, preference, obstacles)
    accepted = (sku for sku in fitting if serves(sku, problem, preference))
    if tuned is None and behind is None:
        best = next(accepted, None)
        return None if best is None else Pick(best)
    picks: Iterable[Pick] = map(Pick, accepted)
    if tuned is not None:
        rules = _Rules(problem, device, preference, obstacles)
        picks, _ = _weighed(registry, rules, device, tuple(accepted), tuned)
    if behind is not None:
        picks = itertools.islice(itertools.dropwhile(lambda pick: pick.sku is not behind, picks), 1, None)
    return next(iter(picks), None)


def _weighed(
    registry: Registry, rules: _Rules, device: Device, accepted: tuple[KernelSku, ...], tuned: Tuned
) -> tuple[tuple[Pick, ...], Verdict | None]:
    """Return the accepted kernels, first the one that measured times choose, and the verdict on the times."""
    if not accepted:
        return (), None

    def against(sku_id: str) -> str:
        sku = registry.sku(sku_id)
        if sku is None:
            return "it is not registered here"
        return "; ".join(map(str, rules.reasons_against(sku))) or "it does not serve this problem"

    pick, verdict = tuned.weigh(rules.problem, device, accepted, against)
    first = () if pick is None else (pick,)
    return (*first, *(Pick(sku) for sku in accepted if pick is None or sku is not pick.sku)), verdict


def explain(
    registry: Registry,
    problem: Descriptor,
    device: Device,
    preference: PlanPreference,
    obstacles: Unavailable,
    notes: tuple[str, ...] = (),
    *,
    tuned: Tuned | None = None,
) -> Explanation:
    """Return the decisions on every kernel of the problem's op."""
    from skuda.dispatch.select.explanation import Decision, Explanation, as_json

    rules = _Rules(problem, device, preference, obstacles)
    accepted: list[KernelSku] = []
    refused: list[Decision] = []
    for sku in registry.skus_of(problem.op_name()):
        reasons = rules.reasons_against(sku)
        if reasons:
            refused.append(Decision.unchecked(sku=sku.id, rank=None, reasons=reasons))
        else:
            accepted.append(sku)
    # Among equally many reasons, first the ones that the caller can remove without changing the problem.
    refused.sort(key=lambda decision: (len(decision.reasons), any(why.code in _KEY_PARTS for why in decision.reasons)))
    verdict = None
    if tuned is not None:
        picks, verdict = _weighed(registry, rules, device, tuple(accepted), tuned)
        accepted = [pick.sku for pick in picks]
    return Explanation(
        op=problem.op_name(),
        problem=as_json(problem),
        device=device,
        preference=preference,
        decisions=(*(Decision.unchecked(sku=sku.id, rank=at, reasons=()) for at, sku in enumerate(accepted)), *refused),
        notes=notes,
        registry=registry.digest,
        verdict=verdict,
    )
