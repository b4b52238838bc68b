"""The subcommands of ``skuda`` and their options.

Most functions below have no bodies: each declares the options of the function that `_command` names, which is imported
when it runs, because help must be fast.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[2]
"""ClickException, from click or from typer's own copy of it, whichever this typer uses."""

app = typer.Typer(
    name="skuda",
    help="Which int8 kernels there are, which one runs where, and why.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)

_cache = typer.Typer(rich_markup_mode=None)
app.add_typer(_cache, name="cache")

_WRITTEN = ("html", "into", "output")
"""The options of files that a command writes."""


def _command(
    name: str, target: str, *, fields: str = "", **settings: Any
) -> Callable[[Callable[..., None]], Callable[..., int]]:
    """Make a subcommand of a function that declares its options; see `_run` for `target`.

    With `fields`, a usage line, it takes the fields of a problem as options too; those are known when the op is known.
    """
    group, _, verb = name.rpartition(" ")
    if fields:
        settings["context_settings"] = {"ignore_unknown_options": True, "allow_extra_args": True}
        settings["options_metavar"] = fields

    def register(declared: Callable[..., None]) -> Callable[..., int]:
        @wraps(declared)
        def call(**given: Any) -> int:
            return _run(name, target, {option: value for option, value in given.items() if value is not None})

        (_cache if group else app).command(verb, **settings)(call)
        return call

    return register


def _run(name: str, target: str, given: dict[str, Any]) -> int:
    """Run a command: the module `target` below ``skuda.tools`` has a ``run``, or `target` is ``module:function``.

    Options that are fields of the module's `Request` are passed as one; words that are no options are passed as
    ``tokens``, ``--html`` as the function that writes the page.
    """
    context: typer.Context | None = given.pop("context", None)
    if context is not None:
        if given.pop("show_help", False):
            typer.echo(context.get_help())
            if not context.args:
                return 0
            given = {"show_fields": True}
        own = (option for param in context.command.params for option in param.opts)
        given |= {"tokens": context.args, "own_options": [option.lstrip("-").replace("-", "_") for option in own]}
    written = {f"--{option}": given[option] for option in _WRITTEN if option in given}
    if written:
        import_module("skuda.tools.files").check_all(name, written)
    if "html" in given:
        given["page"] = partial(import_module("skuda.tools.report.page").save, given.pop("html"))
    module, _, function = target.partition(":")
    command = import_module(f"skuda.tools.{module}")
    if hasattr(command, "Request"):
        asked = {option for option in given if option in command.Request.__dataclass_fields__}
        given["request"] = command.Request(**{option: given.pop(option) for option in asked})
    status: int = getattr(command, function or "run")(**given)
    return status


def _option(metavar: str, text: str, *names: str) -> Any:
    """Declare an option that takes a value."""
    return typer.Option(*names, help=text, metavar=metavar)


_MOST = (1 << 63) - 1
"""The largest integer that a record takes."""
_MOST_COUNT = (1 << 31) - 1

Words = list[str] | None
Json = Annotated[bool, typer.Option("--json", help="JSON, for machines.")]
Ops = Annotated[Words, _option("NAME", "Only these ops.", "--op")]
Evidence = Annotated[Path | None, _option("DIR", "Read records of `skuda verify` from this folder.", "--evidence")]
Html = Annotated[Path | None, _option("FILE", "Write a page with op matrix, evidence and measurements.")]
Plot = Annotated[Path | None, _option("PATH", "Draw it: into a folder, or one .png, .svg or .pdf.")]
Output = Annotated[Path | None, _option("FILE", "Write the record here.")]
Seed = Annotated[int | None, typer.Option(help="Draw inputs from this; fresh if left out.", min=0, max=_MOST)]
Repeats = Annotated[int, typer.Option(help="Rounds; slow kernels get fewer.", min=1, max=_MOST)]
Random = Annotated[
    int | None, typer.Option(metavar="COUNT", help="Products of this many shapes drawn from the seed.", min=1, max=9999)
]
Floats = Annotated[Words, _option("KIND", "These elements: f16, bf16, f32, f64.", "--element")]
Descriptors = Annotated[
    Path | None, _option("FILE", "For these problems: JSON objects with `op` and its fields.", "--descriptors")
]
Archs = Annotated[Words, _option("ARCH", "For the known cards of these, such as sm_90a,sm_80.", "--arch")]
Cards = Annotated[Words, _option("NAME", "For these cards, such as h200,a100; else those here.", "--device")]
Compilers = Annotated[
    Words, _option("NAME", "For these: cuda_core, pycuda, all; else those with a compiler here.", "--backend")
]


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    *,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if show_version:
        try:
            typer.echo(f"skuda {version('skuda')}")
        except PackageNotFoundError:
            typer.echo("skuda, not installed as a package")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@_command("list", "show.list")
def _list(
    *,
    ops: Ops = None,
    elements: Annotated[Words, _option("KIND", "Only kernels for these elements.", "--element")] = None,
    aux: Annotated[Words, _option("KIND", "Only these second elements; `none` for kernels without.")] = None,
    archs: Annotated[Words, _option("ARCH", "Only these architectures.", "--arch")] = None,
    backends: Annotated[Words, _option("NAME", "Only these backends.", "--backend")] = None,
    skus: Annotated[bool, typer.Option("--skus", help="One line per kernel: its id.")] = False,
    matrix: Annotated[
        bool, typer.Option("--matrix", help="Ops by backends with what is verified, as a Markdown table.")
    ] = False,
    into: Annotated[Path | None, _option("FILE", "Put that table into this file, between its markers.")] = None,
    html: Html = None,
    evidence: Evidence = None,
    as_json: Json = False,
) -> None:
    """Show the op matrix, or every kernel.

    Filters may be repeated and may hold several values, separated by commas. Piped, each line is a record with tabs
    between op, category, elements, second elements, archs, backends, number of kernels and promise.
    """


@_command("show", "show.show")
def _show(
    name: Annotated[str, typer.Argument(metavar="ID", help="The id of a kernel, or the name of an op.")],
    *,
    evidence: Evidence = None,
    as_json: Json = False,
) -> None:
    """Show everything about a kernel or an op."""


@_command("explain", "show.explain", fields="OP [--FIELD VALUE]... [OPTIONS]", add_help_option=False)
def _explain(
    context: typer.Context,
    *,
    device: Annotated[str, _option("NAME", "Plan for this device: here, cpu, or a card such as h200.")] = "here",
    prefer_backend: Annotated[str | None, _option("NAME", "Insist on this backend.")] = None,
    sku: Annotated[str | None, _option("ID", "Insist on this kernel.")] = None,
    require: Annotated[Words, _option("PROMISE", "Insist on a promise, such as deterministic,max_ulp=0.")] = None,
    max_workspace_bytes: Annotated[int | None, _option("BYTES", "Refuse kernels that need more scratch.")] = None,
    no_arch_specific: Annotated[
        bool, typer.Option("--no-arch-specific", help="Refuse kernels for one chip or family only (sm_90a).")
    ] = False,
    tuning: Annotated[
        Path | None, _option("FILE", "Use these measured times; else those that SKUDA_TUNING names.")
    ] = None,
    shards: Annotated[
        Words, _option("FIELD=VALUE", "Split a linear layer over ranks: axis=k,count=2, and input, output, chunks.")
    ] = None,
    show_all: Annotated[bool, typer.Option("--all", help="List every refused kernel.")] = False,
    as_json: Json = False,
    show_help: Annotated[
        bool, typer.Option("--help", "-h", help="This page; after an op's name, the op's fields too.")
    ] = False,
) -> None:
    """Say which kernel would run, and why the others would not.

    Every field of the op is an option: `skuda explain quantized_linear --m 8 --c-out 4096 --k 4096 --device h200`.
    Exits with 1 where no kernel serves the problem.
    """


@_command("verify", "verify.command")
def _verify(
    *,
    ops: Ops = None,
    skus: Annotated[Words, _option("ID", "Only these kernels.", "--sku")] = None,
    backends: Annotated[Words, _option("NAME", "Only these backends.", "--backend")] = None,
    device: Annotated[str | None, _option("WHERE", "A CUDA device by its number, or cpu; else the first one.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer memory layouts, no large problems.")] = False,
    seed: Seed = None,
    output: Output = None,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Run every kernel against its reference.

    Runs each kernel that the device accepts over every case of its op: in several memory layouts between guard zones,
    again, and with its rows permuted. Without filters, on a CUDA device and in a checkout, the record goes to
    docs/evidence. Exits with 1 where a kernel fails.
    """


@_command("bench", "bench.command")
def _bench(
    names: Annotated[
        Words, typer.Argument(metavar="[OPS]...", help="Ops, or quantize, linear, all; all if left out.")
    ] = None,
    *,
    ops: Annotated[Words, _option("NAME", "Ops and groups too.", "--op")] = None,
    shapes: Annotated[
        Words,
        _option("SHAPE", "ROWSxCOLUMNS, MxNxK for a product, a file of these, or llama-3-8b, llama-3-70b, minilm."),
    ] = None,
    m: Annotated[Words, _option("ROWS", "Numbers of rows for a model's shapes.", "--m")] = None,
    random: Random = None,
    chain: Annotated[
        int | None,
        typer.Option(help="Run this many dependent layers in one graph; times are those of one.", min=2, max=99),
    ] = None,
    elements: Floats = None,
    rivals: Annotated[
        Words, _option("NAME", "Only these rivals; cutlass and bf16 at random shapes.", "--rivals")
    ] = None,
    backend: Annotated[str | None, _option("NAME", "Insist on this backend.")] = None,
    seed: Seed = None,
    repeats: Repeats = 20,
    cutlass: Annotated[Path | None, _option("FOLDER", "Compare products with CUTLASS, built into this folder.")] = None,
    output: Output = None,
    show: Annotated[Path | None, _option("FILE", "Show this record; measure nothing.")] = None,
    plot: Plot = None,
    markdown: Annotated[
        str | None, _option("SECTION", "Markdown tables: all, facts, cases, means, bands, bandwidth, host, or an op.")
    ] = None,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Measure the kernels that are chosen, against rivals.

    Needs a CUDA device and torch. Results are compared before they are timed; a wrong one is refused, and the exit
    status is 1. Rivals are timed alternately with the kernel, after a flush of the cache; absent ones are named.
    CUTLASS takes part where --cutlass names a folder of its built objects; else the record says what builds them.
    """


@_command("bench-model", "bench.model_command")
def _model(
    *,
    hidden: Annotated[int, typer.Option(help="Size of the hidden states.", min=2)] = 4096,
    intermediate: Annotated[int, typer.Option(help="Size between the products of the MLP.", min=1)] = 14336,
    heads: Annotated[int, typer.Option(help="Heads of the attention.", min=1)] = 32,
    kv_heads: Annotated[int, typer.Option(help="Heads of keys and values.", min=1)] = 8,
    layers: Annotated[int, typer.Option(help="Layers.", min=1)] = 32,
    cache: Annotated[int, typer.Option(help="Positions of the cache in decoding.", min=1)] = 1024,
    decode: Annotated[Words, _option("ROWS", "Decode so many sequences; 1,16,64 if no phase is given.")] = None,
    prefill: Annotated[Words, _option("ROWS", "Prefill so many positions; 2048,8192 if no phase is given.")] = None,
    ways: Annotated[Words, _option("NAME", "Only these ways beside ours, such as bf16,torchao.", "--ways")] = None,
    attention: Annotated[
        str | None, _option("NAME", "The only kernels of torch's attention: cudnn, efficient, flash.")
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="On the CPU, without CUDA graphs, for small sizes.")] = False,
    repeats: Repeats = 20,
    seed: Seed = None,
    output: Output = None,
    show: Annotated[Path | None, _option("FILE", "Show this record; measure nothing.")] = None,
    plot: Plot = None,
    markdown: Annotated[
        str | None, _option("SECTION", "Markdown tables: all, facts, phases, requirements, host.")
    ] = None,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Time a Llama stack: in bf16, quantized, and by others.

    The weights are random. Needs torch and a CUDA device; each way is a replay of a CUDA graph. The outputs of ours,
    eager, compiled and captured, are compared bit for bit; where they differ, nothing is timed, and the exit status is
    1. Ways whose packages are not installed are named. Piped, each line is a record with tabs between phase, rows,
    cache, way, median, p10 and p90 in us, the ratio to the fastest of ours, the relative distance from bf16, rounds,
    and what speaks against it; lines of phase `host` are calls of one layer.
    """


@_command("bench-parallel", "parallel.command")
def _parallel(
    *,
    gpus: Annotated[int, typer.Option(help="Ranks, each with a GPU.", min=1, max=1024)] = 2,
    rows: Annotated[Words, _option("M", "Numbers of rows; 1,2,3,16,128,2048,8192 if left out.")] = None,
    hidden: Annotated[int, typer.Option(help="Size of the hidden states.", min=1)] = 8192,
    intermediate: Annotated[int, typer.Option(help="Size between the products.", min=1)] = 28672,
    cpu: Annotated[bool, typer.Option("--cpu", help="Ranks on the CPU, without CUDA graphs, for small sizes.")] = False,
    repeats: Repeats = 20,
    seed: Seed = None,
    patience: Annotated[float, typer.Option(help="Seconds for all of the work.", min=1)] = 900.0,
    trace: Annotated[bool, typer.Option(help="Record the kernels of a few replays when everything is timed.")] = True,
    output: Output = None,
    show: Annotated[Path | None, _option("FILE", "Show this record, with its kernels; measure nothing.")] = None,
    plot: Plot = None,
    markdown: Annotated[
        str | None, _option("SECTION", "Markdown tables: all, facts, times, requirements, trace, kernels.")
    ] = None,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Time a gated MLP on one GPU and on several.

    In bf16 and in int8, as replays of CUDA graphs with NCCL's collectives in them; the time of a round is that of the
    slowest rank. The weights are random. Before, the outputs in int8 on all ranks, called, replayed and compiled, are
    compared bit for bit with those on one, and a few rows with NumPy; where they differ, nothing is timed, and the exit
    status is 1. A trace says how long products, other kernels and exchanges ran, and what overlapped. Needs torch.
    Piped, each line is a record with tabs between rows, way, median, p10 and p90 in us, the ratio to ours on all ranks,
    what failed, and of the trace, in us: products, other kernels, exchange, of it hidden, of it waiting, idle, total.
    """


@_command("tune", "bench.tune_command", fields="OP... [--FIELD VALUE]... [OPTIONS]")
def _tune(
    context: typer.Context,
    *,
    shapes: Annotated[Words, _option("SHAPE", "These shapes: ROWSxCOLUMNS, or MxNxK for a product.")] = None,
    random: Random = None,
    elements: Floats = None,
    backend: Annotated[str | None, _option("NAME", "Only kernels of this backend.")] = None,
    variants: Annotated[Words, _option("NAME", "Only kernels of these variants.", "--variant")] = None,
    output: Annotated[Path | None, _option("FILE", "Write the times here; else a name after the device.")] = None,
    update: Annotated[bool, typer.Option("--update", help="Add new problems to a file that exists.")] = False,
    margin: Annotated[
        float | None,
        typer.Option(help="Per cent by which a kernel must be faster than the first of the ranking; 3 if left out."),
    ] = None,
    repeats: Repeats = 20,
    layers: Annotated[
        int,
        typer.Option(
            help="Launch a kernel so often in a graph, as layers of a model; times are those of one.", min=1, max=99
        ),
    ] = 1,
    seed: Seed = None,
    show: Annotated[Path | None, _option("FILE", "Show this file; measure nothing.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table of it.")] = False,
    as_json: Json = False,
) -> None:
    """Time every kernel of a problem, in each configuration.

    The problems are shapes of ops, as in `skuda bench`, or one with its fields:
    `skuda tune quantized_linear --m 8 --n 4096 --k 4096`. Results are compared before they are timed; a wrong one is
    refused, and the exit status is 1. The file changes a choice only where it is named: by SKUDA_TUNING, or as
    Dispatcher(tuning=FILE). Piped, each line is a record
    with tabs between op, problem, kernel, configuration, median, p10 and p90 in us, rounds, what would run (chosen by
    time, or first of the ranking), and what speaks against it.
    """


@_command("train-check", "train.command")
def _train_check(
    *,
    ways: Annotated[Words, _option("NAME", "These ways to train: bf16, fake, mixed; all if left out.", "--way")] = None,
    device: Annotated[str, _option("WHERE", "cpu, cuda, or auto: a GPU where torch sees one.")] = "auto",
    steps: Annotated[int, typer.Option(help="Steps of the optimizer.", min=1, max=_MOST_COUNT)] = 2000,
    batch: Annotated[int, typer.Option(help="Sequences in a step.", min=1, max=_MOST_COUNT)] = 32,
    width: Annotated[int, typer.Option(help="Channels of the model.", min=1, max=_MOST_COUNT)] = 512,
    layers: Annotated[int, typer.Option(help="Its blocks.", min=1, max=_MOST_COUNT)] = 8,
    heads: Annotated[int, typer.Option(help="Its attention heads.", min=1, max=_MOST_COUNT)] = 8,
    hidden: Annotated[int, typer.Option(help="Channels inside of SwiGLU.", min=1, max=_MOST_COUNT)] = 1408,
    length: Annotated[int, typer.Option(help="Bytes in a sequence.", min=1, max=_MOST_COUNT)] = 512,
    windows: Annotated[int, typer.Option(help="Held-out sequences.", min=1, max=_MOST_COUNT)] = 512,
    learning_rate: Annotated[float, typer.Option(help="The highest learning rate.", min=0)] = 1e-3,
    tolerance: Annotated[float, typer.Option(help="Per cent by which a way may be worse than bf16.", min=0)] = 1.0,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the model with torch.compile.")] = False,
    seed: Seed = None,
    output: Output = None,
    show: Annotated[Path | None, _option("FILE", "Show this record; train nothing.")] = None,
    plot: Plot = None,
    markdown: Annotated[str | None, _option("SECTION", "Markdown tables: all, facts, ways, requirements.")] = None,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Train a small model in int8, and compare it with bf16.

    The model is a Llama over bytes, trained from scratch on the sources of Python's standard library, once in each way,
    from the same initial weights on the same batches. Reports the loss, the time of a step, and the bits per byte on
    held-out files: as trained, and in int8 with dynamic and static scales. Exits with 1 where any of these, except the
    time, is worse than bf16 by more than the tolerance. Needs torch. Piped, each line is a record with tabs between
    way, figure, value and per cent above bf16.
    """


@_command("compile", "ship.compile", fields="[--op NAME [--FIELD VALUE]...] [OPTIONS]")
def _compile(
    context: typer.Context,
    *,
    ops: Ops = None,
    descriptors: Descriptors = None,
    archs: Archs = None,
    devices: Cards = None,
    backends: Compilers = None,
    as_json: Json = False,
) -> None:
    """Fill the cache of compiled kernels ahead of time.

    Needs a compiler, but no GPU and no driver. What is compiled is what the cards would look for: every kernel that
    fits, in each configuration that the cases of its op lead to, or those of a list (--descriptors), or one problem:
    `skuda compile --device h200 --op quantized_linear --m 8 --n 4096 --k 4096`. `skuda bundle` writes the same into one
    file, for machines without a compiler. With SKUDA_TUNING, what its times choose is compiled too. Exits with 1 where
    a kernel does not compile.
    """


@_command("bundle", "ship.bundle", fields="FILE [--op NAME [--FIELD VALUE]...] [OPTIONS]")
def _bundle(
    context: typer.Context,
    *,
    ops: Ops = None,
    descriptors: Descriptors = None,
    archs: Archs = None,
    devices: Cards = None,
    backends: Compilers = None,
    show: Annotated[bool, typer.Option("--show", help="Say what FILE holds, and check it; compile nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Write compiled kernels into one file, to be shipped.

    Takes what `skuda compile` takes, compiles what is not in the cache yet, and writes exactly that into FILE, which
    comes first. A machine whose SKUDA_BUNDLE names a copy of FILE runs from it, with a driver, but without nvcc and
    NVRTC. FILE is code; docs/shipping.md says how a machine accepts no other. Exits with 1, and writes nothing, where a
    kernel does not compile; with --show, where a checksum is wrong.
    """


@_command("lock", "ship.lock")
def _lock(
    *,
    descriptors: Descriptors = None,
    devices: Annotated[Words, _option("NAME", "For these, such as cpu,h200; else every known one.", "--device")] = None,
    output: Annotated[Path | None, _option("FILE", "Write it here.")] = None,
) -> None:
    """Write down what is registered and selected.

    One line for every kernel, and one for every problem and device: the kernel that it gets, its place in the ranking,
    and the time that its launch rule predicts. Needs no GPU. Without --descriptors, the problems are some cases of
    every op and those of `skuda bench`. `skuda diff` compares two such files.
    """


@_command("diff", "ship.diff")
def _diff(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="What `skuda lock` wrote before.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="What it writes now.")],
    *,
    show_all: Annotated[bool, typer.Option("--all", help="Every difference, not the first of each kind.")] = False,
    as_json: Json = False,
) -> None:
    """Say which problems get another kernel, promise or speed.

    Exits with 0 where nothing differs, with 1 where anything does. Piped, each line is a record with tabs between
    kind, op, what, old and new. Predicted times count where they differ by more than a factor of 1.25.
    """


@_cache.callback(invoke_without_command=True)
def _cache_root(context: typer.Context) -> None:
    """Look after the cache of compiled kernels."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@_command("cache ls", "ship.cache:show")
def _cache_ls(*, as_json: Json = False) -> None:
    """List what is in the cache.

    Piped, each line is a record with tabs between kernel, arch, compiler, bytes, seconds of age, trouble and path.
    """


@_command("cache verify", "ship.cache:verify")
def _cache_verify(*, as_json: Json = False) -> None:
    """Check every checksum.

    Lists what would not be used. Exits with 1 where there is any.
    """


@_command("cache gc", "ship.cache:gc")
def _cache_gc(
    *,
    max_size: Annotated[
        str | None, _option("SIZE", "Remove the oldest until the rest fits into this, such as 1GiB.")
    ] = None,
    older_than: Annotated[str | None, _option("AGE", "Remove what was compiled longer ago, such as 30d.")] = None,
) -> None:
    """Remove what is old or too much."""


@_command("cache clear", "ship.cache:clear")
def _cache_clear(*, yes: Annotated[bool, typer.Option("--yes", help="Without asking.")] = False) -> None:
    """Remove everything."""


@_command("doctor", "show.doctor")
def _doctor(*, as_json: Json = False) -> None:
    """Check this machine, and name what fixes it."""


@app.command("demo")
def _demo(
    *,
    plot: Annotated[
        Path | None, _option("PNG", "Where the plot of the error per layer goes, else skuda-demo.png.")
    ] = None,
    device: Annotated[
        str, _option("WHERE", "Where the products run: host, gpu, or a GPU where one is usable.")
    ] = "auto",
    framework: Annotated[str | None, _option("NAME", "What runs the encoder: numpy, or torch; else numpy.")] = None,
    gpus: Annotated[
        int | None, _option("N", "Hash a transformer stack on 1 to N GPUs, or processes of the CPU, instead.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Run a real sentence encoder in int8, and in f32.

    The arithmetic is the same to the bit on the host and on a GPU; the report says where it ran.

    With --gpus, show that a stack of transformer blocks in int8 has the same bits on every number of ranks, in every
    batch, on the CPU and on GPUs, and bf16 has not. Exits with 1 where int8 has not, either.
    """
    from skuda.tools.output import stdout

    if gpus is not None:
        from skuda.tools.ranks.command import demo as hashes

        others = {"--plot": plot, "--framework": framework}
        return hashes(gpus, as_json=as_json, console=stdout(), device=device, others=others)
    from skuda.tools.demo.command import demo

    return demo(
        plot=plot or Path("skuda-demo.png"),
        as_json=as_json,
        console=stdout(),
        device=device,
        framework=framework or "numpy",
    )
