"""Checks the device arrays of a call, and maps their values to the parameters of the kernel.

`Binder.bind` checks a call in full and returns a `CheckedCall`. `skuda.dispatch.cuda.launcher` makes a function of it,
which recognizes the next call like it and launches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import numpy as np

from skuda.dispatch.cuda.arrays import framework_of, standard
from skuda.dispatch.cuda.dlpack import dense_strides
from skuda.dispatch.cuda.facts import ANYWHERE, ArrayFacts, Framework, Guard, JointCheck, Refused
from skuda.dispatch.cuda.packing import packable
from skuda.dispatch.cuda.tensor_maps import refuse_unaligned
from skuda.dispatch.cuda.views import ViewedArray, common_view, is_contiguous, matrix_view
from skuda.dispatch.host import rules
from skuda.dispatch.host.floating import IS_NEAREST, require_exact_mode
from skuda.dispatch.launch_cache import PositionalCall
from skuda.kernels.launch import Columns, Constant, Launch, Leading, Number, Parameter, Pointer, Rows, TensorMap, Which
from skuda.registry.cached import cached_property
from skuda.registry.descriptor import Argument, Descriptor, Role, storage_shape
from skuda.registry.elements import ElementKind
from skuda.registry.errors import InvalidProblem, OutOfMemory
from skuda.registry.text import shown

_SMALL, _LARGE = 2.0**-126, 2.0**127
"""Magnitudes between which an f64 number rounds to a normal f32 one."""

Shapes = Mapping[str, tuple[int, ...]]


class Overlap(NamedTuple):
    """Two arrays that must not overlap, one of which is written."""

    written: int  # indices of their addresses among the values
    other: int
    low: int  # they overlap if the address of `written` minus that of `other` lies between these, exclusive
    high: int
    equal: bool  # whether they may be exactly the same array


class GuardedArgument(NamedTuple):
    """One argument that was given."""

    name: str  # the argument
    guard: Guard  # returns its value, or None if the argument differs from the checked one
    plainly: str = ""
    """An expression of the argument ``{0}`` and `SUMMANDS`. If it is true, the argument is the value, and the guard is
    not called."""


class NewOutput(NamedTuple):
    """An output that was left out."""

    name: str  # the argument
    make: Callable[[int | None], Any]
    """Returns a new array, for the stream whose handle is given or the framework's current one (None)."""
    address: Callable[[Any], int]  # returns the address of such an array


class JointGuard(NamedTuple):
    """Arrays of one library (the indices of their arguments) that one check recognizes."""

    members: tuple[int, ...]
    check: JointCheck


@dataclass(frozen=True, slots=True)
class CheckedCall:
    """A call that was checked in full. It holds none of the caller's arrays."""

    given: tuple[GuardedArgument, ...]  # every argument that was given
    joint: tuple[JointGuard, ...]  # arrays that one check recognizes together
    clashes: tuple[Overlap, ...]  # pairs that must not overlap
    aligned: tuple[int, ...]  # arguments whose addresses must be multiples of 16 bytes
    made: tuple[NewOutput, ...]
    """The outputs to allocate. Their addresses follow the values."""
    indices: tuple[Sequence[int], ...]
    """For every step: the index of each parameter among the values, the new addresses, the scratch addresses and the
    constants."""
    constants: tuple[Any, ...]  # constants that follow the values, the new addresses and the scratch addresses
    framework: Framework  # the framework of the first array
    stream: Callable[[], int]  # returns the handle of the current stream
    placed: bool  # whether an array among the arguments is on the device

    def values(self, arrays: Mapping[str, Any]) -> list[Any]:
        """Return the values of the arguments that were checked."""
        return [one.guard(arrays.get(one.name)) for one in self.given]

    def parameters(self, values: Sequence[Any], scratch: Sequence[int] = ()) -> tuple[tuple[Any, ...], ...]:
        """Return every step's parameters, from the values with the new addresses, and the scratch addresses."""
        known = (*values, *scratch, *self.constants)
        return tuple(tuple(known[index] for index in step) for step in self.indices)


def storage_element(element: ElementKind) -> ElementKind:
    """Return the element of the array that stores `element`."""
    return ElementKind.U8 if element.is_packed else ElementKind.S8 if element.is_split else element


class Binder:
    """Checks calls of one problem with one launch on one device."""

    def __init__(self, problem: Descriptor, launch: Launch, ordinal: int) -> None:
        self._op = problem.op_name()
        self._in_place = problem.in_place
        self._arguments = problem.arguments()
        self._launch = launch
        self._ordinal = ordinal

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """Names of the op's outputs."""
        return tuple(a.name for a in self._arguments if a.role is Role.OUTPUT)

    @cached_property
    def _parameters(self) -> list[Parameter]:
        return [parameter for step in self._launch.steps for parameter in step.parameters]

    @cached_property
    def _maps(self) -> list[TensorMap]:
        return [p for p in self._parameters if isinstance(p, TensorMap)]

    @cached_property
    def _leading(self) -> set[str]:
        return self._named(Leading) | {p.name for p in self._maps if not p.otherwise}

    @cached_property
    def _numbers(self) -> dict[str, ElementKind]:
        return {p.name: p.element for p in self._parameters if isinstance(p, Number)}

    @cached_property
    def _pointers(self) -> set[str]:
        return self._named(Pointer) | self._named(TensorMap)

    def _named(self, kind: type[Pointer | TensorMap | Leading | Which]) -> set[str]:
        return {p.name for p in self._parameters if isinstance(p, kind)}

    def bind(self, arrays: Mapping[str, Any]) -> CheckedCall:
        """Check the arguments of a call in full.

        Raise `InvalidProblem` for a missing, unknown or unsuitable argument; `Unaligned` if another kernel may accept
        it; `FloatModeError` if this thread does not round to nearest, or flushes subnormal numbers.
        """
        require_exact_mode()
        rules.refuse_unknown(self._op, self._arguments, arrays)
        frameworks: dict[str, Framework] = {}
        facts: dict[str, ArrayFacts] = {}
        for argument in self._arguments:
            value = arrays.get(argument.name)
            if value is None or (argument.is_scalar and isinstance(value, (bool, int, float, np.generic))):
                continue
            frameworks[argument.name] = framework_of(type(value))
            facts[argument.name] = self._facts(argument, value, frameworks[argument.name])
        flat = rules.flat_shape(self._op, self._arguments, {name: found.shape for name, found in facts.items()})
        shapes = {a.name: flat if a.flat and flat is not None else a.shape for a in self._arguments}
        which = {a.name: self._checked(a, facts[a.name], shapes[a.name]) for a in self._arguments if a.name in facts}
        places = {name: _place(found) for name, found in facts.items()}
        rules.refuse_overlap(self._op, self._arguments, places, in_place=self._in_place)
        framework = next(iter(frameworks.values()), standard())
        given = tuple(self._given(arrays, facts, frameworks, shapes))
        made = tuple(
            NewOutput(
                a.name, self._maker(a, shapes[a.name], framework), _address if framework.borrows else framework.address
            )
            for a in self._arguments
            if a.role is Role.OUTPUT and arrays.get(a.name) is None
        )
        names = [one.name for one in given]
        views = self._views(facts, shapes)
        aligned = [name for name in (*(each.name for each in self._maps), *self._launch.aligned) if name in facts]
        for name in aligned:
            found = facts[name]
            distance = views[2].get(name, found.shape[-1]) if found.shape[0] > 1 else 0
            refuse_unaligned(self._op, name, found.address, distance * ((found.element or ElementKind.U8).bits // 8))
        indices, constants = self._indices(names, [each.name for each in made], facts, views, which)
        return CheckedCall(
            given=given,
            joint=tuple(_groups(names, arrays, frameworks)),
            clashes=tuple(self._clashes(names, places)),
            aligned=tuple(map(names.index, aligned)),
            made=made,
            indices=tuple(indices),
            constants=constants,
            framework=framework,
            stream=self._stream(framework, facts),
            placed=any(found.ordinal == self._ordinal for found in facts.values()),
        )

    def at_positions(self, call: CheckedCall, positions: PositionalCall) -> CheckedCall | None:
        """Return a call for arrays of other shapes in the same memory. Return None if nothing recognizes them."""
        members = tuple(at for at, one in enumerate(call.given) if one.name in positions.arrays)
        check = call.framework.joint_check(tuple(positions.arrays[call.given[at].name] for at in members))
        if check is None:
            return None
        check = check._replace(unless="")  # `positions.unless` says when a tensor that requires grad is refused
        elements = {a.name: storage_element(a.elements[0]) for a in self._arguments}
        made = tuple(
            each._replace(make=call.framework.maker(positions.shapes[each.name], elements[each.name], self._ordinal))
            for each in call.made
        )
        return replace(call, joint=(JointGuard(members, check),), made=made)

    def _refuse(self, name: str, had: str, must: str) -> NoReturn:
        raise InvalidProblem(self._op, name, had, must)

    def _facts(self, argument: Argument, value: Any, framework: Framework) -> ArrayFacts:
        name = argument.name
        try:
            found = framework.facts(value)
        except Refused as error:
            self._refuse(name, error.had, error.must)
        except (AttributeError, BufferError, LookupError, RuntimeError, TypeError, ValueError) as error:
            self._refuse(name, f"a {type(value).__name__}", f"be readable without a copy ({error})")
        if found.ordinal not in {self._ordinal, ANYWHERE}:
            where = "the host" if found.ordinal is None else f"cuda:{found.ordinal}"
            self._refuse(name, f"an array on {where}", f"be on cuda:{self._ordinal}, where this plan runs")
        return found

    def _checked(self, argument: Argument, found: ArrayFacts, shape: tuple[int, ...]) -> int:
        """Check one array by itself. Return the index of its element among the accepted ones."""
        name, stored = argument.name, [storage_element(element) for element in argument.elements]
        if found.element not in stored:
            self._refuse(name, f"an array of {found.kind}", f"be {rules.wanted(argument, shape)}")
        which = stored.index(found.element)
        if which and name in self._pointers and name not in self._named(Which):
            self._refuse(name, f"an array of {found.kind}", f"be of {argument.elements[0]}: this kernel takes no other")
        rules.checked_shape(self._op, argument, argument.elements[which], found.shape, shape)
        size = found.element.bits // 8
        if found.address % size:
            self._refuse(name, f"the address {found.address:#x}", f"be a multiple of {size}, the bytes of an element")
        if argument.role in rules.WRITTEN and found.read_only:
            self._refuse(name, "a read-only array", "be writable; leave it out to get a new one")
        if argument.role in rules.WRITTEN and rules.repeats(_place(found)):
            self._refuse(name, f"strides {found.strides}", "have one place in memory for every element")
        if argument.is_scalar and name in self._numbers and name not in self._pointers:
            self._refuse(name, "an array", "be a number: this kernel takes it by value")
        plain = not argument.is_scalar and name not in self._leading and name not in self._launch.view
        if plain and name in self._pointers and not is_contiguous(found):
            rule = "be contiguous; copy it first: x.contiguous(), or ascontiguousarray(x)"
            self._refuse(name, f"strides {found.strides} for shape {found.shape}", rule)
        return which

    def _stream(self, framework: Framework, facts: Mapping[str, ArrayFacts]) -> Callable[[], int]:
        """Return a getter of the current stream. All arrays whose owners report a stream must report the same one."""
        named = {found.stream if found.stream != 1 else 0 for found in facts.values() if found.stream is not None}
        if len(named) > 1:
            streams = ", ".join(
                f"{name} on {found.stream}" for name, found in facts.items() if found.stream is not None
            )
            self._refuse("stream", f"arrays of different streams: {streams}", "be given, once they are in order")
        if named:
            (handle,) = named
            return lambda: handle
        return framework.current_stream(self._ordinal)

    def _given(
        self,
        arrays: Mapping[str, Any],
        facts: Mapping[str, ArrayFacts],
        frameworks: Mapping[str, Framework],
        shapes: Shapes,
    ) -> list[GuardedArgument]:
        given: list[GuardedArgument] = []
        for argument in self._arguments:
            name, value = argument.name, arrays.get(argument.name)
            if name in facts:
                given.append(GuardedArgument(name, frameworks[name].guard(value, facts[name])))
            elif value is not None:
                if name in self._pointers and name not in self._numbers:
                    self._refuse(name, shown(value), "be an array of one element: this kernel takes no number")
                given.append(self._number(argument, value))
            elif argument.required and argument.role is not Role.OUTPUT:
                self._refuse(name, "nothing", f"be given: {rules.wanted(argument, shapes[name])}")
            elif name in arrays:
                given.append(GuardedArgument(name, _absent))
        return given

    def _number(self, argument: Argument, value: Any) -> GuardedArgument:
        """Return how a number becomes its packed value. A number clearly in range is passed unchanged."""
        rules.number(self._op, argument, value)
        element = argument.elements[0]
        packed = self._numbers.get(argument.name, element)

        def convert(other: Any) -> Any:
            if not isinstance(other, (bool, int, float, np.generic)):
                return None
            require_exact_mode()
            return packable(rules.number(self._op, argument, other), packed)

        plainly = ""
        if element.integer_range is not None:
            low, high = element.integer_range
            plainly = f"type({{0}}) is int and {low} <= {{0}} <= {high}"
        elif element is packed and element in {ElementKind.F32, ElementKind.F64}:
            plainly = f"type({{0}}) is float and ({_SMALL} < {{0}} < {_LARGE} or -{_LARGE} < {{0}} < -{_SMALL})"
            plainly += f" and {IS_NEAREST}"  # it is rounded when it is packed
        return GuardedArgument(argument.name, convert, plainly)

    def _maker(self, argument: Argument, shape: tuple[int, ...], framework: Framework) -> Callable[[int | None], Any]:
        stored, element = storage_shape(shape, argument.elements[0]), storage_element(argument.elements[0])
        size = math.prod(stored) * element.bits // 8
        if size >= 1 << 63:  # no library can request so much
            raise OutOfMemory(self._op, argument.name, size)

        made = framework.maker(stored, element, self._ordinal)
        if not framework.borrows:
            return made

        def make(stream: int | None) -> Any:
            try:
                return made(stream)
            except Refused as error:
                return self._refuse(argument.name, error.had, error.must)

        return make

    def _clashes(self, names: list[str], places: Mapping[str, rules.StridedMemory]) -> list[Overlap]:
        written = [a.name for a in self._arguments if a.role in rules.WRITTEN and a.name in places]
        found = []
        for target in written:
            for name, other in places.items():
                one = places[target]
                empty = 0 in one.shape or 0 in other.shape
                if empty or name == target or (name in written and name < target):
                    continue
                equal = self._in_place and name not in written and one[1:] == other[1:]
                (one_low, one_high), (low, high) = one.span, other.span
                found.append(Overlap(names.index(target), names.index(name), low - one_high, high - one_low, equal))
        return found

    def _indices(  # noqa: C901  one case for each kind of parameter
        self,
        given: list[str],
        made: list[str],
        facts: Mapping[str, ArrayFacts],
        view: tuple[int, int, dict[str, int]],
        which: Mapping[str, int],
    ) -> tuple[list[list[int]], tuple[Any, ...]]:
        """Index each step's parameters among values, new addresses, scratch addresses and constants."""
        rows, columns, leading = view
        scratch = [name for name, _ in self._launch.scratch]
        new = {name: len(given) + at for at, name in enumerate(made)}
        addresses = {name: len(given) + len(made) + at for at, name in enumerate(scratch)}
        addresses |= new | {name: given.index(name) for name in facts}
        numbers = {name: at for at, name in enumerate(given) if name not in facts and name not in new}
        before = len(given) + len(made) + len(scratch)
        constants: list[Any] = []

        def places(parameter: Parameter) -> list[int]:
            match parameter:
                case Constant():  # most are
                    constants.append(packable(parameter.value, parameter.element))
                case Pointer(name) if name in addresses:
                    return [addresses[name]]
                case Number(name) if name in numbers:
                    return [numbers[name]]
                case TensorMap(name):
                    constants.append(leading.get(name, parameter.columns))
                    at = addresses[name] if name in addresses else addresses[parameter.otherwise]
                    return [at, before + len(constants) - 1]
                case Pointer() | Number():
                    constants.append(0)
                case Which(name):
                    constants.append(which.get(name, 0))
                case Leading(name):
                    constants.append(leading[name])
                case Rows():
                    constants.append(rows)
                case Columns():
                    constants.append(columns)
            return [before + len(constants) - 1]

        indices = [[at for one in step.parameters for at in places(one)] for step in self._launch.steps]
        return indices, tuple(constants)

    def _views(self, facts: Mapping[str, ArrayFacts], shapes: Shapes) -> tuple[int, int, dict[str, int]]:
        """Return rows and columns of the common view, and every leading stride that a parameter needs."""
        layouts = {}
        for argument in self._arguments:
            name, element = argument.name, argument.elements[0]
            if name in self._launch.view or name in self._leading:
                own = facts[name].strides if name in facts else dense_strides(storage_shape(shapes[name], element))
                layouts[name] = ViewedArray(own, element.is_packed, element.is_split)
        leading: dict[str, int] = {}
        for name in layouts.keys() - set(self._launch.view):
            leading |= matrix_view(self._op, shapes[name], name, layouts[name]).leading
        if not self._launch.view:
            return 0, 0, leading
        shared = {name: layouts[name] for name in self._launch.view}
        rows, columns, strides = common_view(self._op, shapes[self._launch.view[0]], shared)
        return rows, columns, leading | strides


def _groups(names: list[str], arrays: Mapping[str, Any], frameworks: Mapping[str, Framework]) -> Iterator[JointGuard]:
    """Yield, for each library, its arrays if one check recognizes all of them."""
    for framework in dict.fromkeys(frameworks.values()):
        members = tuple(at for at, name in enumerate(names) if frameworks.get(name) is framework)
        how = framework.joint_check(tuple(arrays[names[at]] for at in members))
        if how is not None:
            yield JointGuard(members, how)


def _address(array: Any) -> int:
    # A framework's arrays may be allocated by another framework.
    return framework_of(type(array)).address(array)


def _absent(value: Any) -> int | None:
    return 0 if value is None else None


def _place(found: ArrayFacts) -> rules.StridedMemory:
    size = found.element.bits // 8 if found.element is not None else 1
    return rules.StridedMemory(found.address, found.shape, tuple(stride * size for stride in found.strides), size)
