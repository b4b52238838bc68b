"""What a record of ``skuda bench-model`` has to show: equal bits, gains, weights, and the host's cost."""

from __future__ import annotations

from skuda.registry.device import device_named
from skuda.tools.bench.model_record import REAL, ModelRecord, Phase
from skuda.tools.requirement import Judged, Requirement, differences

LLAMA_3_8B = {"hidden": 4096, "intermediate": 14336, "heads": 32, "kv_heads": 8, "layers": 32}
GAINS: dict[tuple[Phase, int], float] = {
    ("decode", 1): 1.75,
    ("decode", 16): 1.6,
    ("decode", 64): 1.45,
    ("prefill", 2048): 1.65,
    ("prefill", 8192): 1.65,
}
"""The least time of bf16, eager or compiled, over ours, by phase and rows."""
RIVALS = ("torchao", "bitsandbytes")
_OVER_RIVALS, _WEIGHTS, _HOST = 1.3, 0.52, 1.3


def judged(record: ModelRecord) -> Judged:
    """Judge a record; figures are judged for a CUDA graph of Llama 3 8B on an H200, and bits everywhere."""
    wanted = device_named("h200").name
    unlike = differences(
        (
            (record.device.name == wanted, f"the device is {record.device.name}, not {wanted}"),
            (record.graph, "no CUDA graph is timed"),
            (record.sizes == LLAMA_3_8B, "the sizes are not those of Llama 3 8B"),
        )
    )

    def figure(what: str, value: float | None, bound: float, *, at_most: bool = False, where: str = "") -> Requirement:
        if value is None:
            return Requirement(what, _bound(bound, at_most=at_most), where or "not measured", None)
        met = None if unlike else value <= bound if at_most else value >= bound
        return Requirement(what, _bound(bound, at_most=at_most), f"{value:.3f}x{where}", met)

    # The faster way in bf16 is known where both were timed.
    gains = {
        (phase.phase, phase.rows): phase.gain
        for phase in record.phases
        if set(REAL) <= {way.name for way in phase.ways if way.timing is not None}
    }
    found = [_bits(record)]
    for (phase, rows), bound in GAINS.items():
        found.append(figure(f"{phase} {rows}: faster way in bf16 over ours", gains.get((phase, rows)), bound))
    for name in RIVALS:
        lowest = min(
            (
                (way.ratio, f" in {phase.phase} {phase.rows}")
                for phase in record.phases
                for way in phase.ways
                if way.name == name and way.ratio is not None
            ),
            default=(None, "absent" if name in record.absent else ""),
        )
        found.append(figure(f"{name} over ours, lowest", lowest[0], _OVER_RIVALS, where=lowest[1]))
    found.append(figure("bytes of weights over bf16", _share(record), _WEIGHTS, at_most=True))
    return Judged(
        (*found, figure("DynamicLinear on the host over F.linear", _host(record), _HOST, at_most=True)), unlike
    )


def _bound(value: float, *, at_most: bool) -> str:
    return f"{'at most' if at_most else 'at least'} {value:g}x"


def _bits(record: ModelRecord) -> Requirement:
    """Judge the bits of ours, eager, compiled and as they are timed."""
    wrong = ", ".join(f"{phase.phase} {phase.rows}" for phase in record.wrong)
    compared = sum(phase.compared for phase in record.phases)
    measured = f"different in {wrong}" if wrong else f"equal on {compared} inputs" if compared else "not compared"
    return Requirement(
        "bits of ours, eager, compiled and replayed", "equal", measured, not wrong if compared or wrong else None
    )


def _share(record: ModelRecord) -> float | None:
    ours, theirs = record.bytes.get("skuda"), record.bytes.get("bf16")
    return ours / theirs if ours is not None and theirs else None


def _host(record: ModelRecord) -> float | None:
    medians = {cost.name: cost.timing.median for cost in record.host if cost.timing is not None}
    ours, theirs = medians.get("DynamicLinear"), medians.get("F.linear")
    return ours / theirs if ours is not None and theirs else None
