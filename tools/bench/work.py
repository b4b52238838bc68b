"""The least work of a problem: bytes to move and operations to do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from skuda.kernels.dtypes import storage_dtype
from skuda.registry.descriptor import Descriptor, Role, storage_shape


@dataclass(frozen=True)
class Work:
    """The least work of a problem.

    `read` and `written` are the bytes of its arrays, each moved once. `operations` are the multiplications and
    additions of a product; they are 0 for every other op, which is bound by memory.
    """

    read: int
    written: int
    operations: int

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return self.read + self.written


def work_of(problem: Descriptor) -> Work:
    """Return the least work of a problem: every required array is read or written once, and numbers are free."""
    moved = {Role.INPUT: 0, Role.OUTPUT: 0}
    for argument in problem.arguments():
        if argument.role in moved:
            element = argument.elements[0]
            moved[argument.role] += math.prod(storage_shape(argument.shape, element)) * storage_dtype(element).itemsize
    operations = 0
    if problem.layout is not None:
        sizes: Any = problem  # of a product
        operations = 2 * sizes.m * (sizes.c_out if hasattr(sizes, "c_out") else sizes.n) * sizes.k
    return Work(moved[Role.INPUT], moved[Role.OUTPUT], operations)
