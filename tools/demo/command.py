"""The demo: a real sentence encoder in int8, compared with itself in f32.

1. Embed both halves of the sentences in f32, and observe the activations of the calibration half.
2. Search alpha on the calibration half alone. That half is split again, and each quarter is scored with the ranges of
   the other one, so that clipping counts against an alpha as it does for unseen sentences.
3. Quantize all linear layers in every way, and embed the held-out half with every product dispatched by its
   descriptor.
4. Run the held-out half again in f32, and pass every layer's input to every way as well, for each layer's own error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import TypeVar

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from skuda.dispatch import Dispatcher
from skuda.registry.errors import InvalidProblem, MissingDependency, SkudaError
from skuda.tools.demo.encoder import F32, Encoder, Layer, Model, label_of, load_model
from skuda.tools.demo.metrics import F64, cosine, powers, ranking_agreement, sqnr_db
from skuda.tools.demo.placed import device_of, placed
from skuda.tools.demo.plot import draw
from skuda.tools.demo.render import render, verdict
from skuda.tools.demo.result import DemoResult, LayerResult, WayResult
from skuda.tools.demo.ways import (
    COARSE_ALPHAS,
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
from skuda.tools.files import check
from skuda.tools.output import one_line, refuse

T = TypeVar("T")
Track = Callable[[str, int], Advance]
"""``track(stage, steps)`` opens a stage of the work and returns a function to call after each of its steps."""

FRAMEWORKS = ("numpy", "torch")
SPLIT = "odd lines of prose.txt calibrate, even lines are held out"


def run_demo(
    model: Model,
    sentences: Sequence[str],
    dispatcher: Dispatcher,
    *,
    plot: Path,
    track: Track = lambda _stage, _steps: lambda: None,
) -> DemoResult:
    """Run the whole demo and return all measurements; nothing is printed or drawn, and the plot's path is only noted.

    Every second sentence, from the first, calibrates. Raise `InvalidProblem` for fewer than 4 sentences to calibrate
    with or fewer than 3 held out.
    """
    if len(sentences) < 7:
        raise InvalidProblem("demo", "sentences", str(len(sentences)), "be at least 7: 4 to calibrate, 3 held out")
    started = perf_counter()
    encoder = model.encoder
    tokens = model.tokenize(sentences)
    calibration, held_out = tokens[0::2], tokens[1::2]

    advance = track("f32 and calibration", 3)
    reference, f32_seconds = _timed(lambda: embed(encoder, held_out, encoder.linear))
    advance()
    halves = calibration[0::2], calibration[1::2]
    (one, other), calibration_seconds = _timed(lambda: [observe(encoder, half, advance) for half in halves])
    advance = track("search for alpha", len(COARSE_ALPHAS) + 2)
    search, search_seconds = _timed(lambda: search_alpha(encoder, dispatcher, (one, other), advance))
    best = max(search, key=lambda score: score.mean_cosine)
    ways = prepare_ways(encoder, dispatcher, union([one.ranges, other.ranges]), best.alpha)
    advance = track("int8 on the held-out half", len(ways))
    way_results = []
    for way in ways:
        way_results.append(measure_way(encoder, dispatcher, way, held_out, reference))
        advance()
    layers = measure_layers(encoder, dispatcher, ways, held_out, track("error of each layer", len(batches(held_out))))
    return DemoResult(
        model=model.name,
        model_version=model.version,
        framework=model.encoder.framework,
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


def _timed(call: Callable[[], T]) -> tuple[T, float]:
    begin = perf_counter()
    return call(), perf_counter() - begin


def measure_way(encoder: Encoder, dispatcher: Dispatcher, way: Way, held_out: Tokens, reference: F32) -> WayResult:
    """Embed the held-out half in one way and compare it with its f32 embeddings."""
    embeddings, run_seconds = _timed(lambda: embed(encoder, held_out, way.linear(dispatcher)))
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
    """Measure each layer's own error on its f32 input in every way, and the kernels that serve its products."""
    sums: defaultdict[tuple[str, str], F64] = defaultdict(lambda: np.zeros(2))

    def linear(name: str, x: F32) -> F32:
        y = encoder.linear(name, x)
        for way in ways:
            sums[name, way.name] += powers(y, way.layers[name].run(dispatcher, x))
        return y

    embed(encoder, held_out, linear, advance)
    rows = [sum(len(held_out[i]) for i in batch) for batch in batches(held_out)]

    def skus(layer: Layer) -> tuple[str, ...]:
        chosen = (dispatcher.select(layer.descriptor(m), device=device_of(dispatcher)).sku.id for m in rows)
        return tuple(dict.fromkeys(chosen))

    return tuple(
        LayerResult(
            name=name,
            label=label_of(name),
            n=encoder.weight(name).shape[0],
            k=encoder.weight(name).shape[1],
            skus={way.name: skus(way.layers[name]) for way in ways if way.judged},
            sqnr_db={way.name: sqnr_db(*sums[name, way.name]) for way in ways},
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
    framework: str = "numpy",
) -> int:
    """Run the demo, print its report or its JSON, and write its plot.

    `errors`, standard error by default, gets the progress bar if it is a terminal, and error messages. `device` is
    where the products run: ``host``, ``gpu``, or ``auto`` for a GPU if one is usable. `framework` is what runs the
    model: ``numpy``, or ``torch`` for the model of transformers with the layers of `skuda.torch`. Return the exit
    status: 0; 1 if the accuracy is below the requirement; 2 if the demo could not run.
    """
    errors = errors or Console(stderr=True)
    try:
        if find_spec("matplotlib") is None:
            raise MissingDependency("matplotlib", "pip install 'matplotlib>=3.8'")
        check("demo", "--plot", plot)
        if framework not in FRAMEWORKS:
            refuse("demo", "--framework", framework, FRAMEWORKS)
        chosen, note = placed(dispatcher or Dispatcher(), device)
        if note:
            errors.print(f"skuda demo: {note}", style="yellow", markup=False, highlight=False, soft_wrap=True)
        model = load_model()
        if framework == "torch":
            from skuda.tools.demo.bert import BertEncoder

            model = replace(model, encoder=BertEncoder.of(model.encoder, device_of(chosen)))
        with _progress(errors) as track:
            result = run_demo(model, read_sentences(), chosen, plot=plot, track=track)
            draw(result, plot)
    except (SkudaError, OSError) as error:
        errors.print(f"skuda demo: {one_line(str(error))}", style="red", markup=False, highlight=False, soft_wrap=True)
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
    """Show a bar for each stage while it runs, if the console is a terminal."""
    columns = (TextColumn("{task.description:<26}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:

        def track(stage: str, steps: int) -> Advance:
            task = progress.add_task(stage, total=steps)
            return lambda: progress.advance(task)

        yield track
