"""The demo's report on a terminal, 80 columns wide; plain text when piped."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from skuda.tools.demo.result import DemoResult, LayerResult, WayResult


def render(result: DemoResult, console: Console) -> None:
    """Print the whole report."""
    _say(
        console,
        f"{result.model} {result.model_version} in {result.framework} on {result.device}, {len(result.layers)} linear "
        "layers in int8",
    )
    _say(
        console,
        f"{result.calibration_sentences} sentences ({result.calibration_tokens} tokens) calibrate, "
        f"{result.held_out_sentences} ({result.held_out_tokens} tokens) are held out:\n{result.split}.",
    )
    _say(console, "\nEach layer's own error on the held-out half: SQNR in dB, higher is better")
    console.print(layer_table(result))
    for line in sku_lines(result):
        _say(console, line)
    _say(console, f"\nEmbeddings of the held-out half against f32; worst cosine required: {result.required_cosine:g}")
    console.print(way_table(result))
    _say(
        console,
        f"rank: Spearman correlation of each sentence's ranking of the others.\n"
        f"f32 takes {result.f32_seconds:.2f} s for that half.\n"
        f"alpha {result.alpha:g} was found on the calibration half alone, by mean cosine, in "
        f"{result.search_seconds:.1f} s:",
    )
    scores = [f"{score.alpha:g}: {score.mean_cosine:.4f}" for score in result.search]
    _say(console, "  " + "  ".join(scores[:4]) + "\n  " + "  ".join(scores[4:]))
    _say(console, f"plot: {result.plot}; everything took {result.total_seconds:.1f} s")
    for way in result.judged:
        console.print(verdict(way, result.required_cosine))


def layer_table(result: DemoResult) -> Table:
    """Return one row per linear layer: shape, SQNR in both ways, and the kernel's number if the layers differ in it."""
    kernels = _kernels(result)
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("layer")
    table.add_column("N x K", justify="right")
    for way in result.judged:
        table.add_column(way.name, justify="right")
    if len(kernels) > 1:
        table.add_column("SKU", justify="right")
    for layer in result.layers:
        figures = [f"{layer.sqnr_db[way.name]:.1f}" for way in result.judged]
        number = [str(kernels.index(_skus(layer)) + 1)] if len(kernels) > 1 else []
        table.add_row(layer.label, f"{layer.n} x {layer.k}", *figures, *number)
    return table


def sku_lines(result: DemoResult) -> list[str]:
    """Return the chosen kernels: once if all layers share them, else by the numbers of the table."""
    kernels = _kernels(result)
    lines = []
    for number, chosen in enumerate(kernels, start=1):
        head = "SKU, all layers:" if len(kernels) == 1 else f"SKU {number}:"
        lines.append(head)
        for way, ids in chosen:
            lines += [f"  {way}", *(f"    {sku}" for sku in ids)]
    return lines


def way_table(result: DemoResult) -> Table:
    """Return one row per way: cosine to the f32 embeddings, agreement of the rankings, time."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("way")
    for heading in ("cosine\nworst", "cosine\nmean", "rank\nworst", "rank\nmean", "nearest\nsame", "time\ns"):
        table.add_column(heading, justify="right")
    for way in result.ways:
        name = f"{way.name}, found" if way.judged and way.alpha is not None else way.name
        table.add_row(
            name,
            f"{way.worst_cosine:.4f}",
            f"{way.mean_cosine:.4f}",
            f"{way.worst_rank_correlation:.3f}",
            f"{way.mean_rank_correlation:.3f}",
            f"{way.same_nearest:.1%}",
            f"{way.run_seconds:.2f}",
            style="bold" if way.judged else "",
        )
    return table


def verdict(way: WayResult, required: float) -> Text:
    """Return a line that says whether a judged way keeps the required cosine."""
    passed = way.worst_cosine >= required
    word, sign = ("PASS", ">=") if passed else ("FAIL", "is below")
    text = f"{word}  {way.name}: worst cosine {way.worst_cosine:.4f} {sign} {required:g}"
    return Text(text, style="green" if passed else "bold red")


Chosen = tuple[tuple[str, tuple[str, ...]], ...]


def _skus(layer: LayerResult) -> Chosen:
    return tuple(layer.skus.items())


def _kernels(result: DemoResult) -> list[Chosen]:
    """Return the distinct choices of kernels, in order of first appearance."""
    return list(dict.fromkeys(_skus(layer) for layer in result.layers))


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
