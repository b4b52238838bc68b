"""Selects kernels for a problem, with pure functions that touch no device, compiler or array."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from skuda.dispatch.preference import NO_PREFERENCE, PlanPreference
from skuda.dispatch.select.pick import Pick
from skuda.registry.arch import ArchSku
from skuda.registry.descriptor import Descriptor, FunctionalKey, key_field
from skuda.registry.device import Device
from skuda.registry.reason import Reason, ReasonCode
from skuda.registry.registry import Registry
from skuda.registry.sku import KernelSku

if TYPE_CHECKING:
    from skuda.dispatch.select.explanation import Explanation, Verdict
    from skuda.dispatch.select.measured import Tuned

Unavailable = Mapping[str, tuple[str, str]]
"""(remedy, obstacle) of every backend, by name, and kernel, by id, that cannot be used here."""


_MOST_SHORTLISTS = 1024
_KEY_PARTS: tuple[ReasonCode, ...] = ("element", "aux_element", "layout", "epilogue")
"""The parts of a functional key after category and op, in its order."""


class _Part(dict[str | None, tuple[Reason, ...]]):
    """The reasons against each value of one part of the key, computed on first use."""

    def __init__(self, field: str, code: ReasonCode, had: str | None) -> None:
        super().__init__({had: ()})
        self._field, self._code, self._had = field, code, str(had)

    def __missing__(self, wanted: str | None) -> tuple[Reason, ...]:
        found = self[wanted] = (Reason(code=self._code, field=self._field, wanted=str(wanted), had=self._had),)
        return found


class Matcher:
    """One selection. It caches reasons that many candidates share.

    Parameters
    ----------
    problem : Descriptor
        The problem.
    device : Device
        The device to run on.
    preference : PlanPreference
        The caller's requirements.
    unavailable : Unavailable
        Backends and kernels that cannot be used here.
    """

    def __init__(
        self, problem: Descriptor, device: Device, preference: PlanPreference, unavailable: Unavailable
    ) -> None:
        self.key = problem.key()
        self.problem, self.device, self._preference = problem, device, preference
        # For a card that is not here, the software of this machine does not matter.
        self._unavailable = unavailable if device.ordinal is not None else {}
        self._requires = preference.require != NO_PREFERENCE.require
        self._by_key: dict[FunctionalKey, tuple[Reason, ...]] = {self.key: ()}
        self._by_part: tuple[_Part, ...] = ()
        self._by_arch: dict[ArchSku, tuple[Reason, ...]] = {}
        self._by_backend: dict[str, tuple[Reason, ...]] = {}

    def fits(self, sku: KernelSku) -> bool:
        """Whether `sku` can serve problems of this key. The sizes of the problem are not checked."""
        return not self._shared_reasons(sku) and next(self._preference_reasons(sku), None) is None

    def reasons_against(self, sku: KernelSku) -> tuple[Reason, ...]:
        """Return every reason why `sku` cannot be used; empty if it can."""
        shared = self._shared_reasons(sku)
        if self._preference is NO_PREFERENCE and not sku.constraints:
            return shared
        return (*shared, *self._preference_reasons(sku), *self._size_reasons(sku))

    def _shared_reasons(self, sku: KernelSku) -> tuple[Reason, ...]:
        by_key = self._by_key.get(sku.key)
        if by_key is None:
            by_key = self._by_key[sku.key] = self._key_reasons(sku.key)
        by_arch = self._by_arch.get(sku.arch)
        if by_arch is None:
            by_arch = self._by_arch[sku.arch] = tuple(self._arch_reasons(sku))
        by_backend = self._by_backend.get(sku.backend)
        if by_backend is None:
            by_backend = self._by_backend[sku.backend] = tuple(self._backend_reasons(sku))
        return by_key + by_arch + by_backend + self._obstacle(sku.id)

    def _key_reasons(self, key: FunctionalKey) -> tuple[Reason, ...]:
        if not self._by_part:
            parts = zip(_KEY_PARTS, self.key[2:], strict=True)
            self._by_part = tuple(_Part(key_field(type(self.problem), code), code, had) for code, had in parts)
        element, aux, layout, epilogue = self._by_part
        return element[key.element] + aux[key.aux_element] + layout[key.layout] + epilogue[key.epilogue]

    def _arch_reasons(self, sku: KernelSku) -> Iterator[Reason]:
        # A CUDA device of unknown capability runs nothing; it must not be treated as a CPU.
        same_processor = (sku.arch is ArchSku.CPU) is (self.device.processor == "cpu")
        if not same_processor or not sku.arch.runs_on(self.device.compute_capability):
            yield Reason(code="arch", field="device", wanted=sku.arch.describe(), had=self.device.describe())
        if sku.arch.is_specific and not self._preference.allow_arch_specific:
            yield Reason(
                code="preference", field="preference.allow_arch_specific", wanted="False", had=f"{sku.arch} only"
            )

    def _backend_reasons(self, sku: KernelSku) -> Iterator[Reason]:
        wanted = self._preference.backend
        if wanted is not None and sku.backend != wanted:
            yield Reason(code="preference", field="preference.backend", wanted=wanted, had=sku.backend)
        yield from self._obstacle(sku.backend)

    def _obstacle(self, name: str) -> tuple[Reason, ...]:
        found = self._unavailable.get(name)
        return () if found is None else (Reason(code="backend", field="backend", wanted=found[0], had=found[1]),)

    def _preference_reasons(self, sku: KernelSku) -> Iterator[Reason]:
        preference = self._preference
        if preference.sku is not None and sku.id != preference.sku:
            yield Reason(code="preference", field="preference.sku", wanted=preference.sku, had=sku.id)
        if self._requires:
            yield from preference.require.check(sku.precision_guarantee)

    def _size_reasons(self, sku: KernelSku) -> Iterator[Reason]:
        preference = self._preference
        for constraint in sku.constraints:
            reason = constraint.check(self.problem)
            if reason is not None:
                yield reason
        if preference.max_workspace_bytes is not None:
            needed = sku.workspace_size(self.problem)
            if needed > preference.max_workspace_bytes:
                yield Reason(
                    code="workspace",
                    field="preference.max_workspace_bytes",
                    wanted=f"at least {needed}",
                    had=str(preference.max_workspace_bytes),
                )


class Shortlists:
    """The kernels that fit the problems of a key, for each device and preference. `serves` then checks the sizes.

    So a new size does not look at kernels for other cards or backends. `forget` must be called whenever the obstacles
    have changed.
    """

    def __init__(self) -> None:
        self._found: dict[Hashable, tuple[KernelSku, ...]] = {}

    def forget(self) -> None:
        """Forget everything, including lists that another thread is making."""
        self._found = {}

    def of(
        self,
        registry: Registry,
        problem: Descriptor,
        device: Device,
        preference: PlanPreference,
        unavailable: Callable[[], Unavailable],
    ) -> tuple[KernelSku, ...]:
        """Return the kernels under a problem's key that fit, best first."""
        known, name = self._found, (problem.key(), device, preference)
        fitting = known.get(name)
        if fitting is None:
            # Read the obstacles after the dictionary, so that a list that misses one is never kept.
            matcher = Matcher(problem, device, preference, unavailable())
            if len(known) >= _MOST_SHORTLISTS:
                known.clear()
            fitting = known[name] = tuple(filter(matcher.fits, registry.candidates(matcher.key)))
        return fitting


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
    unavailable: Unavailable,
    *,
    behind: KernelSku | None = None,
    tuned: Tuned | None = None,
    shortlist: Iterable[KernelSku] | None = None,
) -> Pick | None:
    """Return the best kernel that has no reason against it, or None.

    With `behind`, only kernels ranked after that one count. With `tuned`, measured times may overrule the ranking; see
    `Tuned.weigh`. Only kernels under the problem's exact key are checked, so the time does not grow with the registry.
    For a `shortlist` only the sizes are checked.
    """
    if shortlist is None:
        shortlist = filter(Matcher(problem, device, preference, unavailable).fits, registry.candidates(problem.key()))
    accepted = (sku for sku in shortlist if serves(sku, problem, preference))
    if tuned is None and behind is None:
        best = next(accepted, None)
        return None if best is None else Pick(best)
    picks: Iterable[Pick] = map(Pick, accepted)
    if tuned is not None:
        matcher = Matcher(problem, device, preference, unavailable)
        picks, _ = _weighed(registry, matcher, tuple(accepted), tuned)
    if behind is not None:
        picks = itertools.islice(itertools.dropwhile(lambda pick: pick.sku is not behind, picks), 1, None)
    return next(iter(picks), None)


def _weighed(
    registry: Registry, matcher: Matcher, accepted: tuple[KernelSku, ...], tuned: Tuned
) -> tuple[tuple[Pick, ...], Verdict | None]:
    """Return the accepted kernels, first the one that measured times choose, and the verdict on the times."""
    if not accepted:
        return (), None

    def against(sku_id: str) -> str:
        sku = registry.sku(sku_id)
        if sku is None:
            return "it is not registered here"
        return "; ".join(map(str, matcher.reasons_against(sku))) or "it does not serve this problem"

    pick, verdict = tuned.weigh(matcher.problem, matcher.device, accepted, against)
    first = () if pick is None else (pick,)
    return (*first, *(Pick(sku) for sku in accepted if pick is None or sku is not pick.sku)), verdict


def explain(
    registry: Registry,
    problem: Descriptor,
    device: Device,
    preference: PlanPreference,
    unavailable: Unavailable,
    notes: tuple[str, ...] = (),
    *,
    tuned: Tuned | None = None,
) -> Explanation:
    """Return the decisions on every kernel of the problem's op."""
    from skuda.dispatch.select.explanation import Decision, Explanation, as_json

    matcher = Matcher(problem, device, preference, unavailable)
    accepted: list[KernelSku] = []
    refused: list[Decision] = []
    for sku in registry.skus_of(problem.op_name()):
        reasons = matcher.reasons_against(sku)
        if reasons:
            refused.append(Decision.judged(sku.id, None, reasons))
        else:
            accepted.append(sku)
    # Among equally many reasons, first the ones that the caller can remove without changing the problem.
    refused.sort(key=lambda decision: (len(decision.reasons), any(why.code in _KEY_PARTS for why in decision.reasons)))
    verdict = None
    if tuned is not None:
        picks, verdict = _weighed(registry, matcher, tuple(accepted), tuned)
        accepted = [pick.sku for pick in picks]
    return Explanation(
        op=problem.op_name(),
        problem=as_json(problem),
        device=device,
        preference=preference,
        decisions=(*(Decision.judged(sku.id, rank, ()) for rank, sku in enumerate(accepted)), *refused),
        notes=notes,
        registry=registry.digest,
        verdict=verdict,
    )
