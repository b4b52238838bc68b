"""`Trial`: a kernel on a device, the runs of its cases, and what they have shown."""

from __future__ import annotations

import zlib
from collections.abc import Collection, KeysView, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from threading import Lock
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from skuda.dispatch import Dispatcher, PlanPreference
from skuda.dispatch.backends.numpy import HostRunner
from skuda.dispatch.plan import Plan
from skuda.kernels.draw import Drawn, draw
from skuda.kernels.dtypes import storage_dtype
from skuda.registry.descriptor import Descriptor, Role, storage_shape
from skuda.registry.device import Device
from skuda.registry.errors import InvalidProblem, Unaligned, Unsupported
from skuda.registry.op import Case, Op
from skuda.registry.sku import KernelSku
from skuda.tools.ship.cubins import Wanted, cubins_of
from skuda.tools.verify.batches import batches_of, poisoned
from skuda.tools.verify.compare import Broken, NotRun, allowed_ulps, bits_of, compare, difference
from skuda.tools.verify.evidence import Failure
from skuda.tools.verify.placement import LAYOUTS, Layout, PlacedArguments, Placement
from skuda.tools.verify.problems import Numbered, cases_of

Outputs = dict[str, npt.NDArray[Any]]
Battery = Literal["full", "spot"]
DRAWS, SAMPLE = 3, 6
"""Draws of each case of an op in a full battery, and derived cases in a spot check."""
_TELLING, _SMALL = 32, 1 << 16
"""Least bytes of the largest output, and most bytes of all arrays, for a case to be called in every way."""


@dataclass(frozen=True)
class Example:
    """A case, its number among those of a kernel, its inputs, and the reference's outputs by name."""

    number: int
    case: Case
    drawn: Drawn
    want: Outputs


class Examples:
    """The examples of an op, drawn from a seed once for all kernels that share their problems."""

    def __init__(self, op: Op, seed: int) -> None:
        self.op, self.seed = op, seed
        self._made: dict[tuple[Case, int], Example] = {}
        self._lock = Lock()

    def of(self, case: Case, turn: int = 0) -> Example:
        """Return a case with its inputs, different ones for each `turn`, and the reference's outputs."""
        with self._lock:
            if (case, turn) not in self._made:
                name = f"{case.problem.model_dump_json()} {case.values} {turn}"
                drawn = draw(self.op, case, np.random.default_rng([self.seed, zlib.crc32(name.encode())]))
                want = answer(self.op, case.problem, drawn.inputs)
                self._made[case, turn] = Example(0, case, drawn, want)
            return self._made[case, turn]


def answer(op: Op, problem: Descriptor, inputs: Mapping[str, Any]) -> Outputs:
    """Return the reference's outputs for some inputs, by name, and what it makes of copies of those it writes."""
    state = {a.name: np.array(inputs[a.name]) for a in problem.arguments() if a.role is Role.STATE}
    return by_name(problem, HostRunner(problem, op.reference).run({**inputs, **state}, None)) | state


def by_name(problem: Descriptor, result: Any) -> dict[str, Any]:
    """Return the outputs in a result by name; an output that the problem does not have is None in it."""
    names = [argument.name for argument in problem.arguments() if argument.role is Role.OUTPUT]
    parts = (result,) if problem.builder is None else (part for part in result if part is not None)
    return dict(zip(names, parts, strict=True))


class Chosen(NamedTuple):
    """A case to run: the number of its draw, its layouts, and whether it is repeated and its rows permuted."""

    numbered: Numbered
    turn: int
    layouts: tuple[Layout, ...]
    again: bool


@dataclass(eq=False)
class Trial:
    """A kernel on a device, and what its runs have shown so far.

    A ``full`` battery runs all cases. A ``spot`` check runs those of the op and a sample of the derived ones. `more`
    are cases in addition to those of the op, and `only` the numbers of the cases to run, if it is not empty. Kernels of
    one key share `examples`.

    `cases_run`, `runs` and `outputs` count problems, compared launches and compared output elements. `layouts` were
    accepted, and `dense` are by layout the arguments that must be contiguous in it. `failures` has the first one of
    each check, `checks` those that have run, each with the reason if it could not be run, `tried` the promises that two
    runs have tested, and `note` why something was left out.
    """

    sku: KernelSku
    dispatcher: Dispatcher
    device: Device
    placement: Placement
    examples: Examples
    more: tuple[Case, ...] = ()
    battery: Battery = "full"
    only: Collection[int] = ()
    cases_run: int = field(default=0, init=False)
    runs: int = field(default=0, init=False)
    outputs: int = field(default=0, init=False)
    layouts: dict[Layout, None] = field(default_factory=dict, init=False)
    dense: dict[Layout, set[str]] = field(default_factory=dict, init=False)
    failures: dict[str, Failure] = field(default_factory=dict, init=False)
    checks: dict[str, str] = field(default_factory=dict, init=False)
    tried: set[str] = field(default_factory=set, init=False)
    note: str = field(default="", init=False)
    _failing: dict[str, set[int]] = field(default_factory=dict, init=False)

    @property
    def op(self) -> Op:
        """The kernel's op."""
        return self.examples.op

    # --- problems and plans ------------------------------------------------------------------------------------------

    @cached_property
    def cases(self) -> tuple[Numbered, ...]:
        """All cases of the kernel."""
        return cases_of(self.sku, self.op, self.more)

    @cached_property
    def chosen(self) -> tuple[Chosen, ...]:
        """What is run.

        A full battery runs each case of the op in all layouts, and again from other draws; and each derived case in one
        layout. A spot check runs each case of the op in one layout, repeats one, and samples the derived ones.
        """
        every = [each for each in self.cases if not self.only or each.number in self.only]
        own = [each for each in every if each.own or self.only]
        derived = [each for each in every if not (each.own or self.only)]
        at, count = self.examples.seed, len(LAYOUTS)
        if self.battery == "full":
            found = [Chosen(each, 0, LAYOUTS, again=True) for each in own]
            for each in own:
                layouts = LAYOUTS if _is_flat(each) else LAYOUTS[:1]  # flat data has another shape in each draw
                found += [Chosen(each, turn, layouts, again=False) for turn in range(1, DRAWS)]
            found += [Chosen(e, 0, (LAYOUTS[(at + e.number) % count],), again=False) for e in derived]
            return tuple(found)
        # Kernels of one problem, on all backends, have the same sample where they can: they share the references.
        derived.sort(
            key=lambda each: zlib.crc32(f"{at} {each.case.values} {each.case.problem.model_dump_json()}".encode())
        )
        # Looking for its cubins takes longer than all else that is planned of a case.
        sample = list(islice((each for each in derived if self._is_cheap(each.case.problem)), SAMPLE))
        sample += [each for each in derived if each not in sample][: SAMPLE - len(sample)]
        several = [each for each in own if 0 not in sizes_of(each.case.problem)] or own
        again = several[at % len(several)] if several else None
        sampled = enumerate((*own, *sample), at)
        return tuple(Chosen(each, 0, (LAYOUTS[i % count],), again=each is again) for i, each in sampled)

    def _is_cheap(self, problem: Descriptor) -> bool:
        """Return whether a kernel needs no cubin for a problem but those that its op's cases need."""
        return self.cubins(problem).keys() <= self._own_cubins

    @cached_property
    def _own_cubins(self) -> KeysView[Any]:
        return self.cubins(*(each.case.problem for each in self.cases if each.own)).keys()

    def cubins(self, *problems: Descriptor) -> dict[Any, Wanted]:
        """Return the cubins that a kernel needs for problems on the device; none if it is no CUDA kernel."""
        found = cubins_of([self.sku], {self.op.name: problems}, self.dispatcher.backends, self.device)
        return {each.identity: each for each in found}

    def plan(self, problem: Descriptor) -> Plan:
        """Return a plan for exactly this kernel."""
        return self.dispatcher.select(problem, PlanPreference(sku=self.sku.id), self.device)

    def fresh(self, problem: Descriptor) -> Plan:
        """Return a plan that no cache keeps, so that nobody has run it yet."""
        apart = Dispatcher(self.dispatcher.registry, backends=self.dispatcher.backends.values())
        return apart.select(problem, PlanPreference(sku=self.sku.id), self.device)

    def example(self, numbered: Numbered, turn: int = 0) -> Example:
        """Return a case with its inputs and the reference's outputs."""
        return replace(self.examples.of(numbered.case, turn), number=numbered.number)

    @cached_property
    def telling(self) -> Example:
        """A small case whose outputs depend visibly on its inputs; `NotRun` if there is none.

        Flat data has several axes in it.
        """
        examples = [self.another(turn) for turn in range(DRAWS if _is_flat(self._telling) else 1)]
        return max(examples, key=lambda each: max(array.ndim for array in each.want.values()))

    def another(self, turn: int) -> Example:
        """Return the telling case with other inputs."""
        return self.example(self._telling, turn)

    @cached_property
    def _telling(self) -> Numbered:
        for each in self.cases:
            sizes, allowed = sizes_of(each.case.problem), not self.only or each.number in self.only
            small = 0 not in sizes and max(sizes, default=0) >= _TELLING and sum(sizes) <= _SMALL
            if allowed and small and each.case.values in ("normal", "ties"):
                return each
        raise NotRun("no case is small enough to be run many times")

    # --- single runs -------------------------------------------------------------------------------------------------

    def call(self, example: Example, *how: Any) -> PlacedArguments:
        """Lay out the arguments of an example; `how` are a layout and the like, see `PlacedArguments.of`."""
        return PlacedArguments.of(self.placement, example.case.problem, example.drawn, *how)

    def once(self, plan: Plan, example: Example) -> Outputs:
        """Run a plan once with outputs given, and return their contents."""
        call = self.call(example)
        plan.run(**call.arguments)
        self.runs += 1
        return call.contents()

    def agree(self, example: Example, got: Outputs, first: Outputs, how: str) -> None:
        """Raise `Broken` if outputs are wrong that were obtained as `how` says.

        A deterministic kernel must repeat the bits of `first`, the outputs of an earlier run; any other must be within
        its promised distance of the reference.
        """
        try:
            if self.sku.precision_guarantee.deterministic:
                compare(got, first, {}, how)
            else:
                compare(got, example.want, self._ulps(example.case.problem), how)
        except Broken as broken:
            broken.example = example
            raise

    def _ulps(self, problem: Descriptor) -> dict[str, int | None]:
        return {a.name: allowed_ulps(self.sku, problem, a.elements[0]) for a in problem.arguments()}

    def fail(self, check: str, broken: Broken, example: Example | None = None, **fields: Any) -> None:
        """Record a failure: the first one of each check, with the number of other cases that fail it."""
        found, case = {"check": check, **broken.fields, **fields}, -1
        if example is not None:
            case = example.number
            found |= {"case": case, "problem": example.case.problem.model_dump_json(), "values": example.case.values}
        check = found["check"]
        first = self.failures.setdefault(check, Failure(**found))
        if case not in self._failing.setdefault(check, {case}):
            self.failures[check] = first.model_copy(update={"more": first.more + 1})
        self._failing[check].add(case)

    # --- cases -------------------------------------------------------------------------------------------------------

    def run(
        self, example: Example, layouts: tuple[Layout, ...], rng: np.random.Generator, *, again: bool = True
    ) -> None:
        """Run one case in some layouts and record what fails; nothing is raised.

        The first case that fails is run in all layouts, to show which ones are right. A case of which the kernel takes
        none of the layouts is run in the contiguous one. With `again`, a run is repeated and rows are permuted.
        """
        try:
            plan = self.plan(example.case.problem)
            self.cases_run += 1
            first = self._exercise(plan, example, layouts)
            if again and first is not None:
                self._repeat(plan, example, *first)
                self._permute(example, *first, rng)
        except Unsupported as error:
            self.note = f"some cases are refused: {error}".partition("\n")[0]
        except Exception as error:  # noqa: BLE001  the other cases must still run
            self.fail("meaning", Broken.by(error), example)

    def _exercise(self, plan: Plan, example: Example, layouts: tuple[Layout, ...]) -> tuple[Layout, Outputs] | None:
        """Run a case in several layouts, and return the first right one with its outputs."""
        results: dict[Layout, Outputs] = {}
        fails: dict[Layout, Broken] = {}
        known, ulps = bool(self.failures), self._ulps(example.case.problem)
        for layout in (*layouts, "contiguous", *LAYOUTS):
            wanted = layout in layouts or not (results or fails) or (fails and not known)
            if not wanted or layout not in self.placement.layouts or layout in {*results, *fails}:
                continue
            try:
                got = self._attempt(plan, example, layout)
                if got is not None:
                    self.outputs += sum(w.size for n, w in example.want.items() if ulps[n] is not None)
                    compare(got, example.want, ulps, "")
                    results[layout] = got
            except Unaligned:
                self.note = "arrays that are not aligned to 16 bytes are handed on to the next kernel"
                if layout == "contiguous":
                    raise
            except InvalidProblem:
                raise
            except Exception as error:  # noqa: BLE001  other layouts may be right
                fails[layout] = Broken.by(error)
        for layout, broken in fails.items():
            self.fail("meaning", broken, example, layout=layout, passes=tuple(results), fails=tuple(fails))
        return next(iter(results.items()), None)

    def _repeat(self, plan: Plan, example: Example, layout: Layout, first: Outputs) -> None:
        """Run again among other bytes, with the arguments in another order; NaN payloads count here."""
        if self.sku.precision_guarantee.deterministic:
            how = "a second run, among other bytes and with its arguments in another order, gives other bits"
            for name, array in self._again("deterministic", plan, example, layout, 1).items():
                bad = np.asarray(bits_of(array) != bits_of(first[name]))
                if bad.any():
                    wrong = Broken(**difference(name, bad, array, first[name], how))
                    self.fail("deterministic", wrong, example, layout=layout)

    def _permute(self, example: Example, layout: Layout, first: Outputs, rng: np.random.Generator) -> None:
        """Run the rows in other batches."""
        if not self.sku.precision_guarantee.batch_invariant:
            return
        problem, drawn = example.case.problem, example.drawn
        for batch in batches_of(problem, drawn.inputs, rng):
            inputs = poisoned(batch.problem, batch.inputs(drawn.inputs), rng)
            shapes = {n: (len(batch.picked[n]), *v[1:]) if n in batch.picked else v for n, v in drawn.shapes.items()}
            case = Case(batch.problem, example.case.values)
            rearranged = replace(example, case=case, drawn=Drawn(inputs, shapes))
            got = self._again("batch_invariant", self.plan(batch.problem), rearranged, layout, 0)
            want = {n: array for n, array in batch.wanted(drawn.inputs, first).items() if n in got}
            try:
                compare(got, want, {}, f"{batch.how} other bits")
            except Broken as wrong:
                row, *rest = wrong.fields["at"]
                at = (int(batch.picked[wrong.fields["output"]][row]), *rest)
                self.fail("batch_invariant", wrong, example, layout=layout, at=at)

    def _again(self, check: str, plan: Plan, example: Example, layout: Layout, turn: int) -> Outputs:
        """Return the outputs of another run for a check; none if it fails, which is recorded."""
        for how in (layout, "contiguous"):
            try:
                found = self._attempt(plan, example, how, turn)
                if found is not None:
                    self.tried.add(check)
                    return found
            except Unaligned:
                continue
            except Exception as error:  # noqa: BLE001  the other cases must still run
                self.fail(check, Broken.by(error), example, layout=how)
                break
        return {}

    def _attempt(self, plan: Plan, example: Example, layout: Layout, turn: int = 0) -> Outputs | None:
        """Run once and return the outputs; None if no array would lie otherwise than in a contiguous run.

        Arguments that the kernel refuses in the layout, such as scales with gaps, are contiguous. Raise `Broken` if
        anything else than outputs was written.
        """
        dense = self.dense.setdefault(layout, set())
        while True:
            call = self.call(example, layout, turn, dense)
            gaps = {name for name, part in call.parts.items() if not part.geometry.dense}
            if not gaps and layout not in ("contiguous", "misaligned"):
                return None
            try:
                plan.run(**dict(reversed(call.arguments.items())) if turn else call.arguments)
                break
            except Unaligned:
                raise
            except InvalidProblem as error:
                if error.field not in gaps:
                    raise
                dense.add(error.field)
        self.runs += 1
        self.layouts[layout] = None
        if beside := call.spoilt():
            name, at = beside
            what = "an input was written" if name in call.inputs else "memory beside an output was written"
            raise Broken(f"{what}: byte {at} of {name}, counted from its first element", check="memory", output=name)
        return call.contents()


def _is_flat(numbered: Numbered) -> bool:
    return any(argument.flat for argument in numbered.case.problem.arguments())


def sizes_of(problem: Descriptor) -> list[int]:
    """Return the bytes of the arrays of a problem, outputs included."""
    arrays = [a for a in problem.arguments() if not a.is_scalar and a.role is not Role.SCRATCH]
    stored = [(storage_shape(a.shape, a.elements[0]), storage_dtype(a.elements[0])) for a in arrays]
    return [int(np.prod(shape, dtype=np.int64)) * dtype.itemsize for shape, dtype in stored]
