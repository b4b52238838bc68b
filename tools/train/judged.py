"""What a record of ``skuda train-check`` has to show: losses and held-out figures near those of bf16."""

from __future__ import annotations

from skuda.registry.device import device_named
from skuda.tools.requirement import Judged, Requirement, differences
from skuda.tools.train.record import BASELINE, FIGURES, TrainRecord

LEAST_STEPS = 1000
TOLERANCE = 1.0
"""Per cent above bf16."""


def judged(record: TrainRecord) -> Judged:
    """Judge a record; figures are judged for an H200 and for at least `LEAST_STEPS` steps."""
    wanted = device_named("h200").name
    unlike = differences(
        (
            (record.device == wanted, f"the device is {record.device}, not {wanted}"),
            (record.steps >= LEAST_STEPS, f"{record.steps} steps are fewer than {LEAST_STEPS}"),
        )
    )
    found = []
    for way, name in (
        *((way, "loss") for way in ("fake", "mixed")),
        *((way, how) for way in (BASELINE, "fake", "mixed") for how in ("dynamic", "static")),
    ):
        excess = record.excess.get((way, name))
        met = None if unlike or excess is None else excess <= TOLERANCE
        measured = "not measured" if excess is None else f"{excess:+.2f} %"
        found.append(Requirement(f"{way}: {FIGURES[name]}", f"at most {TOLERANCE:+g} %", measured, met))
    step = next((result.milliseconds for result in record.ways if result.way == "mixed"), None)
    measured = "not measured" if step is None else f"{step:.2f}"
    return Judged(
        (*found, Requirement(f"mixed: {FIGURES['ms']}", "recorded", measured, None if step is None else True)), unlike
    )
