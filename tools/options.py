"""Options of the commands, as annotations of the parameters of the functions that run them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

MOST = (1 << 63) - 1
"""The largest integer that a record takes."""


def option(metavar: str, text: str, *names: str, **limits: Any) -> Any:
    """Declare an option that takes a value."""
    return typer.Option(*names, help=text, metavar=metavar, show_default=False, **limits)


def number(text: str, metavar: str = "N", least: int = 1, most: int = (1 << 31) - 1) -> Any:
    """Declare an option that takes an integer."""
    return option(metavar, text, min=least, max=most)


def argument(metavar: str, text: str) -> Any:
    """Declare a word without a name."""
    return typer.Argument(metavar=metavar, help=text, show_default=False)


flag = partial(typer.Option, show_default=False)
Number = int | None
Word = str | None
File = Path | None
Words = list[str] | None
"""An option that may be repeated, and may hold several values, separated by commas; see `skuda.tools.output.split`."""

Json = Annotated[bool, flag("--json", help="JSON, for machines.")]
All = Annotated[bool, flag("--all", help="List everything, not the first of each kind.")]
Ops = Annotated[Words, option("NAME", "Only these ops.", "--op")]
Evidence = Annotated[File, option("DIR", "Read records of `skuda verify` from this folder.", "--evidence")]
Descriptors = Annotated[File, option("FILE", "For these problems: JSON objects with `op` and its fields.")]
Archs = Annotated[Words, option("ARCH", "For the known cards of these, such as sm_90a,sm_80.", "--arch")]
Devices = Annotated[Words, option("NAME", "For these cards, such as h200,l4; else those here.", "--device")]
Backends = Annotated[Words, option("NAME", "For these: cuda_core, pycuda, all; else those here.", "--backend")]
Seed = Annotated[Number, number("Draw inputs from this; fresh if left out.", least=0, most=MOST)]
Output = Annotated[File, option("FILE", "Write the record here.")]
Markdown = Annotated[
    str | None, option("SECTION", "Print one section as Markdown tables, or all; another word lists them.")
]
Show = Annotated[File, option("FILE", "Show this record; measure nothing.")]
Repeats = Annotated[Number, number("Rounds, 20 if left out; slow kernels get fewer.", most=MOST)]
Random = Annotated[Number, number("Products of this many shapes drawn from the seed.", "COUNT", most=9999)]
Element = Annotated[Words, option("KIND", "These elements: f16, bf16, f32, f64.")]
Backend = Annotated[Word, option("NAME", "Only kernels of this backend.")]


def own_options(context: typer.Context) -> list[str]:
    """Return the names of a command's own options, as they stand in code."""
    return [name.lstrip("-").replace("-", "_") for one in context.command.params for name in one.opts]
