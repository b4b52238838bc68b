"""Records of ``skuda train-check`` as Markdown tables for the docs; equal records give equal text."""

from __future__ import annotations

from skuda.tools.bench.markdown import fact_list, judged_table, markdown_table, sections
from skuda.tools.train.judged import judged
from skuda.tools.train.record import BASELINE, FIGURES, TrainRecord, figures


def train_markdown(record: TrainRecord, section: str = "all") -> str:
    """Return a record, or one section of it, as Markdown.

    Parameters
    ----------
    record : TrainRecord
        The record.
    section : str
        ``facts`` (device, versions, model, text), ``ways`` (the figures of each), ``requirements``, or ``all`` of
        these.

    Raises
    ------
    InvalidProblem
        For another section.
    """
    made = {
        "facts": lambda: _facts(record),
        "ways": lambda: _ways(record),
        "requirements": lambda: judged_table(judged(record)),
    }
    return sections("train-check", made, section)


def _facts(record: TrainRecord) -> str:
    shape, text = record.shape, record.corpus
    return fact_list(
        (
            ("command", f"`{record.command}`"),
            ("device", record.device),
            ("date", record.date),
            ("stale", record.outdated),
            ("model", f"{record.parameters:,} parameters, {shape.layers} layers of {shape.width} channels"),
            ("compiled", "yes" if record.compiled else "no"),
            ("training", f"{record.steps:,} steps of {record.batch} sequences of {shape.length} bytes"),
            ("text", f"Python {text.python}'s library, {text.bytes:,} bytes; held out: {text.held_out_bytes:,} bytes"),
            ("versions", ", ".join(f"{name} {version}" for name, version in record.versions.items())),
        )
    )


def _ways(record: TrainRecord) -> str:
    rows = [
        (way, FIGURES.get(name, name), f"{value:.4f}", "" if above is None else f"{above:+.2f} %")
        for way, name, value, above in figures(record)
    ]
    return markdown_table(("way", "figure", "value", f"above {BASELINE}"), rows)
