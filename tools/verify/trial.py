"""Trial of one kernel on one case: several layouts, comparison, a repeated run, permuted rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from skuda.dispatch.backends.numpy import HostRunner
from skuda.dispatch.plan import Plan
from skuda.kernels.draw import Drawn, draw
from skuda.registry.descriptor import Argument, Descriptor, Role
from skuda.registry.errors import InvalidProblem, Unaligned, Unsupported
from skuda.registry.op import Case, Op
from skuda.registry.sku import KernelSku
from skuda.tools.verify.calls import CALLS, Calls, by_name, unchanged_state
from skuda.tools.verify.compare import Spoiled, allowed_ulps, bits_of, difference, differing
from skuda.tools.verify.evidence import Failure, Promises
from skuda.tools.verify.placement import Geometry, Image, Layout, Placement, images_of, placed

Array = npt.NDArray[Any]
_TELLING, _SMALL = 32, 1 << 16
"""Least bytes of the largest output, and most bytes of all arrays, for a case to be called in every way."""
_HANDED_ON = "arrays that are not aligned to 16 bytes are handed on to the next kernel"


@dataclass(frozen=True)
class Question:
    """One case with its inputs and the reference's outputs.

    Attributes
    ----------
    number : int
        Index of the case among its op's cases.
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
        """Draw inputs and compute the reference's outputs."""
        drawn = draw(op, case, rng)
        return cls(number, case, drawn, answer(op, case.problem, drawn.inputs))

    @property
    def telling(self) -> bool:
        """Whether the outputs depend visibly on the inputs, and the arrays are small enough for many runs."""
        written = [array.nbytes for array in self.want.values()]
        read = [value.nbytes for value in self.drawn.inputs.values() if isinstance(value, np.ndarray)]
        shown = 0 not in written and self.case.values in ("normal", "ties")
        return shown and max(written) >= _TELLING and sum(written + read) <= _SMALL


def answer(op: Op, problem: Descriptor, inputs: Mapping[str, Any]) -> dict[str, Array]:
    """Return the reference's outputs for some inputs, by name."""
    result: Any = HostRunner(problem, op.reference).run(inputs, None)
    names = [argument.name for argument in problem.arguments() if argument.role is Role.OUTPUT]
    return by_name(problem, names, result)


def row_field(problem: Descriptor) -> str | None:
    """Return the field that counts a problem's independent rows; None if its rows depend on each other."""
    fields = type(problem).model_fields
    for name in ("m", "outer_size"):
        if name in fields:
            return name
    independent = getattr(problem, "scope", "token") in ("token", "group")
    return "n" if "n" in fields and "d" in fields and independent else None


def fewer_rows(problem: Descriptor) -> Descriptor | None:
    """Return a problem with a third of the rows; None if rows depend on each other or there are fewer than two.

    The number of rows is fixed, not random, so that its cubins can be compiled ahead.
    """
    name = row_field(problem)
    count = getattr(problem, name) if name else 0
    return problem.model_copy(update={name: -(-count // 3)}) if name and count > 1 else None


def row_arguments(problem: Descriptor) -> frozenset[str]:
    """Return the names of the arguments that have one row for each of the problem's rows."""
    name = row_field(problem)
    if name is None:
        return frozenset()
    more = problem.model_copy(update={name: getattr(problem, name) + 1})
    pairs = zip(problem.arguments(), more.arguments(), strict=True)
    return frozenset(a.name for a, b in pairs if a.shape[:1] != b.shape[:1] and a.shape[1:] == b.shape[1:])


@dataclass
class Finding:
    """The results of one kernel so far.

    Attributes
    ----------
    cases, outputs : int
        Number of problems run and of output elements compared.
    layouts : dict
        Layouts that were accepted, in order.
    gapless : set of str
        Arguments of two axes or more that must have no gaps between rows.
    failures : dict of str to Failure
        The first failure of each check, in order.
    promises : dict
        See `Promises`; a broken one stays broken.
    note : str
        Why something was left out.
    called : bool
        Whether a plan was called in every way.
    """

    cases: int = 0
    outputs: int = 0
    layouts: dict[str, None] = field(default_factory=dict)
    gapless: set[str] = field(default_factory=set)
    failures: dict[str, Failure] = field(default_factory=dict)
    promises: dict[str, bool] = field(default_factory=dict)
    note: str = ""
    called: bool = False

    def fail(self, failure: Failure) -> None:
        """Record a failure if it is the first of its check."""
        self.failures.setdefault(failure.check, failure)

    @property
    def failure(self) -> Failure | None:
        """The first failure, or None."""
        return next(iter(self.failures.values()), None)

    def held(self, promise: str, *, ok: bool) -> None:
        """Record whether a promise held."""
        self.promises[promise] = self.promises.get(promise, True) and ok

    def record(self) -> Promises:
        """Return the promises as a record."""
        return Promises(**self.promises)


class Trial:
    """Runs one kernel over cases.

    Parameters
    ----------
    sku : KernelSku
        The kernel.
    select : callable
        ``select(problem)`` returns a plan for exactly this kernel.
    placement : Placement
        Moves arrays to the device and back.
    calls : int
        Number of consecutive calls that are compared, on one of the cases.
    """

    def __init__(
        self, sku: KernelSku, select: Callable[[Descriptor], Plan], placement: Placement, calls: int = CALLS
    ) -> None:
        self.sku, self.finding = sku, Finding()
        self._select, self._placement, self._calls = select, placement, calls
        self._layout: Layout = "contiguous"

    def run(
        self, question: Question, layouts: tuple[Layout, ...], rng: np.random.Generator, *, again: bool = True
    ) -> None:
        """Run one case in some layouts and test the kernel's promises; nothing is raised.

        The first `telling` case is also called in every way that a plan allows.

        Parameters
        ----------
        question : Question
            The case.
        layouts : tuple of str
            The layouts; the run in the first accepted one is repeated.
        rng : Generator
            Chooses rows.
        again : bool
            Whether to repeat a run and to permute rows.
        """
        self._noting(question, lambda: self._exercise(question, layouts, rng, again=again))
        if question.telling and not self.finding.called:
            self._noting(question, lambda: self._call_in_every_way(question))

    def _noting(self, question: Question, work: Callable[[], None]) -> None:
        """Call `work` and record how it fails."""
        try:
            with unchanged_state():
                work()
        except Unsupported as error:
            self.finding.note = f"some cases are refused: {error}".partition("\n")[0]
        except Spoiled as error:
            self._fail(question, self._layout, **error.fields)
        except Exception as error:  # noqa: BLE001  the other kernels must still run
            self._fail(question, self._layout, check="error", message=f"{type(error).__name__}: {error}")

    def _call_in_every_way(self, question: Question) -> None:
        plan, self._layout = self._select(question.case.problem), "contiguous"
        self.finding.called = True
        calls = Calls(plan, question.drawn, question.want, self._placement, self._calls)
        for check in (calls.outputs, calls.bound, calls.in_a_row):
            self._noting(question, check)

    def _exercise(
        self, question: Question, layouts: tuple[Layout, ...], rng: np.random.Generator, *, again: bool
    ) -> None:
        self._layout = layouts[0]
        plan = self._select(question.case.problem)
        self.finding.cases += 1
        accepted: dict[Layout, dict[str, Array]] = {}
        # If the kernel refuses every given layout as unaligned, the contiguous one is tried.
        for layout in (*layouts, "contiguous"):
            if layout in accepted or (layout not in layouts and accepted):
                continue
            self._layout = layout
            try:
                accepted[layout] = self._attempt(plan, question, layout, 0)
            except Unaligned:
                self.finding.note = _HANDED_ON
                continue
            self._compare(question, accepted[layout], layout)
        self._layout, first = next(iter(accepted.items()))
        if again:
            self._repeat(plan, question, first, self._layout)
            self._rows(question, first, self._layout, rng)

    def refuse(self, number: int, case: Case, message: str) -> None:
        """Record an error for a case that could not be run."""
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
            # NaN payloads count here, because the same bits are promised.
            bad = np.asarray(bits_of(again[name]) != bits_of(before))
            if self.sku.precision_guarantee.deterministic:
                self.finding.held("deterministic", ok=not bad.any())
                if bad.any():
                    how = "a second run, among other bytes, gave other bits"
                    self._fail(question, layout, check="repeat", **difference(name, bad, again[name], before, how))

    def _rows(self, question: Question, first: Mapping[str, Array], layout: Layout, rng: np.random.Generator) -> None:
        problem = question.case.problem
        name, fewer = row_field(problem), fewer_rows(problem)
        if name is None or fewer is None or not self.sku.precision_guarantee.batch_invariant:
            return
        count = getattr(problem, name)
        mine = row_arguments(problem)
        order = rng.permutation(count)
        some = np.sort(rng.choice(count, getattr(fewer, name), replace=False))
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
        """Run once and return the outputs; raise `Spoiled` if anything else was written."""
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
                # A kernel may refuse gaps in an argument other than data, such as the scales of groups.
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
