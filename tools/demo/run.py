"""The main job: a real sentence encoder in int8, compared with itself in f32.

1. Embed both halves of the sentences in f32; while doing so, observe the activations of the calibration half.
2. Search alpha on the calibration half alone. That half is halved again and each quarter is scored with ranges that
   only the other has set, so that clipping counts against an alpha, as it will on sentences never seen.
3. Quantize all linear layers, once for each way, and embed the held-out half with every product dispatched by its
   descriptor.
4. Run the held-out half once more in f32 and give every layer's input to every way too: each layer's own error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from skuda.dispatch import Dispatcher
from skuda.registry.errors import InvalidProblem, MissingDependency, SkudaError
from skuda.tools.demo.encoder import Encoder, Model, label_of, load_model
from skuda.tools.demo.metrics import Power, cosine, power, ranking_agreement
from skuda.tools.demo.placed import device_of, placed
from skuda.tools.demo.plot import draw
from skuda.tools.demo.render import render, verdict
from skuda.tools.demo.result import DemoResult, LayerResult, WayResult
from skuda.tools.demo.ways import (
    COARSE_ALPHAS,
    F32,
    Advance,
    Tokens,
    Way,
    batches,
    embed,
    observe,
    prepare_ways,
    search_alpha,
    union,
)
from skuda.tools.smoothquant import Int8Layer

Track = Callable[[str, int], Advance]
"""``track(stage, steps)`` opens a stage of the work and returns what is called after each of its steps."""

SPLIT = "odd lines of prose.txt calibrate, even lines are held out"


def run_demo(
    model: Model,
    sentences: Sequence[str],
    dispatcher: Dispatcher,
    *,
    plot: Path,
    track: Track = lambda _stage, _steps: lambda: None,
) -> DemoResult:
    """Do the whole job and return everything measured; neither prints nor draws.

    Parameters
    ----------
    model : Model
    sentences : sequence of str
        Every second one, from the first, calibrates; at least 4 to calibrate and 3 held out.
    dispatcher : Dispatcher
    plot : Path
        Noted in the result.
    track : Track
        Told of the progress.

    Raises
    ------
    InvalidProblem
        For too few sentences.
    SkudaError
        Where the dispatcher refuses an op.
    """
    if len(sentences) < 7:
        raise InvalidProblem("demo", "sentences", str(len(sentences)), "be at least 7: 4 to calibrate, 3 held out")
    started = perf_counter()
    encoder = model.encoder
    tokens = model.tokenize(sentences)
    calibration, held_out = tokens[0::2], tokens[1::2]

    advance = track("f32 and calibration", 3)
    begin = perf_counter()
    reference = embed(encoder, held_out, encoder.linear)
    f32_seconds = perf_counter() - begin
    advance()
    begin = perf_counter()
    parts = (observe(encoder, calibration[0::2], advance), observe(encoder, calibration[1::2], advance))
    calibration_seconds = perf_counter() - begin

    begin = perf_counter()
    search = search_alpha(encoder, dispatcher, parts, track("search for alpha", len(COARSE_ALPHAS) + 2))
    best = max(search, key=lambda score: score.mean_cosine)
    search_seconds = perf_counter() - begin

    ways = prepare_ways(encoder, dispatcher, union([part.ranges for part in parts]), best.alpha)
    advance = track("int8 on the held-out half", len(ways))
    way_results = []
    for way in ways:
        way_results.append(measure_way(encoder, dispatcher, way, held_out, reference))
        advance()
    layers = measure_layers(encoder, dispatcher, ways, held_out, track("error of each layer", len(batches(held_out))))
    return DemoResult(
        model=model.name,
        model_version=model.version,
        device=device_of(dispatcher).describe(),
        split=SPLIT,
        calibration_sentences=len(calibration),
        calibration_tokens=sum(map(len, calibration)),
        held_out_sentences=len(held_out),
        held_out_tokens=sum(map(len, held_out)),
        alpha=best.alpha,
        search=search,
        ways=tuple(way_results),
        layers=layers,
        f32_seconds=f32_seconds,
        calibration_seconds=calibration_seconds,
        search_seconds=search_seconds,
        total_seconds=perf_counter() - started,
        plot=str(plot),
    )


def measure_way(encoder: Encoder, dispatcher: Dispatcher, way: Way, held_out: Tokens, reference: F32) -> WayResult:
    """Embed the held-out half one way and compare it with its f32 embeddings."""
    begin = perf_counter()
    embeddings = embed(encoder, held_out, way.linear(dispatcher))
    run_seconds = perf_counter() - begin
    cosines = cosine(embeddings, reference)
    ranking = ranking_agreement(reference, embeddings)
    return WayResult(
        name=way.name,
        alpha=way.alpha,
        judged=way.judged,
        worst_cosine=float(cosines.min()),
        mean_cosine=float(cosines.mean()),
        worst_rank_correlation=ranking.worst,
        mean_rank_correlation=ranking.mean,
        same_nearest=ranking.top1,
        prepare_seconds=way.prepare_seconds,
        run_seconds=run_seconds,
    )


def measure_layers(
    encoder: Encoder, dispatcher: Dispatcher, ways: Sequence[Way], held_out: Tokens, advance: Advance
) -> tuple[LayerResult, ...]:
    """Measure each layer's own error, every way, on its f32 input, and ask which kernels serve its products."""
    powers: defaultdict[tuple[str, str], Power] = defaultdict(Power)

    def linear(name: str, x: F32) -> F32:
        y = encoder.linear(name, x)
        for way in ways:
            powers[name, way.name] += power(y, way.layers[name].run(dispatcher, x))
        return y

    embed(encoder, held_out, linear, advance)
    rows = [sum(len(held_out[i]) for i in batch) for batch in batches(held_out)]

    def skus(layer: Int8Layer) -> tuple[str, ...]:
        chosen = (dispatcher.select(layer.descriptor(m), device=device_of(dispatcher)).sku.id for m in rows)
        return tuple(dict.fromkeys(chosen))

    return tuple(
        LayerResult(
            name=name,
            label=label_of(name),
            n=encoder.weight(name).shape[0],
            k=encoder.weight(name).shape[1],
            skus={way.name: skus(way.layers[name]) for way in ways if way.judged},
            sqnr_db={way.name: powers[name, way.name].sqnr_db for way in ways},
        )
        for name in encoder.linear_names
    )


def read_sentences() -> list[str]:
    """Return the sentences of prose.txt."""
    return files(__package__).joinpath("prose.txt").read_text(encoding="utf-8").splitlines()


def demo(
    *,
    plot: Path,
    as_json: bool,
    console: Console,
    errors: Console | None = None,
    dispatcher: Dispatcher | None = None,
    device: str = "auto",
) -> int:
    """Run the job, print its report and write its plot.

    Parameters
    ----------
    plot : Path
        Where the PNG goes; its folder must exist.
    as_json : bool
        Print the whole result as JSON and nothing else.
    console : Console
        Gets the report.
    errors : Console, optional
        Gets the progress bar, if a terminal, and the one line of an error; standard error when not given.
    dispatcher : Dispatcher, optional
        A new one when not given.
    device : str
        Where the products run: ``host``, ``gpu``, or ``auto`` for a GPU where one is usable.

    Returns
    -------
    int
        Exit status: 0; 1 where the accuracy is below what is required; 2 where the job could not be done.
    """
    errors = errors or Console(stderr=True)
    try:
        if find_spec("matplotlib") is None:
            raise MissingDependency("matplotlib", "pip install 'matplotlib>=3.8'")
        if not plot.absolute().parent.is_dir():
            raise InvalidProblem("demo", "plot", str(plot), "lie in a folder that exists")
        chosen, note = placed(dispatcher or Dispatcher(), device)
        if note:
            errors.print(f"skuda demo: {note}", style="yellow", markup=False, highlight=False, soft_wrap=True)
        model = load_model()
        with _progress(errors) as track:
            result = run_demo(model, read_sentences(), chosen, plot=plot, track=track)
            draw(result, plot)
    except (SkudaError, OSError) as error:
        errors.print(f"skuda demo: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    if as_json:
        console.out(result.model_dump_json(indent=2), highlight=False)
        for way in result.below:
            errors.print(verdict(way, result.required_cosine))
    else:
        render(result, console)
    return 0 if result.passed else 1


@contextmanager
def _progress(console: Console) -> Iterator[Track]:
    """Show a bar for each stage while it runs; nothing where the console is no terminal."""
    columns = (TextColumn("{task.description:<26}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:

        def track(stage: str, steps: int) -> Advance:
            task = progress.add_task(stage, total=steps)
            return lambda: progress.advance(task)

        yield track
