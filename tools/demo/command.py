"""The demo: a real sentence encoder in int8, compared with itself in f32.

1. Embed both halves of the sentences in f32, and observe the activations of the calibration half.
2. Quantize all linear layers in every way, and embed the held-out half with every product dispatched by its
   descriptor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from itertools import count
from time import perf_counter
from typing import Annotated

from pydantic import computed_field
from rich.console import Console
from rich.text import Text

from skuda.dispatch import Dispatcher
from skuda.registry.errors import InvalidProblem
from skuda.registry.value import Value
from skuda.tools.demo.encoder import F32, Encoder, Model, load_model
from skuda.tools.demo.placed import device_of, placed
from skuda.tools.demo.ways import ALPHA, Quantized, Tokens, batches, cosine, dynamic_ways, embed, observe, static_way
from skuda.tools.options import Json, option
from skuda.tools.output import plain_table, progress, stdout, tell

REQUIRED_COSINE = 0.99
"""Least cosine to the f32 embedding for every held-out sentence, for both judged ways."""
_STEPS = 2 + 4
"""Passes over sentences: in f32, and in int8."""
Step = Callable[[str], None]
"""Called with the name of a stage of the work before each of its steps."""


class WayResult(Value):
    """One way to quantize the linear layers, measured on the held-out half.

    Only a `judged` way must reach `REQUIRED_COSINE`. Cosines are to the f32 embedding of the same sentence, and `skus`
    are the kernels of the products.
    """

    name: str
    judged: bool
    worst_cosine: float
    mean_cosine: float
    run_seconds: float
    skus: tuple[str, ...]


class DemoResult(Value):
    """The whole run."""

    model: str
    model_version: str
    device: str
    calibration_sentences: int
    held_out_sentences: int
    linear_layers: int
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


def run(
    *,
    device: Annotated[
        str, option("WHERE", "Where the products run: host or gpu; else a GPU where one is usable.")
    ] = "auto",
    as_json: Json = False,
) -> int:
    """Run a real sentence encoder in int8, and in f32.

    The arithmetic is the same to the bit on the host and on a GPU; the report says where it ran.
    """
    console = stdout()
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

    Every second sentence, from the first, calibrates. Raise `InvalidProblem` for fewer than 2 sentences.
    """
    if len(sentences) < 2:
        raise InvalidProblem("demo", "sentences", str(len(sentences)), "be at least 2: one calibrates, one is held out")
    started = perf_counter()
    encoder = model.encoder
    tokens = model.tokenize(sentences)
    calibration, held_out = tokens[0::2], tokens[1::2]
    step("f32 and calibration")
    maxima = observe(encoder, calibration)
    step("f32 and calibration")
    begin = perf_counter()
    reference = embed(encoder, held_out, encoder.linear)
    f32_seconds = perf_counter() - begin
    static = (static_way(encoder, dispatcher, maxima, alpha, judged=alpha is not None) for alpha in (None, ALPHA))
    ways = []
    for way in (*dynamic_ways(encoder, dispatcher), *static):
        step("int8 on the held-out half")
        ways.append(measure_way(encoder, dispatcher, way, held_out, reference))
    return DemoResult(
        model=model.name,
        model_version=model.version,
        device=device_of(dispatcher).describe(),
        calibration_sentences=len(calibration),
        held_out_sentences=len(held_out),
        linear_layers=len(encoder.linear_names),
        ways=tuple(ways),
        f32_seconds=f32_seconds,
        total_seconds=perf_counter() - started,
    )


def measure_way(
    encoder: Encoder, dispatcher: Dispatcher, way: Quantized, held_out: Tokens, reference: F32
) -> WayResult:
    """Embed the held-out half in one way and compare it with its f32 embeddings."""
    begin = perf_counter()
    embeddings = embed(encoder, held_out, way.linear(dispatcher), way.attend(dispatcher))
    run_seconds = perf_counter() - begin
    cosines = cosine(embeddings, reference)
    rows = [sum(len(held_out[i]) for i in batch) for batch in batches(held_out)]
    problems = dict.fromkeys(layer.descriptor(m) for layer in way.layers.values() for m in rows)
    skus = (dispatcher.select(problem, device=device_of(dispatcher)).sku.id for problem in problems)
    return WayResult(
        name=way.name,
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
