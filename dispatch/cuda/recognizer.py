"""A checked call as a generated Python function, which recognizes the next call like it and returns its values.

A loop over checks costs more than the checks themselves. So the code is generated once for every form of call, as
`dataclasses` generates methods. What differs between calls of one form is passed as a value, so forms are few.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from skuda.dispatch.cuda.facts import Guard, JointCheck
from skuda.dispatch.cuda.tensor_maps import UNIT
from skuda.dispatch.host.floating import is_nearest

Recognizer = Callable[[Mapping[str, Any]], Any]
"""Takes the given arguments; returns the requested values if they match those checked, else None."""


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
        Gives its value, or None if it is not like the one checked.
    plainly : str
        An expression of the argument ``{0}``; if it is true, the argument is its own value and no guard is called. It
        may call `is_nearest`.
    """

    name: str
    guard: Guard
    plainly: str = ""


class Group(NamedTuple):
    """Arrays of one library (the indices of their arguments) that one check recognizes."""

    members: tuple[int, ...]
    how: JointCheck


class Form(NamedTuple):
    """The part of a checked call that the next call is compared with.

    Attributes
    ----------
    given : tuple of Given
        Every argument.
    groups : tuple of Group
        Those that one check recognizes.
    clashes : tuple of Clash
        Pairs that must not overlap.
    aligned : tuple of int
        Arguments whose addresses must be multiples of 16 bytes.
    """

    given: tuple[Given, ...]
    groups: tuple[Group, ...]
    clashes: tuple[Clash, ...]
    aligned: tuple[int, ...] = ()

    def values(self) -> Recognizer:
        """Return the function that gives a new list of one value per argument."""
        return self._written("[" + ", ".join(f"v{at}" for at in range(len(self.given))) + "]")

    def parameters(self, indices: Sequence[int], constants: Sequence[Any]) -> Recognizer:
        """Return the function that gives a kernel's parameters as a tuple.

        `indices` holds the index of each parameter among the values followed by the constants.
        """
        count = len(self.given)
        used = {f"k{at - count}": constants[at - count] for at in indices if at >= count}
        names = (f"v{at}" if at < count else f"k{at - count}" for at in indices)
        return self._written("(" + "".join(f"{name}, " for name in names) + ")", used)

    def _written(self, result: str, used: Mapping[str, Any] | None = None) -> Recognizer:
        known: dict[str, Any] = {"is_nearest": is_nearest, **(used or {})}
        lines = [f"if len(arrays) != {len(self.given)}:", "    return None", "try:", "    pass"]
        lines += [f"    a{at} = arrays[{one.name!r}]" for at, one in enumerate(self.given)]
        lines += ["except KeyError:", "    return None"]
        grouped: dict[int, str] = {}
        for number, (members, how) in enumerate(self.groups):
            known[f"same{number}"] = how.same
            refused = [f"not same{number}({', '.join(f'a{at}' for at in members)})"]
            refused += [how.unless.format(f"a{at}") for at in members]
            lines += [f"if {' or '.join(refused)}:", "    return None"]
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
            # Interleaved arrays, each in the other's gaps, do not overlap; the full check decides.
            apart = f" and {left} != {right}" if clash.equal else ""
            lines += [f"if low{number} < {left} - {right} < high{number}{apart}:", "    return None"]
        lines += [line for at in self.aligned for line in (f"if v{at} % {UNIT}:", "    return None")]
        lines.append(f"return {result}")
        made: Recognizer = _maker(tuple(known), "\n".join(lines))(*known.values())
        return made


@lru_cache(maxsize=256)
def _maker(known: tuple[str, ...], body: str) -> Callable[..., Recognizer]:
    """Compile a function with this body; the result takes the values of its free names."""
    inner = "\n".join(f"        {line}" for line in body.splitlines())
    text = f"def maker({', '.join(known)}):\n    def recognize(arrays):\n{inner}\n    return recognize\n"
    space: dict[str, Any] = {}
    # The text contains only argument names, which are identifiers, and words of this module.
    exec(compile(text, "<skuda: a checked call>", "exec"), space)  # noqa: S102
    found: Callable[..., Recognizer] = space["maker"]
    return found
