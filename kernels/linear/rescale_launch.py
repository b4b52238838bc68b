"""Launch rule of the kernel of ``rescale.cu``. Pure: nothing here needs a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skuda.kernels.launch import Launch, Pointer, Step, s32, s64, strided
from skuda.kernels.linear import layer

if TYPE_CHECKING:
    from skuda.kernels.linear.rescale import RescaleDescriptor
    from skuda.registry.device import Device

_WIDTH = 4
"""Columns of a thread."""
_FEW_THREADS = 64
_IN_FLIGHT = 4
"""Rows that a thread takes at least, if there are enough: it has so many in flight, with the same scales of columns."""
_FEWEST_BLOCKS, _MOST_BLOCKS = 4, 32
"""Blocks per multiprocessor: down to so few a thread takes several rows, and never are there more."""
_MOST_GROUPS = 65_535


def rescale(problem: RescaleDescriptor, device: Device) -> Launch:
    """Launch one step in which every thread finishes rows of its own columns."""
    m, n = problem.m, problem.n
    if not m * n:
        return Launch(steps=())
    multiprocessors = max(1, device.sm_count)
    wanted = -(-n // _WIDTH)
    threads = layer.THREADS if m * wanted >= layer.THREADS * multiprocessors else _FEW_THREADS
    lanes = min(threads, 1 << (wanted - 1).bit_length())
    strips, groups = -(-wanted // lanes), -(-m // (threads // lanes))
    fewest, most = (-(-blocks * multiprocessors // strips) for blocks in (_FEWEST_BLOCKS, _MOST_BLOCKS))
    groups = min(groups, max(-(-groups // _IN_FLIGHT), fewest), most, _MOST_GROUPS)
    names = {argument.name for argument in problem.arguments()}
    sums = (Pointer(name) if name in names else s64(0)[0] for name in ("act_sums", "weight_sums"))
    step = Step(
        entry="rescale",
        grid=(strips, groups, 1),
        block=(threads, 1, 1),
        parameters=(
            *strided("sums"),
            *layer.given_scales(problem.layer),
            *sums,
            *layer.epilogue_parameters(problem.layer),
            *s32(lanes),
        ),
    )
    zero_points = problem.has_act_zero_point or problem.has_weight_zero_point
    flags = (f"-DSKUDA_EPILOGUE={problem.epilogue.name}", f"-DSKUDA_ZERO_POINTS={int(zero_points)}")
    return Launch(steps=(step,), flags=flags)
