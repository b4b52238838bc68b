"""Launch parameters that the linear kernels share; they match the macros of ``layer.cuh``. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, TypeVar

from skuda.kernels import nonfinite
from skuda.kernels.launch import (
    Choice,
    Constant,
    Launch,
    Number,
    Parameter,
    Pointer,
    Step,
    TensorMap,
    Which,
    pointers,
    s32,
    s64,
    strided,
)
from skuda.kernels.linear.problem import SUMS, LinearProblem
from skuda.registry.elements import CODES8, ElementKind
from skuda.registry.vocabulary import EpilogueKind

THREADS = 256
CODES = pointers("codes", "act_q_scratch")
SCALES = pointers("scales", "act_scale_scratch")

_CHUNKS = 8
_EPILOGUES = tuple(EpilogueKind)
_OUTPUTS = tuple(ElementKind(name) for name in ("f32", "f64", "f16", "bf16", "s8", "u8", "s32", "s64"))


def activation_parameters(problem: LinearProblem) -> tuple[Parameter, ...]:
    """Return codes, scales and, where the op does not quantize, zero points, for kernels without tensor maps."""
    return (*(CODES if problem.dynamic else strided("act_q")), *activation_scales(problem))


def activation_map(problem: LinearProblem, box_rows: int, promotion: int = 128) -> TensorMap:
    """Return the tensor map of the codes."""
    name, otherwise = ("act_q_scratch", "codes") if problem.dynamic else ("act_q", "")
    return TensorMap(name, problem.sizes[0], problem.code_bytes, box_rows, otherwise, promotion)


def weight_map(problem: LinearProblem, box_rows: int, promotion: int = 128) -> TensorMap:
    """Return the tensor map of a weight of 8 or 16 bits."""
    _, n, k = problem.sizes
    return TensorMap("weight_q", n, k * problem.weight_code.halves, box_rows, promotion=promotion)


def activation_scales(problem: LinearProblem) -> tuple[Parameter, ...]:
    """Return the scales and, where the op does not quantize, zero points of an activation."""
    return SCALES if problem.dynamic else given_scales(problem)


def given_scales(problem: LinearProblem) -> tuple[Parameter, ...]:
    """Return the scales and zero points of an activation that is given as codes.

    The macros STATIC_ROWS_PARAMETERS and GIVEN_ROWS_PARAMETERS declare them.
    """
    if problem.static_scale is not None:
        scale, zero_point = problem.static_scale
        # Not cached: 0.0 and -0.0 are equal but are different scales.
        return (Constant(problem.compute, scale), *s32(zero_point), *pointers("act_scale_scratch"))
    return _arrays_of_scales(problem.output not in SUMS, problem.shifts_activation, problem.scales_tokens)


@cache
def _arrays_of_scales(scaled: bool, shifted: bool, per_token: bool) -> tuple[Parameter, ...]:  # noqa: FBT001  private
    (null,), (none,) = s64(0), s32(0)
    return (
        *((Pointer("act_scale"), Which("act_scale")) if scaled else (null, none)),
        Pointer("act_zero_point") if shifted else null,
        *s64(int(per_token)),
    )


def layer_parameters(problem: LinearProblem) -> tuple[Parameter, ...]:
    """Return the parameters that the macro LAYER_PARAMETERS declares."""
    kinds = s32(_EPILOGUES.index(problem.epilogue), _OUTPUTS.index(problem.output))
    return (*strided("weight_q"), *epilogue_parameters(problem), *kinds)


def epilogue_parameters(problem: LinearProblem) -> tuple[Parameter, ...]:
    """Return the parameters that the macro EPILOGUE_PARAMETERS declares."""
    fixed = _epilogue_parameters(problem.output, problem.epilogue, problem.has_weight_zero_point)
    return (*fixed, *s64(*problem.sizes))


@cache
def _epilogue_parameters(
    output: ElementKind,
    epilogue: EpilogueKind,
    shifted: bool,  # noqa: FBT001  private
) -> tuple[Parameter, ...]:
    (null,), (none,) = s64(0), s32(0)
    coded = output in CODES8
    return (
        *((Pointer("weight_scale"), Which("weight_scale")) if output not in SUMS else (null, none)),
        Pointer("weight_zero_point") if shifted else null,
        *((Pointer("bias"), Which("bias")) if epilogue.requires_bias else (null, none)),
        Pointer("output_scale") if coded else null,
        Number("output_scale", ElementKind.F64) if coded else Constant(ElementKind.F64, 0.0),
        Pointer("output_zero_point") if coded else null,
        Number("output_zero_point", ElementKind.S32) if coded else none,
        *strided("output"),
    )


def epilogue_flags(problem: LinearProblem) -> tuple[str, ...]:
    """Return the compiler flags of kernels that are compiled for an output, an epilogue and certain zero points."""
    zero_points = problem.shifts_activation + 2 * problem.has_weight_zero_point
    return _epilogue_flags(problem.code_element, problem.output, problem.epilogue, zero_points)


@cache
def _epilogue_flags(
    code: ElementKind, output: ElementKind, epilogue: EpilogueKind, zero_points: int
) -> tuple[str, ...]:
    return (
        f"-DSKUDA_CODE={code}",
        f"-DSKUDA_OUT={output}",
        f"-DSKUDA_EPILOGUE={epilogue.name}",
        f"-DSKUDA_ZERO_POINTS={zero_points}",
    )


def launch_product(
    problem: LinearProblem,
    *product: Step,
    scratch: tuple[tuple[str, int], ...] = (),
    flags: tuple[str, ...] = (),
    **fields: Any,
) -> Launch:
    """Launch the steps of a product, after the quantization of a dynamic activation; `fields` are `Launch`'s."""
    if not problem.dynamic:
        return Launch(steps=product, scratch=scratch, flags=flags, **fields)
    m, _, _ = problem.sizes
    activation: ElementKind = getattr(problem, problem.element_field)
    scratch = (("codes", m * problem.code_bytes), ("scales", m * activation.compute.bits // 8), *scratch)
    quantization = _quantization(problem, activation, overlaps=product[0].overlaps)
    flags = (*flags, *nonfinite.flags(problem))
    return Launch(steps=(quantization, *product), scratch=scratch, flags=flags, **fields)


def _quantization(problem: Any, activation: ElementKind, *, overlaps: bool) -> Step:
    """Return the step of ``quantized_codes.cuh``, which quantizes the activation per token."""
    m, _, k = problem.sizes
    chunks = -(-k * activation.bits // 128)
    lanes = min(512, 1 << (max(1, -(-chunks // _CHUNKS)) - 1).bit_length())
    block = lanes if lanes > 32 else THREADS
    return Step(
        entry="quantized_linear_codes",
        grid=(-(-m * lanes // block), 1, 1),
        block=(block, 1, 1),
        parameters=(*strided("activation"), *CODES, *SCALES, *s64(m, k), *s32(lanes, problem.q_min, problem.q_max)),
        overlaps=overlaps,
    )


T = TypeVar("T")


def ranked(times: Iterable[tuple[float, T]]) -> tuple[tuple[T, ...], tuple[Choice, ...]]:
    """Return the tiles of (predicted us, tile), and what they are called, the shortest time first."""
    by_time = sorted(times, key=lambda pair: pair[0])
    return tuple(tile for _, tile in by_time), tuple(Choice(str(tile), us) for us, tile in by_time)


def choose(tiles: Sequence[T], choices: tuple[Choice, ...], choice: str) -> tuple[T, dict[str, Any]]:
    """Return the tile named `choice`, or the first one, and fields of `Launch`; `choices` has the tiles' names.

    Raises
    ------
    LookupError
        If none has that name.
    """
    if not choice:
        return tiles[0], {"choices": choices, "choice": choices[0].name}
    for found, tile in zip(choices, tiles, strict=True):
        if found.name == choice:
            return tile, {"choices": choices, "choice": choice}
    raise LookupError(f"there is no configuration {choice!r}; there are {', '.join(found.name for found in choices)}")
