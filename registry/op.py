"""`Op`: one operation, with its reference, its cases and its kernels, best first."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from skuda.registry.descriptor import Descriptor
from skuda.registry.sku import KernelSku
from skuda.registry.text import lines
from skuda.registry.vocabulary import OpCategory

Values = Literal["normal", "special", "infinite", "zero", "ties", "extreme", "tail", "small_data", "small_scales"]


@dataclass(frozen=True)
class Case:
    """One problem of an op, as tests, verification and benchmarks use it.

    Attributes
    ----------
    problem : Descriptor
        The problem.
    values : str
        How floating inputs are drawn: ``normal`` (finite, over many binades), ``special`` (also NaN, zeros and
        subnormals, sometimes infinities, and unusable scales), ``infinite`` (both infinities and NaN, usable scales),
        ``zero`` (all data is 0), ``ties`` (quotients by the scale on a rounding boundary or one number beside it),
        ``extreme`` (codes of linear layers at the ends of their range, so that sums of products are large), ``tail``
        (the largest of each row is one of its last elements), ``small_data`` (subnormal, over scales above 1) or
        ``small_scales`` (so small that products with codes are subnormal).
    """

    problem: Descriptor
    values: Values = "normal"


@dataclass(frozen=True)
class Op:
    """One operation.

    Attributes
    ----------
    descriptor : type of Descriptor
        The class of the op's problems. It has the op's name and category.
    reference : callable
        Defines the op's results: ``reference(problem, **arrays)`` writes NumPy outputs from NumPy inputs.
    cases : tuple of Case
        Problems on which every kernel of the op is tested.
    skus : tuple of KernelSku
        The kernels, best first.
    source : str
        Source of the definition.
    draw : callable or None
        ``draw(problem, values, rng)`` draws inputs for each kind of `Case.values`, if the general rule does not fit.
    """

    descriptor: type[Descriptor]
    reference: Callable[..., None]
    cases: tuple[Case, ...]
    skus: tuple[KernelSku, ...]
    source: str
    draw: Callable[..., Mapping[str, Any]] | None = field(default=None)

    @property
    def name(self) -> str:
        """Name of the op."""
        return self.descriptor.op_name()

    @property
    def category(self) -> OpCategory:
        """Category of the op."""
        return self.descriptor.category

    @property
    def documentation(self) -> str:
        """The op's own documentation: formula, shapes, units, errors."""
        return lines(inspect.getdoc(inspect.getmodule(self.reference)) or "")

    @property
    def summary(self) -> str:
        """First line of the documentation."""
        return self.documentation.partition("\n")[0]
