"""Measure what weights of 8 and 4 bits cost the sentence encoder of `skuda demo`, and write it as JSON.

    python tests/programs/int4_error.py --output docs/evidence/int4-error.json

As in the demo, every second sentence calibrates, and the others are held out. Activations are dynamic in all ways. The
error is the norm of what differs from the embeddings in f32, over the norm of these. Cosines are to the embedding of
the same sentence. `smoothed` is with the search of `SmoothDynamic`, `plain` without.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

import skuda.torch as st
from skuda.tools.demo.command import Tokens, cosine, embed, read_sentences
from skuda.tools.demo.encoder import F32, Encoder, load_model


class PerChannel(st.SmoothDynamic):
    """Four bits as usual, for comparison: a scale per channel, its largest magnitude over 7.5, and no offset."""

    def _quantized(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        scale = weight.float().abs().amax(1, keepdim=True) / 7.5
        return (weight / scale).round().clamp(-8, 7).to(torch.int8), scale


def configs(calibration: st.Calibration, alpha: Any) -> dict[str, st.SmoothDynamic]:
    """Return a config for every way."""
    made = {"W8A8": st.SmoothDynamic(calibration, alpha)}
    for size in (32, 64, 128, 0):
        name = f"W4A8, groups of {size}" if size else "W4A8, whole rows"
        made[name] = st.SmoothDynamic(calibration, alpha, weights="int4", group_size=size)
    return made | {"s4 per channel, no groups": PerChannel(calibration, alpha)}


class Layers(nn.ModuleDict):
    """The linear layers of an encoder."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        for name in encoder.linear_names:
            weight, bias = (torch.from_numpy(part(name)) for part in (encoder.weight, encoder.bias))
            made = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
            made.weight, made.bias = nn.Parameter(weight), nn.Parameter(bias)
            self[name.replace(".", "/")] = made

    def linear(self, name: str, x: F32) -> F32:
        """Run a layer on rows."""
        with torch.no_grad():
            return cast("F32", self[name.replace(".", "/")](torch.from_numpy(np.ascontiguousarray(x))).numpy())


def errors(encoder: Encoder, calibration: Tokens, held_out: Tokens, names: Iterable[str] = ()) -> dict[str, Any]:
    """Return the errors of every way, or of some, by name; without and with smoothing."""
    reference = embed(encoder, held_out, encoder.linear)
    observed = Layers(encoder)
    with st.calibrate(observed) as found:
        embed(encoder, calibration, observed.linear)
    measured: dict[str, Any] = {}
    for kind, alpha in (("plain", None), ("smoothed", "search")):
        for name, config in configs(found, alpha).items():
            if names and name not in names:
                continue
            layers = Layers(encoder)
            st.quantize_(layers, config, strict=True)
            embeddings = embed(encoder, held_out, layers.linear)
            cosines = cosine(embeddings, reference)
            error = np.linalg.norm(embeddings - reference) / np.linalg.norm(reference)
            figures = {"error": error, "mean cosine": cosines.mean(), "worst cosine": cosines.min()}
            measured.setdefault(name, {})[kind] = {key: round(float(value), 4) for key, value in figures.items()}
            sys.stdout.write(f"{name}, {kind}: {measured[name][kind]}\n")
            sys.stdout.flush()
    return measured


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", metavar="FILE", type=Path, help="write the errors here")
    given = parser.parse_args(arguments)
    model = load_model()
    tokens = model.tokenize(read_sentences())
    calibration, held_out = tokens[0::2], tokens[1::2]
    found = {
        "model": f"{model.name} {model.version}",
        "layers": len(model.encoder.linear_names),
        "calibration sentences": len(calibration),
        "held-out sentences": len(held_out),
        "errors": errors(model.encoder, calibration, held_out),
    }
    if given.output:
        given.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
