"""What a kernel promises about its bits, and what a caller may require."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from skuda.registry.elements import ElementKind
from skuda.registry.reason import Reason
from skuda.registry.value import Integer, Value
from skuda.registry.vocabulary import MathPrecision

Ulps = Annotated[Integer, Field(ge=0)]


class PrecisionGuarantee(Value):
    """What a kernel promises. ``skuda verify`` runs the kernel to check it. Until then it is shown as unverified.

    Attributes
    ----------
    math_precision : MathPrecision
        Precision inside the instruction.
    accumulator : ElementKind
        Element of the accumulated sums.
    deterministic : bool
        The same inputs give the same bits on every run, because nothing depends on timing.
    bit_stable_on_same_hardware : bool
        The same inputs give the same bits on every machine with the same processor.
    max_ulp : int or None
        Largest distance from the NumPy reference in units in the last place of the compute type, before the final
        rounding; 0 means equal bit for bit, None means no promise.
    batch_invariant : bool
        A row's result does not depend on which other rows are computed with it.
    """

    math_precision: MathPrecision
    accumulator: ElementKind
    deterministic: bool = True
    bit_stable_on_same_hardware: bool = True
    max_ulp: Ulps | None = 0
    batch_invariant: bool = True

    @property
    def bit_exact(self) -> bool:
        """Whether the kernel equals the reference bit for bit."""
        return self.max_ulp == 0

    def describe(self) -> str:
        """Return the promise as one line of text."""
        closeness = {0: "bit-exact", None: "no ulp bound"}.get(self.max_ulp, f"within {self.max_ulp} ulp")
        flags = {
            "deterministic": self.deterministic,
            "bit-stable": self.bit_stable_on_same_hardware,
            "batch-invariant": self.batch_invariant,
        }
        words = [f"{self.math_precision} math", f"{self.accumulator} accumulator", closeness]
        return ", ".join(words + [name for name, given in flags.items() if given])


class PrecisionRequirement(Value):
    """A partial `PrecisionGuarantee`: the fields that a caller requires. The others are None.

    A kernel must promise every flag that is True, and at most `max_ulp`. Its `math_precision` and `accumulator` must be
    equal. `shard_invariant` means the same bits on any number of devices; only bit-exact kernels have that.
    """

    math_precision: MathPrecision | None = None
    accumulator: ElementKind | None = None
    deterministic: bool | None = None
    bit_stable_on_same_hardware: bool | None = None
    max_ulp: Ulps | None = None
    batch_invariant: bool | None = None
    shard_invariant: bool | None = None

    def check(self, guarantee: PrecisionGuarantee) -> tuple[Reason, ...]:
        """Return one reason for every field in which `guarantee` falls short."""
        return tuple(
            Reason(code="guarantee", field=f"preference.require.{field}", wanted=wanted, had=had)
            for field, wanted, had, met in _compare(self, guarantee)
            if not met
        )


def exceeds(guarantee: PrecisionGuarantee, ceiling: PrecisionGuarantee) -> str | None:
    """Return the first field in which `guarantee` promises more than `ceiling` allows, or None.

    Math precision and accumulator are not compared: a backend limits promises, not the way to compute.
    """
    for field in ("deterministic", "bit_stable_on_same_hardware", "batch_invariant"):
        if getattr(guarantee, field) and not getattr(ceiling, field):
            return field
    if guarantee.max_ulp is not None and (ceiling.max_ulp is None or guarantee.max_ulp < ceiling.max_ulp):
        return "max_ulp"
    return None


def falls_short(guarantee: PrecisionGuarantee, other: PrecisionGuarantee) -> str | None:
    """Return the first field in which `guarantee` promises less than `other`, or None.

    A bit-exact kernel equals the reference, whatever its math precision and accumulator. For other kernels a different
    math precision or accumulator is a different promise.
    """
    if not guarantee.bit_exact:
        for field in ("math_precision", "accumulator"):
            if getattr(guarantee, field) != getattr(other, field):
                return field
    return exceeds(other, guarantee)


def _compare(wanted: PrecisionRequirement, given: PrecisionGuarantee) -> list[tuple[str, str, str, bool]]:
    """Return (field, wanted, had, met) for every field that `wanted` requires."""
    rows = [
        (field, str(want), str(getattr(given, field)), want == getattr(given, field))
        for field in ("math_precision", "accumulator")
        if (want := getattr(wanted, field)) is not None
    ]
    rows += [
        (field, "True", str(getattr(given, field)), getattr(given, field))
        for field in ("deterministic", "bit_stable_on_same_hardware", "batch_invariant")
        if getattr(wanted, field)
    ]
    if wanted.shard_invariant:
        rows.append(("shard_invariant", "True", str(given.bit_exact), given.bit_exact))
    if wanted.max_ulp is not None:
        met = given.max_ulp is not None and given.max_ulp <= wanted.max_ulp
        rows.append(("max_ulp", f"at most {wanted.max_ulp}", str(given.max_ulp), met))
    return rows
