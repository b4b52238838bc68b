"""Launch rules of the plain linear kernels, and how their SKUs are declared. Pure: nothing here needs a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from skuda.kernels.launch import Choice, Constant, Launch, Leading, Number, Parameter, Pointer, Step, Which
from skuda.kernels.quantize import _cuda
from skuda.registry.constraints import Between, Constraint
from skuda.registry.elements import ElementKind
from skuda.registry.guarantee import PrecisionGuarantee
from skuda.registry.vocabulary import ActivationKind, EpilogueKind, MathPrecision

if TYPE_CHECKING:
    from skuda.dispatch.device import Device
    from skuda.kernels.quantize.quantized_linear import QuantizedLinearDescriptor
    from skuda.kernels.quantize.smoothquant_linear import SmoothQuantLinearDescriptor

_TILE = 64
_MOST_STRIPS = 65_535
_HELD = 8
CODES: tuple[Parameter, ...] = (Pointer("codes"), Pointer("act_q_scratch"))
SCALES: tuple[Parameter, ...] = (Pointer("scales"), Pointer("act_scale_scratch"))
_EPILOGUES = tuple(EpilogueKind)
_OUTPUTS = (
    ElementKind.F32,
    ElementKind.F64,
    ElementKind.F16,
    ElementKind.BF16,
    ElementKind.S8,
    ElementKind.U8,
)

LIMITS: tuple[Constraint, ...] = (Between(field="k", maximum=(1 << 22) - 1),)
"""Up to here sums of products with any s32 zero point fit in 64 bits."""


def guarantee(element: ElementKind, epilogue: EpilogueKind | None) -> PrecisionGuarantee:  # noqa: ARG001  a rule's signature
    """Return what the plain linear kernels promise: bit for bit, but for gelu and silu.

    Parameters
    ----------
    element : ElementKind
        Element of the SKU; any may meet an f64 on the other side and so compute in f64.
    epilogue : EpilogueKind or None
        What is fused behind the product.
    """
    curved = epilogue is not None and epilogue.activation in (ActivationKind.GELU, ActivationKind.SILU)
    # Within 1 ulp of the true value in f64, and the reference within 2; an f32 or shorter result hardly shows it.
    ulps = 2 if curved else 0
    return PrecisionGuarantee(math_precision=MathPrecision.INT8, accumulator=ElementKind.S64, max_ulp=ulps)


def smoothquant(problem: SmoothQuantLinearDescriptor, device: Device) -> Launch:  # noqa: ARG001  one tile for all
    """Launch the product with a static activation scale.

    Parameters
    ----------
    problem : SmoothQuantLinearDescriptor
        The problem.
    device : Device
        Where it runs.
    """
    unsigned = problem.activation_element is ElementKind.U8
    step = Step(
        entry="smoothquant_linear" + ("_u8" if unsigned else ""),
        grid=_grid(problem.m, problem.n),
        block=(_cuda.THREADS, 1, 1),
        parameters=(
            Pointer("act_q"),
            Leading("act_q"),
            Constant(ElementKind.S32, problem.act_zero_point),
            Constant(problem.compute, problem.act_scale),
            Pointer("act_scale_scratch"),
            *layer_tail(problem, problem.m, problem.n, problem.output_element),
        ),
    )
    return Launch(steps=(step,))


def quantized(problem: QuantizedLinearDescriptor, device: Device) -> Launch:  # noqa: ARG001  one tile for all
    """Launch the dynamic quantization of the activation, then the product.

    Parameters
    ----------
    problem : QuantizedLinearDescriptor
        The problem.
    device : Device
        Where it runs.
    """
    m, n = problem.m, problem.c_out
    product = Step(
        entry=f"quantized_linear_{problem.compute}_{problem.code_element}",
        grid=_grid(m, n),
        block=(_cuda.THREADS, 1, 1),
        parameters=(*CODES, *SCALES, *layer_tail(problem, m, n, problem.output)),
    )
    return behind_codes(problem, product)


def behind_codes(problem: QuantizedLinearDescriptor, product: Step, **fields: Any) -> Launch:
    """Launch the dynamic quantization of the activation, then the product of its codes.

    Parameters
    ----------
    problem : QuantizedLinearDescriptor
        The problem.
    product : Step
        What multiplies the codes.
    **fields
        Others of `Launch`.
    """
    compute = problem.activation_element.compute
    scratch = (("codes", problem.m * problem.k), ("scales", problem.m * compute.bits // 8))
    return Launch(steps=(_codes(problem), product), scratch=scratch, **fields)


def _codes(problem: QuantizedLinearDescriptor) -> Step:
    """Return the step that quantizes the activation, per token."""
    m, k = problem.m, problem.k
    chunks = -(-k * problem.activation_element.bits // 128)
    lanes = min(512, 1 << (max(1, -(-chunks // _HELD)) - 1).bit_length())
    block = lanes if lanes > 32 else _cuda.THREADS
    return Step(
        entry="quantized_linear_codes",
        grid=(-(-m * lanes // block), 1, 1),
        block=(block, 1, 1),
        parameters=(
            Pointer("activation"),
            Leading("activation"),
            *CODES,
            *SCALES,
            Constant(ElementKind.S64, m),
            Constant(ElementKind.S64, k),
            Constant(ElementKind.S32, lanes),
            Constant(ElementKind.S32, problem.q_min),
            Constant(ElementKind.S32, problem.q_max),
        ),
    )


T = TypeVar("T")


def choose(ranked: Sequence[tuple[float, T]], choice: str) -> tuple[T, dict[str, Any]]:
    """Return one of several configurations, and what `Launch` says of them.

    Parameters
    ----------
    ranked : sequence of (float, T)
        (predicted us, configuration), the fastest first. ``str`` of a configuration is its name.
    choice : str
        The name of the one to take; empty for the first.

    Raises
    ------
    LookupError
        Where none has that name.
    """
    choices = tuple(Choice(str(made), us) for us, made in ranked)
    name = choice or choices[0].name
    for found, (_, made) in zip(choices, ranked, strict=True):
        if found.name == name:
            return made, {"choices": choices, "choice": name}
    raise LookupError(f"there is no configuration {choice!r}; there are {', '.join(found.name for found in choices)}")


def _grid(m: int, n: int) -> tuple[int, int, int]:
    return (-(-m // _TILE), min(-(-n // _TILE), _MOST_STRIPS), 1)


def layer_tail(problem: Any, m: int, n: int, output: ElementKind) -> tuple[Parameter, ...]:
    """Return the parameters behind the LAYER_TAIL macro of ``layer.cuh``.

    Parameters
    ----------
    problem : SmoothQuantLinearDescriptor or QuantizedLinearDescriptor
        The problem.
    m, n : int
        Shape of the output.
    output : ElementKind
        Its element.
    """
    return (
        Pointer("weight_q"),
        Leading("weight_q"),
        *epilogue(problem, m, n),
        Constant(ElementKind.S32, _EPILOGUES.index(problem.epilogue)),
        Constant(ElementKind.S32, _OUTPUTS.index(output)),
    )


def epilogue(problem: Any, m: int, n: int) -> tuple[Parameter, ...]:
    """Return the parameters behind the EPILOGUE_TAIL macro of ``layer.cuh``.

    Parameters
    ----------
    problem : SmoothQuantLinearDescriptor or QuantizedLinearDescriptor
        The problem.
    m, n : int
        Shape of the output.
    """
    names = {argument.name for argument in problem.arguments()}
    null = Constant(ElementKind.S64, 0)
    none = Constant(ElementKind.S32, 0)
    scaled = "output_scale" in names
    return (
        Pointer("weight_scale"),
        Which("weight_scale"),
        Pointer("weight_zero_point") if "weight_zero_point" in names else null,
        Pointer("bias") if "bias" in names else null,
        Which("bias") if "bias" in names else none,
        Pointer("output_scale") if scaled else null,
        Number("output_scale", ElementKind.F64) if scaled else Constant(ElementKind.F64, 0.0),
        Pointer("output_zero_point") if scaled else null,
        Number("output_zero_point", ElementKind.S32) if scaled else none,
        Pointer("output"),
        Leading("output"),
        Constant(ElementKind.S64, m),
        Constant(ElementKind.S64, n),
        Constant(ElementKind.S64, problem.k),
    )


def smoothquant_flags(output: ElementKind, weight: ElementKind | None) -> tuple[str, ...]:
    """Return the compiler flags of `smoothquant_linear` for an output and a weight element."""
    return ("-fmad=false", f"-DSKUDA_REAL={output.compute}", f"-DSKUDA_WEIGHT={weight}")


def quantized_flags(activation: ElementKind, weight: ElementKind | None) -> tuple[str, ...]:
    """Return the compiler flags of `quantized_linear` for an activation and a weight element."""
    return ("-fmad=false", f"-DSKUDA_DATA={activation}", "-DSKUDA_CODE=s8", f"-DSKUDA_WEIGHT={weight}")
