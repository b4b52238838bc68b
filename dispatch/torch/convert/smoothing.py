"""SmoothQuant: int8 layers, with outliers of the inputs moved into the weights.

The arithmetic has the bits of `skuda.tools.smoothquant`, which documents the precision of each step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from skuda.kernels.smoothing import factors
from skuda.registry.errors import InvalidProblem, SkudaError
from skuda.registry.text import shown
from skuda.torch.convert.calibration import Calibration, check_calibration
from skuda.torch.formats import INT8, Quantizer, quantizer
from skuda.torch.formats.int8 import CODES
from skuda.torch.linear.activation import Nonfinite, check_nonfinite
from skuda.torch.linear.int8_linear import Int8Linear, StaticLinear, layer_of, propagating
from skuda.torch.models.folded import record
from skuda.torch.models.replaceable_layers import hooked

ALPHAS = tuple(i / 20 for i in range(21))
"""The strengths that a search tries."""


@dataclass(frozen=True, eq=False)
class _Smooth:
    calibration: Calibration
    alpha: float | Literal["search"] | None = 0.5
    fold: bool = True
    nonfinite: Nonfinite = "ignore"
    weights: str = "int8"
    group_size: int = 128

    _static = False

    def __post_init__(self) -> None:
        subject = type(self).__name__
        _check(subject, self.calibration, self.alpha, self.fold)
        check_nonfinite(subject, self.nonfinite)
        if self.quantizer.format.element.is_split:
            rule = "be of at most 8 bits, as its activations are: see Dynamic(activations='int16')"
            raise InvalidProblem(subject, "weights", shown(self.weights), rule)
        if self.quantizer.format != INT8 and self.alpha == "search":
            rule = "be a number, or weights 'int8', which a search is for; or see Dynamic(calibration=...)"
            raise InvalidProblem(subject, "alpha", shown(self.alpha), rule)

    @property
    def quantizer(self) -> Quantizer:
        """What quantizes weights."""
        return quantizer(type(self).__name__, self.weights, self.group_size)

    def convert(self, name: str, linear: nn.Linear) -> Int8Linear:
        """Return the int8 form of one layer, which divides its own input.

        Raises
        ------
        InvalidProblem
            If the layer was not calibrated, or has values that are not finite.
        """
        return self._converted(name, linear, self._smooth({name: linear}))

    def together(self, model: nn.Module, linears: Mapping[str, nn.Linear]) -> _Smoothing:
        """Find the layers of a call of `quantize_` whose factors a norm can take over."""
        shared: dict[str, Tensor | None] = {}
        norms: dict[str, tuple[str, ...]] = {}
        not_folded: dict[str, str] = {}
        if self.fold and self.alpha is not None:
            modules = dict(model.named_modules())
            not_folded |= self.calibration.not_folded
            for norm, names in self.calibration.norms.items():
                others = [name for name in names if name not in linears]
                reason = f"{others[0]} stays as it is" if others else None
                if not others and norm not in modules:
                    reason = "there is no such module in this model"
                elif not others:
                    reason = not_proportional(modules[norm], linears[names[0]].in_features)
                try:
                    smooth = None if reason else self._smooth({name: linears[name] for name in names})
                except SkudaError as error:
                    reason = str(error)
                if reason is None:
                    shared |= dict.fromkeys(names, smooth)
                if reason is None and smooth is not None:
                    norms[norm] = names
                else:
                    not_folded[norm] = reason or "no smoothing has the least error"
        return _Smoothing(self, shared, norms, not_folded)

    def _converted(self, name: str, linear: nn.Linear, smooth: Tensor | None) -> Int8Linear:
        return self.like(self._made(linear.weight, linear.bias, self._maxima(name, linear), smooth))

    def like(self, made: Int8Linear) -> Int8Linear:
        """Let a layer do with what is not finite as the config says. Return it."""
        return propagating(made) if self.nonfinite == "propagate" else made

    def _made(self, weight: Tensor, bias: Tensor | None, maxima: Tensor, smooth: Tensor | None) -> Int8Linear:
        """Quantize a layer whose inputs have these largest magnitudes."""
        weight, dtype = weight.detach(), weight.dtype
        if smooth is not None:
            smooth = smooth.to(weight.device)
            # Division by a positive number is monotone, so this is the input's largest quotient.
            maxima, weight = torch.ops.skuda.smooth(maxima, smooth), weight.float() * smooth
        if not bool(maxima.isfinite().all()):
            raise InvalidProblem(type(self).__name__, "maxima", "an infinity", "be finite after smoothing")
        tensors = *self.quantizer(weight), bias
        scale = torch.ops.skuda.dynamic_range(maxima[None], **CODES)[1] if self._static else None
        return layer_of(*tensors, dtype=dtype, in_features=weight.shape[1], input_scale=scale, smooth=smooth)

    def _maxima(self, name: str, linear: nn.Linear) -> Tensor:
        left = self.calibration.left.get(name)
        maxima = self.calibration.maxima.get(name)
        subject = type(self).__name__
        if left is not None or maxima is None:
            raise InvalidProblem(subject, "calibration", left or f"no inputs of {name}", "be of a run of it")
        if maxima.numel() != linear.in_features:
            had = f"{maxima.numel()} channels for {name}"
            raise InvalidProblem(subject, "calibration", had, f"be of this model, {linear.in_features} channels")
        if not bool(maxima.isfinite().all()):
            raise InvalidProblem(subject, "calibration", f"an infinite input of {name}", "be finite")
        return maxima.to(linear.weight.device)

    def _smooth(self, linears: Mapping[str, nn.Linear]) -> Tensor | None:
        """Return the factors of layers with the same input."""
        if self.alpha is None:
            return None
        inputs = largest([self._maxima(name, linear) for name, linear in linears.items()])
        weights = largest([column_maxima(linear.weight) for linear in linears.values()])
        if not bool(weights.isfinite().all()):
            raise InvalidProblem(type(self).__name__, "weight", "an infinity or NaN", "be finite")

        def made(alpha: float | None) -> Tensor | None:
            if alpha is None:
                return None
            found = factors(inputs.cpu().numpy(), weights.cpu().numpy(), alpha)
            return torch.from_numpy(found).to(inputs.device)

        if not isinstance(self.alpha, str):
            return made(float(self.alpha))
        trials = [self._trial(name, linear) for name, linear in linears.items()]
        # `min` returns the first of equals, and the strengths ascend.
        return made(min((None, *ALPHAS), key=lambda alpha: sum(trial(made(alpha)) for trial in trials)))

    def _trial(self, name: str, linear: nn.Linear) -> Callable[[Tensor | None], float]:
        """Return the expected error of a layer on its sample, as a function of the factors; see `SmoothStatic`."""
        rows = self.calibration.rows.get(name)
        rows = rows[rows.isfinite().all(1)].float().to(linear.weight.device) if rows is not None else None
        if rows is None or not len(rows):
            had, rule = f"no finite rows of {name}", "have kept some to search"
            raise InvalidProblem(type(self).__name__, "calibration", had, rule)
        maxima, weight = self._maxima(name, linear), linear.weight.detach().float()

        def error(smooth: Tensor | None) -> float:
            factor = torch.ones_like(maxima) if smooth is None else smooth.to(rows.device)
            inputs, columns = (rows / factor).double(), (weight * factor).double()
            steps = (maxima / factor).amax().double().expand(len(rows)) if self._static else inputs.abs().amax(1)
            of_inputs = steps.square().sum() * columns.square().sum()
            found = float(of_inputs + columns.abs().amax(1).square().sum() * inputs.square().sum())
            return found if isfinite(found) else inf  # of factors that overflow

        return error


@dataclass(frozen=True, eq=False)
class SmoothStatic(_Smooth):
    """Config of `quantize_`: one activation scale per layer from calibration, after SmoothQuant's smoothing.

    If layers get their inputs from one norm, and nothing else uses the norm's output, they share factors, which follow
    from the largest weights of all of them. The norm's weight and bias are divided by the factors. The quotients are
    computed in f32 and rounded to the norm's dtype, so the inputs differ by rounding errors of that dtype from a
    division at run time. Any other layer divides its own input by its own factors.

    Parameters
    ----------
    calibration : Calibration
        The calibration of the same model; see `calibrate`.
    alpha : float, "search" or None
        Smoothing strength in 0..1. None means no smoothing. ``"search"``, for weights of 8 bits, tries no smoothing and
        0, 0.05, ..., 1. It takes what has the least expected error on the rows of the calibration, summed over layers
        with the same factors; of equals the first. The error takes what codes lose as noise whose square is that of the
        scale, in inputs and in weights: the sum of squares of the largest magnitude of each row of inputs times that of
        the weight, plus the same with the two exchanged.
    fold : bool
        Whether factors may be folded into norms.
    nonfinite : {"ignore", "propagate"}
        What a NaN or an infinity in an input does. By default a NaN counts as 0, and an infinity as the end of the
        range. With ``"propagate"`` its row of the output becomes NaN, as for `Dynamic`, but at the cost of one more
        pass over the input and one over the output.
    weights, group_size
        The bits of a weight, as in `Dynamic`.
    dynamic_above : float, optional
        Layers whose outputs have a larger squared error, for the kept rows, than this multiple of that with a scale per
        row, get scales per row: they become `DynamicLinear` or `SmoothedLinear`. By default none, and the report says
        for how many layers it is more than twice. In language models, a few large inputs make it hundreds.

    Raises
    ------
    InvalidProblem
        For an argument of the wrong type, or an incomplete calibration.
    """

    dynamic_above: float | None = None

    _static = True

    def __post_init__(self) -> None:
        super().__post_init__()
        limit: object = self.dynamic_above
        number = isinstance(limit, (int, float)) and not isinstance(limit, bool) and limit > 0
        if not (number or limit is None):
            raise InvalidProblem("SmoothStatic", "dynamic_above", shown(limit), "be a positive number or None")


@dataclass(frozen=True, eq=False)
class SmoothDynamic(_Smooth):
    """Config of `quantize_`: `Dynamic`, after SmoothQuant's smoothing.

    Factors are shared and folded as for `SmoothStatic`. Layers without factors, or behind a norm that took them over,
    become `DynamicLinear`, and are as fast as those of `Dynamic`. Others become `SmoothedLinear`, which `fuse_` and
    `parallelize_` leave. To have none of these, let a filter select ``calibration.norms``, and then quantize the rest
    with `Dynamic`.

    Parameters
    ----------
    calibration, alpha, fold, nonfinite, weights, group_size
        As in `SmoothStatic`; for `nonfinite`, see `Dynamic`.

    Raises
    ------
    InvalidProblem
        For an argument of the wrong type, or an incomplete calibration.
    """


class _Smoothing:
    """A config with the layers that share factors.

    Attributes
    ----------
    not_folded : dict of str to str
        Norms in front of layers that did not take over factors, and why.
    static_errors : dict of str to float
        By static layer, the squared error of its outputs over that with a scale per row.
    """

    def __init__(
        self,
        config: _Smooth,
        shared: Mapping[str, Tensor | None],
        norms: Mapping[str, tuple[str, ...]],
        not_folded: dict[str, str],
    ) -> None:
        self._config, self._shared, self._norms, self.not_folded = config, shared, norms, not_folded
        self.static_errors: dict[str, float] = {}

    def convert(self, name: str, linear: nn.Linear) -> Int8Linear:
        """Return the int8 form of one layer."""
        if name not in self._shared:
            made = self._config.convert(name, linear)
        else:
            made = self._config._converted(name, linear, self._shared[name])  # noqa: SLF001  the two are one
        rows = self._config.calibration.rows.get(name)
        if not isinstance(self._config, SmoothStatic) or rows is None or not len(rows):
            return made
        assert isinstance(made, StaticLinear)
        error, limit = _static_error(made, rows.to(linear.weight.device)), self._config.dynamic_above
        if limit is None or error <= limit:
            self.static_errors[name] = error
            return made
        given: Any = {"dtype": made.weight_dtype, "in_features": made.in_features, "smooth": made.smooth}
        return self._config.like(layer_of(made.weight_q, made.weight_scale, made.bias, **given))

    def fold(self, model: nn.Module, converted: Mapping[str, nn.Module]) -> dict[str, tuple[str, ...]]:
        """Fold factors into norms if all of their layers were converted. Return these layers by norm."""
        folded = {}
        for norm, names in self._norms.items():
            layers: list[Any] = [converted[name] for name in names if name in converted]
            smooth = self._shared[names[0]]
            assert smooth is not None
            if len(layers) < len(names):
                self.not_folded[norm] = "not all of its layers could be converted"
            elif _divide(model.get_submodule(norm), smooth):
                folded[norm] = names
                for layer in layers:
                    layer.take_smooth()
            else:
                self.not_folded[norm] = "its dtype cannot hold the quotients"
        record(model, folded, {norm: cast("Tensor", self._shared[names[0]]) for norm, names in folded.items()})
        return folded


@torch.no_grad()
def _static_error(layer: StaticLinear, rows: Tensor) -> float:
    """Return the squared error that a fixed scale makes in the outputs for rows, over that of a scale per row."""
    rows = rows[rows.isfinite().all(1)]
    values = rows.float() if layer.smooth is None else torch.ops.skuda.smooth(rows, layer.smooth)
    codes, scale, _ = torch.ops.skuda.dynamic_range(values, **CODES)
    integers = layer.format.integers(layer.weight_q, layer.out_features, layer.in_features)
    energy = (integers.float() * layer.weight_scale).double().square().sum(0)
    fixed, own = (
        float(((values.double() - taken.double() * step.double()).square() * energy).sum())
        for taken, step in ((layer.codes(rows), layer.input_scale), (codes, scale[:, None]))
    )
    return fixed / own if own else (inf if fixed else 1.0)


def _check(subject: str, calibration: object, alpha: object, fold: object) -> None:
    check_calibration(subject, calibration)
    number = isinstance(alpha, (int, float)) and not isinstance(alpha, bool) and 0 <= alpha <= 1
    if not (number or alpha is None or (isinstance(alpha, str) and alpha == "search")):
        raise InvalidProblem(subject, "alpha", shown(alpha), 'be a number in 0..1, "search" or None')
    if not isinstance(fold, bool):
        raise InvalidProblem(subject, "fold", shown(fold), "be True or False")


def column_maxima(weight: Tensor) -> Tensor:
    """Return the largest magnitude of each column of a weight, f32."""
    if not len(weight):
        return weight.new_zeros(weight.shape[1], dtype=torch.float32)
    return weight.detach().abs().amax(0).float()


def largest(vectors: list[Tensor]) -> Tensor:
    """Return the largest element at each place, on the first vector's device."""
    return torch.stack([vector.to(vectors[0].device) for vector in vectors]).amax(0)


def _parameters(norm: nn.Module) -> dict[str, Tensor]:
    """Return the weight and bias of a norm."""
    own = dict(norm.named_parameters(recurse=False))
    return {name: own[name].detach() for name in ("weight", "bias") if name in own}


def not_proportional(norm: nn.Module, size: int) -> str | None:
    """Return why dividing a norm's weight and bias does not divide its output of this size, or None."""
    own = _parameters(norm)
    if hooked(norm) or nn.utils.parametrize.is_parametrized(norm):
        return "it has hooks or parametrizations"
    if any(tuple(value.shape) != (size,) or value.is_meta for value in own.values()) or "weight" not in own:
        return f"it has no weight of shape [{size}]"
    # Some norms, like those of Gemma, scale by 1 + weight. Products with powers of two are exact, so for a norm that
    # scales by its weight the two outputs are equal.
    generator = torch.Generator("cpu").manual_seed(0)
    weight, cpu = own["weight"], {"device": "cpu"}  # whatever the default device
    powers = torch.tensor([0.0, 1.0, 2.0], **cpu)[torch.randint(3, (size,), generator=generator, **cpu)].to(weight)
    probe = torch.randn(2, size, generator=generator, **cpu).to(weight)
    values = {name: (1 + torch.rand(size, generator=generator, **cpu)).to(value) for name, value in own.items()}
    scaled = {name: value * powers for name, value in values.items()}
    try:
        with torch.no_grad():
            alike = copy.deepcopy(norm)  # the norm itself may count its calls
            plain, folded = (torch.func.functional_call(alike, part, (probe,)) for part in (values, scaled))
            if isinstance(plain, Tensor) and torch.equal(plain * powers, folded):
                return None
    except (TypeError, ValueError, RuntimeError, IndexError):  # it takes other arguments
        pass
    return "its output is not proportional to its weight and bias"


def _divide(norm: nn.Module, smooth: Tensor) -> bool:
    """Divide a norm's weight and bias by factors, if its dtype holds the quotients with full precision."""
    found = {}
    for name, value in _parameters(norm).items():
        quotient = torch.ops.skuda.smooth(value, smooth.to(value.device)).to(value.dtype)
        normal = quotient.abs() >= torch.finfo(value.dtype).tiny
        if not bool((quotient.isfinite() & (normal | (value == 0))).all()):
            return False
        found[name] = quotient
    for name, quotient in found.items():
        setattr(norm, name, nn.Parameter(quotient, requires_grad=norm.get_parameter(name).requires_grad))
    return True
