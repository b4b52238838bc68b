"""The meaning of every op, one element at a time, in integers and fractions.

Written from the contract alone: no NumPy arithmetic, no blocks, no broadcasting. Python floats only carry values (every
f16, bf16 and f32 number is also an f64 one); every operation goes through `Fraction` and is rounded here, but for the
sums of long rows, whose steps are f64 operations that round as exactly.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any, NamedTuple

import mpmath
import numpy as np

NAN, INF = math.nan, math.inf


class Format(NamedTuple):
    """A binary floating format: significant bits and largest exponent."""

    precision: int
    top: int


FORMATS = {"f16": Format(11, 15), "bf16": Format(8, 127), "f32": Format(24, 127), "f64": Format(53, 1023)}
RANGES = {"s4": (-8, 7), "u4": (0, 15), "s8": (-128, 127), "u8": (0, 255)}
RANGES |= {"s16": (-32_639, 32_639), "s32": (-(2**31), 2**31 - 1), "s64": (-(2**63), 2**63 - 1)}


def compute(element: str) -> str:
    """Return the type C of data of type T."""
    return "f64" if element == "f64" else "f32"


# --- correctly rounded arithmetic ------------------------------------------------------------------------------------


def nearest_even(value: Fraction) -> int:
    """Round to the nearest integer, ties to even."""
    below, rest = divmod(value.numerator, value.denominator)
    if 2 * rest == value.denominator:
        return below + below % 2
    return below + (2 * rest > value.denominator)


def _exponent(value: Fraction) -> int:
    """Floor of the base-2 logarithm of a positive number."""
    guess = value.numerator.bit_length() - value.denominator.bit_length()
    return guess if value >= Fraction(2) ** guess else guess - 1


def _quantum(value: Fraction, form: Format) -> int:
    """Exponent of one unit in the last place at `value`."""
    lowest = 1 - form.top
    exponent = max(_exponent(abs(value)), lowest) if value else lowest
    return exponent - form.precision + 1


def _least(element: str) -> float:
    """Return the least positive number of a format."""
    return math.ldexp(1.0, _quantum(Fraction(0), FORMATS[element]))


def to_format(value: Fraction, element: str, *, negative_zero: bool = False) -> float:
    """Round an exact number to a format: ties to even, subnormals kept, infinity beyond the largest number."""
    form = FORMATS[element]
    unit = _quantum(value, form)
    steps = nearest_even(abs(value) / Fraction(2) ** unit)
    if steps == 0:
        return -0.0 if value < 0 or (value == 0 and negative_zero) else 0.0
    if steps * Fraction(2) ** unit >= Fraction(2) ** (form.top + 1):
        return -INF if value < 0 else INF
    return math.copysign(math.ldexp(steps, unit), value)


def convert(value: float, element: str) -> float:
    """Round a number that may be special."""
    if math.isnan(value) or math.isinf(value):
        return value
    return to_format(Fraction(value), element, negative_zero=_negative(value))


def _negative(value: float) -> bool:
    return math.copysign(1.0, value) < 0


def multiply(a: float, b: float, element: str) -> float:
    """IEEE product."""
    if math.isnan(a) or math.isnan(b):
        return NAN
    negative = _negative(a) != _negative(b)
    if math.isinf(a) or math.isinf(b):
        return NAN if 0 in (a, b) else (-INF if negative else INF)
    return to_format(Fraction(a) * Fraction(b), element, negative_zero=negative)


def divide(a: float, b: float, element: str) -> float:
    """IEEE quotient."""
    if math.isnan(a) or math.isnan(b):
        return NAN
    negative = _negative(a) != _negative(b)
    if math.isinf(a) or b == 0:
        return NAN if math.isinf(b) or (a == 0 and b == 0) else (-INF if negative else INF)
    if math.isinf(b):
        return -0.0 if negative else 0.0
    return to_format(Fraction(a) / Fraction(b), element, negative_zero=negative)


def add(a: float, b: float, element: str) -> float:
    """IEEE sum."""
    if math.isnan(a) or math.isnan(b) or (math.isinf(a) and math.isinf(b) and a != b):
        return NAN
    if math.isinf(a) or math.isinf(b):
        return a if math.isinf(a) else b
    return to_format(Fraction(a) + Fraction(b), element, negative_zero=_negative(a) and _negative(b))


# --- affine quantization ---------------------------------------------------------------------------------------------


def steps_of(x: float, scale: float, c: str) -> float:
    """``t = rne(RN_C(x / s))``: an integer, an infinity, or NaN."""
    quotient = divide(x, scale, c)
    return nearest_even(Fraction(quotient)) if math.isfinite(quotient) else quotient


def code_of(t: float, zero_point: int, low: int, high: int) -> int:
    """``clamp(t + z)``; NaN counts as real zero."""
    if isinstance(t, float):
        if math.isinf(t):
            return high if t > 0 else low
        t = 0
    return min(max(t + zero_point, low), high)


def passes(t: float, zero_point: int, low: int, high: int) -> bool:
    """Whether a gradient passes: inclusive bounds, nothing through NaN or an infinity."""
    return not isinstance(t, float) and low <= t + zero_point <= high


def real_of(q: int, zero_point: int, scale: float, element: str) -> float:
    """``RN_T(RN_C(C(q - z) * s))``."""
    c = compute(element)
    return convert(multiply(to_format(Fraction(q - zero_point), c), scale, c), element)


def dynamic_range(
    values: Iterable[float], low: int, high: int, element: str, *, symmetric: bool = True, propagate: bool = False
) -> tuple[float, int]:
    """Scale and zero point of one segment, in which a NaN is skipped, or to `propagate` counts as an infinity."""
    c = compute(element)
    values = list(values)
    if not values:
        return 1.0, 0
    known = [INF if math.isnan(v) else v for v in values if propagate or not math.isnan(v)]
    if symmetric:
        peak = max((abs(v) for v in known), default=0.0)
        return divide(peak, float(high), c) or 1.0, 0
    least, most = min([0.0, *known]), max([0.0, *known])
    scale = divide(add(most, -least, c), float(high - low), c) or 1.0
    t = steps_of(least, scale, c)
    return scale, code_of(t if math.isnan(t) else -t, low, low, high)


# --- the linear layers' epilogue -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Within:
    """A result whose definition is known to f64's last bits: any number from `low` to `high`, or NaN where `or_nan`."""

    low: float
    high: float
    or_nan: bool = False


Expected = float | Within


def linear_cell(
    scales: tuple[float, float], acc: int | None, bias: float | None, kind: str, types: tuple[str, str]
) -> Expected:
    """Return ``RN_T(epi(RN_C(RN_C(sa * sw) * RN_C(acc))))``, less requantization; acc None stands for K == 0.

    For codes T is C.
    """
    c, out = types
    value = 0.0
    if acc is not None:
        value = multiply(multiply(*scales, c), to_format(Fraction(acc), c), c)
    if bias is not None:
        value = add(value, bias, c)
    if kind == "bias_relu":
        value = 0.0 if value <= 0 else value
    final = c if out in RANGES else out
    if kind in ("bias_gelu", "bias_silu") and value != 0:
        return _between(_curve_ends(value, "erf" if kind == "bias_gelu" else "silu", final))
    return convert(value, final)


def _fraction(y: Any) -> Fraction:
    """Return the exact value of a number of mpmath, or 0 for one far below the least f64.

    The denominator of such a one may have billions of bits.
    """
    sign, mantissa, exponent, bits = y._mpf_
    return Fraction(0) if exponent + bits < -1200 else (-1) ** sign * int(mantissa) * Fraction(2) ** exponent


def requantize(value: Expected, scale: float, zero_point: int, c: str, out: str) -> Expected:
    """``clamp(rne(RN_C(v / s_out)) + z_out)``."""
    if isinstance(value, Within):
        ends = [code_of(steps_of(v, scale, c), zero_point, *RANGES[out]) for v in (value.low, value.high)]
        return Within(min(ends), max(ends))
    return code_of(steps_of(value, scale, c), zero_point, *RANGES[out])


def matches(got: float, want: Expected) -> bool:
    """Whether a result is what the definition says; NaN equals NaN, the zeros differ."""
    if isinstance(want, Within):
        return want.low <= got <= want.high or (want.or_nan and math.isnan(got))
    if isinstance(want, int):
        return got == want
    if math.isnan(want):
        return math.isnan(got)
    return got == want and _negative(got) == _negative(want)


# --- ops -------------------------------------------------------------------------------------------------------------

Coordinate = tuple[int, ...]
Definition = Callable[[str, Coordinate], Expected]


def element_at(array: Any, element: str, at: Coordinate) -> float:
    """Read one element: a packed one from its nibble, low first, one of 16 bits from its halves, the high one first."""
    if element in ("s4", "u4"):
        byte = int(array[(*at[:-1], at[-1] // 2)])
        nibble = byte >> 4 if at[-1] % 2 else byte & 15
        return nibble - 16 if element == "s4" and nibble > 7 else nibble
    if element == "s16":
        return 256 * int(array[at]) + int(array[(*at[:-1], array.shape[-1] // 2 + at[-1])])
    return int(array[at]) if element in RANGES else float(array[at])


def _only(value: Any) -> Any:
    """Return the number that a number or an array of one element holds."""
    return value.reshape(-1)[0] if hasattr(value, "reshape") else value


def segment_of(problem: Any, at: Coordinate) -> Coordinate | None:
    """Index of the scale that one element uses; None for a single one."""
    if hasattr(problem, "group_size"):
        return (at[0], at[1] // problem.group_size)
    if hasattr(problem, "axis"):
        return (at[problem.axis],)
    return (at[0],) if hasattr(problem, "d") else None


DEFINITIONS: dict[str, Callable[[Any, dict[str, Any]], Definition]] = {}


def defines(*ops: str) -> Callable[[Any], Any]:
    """Declare a function as the definition of some ops.

    It takes a problem and its inputs, and returns a function of an output's name and a coordinate: what must be there.
    """

    def declared(made: Any) -> Any:
        DEFINITIONS.update(dict.fromkeys(ops, made))
        return made

    return declared


def definition(problem: Any, inputs: dict[str, Any]) -> Definition:
    """Return the function from (output, coordinate) to what must stand there."""
    assert problem.op in DEFINITIONS, (
        f'add an exact definition to tests/helpers/oracle.py, below @defines("{problem.op}")'
    )
    return DEFINITIONS[problem.op](problem, inputs)


@defines("fill")
def _fill(problem: Any, inputs: dict[str, Any]) -> Definition:
    element, value = problem.output_element, _only(inputs["value"])
    return lambda _, __: int(value) if element in RANGES else convert(float(value), element)


_QUANTIZED = [f"quantize_per_{part}" for part in ("tensor", "channel", "token", "group")]
_FAKE = ["fake_quantize", *(f"fake_{name}" for name in _QUANTIZED[1:])]
_FORWARD = [*_QUANTIZED, *(f"de{name}" for name in _QUANTIZED), *_FAKE]


@defines(*_FORWARD, *(f"{name}_backward" for name in _FORWARD))
def _elementwise(problem: Any, inputs: dict[str, Any]) -> Definition:
    return lambda _, at: _affine(problem, inputs, at)


def _affine(problem: Any, inputs: dict[str, Any], at: Coordinate) -> float:
    op, backward = problem.op, problem.op.endswith("_backward")
    dequantize = op.startswith("dequantize")
    element = problem.output_element if dequantize else problem.input_element
    c = compute(element)

    def parameter(name: str) -> Any:
        index = segment_of(problem, at)
        return _only(inputs[name]) if index is None else inputs[name][index]

    scale = convert(float(parameter("scale")), c)
    zero_point = int(parameter("zero_point")) if "zero_point" in inputs else 0
    gradient = float(inputs["d_output"][at]) if backward else NAN
    if dequantize:
        if backward:
            return convert(multiply(gradient, scale, c), element)
        return real_of(element_at(inputs["input"], problem.input_element, at), zero_point, scale, element)
    t = steps_of(float(inputs["input"][at]), scale, c)
    bounds = (problem.q_min, problem.q_max)
    if backward:
        if not passes(t, zero_point, *bounds):
            return 0.0
        return gradient if op.startswith("fake") else convert(divide(gradient, scale, c), element)
    q = code_of(t, zero_point, *bounds)
    if not op.startswith("fake"):
        return q
    return real_of(q, zero_point, scale, element) or 0.0


@defines("dynamic_range")
def _dynamic_range_op(problem: Any, inputs: dict[str, Any]) -> Definition:
    data, scope = inputs["input"], problem.scope
    found: dict[Coordinate, tuple[float, int]] = {}

    def members(index: Coordinate) -> Any:
        if scope == "tensor":
            return data
        if scope == "group":
            start = index[1] * problem.group_size
            return data[index[0], start : start + problem.group_size]
        return data[:, index[0]] if scope == "channel" and problem.axis == 1 else data[index[0]]

    def parameters(index: Coordinate) -> tuple[float, int]:
        if index not in found:
            with np.errstate(invalid="ignore"):  # a signalling NaN warns when it is converted
                values = members(index).reshape(-1).astype(float).tolist()
            symmetric = problem.mode == "symmetric"
            bounds = (problem.q_min, problem.q_max)
            found[index] = dynamic_range(values, *bounds, problem.input_element, symmetric=symmetric)
        return found[index]

    def at(name: str, where: Coordinate) -> float:
        if name != "output":
            return parameters(where)[name == "zero_point_out"]
        index = {"tensor": (0,), "token": where[:1], "channel": (where[problem.axis or 0],)}.get(scope)
        if index is None:
            index = (where[0], where[1] // problem.group_size)
        scale, zero_point = parameters(index)
        t = steps_of(float(data[where]), scale, compute(problem.input_element))
        return code_of(t, zero_point, problem.q_min, problem.q_max)

    return at


@defines("amax")
def _amax_op(problem: Any, inputs: dict[str, Any]) -> Definition:
    peaks: dict[int, float] = {}

    def at(_: str, where: Coordinate) -> float:
        if where[0] not in peaks:
            with np.errstate(invalid="ignore"):  # a signalling NaN warns when it is converted
                values = inputs["input"][where[0]].astype(float).tolist()
            peaks[where[0]] = max(map(abs, _numbers(values)), default=0.0)
            if problem.nonfinite == "propagate" and len(_numbers(values)) < len(values):
                peaks[where[0]] = INF
        return peaks[where[0]]

    return at


@defines("amax_quantize")
def _amax_quantize_op(problem: Any, inputs: dict[str, Any]) -> Definition:
    c = compute(problem.input_element)

    def at(name: str, where: Coordinate) -> float:
        scale = divide(float(inputs["amax"][where[0]]), float(problem.q_max), c) or 1.0
        if name == "scale_out":
            return scale
        with np.errstate(invalid="ignore"):
            value = float(inputs["input"][where])
        return code_of(steps_of(value, scale, c), 0, problem.q_min, problem.q_max)

    return at


def _activation_row(problem: Any, inputs: dict[str, Any], c: str, m: int) -> tuple[float, list[int]]:
    """Return the scale of a row of a linear layer's activation, and its codes without their zero point."""
    if problem.op == "quantized_linear":
        element, bounds = problem.activation_element, (problem.q_min, problem.q_max)
        values = [float(v) for v in inputs["activation"][m]]
        scale, _ = dynamic_range(values, *bounds, element, propagate=problem.nonfinite == "propagate")
        return scale, [code_of(steps_of(v, scale, compute(element)), 0, *bounds) for v in values]
    zero_point = int(_of_the_row(problem, inputs, "act_zero_point", m, 0))
    scale = convert(float(_of_the_row(problem, inputs, "act_scale", m, NAN)), c)
    return scale, [q - zero_point for q in _codes_of(inputs["act_q"][m], problem.activation_element)]


def _codes_of(row: Any, element: str) -> list[int]:
    """Return the codes of a row of 8 or 16 bits."""
    return [int(element_at(row, element, (k,))) for k in range(len(row) // (2 if element == "s16" else 1))]


def _weight_row(problem: Any, weight: Any, n: int) -> list[int]:
    """Return the codes of an output channel. Those of a packed weight are levels times a scale, plus an offset."""
    if problem.weight_element != "s4":
        return _codes_of(weight[n], problem.weight_element)

    def code(k: int) -> int:
        block = weight[n // 16, k // 128].tolist()
        (h, r), (j, within) = divmod(n % 16, 8), divmod(k % 128, 32)
        (high, within), groups = divmod(within, 16), 128 // problem.group_size
        byte = block[j // 2 * 512 + r * 64 + within // 4 * 16 + j % 2 * 8 + h * 4 + within % 4]
        scale, base = block[1024 + (r * groups + k % 128 // problem.group_size) * 4 + h * 2 :][:2]
        return (byte >> 4 * high & 15) * scale + base - 128

    return [code(k) for k in range(problem.k)]


@defines("quantized_linear", "smoothquant_linear", "scaled_linear")
def _linear_op(problem: Any, inputs: dict[str, Any]) -> Definition:
    dynamic = problem.op == "quantized_linear"
    out = problem.output_element
    c = "f64" if "f64" in ((problem.activation_element, out) if dynamic else (out,)) else "f32"
    rows: dict[int, tuple[float, list[int]]] = {}

    def at(name: str, where: Coordinate) -> Expected:
        if where[0] not in rows:
            rows[where[0]] = _activation_row(problem, inputs, c, where[0])
        scale, codes = rows[where[0]]
        if name == "act_scale_scratch":
            return scale
        n = where[1]
        if name == "act_q_scratch":
            return codes[n]
        shift = int(inputs["weight_zero_point"][n]) if "weight_zero_point" in inputs else 0
        row = _weight_row(problem, inputs["weight_q"], n)
        acc = sum(a * (w - shift) for a, w in zip(codes, row, strict=True))
        if problem.weight_element == "s16":  # by definition without the products of low halves
            acc -= sum(((a + 128) % 256 - 128) * ((w + 128) % 256 - 128) for a, w in zip(codes, row, strict=True))
        if out in ("s32", "s64"):
            return acc
        return _finished(problem, inputs, (scale, acc), n, (c, out))

    return at


@defines("rescale")
def _rescale_op(problem: Any, inputs: dict[str, Any]) -> Definition:
    out = problem.output_element
    c = compute(out)

    def at(_: str, where: Coordinate) -> Expected:
        m, n = where
        scale, za = (_of_the_row(problem, inputs, name, m, 0) for name in ("act_scale", "act_zero_point"))
        zw = int(inputs["weight_zero_point"][n]) if "weight_zero_point" in inputs else 0
        acc = int(inputs["sums"][where]) + problem.k * int(za) * zw
        acc -= int(za) * int(inputs["weight_sums"][n]) if za else 0
        acc -= zw * int(inputs["act_sums"][m]) if zw else 0
        return _finished(problem, inputs, (convert(float(scale), c), acc), n, (c, out))

    return at


def _of_the_row(problem: Any, inputs: dict[str, Any], name: str, m: int, default: float) -> Any:
    """Read an array for every row or for all of them, or else a field of the problem, if there is one."""
    if name not in inputs:
        return getattr(problem, name, default)
    return inputs[name][0 if problem.act_scale_scope == "tensor" else m]


def _finished(
    problem: Any, inputs: dict[str, Any], cell: tuple[float, int], n: int, types: tuple[str, str]
) -> Expected:
    """Return an output of a linear layer from the scale of its row and its exact sum."""
    (scale, acc), (c, out) = cell, types
    bias = convert(float(inputs["bias"][n]), c) if "bias" in inputs else None
    scales = (scale, convert(float(inputs["weight_scale"][n]), c))
    value = linear_cell(scales, acc if problem.k else None, bias, problem.epilogue, types)
    if out not in RANGES:
        return value
    step = convert(float(_only(inputs["output_scale"])), c)
    return requantize(value, step, int(_only(inputs["output_zero_point"])), c, out)


@defines("rms_norm_quantize", "layer_norm_quantize")
def _norm_op(problem: Any, inputs: dict[str, Any]) -> Definition:
    element = problem.input_element
    c = compute(element)
    rows: dict[int, tuple[list[float], list[float], float, int]] = {}

    def row(n: int) -> tuple[list[float], list[float], float, int]:
        if n not in rows:
            with np.errstate(invalid="ignore"):  # a signalling NaN warns when it is converted
                h, y = _normalized(problem, inputs, n)
            if problem.scaling == "dynamic":
                bounds = (problem.q_min, problem.q_max)
                scale, zero_point = dynamic_range(y, *bounds, element, propagate=problem.nonfinite == "propagate")
            else:
                scale, zero_point = convert(float(_only(inputs["scale"])), c), int(_only(inputs["zero_point"]))
            rows[n] = h, y, scale, zero_point
        return rows[n]

    def at(name: str, where: Coordinate) -> float:
        h, y, scale, zero_point = row(where[0])
        if name == "scale_out":
            return scale
        if name != "output":
            return (h if name == "residual_out" else y)[where[1]]
        return code_of(steps_of(y[where[1]], scale, c), zero_point, problem.q_min, problem.q_max)

    return at


def _normalized(problem: Any, inputs: dict[str, Any], n: int) -> tuple[list[float], list[float]]:
    """Return row `n` of the data and of the normalized data."""
    element, c = problem.input_element, compute(problem.input_element)
    count = convert(float(problem.d), c)
    h = [float(v) for v in inputs["input"][n]]
    if "residual" in inputs:
        h = [convert(_plus(a, float(b), c), element) for a, b in zip(h, inputs["residual"][n], strict=True)]
    y = h
    if problem.op == "layer_norm_quantize":
        mean = divide(fold_of(h, c), count, c)
        y = [_plus(v, -mean, c) for v in h]
    square = divide(fold_of([_times(v, v, c) for v in y], c), count, c)
    total = add(square, convert(float(problem.eps), c), c)
    factor = divide(1.0, convert(math.sqrt(total), c) if total >= 0 else NAN, c)
    y = [_times(v, factor, c) for v in y]
    for name, step in (("weight", _times), ("bias", _plus)):
        if name in inputs:
            y = [step(a, float(b), c) for a, b in zip(y, inputs[name], strict=True)]
    return h, [convert(v, element) for v in y]


def fold_of(values: list[float], element: str) -> float:
    """Sum a row in the order of the normalizing ops: chunks of 8 elements, 1024 lanes, halves onto halves."""
    lanes = [0.0] * 1024
    for chunk in range(-(-len(values) // 8)):
        part = (values[8 * chunk : 8 * chunk + 8] + [0.0] * 7)[:8]
        lanes[chunk % 1024] = _plus(lanes[chunk % 1024], _halves(part, element), element)
    return _halves(lanes, element)


def _halves(values: list[float], element: str) -> float:
    while len(values) > 1:
        half = len(values) // 2
        values = [_plus(values[i], values[i + half], element) for i in range(half)]
    return values[0]


# `add` and `multiply` for f32 and f64 numbers, fast: f64 has more than twice the bits of f32, so the sum of two f32
# numbers in it, or their product, which it holds exactly, rounds to the nearest f32.


def _plus(a: float, b: float, element: str) -> float:
    return ctypes.c_float(a + b).value if element == "f32" else a + b


def _times(a: float, b: float, element: str) -> float:
    return ctypes.c_float(a * b).value if element == "f32" else a * b


# --- attention -------------------------------------------------------------------------------------------------------


@defines("rope_quantize_append")
def _rope_quantize_append_op(problem: Any, inputs: dict[str, Any]) -> Definition:  # noqa: C901  one function for each step
    size, half = problem.head_size, problem.rotated // 2
    lengths, starts = inputs["lengths"].tolist(), inputs["starts"].tolist()
    positions: dict[int, int] = {}
    rows: dict[tuple[int, int], int] = {}
    for s, length in enumerate(lengths):
        for row in range(max(starts[s], starts[s + 1] - length), starts[s + 1]):  # without padding
            positions[row] = length - starts[s + 1] + row
            rows[int(inputs["block_table"][s, positions[row] // 128]), positions[row] % 128] = row
    heads: dict[tuple[str, int, int], tuple[float, list[float]]] = {}

    def normalized(h: list[float], name: str) -> list[float]:
        if f"{name}_norm" not in inputs:
            return h
        square = divide(fold_of([_times(v, v, "f32") for v in h], "f32"), float(size), "f32")
        total = add(square, convert(float(problem.eps), "f32"), "f32")
        factor = divide(1.0, convert(math.sqrt(total), "f32") if total >= 0 else NAN, "f32")
        weight = [float(w) for w in inputs[f"{name}_norm"]]
        y = [_times(_times(v, factor, "f32"), w, "f32") for v, w in zip(h, weight, strict=True)]
        return [convert(v, problem.input_element) for v in y]

    def turned(y: list[float], position: int) -> list[float]:
        x, table = list(y), [float(v) for v in inputs["cos_sin"][position]]
        for i in range(half):
            first, second = (i, i + half) if problem.rotary_layout == "half" else (2 * i, 2 * i + 1)
            for at, sign, other in ((first, -1, second), (second, 1, first)):
                product = _times(y[other], table[half + i], "f32")
                x[at] = _plus(_times(y[at], table[i], "f32"), sign * product, "f32")
        return x

    def head(name: str, row: int, number: int) -> tuple[float, list[float]]:
        key = name, row, number
        if key not in heads:
            with np.errstate(invalid="ignore"):  # a signalling NaN warns when it is converted
                x = [float(v) for v in inputs[name][row][number * size : (number + 1) * size]]
            if name != "v":
                x = turned(normalized(x, name), positions[row])
            if name == "k" and "k_offset" in inputs:
                x = [_plus(v, -float(o), "f32") for v, o in zip(x, inputs["k_offset"][number], strict=True)]
            heads[key] = dynamic_range(x, -127, 127, "f32", propagate=True)[0], x
        return heads[key]

    def code(name: str, row: int, number: int, element: int) -> float:
        scale, x = head(name, row, number)
        return code_of(steps_of(x[element], scale, "f32"), 0, -127, 127)

    def scale_in_cache(name: str, row: int, number: int) -> float:
        scale, x = head(name, row, number)
        return 0.0 if scale == 1 and not divide(max(map(abs, x)), 127.0, "f32") else scale

    def at(name: str, where: Coordinate) -> float:
        if name.startswith("q"):
            row, number, *element = where
            if row not in positions:
                return 0 if element else 1.0
            return code("q", row, number, element[0]) if element else head("q", row, number)[0]
        page, number, *inner = where
        slot, element = (inner[1], inner[0]) if name == "v_codes" else (inner[0], inner[-1])
        if name == "v_codes":
            group, column = divmod(slot, 16)
            slot = 16 * group + 8 * (column // 2 % 2) + 2 * (column // 4) + column % 2
        if (page, slot) not in rows:
            return float(inputs[name][where])
        row = rows[page, slot]
        return code(name[0], row, number, element) if name.endswith("codes") else scale_in_cache(name[0], row, number)

    return at


# --- gated activations -----------------------------------------------------------------------------------------------

Ends = tuple[float, ...]
"""The least and the largest value that the contract allows, then NaN if it allows that, too; or NaN alone."""


@cache
def _curve_ends(gate: float, curve: str, element: str) -> Ends:
    """Return the ends of ``RN_T(E(gate))``, where E is within 2^-49 of the curve and 2 units of f64, as the ops say."""
    if math.isnan(gate):
        return (NAN,)
    if math.isinf(gate) or gate < -3000 or gate > 3000:
        limit = convert(gate, element) if gate > 0 else -0.0
        return limit, limit
    with mpmath.workprec(160):
        x = mpmath.mpf(gate)
        if curve == "erf":
            y = x * mpmath.erfc(-x / mpmath.sqrt(2)) / 2
        else:
            cubic = 2 * mpmath.sqrt(2 / mpmath.pi) * (x + mpmath.mpf("0.044715") * x**3)
            y = x / (1 + mpmath.exp(-(cubic if curve == "tanh" else x)))
    true = _fraction(y)
    slack = abs(true) / 2**49 + (2 * Fraction(_least(element)) if element == "f64" else 0)
    ends = sorted((true - slack, true + slack))
    return tuple(to_format(end, element, negative_zero=_negative(gate)) or math.copysign(0.0, gate) for end in ends)


def _roughly(gate: float, curve: str) -> float:
    """Return the curve's magnitude at a gate, within a thousandth and 2^-1062."""
    if math.isnan(gate) or abs(gate) > 3000:
        return gate if not gate < 0 else 0.0
    if curve == "erf":
        return abs(gate) * math.erfc(-gate / math.sqrt(2)) / 2
    steep = 2 * math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3) if curve == "tanh" else gate
    return abs(gate) * math.exp(min(steep, 0.0)) / (1 + math.exp(-abs(steep)))


def _spanned(values: Iterable[float]) -> Ends:
    found = list(values)
    numbers = sorted(_numbers(found), key=lambda value: (value, not _negative(value)))
    ends = (numbers[0], numbers[-1]) if numbers else ()
    return ends if len(numbers) == len(found) else (*ends, NAN)


def _numbers(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def _between(ends: Ends) -> Expected:
    if len(ends) == 1:
        return NAN
    low, high, *nan = ends
    same = low == high and _negative(low) == _negative(high)
    return low if same and not nan else Within(low, high, or_nan=bool(nan))


@defines("silu_mul_quantize", "gelu_mul_quantize", "silu_mul_amax", "gelu_mul_amax")
def _gated(problem: Any, inputs: dict[str, Any]) -> Definition:  # noqa: C901  one function for each output
    element = problem.input_element
    c, curve = compute(element), str(getattr(problem, "approximation", "silu"))
    sides = (inputs["gate_up"][:, : problem.d], inputs["gate_up"][:, problem.d :]) if problem.fused else None
    gates, ups = sides or (inputs["gate"], inputs["up"])
    ranges: dict[int, Ends] = {}

    def y(row: int, column: int) -> Ends:
        with np.errstate(invalid="ignore"):  # a signalling NaN warns when it is converted
            gate, up = float(gates[row, column]), float(ups[row, column])
        # The cache would take one zero for the other.
        ends = (gate, gate) if gate == 0 else _curve_ends(gate, curve, element)
        if ends[0] < 0 < ends[-1]:
            ends = (*ends, 0.0)  # whose product with an infinity is NaN
        return _spanned(convert(multiply(end, up, c), element) for end in ends)

    def largest(row: int) -> list[int]:
        """Return the columns whose products may be the largest of a row, by plain floats."""
        with np.errstate(invalid="ignore"):
            pairs = list(zip(gates[row].astype(float).tolist(), ups[row].astype(float).tolist(), strict=True))
        # A gate near the least numbers of its element is rounded to another one, or vanishes.
        slack = max(2 * _least(element), 2.0**-1062)
        near = [(_roughly(gate, curve), abs(up)) for gate, up in pairs]
        low, high = ([max(gate * f + s, 0.0) * up for gate, up in near] for f, s in ((0.98, -slack), (1.02, slack)))
        most = max(filter(math.isfinite, low), default=0.0)  # an infinity may be a NaN, if the gate vanishes
        # What overflows the element, or is near its least numbers, is one case.
        top = math.ldexp(1.0, FORMATS[element].top)
        least = 0.0 if most < 2**20 / top else min(most, top) / 1.1
        # A NaN stays in: where a gate vanishes only here, its product with an infinity may be the infinity.
        return [column for column, value in enumerate(high) if not value < least and pairs[column][1] != 0]

    def has_nan(row: int) -> bool:
        """Whether a product may be NaN; where it may also be another number, that is an infinity."""
        odd = [
            column for column in range(problem.d) if not np.isfinite(gates[row, column]) & np.isfinite(ups[row, column])
        ]
        return any(len(y(row, column)) != 2 for column in odd)

    def peak(row: int) -> Ends:
        if problem.nonfinite == "propagate" and has_nan(row):
            return INF, INF
        if row not in ranges:
            known = [ends for ends in (y(row, column) for column in largest(row)) if len(ends) > 1]
            outer = max((max(map(abs, _numbers(ends))) for ends in known), default=0.0)
            # What may be NaN may be skipped.
            sure = [ends for ends in known if len(ends) == 2 and not ends[0] <= 0 <= ends[1]]
            inner = max((min(map(abs, ends)) for ends in sure), default=0.0)
            ranges[row] = _spanned((inner, outer))
        return ranges[row]

    def scales(row: int) -> Ends:
        if problem.scaling == "static":
            scale = convert(float(_only(inputs["scale"])), c)
            return scale, scale
        ends = peak(row)
        found = [divide(end, float(problem.q_max), c) or 1.0 for end in ends]
        # Of a row that vanishes it is 1, but of one that all but vanishes it is small.
        return _spanned([*found, _least(c)] if ends[0] == 0 < ends[-1] else found)

    zero_point = int(_only(inputs["zero_point"])) if "zero_point" in inputs else 0

    def at(name: str, where: Coordinate) -> Expected:
        if name == "product":
            return _between(y(*where))
        if name == "amax":
            return _between(peak(where[0]))
        if name == "scale_out":
            return _between(scales(where[0]))
        steps = [steps_of(value, scale, c) for value in y(*where) for scale in scales(where[0])]
        made = [code_of(step, zero_point, problem.q_min, problem.q_max) for step in steps]
        return min(made) if min(made) == max(made) else Within(min(made), max(made))

    return at


# --- attention -------------------------------------------------------------------------------------------------------


Sums = tuple[float, int, list[float], float]
"""The partial sums n, m, S and L of one row."""


@defines("attention")
def _attention_op(problem: Any, inputs: dict[str, Any]) -> Definition:
    rows: dict[Coordinate, list[float]] = {}
    scales: dict[int, float] = {}

    def row(token: int, head: int) -> list[float]:
        if (token, head) not in rows:
            rows[token, head] = _attended(problem, inputs, token, head)
        return rows[token, head]

    def scale(token: int) -> float:
        if token not in scales:
            whole = [value for head in range(problem.heads) for value in row(token, head)]
            scales[token] = dynamic_range(whole, -127, 127, "f32")[0]
        return scales[token]

    def at(name: str, where: Coordinate) -> float:
        if name == "output_scale":
            return scale(where[0])
        value = row(*where[:2])[where[2]]
        if name == "output":
            return value
        return code_of(steps_of(value, scale(where[0]), "f32"), 0, -127, 127)

    return at


def _attended(problem: Any, inputs: dict[str, Any], token: int, head: int) -> list[float]:
    """Return one row of the output."""
    out, starts = problem.output_element, inputs["starts"].tolist()
    owners = [s for s in range(problem.sequences) if starts[s] <= token < starts[s + 1]]
    if not owners:
        return [0.0] * problem.head_size
    length = int(inputs["lengths"][owners[0]])
    position = length - starts[owners[0] + 1] + token
    keys = range(length) if position >= 0 else ()
    seen = [j for j in keys if not problem.causal or position - (problem.window or length) < j <= position]
    if not seen:
        return [0.0] * problem.head_size
    c = convert(math.log2(math.e) * problem.scale, "f32")
    z = multiply(float(inputs["q_scale"][token, head]), c, "f32")
    group = problem.heads // problem.kv_heads
    chunks: dict[int, Sums] = {}
    for block in sorted({j // 128 for j in seen}):
        page = int(inputs["block_table"][owners[0], block])
        columns = [j % 128 for j in seen if j // 128 == block]
        part = _attended_block(z, inputs, (token, head), (page, head // group), columns)
        chunks[block // 4] = _attention_sum(chunks[block // 4], part) if block // 4 in chunks else part
    total = None
    for number in sorted(chunks):
        total = chunks[number] if total is None else _attention_sum(total, chunks[number])
    assert total is not None
    h = divide(convert(2**22 / 65280, "f32"), total[3], "f32")
    return [convert(multiply(multiply(s, h, "f32"), _power(total[1]), "f32"), out) for s in total[2]]


def _attended_block(z: float, inputs: dict[str, Any], row: Coordinate, head: Coordinate, at: list[int]) -> Sums:
    """Return the sums of a row over some positions of a page of a head."""
    size = inputs["q_codes"].shape[2]
    q, k = inputs["q_codes"][row].astype(int), inputs["k_codes"][head].astype(int)
    scales = [(float(inputs["k_scale"][head][j]), float(inputs["v_scale"][head][j])) for j in at]
    if not (0 <= z < INF and all(0 <= s < 2.0**106 for pair in scales for s in pair)):
        return 0.0, 0, [0.0] * size, NAN
    y = [_times(float(q @ k[j]), s, "f32") for j, (s, _) in zip(at, scales, strict=True)]
    n = float(math.ceil(Fraction(z) * Fraction(max(y))))
    if abs(n) >= 2**23:
        return 0.0, 0, [0.0] * size, NAN
    e = [_exponential(_fma(z, each, 512 - n)) for each in y]
    largest = max(s for _, s in scales)
    mantissa, m = math.frexp(largest)
    m = -512 if largest < 2.0**-110 else m - (mantissa == 0.5)
    g = [0.0 if m == -512 else _times(65280 * 2.0**-m, s, "f32") for _, s in scales]
    w = [nearest_even(Fraction(one) * Fraction(other)) for one, other in zip(e, g, strict=True)]
    assert max(w) <= 65280
    # Column of each position, by counting: 4 c + 2 h + b holds 8 h + 2 c + b.
    columns = {8 * h + 2 * c + b: 4 * c + 2 * h + b for c in range(4) for h in range(2) for b in range(2)}
    v = inputs["v_codes"][head].astype(int)[:, [j - j % 16 + columns[j % 16] for j in at]]
    weight = sum(nearest_even(2**22 * Fraction(each)) for each in e)
    return n, m, [convert(float(x), "f32") for x in v @ np.array(w)], convert(float(weight), "f32")


def _exponential(u: float) -> float:
    f, h = math.modf(max(u, 385.0))
    value = float.fromhex("0x1.3baa40p-4")
    for text in ("0x1.d237c2p-3", "0x1.63e656p-1", "1"):
        value = _fma(value, f, float.fromhex(text))
    return math.ldexp(value, int(h) - 512) if h > 385 else math.ldexp(value - 1, -126)


def _fma(a: float, b: float, c: float) -> float:
    return to_format(Fraction(a) * Fraction(b) + Fraction(c), "f32")


def _power(d: int) -> float:
    return 0.0 if d < -126 else 2.0**d


def _attention_sum(one: Sums, two: Sums) -> Sums:
    """Add the second sums to the first."""
    n = max(one[0], two[0])
    d = [int(max(each[0] - n, -512)) for each in (one, two)]
    exponents = [each[1] + shift for each, shift in zip((one, two), d, strict=True)]
    m = max(exponents)
    f = [_power(exponent - m) for exponent in exponents]
    s = [_fma_or_nan(a, f[0], _times(b, f[1], "f32")) for a, b in zip(one[2], two[2], strict=True)]
    return n, m, s, _fma_or_nan(one[3], _power(d[0]), _times(two[3], _power(d[1]), "f32"))


def _fma_or_nan(a: float, b: float, c: float) -> float:
    if math.isnan(a + c):
        return NAN
    # The sign of an exact zero is that of both, else plus.
    return _fma(a, b, c) if a * b + c else a * b + c


# --- sampling --------------------------------------------------------------------------------------------------------


class Logits(NamedTuple):
    """The z of a row; and of every token the weight and the integer -d E, or none without a distribution."""

    z: list[float]
    weights: list[int]
    terms: list[int]


def _logits(problem: Any, inputs: dict[str, Any]) -> Callable[[int], Logits]:
    powers: dict[float, tuple[int, int]] = {}

    def parts(d: float) -> tuple[int, int]:
        if d not in powers:
            c = max(d, -33.0)
            e = _sampling_power(c)
            powers[d] = nearest_even(Fraction(e)), nearest_even(Fraction(multiply(-c, e, "f32")))
        return powers[d]

    @cache
    def row(n: int) -> Logits:
        with np.errstate(invalid="ignore"):  # a signalling NaN warns when it is converted
            z = inputs["logits"][n].astype(float).tolist()
        if "temperature" in inputs and inputs["temperature"][n] != 0:
            z = [divide(x, float(inputs["temperature"][n]), "f32") for x in z]
        z = [x + 0.0 for x in z]  # minus zero becomes plus zero
        m = max(z, default=NAN)
        if any(map(math.isnan, z)) or not math.isfinite(m):
            return Logits(z, [], [])
        both = [parts(add(x, -m, "f32")) for x in z]
        return Logits(z, [w for w, _ in both], [a for _, a in both])

    return row


def _sampling_power(c: float) -> float:
    high, low = float.fromhex("0x1.715476p+0"), float.fromhex("0x1.4ae0c0p-26")
    k = nearest_even(Fraction(multiply(c, high, "f32")))
    f = _fma(c, low, _fma(c, high, float(-k)))
    value = float.fromhex("0x1.5bda40p-10")
    for text in ("0x1.3ce8acp-7", "0x1.c6b6d8p-5", "0x1.ebf9c2p-3", "0x1.62e42ap-1", "1"):
        value = _fma(value, f, float.fromhex(text))
    return math.ldexp(value, k + 40)


def _sampling_log(total: int) -> float:
    """Return ln(total / 2^40); every operation of Python's floats rounds once."""
    g, k = math.frexp(math.ldexp(float(total), -40))
    if g < math.sqrt(0.5):
        g, k = 2 * g, k - 1
    s = (g - 1) / (g + 1)
    q, series = s * s, 1 / 21
    for n in range(19, 2, -2):
        series = series * q + 1 / n
    return k * 0.6931471805598903 + (2 * s + (2 * s * q * series + k * 5.497923018708371e-14))


@defines("log_softmax_at")
def _log_softmax_at_op(problem: Any, inputs: dict[str, Any]) -> Definition:
    row = _logits(problem, inputs)

    def at(name: str, where: Coordinate) -> float:
        z, weights, terms = row(where[0])
        divisor = float(inputs["temperature"][where[0]]) if "temperature" in inputs else 1.0
        if not weights or not 0 < divisor < INF:
            return NAN
        log = _sampling_log(sum(weights))
        if name == "entropy":
            return convert(log + float(sum(terms)) / float(sum(weights)), "f32")
        token = int(inputs["tokens"][where])
        return convert((z[token] - max(z)) - log, "f32") if 0 <= token < problem.v else NAN

    return at


@defines("argmax")
def _argmax_op(_: Any, inputs: dict[str, Any]) -> Definition:
    def at(_: str, where: Coordinate) -> int:
        with np.errstate(invalid="ignore"):
            x = inputs["logits"][where[0]].astype(float).tolist()
        return next((i for i, each in enumerate(x) if math.isnan(each)), x.index(max(x)))

    return at


@defines("sample")
def _sample_op(problem: Any, inputs: dict[str, Any]) -> Definition:
    row = _logits(problem, inputs)

    def at(_: str, where: Coordinate) -> int:
        z, weights, _ = row(where[0])
        named = {name: array[where[0]].item() for name, array in inputs.items() if name != "logits"}
        p, k = named.get("top_p", 1.0), named.get("top_k", 0)
        if not weights or math.isnan(p) or not 0 <= named["temperature"] < INF:
            return -1
        if named["temperature"] == 0:
            return z.index(max(z))
        order = sorted(range(len(z)), key=lambda i: (-z[i], i))[: k if k > 0 else None]
        if p < 1:
            least = max(1, math.floor(p * float(sum(weights[i] for i in order)))) if p > 0 else 1
            before = [0]
            for i in order:
                before.append(before[-1] + weights[i])
            order = [i for i, less in zip(order, before, strict=False) if less < least]
        a, b = philox_words((named["position"], named["sequence"]), named["seed"])[:2]
        wanted = (b << 32 | a) * sum(weights[i] for i in order) >> 64
        for i in sorted(order):
            wanted -= weights[i]
            if wanted < 0:
                return i
        raise AssertionError

    return at


def philox_words(counter: tuple[int, int], seed: int) -> list[int]:
    """Return the four words of Philox4x32-10 of 64-bit numbers."""
    a, b, c, d = (number >> shift & 0xFFFFFFFF for number in counter for shift in (0, 32))
    low, high = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    for _ in range(10):
        x, y = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = y >> 32 ^ b ^ low, y & 0xFFFFFFFF, x >> 32 ^ d ^ high, x & 0xFFFFFFFF
        low, high = low + 0x9E3779B9 & 0xFFFFFFFF, high + 0xBB67AE85 & 0xFFFFFFFF
    return [a, b, c, d]


def _places(problem: Any, where: Coordinate) -> list[Coordinate]:
    """Return the elements of a weight whose levels are in a byte of its packed form, or the first one of its group."""
    unit, block, byte = where
    row, column = 16 * unit, 128 * block
    if byte < 1024:
        rest, i = divmod(byte, 4)
        rest, h = divmod(rest, 2)
        rest, odd = divmod(rest, 2)
        rest, c = divmod(rest, 4)
        pair, r = divmod(rest, 8)
        at = column + 32 * (2 * pair + odd) + 4 * c + i
        return [(row + r + 8 * h, at), (row + r + 8 * h, at + 16)]
    size = problem.group_size or 128
    r, rest = divmod(byte - 1024, 4 * 128 // size)
    return [(row + r + 8 * (rest % 4 // 2), column + rest // 4 * size)]


@defines("pack_weight")
def _pack_weight_op(problem: Any, inputs: dict[str, Any]) -> Definition:
    low = -8 if problem.code_element == "s8" else 0
    size = problem.group_size or problem.k

    def group(n: int, k: int) -> tuple[int, int, bool]:
        scale, offset = (int(inputs[name][n, k // size]) for name in ("group_scale", "group_offset"))
        return abs(scale), offset + scale * (low if scale >= 0 else low + 15), scale < 0

    def level(n: int, k: int) -> int:
        code = int(inputs["codes"][n, k]) - low
        return 15 - code if group(n, k)[2] else code

    def fits(n: int, k: int) -> bool:
        (step, least, _), own = group(n, k), level(n, k)
        return step <= 255 and least >= -128 and 0 <= own <= 15 and -128 <= least + step * own <= 127

    def at(name: str, where: Coordinate) -> int:
        if name == "misfits":
            return sum(not fits(n, k) for n, k in np.ndindex(problem.n, problem.k))
        places = [place for place in _places(problem, where) if place[0] < problem.n and place[1] < problem.k]
        if where[2] < 1024:
            first = _places(problem, where)[0]
            return sum(level(*place) % 16 << (0 if place == first else 4) for place in places)
        step, least, _ = group(*places[0]) if places else (0, -128, False)
        return (least + 128 if where[2] % 2 else step) % 256

    return at


@defines("unpack_weight")
def _unpack_weight_op(problem: Any, inputs: dict[str, Any]) -> Definition:
    packed = inputs["packed"]

    def at(_: str, where: Coordinate) -> int:
        n, k = where
        unit, block, size = n // 16, k // 128, problem.group_size
        r, h, j, within = n % 8, n % 16 // 8, k % 128 // 32, k % 32
        group = 1024 + 4 * (r * (128 // size) + k % 128 // size) + 2 * h
        step, base = (int(each) for each in packed[unit, block, group : group + 2])
        c, shift = within % 16 // 4, 4 * (within // 16)
        first = (((j // 2 * 8 + r) * 4 + c) * 2 + j % 2) * 8 + 4 * h
        carried = 0
        for byte in packed[unit, block, first : first + k % 4 + 1].tolist():
            carried = (carried >> 8) + (byte >> shift & 15) * step + base
        return carried % 256 - 128

    return at
