"""Folding: SmoothQuant's factors move from the inputs of layers into their weights, and cost nothing at run time.

What makes the input of a layer is divided, and the columns of the layer's weight are multiplied. The folded model is an
ordinary one in floating point, which a trainer and a server can both load.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import sqrt

import numpy as np
import torch
from torch import Tensor, nn

from skuda.kernels.smoothing import factors
from skuda.registry.errors import InvalidProblem
from skuda.registry.value import expect, expect_real
from skuda.torch.convert.calibration import Calibration, check_calibration
from skuda.torch.convert.smoothing import column_maxima, largest, not_proportional
from skuda.torch.fuse.fuse import gated_form
from skuda.torch.models.folded import record
from skuda.torch.models.replaceable_layers import (
    ReplacementChecks,
    as_linear,
    check_model,
    hooked,
    is_conv1d,
    table,
)
from skuda.torch.models.source import NotProven


@dataclass(frozen=True, eq=False)
class Folding:
    """The report of `fold_`.

    Attributes
    ----------
    folded : mapping of str to tuple of str
        The layers whose factors a module took over, by the name of the module: a norm, or a layer in front.
    not_folded : mapping of str to str
        Modules that did not take over factors, and why.
    factors : mapping of str to tensor of shape (K,), f32
        The factors, by the name of the module: what it returns was divided by them.
    calibration : Calibration
        That of the folded model, for `Dynamic`.
    """

    folded: Mapping[str, tuple[str, ...]]
    not_folded: Mapping[str, str]
    factors: Mapping[str, Tensor]
    calibration: Calibration

    def __str__(self) -> str:
        lines = [f"{len(self.folded)} modules took over factors of {sum(map(len, self.folded.values()))} layers"]
        lines += table("folded into", {name: source for source, names in self.folded.items() for name in names})
        return "\n".join(lines + table("not folded:", self.not_folded))


@torch.no_grad()
def fold_(
    model: nn.Module, calibration: Calibration, *, alpha: float = 0.6, gates: bool = True, exact: bool = True
) -> Folding:
    """Move the outliers of layers' inputs into their weights, in place.

    A norm takes over the factors of the layers behind it, if nothing else uses its output, as `calibrate` has seen. In
    a gated MLP, the layer beside the gate takes over those of the layer behind the product, if the source of the MLP's
    ``forward`` proves it. Quantize the model afterwards, with `Dynamic` and the calibration that is returned. The model
    records its factors, and the config that transformers saves with it says that it is folded.

    Parameters
    ----------
    model : torch.nn.Module
        The model of the calibration, in floating point. Its parameters keep their memory.
    calibration : Calibration
        What `calibrate` has recorded.
    alpha : float
        Strength in 0..1: the part of an input's range, in powers, that moves.
    gates : bool
        Whether gated MLPs are folded. It helps activations of 8 bits, and harms groups of weights of 4 bits.
    exact : bool
        Whether factors are rounded to powers of two. Then the folded model computes the same bits as before. Other
        factors lower the divergence of the quantized model by a sixth, and products are rounded to the dtype.

    Returns
    -------
    Folding

    Raises
    ------
    InvalidProblem
        For an argument of the wrong type, or a calibration of another or of a folded model.
    """
    check_model("fold_", model, None)
    check_calibration("fold_", calibration)
    alpha = expect_real("fold_", "alpha", alpha, 0, 1)
    for name, value in {"gates": gates, "exact": exact}.items():
        expect("fold_", name, value, bool, "be True or False")
    if calibration.folded:
        raise InvalidProblem("fold_", "calibration", "one of a folded model", "be of a model that is not folded")
    checks = ReplacementChecks(model, break_ties=False)
    modules = dict(model.named_modules())
    folded: dict[str, tuple[str, ...]] = {}
    taken: dict[str, Tensor] = {}
    not_folded = dict(calibration.not_folded)
    for source, names in (*calibration.norms.items(), *(_gates(modules) if gates else ())):
        reason = _unfit(modules, calibration, checks, source, names)
        if not reason:
            layers = [modules[name] for name in names]
            found = _factors(layers, largest([calibration.maxima[name] for name in names]), alpha, exact=exact)
            reason = "an input or a weight is not finite" if found is None else ""
        if not reason and not _fold(modules[source], layers, found, exact=exact):
            reason = "its dtype, or that of a layer, cannot hold the products"
        if reason:
            not_folded[source] = reason
        else:
            folded[source], taken[source] = names, found
    record(model, folded, taken)
    return Folding(folded, not_folded, taken, _after(calibration, folded, taken))


def _gates(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the layer beside the gate and the layer behind, of each gated MLP."""
    for name, module in modules.items():
        try:
            form = gated_form(module)
        except NotProven:
            continue
        if len(form.parts) > 1:
            inside = f"{name}." if name else ""
            yield f"{inside}{form.parts[1]}", (f"{inside}{form.down}",)


def _unfit(
    modules: Mapping[str, nn.Module],
    calibration: Calibration,
    checks: ReplacementChecks,
    source: str,
    names: tuple[str, ...],
) -> str:
    """Return why a module cannot take over the factors of layers, or an empty text."""
    for name in names:
        if name not in modules:
            raise InvalidProblem("fold_", "calibration", f"no layer {name} in the model", "be of this model")
        reason = calibration.left.get(name)
        if reason is None and name not in calibration.maxima:
            reason = "no inputs were seen"
        reason = reason or checks.of(modules[name]) or ("it has hooks" if hooked(modules[name]) else None)
        if reason is not None:
            return f"{name}: {reason.removesuffix(': choose it with filter_fn')}"
    front = modules.get(source)
    if front is None:
        return "there is no such module in this model"
    width = as_linear(modules[names[0]]).in_features
    if isinstance(front, nn.Linear) or is_conv1d(front):
        reason = checks.of(front) or ("it has hooks" if hooked(front) else "")
        return reason or ("" if as_linear(front).out_features == width else "its size differs")
    return not_proportional(front, width) or ""


def _factors(layers: list[nn.Module], inputs: Tensor, alpha: float, *, exact: bool) -> Tensor | None:
    """Return the factors of layers with one input, unless an input or a weight is not finite."""
    weights = largest([column_maxima(as_linear(layer).weight) for layer in layers])
    if not bool(weights.isfinite().all()) or not bool(inputs.isfinite().all()):
        return None
    found = factors(inputs.cpu().numpy(), weights.cpu().numpy(), alpha)
    if exact:
        part, exponent = np.frexp(found)  # the nearest power of two, by ratio
        found = np.ldexp(np.float32(1), exponent - (part < sqrt(0.5)))
    return torch.from_numpy(found).to(inputs.device)


def _fold(front: nn.Module, layers: list[nn.Module], factor: Tensor, *, exact: bool) -> bool:
    """Divide what a module returns, and multiply columns of weights, unless that overflows or is not exact."""
    of_rows = isinstance(front, nn.Linear)
    changes = [
        (held, factor.view((-1, 1) if of_rows and name == "weight" else (-1,)), True)
        for name, held in front.named_parameters(recurse=False)
    ]
    changes += [(layer.weight, factor.view((-1, 1) if is_conv1d(layer) else (-1,)), False) for layer in layers]
    made = []
    for held, shaped, divides in changes:
        by, tiny = shaped.to(held.device), torch.finfo(held.dtype).tiny
        new = (held.float() / by if divides else held.float() * by).to(held.dtype)
        back = (new.float() * by if divides else new.float() / by).to(held.dtype)
        normal = (new.abs() >= tiny) | (held.abs() < tiny)
        if not bool((new.isfinite() & normal).all()) or (exact and not torch.equal(back, held)):
            return False
        made.append(new)
    for (held, *_), new in zip(changes, made, strict=True):
        held.copy_(new)
    return True


def _after(calibration: Calibration, folded: Mapping[str, tuple[str, ...]], taken: Mapping[str, Tensor]) -> Calibration:
    """Return the calibration of the folded model."""
    maxima, rows = dict(calibration.maxima), dict(calibration.rows)
    for source, names in folded.items():
        done: dict[int, Tensor] = {}  # layers share samples
        for held, name in product((maxima, rows), names):
            if name in held:
                old = held[name]
                if id(old) not in done:
                    done[id(old)] = torch.ops.skuda.smooth.default(old, taken[source].to(old.device)).to(old.dtype)
                held[name] = done[id(old)]
    return replace(calibration, maxima=maxima, rows=rows, folded=True)
