"""Generates a function from a checked call. It recognizes the next call like it and launches the kernel.

A loop over checks would cost more than the checks themselves. So the code is generated once for every form of call, as
`dataclasses` generates methods. Differences between calls of one form are passed as values, so there are few forms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from skuda.dispatch.cuda.call import CheckedCall
from skuda.dispatch.cuda.driver import Driver
from skuda.dispatch.cuda.facts import Framework
from skuda.dispatch.cuda.tensor_maps import UNIT
from skuda.dispatch.host.floating import SUMMANDS
from skuda.dispatch.launch_cache import CachedLaunch, PositionalCall
from skuda.registry.errors import DriverError, SkudaError, Unaligned

Send = Callable[[tuple[Any, ...], int, object], None]
"""Enqueues a step. It takes the parameters for `struct`, the stream's handle (0 is the default stream), and the
caller's stream object."""

Parameters = tuple[tuple[Any, ...], ...]
"""The parameters of every step."""


Bound = Callable[[int, object], None]
"""Enqueues a step with fixed parameters. It takes the handle and the stream, as `Send` does."""


class Engine(Protocol):
    """The loaded steps of one launch."""

    @property
    def sends(self) -> Sequence[Send]:
        """The function that enqueues each step."""

    def bound(self, step: int, parameters: tuple[Any, ...]) -> Bound:
        """Return a function that enqueues one step with these parameters."""


class NoSteps:
    """The engine of a launch without steps: a problem of no elements."""

    sends = ()

    def bound(self, step: int, parameters: tuple[Any, ...]) -> Bound:
        """Never called: there is no step."""
        raise IndexError(step, parameters)


class Sender:
    """Enqueues the steps of one plan, in its context.

    With one card, a launch does not check the thread's context first. If the driver refuses the launch because of a
    wrong context, it is repeated in the right one. With several cards, the context is checked first.
    """

    def __init__(self, op: str, engine: Engine, driver: Driver, context: int, *, waits: bool = False) -> None:
        self._op, self._engine, self._driver, self._context, self._waits = op, engine, driver, context, waits
        self.plain = driver.device_count == 1 and not waits

    @property
    def sends(self) -> Sequence[Send]:
        """The function that enqueues each step."""
        return self._engine.sends

    def enqueue(self, parameters: Parameters, handle: int, stream: object) -> None:
        """Enqueue every step in the context. Wait if the arrays' library has no streams."""
        with self._driver.using(self._context):
            self._send(parameters, handle, stream)
            if self._waits:
                self._driver.synchronize(handle)

    def send(self, parameters: Parameters, handle: int, stream: object) -> None:
        """Enqueue every step. Enter the context only if necessary."""
        if not self.plain:
            self.enqueue(parameters, handle, stream)
            return
        try:
            self._send(parameters, handle, stream)
        except Exception as error:  # noqa: BLE001  an error of PyCUDA or the driver
            self.again(error, parameters, handle, stream)

    def again(self, error: Exception, parameters: Parameters, handle: int, stream: object) -> None:
        """Repeat a failed run if the thread's context was wrong. Otherwise raise the error."""
        self.trouble(error)
        self.enqueue(parameters, handle, stream)

    def trouble(self, error: Exception) -> None:
        """Raise an error unless it may come from a wrong context."""
        if isinstance(error, SkudaError) and not isinstance(error, DriverError):
            raise error
        if self._driver.current() == self._context:
            raise DriverError(f"launching {self._op}", str(error)) from error

    def _send(self, parameters: Parameters, handle: int, stream: object) -> None:
        for send, each in zip(self.sends, parameters, strict=True):
            send(each, handle, stream)


class LaunchSetup(NamedTuple):
    """How a plan launches, whatever the call."""

    sender: Sender  # enqueues the steps
    handle_of: Callable[[object], int]  # returns the handle of the caller's stream
    place: Callable[[int], Any] | None
    """Returns the `ScratchBuffers` for a handle. None if there are no buffers."""
    scratch: int  # number of scratch buffers
    outputs: tuple[str, ...]  # names of the op's outputs
    result: Callable[..., Any] | None
    """Builds the op's result from the outputs. None if the result is the only output."""
    failed: Callable[[BaseException], None]  # called with an error, before it is raised


def launch_of(call: CheckedCall, setup: LaunchSetup, positions: PositionalCall | None = None) -> CachedLaunch:
    """Return the function that recognizes calls like `call` and launches them.

    It takes the arrays by name and the caller's stream. With `positions` it takes the arrays by position.
    """
    known: dict[str, Any] = dict(SUMMANDS)
    given = {one.name: f"a{at}" for at, one in enumerate(call.given)}
    if positions is None:
        parameters = "arrays, stream"
        lines = [f"if len(arrays) != {len(given)}:", "    return None", "try:", "    pass"]
        lines += [f"    {word} = arrays[{name!r}]" for name, word in given.items()]
        lines += ["except KeyError:", "    return None"]
    else:
        known |= positions.known
        words = [given.get(name or "", f"o{at}") for at, name in enumerate(positions.names)]
        parameters = ", ".join(words)
        refused = [positions.unless, *(f"{word} is not None" for word in words if word.startswith("o"))]
        lines = [f"if {' or '.join(refused)}:", "    return None", "stream = None"]
    lines += [
        *_checks(call, known),
        *_launch(call, setup, known),
        f"    return {_result(call, setup, known, positions)}",
    ]
    # An array that only this kernel cannot read is no error: the caller runs the next kernel.
    lines += ["except Unaligned:", "    return None"]
    lines.append("except BaseException as error:")
    if setup.place is not None:
        lines.append("    held = None")  # an error keeps the variables of the functions that it has left
    lines += ["    failed(error)", "    raise"]
    made: CachedLaunch = _maker(tuple(known), parameters, "\n".join(lines))(*known.values())
    return made


def _checks(call: CheckedCall, known: dict[str, Any]) -> list[str]:
    """Return the lines that compute every value or return None. Objects that they use are added to `known`."""
    lines: list[str] = []
    grouped: dict[int, str] = {}
    for number, (members, check) in enumerate(call.joint):
        known[f"same{number}"] = check.same
        refused = [f"not same{number}({', '.join(f'a{at}' for at in members)})"]
        if check.unless:
            known[f"strict{number}"] = check.strict
            each = " or ".join(check.unless.format(f"a{at}") for at in members)
            refused.append(f"not strict{number}() and ({each})")
        lines += [f"if {' or '.join(refused)}:", "    return None"]
        grouped |= dict.fromkeys(members, check.address)
    for at, one in enumerate(call.given):
        if at in grouped:
            lines.append(f"v{at} = {grouped[at].format(f'a{at}')}")
            continue
        known[f"guard{at}"] = one.guard
        asked = [f"v{at} = guard{at}(a{at})", f"if v{at} is None:", "    return None"]
        if one.plainly:
            lines += [f"v{at} = a{at}", f"if not ({one.plainly.format(f'a{at}')}):"]
            asked = [f"    {line}" for line in asked]
        lines += asked
    for number, clash in enumerate(call.clashes):
        known |= {f"low{number}": clash.low, f"high{number}": clash.high}
        left, right = f"v{clash.written}", f"v{clash.other}"
        # Interleaved arrays, each in the gaps of the other, do not overlap. The full check decides.
        apart = f" and {left} != {right}" if clash.equal else ""
        lines += [f"if low{number} < {left} - {right} < high{number}{apart}:", "    return None"]
    return lines + [line for at in call.aligned for line in (f"if v{at} % {UNIT}:", "    return None")]


def _launch(call: CheckedCall, setup: LaunchSetup, known: dict[str, Any]) -> list[str]:
    """Return the lines after the checks. Objects that they use are added to `known`."""
    known |= {"current": call.stream, "handle_of": setup.handle_of, "failed": setup.failed, "Unaligned": Unaligned}
    lines = ["handle = current() if stream is None else handle_of(stream)"]
    target = "handle" if call.framework.borrows else "None if stream is None else handle"
    for at, each in enumerate(call.made):
        known |= {f"make{at}": each.make, f"address{at}": each.address}
        lines += [f"m{at} = make{at}({target})", f"w{at} = address{at}(m{at})"]
    names = [f"v{at}" for at in range(len(call.given))] + [f"w{at}" for at in range(len(call.made))]
    names += [f"s{at}" for at in range(setup.scratch)]
    used = {at - len(names) for step in call.indices for at in step if at >= len(names)}
    known |= {f"k{at}": call.constants[at] for at in sorted(used)}
    names += [f"k{at}" for at in range(len(call.constants))]
    packed = ["(" + "".join(f"{names[at]}, " for at in step) + ")" for step in call.indices]
    sending = [f"enqueue(({''.join(f'{each}, ' for each in packed)}), handle, stream)"]
    if setup.sender.plain:
        known["again"] = setup.sender.again
        known |= {f"send{at}": send for at, send in enumerate(setup.sender.sends)}
        again = f"    again(error, ({''.join(f'{each}, ' for each in packed)}), handle, stream)"
        sending = [f"    send{at}({each}, handle, stream)" for at, each in enumerate(packed)]
        sending = ["try:", "    pass", *sending, "except Exception as error:", again]
    else:
        known["enqueue"] = setup.sender.enqueue
    if setup.place is not None:
        known["place"] = setup.place
        lines.append(f"lock, ({''.join(f's{at}, ' for at in range(setup.scratch))}), held = place(handle)")
        sending = ["with lock:", *(f"    {line}" for line in sending)]
    return ["try:", *(f"    {line}" for line in (*lines, *sending))]


def _result(call: CheckedCall, setup: LaunchSetup, known: dict[str, Any], positions: PositionalCall | None) -> str:
    given = {one.name: f"a{at}" for at, one in enumerate(call.given)}
    new = {each.name: f"m{at}" for at, each in enumerate(call.made)}
    if type(call.framework).deliver is not Framework.deliver and new:
        known["deliver"] = call.framework.deliver
        new = {name: f"deliver({array})" for name, array in new.items()}
    if positions is not None:
        results = "".join(f"{new[name]}, " for name in positions.results)
        return f"[{results}]" if positions.several is list else f"({results})" if positions.several else results[:-2]
    outputs = [new[name] if name in new else given[name] for name in setup.outputs]
    if setup.result is None:
        return outputs[0]
    known["result"] = setup.result
    return f"result({', '.join(outputs)})"


@lru_cache(maxsize=256)
def _maker(known: tuple[str, ...], parameters: str, body: str) -> Callable[..., CachedLaunch]:
    """Compile a function with this body. The result takes the values of the free names."""
    inner = "\n".join(f"        {line}" for line in body.splitlines())
    text = f"def maker({', '.join(known)}):\n    def launch({parameters}):\n{inner}\n    return launch\n"
    space: dict[str, Any] = {}
    # The text contains only argument names, which are identifiers, and words of this module.
    exec(compile(text, "<skuda: a checked call>", "exec"), space)  # noqa: S102
    found: Callable[..., CachedLaunch] = space["maker"]
    return found
