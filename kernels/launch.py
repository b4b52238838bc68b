"""How a CUDA kernel is launched, as plain data: a launch rule maps (problem, device) to a `Launch`.

A rule is pure and runs without a GPU. The backend turns each parameter into bytes when arrays are bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from skuda.registry.elements import ElementKind

Dim3 = tuple[int, int, int]

_OTHERS_TOLD = 3


@dataclass(frozen=True, slots=True)
class Pointer:
    """Address of an argument's or scratch buffer's first element; 0 where it is absent or passed by value."""

    name: str


@dataclass(frozen=True, slots=True)
class Leading:
    """Distance, in stored elements, between rows of an argument's two-dimensional view (s64)."""

    name: str


@dataclass(frozen=True, slots=True)
class Number:
    """A scalar argument by value, in `element`; 0 where the caller passed a one-element array instead."""

    name: str
    element: ElementKind


@dataclass(frozen=True, slots=True)
class Which:
    """Index, among an argument's accepted elements, of the one that the array given has (s32); 0 for a number."""

    name: str


@dataclass(frozen=True, slots=True)
class Constant:
    """A value fixed by the problem, passed as `element` (s32, s64, f32 or f64)."""

    element: ElementKind
    value: int | float


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of the view that all of `Launch.view` share (s64)."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns, in elements, of the view that all of `Launch.view` share (s64)."""


@dataclass(frozen=True, slots=True)
class TensorMap:
    """How Hopper's copy engine reads an argument of one-byte elements, by boxes of its rows (128 bytes, aligned to 64).

    A box lies in shared memory as rows of 128 bytes whose 16-byte units are xored with the row's number modulo 8;
    what it has beyond the matrix is zero. The argument's address and leading stride must be multiples of 16.

    Attributes
    ----------
    name : str
        The argument, a matrix.
    rows, columns : int
        Its shape.
    box_rows : int
        Rows of a box, a multiple of 8, at most 256.
    otherwise : str
        The scratch buffer that is read where the argument is absent; both are without gaps then.
    promotion : int
        Bytes of second-level cache that a read asks for: 128 or 256.
    """

    name: str
    rows: int
    columns: int
    box_rows: int
    otherwise: str = ""
    promotion: int = 128


Parameter = TensorMap | Pointer | Leading | Number | Which | Constant | Rows | Columns


@dataclass(frozen=True, slots=True)
class Step:
    """One kernel launch.

    Attributes
    ----------
    entry : str
        Function in the SKU's source.
    grid, block : (int, int, int)
        Launch geometry; a grid with a 0 is skipped.
    parameters : tuple of Parameter
        In the order of the function's parameters.
    shared : int
        Bytes of dynamic shared memory.
    overlaps : bool
        Whether it may start while the step before it still runs; it waits by itself for what it needs.
    lead : int
        Bytes in front of the first parameter. Rules leave it at 0: it is read off the compiled kernel, because a
        tensor map lies at a multiple of 64 in a bank of memory where parameters need not begin at one.
    """

    entry: str
    grid: Dim3
    block: Dim3
    parameters: tuple[Parameter, ...]
    shared: int = 0
    overlaps: bool = False
    lead: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """One configuration in which a kernel can run a problem. All give the same bits.

    Attributes
    ----------
    name : str
        Which one: what a launch rule takes as its third argument.
    microseconds : float
        The time that the launch rule predicts for it.
    """

    name: str
    microseconds: float


@dataclass(frozen=True, slots=True)
class Launch:
    """Everything that a run launches, in stream order.

    Attributes
    ----------
    steps : tuple of Step
        The launches.
    view : tuple of str
        Arguments of one shape that are walked together: each is seen as rows of contiguous columns with one leading
        stride, the same rows and columns for all. Arguments outside it whose `Leading` is asked for are matrices with
        contiguous rows; all others are contiguous.
    scratch : tuple of (str, int)
        Named scratch buffers and their bytes; allocated once when the plan is made.
    aligned : tuple of str
        Matrices, apart from those of tensor maps, whose address and rows must begin at multiples of 16 bytes.
    flags : tuple of str
        Compiler flags of the chosen configuration, behind those of the SKU.
    choices : tuple of Choice
        The configurations that there are, the fastest by prediction first. A rule that has any takes the name of one
        as its third argument, and the first one without it.
    choice : str
        The name of the configuration that this is; empty where there is but one.
    notes : tuple of str
        What else a person should know.
    """

    steps: tuple[Step, ...]
    view: tuple[str, ...] = ()
    scratch: tuple[tuple[str, int], ...] = ()
    aligned: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    choices: tuple[Choice, ...] = ()
    choice: str = ""
    notes: tuple[str, ...] = ()

    def told(self) -> tuple[str, ...]:
        """Return what was chosen and what stood behind it, then the notes."""
        if not self.choices:
            return self.notes
        mine = next(choice for choice in self.choices if choice.name == self.choice)
        others = [choice for choice in self.choices if choice is not mine][:_OTHERS_TOLD]
        told = f"configuration {mine.name}: {mine.microseconds:.1f} us predicted"
        if others:
            told += "; others: " + ", ".join(f"{other.microseconds:.1f} us for {other.name}" for other in others)
        return (told, *self.notes)
