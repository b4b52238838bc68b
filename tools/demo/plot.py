"""The demo's plot: every layer's own error in each of the compared ways."""

from __future__ import annotations

from pathlib import Path

from skuda.tools.demo.result import DemoResult
from skuda.tools.files import replacing

# Marker and line style identify a way without colour. The colours are Okabe and Ito's.
STYLES = (
    ("#000000", "o", "-"),
    ("#D55E00", "v", ":"),
    ("#E69F00", "s", "-."),
    ("#56B4E9", "D", (0, (6, 2))),
    ("#0072B2", "^", "--"),
)


def draw(result: DemoResult, path: Path) -> None:
    """Plot the relative error of each layer's output on its f32 input, as a PNG whatever the path's suffix."""
    # Figure instead of pyplot avoids global state and the search for a window system.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    places = range(len(result.layers))
    for way, (color, marker, line) in zip(result.ways, STYLES, strict=False):
        errors = [100 * 10 ** (-layer.sqnr_db[way.name] / 20) for layer in result.layers]
        label = f"{way.name}: worst cosine {way.worst_cosine:.4f}"
        width = 1.8 if way.judged else 1.1
        axes.plot(
            places, errors, color=color, marker=marker, linestyle=line, linewidth=width, markersize=5, label=label
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g} %" if f"{value:e}"[0] in "235" else "")
    axes.set_ylabel("error of the layer's output, RMS relative to f32")
    axes.set_xticks(places, [layer.label for layer in result.layers], rotation=90, fontsize=9)
    axes.set_xlim(-0.6, len(result.layers) - 0.4)
    axes.grid(visible=True, which="both", axis="y", linewidth=0.4)
    axes.grid(visible=True, axis="x", linewidth=0.2)
    title = f"{result.model} in int8: each linear layer's own error on {result.held_out_sentences} held-out sentences"
    axes.set_title(title, fontsize=12)
    figure.legend(loc="outside lower center", ncols=3, fontsize=9)
    with replacing(path) as fresh:
        figure.savefig(fresh, format="png")
