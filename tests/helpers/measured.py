"""Bench records with made-up times, for tests of what is shown."""

from __future__ import annotations

from typing import Any

from skuda.dispatch.select.tuning import Timing
from skuda.kernels.catalog import built_in_registry
from skuda.registry.device import device_named
from skuda.tools.bench.record import BenchRecord, CaseResult, Ceilings, RivalResult, least_work
from skuda.tools.parse.cases import select_cases

REGISTRY = built_in_registry()
CEILINGS = Ceilings(copy_bandwidth=4e12, bf16=8e14, fp8=1.6e15)


def measured(op: str, shape: tuple[int, ...], us: float, element: str = "bf16", **rivals: float | str) -> CaseResult:
    """Return a case that took `us`; rivals by name with their microseconds, or with why they refused."""
    case, *_ = select_cases(REGISTRY, [op], [shape], [element])
    moved, operations = least_work(case.problem)
    others = tuple(
        RivalResult(name=name, computes="the same", refused=said)
        if isinstance(said, str)
        else RivalResult(name=name, computes="the same", timing=Timing.of([said]))
        for name, said in rivals.items()
    )
    sku = next(sku for sku in REGISTRY.skus_of(op) if sku.key == case.problem.key())
    return CaseResult(
        label=case.label,
        op=op,
        shape=shape,
        element=element,
        problem={},
        sku=sku.id,
        bytes=moved,
        operations=operations,
        timing=Timing.of([us]),
        rivals=others,
    )


def record_of(*cases: CaseResult, **changes: Any) -> BenchRecord:
    """Return a record of cases on an H200 on paper."""
    fields: dict[str, Any] = {"date": "2026-02-03T04:05:06+00:00", "skuda": "0", "seed": 1, "repeats": 1}
    fields |= {"device": device_named("h200"), "command": "skuda bench", "ceilings": CEILINGS, "cases": cases}
    return BenchRecord(**{**fields, "flush": "clean", "method": BenchRecord.METHOD, **changes})


def some_record(**changes: Any) -> BenchRecord:
    """Return a record with products, one of them at several numbers of rows, and other ops."""
    refused = measured("fake_quantize", (4096, 4096), 1.0).model_copy(update={"timing": None, "refused": "wrong"})
    cases = (
        measured("smoothquant_linear", (16, 512, 512), 5.0, bf16=10.0, int_mm="M must exceed 16", copy=1.0),
        measured("smoothquant_linear", (1024, 512, 512), 8.0, bf16=4.0, int_mm=9.0),
        measured("smoothquant_linear", (64, 1024, 512), 8.0, bf16=4.0),
        measured("fake_quantize", (1024, 4096), 7.0, compile=8.0, copy=6.0),
        measured("fake_quantize", (2048, 4096), 14.0, compile=15.0, copy=12.0),
        measured("dynamic_range", (16, 4096), 5.0, "f16", bitsandbytes=50.0),
        refused,
    )
    return record_of(*cases, **changes)
