"""Calibration: records the inputs of linear layers, and finds the layers whose inputs come straight from a norm."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  everybody's name for it
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import TensorWeakRef

from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown
from skuda.torch.linear.int8_linear import Int8Linear, autocast
from skuda.torch.models.replaceable_layers import (
    Filter,
    check_count,
    check_model,
    is_conv1d,
    linears,
    selects,
    sizes_of,
)

_NORMS = ("RMSNorm", "LayerNorm")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_READS_NO_ELEMENT = frozenset(
    getattr(Tensor, name).__get__
    for name in (
        "device",
        "dtype",
        "grad_fn",
        "is_cuda",
        "is_leaf",
        "is_meta",
        "layout",
        "ndim",
        "requires_grad",
        "shape",
    )
) | {
    Tensor.__hash__,
    Tensor.__len__,
    Tensor.dim,
    Tensor.element_size,
    Tensor.get_device,
    Tensor.is_complex,
    Tensor.is_contiguous,
    Tensor.is_floating_point,
    Tensor.nelement,
    Tensor.numel,
    Tensor.size,
    Tensor.stride,
}
"""Functions of torch that read no element of a tensor."""


@dataclass(eq=False)
class Calibration:
    """The result of `calibrate`. It is complete when the block has ended.

    Attributes
    ----------
    maxima : dict of str to tensor of shape (K,), f32
        Largest magnitude of every input channel, by layer, on the layer's device. NaN is skipped.
    rows : dict of str to tensor of shape (R, K)
        A uniform sample of the input rows, by layer. Layers that always got the same tensor share theirs.
    norms : dict of str to tuple of str
        Layers whose inputs all come from one norm, by the name of the norm, if nothing else uses the norm's output.
    not_folded : dict of str to str
        Norms in front of layers whose output something else uses, and the reason.
    left : dict of str to str
        Layers without maxima, and why.
    complete : bool
        Whether the block has ended without an exception.
    folded : bool
        Whether the model was folded after it ran; see `fold_`.
    """

    maxima: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)
    norms: dict[str, tuple[str, ...]] = field(default_factory=dict)
    not_folded: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    complete: bool = False
    folded: bool = False

    def __repr__(self) -> str:
        return f"Calibration({len(self.maxima)} layers, {len(self.norms)} norms, complete={self.complete})"


def check_calibration(subject: str, calibration: object) -> None:
    """Raise `InvalidProblem` for anything but a complete calibration."""
    if not (isinstance(calibration, Calibration) and calibration.complete):
        rule = "be the Calibration of a finished `with calibrate(...)` block"
        raise InvalidProblem(subject, "calibration", shown(calibration), rule)


@contextmanager
def calibrate(
    model: nn.Module, filter_fn: Filter | None = None, *, rows: int = 128, seed: int = 0
) -> Iterator[Calibration]:
    """Record the inputs of a model's linear layers while the model runs in the block.

    In the block, gradients are off and compiled models run eagerly. Nothing is copied from the device. Maxima are
    exact; under autocast they are the maxima of the cast input. It takes an f32 per input channel, and the rows.

    Factors can be folded into a norm only if nothing but linear layers uses its output. To find out, `calibrate`
    watches every function of torch that runs in the block. It does not see code that hands a tensor to another library
    without calling torch, such as a C++ extension, nor a branch that is not taken in the block.

    Parameters
    ----------
    model : torch.nn.Module
    filter_fn : callable, optional
        Selects layers. It takes the layer and its qualified name. By default all `nn.Linear` and `Conv1D` are selected.
    rows : int
        Number of rows to keep for each layer. Only the search of `SmoothStatic` and `SmoothDynamic` needs them.
    seed : int
        Seed of the samples of rows.

    Yields
    ------
    Calibration

    Raises
    ------
    InvalidProblem
        For an argument of the wrong type.
    """
    check_model("calibrate", model, filter_fn)
    check_count("calibrate", "rows", rows)
    check_count("calibrate", "seed", seed)
    calibration = Calibration()
    layers = {
        name: layer
        for name, layer in linears(model)
        if not isinstance(layer, Int8Linear) and selects("calibrate", filter_fn, layer, name)
    }
    flow = _Flow(model, layers)
    with ExitStack() as stack:
        inputs = _Inputs(calibration, rows, seed)
        for name, layer in layers.items():
            hook = _unwatched(partial(inputs.observe, name))
            stack.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(flow.watching())
        yield calibration
    for name in layers.keys() - calibration.maxima.keys():
        calibration.left.setdefault(name, "it did not run in calibration")
    flow.conclude(calibration)
    calibration.complete = True


class _Inputs:
    """Records the inputs of layers."""

    def __init__(self, calibration: Calibration, rows: int, seed: int) -> None:
        self._to, self._rows, self._seed = calibration, rows, seed
        self._seen: defaultdict[str, int] = defaultdict(int)
        self._last: Callable[[], object] = lambda: None
        self._made: tuple[Any, ...] = ()

    def observe(self, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[0] if args else kwargs.get("input")
        if not isinstance(given, Tensor) or given.dim() == 0 or given.shape[-1] != sizes_of(layer)[1]:
            return  # the layer itself raises the error
        if given.dtype not in _FLOATS:
            self._to.left[name] = f"its input was {given.dtype}, not float16, bfloat16 or float32"
            return
        matrix = autocast(given).detach().reshape(prod(given.shape[:-1]), given.shape[-1])
        if not len(matrix):
            return
        batch = matrix.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(0).float()
        before = self._to.maxima.get(name)
        self._to.maxima[name] = batch if before is None else torch.maximum(before, batch.to(before.device))
        seen, sample = self._seen[name], self._to.rows.get(name)
        self._seen[name] += len(matrix)
        version = object() if given.is_inference() else given._version  # noqa: SLF001  the only name of it
        made_from = version, matrix.dtype, seen, id(sample)
        if self._last() is not given or self._made[:-1] != made_from:
            self._last, self._made = TensorWeakRef(given), (*made_from, self._drawn(matrix, seen, sample))
        if self._made[-1] is not None:
            self._to.rows[name] = self._made[-1]

    def _drawn(self, matrix: Tensor, seen: int, sample: Tensor | None) -> Tensor | None:
        """Return the uniform sample of all rows so far (Vitter's algorithm R), given that of the rows before."""
        count = np.arange(seen, seen + len(matrix))
        drawn = np.random.default_rng([self._seed, seen]).integers(0, count + 1)
        places = np.where(count < self._rows, count, drawn)
        chosen = {int(place): row for row, place in enumerate(places) if place < self._rows}
        if not chosen:
            return sample
        if sample is None:
            sample = matrix.new_zeros(0, matrix.shape[1])
        if (most := max(chosen) + 1) > len(sample):
            sample = torch.cat([sample, sample.new_zeros(most - len(sample), matrix.shape[1])])
        where, which = (torch.tensor(list(part), device=matrix.device) for part in (chosen.keys(), chosen.values()))
        return sample.index_copy(0, where, matrix.index_select(0, which).to(sample.dtype))


class _Flow(TorchFunctionMode):
    """Follows the outputs of norms to every use."""

    def __init__(self, model: nn.Module, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        self._model, self._layers = model, layers
        self._weights: dict[int, list[str]] = defaultdict(list)
        for name, layer in layers.items():
            self._weights[id(getattr(layer, "weight", None))].append(name)
        self._norms = {name: module for name, module in model.named_modules() if type(module).__name__.endswith(_NORMS)}
        self._owners = {id(p): name for name, norm in self._norms.items() for p in norm.parameters(recurse=False)}
        self._live: dict[int, tuple[TensorWeakRef, str]] = {}
        self._users: defaultdict[str, set[str]] = defaultdict(set)  # layers, by norm
        self._sources: defaultdict[str, set[str | None]] = defaultdict(set)  # norms, by layer
        self._called: set[tuple[str, str]] = set()  # (norm, layer) of layers that were called, not only read
        self._reasons: dict[str, str] = {}
        self._depth = 0
        self._running: list[str] = []
        self._conv1d: list[str] = []  # that run now: they look at their input through a view

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the block runs."""
        with ExitStack() as stack:
            stack.callback(self._model.register_forward_pre_hook(self._enter, prepend=True).remove)
            for name, layer in self._layers.items():
                stack.callback(layer.register_forward_pre_hook(self._linear(name), with_kwargs=True).remove)
                if is_conv1d(layer):
                    stack.callback(layer.register_forward_hook(self._conv1d_left, always_call=True).remove)
            for name, norm in self._norms.items():
                stack.callback(norm.register_forward_pre_hook(lambda *_, name=name: self._running.append(name)).remove)
                hook = _unwatched(self._norm(name))
                stack.callback(norm.register_forward_hook(hook, always_call=True).remove)
            stack.callback(self._model.register_forward_hook(_unwatched(self._leave), always_call=True).remove)
            with self:
                yield

    def _enter(self, *_: Any) -> None:
        self._depth += 1

    def _leave(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        self._running.clear()
        self._conv1d.clear()
        if any(kept() is not None and norm not in self._reasons for kept, norm in self._live.values()):
            gc.collect()
        for kept, norm in self._live.values():
            if kept() is not None:
                self._use(norm, "its output outlives the forward pass")
        self._live.clear()

    def _norm(self, name: str) -> Callable[..., None]:
        def returned(_: nn.Module, __: Any, output: Any) -> None:
            if self._running and self._running[-1] == name:
                self._running.pop()
            if not self._depth:
                self._use(name, "it ran outside the model's own forward")
            elif type(output) is Tensor:
                self._live[id(output)] = TensorWeakRef(output), name
            elif output is not None:  # None if the norm has failed
                self._use(name, f"its output is a {type(output).__name__}")

        return returned

    def _linear(self, name: str) -> Callable[..., None]:
        def called(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            norm = self._source(args[0] if args else kwargs.get("input"))
            self._sources[name].add(norm)
            if is_conv1d(layer):
                self._conv1d.append(name)
            if norm is not None:
                self._called.add((norm, name))

        return called

    def _conv1d_left(self, *_: Any) -> None:
        if self._conv1d:  # else the model has failed before it called the layer
            self._conv1d.pop()

    def _source(self, tensor: object) -> str | None:
        kept, norm = self._live.get(id(tensor), (None, None))
        return norm if kept is not None and kept() is tensor else None

    def _use(self, norm: str, reason: str) -> None:
        self._reasons.setdefault(norm, reason)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _READS_NO_ELEMENT:
            names = self._weights.get(id(args[1]), []) if func is F.linear and len(args) > 1 else []
            names = self._conv1d[-1:] if func is Tensor.view else names
            norm = self._source(args[0]) if len(names) == 1 else None
            if norm is not None:
                self._users[norm].add(names[0])
            for tensor in _tensors(((), *args[1:]) if norm is not None else args, kwargs):
                what = _name(func)
                if (used := self._source(tensor)) is not None:
                    self._use(used, f"its output is also used by {what}")
                owner = self._owners.get(id(tensor))
                if owner is not None and owner not in self._running:
                    self._use(owner, f"its weight is also used by {what}")
        return func(*args, **kwargs)

    def conclude(self, calibration: Calibration) -> None:
        """Record the norms that feed only linear layers."""
        for norm, users in self._users.items():
            ordered = tuple(name for name in self._layers if name in users)
            if any((norm, name) not in self._called for name in ordered):
                self._use(norm, "the weight of a layer is read without calling the layer")
            odd = [name for name in ordered if self._sources[name] != {norm}]
            if odd:
                self._use(norm, f"{odd[0]} has other inputs, too")
            if norm in self._reasons:
                calibration.not_folded[norm] = self._reasons[norm]
            else:
                calibration.norms[norm] = ordered


def _unwatched(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook whose own calls of torch are not watched."""

    def unwatched(*args: Any, **kwargs: Any) -> None:
        with torch._C.DisableTorchFunction():  # noqa: SLF001  documented, but only there
            hook(*args, **kwargs)

    return unwatched


def _name(func: Any) -> str:
    """Return the name of a function of torch. The name of a property is on its descriptor."""
    named = func.__self__ if getattr(func, "__name__", "") == "__get__" else func
    return str(getattr(named, "__name__", named))


def _tensors(*values: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested arguments."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(*value)
        elif isinstance(value, dict):
            yield from _tensors(*value.values())
