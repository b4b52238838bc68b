"""The demo: a real sentence encoder in int8, compared with itself in f32.

1. Embed both halves of the sentences in f32, and observe the activations of the calibration half.
2. Search alpha on the calibration half alone. That half is split again, and each quarter is scored with the ranges of
   the other one, so that clipping counts against an alpha as it does for unseen sentences.
3. Quantize all linear layers in every way, and embed the held-out half with every product dispatched by its
   descriptor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from itertools import count
from time import perf_counter

import numpy as np
from pydantic import computed_field
from rich.console import Console
from rich.text import Text

from skuda.dispatch import Dispatcher
from skuda.registry.errors import InvalidProblem
from skuda.registry.value import Value
from skuda.tools.demo.encoder import F32, Encoder, Model, load_model
from skuda.tools.demo.placed import device_of, placed
from skuda.tools.demo.ways import (
    ALPHAS,
    Quantized,
    Step,
    Tokens,
    batches,
    cosine,
    dynamic_way,
    embed,
    observe,
    search_alpha,
    static_way,
)
from skuda.tools.output import plain_table, progress, tell

REQUIRED_COSINE = 0.99
"""Least cosine to the f32 embedding for every held-out sentence, for both judged ways."""
_STEPS = 3 + len(ALPHAS) + 3
"""Passes over sentences: in f32, in the search for alpha, and in int8."""


class WayResult(Value):
    """One way to quantize the linear layers, measured on the held-out half.

    `alpha` is the smoothing strength of a static way. Only a `judged` way must reach `REQUIRED_COSINE`. Cosines are
    to the f32 embedding of the same sentence, and `skus` are the kernels of the products.
    """

    name: str
    alpha: float | None
    judged: bool
    worst_cosine: float
    mean_cosine: float
    run_seconds: float
    skus: tuple[str, ...]


class DemoResult(Value):
    """The whole run; `search` has the mean cosine of calibration sentences for each alpha, and `alpha` is the best."""

    model: str
    model_version: str
    device: str
    calibration_sentences: int
    held_out_sentences: int
    linear_layers: int
    alpha: float
    search: dict[float, float]
    ways: tuple[WayResult, ...]
    f32_seconds: float
    total_seconds: float
    required_cosine: float = REQUIRED_COSINE

    @computed_field  # type: ignore[prop-decorator]
    @property
    def passed(self) -> bool:
        """Whether every judged way keeps every held-out sentence at `required_cosine` or above; NaN fails."""
        return all(way.worst_cosine >= self.required_cosine for way in self.ways if way.judged)

    def verdicts(self) -> Iterator[Text]:
        """Yield a line for every judged way; a cosine that is NaN fails."""
        for way in self.ways:
            if way.judged:
                passed = way.worst_cosine >= self.required_cosine
                word, sign = ("PASS", ">=") if passed else ("FAIL", "is below")
                text = f"{word}  {way.name}: worst cosine {way.worst_cosine:.4f} {sign} {self.required_cosine:g}"
                yield Text(text, style="green" if passed else "bold red")


def demo(*, as_json: bool, console: Console, device: str = "auto") -> int:
    """Run the demo, and print its report or its JSON.

    `device` is where the products run: ``host``, ``gpu``, or ``auto`` for a GPU if one is usable. Return the exit
    status: 0; 1 if the accuracy is below the requirement.
    """
    dispatcher, note = placed(Dispatcher(), device)
    if note:
        tell(f"demo: {note}")
    model = load_model()
    with _progress() as step:
        result = run_demo(model, read_sentences(), dispatcher, step)
    if as_json:
        console.out(result.model_dump_json(indent=2), highlight=False)
        for line in result.verdicts():
            tell(str(line), "dim")
    else:
        print_result(result, console)
    return 0 if result.passed else 1


def run_demo(
    model: Model, sentences: Sequence[str], dispatcher: Dispatcher, step: Step = lambda _stage: None
) -> DemoResult:
    """Run the whole demo and return all measurements; nothing is printed.

    Every second sentence, from the first, calibrates. Raise `InvalidProblem` for fewer than 4 sentences to calibrate
    with or fewer than 3 held out.
    """
    if len(sentences) < 7:
        raise InvalidProblem("demo", "sentences", str(len(sentences)), "be at least 7: 4 to calibrate, 3 held out")
    started = perf_counter()
    encoder = model.encoder
    tokens = model.tokenize(sentences)
    calibration, held_out = tokens[0::2], tokens[1::2]
    parts = []
    for half in (calibration[0::2], calibration[1::2]):
        step("f32 and calibration")
        parts.append(observe(encoder, half))
    step("f32 and calibration")
    begin = perf_counter()
    reference = embed(encoder, held_out, encoder.linear)
    f32_seconds = perf_counter() - begin
    search = search_alpha(encoder, dispatcher, (parts[0], parts[1]), step)
    best = max(search, key=search.__getitem__)
    maxima = {name: np.maximum(*(part.maxima[name] for part in parts)) for name in encoder.linear_names}
    static = (static_way(encoder, dispatcher, maxima, alpha, judged=alpha == best) for alpha in (None, best))
    ways = []
    for way in (dynamic_way(encoder, dispatcher), *static):
        step("int8 on the held-out half")
        ways.append(measure_way(encoder, dispatcher, way, held_out, reference))
    return DemoResult(
        model=model.name,
        model_version=model.version,
        device=device_of(dispatcher).describe(),
        calibration_sentences=len(calibration),
        held_out_sentences=len(held_out),
        linear_layers=len(encoder.linear_names),
        alpha=best,
        search=search,
        ways=tuple(ways),
        f32_seconds=f32_seconds,
        total_seconds=perf_counter() - started,
    )


def measure_way(
    encoder: Encoder, dispatcher: Dispatcher, way: Quantized, held_out: Tokens, reference: F32
) -> WayResult:
    """Embed the held-out half in one way and compare it with its f32 embeddings."""
    begin = perf_counter()
    embeddings = embed(encoder, held_out, way.linear(dispatcher))
    run_seconds = perf_counter() - begin
    cosines = cosine(embeddings, reference)
    rows = [sum(len(held_out[i]) for i in batch) for batch in batches(held_out)]
    problems = dict.fromkeys(layer.descriptor(m) for layer in way.layers.values() for m in rows)
    skus = (dispatcher.select(problem, device=device_of(dispatcher)).sku.id for problem in problems)
    return WayResult(
        name=way.name,
        alpha=way.alpha,
        judged=way.judged,
        worst_cosine=float(cosines.min()),
        mean_cosine=float(cosines.mean()),
        run_seconds=run_seconds,
        skus=tuple(dict.fromkeys(skus)),
    )


def read_sentences() -> list[str]:
    """Return the sentences of prose.txt."""
    return files(__package__).joinpath("prose.txt").read_text(encoding="utf-8").splitlines()


@contextmanager
def _progress() -> Iterator[Step]:
    """Show a bar on a terminal, and a line for each stage elsewhere."""
    started, done, stages = perf_counter(), count(), set[str]()
    with progress() as report:

        def step(stage: str) -> None:
            if report is not None:
                report(next(done), _STEPS, stage)
            elif stage not in stages:
                stages.add(stage)
                tell(f"demo: {perf_counter() - started:5.1f} s  {stage}", "dim")

        yield step


def print_result(result: DemoResult, console: Console) -> None:
    """Print where the demo ran, a table of the ways, and whether they are accurate."""
    table = plain_table("way", "worst cosine", "mean cosine", "seconds", indent=2, numbers=1)
    for way in result.ways:
        figures = (f"{way.worst_cosine:.4f}", f"{way.mean_cosine:.4f}", f"{way.run_seconds:.2f}")
        table.add_row("", way.name, *figures, style="bold" if way.judged else "")
    for line in (
        f"{result.model} {result.model_version} on {result.device}, {result.linear_layers} linear layers in int8",
        f"{result.calibration_sentences} sentences calibrate, {result.held_out_sentences} are held out",
        f"against f32, which takes {result.f32_seconds:.2f} s; everything took {result.total_seconds:.1f} s",
    ):
        console.print(line, soft_wrap=True)
    console.print(table)
    console.print(*result.verdicts(), sep="\n")
