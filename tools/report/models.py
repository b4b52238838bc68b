"""Runs of ``skuda bench-model`` and of ``skuda train-check`` on the report page."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree.ElementTree import Element

from skuda.tools.bench import model_judged, model_plot
from skuda.tools.bench.model_record import ModelRecord, PhaseResult
from skuda.tools.report.markup import Cell, Node, el, facts, number, row, table
from skuda.tools.report.records import drawn, hosts, ratio, versions, when
from skuda.tools.requirement import HEADINGS, Judged, Requirement
from skuda.tools.train import judged as train_judged
from skuda.tools.train import plot as train_plot
from skuda.tools.train.record import BASELINE, FIGURES, TrainRecord, figures


def model(record: ModelRecord, name: str) -> Iterator[Element]:
    """Yield a run of ``skuda bench-model``."""
    about: list[tuple[str, Node]] = [
        ("driver", record.driver),
        ("versions", versions(record.versions)),
        ("command", el("code", record.command)),
        ("stale", record.outdated),
        ("weights", record.weights),
        ("timed", "replays of a CUDA graph" if record.graph else "calls on the CPU, without a graph"),
        *record.computes.items(),
        *((f"{way} is absent", reason) for way, reason in record.absent.items()),
    ]
    yield el("article", el("h3", f"A whole model on {when(record)}"), facts(about))
    label = f"Microseconds of a block on {record.device.name}"
    headings = ["phase", "M", *(text for way in record.computes for text in (way, "x")), "gain"]
    lines = (_phase(phase, record) for phase in record.phases)
    note = "x is a way's time over the fastest of ours; gain is that of the faster way in bf16."
    yield el("article", el("h4", "Microseconds of a block"), table(label, headings, lines), el("p", note))
    yield requirements(model_judged.judged(record), f"Requirements on the model on {record.device.name}")
    yield from hosts("What a call of a layer costs the host", record.host)
    yield from drawn(model_plot.plots(record), name)


def _phase(phase: PhaseResult, record: ModelRecord) -> Element:
    ways = {way.name: way for way in phase.ways}
    cells: list[Cell | str] = []
    for name in record.computes:
        way = ways.get(name)
        if way is None or way.timing is None:
            said = phase.wrong and f"wrong: {phase.wrong}"
            cells += [Cell(said or (way.refused if way else ""), None, "bad" if said else ""), ""]
        else:
            us = way.timing.median / record.sizes["layers"]
            cells += [number(us, f"{us:.1f}"), ratio(way.ratio)]
    return row([phase.phase, number(phase.rows, str(phase.rows)), *cells, ratio(phase.gain)])


def training(record: TrainRecord, name: str) -> Iterator[Element]:
    """Yield a run of ``skuda train-check``."""
    shape, text = record.shape, record.corpus
    about: list[tuple[str, Node]] = [
        ("versions", versions(record.versions)),
        ("command", el("code", record.command)),
        ("stale", record.outdated),
        ("model", f"{record.parameters:,} parameters, {shape.layers} layers of {shape.width} channels"),
        ("training", f"{record.steps:,} steps of {record.batch} sequences of {shape.length} bytes"),
        ("text", f"Python {text.python}'s library; held out: {text.held_out_bytes:,} of its bytes"),
    ]
    where = f"{record.device}, {record.date[:16].replace('T', ' ')} UTC"
    yield el("article", el("h3", f"Training on {where}"), facts(about))
    lines = (_figure(*found) for found in figures(record))
    label = f"Figures of each way on {record.device}"
    headings = ("way", "figure", "value", f"above {BASELINE}")
    yield el("article", el("h4", "Loss and held-out bits"), table(label, headings, lines))
    yield requirements(train_judged.judged(record), f"Requirements on training on {record.device}")
    yield from drawn(train_plot.plots(record), name)


def _figure(way: str, name: str, value: float, above: float | None) -> Element:
    return row([way, FIGURES.get(name, name), number(value, f"{value:.4f}"), number(above, f"{above or 0:+.2f} %")])


def requirements(judged: Judged, label: str) -> Element:
    """Return the table of the requirements on a run."""
    lines = map(_requirement, judged.requirements)
    note = el("p", f"{judged.note[:1].upper()}{judged.note[1:]}.") if judged.note else None
    return el("article", el("h4", "Requirements"), table(label, HEADINGS, lines), note)


def _requirement(one: Requirement) -> Element:
    *cells, verdict = one.cells
    kind = {"met": "good", "missed": "bad"}.get(verdict)
    return row([*cells, Cell(verdict, None, kind)])
