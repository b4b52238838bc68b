"""The records: which problems the kernels serve, what they promise, and how they are launched.

Every program that uses skuda loads this module, so it does not import Triton. A record names the kernel and its file.
"""

import os

from skuda.dispatch import Constant, Launch, Step, pointers, s64, strided
from skuda.registry import ArchSku, ElementKind, KernelSku, OneOf, PrecisionGuarantee

F32, F16, BF16, S8 = ElementKind.F32, ElementKind.F16, ElementKind.BF16, ElementKind.S8
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton reads it, too, when a kernel is defined
TILE = {"ROWS": 64 if INTERPRETED else 4, "COLUMNS": 512}  # the interpreter takes its time for every program
WARPS = 4


def launch(problem):
    """Return the grid, and the parameters in the order in which the kernel takes them."""
    if problem.op == "amax":
        outputs, bounds = pointers("output"), ()
    else:
        outputs = (*strided("output"), *pointers("scale_out", "zero_point_out"))
        bounds = (Constant(F32, float(problem.q_min)), Constant(F32, float(problem.q_max)))
    parameters = (*strided("input"), *outputs, *s64(problem.n, problem.d), *bounds)
    grid = (-(-problem.n // TILE["ROWS"]), 1, 1)
    return Launch((Step(problem.op, grid, (32 * WARPS, 1, 1), parameters),) if problem.n else ())


def offer(backend, arch, elements):
    """Return the kernels of a backend, for each element of the data."""
    plain = (OneOf(field="nonfinite", allowed=("ignore",)),)
    by_row = (OneOf(field="scope", allowed=("token",)), OneOf(field="mode", allowed=("symmetric",)))
    return [
        KernelSku(
            category="quantization",
            op=op,
            element=element,
            aux_element=codes,
            arch=arch,
            backend=backend,
            variant="rows",
            precision_guarantee=PrecisionGuarantee(math_precision="f32", accumulator="f32"),
            constraints=constraints,
            source="skuda_triton:kernels.py",
            entry_point=op,
            summary="a program takes some rows",
        )
        for op, codes, constraints in (("amax", None, plain), ("dynamic_range", S8, by_row))
        for element in elements
    ]


SKUS = [
    *offer("triton", ArchSku.SM_80, (F32, F16, BF16)),
    # Not bf16: the interpreter of Triton 3.9 reads its subnormal numbers wrongly, as the conformance suite found.
    *offer("triton_interpreter", ArchSku.CPU, (F32, F16)),
]
