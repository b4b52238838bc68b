"""Launch rules of ``pack_weight.cu`` and ``unpack_weight.cu``. Pure: nothing here needs a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skuda.kernels.launch import ZEROS, Launch, Parameter, Step, pointers, s32, s64, strided
from skuda.kernels.linear.packed import BLOCK

if TYPE_CHECKING:
    from skuda.kernels.linear.pack_weight import PackWeightDescriptor
    from skuda.kernels.linear.unpack_weight import UnpackWeightDescriptor
    from skuda.registry.device import Device

_THREADS, _WARPS = 256, 8
_RESIDENT = 8
"""Blocks of threads per multiprocessor: as many as 2,048 threads are."""


def pack_weight(problem: PackWeightDescriptor, device: Device) -> Launch:
    """Launch two steps: blocks of the weight, which add misfits to a number that was 0, then that number."""
    parameters = (
        *strided("codes", "group_scale", "group_offset"),
        *pointers("output", ZEROS),
        *s64(problem.n, problem.k),
        *s32(BLOCK // (problem.group_size or BLOCK), not problem.group_size),
    )
    steps = (
        step_over_blocks("pack_weight", problem.packed_shape, device, parameters),
        Step(entry="pack_weight_misfits", grid=(1, 1, 1), block=(1, 1, 1), parameters=pointers(ZEROS, "misfits")),
    )
    return Launch(steps=tuple(step for step in steps if 0 not in step.grid), scratch=((ZEROS, 8),))


def unpack_weight(problem: UnpackWeightDescriptor, device: Device) -> Launch:
    """Launch one step over the blocks of the weight."""
    sizes = (*s64(problem.n, problem.k), *s32(BLOCK // problem.group_size))
    parameters = (*pointers("packed"), *strided("output"), *sizes)
    step = step_over_blocks("unpack_weight", problem.packed_shape, device, parameters)
    return Launch(steps=(step,) if 0 not in step.grid else ())


def step_over_blocks(entry: str, shape: tuple[int, ...], device: Device, parameters: tuple[Parameter, ...]) -> Step:
    """Return a step with a warp for each block of a packed weight, or an empty grid for an empty weight."""
    units, blocks, _ = shape
    grid = min(-(-units * blocks // _WARPS), _RESIDENT * max(device.sm_count, 1))
    return Step(entry=entry, grid=(grid, 1, 1), block=(_THREADS, 1, 1), parameters=parameters)
