"""The commands of ``skuda``: the function that runs each, and the example at the end of its help.

Only names and summaries are here. The module of a command, which declares its options, is imported when the command is
run, completed or helped with, because the rest must be fast.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from skuda.tools.options import Json

USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[2]
"""ClickException, from click or from typer's own copy of it."""


class Command(NamedTuple):
    """A command: its function, ``module:function`` below ``skuda.tools``, the first line of its help, and an example.

    With `fields`, a usage line, it also takes the fields of a problem as options, which the op decides.
    """

    target: str
    summary: str
    example: str
    fields: str = ""


COMMANDS = {
    "list": Command("show.list:run", "List the ops, or every kernel.", "list --device l4"),
    "show": Command("show.show:run", "Show everything about a kernel or an op.", "show quantized_linear"),
    "explain": Command(
        "show.explain:run",
        "Say which kernel would run, and why the others would not.",
        "explain quantized_linear --m 8 --n 4096 --k 4096 --device h200",
        "OP [--FIELD VALUE]... [OPTIONS]",
    ),
    "verify": Command(
        "verify.command:run", "Run every kernel against its reference.", "verify --device cpu --op fill --quick"
    ),
    "bench": Command(
        "bench.bench:run",
        "Measure the kernels that are chosen, against rivals.",
        "bench linear --shapes llama-3-8b --m 16  # needs a GPU",
    ),
    "bench-model": Command(
        "studies.commands:run",
        "Time a Llama stack: in bf16, quantized, and by others.",
        "bench-model --decode 16 --output model.json  # needs a GPU",
    ),
    "tune": Command(
        "bench.tune_command:run",
        "Time every kernel of a problem, in each configuration.",
        "tune fill --numel 65536 --output tuning.json  # needs a GPU",
        "OP... [--FIELD VALUE]... [OPTIONS]",
    ),
    "certify": Command(
        "studies.certify:run",
        "Show that a model has the same bits in every way.",
        "certify qwen3 --plain  # needs transformers",
    ),
    "evaluate": Command(
        "studies.evaluate:run",
        "Measure a quantized model against its reference.",
        "evaluate model --text speech.txt --quantize '{}'  # needs transformers",
    ),
    "compile": Command(
        "ship.compile:run",
        "Fill the cache of compiled kernels ahead of time.",
        "compile --device h200 --op fill",
        "[--op NAME [--FIELD VALUE]...] [OPTIONS]",
    ),
    "bundle": Command(
        "ship.bundle:run",
        "Write compiled kernels into one file, to be shipped.",
        "bundle kernels.skuda --device h200 --op fill",
        "FILE [--op NAME [--FIELD VALUE]...] [OPTIONS]",
    ),
    "lock": Command("ship.lock:run", "Write down the kernels, and which problem gets which.", "lock --device h200"),
    "diff": Command(
        "ship.diff:run",
        "Say which problems get another kernel, promise or speed.",
        "diff old.lock.json skuda.lock.json",
    ),
    "cache ls": Command("ship.cache:ls", "List what is in the cache.", "cache ls"),
    "cache verify": Command(
        "ship.cache:verify", "Check every checksum; exit with 1 where one is wrong.", "cache verify"
    ),
    "cache gc": Command("ship.cache:gc", "Remove what is old or too much.", "cache gc --max-size 1GiB"),
    "cache clear": Command("ship.cache:clear", "Remove everything.", "cache clear --yes"),
    "doctor": Command("commands:doctor", "Check this machine, and name what fixes it.", "doctor"),
    "demo": Command("demo.command:run", "Run a real sentence encoder in int8, and in f32.", "demo"),
}
REMOVED = {"bench-parallel": "skuda bench-model --ranks 2", "train-check": "python docs/examples/policy.py"}
"""What does the work of commands that are gone."""


class _Group(TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        path = f"{ctx.command_path} {name}".partition(" ")[2]
        return name, loaded(path) if path in COMMANDS else command, rest


def loaded(path: str) -> Any:
    """Return a command of `COMMANDS`, made of the function that runs it."""
    target, _, example, fields = COMMANDS[path]
    module, _, function = target.partition(":")
    settings: dict[str, Any] = {"epilog": f"\b\nExample:\n  skuda {example}"}
    if fields:
        settings["context_settings"] = {"ignore_unknown_options": True, "allow_extra_args": True}
        settings |= {"options_metavar": fields, "add_help_option": path != "explain"}  # it also helps with an op
    alone = typer.Typer(add_completion=False, **_COMMON)
    alone.command(path.rpartition(" ")[2], **settings)(getattr(import_module(f"skuda.tools.{module}"), function))
    return typer.main.get_command(alone)


_COMMON: dict[str, Any] = {"rich_markup_mode": None, "context_settings": {"help_option_names": ["--help", "-h"]}}
app = typer.Typer(
    name="skuda",
    cls=_Group,
    help="Which int8 kernels there are, which one runs where, and why.",
    pretty_exceptions_enable=False,
    **_COMMON,
)
_cache = typer.Typer(cls=_Group, **_COMMON)
app.add_typer(_cache, name="cache")
for _path, _command in COMMANDS.items():
    _group, _, _verb = _path.rpartition(" ")
    (_cache if _group else app).command(_verb, help=_command.summary)(lambda: None)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    *,
    show_version: Annotated[bool, typer.Option("--version", "-V", help="Print the version.")] = False,
) -> None:
    if show_version:
        try:
            typer.echo(f"skuda {version('skuda')}")
        except PackageNotFoundError:
            typer.echo("skuda, not installed as a package")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@_cache.callback(invoke_without_command=True)
def _cache_root(context: typer.Context) -> None:
    """Look after the cache of compiled kernels."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def doctor(*, as_json: Json = False) -> int:
    """Check this machine, and name what fixes it.

    Exits with 1 where a required part is missing, and where a bundle, a tuning file or the cache cannot be used.
    """
    # It must run without typer, which its module therefore does not import.
    from skuda.tools.show.doctor import run

    return run(as_json=as_json)
