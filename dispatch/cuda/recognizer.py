"""Generates a Python function from a checked call. It recognizes the next similar call and launches it.

A loop over checks would cost more than the checks themselves. So the code is generated once for every form of call, as
`dataclasses` generates methods. Differences between calls of one form are passed as values, so there are few forms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from skuda.dispatch.cuda.facts import Guard, JointCheck
from skuda.dispatch.cuda.tensor_maps import UNIT
from skuda.dispatch.host.floating import SUMMANDS
from skuda.registry.errors import Unaligned

Launcher = Callable[[Mapping[str, Any], object], Any]
"""A function of the given arguments and the caller's stream. If the arguments match the checked ones, it enqueues the
kernel and returns the op's result, which is never None. If not, it returns None."""

Send = Callable[[tuple[Any, ...], int, object], None]
"""Enqueues a step. It takes the parameters for `struct`, the stream's handle (0 is the default stream), and the
caller's stream object."""

Parameters = tuple[tuple[Any, ...], ...]
"""The parameters of every step."""


class Sender(Protocol):
    """Enqueues all steps of a run."""

    @property
    def sends(self) -> Sequence[Send]:
        """One function for each step, which is called directly if a launch needs nothing else."""

    @property
    def plain(self) -> bool:
        """Whether `sends` may be called directly. If not, `enqueue` is called."""

    def enqueue(self, parameters: Parameters, handle: int, stream: object) -> None:
        """Enqueue every step."""

    def again(self, error: Exception, parameters: Parameters, handle: int, stream: object) -> None:
        """Repeat a run in which a step failed with `error`, or raise."""


class Clash(NamedTuple):
    """Two arrays that must not overlap, one of which is written.

    Attributes
    ----------
    written, other : int
        Indices of their addresses among the values.
    low, high : int
        They overlap if the address of `written` minus that of `other` lies between these, exclusive.
    equal : bool
        Whether they may be exactly the same array.
    """

    written: int
    other: int
    low: int
    high: int
    equal: bool


class Given(NamedTuple):
    """One argument that was given.

    Attributes
    ----------
    name : str
        The argument.
    guard : Guard
        Returns its value, or None if the argument differs from the checked one.
    plainly : str
        An expression of the argument ``{0}`` and `SUMMANDS`. If it is true, the argument is the value, and the guard is
        not called.
    """

    name: str
    guard: Guard
    plainly: str = ""


class JointGuard(NamedTuple):
    """Arrays of one library (the indices of their arguments) that one check recognizes."""

    members: tuple[int, ...]
    how: JointCheck


class Made(NamedTuple):
    """An output that was left out.

    Attributes
    ----------
    name : str
        The argument.
    make : callable
        Returns a new array, for the stream whose handle is given or the framework's current one (None).
    address : callable
        Returns the address of such an array.
    """

    name: str
    make: Callable[[int | None], Any]
    address: Callable[[Any], int]


class RecognizedLaunch(NamedTuple):
    """The launch of a recognized call.

    Attributes
    ----------
    sender : Sender
        Enqueues the steps.
    indices : tuple of sequence of int
        For each step, the index of each of its parameters among the values, the addresses of the new arrays, the
        scratch addresses and the constants.
    constants : tuple
        The constants.
    made : tuple of Made
        The outputs to allocate.
    current : callable
        Returns the handle of the current stream.
    handle_of : callable
        Returns the handle of the caller's stream.
    switches : bool
        Whether new arrays must be made for the handle even if it is the current stream.
    place : callable or None
        Returns the lock and the addresses of the scratch buffers for a handle. None if there are no buffers.
    scratch : int
        Number of scratch buffers.
    outputs : tuple of str
        Names of the op's outputs.
    result : callable or None
        Builds the op's result from the outputs. None if the result is the only output.
    failed : callable
        Called with an error, before it is raised.
    deliver : callable or None
        Converts a new array for the caller. None if no conversion is needed.
    """

    sender: Sender
    indices: tuple[Sequence[int], ...]
    constants: tuple[Any, ...]
    made: tuple[Made, ...]
    current: Callable[[], int]
    handle_of: Callable[[object], int]
    switches: bool
    place: Callable[[int], Any] | None
    scratch: int
    outputs: tuple[str, ...]
    result: Callable[..., Any] | None
    failed: Callable[[BaseException], None]
    deliver: Callable[[Any], Any] | None


class CallForm(NamedTuple):
    """The part of a checked call that the next call is compared with.

    Attributes
    ----------
    given : tuple of Given
        Every argument.
    joint_guards : tuple of JointGuard
        Arrays that one check recognizes together.
    clashes : tuple of Clash
        Pairs that must not overlap.
    aligned : tuple of int
        Arguments whose addresses must be multiples of 16 bytes.
    """

    given: tuple[Given, ...]
    joint_guards: tuple[JointGuard, ...]
    clashes: tuple[Clash, ...]
    aligned: tuple[int, ...] = ()

    def launcher(self, way: RecognizedLaunch) -> Launcher:
        """Return the function that recognizes a call and launches it."""
        known: dict[str, Any] = dict(SUMMANDS)
        lines = [*self._checks(known), *self._launch(way, known)]
        made: Launcher = _maker(tuple(known), "\n".join(lines))(*known.values())
        return made

    def _checks(self, known: dict[str, Any]) -> list[str]:
        """Return the lines that compute every value or return None. Objects that they use are added to `known`."""
        lines = [f"if len(arrays) != {len(self.given)}:", "    return None", "try:", "    pass"]
        lines += [f"    a{at} = arrays[{one.name!r}]" for at, one in enumerate(self.given)]
        lines += ["except KeyError:", "    return None"]
        grouped: dict[int, str] = {}
        for number, (members, how) in enumerate(self.joint_guards):
            known |= {f"same{number}": how.same, f"strict{number}": how.strict}
            each = " or ".join(how.unless.format(f"a{at}") for at in members)
            refused = f"not same{number}({', '.join(f'a{at}' for at in members)})"
            lines += [f"if {refused} or not strict{number}() and ({each}):", "    return None"]
            grouped |= dict.fromkeys(members, how.address)
        for at, one in enumerate(self.given):
            if at in grouped:
                lines.append(f"v{at} = {grouped[at].format(f'a{at}')}")
                continue
            known[f"guard{at}"] = one.guard
            asked = [f"v{at} = guard{at}(a{at})", f"if v{at} is None:", "    return None"]
            if one.plainly:
                lines += [f"v{at} = a{at}", f"if not ({one.plainly.format(f'a{at}')}):"]
                asked = [f"    {line}" for line in asked]
            lines += asked
        for number, clash in enumerate(self.clashes):
            known |= {f"low{number}": clash.low, f"high{number}": clash.high}
            left, right = f"v{clash.written}", f"v{clash.other}"
            # Interleaved arrays, each in the gaps of the other, do not overlap. The full check decides.
            apart = f" and {left} != {right}" if clash.equal else ""
            lines += [f"if low{number} < {left} - {right} < high{number}{apart}:", "    return None"]
        return lines + [line for at in self.aligned for line in (f"if v{at} % {UNIT}:", "    return None")]

    def _launch(self, way: RecognizedLaunch, known: dict[str, Any]) -> list[str]:
        """Return the lines after the checks. Objects that they use are added to `known`."""
        known |= {"current": way.current, "handle_of": way.handle_of}
        lines = ["handle = current() if stream is None else handle_of(stream)"]
        target = "handle" if way.switches else "None if stream is None else handle"
        for at, each in enumerate(way.made):
            known |= {f"make{at}": each.make, f"address{at}": each.address}
            lines += [f"m{at} = make{at}({target})", f"n{at} = address{at}(m{at})"]
        names = [f"v{at}" for at in range(len(self.given))] + [f"n{at}" for at in range(len(way.made))]
        names += [f"s{at}" for at in range(way.scratch)]
        used = {at - len(names) for step in way.indices for at in step if at >= len(names)}
        known |= {f"k{at}": way.constants[at] for at in sorted(used)}
        names += [f"k{at}" for at in range(len(way.constants))]
        packed = ["(" + "".join(f"{names[at]}, " for at in step) + ")" for step in way.indices]
        sending = [f"enqueue(({''.join(f'{each}, ' for each in packed)}), handle, stream)"]
        if way.sender.plain:
            known["again"] = way.sender.again
            known |= {f"send{at}": send for at, send in enumerate(way.sender.sends)}
            again = f"    again(error, ({''.join(f'{each}, ' for each in packed)}), handle, stream)"
            sending = [f"    send{at}({each}, handle, stream)" for at, each in enumerate(packed)]
            sending = ["try:", "    pass", *sending, "except Exception as error:", again]
        else:
            known["enqueue"] = way.sender.enqueue
        if way.place is not None:
            known["place"] = way.place
            lines.append(f"lock, ({''.join(f's{at}, ' for at in range(way.scratch))}) = place(handle)")
            sending = ["with lock:", *(f"    {line}" for line in sending)]
        known |= {"failed": way.failed, "Unaligned": Unaligned}
        lines += [*sending, f"return {self._result(way, known)}"]
        # An array that only this kernel cannot read is no error: the caller runs the next kernel.
        caught = ["except Unaligned:", "    return None"]
        caught += ["except BaseException as error:", "    failed(error)", "    raise"]
        return ["try:", *(f"    {line}" for line in lines), *caught]

    def _result(self, way: RecognizedLaunch, known: dict[str, Any]) -> str:
        given = {one.name: f"a{at}" for at, one in enumerate(self.given)}
        new = {each.name: f"m{at}" for at, each in enumerate(way.made)}
        if way.deliver is not None and new:
            known["deliver"] = way.deliver
            new = {name: f"deliver({array})" for name, array in new.items()}
        outputs = [new[name] if name in new else given[name] for name in way.outputs]
        if way.result is None:
            return outputs[0]
        known["result"] = way.result
        return f"result({', '.join(outputs)})"


@lru_cache(maxsize=256)
def _maker(known: tuple[str, ...], body: str) -> Callable[..., Launcher]:
    """Compile a function with this body. The result takes the values of the free names."""
    inner = "\n".join(f"        {line}" for line in body.splitlines())
    text = f"def maker({', '.join(known)}):\n    def launch(arrays, stream):\n{inner}\n    return launch\n"
    space: dict[str, Any] = {}
    # The text contains only argument names, which are identifiers, and words of this module.
    exec(compile(text, "<skuda: a checked call>", "exec"), space)  # noqa: S102
    found: Callable[..., Launcher] = space["maker"]
    return found
