"""Launches of CUDA kernels as plain data: a launch rule maps (problem, device) to a `Launch`.

A rule is a pure function and needs no GPU: ``rule(problem, device)``, or ``rule(problem, device, choice)`` if it ranks
several configurations. The backend converts each parameter to bytes when arrays are bound. Classes that every new size
makes are named tuples: making one takes a third of the time of a frozen dataclass.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

from skuda.registry.elements import ElementKind

Dim3 = tuple[int, int, int]

ZEROS = "zeros"
"""Name of a scratch buffer of up to `MOST_ZEROS` bytes that holds zeros when a run begins; the run leaves it so."""

MOST_ZEROS = 4096

ANY_ROWS = 2**63 - 1
"""`Launch.alike` of a rule whose flags do not depend on the number of rows."""

_OTHERS_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Pointer:
    """Address of the first element of an argument or scratch buffer; 0 if it is absent or passed by value."""

    name: str


@dataclass(frozen=True, slots=True)
class Leading:
    """Distance, in stored elements, between rows of an argument's two-dimensional view (s64)."""

    name: str


@dataclass(frozen=True, slots=True)
class Number:
    """A scalar argument by value, in `element`; 0 if the caller passed a one-element array instead."""

    name: str
    element: ElementKind


@dataclass(frozen=True, slots=True)
class Which:
    """Index of a given array's element among the argument's accepted elements (s32); 0 for a number."""

    name: str


class Constant(NamedTuple):
    """A value fixed by the problem, passed as `element` (s32, s64, f32 or f64)."""

    element: ElementKind
    value: int | float


@dataclass(frozen=True, slots=True)
class Rows:
    """Number of rows of the view that all arguments in `Launch.view` share (s64)."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Number of columns, in elements, of the view that all arguments in `Launch.view` share (s64)."""


class TensorMap(NamedTuple):
    """Tensor map of a matrix of one-byte elements: the TMA copies boxes of rows (128 bytes, aligned to 64).

    A box lies in shared memory as rows of 128 bytes with the 128-byte swizzle: the index of each 16-byte unit is xored
    with the row number modulo 8. Parts of a box beyond the matrix are zero. The argument's address and leading stride
    must be multiples of 16.

    Attributes
    ----------
    name : str
        Name of the argument, a matrix, or of a scratch buffer, which is contiguous.
    rows, columns : int
        Its shape.
    box_rows : int
        Rows of a box, a multiple of 8, at most 256.
    otherwise : str
        The scratch buffer that is read if the argument is absent; both are then contiguous.
    promotion : int
        L2 promotion size of a read in bytes: 128 or 256.
    """

    name: str
    rows: int
    columns: int
    box_rows: int
    otherwise: str = ""
    promotion: int = 128


Parameter = TensorMap | Pointer | Leading | Number | Which | Constant | Rows | Columns


@cache
def pointers(*names: str) -> tuple[Pointer, ...]:
    """Return pointers to arguments or scratch buffers."""
    return tuple(Pointer(name) for name in names)


@cache
def strided(*names: str) -> tuple[Parameter, ...]:
    """Return the pointer and the leading stride of every argument."""
    return tuple(part for name in names for part in (Pointer(name), Leading(name)))


# Launches of one layer differ in few numbers.
@lru_cache(maxsize=4096)
def _s32(value: int) -> Constant:
    return Constant(ElementKind.S32, int(value))


@lru_cache(maxsize=4096)
def _s64(value: int) -> Constant:
    return Constant(ElementKind.S64, int(value))


def s32(*values: int) -> tuple[Constant, ...]:
    """Return s32 constants."""
    return tuple(map(_s32, values))


def s64(*values: int) -> tuple[Constant, ...]:
    """Return s64 constants."""
    return tuple(map(_s64, values))


class Step(NamedTuple):
    """One kernel launch.

    Attributes
    ----------
    entry : str
        Name of the kernel in the SKU's source.
    grid, block : (int, int, int)
        Launch geometry; a step whose grid contains a 0 is skipped.
    parameters : tuple of Parameter
        In the order of the kernel's parameters.
    shared : int
        Bytes of dynamic shared memory.
    overlaps : bool
        Whether it may start before the previous kernel of the stream ends, in this launch or an earlier one
        (programmatic dependent launch). The kernel itself then waits for the previous one before it reads any of its
        results and before it writes.
    lead : int
        Offset in bytes of the first parameter. Launch rules leave it at 0, because the backend reads it from the
        compiled kernel: a tensor map needs an alignment of 64, and the parameters may begin elsewhere in the constant
        bank.
    """

    entry: str
    grid: Dim3
    block: Dim3
    parameters: tuple[Parameter, ...]
    shared: int = 0
    overlaps: bool = False
    lead: int = 0


class Choice(NamedTuple):
    """One configuration in which a kernel can run a problem; all configurations give the same bits.

    Attributes
    ----------
    name : str
        Its name, which a launch rule takes as its third argument.
    microseconds : float
        The time that the launch rule predicts.
    workspace : int
        Bytes of scratch that it needs in addition to the SKU's workspace.
    """

    name: str
    microseconds: float
    workspace: int = 0


class Launch(NamedTuple):
    """All launches of a run, in stream order.

    Attributes
    ----------
    steps : tuple of Step
        The launches.
    view : tuple of str
        Arguments of one shape that are traversed in parallel. Each is viewed as rows of contiguous columns with one
        leading stride; rows and columns are the same for all. Other arguments with a `Leading` are matrices with
        contiguous rows; all remaining ones are contiguous.
    scratch : tuple of (str, int)
        Names and sizes in bytes of scratch buffers; plans that run on the same stream share the memory for them.
    aligned : tuple of str
        Matrices, apart from those of tensor maps, whose address and rows must begin at multiples of 16 bytes.
    flags : tuple of str
        Compiler flags of the chosen configuration, after those of the SKU.
    choices : tuple of Choice
        The available configurations, the fastest prediction first. A rule that returns any takes the name of one as
        its third argument; the default is the first.
    choice : str
        Name of the configuration of this launch; empty if there is only one.
    notes : tuple of str
        Further remarks for the user.
    alike : int
        Problems with more rows, up to so many, that differ in nothing else certainly have the same flags. 0: perhaps
        not even one. Whoever prepares every number of rows then asks the rule for each.
    """

    steps: tuple[Step, ...]
    view: tuple[str, ...] = ()
    scratch: tuple[tuple[str, int], ...] = ()
    aligned: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    choices: tuple[Choice, ...] = ()
    choice: str = ""
    notes: tuple[str, ...] = ()
    alike: int = 0

    def explanation(self) -> tuple[str, ...]:
        """Return lines for the user: the chosen configuration with some alternatives, then the notes."""
        if not self.choices:
            return self.notes
        chosen = next(choice for choice in self.choices if choice.name == self.choice)
        others = [choice for choice in self.choices if choice is not chosen][:_OTHERS_SHOWN]
        line = f"configuration {chosen.name}: {chosen.microseconds:.1f} us predicted"
        if others:
            line += "; others: " + ", ".join(f"{other.microseconds:.1f} us for {other.name}" for other in others)
        return (line, *self.notes)
