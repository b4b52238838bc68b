"""Launch rule of the kernel of ``rescale.cu``. Pure: nothing here needs a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skuda.kernels.launch import ANY_ROWS, Launch, Pointer, Step, s32, s64, strided
from skuda.kernels.linear import parameters

if TYPE_CHECKING:
    from skuda.kernels.linear.rescale import RescaleDescriptor
    from skuda.registry.device import Device

_WIDTH = 4
"""Columns of a thread."""
_FEW_THREADS = 64
_IN_FLIGHT = 4
"""Rows of a thread if there are enough. It loads that many at a time and keeps the scales of its columns."""
_MIN_BLOCKS, _MAX_BLOCKS = 4, 32
"""Blocks per multiprocessor: threads take several rows as long as there are the minimum, and there are never more than
the maximum."""
_MAX_GROUPS = 65_535


def rescale(problem: RescaleDescriptor, device: Device) -> Launch:
    """Launch one step in which every thread finishes rows of its own columns."""
    m, n = problem.m, problem.n
    if not m * n:
        return Launch(steps=())
    multiprocessors = max(1, device.sm_count)
    wanted = -(-n // _WIDTH)
    threads = parameters.THREADS if m * wanted >= parameters.THREADS * multiprocessors else _FEW_THREADS
    lanes = min(threads, 1 << (wanted - 1).bit_length())
    strips, groups = -(-wanted // lanes), -(-m // (threads // lanes))
    fewest, most = (-(-blocks * multiprocessors // strips) for blocks in (_MIN_BLOCKS, _MAX_BLOCKS))
    groups = min(groups, max(-(-groups // _IN_FLIGHT), fewest), most, _MAX_GROUPS)
    names = {argument.name for argument in problem.arguments()}
    sums = (Pointer(name) if name in names else s64(0)[0] for name in ("act_sums", "weight_sums"))
    step = Step(
        entry="rescale",
        grid=(strips, groups, 1),
        block=(threads, 1, 1),
        parameters=(
            *strided("sums"),
            *parameters.given_scales(problem.layer),
            *sums,
            *parameters.epilogue_parameters(problem.layer),
            *s32(lanes),
        ),
    )
    zero_points = problem.has_act_zero_point or problem.has_weight_zero_point
    flags = (
        f"-DSKUDA_EPILOGUE={problem.epilogue.name}",
        f"-DSKUDA_ZERO_POINTS={int(zero_points)}",
        f"-DSKUDA_SUMS={problem.sums_element}",
    )
    return Launch(steps=(step,), flags=flags, alike=ANY_ROWS)
