"""Selection: one problem against the registry. Pure functions; no device, no compiler, no array is touched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

from skuda.dispatch.device import Device
from skuda.dispatch.explanation import Decision, Explanation, as_json
from skuda.dispatch.preference import PlanPreference
from skuda.registry.arch import ArchSku
from skuda.registry.descriptor import Descriptor, FunctionalKey, key_field
from skuda.registry.reason import Reason, ReasonCode
from skuda.registry.registry import Registry
from skuda.registry.sku import KernelSku

Unavailable = Mapping[str, tuple[str, str]]
"""Backends that cannot be used here: name to (what to do, what is wrong)."""


@lru_cache(maxsize=4096)
def _reason(code: ReasonCode, field: str, wanted: str, had: str) -> Reason:
    # Many candidates are refused for the same reason; frozen records can be shared.
    return Reason(code=code, field=field, wanted=wanted, had=had)


def _key_reasons(sku: KernelSku, key: FunctionalKey, problem: Descriptor) -> Iterator[Reason]:
    if sku.key == key:
        return
    codes: tuple[ReasonCode, ...] = ("element", "aux_element", "layout", "epilogue")
    for code in codes:
        want, had = getattr(sku, code), getattr(key, code)
        if want != had:
            yield _reason(code, key_field(type(problem), code), str(want), str(had))


def _arch_reasons(sku: KernelSku, device: Device, *, allow_specific: bool) -> Iterator[Reason]:
    # A CUDA device whose capability nobody could read runs nothing; it must not pass for a CPU.
    same_processor = (sku.arch is ArchSku.CPU) is (device.processor == "cpu")
    if not same_processor or not sku.arch.runs_on(device.compute_capability):
        yield _reason("arch", "device", sku.arch.describe(), device.describe())
    if sku.arch is not ArchSku.CPU and sku.arch.is_specific and not allow_specific:
        yield _reason("preference", "preference.allow_arch_specific", "False", str(sku.arch))


def _preference_reasons(sku: KernelSku, preference: PlanPreference) -> Iterator[Reason]:
    if preference.sku is not None and sku.id != preference.sku:
        yield _reason("preference", "preference.sku", preference.sku, sku.id)
    if preference.backend is not None and sku.backend != preference.backend:
        yield _reason("preference", "preference.backend", preference.backend, sku.backend)
    yield from preference.require.check(sku.precision_guarantee)


def reasons_against(
    sku: KernelSku, problem: Descriptor, device: Device, preference: PlanPreference, unavailable: Unavailable
) -> tuple[Reason, ...]:
    """Return every reason for which `sku` cannot serve `problem` on `device`; empty if it can."""
    key = problem.key()
    reasons = [
        *_key_reasons(sku, key, problem),
        *_arch_reasons(sku, device, allow_specific=preference.allow_arch_specific),
        *_preference_reasons(sku, preference),
        *(found for constraint in sku.constraints if (found := constraint.check(problem)) is not None),
    ]
    if preference.max_workspace_bytes is not None:
        needed = sku.workspace_size(problem)
        if needed > preference.max_workspace_bytes:
            wanted, had = f"at least {needed}", str(preference.max_workspace_bytes)
            reasons.append(_reason("workspace", "preference.max_workspace_bytes", wanted, had))
    # A card that is not here is planned for on paper: what is installed on this machine does not matter then.
    if device.ordinal is not None and sku.backend in unavailable:
        remedy, trouble = unavailable[sku.backend]
        reasons.append(_reason("backend", "backend", remedy, trouble))
    return tuple(reasons)


def choose(
    registry: Registry, problem: Descriptor, device: Device, preference: PlanPreference, unavailable: Unavailable
) -> KernelSku | None:
    """Return the first kernel, best first, against which nothing speaks; None if there is none.

    Only kernels under the problem's exact key are looked at, so the time does not grow with the registry.
    """
    for sku in registry.candidates(problem.key()):
        if not reasons_against(sku, problem, device, preference, unavailable):
            return sku
    return None


def explain(
    registry: Registry,
    problem: Descriptor,
    device: Device,
    preference: PlanPreference,
    unavailable: Unavailable,
    notes: tuple[str, ...] = (),
) -> Explanation:
    """Judge every kernel of the problem's op."""
    accepted: list[Decision] = []
    refused: list[Decision] = []
    for sku in registry.skus_of(problem.op_name()):
        reasons = reasons_against(sku, problem, device, preference, unavailable)
        rank = None if reasons else len(accepted)
        # The parts are valid already; skipping validation keeps an explanation of 500 kernels near a millisecond.
        decision = Decision.model_construct(sku=sku.id, rank=rank, reasons=reasons)
        (refused if reasons else accepted).append(decision)
    refused.sort(key=lambda decision: len(decision.reasons))
    return Explanation(
        op=problem.op_name(),
        problem=as_json(problem),
        device=device,
        preference=preference,
        decisions=(*accepted, *refused),
        notes=notes,
        registry=registry.digest,
    )
