"""`prepare`: does the work of first calls in advance, for some numbers of rows or for all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch
from torch import nn

from skuda.dispatch.advance import rows_of
from skuda.dispatch.telemetry import KERNELS
from skuda.functional import default_dispatcher
from skuda.registry.descriptor import Descriptor
from skuda.registry.device import Device
from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown
from skuda.torch.fuse.fused_modules import Fused
from skuda.torch.linear.int8_linear import Int8Linear
from skuda.torch.models.replaceable_layers import check_count, check_model

_log = logging.getLogger("skuda.compile")


def prepare(
    model: nn.Module,
    rows: Iterable[int] = (1, 16),
    dtype: torch.dtype | None = None,
    *,
    tokens: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> dict[str, dict[int, str]]:
    """Run every int8 layer and fused module of a model once for each number of rows.

    This compiles and plans their kernels. A CUDA graph with these numbers of rows can then be captured at once. With
    `tokens`, every kernel that any number of rows up to it can choose is compiled and loaded, too, side by side.

    Parameters
    ----------
    model : torch.nn.Module
    rows : iterable of int
        Numbers of rows of the inputs: the product of all leading axes.
    dtype : torch.dtype, optional
        Dtype of the inputs. By default that of the model's first floating-point parameter, or torch's default.
    tokens : int, optional
        Largest number of rows. Afterwards no call of the layers and fused modules with at most so many rows compiles
        or loads anything, whatever the number of its sequences. `skuda.dispatch.telemetry.KERNELS` counts later
        kernels, and the log warns of them.
    progress : callable, optional
        Called with the number of kernels for `tokens` that are ready, and that of all, whenever there is one more.

    Returns
    -------
    dict of str to dict of int to str
        Id of the kernel of each layer's product, by the layer's name and the number of rows.

    Raises
    ------
    InvalidProblem
        For an argument of the wrong type.
    Unsupported
        If no kernel can serve a layer.
    """
    check_model("prepare", model, None)
    counts = _checked(rows, tokens, progress)
    if dtype is None:
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())
    elif not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InvalidProblem("prepare", "dtype", shown(dtype), "be a floating-point dtype")
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Int8Linear)}
    planned: dict[str, dict[int, str]] = {name: {} for name in layers}
    with torch.no_grad(), default_dispatcher().recorded() as seen:
        for name, layer in layers.items():
            for count in counts:
                zeros = torch.zeros(
                    count, layer.in_features, dtype=layer.activation.takes or dtype, device=layer.weight.device
                )
                layer(zeros)
                planned[name][count] = str(layer.explain(zeros).chosen)
        for module in model.modules():
            if isinstance(module, Fused):
                device = next(module.buffers()).device
                for count in counts:
                    module.warm(torch.zeros(count, module.width, dtype=dtype, device=device))
    if tokens is not None:
        _prepare_all(seen, tokens, progress)
    return planned


def _checked(rows: Iterable[int], tokens: int | None, progress: object) -> tuple[int, ...]:
    """Return the numbers of rows, or raise `InvalidProblem`."""
    if tokens is not None:
        check_count("prepare", "tokens", tokens, 1)
    if progress is not None and not callable(progress):
        raise InvalidProblem("prepare", "progress", shown(progress), "be a function of two numbers, or left out")
    given: object = rows
    if isinstance(given, torch.Tensor) or not isinstance(given, Iterable):
        raise InvalidProblem("prepare", "rows", shown(rows), "be numbers of rows, such as (1, 16)")
    counts = tuple(rows)
    for count in counts:
        check_count("prepare", "rows", count, below=2**31)
    return counts


def _prepare_all(
    seen: Iterable[tuple[Descriptor, Device]], tokens: int, progress: Callable[[int, int], object] | None
) -> None:
    """Load the kernels of problems with all numbers of rows, on each GPU that has some."""
    problems: dict[Device, list[Descriptor]] = {}
    for problem, device in seen:
        problems.setdefault(device, []).append(problem)
    for device, each in problems.items():
        if device.processor == "cuda":
            rows = [found for problem in each for found in rows_of(problem, tokens)]
            _log.info("%s: %s", device.describe(), default_dispatcher().prepare_rows(rows, device, progress))
            KERNELS.watch(_log.warning)
