"""Checks of the ways to call a plan: outputs given or left out, arrays that change, and many calls in a row."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from skuda.dispatch.host.arrays import host_view
from skuda.dispatch.plan import Plan
from skuda.kernels.draw import Drawn
from skuda.kernels.dtypes import storage_dtype
from skuda.registry.descriptor import Role
from skuda.registry.elements import ElementKind
from skuda.registry.errors import InvalidProblem
from skuda.tools.verify.compare import Broken
from skuda.tools.verify.process import silence
from skuda.tools.verify.trial import DRAWS, Example, Outputs, Trial, answer, by_name

CALLS, FEW = 512, 8
"""Numbers of consecutive calls whose outputs are all compared, in a full battery and in a spot check."""

_LEAK, _WATCHED = 200, 64
"""Bytes that a call may keep on average, and calls that are averaged."""


def check_outputs(trial: Trial) -> None:
    """Check that a given output is written and returned, and an omitted one is new, and that no argument is kept."""
    example = trial.telling
    plan = trial.plan(example.case.problem)
    first, call = trial.once(plan, example), trial.call(example)
    for name, result in by_name(plan.problem, plan.run(**call.arguments)).items():
        if result is not call.outputs[name]:
            raise Broken(f"it was given, and another {type(result).__name__} was returned", output=name)
    _check_omitted(trial, plan, example, first)
    _check_in_place(trial, plan, example, first)
    held = _run_and_watch(trial, plan, example)
    if any(reference() is not None for reference in held.values()):
        gc.collect()
    for name, reference in held.items():
        if reference() is not None:
            raise Broken("it is kept after the call, so its memory is not freed", output=name)


def _check_omitted(trial: Trial, plan: Plan, example: Example, first: Outputs) -> None:
    """Check that outputs that are left out are new arrays, of the inputs' kind, that share memory with nothing."""
    call = trial.call(example)
    made = by_name(plan.problem, plan.run(**call.inputs))
    for name, result in made.items():
        if call.inputs.keys() & call.arrays.keys() and type(result) is not type(call.outputs[name]):
            kinds = f"a {type(result).__name__} was returned; the inputs are {type(call.outputs[name]).__name__}"
            raise Broken(f"it was left out, and {kinds}", output=name)
    if changed := call.spoilt():
        raise Broken("an argument was written where the output was left out", output=changed[0])
    trial.agree(example, {**first, **_on_host(made)}, first, "it was left out")
    plan.run(**trial.call(trial.another(DRAWS)).inputs)
    left = "it was left out, and a later run on other inputs wrote to it"
    trial.agree(example, {**first, **_on_host(made)}, first, left)
    for name, result in made.items():
        result[...] = 1
        if shared := call.spoilt():
            raise Broken(f"it was left out, and shares memory with {shared[0]}", output=name)


def _check_in_place(trial: Trial, plan: Plan, example: Example, first: Outputs) -> None:
    """Where the op allows it, run with an output that is exactly the same array as an input."""
    for name, want in first.items() if plan.problem.in_place else ():
        for source, value in example.drawn.inputs.items():
            if isinstance(value, np.ndarray) and (value.shape, value.dtype) == (want.shape, want.dtype):
                call = trial.call(example)
                plan.run(**{**call.arguments, name: call.arrays[source]})
                got = {**first, name: call.contents(source)[source]}
                trial.agree(example, got, first, f"it is the same array as {source}")


def _run_and_watch(trial: Trial, plan: Plan, example: Example) -> dict[str, Any]:
    """Return weak references to the arrays of a call."""
    call = trial.call(example)
    made = by_name(plan.problem, plan.run(**call.inputs))
    return {name: weakref.ref(array) for name, array in {**call.arrays, **made}.items()}


def _on_host(results: dict[str, Any]) -> Outputs:
    """Return NumPy copies of arrays of any framework."""
    found = {}
    for name, result in results.items():
        way = next((way for way in ("cpu", "get") if hasattr(result, way)), "")  # torch's, CuPy's
        found[name] = np.array(host_view("", name, getattr(result, way)() if way else result))
    return found


def check_reuse(trial: Trial) -> None:
    """Check that a plan, a bound call and a plan from JSON use the present contents of their arguments."""
    example, whole = trial.telling, trial.battery == "full"
    plan = trial.plan(example.case.problem)
    example = replace(example, drawn=_as_arrays(trial, plan, example))
    want = trial.once(trial.fresh(plan.problem), example)
    changes = {name: {name: new} for name, new in _changes(trial, example).items()}
    if not whole:
        changes = {"all inputs": {name: new for each in changes.values() for name, new in each.items()}}
    expected = []
    for what, contents in changes.items():
        drawn = Drawn({**example.drawn.inputs, **contents}, example.drawn.shapes)
        changed = replace(example, drawn=drawn)
        if not trial.sku.precision_guarantee.deterministic:
            changed = replace(changed, want=answer(trial.op, plan.problem, drawn.inputs))
        before = {name: example.drawn.inputs[name] for name in contents}
        of_changed = trial.once(trial.fresh(plan.problem), changed)
        expected.append((f"a call after the contents of {what} changed", contents, changed, of_changed))
        expected.append((f"a call after {what} changed and changed back", before, example, want))
    turns = [(f"{turn} call", dict[str, Any](), example, want) for turn in ("first", "second")]
    for way in ("bind()", "run()") if whole else ("bind()",):
        call = trial.call(example)
        given = call.arguments
        launch: Callable[[], Any] = plan.bind(**given) if way == "bind()" else partial(plan.run, **given)
        for how, contents, present, outputs in (*turns, *expected):
            call.rewrite(**contents)
            returned = launch()
            parts = returned if isinstance(returned, tuple) else (returned,)
            if not all(any(output is part for part in parts) for output in call.outputs.values()):
                kind = type(returned).__name__
                raise Broken(f"{way} must return the outputs that it was given; it returned a {kind}")
            trial.agree(present, call.contents(), outputs, f"{way}, {how}")
    saved = trial.dispatcher.prepare(Plan.model_validate_json(plan.model_dump_json()))
    trial.agree(example, trial.once(saved, example), want, "a plan that went through JSON")


def _as_arrays(trial: Trial, plan: Plan, example: Example) -> Drawn:
    """Return inputs whose scalars are arrays of one element, except for those that the kernel takes as numbers only."""
    inputs = dict(example.drawn.inputs)
    for argument in plan.arguments:
        value, element = inputs.get(argument.name), argument.elements[0]
        if argument.is_scalar and not element.is_packed and isinstance(value, (int, float)):
            array = np.full(1, value, storage_dtype(element))
            drawn = Drawn({**inputs, argument.name: array}, example.drawn.shapes)
            with suppress(InvalidProblem):
                plan.can_implement(**trial.call(replace(example, drawn=drawn)).arguments)
                inputs[argument.name] = array
    return Drawn(inputs, example.drawn.shapes)


def _changes(trial: Trial, example: Example) -> dict[str, npt.NDArray[Any]]:
    """Return other contents for each input array: zeros for data, those of another draw for a scale or a zero point.

    Tables of places in an array that is written in place stay, because they only make sense together.
    """
    found, other = {}, trial.another(DRAWS).drawn.inputs
    arguments = example.case.problem.arguments()
    writes_places = any(argument.role is Role.STATE for argument in arguments)
    for argument in arguments:
        value = example.drawn.inputs.get(argument.name)
        if isinstance(value, np.ndarray) and not (writes_places and argument.elements[0] is ElementKind.S32):
            found[argument.name] = np.zeros_like(value)
            if argument.role is not Role.INPUT:
                with np.errstate(over="ignore"):  # a scale of another element may be infinite in this one
                    found[argument.name][...] = other[argument.name]
    return found


def check_calls(trial: Trial) -> None:
    """Check that many calls give the same outputs, print nothing, warn of nothing and leave no memory allocated."""
    example, total = trial.telling, CALLS if trial.battery == "full" else FEW
    plan = trial.plan(example.case.problem)
    first, calls = trial.once(plan, example), [trial.call(example) for _ in range(total)]
    with silence():
        for call in calls:
            plan.run(**{**calls[0].arguments, **call.written})
    trial.runs += total
    for number, call in enumerate(calls, 1):
        trial.agree(example, call.contents(), first, f"call {number} of {total} in a row")
    if trial.device.processor == "cpu" and trial.battery == "full":
        kept = _kept(partial(plan.run, **calls[0].arguments))
        if kept > _LEAK:
            raise Broken(f"each call leaves {kept:.0f} bytes of memory allocated")


def _kept(launch: Callable[[], Any]) -> float:
    """Return the bytes that a call leaves allocated, on average."""
    tracing, kept = tracemalloc.is_tracing(), 0.0
    tracemalloc.start()
    try:
        for collect in (False, True):  # it is slow, and most kernels leave nothing to collect
            sizes = []
            for _ in range(2):
                for _ in range(_WATCHED):
                    launch()
                if collect:
                    gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
            kept = (sizes[1] - sizes[0]) / _WATCHED
            if kept <= _LEAK:
                break
    finally:
        if not tracing:
            tracemalloc.stop()
    return kept
