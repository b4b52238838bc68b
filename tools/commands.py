"""The subcommands of ``skuda`` and their options.

Commands are declared here and run elsewhere: `_run` imports the module of a command when it runs, because help and
completion must be fast. What an option means is written once, in `OPTIONS`.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

import typer

USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[2]
"""ClickException, from click or from typer's own copy of it."""

EXAMPLES = {
    "list": "skuda list --device l4",
    "show": "skuda show quantized_linear",
    "explain": "skuda explain quantized_linear --m 8 --n 4096 --k 4096 --device h200",
    "verify": "skuda verify --device cpu --op fill --quick",
    "bench": "skuda bench linear --shapes llama-3-8b --m 16  # needs a GPU",
    "bench-model": "skuda bench-model --decode 16 --output model.json  # needs a GPU",
    "bench-parallel": "skuda bench-parallel --gpus 2  # needs a GPU",
    "tune": "skuda tune fill --numel 65536 --output tuning.json  # needs a GPU",
    "certify": "skuda certify qwen3 --plain  # needs transformers",
    "compile": "skuda compile --device h200 --op fill",
    "bundle": "skuda bundle kernels.skuda --device h200 --op fill",
    "lock": "skuda lock --device h200",
    "diff": "skuda diff old.lock.json skuda.lock.json",
    "cache ls": "skuda cache ls",
    "cache verify": "skuda cache verify",
    "cache gc": "skuda cache gc --max-size 1GiB",
    "cache clear": "skuda cache clear --yes",
    "doctor": "skuda doctor",
    "demo": "skuda demo --device host",
}
"""The example at the end of each command's help."""

REMOVED = {"train-check": "python docs/examples/policy.py"}
"""What does the work of commands that are gone."""

_COMMON: dict[str, Any] = {"rich_markup_mode": None, "context_settings": {"help_option_names": ["--help", "-h"]}}
app = typer.Typer(
    name="skuda",
    help="Which int8 kernels there are, which one runs where, and why.",
    pretty_exceptions_enable=False,
    **_COMMON,
)
_cache = typer.Typer(**_COMMON)
app.add_typer(_cache, name="cache")


def _command(name: str, target: str, options: str, text: str, *, fields: str = "", **settings: Any) -> None:
    """Make a subcommand of its help and the names of its options in `OPTIONS`; see `_run` for `target`.

    With `fields`, a usage line, the command also takes the fields of a problem as options. The op decides which they
    are, so they are not declared.
    """
    group, _, verb = name.rpartition(" ")
    if fields:
        settings["context_settings"] = {"ignore_unknown_options": True, "allow_extra_args": True}
        settings["options_metavar"] = fields
    settings["epilog"] = f"\b\nExample:\n  {EXAMPLES[name]}"

    def call(**given: Any) -> int:
        return _run(name, target, {option: value for option, value in given.items() if value is not None})

    kinds = {option: OPTIONS.get(f"{name} {option}") or OPTIONS[option] for option in options.split()}
    defaults = {str: Parameter.empty, Path: Parameter.empty, bool: False}
    call.__doc__ = text
    call.__signature__ = Signature(  # type: ignore[attr-defined]  # typer reads it
        [
            Parameter(option, Parameter.KEYWORD_ONLY, default=defaults.get(kind.__origin__), annotation=kind)
            for option, kind in kinds.items()
        ]
    )
    (_cache if group else app).command(verb, **settings)(call)


def _run(name: str, target: str, given: dict[str, Any]) -> int:
    """Run a command: the module `target` below ``skuda.tools`` has a ``run``, or `target` is ``module:function``.

    Words that are no declared options are passed as ``tokens``.
    """
    context: typer.Context | None = given.pop("context", None)
    if context is not None:
        words = context.args
        if given.pop("show_help", False):
            typer.echo(context.get_help())
            if not words:
                return 0
            given = {"show_fields": True}
        own = (option for param in context.command.params for option in param.opts)
        given |= {"tokens": words, "own_options": [option.lstrip("-").replace("-", "_") for option in own]}
    if "output" in given and name != "lock":  # it checks its file itself, which may be -
        import_module("skuda.tools.files").check(name, "--output", given["output"])
    module, _, function = target.partition(":")
    command = import_module(f"skuda.tools.{module}")
    status: int = getattr(command, function or "run")(**given)
    return status


_MOST = (1 << 63) - 1
"""The largest integer that a record takes."""

Words = list[str] | None


def _option(metavar: str | None, text: str, *names: str, kind: Any = str | None, **limits: Any) -> Any:
    """Declare an option that takes a value."""
    return Annotated[kind, typer.Option(*names, help=text, metavar=metavar, **limits)]


_words = partial(_option, kind=Words)
_path = partial(_option, kind=Path | None)


def _number(text: str, metavar: str = "N", least: int = 1, most: int = (1 << 31) - 1) -> Any:
    return _option(metavar, text, kind=int | None, min=least, max=most)


def _flag(name: str, text: str) -> Any:
    return Annotated[bool, typer.Option(name, help=text)]


def _argument(kind: Any, metavar: str, text: str) -> Any:
    return Annotated[kind, typer.Argument(metavar=metavar, help=text)]


OPTIONS: dict[str, Any] = {
    "context": Annotated[typer.Context, None],
    "as_json": _flag("--json", "JSON, for machines."),
    "ops": _words("NAME", "Only these ops.", "--op"),
    "elements": _words("KIND", "Only kernels for these elements.", "--element", "--elem"),
    "skus": _flag("--skus", "One line per kernel: its id."),
    "evidence": _path("DIR", "Read records of `skuda verify` from this folder.", "--evidence"),
    "descriptors": _path("FILE", "For these problems: JSON objects with `op` and its fields.", "--descriptors"),
    "show_all": _flag("--all", "List everything, not the first of each kind."),
    "archs": _words("ARCH", "For the known cards of these, such as sm_90a,sm_80.", "--arch"),
    "devices": _words("NAME", "For these cards, such as h200,l4; else those here.", "--device"),
    "backends": _words("NAME", "For these: cuda_core, pycuda, all; else those here.", "--backend"),
    "list archs": _words("ARCH", "Only kernels for these architectures.", "--arch"),
    "list devices": _words("NAME", "Only kernels that run on these cards, such as l4.", "--device"),
    "list backends": _words("NAME", "Only kernels of these backends.", "--backend"),
    "show name": _argument(str, "ID", "The id of a kernel, or the name of an op."),
    "explain device": _option("NAME", "Plan for here (without it), cpu, h200, l4, sm_89 ..."),
    "backend": _option("NAME", "Insist on this backend.", "--backend", "--prefer-backend"),
    "sku": _option("ID", "Insist on this kernel."),
    "require": _words("PROMISE", "Insist on a promise, such as deterministic,max_ulp=0."),
    "max_workspace_bytes": _option("BYTES", "Refuse kernels that need more scratch.", kind=int | None),
    "no_arch_specific": _flag("--no-arch-specific", "Refuse kernels for one chip or family only (sm_90a)."),
    "tuning": _path("FILE", "Use these measured times; else those that SKUDA_TUNING names."),
    "shards": _words("FIELD=VALUE", "Split a linear layer over ranks: axis=k,count=2, and input, output, chunks."),
    "show_help": Annotated[bool, typer.Option("--help", "-h", help="This page; after an op's name, its fields too.")],
    "bundle show": _flag("--show", "Check FILE and say what it holds; compile nothing."),
    "lock devices": _words("NAME", "For these, such as cpu,h200; else one of each kind.", "--device"),
    "lock output": _path("FILE", "Write it here, else into skuda.lock.json; - prints it."),
    "diff old": _argument(Path, "OLD", "What `skuda lock` wrote before."),
    "diff new": _argument(Path, "NEW", "What it writes now."),
    "max_size": _option("SIZE", "Remove the oldest until the rest fits into this, such as 1GiB."),
    "older_than": _option("AGE", "Remove what was compiled longer ago, such as 30d."),
    "yes": _flag("--yes", "Without asking."),
    "demo device": _option("WHERE", "Where the products run: host or gpu; else a GPU where one is usable."),
    "certify model": _argument(str, "MODEL", "What transformers loads; or llama, mistral, qwen2, qwen3."),
    "certify device": _option("WHERE", "gpu or host; else a GPU where torch sees one."),
    "ranks": _number("Ranks that share the layers; 2 on the CPU, or all GPUs, if left out."),
    "certify batch": _number("Sequences of the largest batch; 16 if left out.", least=2),
    "cpu_layers": _number("Layers that a GPU shares with the CPU; all of small models, or 2, if left out.", "LAYERS"),
    "certify layers": _number("The first layers of the model; all if left out.", "LAYERS"),
    "certify prompts": _number("Prompts, of 5 that are drawn; all if left out.", most=5),
    "plain": _flag("--plain", "Show the model in floating point beside it."),
    # Measurements and verification.
    "seed": _number("Draw inputs from this; fresh if left out.", least=0, most=_MOST),
    "output": _path("FILE", "Write the record here."),
    "markdown": _option("SECTION", "Print one section as Markdown tables, or all; another word lists them."),
    "show": _path("FILE", "Show this record; measure nothing."),
    "repeats": _number("Rounds, 20 if left out; slow kernels get fewer.", most=_MOST),
    "random": _number("Products of this many shapes drawn from the seed.", "COUNT", most=9999),
    "element": _words("KIND", "These elements: f16, bf16, f32, f64.", "--element"),
    "cpu": _flag("--cpu", "On the CPU, without CUDA graphs, for small sizes."),
    "verify skus": _words("ID", "Only these kernels.", "--sku"),
    "verify backends": _words("NAME", "Only these backends.", "--backend"),
    "cases": _option("N", "Only these cases, as failures number them.", "--case", kind=list[int] | None, min=0),
    "verify device": _option("WHERE", "A CUDA device by its number, or cpu; else the first one."),
    "quick": _flag("--quick", "A spot check of every kernel."),
    "bench ops": _argument(Words, "[OPS]...", "Ops, or quantize, linear, cache, logits, all; all if left out."),
    "bench shapes": _words(
        "SHAPE",
        "ROWSxCOLUMNS, MxNxK for a product, SEQUENCESxNEWxKEYSxHEAD_SIZE on a cache, a file of these, "
        "or llama-3-8b, llama-3-70b, minilm.",
    ),
    "m": _words("ROWS", "Numbers of rows for a model's shapes.", "--m"),
    "rivals": _words("NAME", "Only these rivals; cutlass, vllm and bf16 at random shapes."),
    "cutlass": _path("FOLDER", "Compare products with CUTLASS, built into this folder."),
    "vllm": _path("LIBRARY", "Compare with the kernels of this library, or package, of vLLM."),
    "bench-model hidden": _number("Size of the hidden states; 4096 if left out.", least=2),
    "bench-model intermediate": _number("Size between the products of the MLP; 14336 if left out."),
    "heads": _number("Heads of the attention; 32 if left out."),
    "kv_heads": _number("Heads of keys and values; 8 if left out."),
    "bench-model layers": _number("Layers; 32 if left out."),
    "cache": _number("Positions of the cache in decoding; 1024 if left out."),
    "decode": _words("ROWS", "Decode so many sequences; 1,16,64 if no phase is given."),
    "prefill": _words("ROWS", "Prefill so many positions; 2048,8192 if no phase is given."),
    "ways": _words("NAME", "Only these ways beside ours and bf16, such as torchao."),
    "only": _words("PART", "Measure only these: phases, generate, host."),
    "bench-parallel gpus": _number("Ranks, each with a GPU; 2 if left out.", most=1024),
    "rows": _words("M", "Numbers of rows; 1,2,3,16,128,2048,8192 if left out."),
    "bench-parallel hidden": _number("Size of the hidden states; 8192 if left out."),
    "bench-parallel intermediate": _number("Size between the products; 28672 if left out."),
    "tune shapes": _words("SHAPE", "These shapes: ROWSxCOLUMNS, or MxNxK for a product."),
    "tune backend": _option("NAME", "Only kernels of this backend."),
    "variant": _words("NAME", "Only kernels of these variants."),
    "tune output": _path("FILE", "Write the times here."),
    "update": _flag("--update", "Add new problems to a file that exists."),
    "margin": _option("PERCENT", "A kernel must be so much faster than the first one; else 3.", kind=float | None),
    "tune layers": _number("Launch a kernel so often in a graph, as layers of a model; 1 if left out.", most=99),
}
"""The options by parameter; ``COMMAND PARAMETER`` where a command means something of its own by it."""


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


_command(
    "list",
    "show.list",
    "ops elements archs devices backends skus evidence as_json",
    """List the ops, or every kernel.

    Filters may be repeated and may hold several values, separated by commas. An architecture or a card without kernels
    of its own lists the older ones that run on it. Piped, each line is a record with tabs between op, category,
    elements, second elements, archs, backends, number of kernels, promise and evidence.
    """,
)
_command("show", "show.show", "name evidence as_json", "Show everything about a kernel or an op.")
_command(
    "explain",
    "show.explain",
    "context device backend sku require max_workspace_bytes no_arch_specific tuning shards show_all as_json show_help",
    """Say which kernel would run, and why the others would not.

    Every field of the op is an option. Exits with 1 where no kernel serves the problem.
    """,
    fields="OP [--FIELD VALUE]... [OPTIONS]",
    add_help_option=False,
)
_command(
    "verify",
    "verify.command",
    "ops skus backends cases device quick seed output as_json",
    """Run every kernel against its reference.

    Runs one kernel of each source over many problems, in several memory layouts between guard zones, again, with its
    rows permuted, and in every way to call it. The other kernels run over the cases of their op and a sample of the
    rest. Without filters, on a CUDA device and in a checkout, the record goes to docs/evidence. Exits with 1 where a
    kernel fails.

    A failure names the command that repeats it, such as `skuda verify --device 0 --sku ID --case 3 --seed 7`.
    """,
)
_command(
    "bench",
    "bench.bench",
    "ops shapes m random element rivals backend seed repeats cutlass vllm output show markdown as_json",
    """Measure the kernels that are chosen, against rivals.

    Needs a CUDA device and torch. Results are compared before they are timed; a wrong one is refused, and the exit
    status is 1. Rivals are timed alternately with the kernel, after a flush of the cache; absent ones are named.
    CUTLASS takes part where --cutlass names a folder of its built objects; else the record says what builds them. The
    int8 kernels of vLLM take part where --vllm names its library.
    """,
)
_command(
    "bench-model",
    "studies.commands:run_model",
    "hidden intermediate heads kv_heads layers cache decode prefill ways only cpu repeats seed output show "
    "markdown as_json",
    """Time a Llama stack: in bf16, quantized, and by others.

    The weights are random. Needs torch and a CUDA device; each way is a replay of a CUDA graph. The outputs of ours,
    eager, compiled and captured, are compared bit for bit; where they differ, nothing is timed, and the exit status is
    1. Ways whose packages are not installed are named. With transformers, a model of at most 8 layers also generates,
    in bf16 and in int8, with each kind of cache. Calls of small layers are timed on the host alone. --only measures
    one of these.
    """,
)
_command(
    "bench-parallel",
    "studies.commands:run_parallel",
    "gpus rows hidden intermediate cpu repeats seed output show markdown as_json",
    """Time a gated MLP on one GPU and on several.

    In bf16 and in int8, as replays of CUDA graphs with NCCL's collectives in them; the time of a round is that of the
    slowest rank. The weights are random. Before, the outputs in int8 on all ranks, called, replayed and compiled, are
    compared bit for bit with those on one, and a few rows with NumPy; where they differ, nothing is timed, and the exit
    status is 1. Needs torch.
    """,
)
_command(
    "tune",
    "bench.tune_command",
    "context shapes random element backend variant output update margin repeats layers seed show as_json",
    """Time every kernel of a problem, in each configuration.

    The problems are shapes of ops, as in `skuda bench`, or one with its fields:
    `skuda tune quantized_linear --m 8 --n 4096 --k 4096`. Results are compared before they are timed; a wrong one is
    refused, and the exit status is 1. Without --output, the times are only printed. A file changes a choice only where
    it is named: by SKUDA_TUNING, or as Dispatcher(tuning=FILE); `skuda explain` says how.
    """,
    fields="OP... [--FIELD VALUE]... [OPTIONS]",
)
_command(
    "certify",
    "studies.certify",
    "model device ranks batch cpu_layers layers prompts plain seed output as_json",
    """Show that a model has the same bits in every way.

    Makes the model exact, and computes the log-probabilities of random prompts alone, step by step, in chunks, padded,
    in batches, after a shared prefix, compiled, on ranks, in training and, from a GPU, captured and on the CPU. Prints
    a hash of each way and, without a terminal, a line as each ends; the record of --output grows with them. Exits with
    1 where one differs, and names the first layer, op and row. The models named llama, mistral, qwen2 and qwen3 are
    small and random, and so is one whose folder has only a config. Needs transformers.
    """,
)
_command(
    "compile",
    "ship.compile",
    "context ops descriptors archs devices backends as_json",
    """Fill the cache of compiled kernels ahead of time.

    Needs a compiler, but no GPU and no driver. Compiles what the cards would look for: every kernel that fits, in each
    configuration that the cases of its op lead to; or what the problems of --descriptors need; or one problem, with its
    fields after `--op NAME`. With SKUDA_TUNING, it also compiles what the measured times choose. Exits with 1 where a
    kernel does not compile.
    """,
    fields="[--op NAME [--FIELD VALUE]...] [OPTIONS]",
)
_command(
    "bundle",
    "ship.bundle",
    "context ops descriptors archs devices backends show as_json",
    """Write compiled kernels into one file, to be shipped.

    Takes the options of `skuda compile`, compiles what is not in the cache yet, and writes exactly that into FILE,
    which comes first. A machine whose SKUDA_BUNDLE names a copy of FILE runs from it, with a driver, but without nvcc
    and NVRTC. FILE is code; docs/shipping.md says how a machine accepts no other. Exits with 1, and writes nothing,
    where a kernel does not compile. With --show, exits with 1 where loading would refuse a kernel.
    """,
    fields="FILE [--op NAME [--FIELD VALUE]...] [OPTIONS]",
)
_command(
    "lock",
    "ship.lock",
    "descriptors devices output",
    """Write down the kernels, and which problem gets which.

    One line for every kernel, and one for every problem: on each device the kernel that it gets, its place in the
    ranking, and the time that its launch rule predicts. Needs no GPU. Without --descriptors, the problems are some
    cases of every op and those of `skuda bench`. `skuda diff` compares two such files.
    """,
)
_command(
    "diff",
    "ship.diff",
    "old new show_all as_json",
    """Say which problems get another kernel, promise or speed.

    Exits with 0 where nothing differs, with 1 where anything does. Piped, each line is a record with tabs between
    kind, op, what, old and new. Predicted times count where they differ by more than a factor of 1.25.
    """,
)


@_cache.callback(invoke_without_command=True)
def _cache_root(context: typer.Context) -> None:
    """Look after the cache of compiled kernels."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


_command(
    "cache ls",
    "ship.cache:show",
    "as_json",
    """List what is in the cache.

    Piped, each line is a record with tabs between kernel, arch, compiler, bytes, seconds of age, trouble and path.
    """,
)
_command("cache verify", "ship.cache:verify", "as_json", "Check every checksum; exit with 1 where one is wrong.")
_command("cache gc", "ship.cache:gc", "max_size older_than", "Remove what is old or too much.")
_command("cache clear", "ship.cache:clear", "yes", "Remove everything.")
_command(
    "doctor",
    "show.doctor",
    "as_json",
    """Check this machine, and name what fixes it.

    Exits with 1 where a required part is missing, and where a bundle, a tuning file or the cache cannot be used.
    """,
)
_command(
    "demo",
    "demo.command:demo",
    "device as_json",
    """Run a real sentence encoder in int8, and in f32.

    The arithmetic is the same to the bit on the host and on a GPU; the report says where it ran.
    """,
)
