"""Launch parameters that the linear kernels share; they match the macros of ``layer.cuh``. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from typing import Any, TypeVar

from skuda.kernels.launch import (
    Choice,
    Constant,
    Launch,
    Number,
    Parameter,
    Pointer,
    Step,
    Which,
    pointers,
    s32,
    s64,
    strided,
)
from skuda.kernels.linear.problem import LinearProblem
from skuda.registry.elements import ElementKind
from skuda.registry.vocabulary import DynamicRangeScope, EpilogueKind

THREADS = 256
CODES = pointers("codes", "act_q_scratch")
SCALES = pointers("scales", "act_scale_scratch")

_CHUNKS_HELD = 8
_EPILOGUES = tuple(EpilogueKind)
_OUTPUTS = tuple(ElementKind(name) for name in ("f32", "f64", "f16", "bf16", "s8", "u8", "s32"))


def activation_parameters(problem: LinearProblem) -> tuple[Parameter, ...]:
    """Return codes, scales and, where the op does not quantize, zero points, for kernels without tensor maps."""
    if problem.dynamic:
        return (*CODES, *SCALES)
    return (*strided("act_q"), *given_scales(problem))


def given_scales(problem: LinearProblem) -> tuple[Parameter, ...]:
    """Return the scales and zero points of an activation that is given as codes.

    They are what the macro STATIC_ROWS_PARAMETERS declares, or GIVEN_ROWS_PARAMETERS.
    """
    scale: float | None = getattr(problem, "act_scale", None)
    if scale is not None:
        zero_point = s32(getattr(problem, "act_zero_point", 0))
        return (Constant(problem.compute, scale), *zero_point, Pointer("act_scale_scratch"))
    shapes = {argument.name: argument.shape for argument in problem.arguments()}
    (null,), (none,) = s64(0), s32(0)
    return (
        *((Pointer("act_scale"), Which("act_scale")) if "act_scale" in shapes else (null, none)),
        Pointer("act_zero_point") if "act_zero_point" in shapes else null,
        *s64(int(getattr(problem, "act_scale_scope", "") == DynamicRangeScope.TOKEN)),
    )


def layer_parameters(problem: LinearProblem) -> tuple[Parameter, ...]:
    """Return the parameters that the macro LAYER_PARAMETERS declares."""
    kinds = s32(_EPILOGUES.index(problem.epilogue), _OUTPUTS.index(problem.output))
    return (*strided("weight_q"), *epilogue_parameters(problem), *kinds)


def epilogue_parameters(problem: LinearProblem) -> tuple[Parameter, ...]:
    """Return the parameters that the macro EPILOGUE_PARAMETERS declares."""
    # What the names of the arguments depend on; all arguments of every new size would cost more than the rest.
    like = problem.output, problem.epilogue, problem.has_weight_zero_point
    fixed = _fixed.get(like)
    if fixed is None:
        fixed = _fixed[like] = _epilogue_parameters({argument.name for argument in problem.arguments()})
    return (*fixed, *s64(*problem.sizes))


_fixed: dict[tuple[ElementKind, EpilogueKind, bool], tuple[Parameter, ...]] = {}


def _epilogue_parameters(names: Collection[str]) -> tuple[Parameter, ...]:
    (null,), (none,) = s64(0), s32(0)
    scaled = "output_scale" in names
    return (
        *((Pointer("weight_scale"), Which("weight_scale")) if "weight_scale" in names else (null, none)),
        Pointer("weight_zero_point") if "weight_zero_point" in names else null,
        Pointer("bias") if "bias" in names else null,
        Which("bias") if "bias" in names else none,
        Pointer("output_scale") if scaled else null,
        Number("output_scale", ElementKind.F64) if scaled else Constant(ElementKind.F64, 0.0),
        Pointer("output_zero_point") if scaled else null,
        Number("output_zero_point", ElementKind.S32) if scaled else none,
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
    problem: LinearProblem, *product: Step, scratch: tuple[tuple[str, int], ...] = (), **fields: Any
) -> Launch:
    """Launch the steps of a product, after the quantization of a dynamic activation; `fields` are `Launch`'s."""
    if not problem.dynamic:
        return Launch(steps=product, scratch=scratch, **fields)
    m, _, k = problem.sizes
    activation: ElementKind = getattr(problem, problem.element_field)
    scratch = (("codes", m * k), ("scales", m * activation.compute.bits // 8), *scratch)
    quantization = _quantization(problem, activation, overlaps=product[0].overlaps)
    return Launch(steps=(quantization, *product), scratch=scratch, **fields)


def _quantization(problem: Any, activation: ElementKind, *, overlaps: bool) -> Step:
    """Return the step of ``quantized_codes.cuh``, which quantizes the activation per token."""
    m, _, k = problem.sizes
    chunks = -(-k * activation.bits // 128)
    lanes = min(512, 1 << (max(1, -(-chunks // _CHUNKS_HELD)) - 1).bit_length())
    block = lanes if lanes > 32 else THREADS
    return Step(
        entry="quantized_linear_codes",
        grid=(-(-m * lanes // block), 1, 1),
        block=(block, 1, 1),
        parameters=(*strided("activation"), *CODES, *SCALES, *s64(m, k), *s32(lanes, problem.q_min, problem.q_max)),
        overlaps=overlaps,
    )


T = TypeVar("T")


def choose(tiles: Sequence[T], choices: tuple[Choice, ...], choice: str) -> tuple[T, dict[str, Any]]:
    """Return the tile named `choice`, or the first one, and fields of `Launch`; `choices` has the tiles' names.

    Raises
    ------
    LookupError
        If none has that name.
    """
    name = choice or choices[0].name
    for found, tile in zip(choices, tiles, strict=True):
        if found.name == name:
            return tile, {"choices": choices, "choice": name}
    raise LookupError(f"there is no configuration {choice!r}; there are {', '.join(found.name for found in choices)}")
