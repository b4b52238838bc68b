"""Launch rule of the plain kernel (``plain.cuh``): one tile for every problem. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skuda.kernels.launch import ANY_ROWS, Launch, Step
from skuda.kernels.linear import parameters
from skuda.kernels.linear.expanded import behind_unpacking
from skuda.kernels.linear.problem import SUMS, LinearProblem, half_of
from skuda.kernels.linear.strategies import Strategy
from skuda.registry.arch import ArchSku
from skuda.registry.constraints import Between, Constraint
from skuda.registry.elements import ElementKind

if TYPE_CHECKING:
    from skuda.registry.device import Device

_TILE = 64
_MAX_STRIPS = 65_535


def constraints(weight: ElementKind) -> tuple[Constraint, ...]:  # noqa: ARG001  the same for all weights
    """Return the largest K whose sums of products with any s32 zero point fit in 64 bits."""
    return (Between(field="k", maximum=(1 << 22) - 1),)


STRATEGY = Strategy("plain", __name__, ArchSku.SM_80, constraints, "64 x 64 tiles, dp4a; any shape", wide=True)


def launch(problem: LinearProblem, device: Device) -> Launch:  # noqa: ARG001  every launch rule has this signature
    """Launch the product, after the quantization of a dynamic activation."""
    m, n, _ = problem.sizes
    kinds = f"_{problem.compute}_{half_of(problem.code_element)}" if problem.dynamic else ""
    unsigned = "_u8" if not problem.dynamic and problem.code_element is ElementKind.U8 else ""
    summed = "_sums" if problem.output in SUMS else ""
    product = Step(
        entry=problem.op_name() + kinds + summed + unsigned,
        grid=(-(-m // _TILE), min(-(-n // _TILE), _MAX_STRIPS), 1),
        block=(parameters.THREADS, 1, 1),
        parameters=(*parameters.activation_parameters(problem), *parameters.layer_parameters(problem)),
    )
    # One compilation serves both codes of 8 bits.
    code = ElementKind.S16 if problem.code_element.is_split else ElementKind.S8 if problem.dynamic else None
    flags = (f"-DSKUDA_CODE={code}",) if code else ()
    return parameters.launch_product(problem, product, flags=flags, alike=ANY_ROWS)


expanded = behind_unpacking(launch)
