"""The demo: a real sentence encoder in int8, compared with itself in f32.

1. Embed both halves of the sentences in f32, and observe the activations of the calibration half.
2. Quantize all linear layers, with dynamic and with static activations, and embed the held-out half with every product
   dispatched by its descriptor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import computed_field
from rich.console import Console
from rich.text import Text

from skuda.dispatch import Device, Dispatcher, PlanPreference
from skuda.dispatch.preference import NO_PREFERENCE
from skuda.registry.descriptor import Descriptor
from skuda.registry.device import HOST
from skuda.registry.errors import InvalidProblem
from skuda.registry.value import Value
from skuda.tools.demo.encoder import F32, Encoder, Linear, Model, load_model
from skuda.tools.options import Json
from skuda.tools.output import new_console, plain_table, tell
from skuda.tools.smoothquant import ActivationRanges, DynamicLayer, Int8Layer, SmoothQuantLayer
from skuda.tools.verify.placement import Placement, placement_for

REQUIRED_COSINE = 0.99
"""Least cosine to the f32 embedding for every held-out sentence."""
ALPHA = 0.8
"""The smoothing strength; of 0.5 to 1, it gives the calibration sentences the highest mean cosine."""
BATCH = 16
"""Sentences embedded in one batch; batches are in order of length, so that attention pads little."""
Step = Callable[[str], None]
"""Called with the name of each step before it."""
Tokens = Sequence[Sequence[int]]


class WayResult(Value):
    """One way to quantize the linear layers, measured on the held-out half.

    Cosines are to the f32 embedding of the same sentence, and `skus` are the kernels of the products. Each way is
    judged.
    """

    name: str
    judged: bool = True
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
        """Whether both ways keep every held-out sentence at `required_cosine` or above; NaN fails."""
        return all(way.worst_cosine >= self.required_cosine for way in self.ways)

    def verdicts(self) -> Iterator[Text]:
        """Yield a line for each way; a cosine that is NaN fails."""
        for way in self.ways:
            passed = way.worst_cosine >= self.required_cosine
            word, sign = ("PASS", ">=") if passed else ("FAIL", "is below")
            text = f"{word}  {way.name}: worst cosine {way.worst_cosine:.4f} {sign} {self.required_cosine:g}"
            yield Text(text, style="green" if passed else "bold red")


class OnCard(Dispatcher):
    """A dispatcher whose `run` copies NumPy arrays to a device and the results back to the host."""

    def __init__(self, dispatcher: Dispatcher, device: Device, placement: Placement) -> None:
        super().__init__(dispatcher.registry, backends=dispatcher.backends.values())
        self.device, self._placement = device, placement

    def run(
        self,
        problem: Descriptor,
        preference: PlanPreference | None = NO_PREFERENCE,
        *,
        stream: object = None,
        **given: Any,
    ) -> Any:
        """Run as `Dispatcher.run` does, with host arrays; return when the results are on the host."""
        arrays = {name: np.ascontiguousarray(value) for name, value in given.items() if isinstance(value, np.ndarray)}
        there = {name: self._placement.upload(value) for name, value in arrays.items()}
        found = super().run(problem, preference=preference, stream=stream, **{**given, **there})
        if isinstance(found, tuple):
            return type(found)(*map(self._placement.download, found))
        return self._placement.download(found)


def run(*, as_json: Json = False) -> int:
    """Run a real sentence encoder in int8, and in f32.

    The products run on a GPU where one is usable, else on the CPU. The arithmetic is the same to the bit; the report
    says where it ran.
    """
    console = new_console()
    dispatcher = best_of(Dispatcher())
    model = load_model()
    result = run_demo(model, read_sentences(), dispatcher, lambda stage: tell(f"demo: {stage}", "dim"))
    if as_json:
        console.out(result.model_dump_json(indent=2), highlight=False)
        for line in result.verdicts():
            tell(str(line), "dim")
    else:
        print_result(result, console)
    return 0 if result.passed else 1


def best_of(dispatcher: Dispatcher) -> Dispatcher:
    """Return a dispatcher for the best device here; say why a GPU that is here is not used."""
    gpu = next((device for device in dispatcher.devices if device.processor == "cuda"), None)
    if gpu is None:
        return dispatcher
    try:
        placement = placement_for(gpu)
        placement.download(placement.upload(np.zeros(8, np.uint8)))  # it fails with a library without CUDA
    except Exception as error:  # noqa: BLE001  the libraries raise different errors
        tell(f"demo: not on {gpu.name}: {str(error).partition(chr(10))[0]}")
        return dispatcher
    return OnCard(dispatcher, gpu, placement)


def device_of(dispatcher: Dispatcher) -> Device:
    """Return the device on which a dispatcher runs host arrays."""
    return dispatcher.device if isinstance(dispatcher, OnCard) else HOST


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
    begin = perf_counter()
    reference = embed(encoder, held_out, encoder.linear)
    f32_seconds = perf_counter() - begin
    ways = []
    for name, layers in quantized(encoder, dispatcher, maxima):
        step(f"int8, {name}")
        ways.append(measure_way(encoder, dispatcher, name, layers, held_out, reference))
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


def quantized(
    encoder: Encoder, dispatcher: Dispatcher, maxima: Mapping[str, F32]
) -> Iterator[tuple[str, dict[str, Int8Layer]]]:
    """Yield the name of each way, and an int8 layer for every linear layer; `maxima` are of the layers' inputs."""
    parts = {name: (encoder.weight(name), encoder.bias(name)) for name in encoder.linear_names}
    yield "dynamic", {name: DynamicLayer.quantize(dispatcher, *part) for name, part in parts.items()}
    static = {n: SmoothQuantLayer.quantize(dispatcher, maxima[n], *part, alpha=ALPHA) for n, part in parts.items()}
    yield f"static, alpha {ALPHA:g}", dict(static)


def measure_way(
    encoder: Encoder,
    dispatcher: Dispatcher,
    name: str,
    layers: Mapping[str, Int8Layer],
    held_out: Tokens,
    reference: F32,
) -> WayResult:
    """Embed the held-out half with int8 layers and compare it with its f32 embeddings."""
    begin = perf_counter()
    embeddings = embed(encoder, held_out, lambda layer, x: layers[layer].run(dispatcher, x))
    run_seconds = perf_counter() - begin
    cosines = cosine(embeddings, reference)
    rows = [sum(len(held_out[i]) for i in batch) for batch in batches(held_out)]
    problems = dict.fromkeys(layer.descriptor(m) for layer in layers.values() for m in rows)
    skus = (dispatcher.select(problem, device=device_of(dispatcher)).sku.id for problem in problems)
    return WayResult(
        name=name,
        worst_cosine=float(cosines.min()),
        mean_cosine=float(cosines.mean()),
        run_seconds=run_seconds,
        skus=tuple(dict.fromkeys(skus)),
    )


def embed(encoder: Encoder, sentences: Tokens, linear: Linear) -> F32:
    """Embed sentences in batches, shape (len(sentences), hidden_size)."""
    embeddings = np.empty((len(sentences), encoder.config.hidden_size), np.float32)
    for batch in batches(sentences):
        embeddings[batch] = encoder.embed([sentences[i] for i in batch], linear)
    return embeddings


def batches(sentences: Tokens) -> list[list[int]]:
    """Return the indices of the sentences in batches, the shortest sentences first."""
    order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
    return [order[start : start + BATCH] for start in range(0, len(order), BATCH)]


def observe(encoder: Encoder, sentences: Tokens) -> dict[str, F32]:
    """Embed sentences in f32; return the largest magnitudes of every linear layer's input."""
    ranges = ActivationRanges()

    def linear(name: str, x: F32) -> F32:
        ranges.observe(name, x)
        return encoder.linear(name, x)

    embed(encoder, sentences, linear)
    return {name: ranges.channel_max(name) for name in ranges.layers}


def cosine(a: F32, b: F32) -> npt.NDArray[np.float64]:
    """Return the cosines between corresponding rows of two arrays of shape (n, d)."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    products: npt.NDArray[np.float64] = (x * y).sum(axis=1) / np.sqrt((x * x).sum(axis=1) * (y * y).sum(axis=1))
    return products


def read_sentences() -> list[str]:
    """Return the sentences of prose.txt."""
    return files(__package__).joinpath("prose.txt").read_text(encoding="utf-8").splitlines()


def print_result(result: DemoResult, console: Console) -> None:
    """Print where the demo ran, a table of the ways, and whether they are accurate."""
    table = plain_table("way", "worst cosine", "mean cosine", "seconds", indent=2, numbers=1)
    for way in result.ways:
        table.add_row("", way.name, f"{way.worst_cosine:.4f}", f"{way.mean_cosine:.4f}", f"{way.run_seconds:.2f}")
    for line in (
        f"{result.model} {result.model_version} on {result.device}, {result.linear_layers} linear layers in int8",
        f"{result.calibration_sentences} sentences calibrate, {result.held_out_sentences} are held out",
        f"against f32, which takes {result.f32_seconds:.2f} s; everything took {result.total_seconds:.1f} s",
    ):
        console.print(line, soft_wrap=True)
    console.print(table)
    console.print(*result.verdicts(), sep="\n")
