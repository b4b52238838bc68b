"""Requirements of a kernel on a problem; each can check a problem and describe itself.

A constraint names an attribute of the descriptor, so derived sizes (`numel`, `num_groups`) can be constrained too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, WrapValidator

from skuda.registry.reason import Reason
from skuda.registry.value import Integer, Value

if TYPE_CHECKING:
    from skuda.registry.descriptor import Descriptor


class _FieldConstraint(Value):
    field: str

    def describe(self) -> str:
        """Return the requirement in words."""
        return f"{self.field} {self.wanted()}"

    def wanted(self) -> str:
        """Return what the field must be, in words."""
        raise NotImplementedError

    def serves(self, problem: Descriptor) -> bool:
        """Whether `problem` satisfies the requirement."""
        raise NotImplementedError

    def check(self, problem: Descriptor) -> Reason | None:
        """Return the reason for which `problem` is refused, or None."""
        if self.serves(problem):
            return None
        had = str(getattr(problem, self.field))
        return Reason(code="constraint", field=self.field, wanted=self.wanted(), had=had)

    @property
    def fields(self) -> tuple[str, ...]:
        """Descriptor attributes that the requirement reads."""
        return (self.field,)


class OneOf(_FieldConstraint):
    """The field has one of the listed values; None stands for a field that is left out."""

    kind: Literal["one_of"] = "one_of"
    allowed: tuple[str | int | bool | None, ...]

    def wanted(self) -> str:
        """Return what the field must be, in words."""
        names = ["left out" if value is None else str(value) for value in self.allowed]
        return "one of " + ", ".join(names) if len(names) > 1 else names[0]

    def serves(self, problem: Descriptor) -> bool:
        """Whether the field's value is listed."""
        return getattr(problem, self.field) in self.allowed


class Between(_FieldConstraint):
    """The field lies in [minimum, maximum]; either end may be open (None)."""

    kind: Literal["between"] = "between"
    minimum: Integer | None = None
    maximum: Integer | None = None

    def wanted(self) -> str:
        """Return what the field must be, in words."""
        low = [] if self.minimum is None else [f"at least {self.minimum}"]
        high = [] if self.maximum is None else [f"at most {self.maximum}"]
        return " and ".join(low + high) or "anything"

    def serves(self, problem: Descriptor) -> bool:
        """Whether the field's value is in range."""
        value, low, high = getattr(problem, self.field), self.minimum, self.maximum
        return isinstance(value, (int, float)) and (low is None or low <= value) and (high is None or value <= high)


class MultipleOf(_FieldConstraint):
    """The field is a multiple of a number."""

    kind: Literal["multiple_of"] = "multiple_of"
    divisor: Annotated[Integer, Field(gt=0)]

    def wanted(self) -> str:
        """Return what the field must be, in words."""
        return f"a multiple of {self.divisor}"

    def serves(self, problem: Descriptor) -> bool:
        """Whether the field's value divides evenly."""
        value = getattr(problem, self.field)
        return isinstance(value, int) and value % self.divisor == 0


class ProductAtMost(Value):
    """The product of several fields stays within a bound, for example the largest 32-bit index."""

    kind: Literal["product_at_most"] = "product_at_most"
    factors: tuple[str, ...]
    maximum: Integer

    def describe(self) -> str:
        """Return the requirement in words."""
        return f"{' * '.join(self.factors)} at most {self.maximum}"

    def serves(self, problem: Descriptor) -> bool:
        """Whether `problem` satisfies the requirement."""
        product: int = math.prod(getattr(problem, factor) for factor in self.factors)
        return product <= self.maximum

    def check(self, problem: Descriptor) -> Reason | None:
        """Return the reason for which `problem` is refused, or None."""
        if self.serves(problem):
            return None
        product = math.prod(getattr(problem, factor) for factor in self.factors)
        name = " * ".join(self.factors)
        return Reason(code="constraint", field=name, wanted=f"at most {self.maximum}", had=str(product))

    @property
    def fields(self) -> tuple[str, ...]:
        """Descriptor attributes that the requirement reads."""
        return self.factors


def _as_it_is(value: Any, read: Callable[[Any], Any]) -> Any:
    # Pydantic asks a union's value whether it is a `Mapping`, in Python code, and drops a Ctrl-C that comes there.
    return value if isinstance(value, OneOf | Between | MultipleOf | ProductAtMost) else read(value)


Constraint = Annotated[
    OneOf | Between | MultipleOf | ProductAtMost, Field(discriminator="kind"), WrapValidator(_as_it_is)
]
"""Any of the constraints; the ``kind`` field distinguishes them in JSON."""
