"""Packed 4-bit weights for kernels of 8-bit codes: a launch in front writes the codes, which the kernel then reads.

Pure: nothing here needs a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from skuda.kernels.launch import Launch, Leading, Parameter, Pointer, Step, TensorMap, pointers, s32, s64
from skuda.kernels.linear import hopper, packed
from skuda.kernels.linear.pack_launch import step_over_blocks
from skuda.kernels.linear.problem import LinearProblem
from skuda.registry.sku import WorkspaceTerm

if TYPE_CHECKING:
    from skuda.registry.device import Device

WORKSPACE = (WorkspaceTerm(factors=("unpacked_bytes",), bytes_each=1),)
"""The codes."""

_CODES = "unpacked_weight"
_NOTE = "the 4-bit weight is unpacked in front: a launch, and a byte of scratch for each of its elements"
_LAUNCH, _MEMORY = 3.3, 0.84
"""Microseconds of the launch in front, and the part of the memory's bandwidth that it reaches; on an H200."""


def behind_unpacking(launch: Callable[..., Launch]) -> Callable[..., Launch]:
    """Return the launch rule for packed weights of a kernel whose rule for 8-bit codes is `launch`."""

    def rule(problem: LinearProblem, device: Device, *choice: str) -> Launch:
        return _behind(launch(problem.on_codes, device, *choice), problem, device)

    return rule


def _behind(launch: Launch, problem: LinearProblem, device: Device) -> Launch:
    """Return a launch on 8-bit codes with the unpacking of the weight in front."""
    steps = (
        step._replace(parameters=tuple(part for each in step.parameters for part in _on_codes(each, problem)))
        for step in launch.steps
    )
    moved = problem.unpacked_bytes + math.prod(problem.packed_shape)
    longer = _LAUNCH + moved / (_MEMORY * hopper.bandwidth(device) * 1e6)
    return launch._replace(
        choices=tuple(c._replace(microseconds=c.microseconds + longer) for c in launch.choices),
        steps=(*_unpacking(problem, device), *steps),
        scratch=(*launch.scratch, (_CODES, problem.unpacked_bytes)),
        aligned=tuple(dict.fromkeys((*launch.aligned, "weight_q"))),
        notes=(_NOTE, *launch.notes),
    )


def _on_codes(parameter: Parameter, problem: LinearProblem) -> Iterator[Parameter]:
    """Yield what a kernel gets in place of a parameter: of the weight, the unpacked one."""
    match parameter:
        case Pointer("weight_q"):
            yield from pointers(_CODES)
        case Leading("weight_q"):
            yield from s64(problem.unpacked_pitch)
        case TensorMap("weight_q"):
            yield parameter._replace(name=_CODES)
        case _:
            yield parameter


def _unpacking(problem: LinearProblem, device: Device) -> tuple[Step, ...]:
    """Return the step of ``unpacked_codes.cuh``, if there is a weight."""
    _, n, k = problem.sizes
    sizes = (*s64(problem.unpacked_pitch, n, k), *s32(packed.BLOCK // problem.group_size))
    parameters: tuple[Parameter, ...] = (*pointers("weight_q", _CODES), *sizes)
    step = step_over_blocks("unpack_weight", problem.packed_shape, device, parameters)
    return () if 0 in step.grid else (step,)
