"""`KernelSku`: one registered kernel."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field

from skuda.registry.arch import ArchSku
from skuda.registry.backend import Name
from skuda.registry.cached import cached_property
from skuda.registry.constraints import Constraint
from skuda.registry.descriptor import FunctionalKey
from skuda.registry.elements import ElementKind
from skuda.registry.guarantee import PrecisionGuarantee
from skuda.registry.text import shown
from skuda.registry.value import Integer, Value
from skuda.registry.vocabulary import EpilogueKind, LayoutSku, OpCategory

if TYPE_CHECKING:
    from skuda.registry.descriptor import Descriptor

_PLAIN = "plain"
_LAYOUTS = frozenset(layout.value for layout in LayoutSku)


class WorkspaceTerm(Value):
    """One term of a workspace size: the product of some descriptor fields times a number of bytes."""

    factors: tuple[str, ...]
    bytes_each: Annotated[Integer, Field(gt=0)]


class SkuIdentity(Value):
    """The fields that identify a kernel. `id` writes them as one string, and `parse` reads it back."""

    category: OpCategory
    op: Name
    element: ElementKind
    aux_element: ElementKind | None = None
    layout: LayoutSku | None = None
    epilogue: EpilogueKind | None = None
    arch: ArchSku
    backend: Name
    variant: Name

    @cached_property
    def id(self) -> str:
        """``category.op.element[-aux].layout[-epilogue].arch.backend.variant``, ``plain`` if there is no layout.

        For example ``quantization.quantized_linear.bf16-s8.rcr-bias.sm_90a.pycuda.wgmma_128x128``.
        """
        elements = "-".join(str(part) for part in (self.element, self.aux_element) if part is not None)
        shape = "-".join(str(part) for part in (self.layout, self.epilogue) if part is not None)
        return ".".join((self.category, self.op, elements, shape or _PLAIN, self.arch, self.backend, self.variant))

    @classmethod
    def parse(cls, text: str) -> SkuIdentity:
        """Read an `id` back.

        Raises
        ------
        InvalidRecord
            If `text` is not an id.
        """
        given: object = text
        parts = given.split(".") if isinstance(given, str) else ()
        if len(parts) != 7:
            cls.refuse("id", shown(given), "be category.op.element[-aux].layout[-epilogue].arch.backend.variant")
        category, op, elements, shape, arch, backend, variant = parts
        element, _, aux = elements.partition("-")
        words = [] if shape == _PLAIN else shape.split("-")
        layout = words.pop(0) if words and words[0] in _LAYOUTS else None
        epilogue = words.pop(0) if words else None
        if words:
            cls.refuse("id", shown(text), f"have at most a layout and an epilogue in {shape!r}")
        return SkuIdentity.model_validate(
            {
                "category": category,
                "op": op,
                "element": element,
                "aux_element": aux or None,
                "layout": layout,
                "epilogue": epilogue,
                "arch": arch,
                "backend": backend,
                "variant": variant,
            }
        )

    @property
    def identity(self) -> SkuIdentity:
        """The identity alone, without guarantee and source."""
        return SkuIdentity.parse(self.id)

    @cached_property
    def key(self) -> FunctionalKey:
        """The exact key that a descriptor must have."""
        return FunctionalKey(self.category, self.op, self.element, self.aux_element, self.layout, self.epilogue)


class KernelSku(SkuIdentity):
    """One registered kernel: what it computes, where it runs, what it promises and requires, and where its code is.

    Attributes
    ----------
    precision_guarantee : PrecisionGuarantee
        What the kernel promises about its bits.
    constraints : tuple of Constraint
        Its requirements on the problem, beyond the functional key and the architecture.
    source : str
        A Python module, or ``package:file`` for a source file that belongs to a package.
    entry_point : str
        Name of the function in `source`.
    launch : str or None
        ``module:function`` that maps (descriptor, device) to grid, block and shared memory; None for Python kernels.
    flags : tuple of str
        Compiler flags that the kernel's bits depend on; part of the cache key.
    workspace : tuple of WorkspaceTerm
        Bytes of scratch that the plan allocates, as a sum of products of descriptor fields.
    summary : str
        One line of description.
    """

    precision_guarantee: PrecisionGuarantee
    constraints: tuple[Constraint, ...] = ()
    source: str
    entry_point: str
    launch: str | None = None
    flags: tuple[str, ...] = ()
    workspace: tuple[WorkspaceTerm, ...] = ()
    summary: str = ""

    def workspace_size(self, problem: Descriptor) -> int:
        """Return the bytes of scratch that this kernel needs for `problem`."""
        return sum(
            term.bytes_each * math.prod(getattr(problem, factor) for factor in term.factors) for term in self.workspace
        )

    def on(self, backend: str, *, arch: ArchSku | None = None) -> Self:
        """Return the same kernel offered under another backend (and architecture)."""
        return self.model_copy(update={"backend": backend, "arch": self.arch if arch is None else arch})
