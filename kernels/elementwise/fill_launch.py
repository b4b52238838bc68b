"""Launch rule of ``fill.cu``. Pure: nothing here needs a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skuda.kernels.launch import Columns, Launch, Number, Pointer, Rows, Step, strided
from skuda.registry.elements import ElementKind

if TYPE_CHECKING:
    from skuda.kernels.elementwise.fill import FillDescriptor
    from skuda.registry.device import Device

_THREADS = 256
_CHUNK_BYTES = 16
_CHUNKS = 4
_MOST_BLOCKS = 2**31 - 1


def fill(problem: FillDescriptor, device: Device) -> Launch:  # noqa: ARG001  every launch rule has this signature
    """Launch a fill with four 16-byte chunks per thread."""
    chunks = max(1, problem.numel * problem.output_element.bits // 8 // _CHUNK_BYTES)
    step = Step(
        entry="fill",
        grid=(min(-(-chunks // (_THREADS * _CHUNKS)), _MOST_BLOCKS), 1, 1),
        block=(_THREADS, 1, 1),
        parameters=(*strided("output"), Pointer("value"), Number("value", ElementKind.F64), Rows(), Columns()),
    )
    return Launch(steps=(step,) if problem.numel else (), view=("output",))
