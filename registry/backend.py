"""The facts about a backend, enough to refuse a kernel record whose promises it cannot keep."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from skuda.registry.elements import ElementKind
from skuda.registry.guarantee import PrecisionGuarantee
from skuda.registry.value import Value
from skuda.registry.vocabulary import BackendKind, MathPrecision

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
"""Lower case letters, digits and underscores: safe in an id, a path and a shell."""


class BackendSpec(Value):
    """The facts about a backend that registration and ranking need, without importing it.

    Attributes
    ----------
    name : str
        The name that `KernelSku.backend` refers to.
    processor : str
        ``cpu`` or ``cuda``. Its kernels may name architectures of this kind only.
    ceiling : PrecisionGuarantee
        The most that any kernel of this backend may promise.
    reference : bool
        Whether it runs the NumPy references of the ops as they are. A kernel that is a reference ranks last.
    """

    name: Name
    processor: Literal["cpu", "cuda"]
    ceiling: PrecisionGuarantee = PrecisionGuarantee(math_precision=MathPrecision.F64, accumulator=ElementKind.F64)
    reference: bool = False


BUILT_IN = (
    BackendSpec(name=BackendKind.PYCUDA, processor="cuda"),
    BackendSpec(name=BackendKind.CUDA_CORE, processor="cuda"),
    BackendSpec(name=BackendKind.NUMPY, processor="cpu", reference=True),
)
"""The built-in backends, in order of preference."""
