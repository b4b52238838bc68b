"""The ``skuda`` command. Each subcommand lives in a module of its own, imported when it runs: help must be fast."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[2]
"""ClickException, from click or from typer's own copy of it, whichever this typer uses."""

_NO, _BAD_INPUT, _INTERRUPTED = 1, 2, 130

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

Json = Annotated[bool, typer.Option("--json", help="JSON, for machines.")]
Evidence = Annotated[
    Path | None, typer.Option("--evidence", help="Read records of `skuda verify` from this folder.", metavar="DIR")
]
Html = Annotated[
    Path | None, typer.Option(help="Write a page with op matrix, evidence and measurements.", metavar="FILE")
]
Some = list[str]

Ops = Annotated[Some | None, typer.Option("--op", help="Only these ops.", metavar="NAME")]
Descriptors = Annotated[
    Path | None,
    typer.Option("--descriptors", help="For these problems: JSON objects with `op` and its fields.", metavar="FILE"),
]
Archs = Annotated[
    Some | None, typer.Option("--arch", help="For the known cards of these, such as sm_90a,sm_80.", metavar="ARCH")
]
Devices = Annotated[
    Some | None, typer.Option("--device", help="For these cards, such as h200,a100; else those here.", metavar="NAME")
]
Backends = Annotated[
    Some | None,
    typer.Option(
        "--backend", help="For these: cuda_core, pycuda, all; else those with a compiler here.", metavar="NAME"
    ),
]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Parameters
    ----------
    arguments : sequence of str, optional
        What stands behind ``skuda``; the process's own arguments when not given.

    Returns
    -------
    int
        0; 1 where the answer is no (no kernel, a required part missing, accuracy not reached); 2 for bad input, which
        is told in one line on standard error.
    """
    command = typer.main.get_command(app)
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = command.main(args=given, prog_name="skuda", standalone_mode=False)
        sys.stdout.flush()
    except _USAGE_ERROR as error:
        message = getattr(error, "format_message", error.__str__)()
        context = getattr(error, "ctx", None)
        where = context.command_path if context is not None else "skuda"
        return _fail(f"{message} (see `{where} --help`)")
    except (typer.Abort, KeyboardInterrupt):
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader has gone (`skuda list | head`). Nothing is left to say, at exit neither.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _NO
    except ImportError as error:
        if given[:1] == ["doctor"]:
            # The doctor can do without everything else, also without what typer needs.
            from skuda.tools import doctor

            return doctor.run(as_json="--json" in given)
        return _fail(str(error) if hasattr(error, "command") else f"{error}; `skuda doctor` says what is missing")
    except Exception as error:
        # A SkudaError is an answer; its class is looked up late because importing it takes pydantic.
        from skuda.registry.errors import SkudaError

        if not isinstance(error, SkudaError):
            raise
        return _fail(str(error))
    return int(status or 0)


def _fail(message: str) -> int:
    """Say what was wrong in one line."""
    from skuda.tools.output import stderr

    stderr().print(f"skuda: {' '.join(message.split())}", style="red", soft_wrap=True)
    return _BAD_INPUT


def _own_options(context: typer.Context) -> Some:
    return [name.lstrip("-").replace("-", "_") for param in context.command.params for name in param.opts]


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


@app.command("list")
def _list(
    *,
    op: Annotated[Some | None, typer.Option(help="Only these ops.", metavar="NAME")] = None,
    element: Annotated[Some | None, typer.Option(help="Only kernels for these elements.", metavar="KIND")] = None,
    aux: Annotated[
        Some | None, typer.Option(help="Only these second elements; `none` for kernels without.", metavar="KIND")
    ] = None,
    arch: Annotated[Some | None, typer.Option(help="Only these architectures.", metavar="ARCH")] = None,
    backend: Annotated[Some | None, typer.Option(help="Only these backends.", metavar="NAME")] = None,
    skus: Annotated[bool, typer.Option("--skus", help="One line per kernel: its id.")] = False,
    matrix: Annotated[
        bool, typer.Option("--matrix", help="Ops by backends with what is verified, as a Markdown table.")
    ] = False,
    into: Annotated[
        Path | None, typer.Option(help="Put that table into this file, between its markers.", metavar="FILE")
    ] = None,
    html: Html = None,
    evidence: Evidence = None,
    as_json: Json = False,
) -> int:
    """Show the op matrix, or every kernel.

    Filters may be repeated and may hold several values, separated by commas. Piped, each line is a record with tabs
    between op, category, elements, second elements, archs, backends, number of kernels and promise.
    """
    from skuda.tools import listing

    return listing.run(
        ops=op or (),
        elements=element or (),
        aux=aux or (),
        archs=arch or (),
        backends=backend or (),
        skus=skus,
        matrix=matrix,
        into=into,
        html=html,
        evidence=evidence,
        as_json=as_json,
    )


@app.command("show")
def _show(
    name: Annotated[str, typer.Argument(metavar="ID", help="The id of a kernel, or the name of an op.")],
    *,
    evidence: Evidence = None,
    as_json: Json = False,
) -> int:
    """Show everything about a kernel or an op."""
    from skuda.tools import showing

    return showing.run(name, evidence=evidence, as_json=as_json)


@app.command(
    "explain",
    # The fields of the op are options too; which ones there are is known when the op is.
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    add_help_option=False,
    options_metavar="OP [--FIELD VALUE]... [OPTIONS]",
)
def _explain(
    context: typer.Context,
    *,
    device: Annotated[
        str, typer.Option(help="Plan for this device: here, cpu, or a card such as h200.", metavar="NAME")
    ] = "here",
    prefer_backend: Annotated[str | None, typer.Option(help="Insist on this backend.", metavar="NAME")] = None,
    sku: Annotated[str | None, typer.Option(help="Insist on this kernel.", metavar="ID")] = None,
    require: Annotated[
        Some | None, typer.Option(help="Insist on a promise, such as deterministic,max_ulp=0.", metavar="PROMISE")
    ] = None,
    max_workspace_bytes: Annotated[
        int | None, typer.Option(help="Refuse kernels that need more scratch.", metavar="BYTES")
    ] = None,
    no_arch_specific: Annotated[
        bool, typer.Option("--no-arch-specific", help="Refuse kernels for one chip or family only (sm_90a).")
    ] = False,
    tuning: Annotated[
        Path | None,
        typer.Option(help="Use these measured times; else those that SKUDA_TUNING names.", metavar="FILE"),
    ] = None,
    show_all: Annotated[bool, typer.Option("--all", help="List every refused kernel.")] = False,
    as_json: Json = False,
    show_help: Annotated[
        bool, typer.Option("--help", "-h", help="This page; behind an op's name, the op's fields too.")
    ] = False,
) -> int:
    """Say which kernel would run, and why the others would not.

    Every field of the op is an option: `skuda explain quantized_linear --m 8 --c-out 4096 --k 4096 --device h200`.
    Exits with 1 where no kernel serves the problem.
    """
    if show_help:
        typer.echo(context.get_help())
        if not context.args:
            return 0
    from skuda.tools import explaining

    if show_help:
        return explaining.show_fields(context.args[0])
    wishes = explaining.Wishes(
        device=device,
        backend=prefer_backend,
        sku=sku,
        require=tuple(require or ()),
        max_workspace_bytes=max_workspace_bytes,
        allow_arch_specific=not no_arch_specific,
    )
    own = _own_options(context)
    return explaining.run(context.args, wishes, tuning=tuning, own_options=own, show_all=show_all, as_json=as_json)


@app.command("verify")
def _verify(
    *,
    op: Annotated[Some | None, typer.Option(help="Only these ops.", metavar="NAME")] = None,
    sku: Annotated[Some | None, typer.Option(help="Only these kernels.", metavar="ID")] = None,
    backend: Annotated[Some | None, typer.Option(help="Only these backends.", metavar="NAME")] = None,
    device: Annotated[
        str | None, typer.Option(help="A CUDA device by its number, or cpu; else the first one.", metavar="DEVICE")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer memory layouts, no large problems.")] = False,
    seed: Annotated[int | None, typer.Option(help="Draw inputs from this; fresh if left out.", min=0)] = None,
    output: Annotated[Path | None, typer.Option(help="Write the record here.", metavar="FILE")] = None,
    html: Html = None,
    as_json: Json = False,
) -> int:
    """Run every kernel against its reference.

    Runs each kernel that the device accepts over every case of its op: in several memory layouts between guard zones,
    again, and with its rows permuted. Without filters, on a CUDA device and in a checkout, the record goes to
    docs/evidence. Exits with 1 where a kernel fails.
    """
    from skuda.tools import verify_page

    return verify_page.run(
        ops=op or (),
        skus=sku or (),
        backends=backend or (),
        device=device,
        quick=quick,
        seed=seed,
        output=output,
        html=html,
        as_json=as_json,
    )


@app.command("bench")
def _bench(
    names: Annotated[
        Some | None, typer.Argument(metavar="[OPS]...", help="Ops, or quantize, linear, all; all if left out.")
    ] = None,
    *,
    op: Annotated[Some | None, typer.Option(help="Ops and groups too.", metavar="NAME")] = None,
    shapes: Annotated[
        Some | None,
        typer.Option(
            help="ROWSxCOLUMNS, MxNxK for a product, a file of these, or llama-3-8b, llama-3-70b, minilm.",
            metavar="SHAPE",
        ),
    ] = None,
    m: Annotated[Some | None, typer.Option("--m", help="Numbers of rows for a model's shapes.", metavar="ROWS")] = None,
    element: Annotated[Some | None, typer.Option(help="These elements: f16, bf16, f32, f64.", metavar="KIND")] = None,
    backend: Annotated[str | None, typer.Option(help="Insist on this backend.", metavar="NAME")] = None,
    seed: Annotated[int | None, typer.Option(help="Draw inputs from this; fresh if left out.", min=0)] = None,
    repeats: Annotated[int, typer.Option(help="Rounds; slow kernels get fewer.", min=1)] = 20,
    cutlass: Annotated[
        Path | None, typer.Option(help="Compare products with CUTLASS, built into this folder.", metavar="FOLDER")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the record here.", metavar="FILE")] = None,
    show: Annotated[Path | None, typer.Option(help="Show this record; measure nothing.", metavar="FILE")] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw it: into a folder, or one .png, .svg or .pdf.", metavar="PATH"),
    ] = None,
    html: Html = None,
    as_json: Json = False,
) -> int:
    """Measure the kernels that the dispatcher chooses, against rivals.

    Needs a CUDA device and torch. Results are compared before they are timed; a wrong one is refused, and the exit
    status is 1. Rivals run in turn with ours, behind a flushed cache; those that are absent are named. CUTLASS is here
    where --cutlass names a folder of its built objects; what builds them is told without it.
    """
    from skuda.tools import bench_page

    return bench_page.run(
        names=(*(names or ()), *(op or ())),
        shapes=shapes or (),
        m=m or (),
        elements=element or (),
        backend=backend,
        seed=seed,
        repeats=repeats,
        cutlass=cutlass,
        output=output,
        show=show,
        plot=plot,
        html=html,
        as_json=as_json,
    )


@app.command(
    "tune",
    # The fields of a problem are options too, as in `explain`.
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    options_metavar="OP... [--FIELD VALUE]... [OPTIONS]",
)
def _tune(
    context: typer.Context,
    *,
    shapes: Annotated[
        Some | None, typer.Option(help="These shapes: ROWSxCOLUMNS, or MxNxK for a product.", metavar="SHAPE")
    ] = None,
    element: Annotated[Some | None, typer.Option(help="These elements: f16, bf16, f32, f64.", metavar="KIND")] = None,
    backend: Annotated[str | None, typer.Option(help="Only kernels of this backend.", metavar="NAME")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write the times here; else a name after the device.", metavar="FILE")
    ] = None,
    update: Annotated[bool, typer.Option("--update", help="Take new problems into a file that is there.")] = False,
    margin: Annotated[
        float | None,
        typer.Option(help="Per cent by which a kernel must be faster than the first of the ranking; 3 if left out."),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Rounds; slow kernels get fewer.", min=1)] = 20,
    seed: Annotated[int | None, typer.Option(help="Draw inputs from this; fresh if left out.", min=0)] = None,
    show: Annotated[Path | None, typer.Option(help="Show this file; measure nothing.", metavar="FILE")] = None,
    as_json: Json = False,
) -> int:
    """Time every kernel that serves a problem, in each configuration.

    The problems are shapes of ops, as in `skuda bench`, or one with its fields:
    `skuda tune quantized_linear --m 8 --n 4096 --k 4096`. Results are compared before they are timed; a wrong one is
    refused, and the exit status is 1. The file changes a choice only where it is named: by SKUDA_TUNING, or as
    Dispatcher(tuning=FILE). Piped, each line is a record with tabs between op, problem, kernel, configuration, median,
    p10 and p90 in us, rounds, what would run (chosen by time, or first of the ranking), and what speaks against it.
    """
    from skuda.tools import tune_page

    return tune_page.run(
        context.args,
        shapes=shapes or (),
        elements=element or (),
        backend=backend,
        output=output,
        update=update,
        margin=margin,
        repeats=repeats,
        seed=seed,
        show=show,
        own_options=_own_options(context),
        as_json=as_json,
    )


@app.command(
    "compile",
    # The fields of a problem are options too, as in `explain`.
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    options_metavar="[--op NAME [--FIELD VALUE]...] [OPTIONS]",
)
def _compile(
    context: typer.Context,
    *,
    op: Ops = None,
    descriptors: Descriptors = None,
    arch: Archs = None,
    device: Devices = None,
    backend: Backends = None,
    as_json: Json = False,
) -> int:
    """Fill the cache of compiled kernels ahead of time.

    Needs a compiler, but no GPU and no driver. What is compiled is what the cards would look for: every kernel that
    fits, in each configuration that the cases of its op lead to, or those of a list (--descriptors), or one problem:
    `skuda compile --device h200 --op quantized_linear --m 8 --n 4096 --k 4096`. `skuda bundle` writes the same into one
    file, for machines without a compiler. With SKUDA_TUNING, what its times choose is compiled too. Exits with 1 where
    a kernel does not compile.
    """
    from skuda.tools import compile_page

    request = compile_page.Request(
        command="compile",
        tokens=context.args,
        descriptors=descriptors,
        ops=op or (),
        archs=arch or (),
        devices=device or (),
        backends=backend or (),
        own_options=_own_options(context),
    )
    return compile_page.run(request, as_json=as_json)


@app.command(
    "bundle",
    # The fields of a problem are options too, as in `explain`.
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    options_metavar="FILE [--op NAME [--FIELD VALUE]...] [OPTIONS]",
)
def _bundle(
    context: typer.Context,
    *,
    op: Ops = None,
    descriptors: Descriptors = None,
    arch: Archs = None,
    device: Devices = None,
    backend: Backends = None,
    show: Annotated[bool, typer.Option("--show", help="Say what FILE holds, and check it; compile nothing.")] = False,
    as_json: Json = False,
) -> int:
    """Write compiled kernels into one file, to be shipped.

    Takes what `skuda compile` takes, compiles what is not in the cache yet, and writes exactly that into FILE, which
    stands first. A machine whose SKUDA_BUNDLE names a copy of FILE runs from it, with a driver, but without nvcc and
    NVRTC. FILE is code; docs/shipping.md says how a machine takes no other. Exits with 1, and writes nothing, where a
    kernel does not compile; with --show, where a checksum is wrong.
    """
    from skuda.tools import bundle_page, compile_page

    file, *fields = context.args or [""]
    request = compile_page.Request(
        command="bundle",
        tokens=fields,
        descriptors=descriptors,
        ops=op or (),
        archs=arch or (),
        devices=device or (),
        backends=backend or (),
        own_options=_own_options(context),
    )
    return bundle_page.run(file, request, show=show, as_json=as_json)


@app.command("lock")
def _lock(
    *,
    descriptors: Descriptors = None,
    device: Annotated[
        Some | None, typer.Option(help="For these, such as cpu,h200; else every known one.", metavar="NAME")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write it here.", metavar="FILE")] = None,
) -> int:
    """Write down what is registered, and what is selected from it.

    One line for every kernel, and one for every problem and device: the kernel that it gets, its place in the ranking,
    and the time that its launch rule predicts. Needs no GPU. Without --descriptors, the problems are the cases of every
    op and those of `skuda bench`. `skuda diff` compares two such files.
    """
    from skuda.tools import lock_page

    return lock_page.run(descriptors=descriptors, devices=device or (), output=output)


@app.command("diff")
def _diff(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="What `skuda lock` wrote then.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="What it writes now.")],
    *,
    show_all: Annotated[bool, typer.Option("--all", help="Every difference, not the first of each kind.")] = False,
    as_json: Json = False,
) -> int:
    """Say which problems get another kernel, guarantee or speed class.

    Exits with 0 where nothing differs, with 1 where anything does. Piped, each line is a record with tabs between
    kind, op, what, old and new. Predicted times count where they differ by more than a factor of 1.25.
    """
    from skuda.tools import diff_page

    return diff_page.run(old, new, show_all=show_all, as_json=as_json)


@_cache.callback(invoke_without_command=True)
def _cache_root(context: typer.Context) -> None:
    """Look after the cache of compiled kernels."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@_cache.command("ls")
def _cache_ls(*, as_json: Json = False) -> int:
    """List what is in the cache.

    Piped, each line is a record with tabs between kernel, arch, compiler, bytes, seconds of age, trouble and path.
    """
    from skuda.tools import cache_page

    return cache_page.show(as_json=as_json)


@_cache.command("verify")
def _cache_verify(*, as_json: Json = False) -> int:
    """Check every checksum.

    Lists what would not be used. Exits with 1 where there is any.
    """
    from skuda.tools import cache_page

    return cache_page.verify(as_json=as_json)


@_cache.command("gc")
def _cache_gc(
    *,
    max_size: Annotated[
        str | None, typer.Option(help="Remove the oldest until the rest fits into this, such as 1GiB.", metavar="SIZE")
    ] = None,
    older_than: Annotated[
        str | None, typer.Option(help="Remove what was compiled longer ago, such as 30d.", metavar="AGE")
    ] = None,
) -> int:
    """Remove what is old or too much."""
    from skuda.tools import cache_page

    return cache_page.gc(max_size=max_size, older_than=older_than)


@_cache.command("clear")
def _cache_clear(*, yes: Annotated[bool, typer.Option("--yes", help="Without asking.")] = False) -> int:
    """Remove everything."""
    from skuda.tools import cache_page

    return cache_page.clear(yes=yes)


@app.command("doctor")
def _doctor(*, as_json: Json = False) -> int:
    """Check this machine, and name what fixes it."""
    from skuda.tools import doctor

    return doctor.run(as_json=as_json)


@app.command("demo")
def _demo(
    *,
    plot: Annotated[Path, typer.Option(help="Where the plot of the error per layer goes.", metavar="PNG")] = Path(
        "skuda-demo.png"
    ),
    device: Annotated[
        str, typer.Option(help="Where the products run: host, gpu, or a GPU where one is usable.", metavar="WHERE")
    ] = "auto",
    as_json: Json = False,
) -> int:
    """Run a real sentence encoder in int8, and in f32.

    The arithmetic is the same to the bit on the host and on a GPU; the report says where it ran.
    """
    from skuda.tools.demo.run import demo
    from skuda.tools.output import stdout

    return demo(plot=plot, as_json=as_json, console=stdout(), device=device)


if __name__ == "__main__":
    sys.exit(main())
