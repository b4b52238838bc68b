"""One kernel on one case: run it in several layouts, compare, repeat, permute its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from skuda.dispatch.backends.numpy import HostRunner
from skuda.dispatch.plan import Plan
from skuda.kernels.draw import Drawn, draw
from skuda.kernels.dtypes import storage_dtype
from skuda.registry.descriptor import Argument, Descriptor, Role, storage_shape
from skuda.registry.elements import ElementKind
from skuda.registry.errors import InvalidProblem, Unaligned, Unsupported
from skuda.registry.op import Case, Op
from skuda.registry.sku import KernelSku
from skuda.tools.evidence import Failure, Promises
from skuda.tools.placing import (
    OUTSIDE,
    Geometry,
    Image,
    Layout,
    Placement,
    differing,
    first_of,
    is_float,
    placed,
    told,
)

Array = npt.NDArray[Any]
_HANDED_ON = "arrays that are not aligned to 16 bytes are handed on to the next kernel"
_POISON = (0xFF, 0x6B)
"""NaN in every float first, then something else: what a kernel leaves unwritten shows as a difference between runs."""


@dataclass(frozen=True)
class Question:
    """One case with its inputs and the answer.

    Attributes
    ----------
    number : int
        Of the case among its op's.
    case : Case
        The case.
    drawn : Drawn
        Its inputs.
    want : dict
        The reference's outputs by name.
    """

    number: int
    case: Case
    drawn: Drawn
    want: dict[str, Array]

    @classmethod
    def ask(cls, op: Op, number: int, case: Case, rng: np.random.Generator) -> Question:
        """Draw inputs and work the answer out."""
        drawn = draw(op, case, rng)
        return cls(number, case, drawn, answer(op, case.problem, drawn.inputs))


def answer(op: Op, problem: Descriptor, inputs: Mapping[str, Any]) -> dict[str, Array]:
    """Return what an op means for some inputs, by output name."""
    result: Any = HostRunner(problem, op.reference).run(inputs, None)
    names = [argument.name for argument in problem.arguments() if argument.role is Role.OUTPUT]
    return dict(zip(names, result if type(problem).result is not None else (result,), strict=True))


def row_field(problem: Descriptor) -> str | None:
    """Return the field that counts a problem's independent rows; None where rows depend on each other.

    Parameters
    ----------
    problem : Descriptor
        The problem.
    """
    fields = type(problem).model_fields
    for name in ("m", "outer_size"):
        if name in fields:
            return name
    independent = getattr(problem, "scope", "token") in ("token", "group")
    return "n" if "n" in fields and "d" in fields and independent else None


def row_arguments(problem: Descriptor) -> frozenset[str]:
    """Return the arguments that have one row for each of the problem's."""
    name = row_field(problem)
    if name is None:
        return frozenset()
    more = problem.model_copy(update={name: getattr(problem, name) + 1})
    pairs = zip(problem.arguments(), more.arguments(), strict=True)
    return frozenset(a.name for a, b in pairs if a.shape[:1] != b.shape[:1] and a.shape[1:] == b.shape[1:])


def allowed_ulps(sku: KernelSku, problem: Descriptor, element: ElementKind) -> int | None:
    """Return how far apart an output may be from the reference, in its own representable values; None: any distance.

    The promise counts in the compute type, before the final rounding: rounding to fewer bits brings near numbers
    together, or leaves them one value apart, and so does rounding to a code.

    Parameters
    ----------
    sku : KernelSku
        Who promises.
    problem : Descriptor
        The problem.
    element : ElementKind
        Element of the output.
    """
    most = sku.precision_guarantee.max_ulp
    if not most:
        return most
    return most if element is getattr(problem, "compute", sku.element.compute) else 1


@dataclass
class Finding:
    """What came of one kernel so far.

    Attributes
    ----------
    cases, outputs : int
        Problems run and elements compared.
    layouts : dict
        Layouts that were accepted, in order.
    gapless : set of str
        Arguments of two axes or more that must have no gaps between rows.
    failures : dict of str to Failure
        The first one of each check, in order.
    promises : dict
        See `Promises`; a broken one stays broken.
    note : str
        Why something was left out.
    """

    cases: int = 0
    outputs: int = 0
    layouts: dict[str, None] = field(default_factory=dict)
    gapless: set[str] = field(default_factory=set)
    failures: dict[str, Failure] = field(default_factory=dict)
    promises: dict[str, bool] = field(default_factory=dict)
    note: str = ""

    def fail(self, failure: Failure) -> None:
        """Note a failure, if it is the first of its check."""
        self.failures.setdefault(failure.check, failure)

    @property
    def failure(self) -> Failure | None:
        """The first failure of all."""
        return next(iter(self.failures.values()), None)

    def held(self, promise: str, *, ok: bool) -> None:
        """Note whether a promise held."""
        self.promises[promise] = self.promises.get(promise, True) and ok

    def record(self) -> Promises:
        """Return the promises as a record."""
        return Promises(**self.promises)


class Spoiled(Exception):
    """A run that wrote where it must not: the failure's fields."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(fields)
        self.fields = fields


class Trial:
    """Runs one kernel over cases.

    Parameters
    ----------
    sku : KernelSku
        The kernel.
    select : callable
        ``select(problem)`` returns a plan for exactly this kernel.
    placement : Placement
        How arrays get to the device.
    """

    def __init__(self, sku: KernelSku, select: Callable[[Descriptor], Plan], placement: Placement) -> None:
        self.sku, self.finding = sku, Finding()
        self._select, self._placement = select, placement

    def run(self, question: Question, layouts: tuple[Layout, ...], rng: np.random.Generator) -> None:
        """Run one case in some layouts and exercise what the kernel promises; nothing is raised.

        Parameters
        ----------
        question : Question
            The case.
        layouts : tuple of str
            The layouts; runs are repeated in the first.
        rng : Generator
            Chooses rows.
        """
        layout = layouts[0]
        try:
            plan = self._select(question.case.problem)
            self.finding.cases += 1
            accepted: dict[Layout, dict[str, Array]] = {}
            # The last stands in where a kernel hands all of the others on.
            for layout in (*layouts, "contiguous"):
                if layout in accepted or (layout not in layouts and accepted):
                    continue
                try:
                    accepted[layout] = self._attempt(plan, question, layout, 0)
                except Unaligned:
                    self.finding.note = _HANDED_ON
                    continue
                self._compare(question, accepted[layout], layout)
            layout, first = next(iter(accepted.items()))
            self._repeat(plan, question, first, layout)
            self._rows(question, first, layout, rng)
        except Unsupported as error:
            self.finding.note = f"some cases are refused: {error}".partition("\n")[0]
        except Spoiled as error:
            self._fail(question, layout, **error.fields)
        except Exception as error:  # noqa: BLE001  whatever a kernel does, the others are still to be run
            self._fail(question, layout, check="error", message=f"{type(error).__name__}: {error}")

    def refuse(self, number: int, case: Case, message: str) -> None:
        """Note that a case could not even be asked."""
        self._fail(Question(number, case, Drawn({}, {}), {}), "contiguous", check="error", message=message)

    def _fail(self, question: Question, layout: str, **fields: Any) -> None:
        case = question.case
        said = {"case": question.number, "problem": case.problem.model_dump_json(), "values": case.values}
        self.finding.fail(Failure(**{**said, "layout": layout, **fields}))

    def _compare(self, question: Question, got: Mapping[str, Array], layout: str) -> None:
        problem = question.case.problem
        elements = {a.name: a.elements[0] for a in problem.arguments()}
        for name, want in question.want.items():
            ulps = allowed_ulps(self.sku, problem, elements[name])
            if ulps is None:
                continue
            bad = differing(got[name], want, ulps)
            self.finding.outputs += want.size
            promise, check = ("within_ulp", "ulp") if ulps else ("bit_exact", "bits")
            self.finding.held(promise, ok=not bad.any())
            if bad.any():
                self._fail(question, layout, check=check, **difference(name, bad, got[name], want))

    def _repeat(self, plan: Plan, question: Question, first: Mapping[str, Array], layout: Layout) -> None:
        again = self._attempt(plan, question, layout, 1)
        for name, before in first.items():
            # The payload of a NaN counts here: the same bits are promised.
            bad = np.asarray(_raw(again[name]) != _raw(before))
            if self.sku.precision_guarantee.deterministic:
                self.finding.held("deterministic", ok=not bad.any())
                if bad.any():
                    how = "a second run, among other bytes, gave other bits"
                    self._fail(question, layout, check="repeat", **difference(name, bad, again[name], before, how))

    def _rows(self, question: Question, first: Mapping[str, Array], layout: Layout, rng: np.random.Generator) -> None:
        problem = question.case.problem
        name = row_field(problem)
        count = getattr(problem, name) if name else 0
        if name is None or count < 2 or not self.sku.precision_guarantee.batch_invariant:
            return
        mine = row_arguments(problem)
        order = rng.permutation(count)
        some = np.sort(rng.choice(count, int(rng.integers(1, count)), replace=False))
        for picked, how in ((order, "permuted rows"), (some, f"{len(some)} of {count} rows alone")):
            part = problem.model_copy(update={name: len(picked)})
            inputs = {k: v[picked] if k in mine else v for k, v in question.drawn.inputs.items()}
            shapes = {k: (len(picked), *v[1:]) if k in mine else v for k, v in question.drawn.shapes.items()}
            asked = Question(question.number, Case(part, question.case.values), Drawn(inputs, shapes), {})
            got = self._attempt(self._select(part), asked, layout, 0)
            for output in mine & got.keys():
                want = first[output][picked]
                bad = differing(got[output], want)
                self.finding.held("batch_invariant", ok=not bad.any())
                if bad.any():
                    said = difference(output, bad, got[output], want, f"{how} gave other bits")
                    self._fail(question, layout, check="rows", **said)

    def _attempt(self, plan: Plan, question: Question, layout: Layout, turn: int) -> dict[str, Array]:
        """Run once and return the outputs.

        Raises
        ------
        Spoiled
            Where something beside the outputs was written.
        """
        arguments = question.case.problem.arguments()
        images, numbers = images_of(arguments, question.drawn, layout, turn)
        buffers, views = placed(self._placement, images)
        while True:
            try:
                plan.can_implement(**views, **numbers)
                break
            except Unaligned:
                raise
            except InvalidProblem as error:
                # A kernel may refuse gaps in an argument that is no data, such as the scales of groups.
                image = images.get(error.field)
                if image is None or image.geometry.plain:
                    raise
                self.finding.gapless.add(error.field)
                old = image.geometry
                geometry = Geometry.of(old.shape, old.dtype, "misaligned" if layout == "crooked" else "contiguous")
                images[error.field] = Image(geometry, old.view(image.before), image.outside)
                fresh = placed(self._placement, {error.field: images[error.field]})
                buffers |= fresh[0]
                views |= fresh[1]
        gaps = layout in ("wide", "crooked")
        if not gaps or any(not image.geometry.plain for image in images.values()):
            self.finding.layouts[layout] = None
        plan.run(**views, **numbers)
        return self._collected(arguments, images, buffers)

    def _collected(
        self, arguments: tuple[Argument, ...], images: Mapping[str, Image], buffers: Mapping[str, Any]
    ) -> dict[str, Array]:
        roles = {argument.name: argument.role for argument in arguments}
        outputs = {}
        for name, image in images.items():
            after = self._placement.download(buffers[name])
            written = roles[name] in (Role.OUTPUT, Role.SCRATCH)
            at = image.spilt(after) if written else image.changed(after)
            if at is not None:
                check, what = ("guard", "beside the array was") if written else ("input", "of an input was")
                message = f"byte {at} {what} written, counted from its first element"
                raise Spoiled(check=check, output=name, message=message)
            if roles[name] is Role.OUTPUT:
                outputs[name] = np.array(image.geometry.view(after))
        return outputs


def images_of(
    arguments: tuple[Argument, ...], drawn: Drawn, layout: Layout, turn: int
) -> tuple[dict[str, Image], dict[str, Any]]:
    """Return an image of every array, outputs poisoned, and the numbers.

    Parameters
    ----------
    arguments : tuple of Argument
        The problem's.
    drawn : Drawn
        Its inputs.
    layout : str
        How the arrays lie.
    turn : int
        0 or 1: what outputs are poisoned with, and what lies around all arrays.
    """
    images: dict[str, Image] = {}
    numbers: dict[str, Any] = {}
    for argument in arguments:
        name = argument.name
        value = drawn.inputs.get(name)
        if argument.role in (Role.OUTPUT, Role.SCRATCH):
            # Half of the runs leave optional scratch to the plan.
            if argument.required or argument.role is Role.OUTPUT or layout in ("contiguous", "crooked"):
                element = argument.elements[0]
                shape, dtype = storage_shape(drawn.shapes[name], element), storage_dtype(element)
                poison = _POISON[turn] if is_float(dtype) or turn else 0xA6
                images[name] = Image(Geometry.of(shape, dtype, layout), poison, OUTSIDE[turn])
        elif isinstance(value, np.ndarray):
            images[name] = Image(Geometry.of(value.shape, value.dtype, layout), value, OUTSIDE[turn])
        elif value is not None:
            numbers[name] = value
    return images, numbers


def _raw(array: Array) -> Array:
    return array.view(f"u{array.dtype.itemsize}")


def difference(name: str, bad: Array, got: Array, want: Array, how: str = "") -> dict[str, Any]:
    """Return the fields of a failure that say where two arrays differ.

    Parameters
    ----------
    name : str
        The output.
    bad : array of bool
        Where they differ.
    got, want : array
        What stands there and what should.
    how : str
        How it came to that.
    """
    at = first_of(bad)
    counted = f"{int(bad.sum())} of {bad.size} elements differ"
    message = f"{how}; {counted}" if how else counted
    return {"output": name, "at": at, "got": told(got, at), "want": told(want, at), "message": message}
